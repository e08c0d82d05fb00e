"""`rope_and_quantize`, its form for an indexer, and `rope_and_block_scaled_cache` against exact arithmetic."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import ropelab
from ropelab import NO_POSITION
from ropelab.conformance.block_scale_bounds import E4M3, scaled_fraction
from ropelab.conformance.bounds import EXACT, NO_ROUNDING, Arithmetic, Rounding, exact, fraction, rotate_exactly
from ropelab.conformance.cache_bounds import cache_bound, norm_error
from ropelab.kernels.block_scales import Page
from ropelab.kernels.block_scales_torch import power_of_two, rows_of_cache
from ropelab.layout.pairing import pairs

DTYPES = (torch.float32, torch.float16)
"""The interpreter truncates bfloat16; tests/gpu/test_gpu_block_scales.py has it."""
ROWS = 40


@pytest.fixture
def placed(device):
    """The device of all tensors that a test makes: kernels on a GPU or interpreted, and torch operations."""
    with torch.device(device):
        yield


def where(tokens, rotary_dim=64, head_dim=512, first=None):
    """Tables, positions of either sign, and the tail of a head."""
    cos, sin = ropelab.rotary_table(ROWS, rotary_dim)
    first = head_dim - rotary_dim if first is None else first
    positions = torch.randint(-ROWS + 1, ROWS, (tokens,))
    return {"cos": cos, "sin": sin, "positions": positions, "rotary_slice": (first, first + rotary_dim)}


def scales_of(scales):
    """The scales of all blocks ``[T, groups, N]`` in float64, from either dtype."""
    if scales.dtype == torch.int32:
        scales = power_of_two(scales.contiguous().view(torch.uint8).int())
    return scales.double()


def rotated(x, options, arithmetic, inverse=False, relative_error=0.0):
    """The exact rotation of ``x [T, H, D]`` and the bound of its error, ``EXACT``; other features are exact.

    Args:
        relative_error: of ``x`` itself.
    """
    cos, sin, positions, (first, end) = options.values()
    c, s = np.ones((len(x), 1, x.shape[-1] // 2), EXACT), np.zeros((len(x), 1, x.shape[-1] // 2), EXACT)
    turns, rows = slice(first // 2, end // 2), positions.abs().long()
    c[:, 0, turns], s[:, 0, turns] = exact(cos[rows]), exact(sin[rows] * positions.sign()[:, None])
    s = -s if inverse else s
    x0, x1 = (exact(half) for half in pairs(x, "interleaved"))
    y, error = (
        np.stack(found, -1).reshape(x.shape)
        for found in (rotate_exactly(x0, x1, c, s), cache_bound(x0, x1, c, s, arithmetic, relative_error))
    )
    if not relative_error:
        error[..., :first] = error[..., end:] = 0
    return y, error


def arithmetic_of(dtype, round_first):
    """Tables are given in float32, so they do not round."""
    found = replace(Arithmetic.of_kernel(dtype, interpreted=False), table=NO_ROUNDING)
    return found if round_first else replace(found, store=NO_ROUNDING)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("round_first", [False, True])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.int32], ids=str)
@pytest.mark.parametrize(
    ("heads", "groups", "head_dim", "rotary_dim", "first", "block_dim"),
    [(8, 2, 512, 64, None, 128), (4, 1, 96, 32, 0, 32), (12, 3, 24, 8, 10, 8)],
)
def test_values_and_scales_are_the_definition(
    placed, dtype, round_first, scale_dtype, heads, groups, head_dim, rotary_dim, first, block_dim
):
    options = where(5, rotary_dim, head_dim, first)
    x = torch.randn(5, heads, head_dim).to(dtype) * torch.logspace(-3, 3, 5)[:, None, None].to(dtype)
    out, scales = ropelab.rope_and_quantize(
        x, **options, groups=groups, block_dim=block_dim, scale_dtype=scale_dtype, round_first=round_first, inverse=True
    )
    assert out.dtype == E4M3 and out.shape == (5, groups, heads // groups * head_dim)
    y, error = rotated(x, options, arithmetic_of(dtype, round_first), inverse=True)
    shape = 5, heads, head_dim
    values, found = exact(out.float().reshape(shape)), exact(scales_of(scales).reshape(5, heads, -1))
    assert scaled_fraction(values, found, y, error, 1e-10) <= 1


def test_a_fault_exceeds_the_bound():
    """The scale of a neighbour, the floor of the logarithm, and the rotation the other way."""
    options = where(5)
    x = torch.randn(5, 4, 512)
    out, scales = ropelab.rope_and_quantize(x, **options)
    y, error = rotated(x, options, arithmetic_of(x.dtype, False))
    values, found = exact(out.float().reshape(x.shape)), exact(scales.reshape(5, 4, -1))
    assert scaled_fraction(values, found, y, error, 1e-10) <= 1
    assert scaled_fraction(values, found / 2, y, error, 1e-10) == float("inf")
    assert scaled_fraction(values, 2 * found, y, error, 1e-10) == float("inf")
    other, error = rotated(x, options, arithmetic_of(x.dtype, False), inverse=True)
    assert scaled_fraction(values, found, other, error, 1e-10) > 1


@pytest.mark.parametrize("above", [False, True])
def test_the_scale_is_a_ceiling(placed, above):
    """448 and its powers of two fill the range; the next float32 takes the next scale."""
    amax = torch.tensor([448.0, 1.75, 7 * 2.0**-30])
    x = torch.zeros(3, 1, 8)
    x[:, 0, 5] = torch.nextafter(amax, amax * 2) if above else amax
    cos, sin = ropelab.rotary_table(3, 2)
    _, scales = ropelab.rope_and_quantize(x, cos=cos, sin=sin, block_dim=8)
    assert scales.flatten().tolist() == (amax / 448 * (2 if above else 1)).tolist()


def test_numbers_that_are_not_finite(placed):
    x = torch.ones(1, 1, 16)
    x[..., 3], x[..., 9] = float("nan"), -float("inf")
    cos, sin = ropelab.rotary_table(1, 2)
    out, scales = ropelab.rope_and_quantize(x, cos=cos, sin=sin, block_dim=8)
    values = out.float().view(2, 8) * scales.view(2, 1)
    assert values[0].isnan().tolist() == [False] * 3 + [True] + [False] * 4 and (values[0].nan_to_num(1.0) == 1).all()
    assert values[1].tolist() == [0, -float("inf"), 0, 0, 0, 0, 0, 0]
    assert not out.float().isinf().any() and scales[0, 0, 1] == 2.0**120


def test_zeros_and_tokens_without_a_position(placed):
    """Both give zeros, and the scale of the least amax."""
    cos, sin = ropelab.rotary_table(3, 4)
    x = torch.full((3, 2, 8), float("nan"))
    x[1] = 0.0
    positions = torch.tensor([NO_POSITION, 1, NO_POSITION])
    out, scales = ropelab.rope_and_quantize(
        x, cos=cos, sin=sin, block_dim=8, positions=positions, amax_epsilon=448.0 * 2**-20
    )
    assert (out.float() == 0).all() and (scales == 2.0**-20).all()


@pytest.mark.parametrize("tokens", range(9))
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=str)
def test_scales_lie_as_deep_gemm_reads_them(placed, dtype, tokens):
    """Columns begin at multiples of 16 bytes, and zeros fill them, also at the end; rows of a group are neighbours."""
    x, rows = torch.randn(tokens, 2, 64), -(-tokens // 4) * 4
    out, scales = ropelab.rope_and_quantize(x, **where(tokens, 8, 64), groups=2, block_dim=8, scale_dtype=dtype)
    columns = 8 if dtype == torch.float32 else 2
    assert out.stride() == (64, tokens * 64, 1)
    assert scales.shape == (tokens, 2, columns) and scales.dtype == dtype
    if tokens:
        assert scales.stride() == (1, columns * rows, rows) and scales.data_ptr() % 16 == 0
        whole = scales.as_strided((2, columns, rows), (columns * rows, rows, 1))  # raises beyond the memory
        assert not whole[..., tokens:].any() and whole[..., :tokens].all()


def test_given_scales_hold_all_that_tma_reads(placed):
    call = {"x": torch.randn(6, 2, 64), **where(6, 8, 64), "groups": 2, "block_dim": 8}
    _, expected = ropelab.rope_and_quantize(**call)
    short = torch.empty_strided(expected.shape, expected.stride())
    with pytest.raises(ValueError, match="^scales: expected memory of 512 bytes, .* got 504 bytes"):
        ropelab.rope_and_quantize(**call, scales=short)
    enough = torch.full((2, 8, 8), 7.0)[..., :6].permute(2, 0, 1)
    assert torch.equal(ropelab.rope_and_quantize(**call, scales=enough)[1], expected)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"groups": 4}, "^groups: expected 2, the groups of out, got 4"),
        ({"scale_dtype": torch.int32}, "^scale_dtype: expected torch.float32, the dtype of scales, got torch.int32"),
    ],
)
@pytest.mark.parametrize("given", [("out", "scales"), ("out",), ("scales",)], ids=str)
def test_what_outputs_decide_is_not_decided_twice(placed, wrong, message, given):
    """Groups and dtype are those of the outputs; another claim is refused, and no claim is needed."""
    call = {"x": torch.randn(5, 4, 64), **where(5, 8, 64), "block_dim": 8}
    expected = dict(zip(("out", "scales"), ropelab.rope_and_quantize(**call, groups=2), strict=True))
    outputs = {name: torch.zeros_like(expected[name]) for name in given}
    if {"groups": "out", "scale_dtype": "scales"}[next(iter(wrong))] in given:
        with pytest.raises((TypeError, ValueError), match=message):
            ropelab.rope_and_quantize(**call, **outputs, **wrong)
    if "out" in given:
        out, scales = ropelab.rope_and_quantize(**call, **outputs)
        assert torch.equal(out.float(), expected["out"].float()) and torch.equal(scales, expected["scales"])


@pytest.mark.parametrize("tokens", [1, 3, 33])
@pytest.mark.parametrize("weights_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_an_indexer_folds_its_scale_into_weights(placed, tokens, weights_dtype):
    options = where(tokens, 64, 128)
    q, weights = torch.randn(tokens, 5, 128).half(), torch.randn(tokens, 7)[:, :5].to(weights_dtype)
    out, folded = ropelab.rope_and_quantize_indexer(q, weights, **options, weight_scale=0.3)
    expected, scales = ropelab.rope_and_quantize(q, **options, groups=5, round_first=True, amax_epsilon=1e-4)
    assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(folded, weights.float() * 0.3 * scales[..., 0])


def cache_of(tokens, block_size=4, page_bytes=4 * 584 + 24):
    """A cache full of 77, and a slot for every token but every third."""
    blocks = -(-2 * tokens // block_size)
    slots = torch.randperm(blocks * block_size)[:tokens]
    slots[1::3] = -1
    return torch.full((blocks, page_bytes), 77, dtype=torch.uint8), slots


@pytest.mark.parametrize("tokens", [1, 7, 19])
def test_q_and_the_rows_of_the_cache_are_the_definition(placed, tokens):
    options = where(tokens)
    q, kv = torch.randn(tokens, 3, 512).half(), torch.randn(tokens, 512).half()
    cache, slots = cache_of(tokens)
    found = ropelab.rope_and_block_scaled_cache(q, kv, cache, slots, block_size=4, eps=1e-3, **options)
    normed = q.double() * torch.rsqrt(q.double().square().mean(-1, keepdim=True) + 1e-3)
    relative = norm_error(512, Rounding.nearest(torch.float32))
    y, error = rotated(normed, options, arithmetic_of(q.dtype, True), relative_error=relative)
    assert fraction(exact(found) - y, error) <= 1

    page = Page(4, 448, 64, 64, 2)
    y, error = rotated(kv[:, None], options, arithmetic_of(kv.dtype, True))
    data, scales = rows_of_cache(cache, page)
    stored = slots >= 0
    rows = slots[stored] // 4, slots[stored] % 4
    y, error = y[stored.cpu().numpy(), 0], error[stored.cpu().numpy(), 0]
    values, exponents = data[rows][:, :448].contiguous().view(E4M3), scales[rows]
    powers = exact(power_of_two(exponents[:, :7].int()))
    assert scaled_fraction(exact(values.float()), powers, y[:, :448], EXACT(0), 1e-4) <= 1
    assert fraction(exact(data[rows][:, 448:].contiguous().view(torch.float16)) - y[:, 448:], error[:, 448:]) <= 1
    assert (exponents[:, 7] == 0).all()
    untouched = torch.ones(data.shape[:2], dtype=torch.bool)
    untouched[rows] = False
    assert (data[untouched] == 77).all() and (scales[untouched] == 77).all() and (cache[:, page.bytes :] == 77).all()


def test_q_in_place_and_few_slots(placed):
    """A call in place gives the same q, and a token beyond the slots stores nothing."""
    options = where(7)
    q, kv = torch.randn(7, 3, 512).half(), torch.randn(7, 512).half()
    cache, _ = cache_of(7)
    expected = ropelab.rope_and_block_scaled_cache(q, kv, cache, torch.arange(7), block_size=4, **options)
    few = torch.full_like(cache, 77)
    out = ropelab.rope_and_block_scaled_cache(q, kv, few, torch.tensor([2, -1, 0]), block_size=4, q_out=q, **options)
    assert out is q and torch.equal(q, expected)
    data, _ = rows_of_cache(few, Page(4, 448, 64, 64, 2))
    assert ((data != 77).flatten(0, 1).any(-1)).nonzero().flatten().tolist() == [0, 2]
