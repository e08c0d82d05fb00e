"""The heads of multi-head latent attention: against the definition, for the torch path and the Triton kernels alike."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
import torch.utils.checkpoint

import ropelab
from ropelab.conformance.bounds import Arithmetic, exact, rotate_exactly, rotation_bound
from ropelab.kernels import INTERPRETED, NO_POSITION, Rotation, latent_torch
from ropelab.kernels.run import run
from ropelab.kernels.tensors import LatentGradients
from ropelab.kernels.tiles import Tile
from ropelab.layout.pairing import LAYOUTS, pairs
from ropelab.layout.seq_format import SEQ_FORMATS
from ropelab.study.topics.gradients.latent_bounds import LANES, shared_gradient_bound
from tests.support import draw, forget

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
LAYOUT_PAIRS = list(itertools.product(LAYOUTS, LAYOUTS))

# batch, tokens, heads, N, R, V: more heads than lanes, odd numbers, no features that pass, one of everything.
SHAPES = [(2, 1, 20, 8, 4, 8), (1, 3, 3, 9, 6, 5), (2, 2, 1, 0, 8, 3), (1, 1, 1, 1, 2, 1), (1, 1, 33, 12, 10, 16)]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch):
    forget(monkeypatch)


def tensors(shape, seq_format="bshd", dtype=torch.float32):
    """q, kv and k_pe, leaves that require grad, and random cotangents of query, key and value."""
    batch, seq_len, heads, nope_dim, rotary_dim, value_dim = shape
    batch = 1 if seq_format == "thd" else batch
    sizes = (heads, nope_dim + rotary_dim), (heads, nope_dim + value_dim), (1, rotary_dim)
    leaves = [draw(batch, seq_len, *size, seq_format=seq_format, dtype=dtype).requires_grad_() for size in sizes]
    sizes = (heads, nope_dim + rotary_dim), (heads, nope_dim + rotary_dim), (heads, value_dim)
    return leaves, [draw(batch, seq_len, *size, seq_format=seq_format, dtype=dtype) for size in sizes]


def tables(shape, dtype=torch.float32, rows=64):
    width = torch.float64 if dtype == torch.float64 else torch.float32
    return dict(zip(("cos", "sin"), ropelab.rotary_table(rows, shape[4], dtype=width), strict=True))


@pytest.mark.parametrize(("layout", "out_layout"), LAYOUT_PAIRS)
@pytest.mark.parametrize(("shape", "dtype"), list(zip(SHAPES, (*DTYPES, torch.bfloat16), strict=True)))
def test_results_and_gradients_are_within_the_bounds(shape, layout, out_layout, dtype):
    (q, kv, k_pe), cotangents = tensors(shape, dtype=dtype)
    nope_dim, rotary_dim, where = shape[3], shape[4], tables(shape, dtype)
    made = ropelab.assemble_mla(q, kv, k_pe, **where, layout=layout, out_layout=out_layout)
    dq, dkv, dk_pe = torch.autograd.grad(made, (q, kv, k_pe), cotangents)
    query, key, value = made
    assert torch.equal(query[..., :nope_dim], q[..., :nope_dim]) and torch.equal(value, kv[..., nope_dim:])
    assert torch.equal(key[..., :nope_dim], kv[..., :nope_dim])
    assert torch.equal(dkv, torch.cat((cotangents[1][..., :nope_dim], cotangents[2]), -1))
    assert torch.equal(dq[..., :nope_dim], cotangents[0][..., :nope_dim])

    arithmetic = Arithmetic.of_kernel(dtype, interpreted=INTERPRETED)
    seq_len = shape[1]
    c, s = (exact(t[:seq_len, None]) for t in ropelab.rotary_table(64, rotary_dim, dtype=torch.float64))

    def within(found, found_layout, truth, bound):
        for y, t, b in zip(pairs(found, found_layout), truth, bound, strict=True):
            assert (abs(exact(y) - t) <= b).all()

    for found, given in ((query[..., nope_dim:], q[..., nope_dim:]), (key[..., nope_dim:], k_pe)):
        x = [np.broadcast_to(exact(half), (*found.shape[:-1], rotary_dim // 2)) for half in pairs(given, layout)]
        within(found, out_layout, rotate_exactly(*x, c, s), rotation_bound(*x, c, s, arithmetic))
    g = [exact(half) for half in pairs(cotangents[0][..., nope_dim:], out_layout)]
    within(dq[..., nope_dim:], layout, rotate_exactly(*g, c, -s), rotation_bound(*g, c, -s, arithmetic))
    g = [exact(half) for half in pairs(cotangents[1][..., nope_dim:], out_layout)]
    truth = rotate_exactly(*(half.sum(-2) for half in g), c[:, 0], -s[:, 0])
    within(dk_pe[..., 0, :], layout, truth, shared_gradient_bound(*g, c[:, 0], s[:, 0], arithmetic))


def test_the_bound_of_the_sum_rejects_what_is_wrong():
    """The faults: one head left out, the sum in bfloat16, and the forward's rotation in place of the transpose."""
    shape = (1, 4, 64, 0, 8, 1)
    g = [exact(draw(1, 4, 64, 4, dtype=torch.float32)) for _ in range(2)]
    c, s = (exact(t[1:5]) for t in ropelab.rotary_table(64, shape[4], dtype=torch.float64))
    bound = shared_gradient_bound(*g, c, s, Arithmetic.of_kernel(torch.float32, interpreted=False))
    truth = rotate_exactly(*(half.sum(-2) for half in g), c, -s)
    low = [exact(torch.from_numpy(half.astype(np.float32)).bfloat16().sum(-2)) for half in g]
    one_less = [half[..., 1:, :].sum(-2) for half in g]
    wrong = {
        "one head less": rotate_exactly(*one_less, c, -s),
        "in bfloat16": rotate_exactly(*low, c, -s),
        "the forward again": rotate_exactly(*(half.sum(-2) for half in g), c, s),
    }
    for name, found in wrong.items():
        assert any((abs(y - t) > 10 * b).any() for y, t, b in zip(found, truth, bound, strict=True)), name


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter; test_gpu_latent compares on a GPU")
def test_the_bits_do_not_depend_on_the_tile():
    from ropelab.kernels import latent_triton

    key_grad, value_grad = torch.randn(2, 5, 20, 12), torch.randn(2, 5, 20, 6)
    cos, sin = ropelab.rotary_table(8, 4)
    rotation = Rotation(4, 8, out_interleaved=True, transpose=True)
    found = []
    for tile in (None, Tile(1, 4, 2), Tile(4, 8, 4), Tile(2, 32, 1, "tokens")):
        grads = [torch.full((2, 5, *size), torch.nan) for size in ((20, 14), (1, 4))]
        run(latent_triton.plan_backward, LatentGradients(key_grad, value_grad, *grads, cos, sin, None), rotation, tile)
        found.append(grads)
    assert all(torch.equal(x, y) for one in found for x, y in zip(one, found[0], strict=True))


