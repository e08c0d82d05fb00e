"""The scales of each head of a token that `rope_and_cache` makes: their bits, and the 8-bit floats beside them."""

import numpy as np
import pytest
import torch

import ropelab
from ropelab import NO_POSITION
from ropelab.conformance.bounds import Rounding, exact
from ropelab.conformance.cache_bounds import float8_bound, row_scale
from ropelab.kernels.float8 import FLOAT8_DTYPES, SMALLEST_SCALE
from ropelab.layout.pairing import LAYOUTS
from tests.ops.test_paged_cache import POISON, assert_equal, example, latent_example, quantized

MOST = torch.finfo(torch.float32).max


def scales_of(x, dtype):
    """The scale of every row of ``x``, by NumPy: NaN counts as 0, and an infinity as the largest float32."""
    size = np.nan_to_num(np.abs(x.float().cpu().numpy()), nan=0.0, posinf=MOST).max(-1)
    scale = np.maximum(size / np.float32(torch.finfo(dtype).max), np.float32(SMALLEST_SCALE))
    return torch.from_numpy(scale)


def rows_of(x, dtype, scale):
    """The nearest 8-bit floats of rows that have a scale each."""
    return quantized(x.flatten(0, -2), dtype, scale.flatten()).view(x.shape)


def with_scales(call, dtype=FLOAT8_DTYPES[0], *, q=True):
    """Tensors of POISON for the scales of a call, among its options; and 8-bit floats for q."""
    found = {
        name: torch.full((*cache.shape[:3],), POISON, device=cache.device)
        for name, cache in zip(("k_scale_cache", "v_scale_cache"), call.caches, strict=True)
    }
    if q:
        found["q_scale_out"] = torch.full(call.q.shape[:-1], POISON, device=call.q.device)
        found["q_out"] = torch.empty(call.q.shape, dtype=dtype, device=call.q.device)
    call.options |= found
    return found


def assert_rows(call, x, cache, scales, dtype=FLOAT8_DTYPES[0], scale=None):
    """The slots of the tokens hold their rows and scales, and no other slot has changed."""
    scale = scales_of(x, dtype) if scale is None else scale
    assert_equal(scales.cpu(), call.written(scale[..., None].to(cache.device), scales[..., None])[..., 0].cpu())
    assert_equal(cache, call.written(rows_of(x, dtype, scale).to(cache.device), cache))


CASES = {
    "packed thd": {},
    "one token": {"tokens": 1},
    "no power of two": {"tokens": 37, "heads": (7, 3), "head_dim": 40, "rotary_dim": 24},
    "odd head_dim": {"head_dim": 21, "rotary_dim": 8, "heads": (3, 2)},
    "values in pieces": {"head_dim": 8, "value_dim": 40, "heads": (4, 2)},
    "HND": {"memory": "HND", "block_size": 3},
    "both caches in one tensor": {"memory": "one tensor"},
    "batches": {"batch": 3, "seq_format": "bshd"},
    "bhsd": {"batch": 2, "seq_format": "bhsd", "tokens": 5},
    "few slots": {"slots": torch.tensor([5, 3])},
    "counted": {"positions": False},
    "float32": {"dtype": torch.float32},
    "float64": {"dtype": torch.float64},
}


@pytest.mark.parametrize("layout, dtype", [*zip(LAYOUTS, FLOAT8_DTYPES, strict=True)])
@pytest.mark.parametrize("case", CASES)
def test_every_head_of_a_token_has_its_scale(device, case, layout, dtype):
    call = example(device, **{"dtype": torch.float16, "cache_dtype": dtype, "layout": layout} | CASES[case])
    sizes = 2.0 ** torch.randint(-12, 5, (*call.q.shape[:-1], 1)).to(call.q)
    call.q = call.q * sizes
    made = with_scales(call, dtype)
    q, k, _ = call.separately()
    out = call()
    scale = scales_of(q, dtype)
    assert_equal(made["q_scale_out"].cpu(), scale)
    assert_equal(out.cpu(), rows_of(q, dtype, scale))
    assert_rows(call, k, call.key_cache, made["k_scale_cache"], dtype)
    assert_rows(call, call.v, call.value_cache, made["v_scale_cache"], dtype)


