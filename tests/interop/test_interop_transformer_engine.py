"""TransformerEngine's calls over our kernels: the contract, its awkward corners, and what they do better."""

import pytest
import torch

from ropelab import PackedSequences, reference
from ropelab.angles.frequencies import inverse_frequencies
from ropelab.interop.transformer_engine import apply_fused_qkv_rotary_pos_emb, apply_rotary_pos_emb, thd_grid
from ropelab.kernels import NO_POSITION
from ropelab.layout.pairing import LAYOUTS, join
from tests.support import assert_rotated

H, D, D2 = 3, 16, 12
CU = [0, 8, 8, 12, 28, 28]


def angles(rows, layout, width=D2):
    half = torch.outer(torch.arange(rows).float(), inverse_frequencies(width, 10000.0).float())
    return join(half, half, layout)[:, None, None]


def tables(freqs):
    return {"cos": freqs[:, 0, 0].cos(), "sin": freqs[:, 0, 0].sin(), "rotary_slice": (0, freqs.shape[-1])}


def with_gradient(function, t):
    """The result, the gradient for a random cotangent, and the cotangent."""
    t = t.detach().clone().requires_grad_()
    y = function(t)
    g = torch.randn_like(y)
    return y.detach(), torch.autograd.grad(y, t, g)[0], g


def check(function, t, freqs, **where):
    y, dt, g = with_gradient(function, t)
    assert_rotated(y, t, **tables(freqs), **where)
    assert_rotated(dt, g, **tables(freqs), inverse=True, **where)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd"])
@pytest.mark.parametrize("cp_size, cp_rank", [(1, 0), (2, 0), (2, 1), (4, 3)])
@pytest.mark.parametrize("starts", [None, [5, 0]])
def test_dense(device, layout, dtype, tensor_format, cp_size, cp_rank, starts):
    s, b = 8, 2
    freqs = angles(s * cp_size + 6, layout).to(device)
    t = torch.randn((s, b, H, D) if tensor_format == "sbhd" else (b, s, H, D), dtype=torch.float32).to(device, dtype)
    length = s * cp_size
    rank = torch.arange(length).chunk(2 * cp_size)
    positions = torch.cat((rank[cp_rank], rank[2 * cp_size - 1 - cp_rank])).expand(b, -1).to(device)
    start = None if starts is None else torch.tensor(starts, dtype=torch.int32, device=device)
    if starts is not None:
        positions = positions + start[:, None]
    options = {"tensor_format": tensor_format, "interleaved": layout == "interleaved", "start_positions": start}
    check(
        lambda t: apply_rotary_pos_emb(t, freqs, cp_size=cp_size, cp_rank=cp_rank, **options),
        t, freqs, layout=layout, seq_format=tensor_format, positions=positions,
    )  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cp_size, cp_rank", [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("starts", [None, [3, 9, 0, 1, 2]])
def test_packed(device, layout, cp_size, cp_rank, starts):
    """A call has empty sequences, rows past the end, start positions, shards and strides of a transposed tensor."""
    cu = torch.tensor(CU, dtype=torch.int32, device=device)
    start = None if starts is None else torch.tensor(starts, dtype=torch.int32, device=device)
    total = CU[-1] // cp_size
    t = torch.randn(H, total + 3, D).to(device).transpose(0, 1)
    freqs = angles(40, layout).to(device)
    shard = {"cp_size": cp_size, "cp_rank": cp_rank}
    positions = PackedSequences(cu, len(t), offsets=0 if start is None else start, **shard).positions
    options = {"tensor_format": "thd", "cu_seqlens": cu, "start_positions": start} | shard

    def function(t):
        return apply_rotary_pos_emb(t, freqs, interleaved=layout == "interleaved", **options)

    check(function, t, freqs, layout=layout, seq_format="thd", positions=positions)
    y, dt, _ = with_gradient(function, t)
    assert not y[total:].any() and not dt[total:].any()


def test_no_sequence_and_no_token(device):
    freqs = angles(4, "split_half").to(device)
    nothing = torch.zeros(1, dtype=torch.int32, device=device)
    assert apply_rotary_pos_emb(torch.empty(0, H, D, device=device), freqs, "thd", cu_seqlens=nothing).shape == (
        0,
        H,
        D,
    )
    padding = torch.randn(2, H, D, device=device)
    assert not apply_rotary_pos_emb(padding, freqs, "thd", cu_seqlens=nothing).any()


