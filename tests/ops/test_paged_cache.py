"""`rope_and_cache` is the norm, the rotation and a separate write, and touches no other slot."""

from dataclasses import dataclass, field, replace

import pytest
import torch

import ropelab
from ropelab.call import paged_cache
from ropelab.conformance.bounds import FLOAT32_UNIT, Rounding
from ropelab.conformance.cache_bounds import norm_error
from ropelab.kernels import INTERPRETED
from ropelab.kernels.float8 import FLOAT8_DTYPES
from ropelab.layout.pairing import LAYOUTS
from ropelab.layout.seq_format import from_bshd, to_bshd

E4M3, E5M2 = FLOAT8_DTYPES
POISON = 3.0
layouts = pytest.mark.parametrize("layout", LAYOUTS)


@dataclass
class Example:
    """A valid call of `ropelab.rope_and_cache`, with caches full of POISON."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    slot_mapping: torch.Tensor
    options: dict = field(default_factory=dict)

    def __call__(self, **changes):
        return ropelab.rope_and_cache(
            self.q, self.k, self.v, self.key_cache, self.value_cache, self.slot_mapping, **self.options | changes
        )

    @property
    def caches(self):
        return self.key_cache, self.value_cache

    def separately(self):
        """q and k by the functions that write no cache, and the caches that a separate write leaves."""
        names = ("cos", "sin", "layout", "positions", "offsets", "rotary_slice", "seq_format")
        where = {name: x for name, x in self.options.items() if name in names}
        if (weight := self.options.get("q_weight")) is None:
            q, k = ropelab.apply_rope(self.q, self.k, **where)
        else:
            offset = self.options.get("weight_offset", 0.0)
            weights = weight.float() + offset, self.options["k_weight"].float() + offset
            q, k = ropelab.apply_qk_norm_rope(self.q, self.k, *weights, eps=self.options.get("eps", 1e-6), **where)
        return q, k, [self.written(x, cache) for x, cache in zip((k, self.v), self.caches, strict=True)]

    def written(self, x, cache):
        cache = torch.full(cache.shape, POISON, dtype=cache.dtype, device=cache.device)
        rows = to_bshd(x, self.options["seq_format"]).flatten(0, 1)
        for row, slot in zip(rows, self.slot_mapping.tolist(), strict=False):
            if slot >= 0:
                cache[slot // cache.shape[1], slot % cache.shape[1]] = row.to(cache.dtype)
        return cache


def example(
    device="cpu", *, batch=1, tokens=7, heads=(5, 3), head_dim=16, value_dim=None, rotary_dim=None, block_size=4,
    seq_format="thd", dtype=torch.float32, cache_dtype=None, layout="split_half", norm=False, memory="NHD",
    positions=True, slots=None,
):  # fmt: skip
    """Random inputs, as views of one packed tensor; positions of either sign; every third token has no slot."""
    value_dim, cache_dtype = value_dim or head_dim, cache_dtype or dtype
    q_heads, k_heads = heads
    widths = q_heads * head_dim, k_heads * head_dim, k_heads * value_dim
    packed = torch.randn(batch, tokens, sum(widths), dtype=torch.float64).to(device, dtype)
    dims = head_dim, head_dim, value_dim
    views = (x.unflatten(-1, (-1, dim)) for x, dim in zip(packed.split(widths, -1), dims, strict=True))
    q, k, v = (x[0] if seq_format == "thd" else from_bshd(x, seq_format) for x in views)
    blocks = -(-4 * batch * tokens // block_size)
    caches = [cache_of(memory, blocks, block_size, k_heads, dim, cache_dtype, device) for dim in (head_dim, value_dim)]
    if memory == "one tensor":
        both = torch.full((blocks, block_size, 2, k_heads, head_dim), POISON).to(device, cache_dtype)
        caches = [both[:, :, 0], both[:, :, 1]]
    if slots is None:
        slots = torch.randperm(blocks * block_size - 1)[: batch * tokens]  # the last slot stays free
        slots[1::3] = -1
    rotary_dim = rotary_dim or head_dim
    cos, sin = ropelab.rotary_table(tokens + 20, rotary_dim, device=device)
    options = {"cos": cos, "sin": sin, "layout": layout, "seq_format": seq_format}
    if positions:
        shape = (tokens,) if seq_format == "thd" else (batch, tokens)
        options["positions"] = torch.randint(-tokens - 19, tokens + 20, shape, device=device)
    if norm:
        options |= {"q_weight": torch.randn(head_dim).to(device), "k_weight": torch.randn(head_dim).to(device)}
    return Example(q, k, v, *caches, slots.to(device), options)


def cache_of(memory, blocks, block_size, heads, dim, dtype, device):
    """A cache ``[blocks, block_size, heads, dim]``; the memory "HND" has the heads before the slots of a block."""
    if memory == "HND":
        return torch.full((blocks, heads, block_size, dim), POISON).to(device, dtype).transpose(1, 2)
    return torch.full((blocks, block_size, heads, dim), POISON).to(device, dtype)


def assert_equal(actual, expected):
    """The same bits, except for the sign and the payload of NaN."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert torch.equal(actual.double().nan_to_num(12345.0), expected.double().nan_to_num(12345.0))


