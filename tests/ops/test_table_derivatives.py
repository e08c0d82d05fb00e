"""Every derivative of every operator that has one is the derivative of its definition.

Arithmetic is in float64, so that both differ by roundings of a few products of numbers of normal size.
"""

import pytest
import torch

from tests.ops.specs import (
    DIFFERENTIABLE,
    OPERATORS,
    WHERE,
    call_of,
    copied,
    defined,
    has_position,
    recorded,
    results,
    same,
)

pytestmark = pytest.mark.usefixtures("torch_backend")
FORMS = [("split_half", "thd"), ("interleaved", "bshd")]


def assert_close(found, expected, where="rows"):
    """Cosines and sines that are computed from frequencies are float32."""
    limit = 1e-5 if where == "frequencies" else 1e-10
    torch.testing.assert_close(found, expected, rtol=limit, atol=limit)


def call_and_leaves(operator, where, layout="split_half", seq_format="thd"):
    """A small call; a token without a position has heads of zeros, and there is no eps that would hide a division."""
    sizes = {"batch": 1, "tokens": 2} if seq_format == "thd" else {"batch": 2, "tokens": 2}
    call = call_of(operator, where, layout, seq_format=seq_format, heads=2, dtype=torch.float64, **sizes)
    if "eps" in OPERATORS[operator].parameters and "q" in call:
        call = call | {"eps": 0.0}
        for x in "qk":
            call[x] = call[x] * has_position(call[x], call)
    return call, [x for x in OPERATORS[operator].leaves if x in call]


def function_of(operator, call, leaves, how=results):
    def function(*values):
        found = how(operator, call | dict(zip(leaves, values, strict=True)))
        return tuple(found)

    return function


@pytest.mark.parametrize("layout, seq_format", FORMS)
@pytest.mark.parametrize("operator", DIFFERENTIABLE)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("transform", ["vjp", "jvp", "vjp of vjp", "jvp of vjp"])
def test_derivatives_are_those_of_the_definition(operator, where, transform, layout, seq_format):
    """With respect to each leaf, and to all of them."""
    call, leaves = call_and_leaves(operator, where, layout, seq_format)

    def derivative(how, wrt):
        torch.manual_seed(1)
        function, values = function_of(operator, call, wrt, how), tuple(call[x] for x in wrt)
        tangents = tuple(torch.randn_like(x) for x in values)

        def vjp(*values):
            ys, pull_back = torch.func.vjp(function, *values)
            torch.manual_seed(2)
            return pull_back(tuple(torch.randn_like(y) + y for y in ys))

        if transform == "vjp":
            return vjp(*values)
        if transform == "jvp":
            return torch.func.jvp(function, values, tangents)[1]
        if transform == "jvp of vjp":
            return torch.func.jvp(vjp, values, tangents)[1]
        return torch.func.vjp(vjp, *values)[1](tangents)

    for wrt in ([*zip(leaves)] if transform in ("vjp", "jvp") else []) + [tuple(leaves)]:
        assert_close(derivative(results, wrt), derivative(defined, wrt), where)