def test_a_token_has_the_same_bits_alone_and_in_a_batch():
    shape = (3, 4, 20, 6, 8, 3)
    leaves, cotangents = tensors(shape)
    where = tables(shape) | {"positions": torch.arange(12).view(3, 4)}
    whole = ropelab.assemble_mla(*leaves, **where)
    whole = [*whole, *torch.autograd.grad(whole, leaves, cotangents)]
    where["positions"] = torch.tensor([[6]])
    one = [x.detach()[1:2, 2:3].clone().requires_grad_() for x in leaves]
    alone = ropelab.assemble_mla(*one, **where)
    alone = [*alone, *torch.autograd.grad(alone, one, [g[1:2, 2:3] for g in cotangents])]
    assert all(torch.equal(x, y[1:2, 2:3]) for x, y in zip(alone, whole, strict=True))


# ------------------------------------------------------------------------------------------- a value that is a view


@pytest.mark.parametrize("seq_format", SEQ_FORMATS)
def test_a_view_has_the_memory_of_kv_and_the_bits_of_a_copy(seq_format):
    shape = (2, 3, 4, 6, 8, 5)
    (q, kv, k_pe), cotangents = tensors(shape, seq_format)
    where = tables(shape) | {"seq_format": seq_format, "positions": torch.tensor([[5, NO_POSITION, 0]])}
    made = ropelab.assemble_mla(q, kv, k_pe, **where, copy_value=False)
    assert made[2]._base is kv and torch._C._is_alias_of(made[2], kv)
    assert made[2].storage_offset() == 6 and made[2].stride() == kv.stride()
    copied = ropelab.assemble_mla(q, kv, k_pe, **where)
    assert copied[2].is_contiguous() and not torch._C._is_alias_of(copied[2], kv)
    grads = [torch.autograd.grad(ys, (q, kv, k_pe), cotangents) for ys in (made, copied)]
    assert all(torch.equal(x, y) for pair in ((made, copied), grads) for x, y in zip(*pair, strict=True))


