"""What every operator writes: nothing where memory is shared in a wrong way, nothing where there is no token."""

import re

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.ops.specs import OPERATORS, WHERE, WRITING, arguments, call_of, copied, recorded, results, same, tensors

EMPTY = {
    "batches": {"batch": 0}, "tokens": {"tokens": 0}, "heads": {"heads": 0}, "heads of k": {"kv_heads": 0},
    "any heads": {"heads": 0, "kv_heads": 0},
}  # fmt: skip
QUARTERS = range(-3, 4)
"""Where `sharing` lets a tensor begin, in quarters of the bytes of the one that begins first."""


def sharing(call: dict, written: str, other: str, quarters: int) -> dict:
    """The call, with the tensor ``other`` in the memory of the tensor ``written``.

    Args:
        quarters: where ``other`` begins, in quarters of the bytes of ``written``; below 0, where ``written`` begins, in
            quarters of the bytes of ``other``.
    """
    x, y = call[written], call[other]
    apart = abs(quarters) * (x if quarters > 0 else y).nbytes // 4
    apart -= apart % max(x.itemsize, y.itemsize)
    memory = torch.zeros((apart + x.nbytes + y.nbytes) // 8 * 8 + 8, dtype=torch.uint8)
    starts = (0, apart) if quarters > 0 else (apart, 0)
    first, second = (
        memory[start : start + t.nbytes].view(t.dtype).view(t.shape) for start, t in zip(starts, (x, y), strict=True)
    )
    return call | {written: first.copy_(x), other: second.copy_(y)}


@pytest.mark.parametrize("where", ["positions", "offsets"])
@pytest.mark.parametrize("operator", WRITING)
def test_inputs_in_the_memory_of_outputs_are_refused_or_right(torch_backend, operator, where):
    """A refused call writes nothing. A call that is prepared looks at the memory as well."""
    valid = call_of(operator, where)
    assert same(*(results(operator, copied(valid)) for _ in range(2)))
    named = [x for x in tensors(valid) if x in valid]
    pairs = [(written, other) for written in OPERATORS[operator].written for other in named if other != written]
    for written, other, quarters in ((*pair, quarters) for pair in pairs for quarters in QUARTERS):
        call = sharing(copied(valid), written, other, quarters)
        before = copied(call)
        try:
            found = results(operator, call)
        except ValueError as error:
            assert re.match(rf"({'|'.join(valid)}): expected .*memory disjoint", str(error)), error
            assert same([*tensors(call).values()], [*tensors(before).values()]), (written, other)
        else:
            assert same(found, results(operator, before)), (written, other, quarters)


@pytest.mark.parametrize("operator", WRITING)
def test_what_is_written_is_returned_as_it_was_given(torch_backend, operator):
    call = arguments(operator)
    found = results(operator, call)
    given = [x for x in (*OPERATORS[operator].written, "q") if x in ("q", "q_out", "out", "key_cache")]
    if not operator.startswith("qkv") and not OPERATORS[operator].options.get("consume"):
        assert any(found[0] is call[x] for x in given if x in call)


@pytest.mark.parametrize("operator", WRITING)
def test_autograd_learns_of_what_is_overwritten(torch_backend, operator):
    """Nothing takes part in a gradient, but another operation has saved the tensor for one."""
    for written in OPERATORS[operator].written:
        call = arguments(operator)
        if call[written].is_floating_point() and call[written].itemsize > 1:
            product = (call[written] * torch.ones((), dtype=call[written].dtype, requires_grad=True)).sum()
            results(operator, call)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                product.backward()


@pytest.mark.parametrize("operator", WRITING)
def test_transforms_of_a_call_that_writes_are_refused_by_name(torch_backend, operator):
    """Of every tensor that a caller may transform. Tables without gradients are refused as such."""
    call = arguments(operator)
    for key, x in tensors(call).items():

        def function(x, key=key):
            return results(operator, call | {key: x})[0].float().sum()

        def tangent(x, function=function):
            return torch.func.jvp(function, (x,), (torch.ones_like(x),))

        transforms = [torch.func.grad(function), tangent] * (x.is_floating_point() and x.itemsize > 1)
        for transform, given in ((torch.func.vmap(function), x[None].clone()), *((t, x.clone()) for t in transforms)):
            with pytest.raises((NotImplementedError, ValueError), match=r"^\w+: (expected|transforms of torch.func)"):
                transform(given)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("missing", EMPTY)
@pytest.mark.parametrize("operator", OPERATORS)
def test_calls_with_nothing_to_rotate(device, operator, missing, where):
    """Gradients are zeros of the shapes of the leaves."""
    if operator.startswith("qkv") and "heads" in missing:
        pytest.skip("a product has a head")
    call = call_of(operator, where, device=device, **EMPTY[missing])
    ends = [x for x in (*OPERATORS[operator].written, *OPERATORS[operator].leaves) if x in call]
    shapes = [call[x].shape for x in ends]
    found = recorded(operator, call)
    found = found[len(found) - len(ends) :]
    assert [y.shape for y in found] == shapes
    assert OPERATORS[operator].written or not any(y.isnan().any() for y in found)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("operator", OPERATORS)
def test_tensors_without_data_give_the_shapes_and_strides(device, operator, where):
    """Meta and fake tensors, with gradients, in strides that are not contiguous."""

    call = call_of(operator, where, seq_format="bhsd", device=device)
    for x in {"q", "k", "kv"} - {*OPERATORS[operator].written}:
        if x in call and call[x].ndim == 4:
            call[x] = call[x].transpose(1, 2).contiguous().transpose(1, 2)

    def described(made):
        given = {key: made(x) if isinstance(x, torch.Tensor) else x for key, x in call.items()}
        given |= {key: tuple(map(made, x)) for key, x in call.items() if key in ("weight", "bias") and type(x) is tuple}
        return [(x.shape, x.stride(), x.dtype) for x in recorded(operator, given)]

    wanted = described(torch.clone)
    assert described(lambda x: x.to("meta")) == wanted
    with FakeTensorMode() as mode:
        assert described(mode.from_tensor) == wanted