@pytest.mark.parametrize("layout, seq_format", FORMS)
@pytest.mark.parametrize("operator", DIFFERENTIABLE)
@pytest.mark.parametrize("where", WHERE)
def test_gradients_of_autograd_are_those_of_torch_func(operator, where, layout, seq_format):
    """Of some leaves, of some results, of many cotangents at once; and a second time unless the first was the last."""
    call, leaves = call_and_leaves(operator, where, layout, seq_format)
    values, spec = [call[x].requires_grad_() for x in leaves], OPERATORS[operator]
    ys = results(operator, call)
    weights = [torch.randn_like(y) for y in ys]
    _, pull_back = torch.func.vjp(function_of(operator, call, leaves), *(x.detach() for x in values))
    expected = pull_back(tuple(weights))
    assert_close(torch.autograd.grad(ys, values, weights, retain_graph=True), expected)
    for i, y in enumerate(ys):
        zeros = [w if i == j else torch.zeros_like(w) for j, w in enumerate(weights)]
        found = torch.autograd.grad(y, values, weights[i], retain_graph=True, materialize_grads=True)
        assert_close(found, pull_back(tuple(zeros)))
    many = [torch.stack((w, -2 * w)) for w in weights]
    batched = torch.autograd.grad(ys, values, many, is_grads_batched=True, retain_graph=True)
    mapped = torch.func.vmap(lambda *weights: torch.autograd.grad(ys, values, weights, retain_graph=True))(*many)
    for found in (batched, mapped):
        assert_close(found, tuple(torch.stack((g, -2 * g)) for g in expected))
    for i, x in enumerate(leaves):
        of_one = {key: t.detach() if key in leaves and key != x else t for key, t in call.items()}
        alone = results(operator, of_one)
        depends = [(y.requires_grad, z.requires_grad) for y, z in zip(alone, defined(operator, of_one), strict=True)]
        assert all(y == z if operator.startswith("apply") else y or not z for y, z in depends)
        used = [(y, w) for y, w in zip(alone, weights, strict=True) if y.requires_grad]
        (found,) = torch.autograd.grad([y for y, _ in used], values[i], [w for _, w in used])
        assert_close(found, expected[i])
        if spec.once:
            (first,) = torch.autograd.grad(
                sum((y**2).sum() for y in results(operator, of_one)), values[i], create_graph=True
            )
            with pytest.raises(NotImplementedError, match="second derivatives are unsupported"):
                first.sum().backward()
    if not spec.once:
        plain = [x.detach().requires_grad_() for x in values]
        assert torch.autograd.gradgradcheck(function_of(operator, call, leaves), plain, fast_mode=True)


BATCHED = {
    "all leaves": lambda operator, leaves: dict.fromkeys(leaves, 0),
    "one leaf along its last axis": lambda operator, leaves: {leaves[-1]: -1},
    "one leaf along another axis": lambda operator, leaves: {leaves[0]: 1},
    "tables": lambda operator, leaves: {"cos": 0, "sin": 1},
    "positions": lambda operator, leaves: {"positions": 0, "offsets": 0},
    "everything": lambda operator, leaves: (
        {"cos": 2, "sin": 0, "positions": -1, "offsets": 0} | {x: i % 2 for i, x in enumerate(leaves)}
    ),
}


@pytest.mark.parametrize("layout, seq_format", [*FORMS, ("split_half", "sbhd"), ("interleaved", "bhsd")])
@pytest.mark.parametrize("operator", DIFFERENTIABLE)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("batched", BATCHED)
def test_vmap_is_a_loop(operator, where, batched, layout, seq_format):
    """Also over gradients, and within another vmap."""
    calls = [call_and_leaves(operator, where, layout, seq_format) for _ in range(3)]
    (call, leaves), dims = calls[0], BATCHED[batched](operator, calls[0][1])
    call.pop("eps", None)  # examples of other positions have the heads of zeros
    dims = {key: dim for key, dim in dims.items() if isinstance(call.get(key), torch.Tensor)}
    if not dims:
        pytest.skip("the call has no such tensors")
    many = [torch.stack([one[key] for one, _ in calls], dim) for key, dim in dims.items()]

    def gradient(*values):
        given = call | dict(zip(dims, values, strict=True))
        return torch.func.grad(
            lambda *xs: sum(y.sin().sum() for y in function_of(operator, given, leaves)(*xs)), tuple(range(len(leaves)))
        )(*(given[x] for x in leaves))

    for function in (function_of(operator, call, tuple(dims)), gradient):
        found = torch.func.vmap(function, tuple(dims.values()))(*many)
        loop = [function(*(one[key] for key in dims)) for one, _ in calls]
        assert_close(found, tuple(map(torch.stack, zip(*loop, strict=True))))
    twice = [torch.stack((x, x.flip(0) if x.is_floating_point() else x)) for x in many]
    inner = torch.func.vmap(function_of(operator, call, tuple(dims)), tuple(dims.values()))
    found, expected = torch.func.vmap(inner)(*twice), [inner(*(x[i] for x in twice)) for i in range(2)]
    assert_close(found, tuple(map(torch.stack, zip(*expected, strict=True))))


@pytest.mark.parametrize("operator", DIFFERENTIABLE)
def test_gradients_have_the_same_bits_every_time(operator):
    call = call_of(operator, "positions")
    assert same(recorded(operator, copied(call)), recorded(operator, call))
