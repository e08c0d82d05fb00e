"""TransformerEngine's kernels, of its wheels and of its file at a commit, against the definition and our adapter."""

import itertools
from functools import partial

import pytest
import torch

from ropelab import PackedSequences, reference
from ropelab.angles.frequencies import inverse_frequencies
from ropelab.bench import launches
from ropelab.bench.peers import te_library, te_source
from ropelab.bench.peers import transformer_engine as te
from ropelab.interop import transformer_engine as interop
from ropelab.layout.pairing import LAYOUTS, join, pairs
from ropelab.positions.packed import context_parallel_positions

pytestmark = [pytest.mark.gpu, pytest.mark.peers]

LIBRARIES = {
    "2.18": lambda: te_library.load(te_library.find("2.18.0")),
    "2.20": lambda: te_library.load(te_library.find("2.20.2")),
    "first version": te_source.library,
}
CU = (0, 16, 16, 64, 96, 256)
STARTS = (7, 0, 13, 1, 2)
MANY_ROWS = 40_000
"""Rows of freqs with which five sequences have more than 65,536 dead blocks, so that 2.20 takes its linear grid."""

layouts = pytest.mark.parametrize("layout", LAYOUTS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
shards = pytest.mark.parametrize("cp_size, cp_rank", [(1, 0), (2, 1), (4, 2)])
starting = pytest.mark.parametrize("with_starts", [False, True])


@pytest.fixture(params=LIBRARIES)
def library(request):
    return LIBRARIES[request.param]()


def integers(*values):
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def freqs_of(rows, width, layout):
    half = torch.outer(torch.arange(rows).float(), inverse_frequencies(width, 10000.0).float())
    return join(half, half, layout)[:, None, None].contiguous().cuda()


def assert_right(y, x, freqs, *, layout, **where):
    """``y`` is the rotation of ``x`` by exactly these angles, up to the roundings of float32 and of the result.

    CUDA's sincosf is right to 2 ulp, 4 units of roundoff; two products and a sum round three times: in all at most 7
    units of ``|x0| + |x1|``, with 1.01 for their products.
    """
    angles, width = freqs[:, 0, 0].double(), freqs.shape[-1]
    exact = reference.rotate(x, angles.cos(), angles.sin(), layout=layout, rotary_slice=(0, width), **where)
    x0, x1 = pairs(x[..., :width].double().abs(), layout)
    unit, out = torch.finfo(torch.float32).eps / 2, torch.finfo(y.dtype)
    bound = 1.01 * 7 * unit * join(x0 + x1, x0 + x1, layout)
    bound = bound + out.eps / 2 * (exact[..., :width].abs() + bound) + out.tiny
    error = (y[..., :width].double() - exact[..., :width]).abs()
    assert (error <= bound).all(), f"{(error / bound).max():.3g} times the bound"
    assert torch.equal(y[..., width:], x[..., width:])


def both(rotate, t):
    """Result, gradient and cotangent."""
    leaf = t.detach().requires_grad_()
    y = rotate(leaf)
    g = torch.randn(y.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda").to(y.dtype)
    return y.detach(), torch.autograd.grad(y, leaf, g)[0], g


def same_to_rounding(theirs, ours):
    """Both are right to the bound of `assert_right`, so that they differ by at most twice the bound."""
    scale = ours.double().abs().max()
    unit = max(torch.finfo(ours.dtype).eps, 16 * torch.finfo(torch.float32).eps)
    assert theirs.shape == ours.shape and theirs.dtype == ours.dtype
    assert (theirs.double() - ours.double()).abs().max() <= 4 * unit * scale


@layouts
@dtypes
@shards
@starting
@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd"])
def test_dense(library, tensor_format, layout, dtype, cp_size, cp_rank, with_starts):
    s, b, h, d, width = 64, 3, 5, 128, 96
    freqs = freqs_of(s * cp_size + 20, width, layout)
    shape = (s, b, h, 2 * d) if tensor_format == "sbhd" else (b, s, h, 2 * d)
    t = torch.randn(shape, device="cuda").to(dtype)[..., :d]  # strided
    starts = integers(*STARTS[:b]) if with_starts else None
    positions = context_parallel_positions(s * cp_size, cp_size=cp_size, cp_rank=cp_rank, device="cuda").expand(b, -1)
    positions = positions if starts is None else positions + starts[:, None]
    # cu_seqlens beside a dense format has no effect.
    options = (freqs, tensor_format, starts, layout == "interleaved")
    shard = {"cu_seqlens": integers(0, 3, 9), "cp_size": cp_size, "cp_rank": cp_rank}
    y, dt, g = both(lambda t: te.apply_rotary_pos_emb(library, t, *options, **shard), t)
    where = {"layout": layout, "seq_format": tensor_format, "positions": positions}
    assert_right(y, t, freqs, **where)
    assert_right(dt, g, freqs, **where, inverse=True)
    ours, ours_dt, _ = both(lambda t: interop.apply_rotary_pos_emb(t, *options, **shard), t)
    assert y.is_contiguous() and ours.is_contiguous()
    same_to_rounding(y, ours)
    same_to_rounding(dt, ours_dt)


@layouts
@dtypes
@shards
@starting
@pytest.mark.parametrize("rows", [CU[-1] + max(STARTS), MANY_ROWS])
def test_packed(library, layout, dtype, cp_size, cp_rank, with_starts, rows):
    tokens = CU[-1] // cp_size
    freqs, cu = freqs_of(rows, 64, layout), integers(*CU)
    t = torch.randn(3, tokens, 64, device="cuda").to(dtype).transpose(0, 1)
    starts = integers(*STARTS) if with_starts else None
    shard = {"cp_size": cp_size, "cp_rank": cp_rank}
    positions = PackedSequences(cu, tokens, offsets=0 if starts is None else starts, **shard).positions
    options = (freqs, "thd", starts, layout == "interleaved")
    y, dt, g = both(lambda t: te.apply_rotary_pos_emb(library, t, *options, cu_seqlens=cu, **shard), t)
    where = {"layout": layout, "seq_format": "thd", "positions": positions}
    assert_right(y, t, freqs, **where)
    assert_right(dt, g, freqs, **where, inverse=True)
    ours, ours_dt, _ = both(lambda t: interop.apply_rotary_pos_emb(t, *options, cu_seqlens=cu, **shard), t)
    assert y.is_contiguous() and ours.is_contiguous()
    same_to_rounding(y, ours)
    same_to_rounding(dt, ours_dt)


@layouts
@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd"])
@pytest.mark.parametrize("cp_size, cp_rank, with_starts", [(1, 0, False), (1, 0, True), (2, 1, False)])
@pytest.mark.parametrize("groups", [1, 4, 12])
def test_packed_qkv(library, tensor_format, layout, cp_size, cp_rank, with_starts, groups):
    """The same call, by position, with cu_seqlens in its place."""
    s, b, widths = 32, 2, [192, 64, 64]
    shape = (s, b, groups, sum(widths)) if tensor_format == "sbhd" else (b, s, groups, sum(widths))
    qkv = torch.randn(shape, device="cuda")
    q_freqs, k_freqs = freqs_of(s * cp_size + 20, 48, layout), 2 * freqs_of(s * cp_size + 20, 48, layout)
    starts = integers(3, 9) if with_starts else None
    arguments = (q_freqs, k_freqs, widths, tensor_format, starts, layout == "interleaved", None, cp_size, cp_rank)
    found = []
    for rotate in (partial(te.apply_fused_qkv_rotary_pos_emb, library), interop.apply_fused_qkv_rotary_pos_emb):
        leaf = qkv.clone().requires_grad_()
        results = rotate(leaf, *arguments)
        generator = torch.Generator("cuda").manual_seed(1)
        cotangents = [torch.randn(y.shape, generator=generator, device="cuda") for y in results]
        found.append((results, torch.autograd.grad(results, leaf, cotangents)[0]))
    (theirs, gradient), (ours, our_gradient) = found
    for x, y in zip(theirs, ours, strict=True):
        assert x.is_contiguous() and y.is_contiguous()
        same_to_rounding(x, y)
    assert torch.equal(theirs[2], ours[2])
    if not with_starts:
        same_to_rounding(gradient, our_gradient)
        return
    # The package's gradient leaves the start positions out; ours is the gradient of the result.
    leaf = qkv.clone().requires_grad_()
    results = interop.apply_fused_qkv_rotary_pos_emb(leaf, q_freqs, k_freqs, widths, tensor_format, None,
                                                     layout == "interleaved")  # fmt: skip
    same_to_rounding(gradient, torch.autograd.grad(results, leaf, cotangents)[0])
    assert not torch.allclose(gradient, our_gradient, atol=0.1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_freqs_of_other_dtypes(library, dtype):
    t, freqs = torch.randn(64, 2, 3, 32, device="cuda"), freqs_of(64, 32, "split_half").to(dtype)
    y = te.apply_rotary_pos_emb(library, t, freqs)
    assert_right(y, t, freqs.float(), layout="split_half", seq_format="sbhd")
    same_to_rounding(y, interop.apply_rotary_pos_emb(t, freqs))


def test_rows_past_the_end(library):
    """The package leaves them as allocated (here NaN), our adapter writes zeros."""
    cu = integers(0, 4, 12)
    t = torch.randn(15, 2, 16, device="cuda")
    with te_source.forced(False):  # the first version's new grid reads past freqs instead, as the study shows
        theirs = te.apply_rotary_pos_emb(library, t, freqs_of(8, 16, "split_half"), "thd", cu_seqlens=cu)
    ours = interop.apply_rotary_pos_emb(t, freqs_of(8, 16, "split_half"), "thd", cu_seqlens=cu)
    assert torch.isfinite(theirs[:12]).all() and theirs[12:].isnan().all() and not ours[12:].any()


def test_versions_have_the_same_bits():
    """Three libraries in one process; the rotation of a token is the same code in all."""
    found = [load() for load in LIBRARIES.values()]
    cu, t = integers(*CU), torch.randn(CU[-1], 5, 64, device="cuda")
    for layout, rows in itertools.product(LAYOUTS, (CU[-1], MANY_ROWS)):
        options = {"interleaved": layout == "interleaved", "cu_seqlens": cu, "tensor_format": "thd"}
        options["freqs"] = freqs_of(rows, 64, layout)
        results = [both(partial(te.apply_rotary_pos_emb, own, **options), t) for own in found]
        for other in results[1:]:
            assert all(map(torch.equal, results[0], other))


def kernels_of(library, n_seqs, rows, tokens, cp_size=1, context=None):
    """The names of the RoPE kernels of a forward and a backward."""
    cu = torch.linspace(0, tokens * cp_size, n_seqs + 1, device="cuda").int() // (2 * cp_size) * (2 * cp_size)
    x = torch.randn(tokens, 1, 2, device="cuda", requires_grad=True)
    options = {"tensor_format": "thd", "cu_seqlens": cu, "cp_size": cp_size}
    options |= {"context": context} if context else {}
    freqs = torch.zeros(rows, 1, 1, 2, device="cuda")

    def call():
        torch.autograd.grad(te.apply_rotary_pos_emb(library, x, freqs, **options).sum(), x)

    return [name for name in launches.kernel_names(call) if "fused_rope" in name]


@pytest.mark.parametrize(
    "n_seqs, rows, tokens, cp_size",
    [(2, 65536, 65536, 1), (3, 65536, 65536, 1), (4, 16408, 100, 1), (4, 16409, 100, 1), (2, 65536, 8192, 8),
     (3, 65536, 8192, 8), (63, 4096, 64, 1), (1, 64, 64, 1)],
)  # fmt: skip
def test_the_merged_condition_is_the_one_of_the_package(n_seqs, rows, tokens, cp_size):
    """2.20 launches the grid that `thd_grid` names, at either side of both thresholds."""
    library = LIBRARIES["2.20"]()
    found = kernels_of(library, n_seqs, rows, tokens, cp_size)
    linear = interop.thd_grid(n_seqs, rows, tokens, cp_size) == "linear"
    assert len(found) == 2 and all(("linear_grid" in name) == linear for name in found), found


@pytest.mark.parametrize("linear", [False, True])
def test_the_variable_forces_a_grid_of_the_first_version(linear):
    library = te_source.library()
    for n_seqs in (1, 100):
        found = kernels_of(library, n_seqs, 1024, 1024, context=partial(te_source.forced, linear))
        assert len(found) == 2 and all(("thd_token" in name) == linear for name in found), found
    chosen = [kernels_of(library, n, 1024, 1024, context=partial(te_source.forced, None)) for n in (63, 64)]
    assert [("thd_token" in names[0]) for names in chosen] == [False, True]