def test_numbers_that_have_no_quotient(device):
    """Zeros, NaN, infinities and tiny numbers: every scale is positive and finite, and NaN stays in its place."""
    call = example(device, heads=(1, 1), cache_dtype=FLOAT8_DTYPES[0], slots=torch.arange(7))
    call.v = torch.randn(7, 1, 16, device=call.q.device)
    call.v[0], call.v[1], call.v[2, 0, 3], call.v[3, 0, 5] = 0, torch.nan, torch.nan, -torch.inf
    call.v[4] *= 1e-9
    call.v[5, 0, 0] = MOST
    call.q[0], call.q[1], call.q[2, 0, 9] = 0, torch.nan, torch.inf  # the partner of an infinity becomes infinite too
    made = with_scales(call)
    q, k, _ = call.separately()
    out = call()
    assert_rows(call, call.v, call.value_cache, made["v_scale_cache"])
    assert_equal(out.cpu(), rows_of(q, FLOAT8_DTYPES[0], scales_of(q, FLOAT8_DTYPES[0])))
    for scale in (made["q_scale_out"], made["v_scale_cache"].flatten()[:7]):
        assert (scale > 0).all() and scale.isfinite().all()
    stored = call.value_cache.flatten(0, 1)[:7, 0].float().cpu()
    assert made["v_scale_cache"].flatten()[[0, 1]].tolist() == [np.float32(SMALLEST_SCALE)] * 2
    assert stored[2].isnan().sum() == 1 and stored[1].isnan().all() and stored[3, 5] == -448 and not stored[3, :5].any()


@pytest.mark.parametrize("across", [False, True])
def test_the_bound_holds_after_a_norm(device, across):
    """The scale is that of the rounded values, which k_out has, and a stored number is the nearest one."""
    call = example(device, norm=True, dtype=torch.float16, cache_dtype=FLOAT8_DTYPES[0], heads=(6, 4))
    if across:
        call.options |= {
            name: torch.randn(n * 16, device=call.q.device) for name, n in (("q_weight", 6), ("k_weight", 4))
        }
    k = call.options["k_out"] = torch.empty_like(call.k)
    made = with_scales(call, q=False)
    call()
    assert_rows(call, k, call.key_cache, made["k_scale_cache"])


def test_the_error_of_a_stored_number(device):
    """The bound of the docstring, by `float8_bound`, and its leading term u |x|."""
    call = example(device, tokens=19, cache_dtype=FLOAT8_DTYPES[0], slots=torch.arange(19))
    made = with_scales(call, q=False)
    call()
    scale, stored = (x.flatten(0, 1)[:19].cpu() for x in (made["v_scale_cache"], call.value_cache))
    v, scale = exact(call.v), exact(scale)[..., None]
    right, change = row_scale(v, np.zeros_like(v), FLOAT8_DTYPES[0])
    assert (abs(scale[..., 0] - right) <= change).all()
    bound = float8_bound(v, np.zeros_like(v), scale, FLOAT8_DTYPES[0], Rounding.nearest(torch.float32))
    error = abs(exact(stored.float()) - v / scale)
    assert (error <= bound).all() and (error > bound / 2).any()
    assert (error * scale <= np.maximum(2.0**-4 * abs(v), 2.0**-10 * scale) * (1 + 2.0**-20)).all()


def test_one_scale_for_k_and_v_of_a_head(device):
    call = example(device, cache_dtype=FLOAT8_DTYPES[0], value_dim=40, dtype=torch.float16)
    call.v = call.v * 2.0 ** torch.randint(-9, 9, (7, 3, 1)).to(call.v)
    call.options["v_out"] = torch.empty_like(call.v)
    made = with_scales(call, q=False)
    _, k, _ = call.separately()
    call(v_scale_cache=made["k_scale_cache"])
    scale = scales_of(torch.cat((k, call.v), -1), FLOAT8_DTYPES[0])
    assert_rows(call, k, call.key_cache, made["k_scale_cache"], scale=scale)
    assert_rows(call, call.v, call.value_cache, made["k_scale_cache"], scale=scale)
    assert_equal(call.options["v_out"], call.v)
    assert (made["v_scale_cache"] == POISON).all()