def test_the_backward_of_a_view_is_that_of_a_copy():
    """No zeros for the features that the view leaves out, and no sum of two gradients of kv."""
    shape = (1, 3, 4, 6, 8, 5)
    (_, kv, k_pe), cotangents = tensors(shape)

    def operations(results):
        torch.autograd.grad(results, (kv, k_pe), cotangents[1:], retain_graph=True)  # prepares the launch
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
            torch.autograd.grad(results, (kv, k_pe), cotangents[1:])
        return [(event.name, event.input_shapes) for event in profile.events() if event.name.startswith("aten::")]

    with ropelab.use_backend("torch"):
        copied, viewed = (
            ropelab.assemble_mla_kv(kv, k_pe, 6, **tables(shape), copy_value=copy_value) for copy_value in (True, False)
        )
        found, expected = operations(viewed), operations(copied)
        sliced = operations((ropelab.assemble_mla_kv(kv, k_pe, 6, **tables(shape))[0], kv[..., 6:]))
    assert found == expected and "aten::slice_backward" in dict(sliced)


@pytest.mark.parametrize("written", ["value", "kv"])
def test_who_overwrites_a_view_is_told(written):
    """Autograd cannot follow a write to one output of several, or to the memory under it."""
    function, (q, kv, k_pe), _ = small()
    given = kv * 1
    value = function(q, given, k_pe, copy_value=False)[2]
    with pytest.raises(RuntimeError, match="is a view and .* modified inplace"):
        (value if written == "value" else given).mul_(2)
        value.sum()
    with torch.no_grad():
        given = kv.clone()
        value = function(q, given, k_pe, copy_value=False)[2]
        (value if written == "value" else given).zero_()
    assert not value.any() and not given[..., 2:].any()


def test_a_compiled_step_copies_no_value():
    """The compiled step has one operator forward and one backward, and reads the value through a view."""
    from functorch.compile import make_boxed_func  # both take a second to import
    from torch._dynamo.backends.common import aot_autograd

    shape = (1, 3, 4, 6, 8, 5)
    (q, kv, k_pe), _ = tensors(shape)
    where, found = tables(shape), []

    def graph(module, _):
        found.append([str(node.target) for node in module.graph.nodes if node.op == "call_function"])
        return make_boxed_func(module.forward)

    def step(x, k_pe, q):
        key, value = ropelab.assemble_mla_kv(x * 2, k_pe, 6, **where, copy_value=False)
        return torch.einsum("bshd,bthd,bthe->bshe", q, key, value)

    with ropelab.use_backend("torch"):
        compiled = torch.compile(step, fullgraph=True, backend=aot_autograd(fw_compiler=graph))
        results = [f(kv, k_pe, q) for f in (compiled, step)]
        grads = [torch.autograd.grad(y.square().sum(), (kv, k_pe, q)) for y in results]
    torch.testing.assert_close(*grads)
    forward, backward = found
    assert forward.count("ropelab.assemble_mla.default") == 1
    assert backward.count("ropelab.assemble_mla_backward.default") == 1
    spare = {"aten.clone.default", "aten.slice_backward.default", "aten.add.Tensor", "aten.slice_scatter.default"}
    assert not spare & {*forward, *backward}


