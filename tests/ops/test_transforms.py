"""PyTorch's uses of a function besides calling it: compile, trace, checkpoint, autocast, differentiate."""

import copy
import itertools
from contextlib import nullcontext

import pytest
import torch
import torch._dynamo.testing

import ropelab
from ropelab import reference
from ropelab.call.rotation import rotate
from ropelab.kernels import INTERPRETED, uses_triton
from tests.support import assert_rotated, draw


def inputs(device, seq_len=5, rows=40):
    q = draw(2, seq_len, 3, 16, device=device)
    k = draw(2, seq_len, 1, 16, device=device)
    return q, k, *ropelab.rotary_table(rows, 12, device=device)


@pytest.fixture
def compiler():
    """Counts compilations; ``dynamic`` from the start, as for a loop over sequences of any length."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def compiled(function):
        return torch.compile(function, fullgraph=True, dynamic=True, backend=counter)

    compiled.counter = counter
    yield compiled
    torch._dynamo.reset()


@pytest.mark.parametrize("where", ["rows", "positions", "offset", "offsets", "in place", "thd"])
def test_compiles_once_for_any_number_of_tokens(device, compiler, where):
    def rope(q, k, cos, sin, extra):
        if where == "thd":
            q, k = q.flatten(0, 1), k.flatten(0, 1)
            return ropelab.apply_rope(q, k, cos=cos, sin=sin, seq_format="thd", positions=extra)
        options = {
            "positions": {"positions": extra}, "offset": {"offsets": extra}, "offsets": {"offsets": extra},
            "in place": {"inplace": True}, "rows": {},
        }[where]  # fmt: skip
        return ropelab.apply_rope(q * 1, k * 1, cos=cos, sin=sin, **options)

    fast = compiler(rope)
    for seq_len in (5, 9, 14):
        q, k, cos, sin = inputs(device, seq_len)
        extra = {
            "positions": torch.randint(-9, 30, (2, seq_len), device=device),
            "offset": seq_len + 2,
            "offsets": torch.tensor([3, 7], device=device),
            "thd": torch.randint(0, 30, (2 * seq_len,), device=device),
        }.get(where)
        weights = torch.randn_like(q), torch.randn_like(k)
        results = []
        for function in (rope, fast):
            leaves = q.clone().requires_grad_(), k.clone().requires_grad_()
            rotated = function(*leaves, cos, sin, extra)
            loss = sum((y * w.reshape(y.shape)).sum() for y, w in zip(rotated, weights, strict=True))
            results.append((*rotated, *torch.autograd.grad(loss, leaves)))
        for eager, compiled in zip(*results, strict=True):
            assert torch.equal(eager, compiled)
        with torch.no_grad():
            assert torch.equal(fast(q, k, cos, sin, extra)[0], results[0][0])
    # One with and one without gradients.
    assert compiler.counter.frame_count == 2


@pytest.mark.parametrize("overwrites", [False, True])
def test_operators_pass_opcheck(device, overwrites):
    q, k, cos, sin = inputs(device)
    positions = torch.randint(-35, 36, (2, 5), device=device)
    for xs in ([q], [q, k], [q.transpose(1, 2), k.transpose(1, 2)]):
        seq_format = "bhsd" if xs[0].shape[1] == 3 else "bshd"
        along = positions.expand(3, -1, -1), False, [0, 1, 2] * 2
        for given, *flags in ((None, False, None), (positions, False, None), (positions[:, 0], True, None), along):
            arguments = (xs, cos, sin, given, 0, "split_half")
            options = "interleaved", seq_format, (2, 14), *flags, True, overwrites
            torch.library.opcheck(rotate, (*arguments, *options))


def test_traces_with_fake_tensors(device):
    q, k, cos, sin = inputs(device)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.empty(2, 5, 3, 16, device=device)
        y = ropelab.apply_rope(fake, cos=torch.empty(9, 6, device=device), sin=torch.empty(9, 6, device=device))
        assert y.shape == fake.shape and y.dtype == fake.dtype and y.device == fake.device


def test_exports(device):
    class Attention(torch.nn.Module):
        def forward(self, q, k, cos, sin):
            return ropelab.apply_rope(q, k, cos=cos, sin=sin, layout="interleaved")

    q, k, cos, sin = inputs(device)
    exported = torch.export.export(Attention(), (q, k, cos, sin)).module()
    for actual, expected in zip(exported(q, k, cos, sin), Attention()(q, k, cos, sin), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(device, use_reentrant):
    q, k, cos, sin = inputs(device)
    weight = torch.randn_like(q)

    def rope(q, k):
        rotated_q, rotated_k = ropelab.apply_rope(q * 2, k * 2, cos=cos, sin=sin)
        return rotated_q * weight + rotated_k

    leaves = q.requires_grad_(), k.requires_grad_()
    expected = torch.autograd.grad(rope(*leaves).sum(), leaves)
    loss = torch.utils.checkpoint.checkpoint(rope, *leaves, use_reentrant=use_reentrant).sum()
    loss.backward()  # reentrant checkpoints know no autograd.grad
    for actual, e in zip((q.grad, k.grad), expected, strict=True):
        assert torch.equal(actual, e)


def _layer(q, k, cos, sin):
    q, k = ropelab.apply_rope(q, k, cos=cos, sin=sin, offsets=1)
    return q * 2, k


class Layer(torch.nn.Module):
    """A part of a model that rotates: by a module of its own, and by all functions that are differentiable."""

    def __init__(self):
        super().__init__()
        self.rotary, self.scale = ropelab.RotaryEmbedding(16), torch.nn.Parameter(torch.ones(16))

    def forward(self, q, k, cos, sin):
        q, k = self.rotary(q * self.scale, k, seq_len=40)
        q, k = ropelab.apply_qk_norm_rope(q, k, self.scale, self.scale, cos=cos, sin=sin)
        q = ropelab.rotate_mla_query(q, 4, cos=cos, sin=sin)
        query, key, value = ropelab.assemble_mla(q, q, k[..., 4:], cos=cos, sin=sin)
        key_of_kv, _ = ropelab.assemble_mla_kv(q, k[..., 4:], 4, cos=cos, sin=sin)
        of_x, _, _ = ropelab.qkv_rope(q.flatten(2), torch.ones(48, 48), q_heads=1, k_heads=1, cos=cos, sin=sin)
        return query, key, value, key_of_kv, of_x


@pytest.mark.parametrize("name", ["function", "module", "model"])
def test_fx_traces_a_call_as_one_node(torch_backend, name):
    q, k, cos, sin = inputs("cpu")
    made = {"function": _layer, "module": ropelab.RotaryEmbedding(16), "model": Layer()}[name]
    arguments = (q, k) if name == "module" else (q, k, cos, sin)
    traced = torch.fx.symbolic_trace(made)
    for f in (traced, copy.deepcopy(traced)):
        for found, expected in zip(f(*arguments), made(*arguments), strict=True):
            assert torch.equal(found, expected)
    if name == "model":
        assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == ["rotary"]


def test_vjp_is_the_transposed_rotation(device):
    q, k, cos, sin = inputs(device)
    rotated, pull_back = torch.func.vjp(lambda q, k: ropelab.apply_rope(q, k, cos=cos, sin=sin), q, k)
    cotangents = tuple(torch.randn_like(y) for y in rotated)
    for grad, g in zip(pull_back(cotangents), cotangents, strict=True):
        assert_rotated(grad, g, cos, sin, layout="split_half", inverse=True)


@pytest.mark.parametrize("positions", [None, [4, -3, 0, 9, 2]])
def test_jvp_is_the_rotation_and_the_turn_of_the_tables(device, positions):
    q, k, cos, sin = inputs(device)
    where = {"positions": None if positions is None else torch.tensor(positions, device=device)}

    def rope(q, k, cos, sin):
        return ropelab.apply_rope(q, k, cos=cos, sin=sin, **where)

    tangents = tuple(torch.randn_like(x) for x in (q, k, cos, sin))
    _, actual = torch.func.jvp(rope, (q, k, cos, sin), tangents)
    _, of_inputs = torch.func.jvp(lambda q, k: rope(q, k, cos, sin), (q, k), tangents[:2])
    for a, b, x, t in zip(actual, of_inputs, (q, k), tangents[:2], strict=True):
        assert_rotated(b, t, cos, sin, layout="split_half", **where)
        turned = ropelab.reference.rotate(x, *tangents[2:], **where)
        turned[..., 12:] = 0
        torch.testing.assert_close(a.double(), b.double() + turned, rtol=1e-5, atol=1e-5)


def test_forward_over_reverse(device):
    """The Hessian-vector product of sum (R x)^2 / 2 is the product with the identity."""
    q, _, cos, sin = inputs(device)
    v = torch.randn_like(q)
    gradient = torch.func.grad(lambda x: ropelab.apply_rope(x, cos=cos, sin=sin).square().sum() / 2)
    _, product = torch.func.jvp(gradient, (q,), (v,))
    torch.testing.assert_close(product, v)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vmap])
def test_overwriting_is_refused_under_transforms(device, transform):
    q, _, cos, sin = inputs(device)
    with pytest.raises(NotImplementedError, match="inplace: expected False under torch.func transforms"):
        transform(lambda x: ropelab.apply_rope(x, cos=cos, sin=sin, inplace=True).sum())(q)


# name -> (axes of q, k, cos, sin and positions along which the examples lie), None: examples share it
BATCHED = {
    "q and k": (0, 0, None, None, None),
    "q alone, another axis": (2, None, None, None, None),
    "k along the last axis": (None, -1, None, None, None),
    "tables": (None, 0, 0, 1, None),
    "positions": (0, 0, None, None, 1),
    "positions alone": (None, None, None, None, 0),
    "all": (1, 0, 2, 0, 0),
}


KINDS = "rows", "positions [S]", "positions [1, S]", "positions [B, S]", "offsets"


@pytest.mark.parametrize("seq_format", ["bshd", "sbhd", "bhsd", "thd"])
def test_vmap_is_a_loop(device, seq_format):
    every = list(itertools.product(BATCHED, KINDS))
    interpreted = INTERPRETED and uses_triton(torch.empty(0, device=device))
    for name, kind in every[:: 9 if interpreted else 1]:  # the interpreter is slow
        hold_vmap_to_a_loop(device, name, seq_format, kind)


def hold_vmap_to_a_loop(device, name, seq_format, kind):
    q_dim, k_dim, cos_dim, sin_dim, positions_dim = BATCHED[name]
    batch, examples = 1 if seq_format == "thd" else 2, 3
    if kind == "rows" and positions_dim is not None:
        positions_dim = None
        if name == "positions alone":
            q_dim = 0

    def made(dim, make):
        return make() if dim is None else torch.stack([make() for _ in range(examples)], dim)

    def tables():  # of each batch where the format has batches, of all otherwise
        return torch.randn(40, 6, device=device) if seq_format == "thd" else torch.randn(2, 40, 6, device=device)

    shapes = {"positions [S]": (5,), "positions [1, S]": (1, 5), "positions [B, S]": (batch, 5), "offsets": (batch,)}
    arguments = [
        made(q_dim, lambda: draw(batch, 5, 3, 16, seq_format=seq_format, device=device)),
        made(k_dim, lambda: draw(batch, 5, 1, 16, seq_format=seq_format, device=device)),
        made(cos_dim, tables), made(sin_dim, tables),
        None if kind == "rows" else made(positions_dim, lambda: torch.randint(-30, 30, shapes[kind], device=device)),
    ]  # fmt: skip
    dims = (q_dim, k_dim, cos_dim, sin_dim, positions_dim)

    def rope(q, k, cos, sin, positions):
        where = {"offsets": positions} if kind == "offsets" else {"positions": positions}
        where = {} if positions is None else where
        return ropelab.apply_rope(q, k, cos=cos, sin=sin, seq_format=seq_format, **where)

    actual = torch.func.vmap(rope, dims)(*arguments)
    loop = [
        rope(*(x if d is None else x.select(d, i) for x, d in zip(arguments, dims, strict=True)))
        for i in range(examples)
    ]
    for a, expected in zip(actual, zip(*loop, strict=True), strict=True):
        assert torch.equal(a, torch.stack(expected))


def test_vmap_within_vmap_and_over_gradients(device):
    q, _, cos, sin = inputs(device)
    q = torch.stack([q, 2 * q])

    def loss(x):  # of one sequence, [S, H, D]
        return ropelab.apply_rope(x, cos=cos, sin=sin, seq_format="thd").sin().sum()

    grads = torch.func.vmap(torch.func.vmap(torch.func.grad(loss)))(q)
    expected = torch.stack([torch.stack([torch.func.grad(loss)(x) for x in xs]) for xs in q])
    assert torch.equal(grads, expected)


def test_vmap_without_tables(device):
    q, k, *_ = inputs(device)
    frequencies = ropelab.rotary_frequencies(12, device=device)
    q = torch.stack([q, 2 * q])
    actual = torch.func.vmap(lambda q: ropelab.apply_rope(q, k, frequencies=frequencies)[0])(q)
    assert torch.equal(actual, torch.stack([ropelab.apply_rope(x, k, frequencies=frequencies)[0] for x in q]))
    with pytest.raises(NotImplementedError, match="frequencies: expected the same frequencies for all examples"):
        torch.func.vmap(lambda f: ropelab.apply_rope(k, frequencies=f))(torch.stack([frequencies] * 2))


def rotation_matrix(rope, x):
    """The columns R e_i, one call each."""
    basis = torch.eye(x.numel(), dtype=x.dtype, device=x.device)
    return torch.stack([rope(e.view_as(x)) for e in basis], -1)


@pytest.mark.parametrize("jacobian", [torch.func.jacrev, torch.func.jacfwd])
@pytest.mark.parametrize("inverse", [False, True])
def test_jacobian_is_the_matrix(device, jacobian, inverse):
    x = torch.randn(3, 2, 8, device=device)
    cos, sin = ropelab.rotary_table(9, 6, device=device)
    positions = torch.tensor([4, -3, 0], device=device)

    def rope(x):
        options = {"seq_format": "thd", "positions": positions, "inverse": inverse}
        return ropelab.apply_rope(x, cos=cos, sin=sin, **options)

    actual = jacobian(rope)(x).flatten(3)
    assert torch.equal(actual, rotation_matrix(rope, x))


def test_jacobian_of_the_tables(device):
    """R is linear in the tables, so its derivative along them is the result for a table of ones."""
    x = torch.randn(2, 1, 4, dtype=torch.float64, device=device)
    cos, sin = (torch.randn(5, 2, dtype=torch.float64, device=device) for _ in range(2))

    def rope(cos, sin):
        return ropelab.apply_rope(x, cos=cos, sin=sin, seq_format="thd")

    backward = torch.func.jacrev(rope, (0, 1))(cos, sin)
    forward = torch.func.jacfwd(rope, (0, 1))(cos, sin)
    for b, f in zip(backward, forward, strict=True):
        torch.testing.assert_close(b, f)
        assert b.abs().sum() > 0


def test_hessian(device):
    """The Hessian of sum of (R x)^4 / 12 is R^T diag((R x)^2) R."""
    x = torch.randn(2, 1, 4, dtype=torch.float64, device=device)
    cos, sin = ropelab.rotary_table(2, 4, dtype=torch.float64, device=device)

    def rope(x):
        return ropelab.apply_rope(x, cos=cos, sin=sin, seq_format="thd")

    actual = torch.func.hessian(lambda x: rope(x).pow(4).sum() / 12)(x).reshape(8, 8)
    matrix = rotation_matrix(rope, x).reshape(8, 8)
    torch.testing.assert_close(actual, matrix.T @ (rope(x).flatten()[:, None].square() * matrix))


@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_vectorized_jacobian_of_autograd(device, strategy):
    """Autograd's vectorized Jacobian batches gradients, or tangents, in a way of its own."""
    x = torch.randn(3, 2, 8, device=device)
    cos, sin = ropelab.rotary_table(3, 6, device=device)

    def rope(x):
        return ropelab.apply_rope(x, cos=cos, sin=sin, seq_format="thd")

    actual = torch.autograd.functional.jacobian(rope, x, vectorize=True, strategy=strategy).flatten(3)
    assert torch.equal(actual, rotation_matrix(rope, x))