def test_features_that_pass_keep_every_bit(device):
    """NaN, infinities and zeros of either sign among the features that do not rotate stay what they are."""
    call = example(device, head_dim=16, rotary_dim=8)
    call.q[..., 8:] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-45, -1e-45, 1.0])
    q = call()
    assert torch.equal(q[..., 8:].view(torch.int32), call.q[..., 8:].view(torch.int32))


@pytest.mark.parametrize("slot", [28, 2**31 - 1, 2**31, 2**33, 2**62])
def test_kernels_skip_slots_beyond_the_cache(device, slot, monkeypatch):
    unchecked = replace(paged_cache.WRITE, check_contents=lambda given, where, *numbers: None)
    monkeypatch.setattr("ropelab.paged_cache.WRITE", unchecked)
    call = example(device)
    call.slot_mapping[0], call.slot_mapping[3] = slot, -(2**62)
    kept = call.slot_mapping.clone()
    call.slot_mapping[0] = -1
    _, _, caches = call.separately()
    call.slot_mapping = kept
    call()
    for cache, expected in zip(call.caches, caches, strict=True):
        assert_equal(cache, expected)


@pytest.mark.parametrize("norm", [False, True])
def test_in_place_and_all_outputs(device, norm):
    call = example(device, norm=norm)
    q, k, caches = call.separately()
    v = call.v.clone()
    assert call(q_out=call.q, k_out=call.k, v_out=call.v) is call.q
    for x, expected in ((call.q, q), (call.k, k), (call.v, v), *zip(call.caches, caches, strict=True)):
        assert_equal(x, expected)


@pytest.mark.skipif(not INTERPRETED, reason="a CPU reserves memory that it does not use")
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_addresses_beyond_int32(backend):
    """The last block of the cache begins beyond 2**31 elements; the cache has 2 GiB, of which few pages are used."""
    torch.use_deterministic_algorithms(False)  # poisoned memory would be used
    blocks, stride = 5, 2**29
    memory = torch.empty(blocks * stride, dtype=torch.uint8).view(E4M3)
    with ropelab.use_backend(backend):
        call = example(tokens=3, slots=torch.tensor([19, -1, 16]))
        call.key_cache = memory.as_strided((blocks, 4, 3, 16), (stride, 48, 16, 1))
        call.value_cache = memory[1000:].as_strided((blocks, 4, 3, 16), (stride, 48, 16, 1))
        call()
    _, k, _ = call.separately()
    assert_equal(call.key_cache[4, 3], k[0].clamp(-448, 448).to(E4M3))
    assert_equal(call.value_cache[4, 0], call.v[2].to(E4M3))


# ----------------------------------------------------------------------------------------------------- 8-bit floats


def scale_of(kind, heads, device):
    """A scale of every shape that a call takes."""
    return {
        "none": lambda: None, "scalar": lambda: torch.tensor(0.37, device=device),
        "tensor": lambda: torch.tensor([0.011], device=device), "head": lambda: torch.rand(heads, device=device) + 0.01,
    }[kind]()  # fmt: skip