@pytest.mark.parametrize("given", ["k_scale", "v_scale"])
def test_a_given_scale_beside_scales_that_are_made(device, given):
    call = example(device, cache_dtype=FLOAT8_DTYPES[0])
    made = with_scales(call, q=False)
    scale = torch.tensor([0.3, 0.01, 2.0], device=call.q.device)
    _, k, _ = call.separately()
    call(**{given: scale, f"{given}_cache": None})
    for x, cache, name in ((k, call.key_cache, "k_scale"), (call.v, call.value_cache, "v_scale")):
        if name == given:
            assert_equal(cache, call.written(quantized(x, cache.dtype, scale).to(cache.device), cache))
            assert (made[f"{name}_cache"] == POISON).all()
        else:
            assert_rows(call, x, cache, made[f"{name}_cache"])


@pytest.mark.parametrize("nope_dim", [8, 40, 21])
def test_features_of_q_apart_share_the_scale(device, nope_dim):
    call = example(device, dtype=torch.float16)
    q_nope = torch.randn(7, 5, nope_dim, device=call.q.device).half()
    q_nope = q_nope * 2.0 ** torch.randint(-5, 5, (7, 5, 1)).to(q_nope)
    call.options["positions"][3] = NO_POSITION
    outs = [torch.empty(x.shape, dtype=FLOAT8_DTYPES[0], device=x.device) for x in (call.q, q_nope)]
    scales = torch.full((5, 7), POISON, device=call.q.device).t()
    q, _, _ = call.separately()
    call(q_nope=q_nope, q_out=outs[0], q_nope_out=outs[1], q_scale_out=scales)
    scale = scales_of(torch.cat((q, q_nope), -1), FLOAT8_DTYPES[0])
    assert_equal(scales.cpu(), scale)
    for found, x in zip(outs, (q, q_nope), strict=True):
        assert_equal(found.cpu(), rows_of(x, FLOAT8_DTYPES[0], scale))


@pytest.mark.parametrize(
    "shape", [{}, {"rotary_dim": 64, "latent": 512, "heads": 3}, {"latent": 7, "tokens": 1}], ids=str
)
def test_latent_attention(device, shape):
    """An entry of the cache, the latent vector and the key, has one scale."""
    (q_pe, k_pe, kv_c, cache, slots), options = latent_example(device, cache_dtype=FLOAT8_DTYPES[1], **shape)
    slots = slots[: len(q_pe)]
    _, k = ropelab.apply_rope(q_pe, k_pe[:, None], seq_format="thd", **options)
    before, scales = cache.clone(), torch.full(cache.shape[:2], POISON, device=cache.device)
    ropelab.mla_rope_and_cache(q_pe, k_pe, kv_c, cache, slots, kv_scale_cache=scales, **options)
    entries = torch.cat((kv_c, k[:, 0]), -1)
    scale = scales_of(entries, FLOAT8_DTYPES[1])
    expected, expected_scales = before, torch.full_like(scales, POISON)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected.view(torch.uint8)[slot // 3, slot % 3] = rows_of(entries, cache.dtype, scale)[token].view(
                torch.uint8
            )
            expected_scales[slot // 3, slot % 3] = scale[token]
    assert_equal(scales, expected_scales)
    assert_equal(cache, expected)


def test_scales_within_the_memory_of_the_cache(device):
    """vLLM keeps the scale of a head in the four bytes behind its features."""
    call = example(device, cache_dtype=FLOAT8_DTYPES[0], block_size=4)
    memory = torch.zeros(7, 2, 4, 3, 20, dtype=torch.uint8, device=call.q.device)
    floats = memory.view(torch.float32)
    made = with_scales(call, q=False)
    call()
    key_cache, value_cache = (memory[:, i, ..., :16].view(FLOAT8_DTYPES[0]) for i in (0, 1))
    scales = [floats[:, i, ..., 4] for i in (0, 1)]
    for x in (key_cache, value_cache, *scales):
        x.fill_(POISON)
    expected = [*call.caches, made["k_scale_cache"], made["v_scale_cache"]]
    call.key_cache, call.value_cache = key_cache, value_cache
    call(k_scale_cache=scales[0], v_scale_cache=scales[1])
    for found, right in zip((key_cache, value_cache, *scales), expected, strict=True):
        assert_equal(found, right)
    with pytest.raises(ValueError, match="k_scale_cache: expected memory disjoint from key_cache's, got overlapping"):
        call(k_scale_cache=floats[:, 0, ..., 3], v_scale_cache=scales[1])