@pytest.mark.parametrize("way", ["compiled", "checkpointed"])
@pytest.mark.parametrize("of_input", [True, False])
def test_a_step_may_return_the_view(way, of_input):
    """The value is a view of an argument of the step, or of a tensor that the step makes."""
    _, (_, kv, k_pe), options = small()

    def step(kv, k_pe):
        return ropelab.assemble_mla_kv(kv if of_input else kv * 2, k_pe, 2, **options, copy_value=False)

    ways = {
        "compiled": torch.compile(step, fullgraph=True, backend="aot_eager"),
        "checkpointed": partial(torch.utils.checkpoint.checkpoint, step, use_reentrant=False),
    }
    with ropelab.use_backend("torch"):
        found, right = ways[way](kv, k_pe), step(kv, k_pe)
        cotangents = [torch.randn_like(y) for y in right]
        grads = [torch.autograd.grad(ys, (kv, k_pe), cotangents) for ys in (found, right)]
    assert all(torch.equal(x, y) for pair in ((found, right), grads) for x, y in zip(*pair, strict=True))


# --------------------------------------------------------------------------------------------------------- autograd


def small():
    shape = (1, 2, 3, 2, 4, 2)
    leaves, _ = tensors(shape, dtype=torch.float64)
    options = tables(shape, torch.float64) | {"layout": "interleaved", "out_layout": "split_half", "offsets": 3}

    def function(q, kv, k_pe, copy_value=True):
        return ropelab.assemble_mla(q, kv, k_pe, **options, copy_value=copy_value)

    return function, leaves, options


@pytest.mark.parametrize("consume", [False, True])
def test_the_tail_in_place(consume):
    function, (q, _, _), options = small()
    right = ropelab.rotate_mla_query(q, 2, **options)
    grad = torch.randn_like(right)
    (expected,) = torch.autograd.grad(right, q, grad)
    base = q.clone()
    base_version = base._version
    given = grad.clone()
    turned = ropelab.rotate_mla_query(base, 2, **options, inplace=True, consume=consume)
    assert turned.data_ptr() == base.data_ptr() and base._version > base_version and torch.equal(turned, right)
    (found,) = torch.autograd.grad(turned, q, given)
    assert torch.equal(found, expected)
    assert torch.equal(given, expected if consume else grad)  # consumed, or untouched


def test_a_gradient_without_room_is_not_overwritten():
    _, (q, _, _), options = small()
    (expected,) = torch.autograd.grad(ropelab.rotate_mla_query(q, 2, **options).sum(), q)
    turned = ropelab.rotate_mla_query(q.clone(), 2, **options, inplace=True, consume=True)
    (found,) = torch.autograd.grad(turned.sum(), q)
    assert torch.equal(found, expected)
    # Someone differentiates the gradient.
    turned = ropelab.rotate_mla_query(q.clone(), 2, **options, inplace=True, consume=True)
    grad = torch.randn_like(turned, requires_grad=True)
    (found,) = torch.autograd.grad(turned, q, grad, create_graph=True)
    assert found.requires_grad


def test_views_in_place():
    _, (q, _, _), options = small()
    whole = torch.cat((q, q), 2) * 1
    first, second = whole[:, :, :3], whole.split(3, 2)[1]
    right = ropelab.rotate_mla_query(first, 2, **options)
    with pytest.raises(ValueError, match="q: expected a tensor that autograd may overwrite .* split"):
        ropelab.rotate_mla_query(second, 2, **options, inplace=True)
    assert torch.equal(ropelab.rotate_mla_query(second, 2, **options, inplace=True, consume=True), right)
    turned = ropelab.rotate_mla_query(first, 2, **options, inplace=True)
    assert torch.equal(turned, right) and torch.equal(whole[:, :, :3], right)
    with pytest.raises(ValueError, match="q: expected a tensor that autograd may overwrite .* leaf"):
        ropelab.rotate_mla_query(q, 2, **options, inplace=True)


def test_the_lanes_are_those_of_the_bound():
    assert latent_torch.LANES == LANES
    x = torch.randn(1, 1, 37, 2, dtype=torch.float64)
    torch.testing.assert_close(latent_torch.sum_over_heads(x)[0, 0, 0], x.sum((0, 1, 2)))
