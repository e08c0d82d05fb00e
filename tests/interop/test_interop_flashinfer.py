"""FlashInfer's append: the adapter, and FlashInfer's kernel on a GPU."""

import pytest
import torch

import ropelab
from ropelab.bench import packages
from ropelab.interop.flashinfer import rope_quantize_fp8_append_paged_kv_cache, slot_mapping
from ropelab.kernels.float8 import FLOAT8_DTYPES
from tests.ops.test_paged_cache import POISON, assert_equal, quantized

E4M3, E5M2 = FLOAT8_DTYPES
LENGTHS, APPENDED = (20, 3, 33), (5, 3, 7)
"""The tokens of three requests in the cache, with the tokens that a call appends, and their numbers."""


def append_call(device="cpu", *, heads=(4, 2), rope_dim=16, nope_dim=0, latent=False, dtype=torch.float32,
                cache_dtype=E4M3, kv_layout="NHD", page_size=4, scale=1.0, seed=0):  # fmt: skip
    """The arguments of the function by name. Two tokens of padding follow the tokens of the requests."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def cache(*shape):
        return torch.full(shape, POISON, device=device).to(cache_dtype)

    (q_heads, k_heads), tokens = heads, sum(APPENDED) + 2
    pages = [-(-length // page_size) for length in LENGTHS]
    of_requests = torch.randperm(2 * sum(pages), generator=generator, device=device)[: sum(pages)].int()
    batch = [i for i, n in enumerate(APPENDED) for _ in range(n)] + [-1, -1]
    places = [length - n + i for length, n in zip(LENGTHS, APPENDED, strict=True) for i in range(n)] + [0, 0]
    positions = torch.tensor(places, device=device, dtype=torch.int32)
    q = draw(tokens, q_heads, rope_dim + nope_dim)
    k = draw(tokens, *(() if latent else (k_heads,)), rope_dim + nope_dim)
    sizes = (2 * sum(pages), page_size)
    if latent:
        caches = cache(*sizes, nope_dim), cache(*sizes, rope_dim)
    else:
        places_and_heads = (page_size, k_heads) if kv_layout == "NHD" else (k_heads, page_size)
        caches = tuple(cache(sizes[0], *places_and_heads, rope_dim + nope_dim) for _ in range(2))
    return {
        "q_rope": q[..., :rope_dim], "k_rope": k[..., :rope_dim], "q_nope": q[..., rope_dim:],
        "k_nope": k[..., rope_dim:], "v": None if latent else draw(tokens, k_heads, rope_dim + nope_dim),
        "cos_sin_cache": torch.cat(ropelab.rotary_table(64, rope_dim, device=device), -1), "pos_ids": positions,
        "paged_kv_cache": caches, "kv_indices": of_requests,
        "kv_indptr": torch.tensor([0, *torch.tensor(pages).cumsum(0)], dtype=torch.int32, device=device),
        "batch_indices": torch.tensor(batch, dtype=torch.int32, device=device), "positions": positions,
        "is_neox": True, "quantize_dtype": cache_dtype, "quant_scale_q": scale, "quant_scale_kv": scale,
        "page_size": page_size, "kv_layout": kv_layout,
    }  # fmt: skip


def slots_of(call):
    """The slots of the tokens, place by place."""
    size, found = call["page_size"], []
    for request, place in zip(call["batch_indices"].tolist(), call["positions"].tolist(), strict=True):
        if request < 0:
            found.append(-1)
            continue
        page = call["kv_indices"][call["kv_indptr"][request] + place // size]
        found.append(int(page) * size + place % size)
    return found


def rows_of(call, index):
    """A cache as rows of slots."""
    cache = call["paged_kv_cache"][index]
    if call["kv_layout"] == "HND" and cache.ndim == 4:
        cache = cache.transpose(1, 2)
    return cache.flatten(0, 1)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_slots(page_size):
    call = append_call(page_size=page_size)
    names = ("kv_indices", "kv_indptr", "batch_indices", "positions", "page_size")
    assert slot_mapping(*(call[name] for name in names)).tolist() == slots_of(call)


OUTSIDE = [
    ("positions", 20, "places in the pages of the request, got 20"),
    ("positions", -1, "places in the pages of the request, got -1"),
    ("positions", 2**63 - 1, "places in the pages of the request, got 9223372036854775807"),
    ("batch_indices", 3, "requests below 3, as kv_indptr has, got 3"),
    ("kv_indptr", -5, "places in kv_indices up to 15, got -5"),
    ("kv_indptr", 16, "places in kv_indices up to 15, got 16"),
    ("kv_indices", -1, "pages from 0 to 2147483647, got -1"),
]


def with_value(name, value):
    """The arguments of `slot_mapping` with a value where the first token reads."""
    call = {key: append_call()[key] for key in ("kv_indices", "kv_indptr", "batch_indices", "positions", "page_size")}
    call[name] = call[name].long()
    call[name][call["positions"][0] // 4 if name == "kv_indices" else 0] = value
    return call


@pytest.mark.parametrize("where", ["traced", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name, value, message", OUTSIDE)
def test_a_place_that_the_host_cannot_read_is_skipped(monkeypatch, where, name, value, message):
    call = with_value(name, value)
    if where == "traced":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    else:
        call = {key: x.to(where) if isinstance(x, torch.Tensor) else x for key, x in call.items()}
    slots = slot_mapping(**call).tolist()
    assert slots[0] == -1 and set(slots) <= {-1, *slots_of(append_call())}


@pytest.mark.parametrize("kv_indptr, pages", [([0], 0), ([0], 3), ([0, 0, 0], 0)])
def test_without_requests_or_pages_no_token_has_a_slot(kv_indptr, pages):
    indices, nobody = torch.arange(pages), torch.tensor([-1, -1])
    assert slot_mapping(indices, torch.tensor(kv_indptr), nobody, torch.zeros(2).long(), 4).tolist() == [-1, -1]
    assert slot_mapping(indices, torch.tensor(kv_indptr), nobody[:0], nobody[:0], 4).tolist() == []


@pytest.mark.parametrize("kind", ["GQA", "GQA, HND", "GQA, partial", "GQA, apart", "MLA"])
@pytest.mark.parametrize("is_neox, dtype, scale", [(True, E4M3, 1.0), (False, E5M2, 7.0)])
def test_the_function_rotates_quantizes_and_appends(device, kind, is_neox, dtype, scale):
    sizes = {"GQA": {}, "GQA, HND": {"kv_layout": "HND"}, "MLA": {"latent": True, "nope_dim": 40}}
    call = append_call(cache_dtype=dtype, scale=scale, **sizes.get(kind, {"nope_dim": 8}))
    if kind == "GQA, apart":
        call["k_nope"] = call["k_nope"].clone()
    call["is_neox"], latent = is_neox, kind == "MLA"
    cos, sin = call["cos_sin_cache"].chunk(2, -1)
    k_rope = call["k_rope"][:, None] if latent else call["k_rope"]
    layout = "split_half" if is_neox else "interleaved"
    where = {"cos": cos, "sin": sin, "positions": call["pos_ids"], "seq_format": "thd", "layout": layout}
    q, k = ropelab.apply_rope(call["q_rope"], k_rope, **where)
    q_rope, q_nope = rope_quantize_fp8_append_paged_kv_cache(**call)
    by = None if scale == 1 else torch.tensor([1 / scale])
    assert_equal(q_rope, quantized(q, dtype, by))
    assert_equal(q_nope, quantized(call["q_nope"], dtype, by))
    if latent:
        stored = [call["k_nope"], k[:, 0]]
    else:
        stored = [torch.cat((k, call["k_nope"]), -1), call["v"]]
    for i, x in enumerate(stored):
        rows = rows_of(call, i)
        expected = torch.full_like(rows.float(), POISON).to(dtype).view(torch.uint8)
        for token, slot in enumerate(slots_of(call)):
            if slot >= 0:
                expected[slot] = quantized(x[token], dtype, by).view(torch.uint8)
        assert_equal(rows, expected.view(dtype))


def test_given_outputs_are_written(device):
    call = append_call(nope_dim=8)
    full = torch.empty(17, 4, 24).to(E5M2)
    outs = {"q_rope_out": full[..., 8:], "q_nope_out": full[..., :8]}
    found = rope_quantize_fp8_append_paged_kv_cache(**call | outs | {"quantize_dtype": None})
    assert found[0] is outs["q_rope_out"] and found[1] is outs["q_nope_out"]
    expected = rope_quantize_fp8_append_paged_kv_cache(**append_call(nope_dim=8) | {"quantize_dtype": E5M2})
    for x, y in zip(found, expected, strict=True):
        assert_equal(x, y)


# ------------------------------------------------------------------------------------------------ the real function


def real():
    """The function of FlashInfer 0.7.2, with its kernel compiled."""
    from ropelab.bench.peers import flashinfer

    version, _ = packages.locate(flashinfer.PACKAGE, "0.7.2.post1")
    return flashinfer.function(version, flashinfer.APPEND)


REAL = {
    "GQA": {"heads": (32, 8), "rope_dim": 128},
    "GQA, HND": {"heads": (8, 8), "rope_dim": 128, "kv_layout": "HND"},
    "GQA, partial": {"heads": (28, 4), "rope_dim": 64, "nope_dim": 64},
    "MLA": {"heads": (16, 1), "rope_dim": 64, "nope_dim": 512, "latent": True},
}


@pytest.mark.peers
@pytest.mark.gpu
@pytest.mark.parametrize("kind", REAL)
@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("cache_dtype", FLOAT8_DTYPES)
def test_the_real_function(kind, is_neox, cache_dtype):
    """Both differ by a rounding of k to bfloat16: a few results are the 8-bit float beside, and most are the same.

    Results within 2^-9 of the middle of two 8-bit floats can differ: for e4m3 fewer than one in 16.
    """
    theirs, sizes = real(), {"dtype": torch.bfloat16, "cache_dtype": cache_dtype, "page_size": 16} | REAL[kind]
    ours_call, their_call = append_call("cuda", **sizes), append_call("cuda", **sizes)
    ours_call["is_neox"] = their_call["is_neox"] = is_neox
    # A thread of FlashInfer reads twice as many sines as it needs, beyond the last row.
    their_call["cos_sin_cache"] = torch.cat((their_call["cos_sin_cache"], their_call["cos_sin_cache"][-1:]))
    found, expected = rope_quantize_fp8_append_paged_kv_cache(**ours_call), theirs(**their_call)
    live = ours_call["batch_indices"] >= 0
    pairs = [(x[live], y[live]) for x, y in zip(found, expected, strict=True) if x.numel()]
    pairs += [(rows_of(ours_call, i), rows_of(their_call, i)) for i in range(2)]
    for x, y in pairs:
        steps = (code(x) - code(y)).abs()
        assert steps.max() <= 1 and (steps > 0).float().mean() < 1 / 16


def code(x):
    """The place of each 8-bit float among all 8-bit floats."""
    bits = x.contiguous().view(torch.uint8).int()
    return torch.where(bits < 128, bits, 128 - bits)