def test_gradients_of_many_results_at_once(device):
    q, k, cos, sin = inputs(device)
    leaves = q.requires_grad_(), k.requires_grad_()
    ys = ropelab.apply_rope(*leaves, cos=cos, sin=sin)
    cotangents = tuple(torch.randn(4, *y.shape, device=device) for y in ys)
    actual = torch.autograd.grad(ys, leaves, cotangents, is_grads_batched=True, retain_graph=True)
    for i in range(4):
        expected = torch.autograd.grad(ys, leaves, [g[i] for g in cotangents], retain_graph=True)
        for a, e in zip(actual, expected, strict=True):
            assert torch.equal(a[i], e)


def test_saved_tensor_hooks(device):
    q, k, cos, sin = inputs(device)
    leaves = q.requires_grad_(), k.requires_grad_(), cos.requires_grad_(), sin.requires_grad_()
    weights = torch.randn_like(q), torch.randn_like(k)
    seen, grads = [], []

    def pack(x):
        seen.append(x)
        return x.detach().cpu().clone()

    for hooks in (torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x.to(device)), nullcontext()):
        with hooks:
            ys = ropelab.apply_rope(*leaves[:2], cos=cos, sin=sin)
        grads.append(torch.autograd.grad(ys, leaves, weights))
    assert len(seen) == 4
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("inplace", [False, True])
def test_inference_mode(device, inplace):
    q, k, cos, sin = inputs(device)
    expected = ropelab.apply_rope(q, k, cos=cos, sin=sin)
    with torch.inference_mode():
        for _ in range(2):
            fresh = q.clone(), k.clone()  # inference tensors
            for actual, e in zip(ropelab.apply_rope(*fresh, cos=cos, sin=sin, inplace=inplace), expected, strict=True):
                assert torch.equal(actual, e)
        if inplace:
            q, k = ropelab.apply_rope(q, k, cos=cos, sin=sin, inplace=True)
            assert torch.equal(q, expected[0])
    leaf = torch.randn_like(q).requires_grad_()
    (grad,) = torch.autograd.grad(ropelab.apply_rope(leaf, cos=cos, sin=sin), leaf, expected[0])
    assert_rotated(grad, expected[0], cos, sin, layout="split_half", inverse=True)