def test_members_of_a_pair_may_have_angles_of_their_own(device):
    """The gradient is then the transpose, each feature's cotangent with the angle that it was multiplied with."""
    freqs = torch.randn(8, 1, 1, D2).to(device)
    t = torch.randn(8, 2, H, D).to(device)
    check(lambda t: apply_rotary_pos_emb(t, freqs), t, freqs, layout="split_half", seq_format="sbhd")


def test_angles_get_gradients():
    freqs = angles(4, "split_half").double().float().requires_grad_()
    t = torch.randn(4, 1, H, D, dtype=torch.float64)
    g = torch.randn_like(t)
    (actual,) = torch.autograd.grad(apply_rotary_pos_emb(t, freqs), freqs, g)
    wide = freqs.detach().double().requires_grad_()
    y = reference.rotate(t, **tables(wide), layout="split_half", seq_format="sbhd")
    (expected,) = torch.autograd.grad(y, wide, g)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd"])
@pytest.mark.parametrize("heads, d2", [(1, D), (3, D2)])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("cp_rank, starts", [(None, None), (1, None), (1, [5, 0]), (None, [5, 0])])
def test_packed_qkv(device, layout, tensor_format, heads, d2, shared, cp_rank, starts):
    """q and k rotate as they do apart; the gradient arrives in the packed tensor, with v's part untouched."""
    s, b, groups, v_width = 4, 2, 2, 6
    shape = (s, b, groups) if tensor_format == "sbhd" else (b, s, groups)
    widths = [heads * D, D, v_width]
    qkv = torch.randn(*shape, sum(widths)).to(device)
    q_freqs = angles(16, layout, d2).to(device)
    k_freqs = q_freqs if shared else angles(20, layout, D2).to(device) * 2
    options = {"tensor_format": tensor_format, "interleaved": layout == "interleaved"}
    options["start_positions"] = None if starts is None else torch.tensor(starts, dtype=torch.int32, device=device)
    if cp_rank is not None:
        options |= {"cp_size": 2, "cp_rank": cp_rank}

    leaf = qkv.clone().requires_grad_()
    results = apply_fused_qkv_rotary_pos_emb(leaf, q_freqs, k_freqs, widths, **options)
    cotangents = [torch.randn_like(y) for y in results]
    (gradient,) = torch.autograd.grad(results, leaf, cotangents)

    other = qkv.clone().requires_grad_()
    q, k, v = other.split(widths, -1)
    q = q.unflatten(-1, (heads, D)).flatten(2, 3)
    expected = (apply_rotary_pos_emb(q, q_freqs, **options), apply_rotary_pos_emb(k, k_freqs, **options), v)
    for actual, wanted in zip(results, expected, strict=True):
        assert torch.equal(actual, wanted)
    assert torch.equal(gradient, torch.autograd.grad(expected, other, cotangents)[0])


@pytest.mark.parametrize("sizes", [(0, 2, 3), (2, 0, 3), (2, 3, 0)])
@pytest.mark.parametrize("shared", [True, False])
def test_packed_qkv_without_tokens_or_groups(device, sizes, shared):
    qkv, q_freqs = torch.ones(*sizes, 4 * D, device=device, requires_grad=True), angles(4, "split_half").to(device)
    found = apply_fused_qkv_rotary_pos_emb(qkv, q_freqs, q_freqs if shared else q_freqs.clone(), [2 * D, D, D])
    b, s, groups = sizes
    assert [x.shape for x in found] == [(b, s, 2 * groups, D), (b, s, groups, D), (b, s, groups, D)]
    assert torch.autograd.grad(sum(x.sum() for x in found), qkv)[0].shape == qkv.shape