def quantized(x, dtype, scale):
    """The nearest 8-bit float of each quotient, found among all of them in float64, ties to even codes."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    codes = codes[codes.isfinite()].unique()
    wanted = (x.cpu().float() / (1.0 if scale is None else scale.cpu().view(-1, 1))).double()
    above = torch.searchsorted(codes, wanted.clamp(codes[0], codes[-1])).clamp(1, len(codes) - 1)
    low, high = codes[above - 1], codes[above]
    clamped = wanted.clamp(codes[0], codes[-1])
    even = (low.to(dtype).view(torch.uint8) % 2) == 0
    nearest = torch.where((clamped - low < high - clamped) | ((clamped - low == high - clamped) & even), low, high)
    return torch.where(wanted.isnan(), wanted, nearest).to(dtype)


@pytest.mark.parametrize("layout, dtype", zip(LAYOUTS, FLOAT8_DTYPES, strict=True))
@pytest.mark.parametrize("kind", ["none", "scalar", "tensor", "head"])
def test_8_bit_floats_are_the_nearest_ones(device, dtype, kind, layout):
    call = example(device, dtype=torch.float16, cache_dtype=dtype, layout=layout, head_dim=24, rotary_dim=16)
    scales = {f"{name}_scale": scale_of(kind, n, call.q.device) for name, n in (("q", 5), ("k", 3), ("v", 3))}
    call.v[0, 0, :7] = torch.tensor([float("nan"), float("inf"), -float("inf"), 65504.0, -0.0, 6e-8, -6e-8])
    call.slot_mapping[0] = 27
    q, k, _ = call.separately()
    out = call(q_out=torch.empty(call.q.shape, dtype=dtype, device=call.q.device), **scales)
    assert_equal(out.cpu(), quantized(q, dtype, scales["q_scale"]))
    for x, cache, scale in ((k, call.key_cache, "k_scale"), (call.v, call.value_cache, "v_scale")):
        expected = call.written(quantized(x, dtype, scales[scale]).to(cache.device), cache)
        assert_equal(cache, expected)


@pytest.mark.parametrize("dtype", FLOAT8_DTYPES)
def test_every_8_bit_float_and_every_tie(device, dtype):
    """All finite numbers of the dtype, all numbers halfway between two of them, and their neighbours in float32."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    codes = codes[codes.isfinite()].unique()
    values = torch.cat((codes, (codes[1:] + codes[:-1]) / 2, codes * 1.0001, codes * 0.9999))
    neighbours = [torch.nextafter(values, torch.tensor(far)) for far in (1e9, -1e9)]
    values = torch.cat((values, *neighbours))
    values = torch.nn.functional.pad(values, (0, -len(values) % 32)).view(-1, 1, 32)
    call = example(device, tokens=len(values), heads=(1, 1), head_dim=32, cache_dtype=dtype)
    call.v = values.to(call.q.device)
    call.slot_mapping = torch.arange(len(values), device=call.q.device)
    call()
    stored = call.value_cache.flatten(0, 1)[: len(values)].cpu()
    assert_equal(stored, quantized(values, dtype, None))


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_cache_in_another_dtype(device, cache_dtype):
    call = example(device, dtype=torch.float16, cache_dtype=cache_dtype)
    _, k, _ = call.separately()
    call()
    expected = call.written(k, call.key_cache)
    if cache_dtype == torch.bfloat16 and INTERPRETED:  # the interpreter truncates bfloat16
        torch.testing.assert_close(call.key_cache, expected, rtol=2**-7, atol=0)
    else:
        assert_equal(call.key_cache, expected)


def test_the_bound_of_the_norm_grows_with_the_head():
    """Half of D + 1 roundings and of 4 units of the quotient, 4 units of the reciprocal root, and two products."""
    compute = Rounding.nearest(torch.float32)
    errors = [norm_error(d, compute) / FLOAT32_UNIT for d in (64, 128, 256)]
    assert errors == pytest.approx([(d + 1) / 2 + 2 + 4 + 2 for d in (64, 128, 256)], rel=1e-4)
    assert norm_error(64, compute, offset=True) / FLOAT32_UNIT == pytest.approx(41.5, rel=1e-4)


# -------------------------------------------------------------------------------------------------------------- MLA


def latent_example(device, *, tokens=6, heads=5, rotary_dim=8, latent=40, dtype=torch.float32, cache_dtype=None):
    """The arguments of `ropelab.mla_rope_and_cache`: q_pe is the tail of every head of q."""
    q = torch.randn(tokens, heads, 24 + rotary_dim).to(device, dtype)
    kv = torch.randn(tokens, latent + rotary_dim).to(device, dtype)
    cache = torch.full((5, 3, latent + rotary_dim), POISON).to(device, cache_dtype or dtype)
    slots = torch.tensor([14, -1, 0, 7, 5], device=q.device)
    cos, sin = ropelab.rotary_table(20, rotary_dim, device=q.device)
    options = {"cos": cos, "sin": sin, "positions": torch.arange(tokens, device=q.device) + 2}
    return (q[..., 24:], kv[:, latent:], kv[:, :latent], cache, slots), options


def test_latent_attention_in_place(device):
    (q_pe, k_pe, kv_c, cache, slots), options = latent_example(device)
    q, k = ropelab.apply_rope(q_pe, k_pe[:, None], seq_format="thd", **options)
    latent = kv_c.clone()
    assert ropelab.mla_rope_and_cache(q_pe, k_pe, kv_c, cache, slots, q_out=q_pe, k_out=k_pe, **options) is q_pe
    assert_equal(q_pe, q)
    assert_equal(k_pe, k[:, 0])
    assert_equal(kv_c, latent)


@pytest.mark.parametrize("dtype", FLOAT8_DTYPES)
def test_latent_attention_in_8_bit_floats(device, dtype):
    (q_pe, k_pe, kv_c, cache, slots), options = latent_example(device, cache_dtype=dtype)
    scale = torch.tensor([0.05], device=q_pe.device)
    _, k = ropelab.apply_rope(q_pe, k_pe[:, None], seq_format="thd", **options)
    ropelab.mla_rope_and_cache(q_pe, k_pe, kv_c, cache, slots, kv_scale=scale, **options)
    expected = quantized(torch.cat((kv_c, k[:, 0]), -1), dtype, scale)
    assert_equal(cache[4, 2].cpu(), expected[0])
    assert_equal(cache.flatten(0, 1)[1].cpu(), torch.full_like(expected[0].float(), POISON).to(dtype))