def normed(x, weight, positions):
    """The RMS norm of heads without an eps; tokens without a position count as ones."""
    nowhere = torch.atleast_2d(positions == ropelab.NO_POSITION).all(0)
    x = torch.where(nowhere[:, None, None], 1.0, x)
    return x / x.square().mean(-1, keepdim=True).sqrt() * weight


def _heads(x, weight, bias):
    return (x @ weight.T + bias).unflatten(-1, (3, 1, 4)).unbind(-3)


DIFFERENTIABLE = {
    "apply_rope": (
        lambda q, k, cos, sin, **options: ropelab.apply_rope(q, k, cos=cos, sin=sin, **options),
        lambda q, k, cos, sin, **options: tuple(reference.rotate(x, cos, sin, **options) for x in (q, k)),
    ),
    "apply_qk_norm_rope": (
        lambda q, k, q_weight, k_weight, cos, sin, **options: ropelab.apply_qk_norm_rope(
            q, k, q_weight, k_weight, cos=cos, sin=sin, eps=0, **options
        ),
        lambda q, k, q_weight, k_weight, cos, sin, **options: tuple(
            reference.rotate(normed(x, weight, options["positions"]), cos, sin, **options)
            for x, weight in ((q, q_weight), (k, k_weight))
        ),
    ),
    "assemble_mla": (
        lambda q, kv, k_pe, cos, sin, **options: ropelab.assemble_mla(q, kv, k_pe, cos=cos, sin=sin, **options),
        lambda q, kv, k_pe, cos, sin, **options: (
            reference.rotate(q, cos, sin, rotary_slice=(2, 6), **options),
            reference.rotate(
                torch.cat((kv[..., :2], k_pe.expand(-1, kv.shape[1], -1)), -1), cos, sin, rotary_slice=(2, 6), **options
            ),
            kv[..., 2:],
        ),
    ),
    "qkv_rope": (
        lambda x, weight, bias, cos, sin, **options: ropelab.qkv_rope(
            x, weight, bias, q_heads=1, k_heads=1, cos=cos, sin=sin, **options
        ),
        lambda x, weight, bias, cos, sin, **options: (
            *(reference.rotate(h, cos, sin, **options) for h in _heads(x, weight, bias)[:2]),
            _heads(x, weight, bias)[2],
        ),
    ),
}
"""A function of its tensors and its tables, and the same function in torch operations in float64."""
WITH_AXES = "apply_rope", "apply_qk_norm_rope", "qkv_rope"