@pytest.mark.parametrize("tensor_format", ["sbhd", "bshd", "thd"])
def test_results_are_contiguous(device, tensor_format):
    """This holds for every order of the axes in memory, with the values that a contiguous tensor gives."""
    freqs, cu = angles(8, "split_half").to(device), torch.tensor([0, 4, 8], dtype=torch.int32, device=device)
    shape = (4, 2, H, D) if tensor_format == "sbhd" else (2, 4, H, D)
    t = torch.randn(shape).to(device)
    t = t.flatten(0, 1) if tensor_format == "thd" else t
    options = {"tensor_format": tensor_format, "cu_seqlens": cu}
    expected = apply_rotary_pos_emb(t, freqs, **options)
    for order in ([1, 0, *range(2, t.ndim)], [*range(t.ndim - 3), t.ndim - 2, t.ndim - 3, t.ndim - 1]):
        back = sorted(range(t.ndim), key=order.__getitem__)
        strided = t.permute(order).contiguous().permute(back)
        y = apply_rotary_pos_emb(strided, freqs, **options)
        assert y.is_contiguous() and torch.equal(y, expected)
    for qkv in (torch.randn(4, 2, 2, 3 * D).to(device).transpose(0, 1), torch.randn(2, 4, 1, 3 * D).to(device)):
        before = qkv.clone()
        results = apply_fused_qkv_rotary_pos_emb(qkv, freqs, freqs, [D, D, D], "bshd")
        assert all(x.is_contiguous() for x in results)
        for x in results:
            x.zero_()
        assert torch.equal(qkv, before), "a result shares the memory of qkv"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_freqs_of_other_dtypes_are_rounded_to_float32(device, dtype):
    t, freqs = torch.randn(4, 2, H, D).to(device), angles(8, "split_half").to(device, dtype)
    assert torch.equal(apply_rotary_pos_emb(t, freqs), apply_rotary_pos_emb(t, freqs.float()))
    qkv, widths = torch.randn(4, 2, 2, 3 * D).to(device), [D, D, D]
    found, expected = (apply_fused_qkv_rotary_pos_emb(qkv, f, f, widths) for f in (freqs, freqs.float()))
    assert all(map(torch.equal, found, expected))


def test_the_grid_that_transformer_engine_takes():
    """The grid is right at either side of both thresholds, and with more ranks."""
    assert [thd_grid(n, 65536, 65536) for n in (2, 3)] == ["legacy", "linear"]
    assert [thd_grid(n, 65536, 8192, 8) for n in (2, 3)] == ["legacy", "linear"]
    assert [thd_grid(4, rows, 100) for rows in (16408, 16409)] == ["legacy", "linear"]  # 65,532 and 65,536 dead blocks
    assert thd_grid(100, 10_000, 0) == "legacy"
    with pytest.raises(ValueError, match="cp_size: expected"):
        thd_grid(1, 1, 1, 0)
    with pytest.raises(TypeError, match="tokens: expected"):
        thd_grid(1, 1, 1.5)


def test_dense_formats_take_no_notice_of_cu_seqlens():
    """TransformerEngine's attention passes cu_seqlens with every format; the packed call has a place for cu_seqlens."""
    t, freqs = torch.randn(4, 2, H, D), angles(8, "split_half")
    cu = torch.tensor([0, 3, 9], dtype=torch.int32)
    for tensor_format in ("sbhd", "bshd"):
        y = apply_rotary_pos_emb(t, freqs, tensor_format, None, False, True, cu, 2, 1)
        assert torch.equal(y, apply_rotary_pos_emb(t, freqs, tensor_format, cp_size=2, cp_rank=1))
        qkv, widths = torch.randn(4, 2, 2, 3 * D), [D, D, D]
        found = apply_fused_qkv_rotary_pos_emb(qkv, freqs, freqs, widths, tensor_format, None, False, cu, 2, 1)
        expected = apply_fused_qkv_rotary_pos_emb(qkv, freqs, freqs, widths, tensor_format, cp_size=2, cp_rank=1)
        assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("cp_size", [1, 2])
def test_a_sequence_without_a_start_has_no_positions(device, cp_size):
    """The sequence's tokens get no position by counting on, and a sum beyond int32 does not wrap to NO_POSITION."""
    freqs = torch.randn(16, 1, 1, 8, device=device)
    t = torch.randn(2, 4, 3, 8, device=device)
    starts = torch.tensor([NO_POSITION, 3], dtype=torch.int32, device=device)
    options = {"tensor_format": "bshd", "start_positions": starts, "cp_size": cp_size}
    rotated = apply_rotary_pos_emb(t, freqs, **options)
    assert (rotated[0] == 0).all() and (rotated[1] != 0).any()
    qkv = torch.randn(2, 4, 2, 24, device=device)
    q, k, _ = apply_fused_qkv_rotary_pos_emb(qkv, freqs, freqs, [8, 8, 8], **options)
    for x in (q, k):
        assert (x[0] == 0).all() and (x[1] != 0).any() and x.isfinite().all()
    if device == "cpu":
        far = starts.fill_(2**31 - 2)
        with pytest.raises(ValueError, match="positions"):
            apply_rotary_pos_emb(t, freqs, **options)
        assert far.dtype == torch.int32