@pytest.mark.parametrize("transform", ["jacrev", "jacfwd", "hessian"])
@pytest.mark.parametrize(
    ("name", "axes"), [*((name, None) for name in DIFFERENTIABLE), *((name, (0, 1)) for name in WITH_AXES)]
)
def test_derivatives_are_those_of_the_definition(device, name, axes, transform):
    """Also with respect to some of the arguments, and for a token without a position whose head holds zeros.

    With axes, another token has a position along one of the axes alone.
    """

    def draw(*shape):
        return torch.randn(shape, dtype=torch.float64, device=device)

    function, definition = DIFFERENTIABLE[name]
    tensors = {
        "apply_rope": [(2, 2, 4), (2, 1, 4), (9, 2), (9, 2)],
        "apply_qk_norm_rope": [(2, 2, 4), (2, 1, 4), (4,), (4,)],
        "assemble_mla": [(2, 2, 6), (2, 2, 3), (2, 1, 4)],
        "qkv_rope": [(2, 3), (12, 3), (12,)],
    }[name]
    xs = [draw(*shape) for shape in tensors]
    tables = {} if name == "apply_rope" else {"cos": draw(9, 4)[:, :2], "sin": draw(9, 4)[:, :2]}
    if name == "assemble_mla":
        tables = {"cos": draw(9, 4), "sin": draw(9, 4)}
    positions = torch.tensor([-3, ropelab.NO_POSITION], device=device)
    options = {"seq_format": "thd", "positions": positions}
    if axes is not None:
        options |= {
            "positions": torch.stack((positions, torch.full_like(positions, ropelab.NO_POSITION))),
            "axes": axes,
        }
    xs[0][1] = 0

    def derivative(f, arguments):
        def chosen(*some):
            whole = list(xs)
            for i, x in zip(arguments, some, strict=True):
                whole[i] = x
            ys = f(*whole, **tables, **options)
            return sum((y**3).sum() for y in ys) if transform == "hessian" else ys

        numbers = tuple(range(len(arguments)))
        return getattr(torch.func, transform)(chosen, numbers)(*(xs[i] for i in arguments))

    for arguments in ((0,), (1,), tuple(range(len(xs)))):
        # Both are float64 sums of a few products of numbers of normal size.
        found, expected = derivative(function, arguments), derivative(definition, arguments)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
