"""Calls of `rope_and_cache`: wrong arguments, compilers, remembered calls, autograd, programs of any size."""

import pytest
import torch

import ropelab
from ropelab.call import operation
from ropelab.kernels import INTERPRETED, addressing
from ropelab.kernels.float8 import FLOAT8_DTYPES
from tests.ops.test_paged_cache import POISON, assert_equal, example
from tests.support import forget


def grad(x):
    return x.detach().clone().requires_grad_()


def change(call, **changes):
    for name, x in changes.items():
        if hasattr(call, name):
            setattr(call, name, x(getattr(call, name)) if callable(x) else x)
        else:
            before = call.options.get(name)
            call.options[name] = x(before) if callable(x) else x
    return call


FLOAT8 = {"key_cache": lambda x: x.to(FLOAT8_DTYPES[0]), "value_cache": lambda x: x.to(FLOAT8_DTYPES[0])}
BAD = {
    "q of rank 4": ({"q": lambda x: x[None]}, "q: expected shape thd of rank 3"),
    "no k": ({"k": None}, "k: expected a torch.Tensor, got None"),
    "no slots": ({"slot_mapping": None}, "slot_mapping: expected a torch.Tensor, got None"),
    "v of other heads": ({"v": lambda x: x[:, :2]}, "v: expected k's number of heads 3, got 2"),
    "v of other tokens": ({"v": lambda x: x[:6]}, "v: expected k's sequence length 7, got 6"),
    "v without features": ({"v": lambda x: x[..., :0]}, "v: expected at least one feature"),
    "v elsewhere": ({"v": lambda x: x.to("meta")}, "v: expected q's device cpu, got meta"),
    "cache of rank 3": ({"key_cache": lambda x: x[0]}, r"key_cache: expected shape \[blocks, block_size, 3, 16\], got"),
    "cache in the order HND": (
        {"key_cache": lambda x: x.transpose(1, 2)},
        r"key_cache: expected shape \[blocks, block_size, 3, 16\], got \(7, 3, 4, 16\)",
    ),
    "empty blocks": ({"key_cache": lambda x: x[:, :0]}, r"key_cache: expected shape \[blocks, block_size, 3, 16\]"),
    "other blocks": (
        {"value_cache": lambda x: x[:6]},
        r"value_cache: expected key_cache's blocks and block_size \(7, 4\), got \(6, 4\)",
    ),
    "features apart": (
        {"key_cache": lambda x: torch.cat((x, x), -1)[..., ::2]},
        "key_cache: expected adjacent features",
    ),
    "one place for all tokens": (
        {"key_cache": lambda x: x[:1].expand(7, 4, 3, 16)},
        "key_cache: expected elements at distinct addresses",
    ),
    "bytes": ({"key_cache": lambda x: x.to(torch.uint8)}, "key_cache: expected one of .*float8_e4m3fn.* got uint8"),
    "slots of rank 2": ({"slot_mapping": lambda x: x[None]}, r"slot_mapping: expected shape \[slots\], got \(1, 7\)"),
    "slots of floats": ({"slot_mapping": lambda x: x.float()}, "slot_mapping: expected one of int32, int64, got float"),
    "too many slots": ({"slot_mapping": torch.arange(8)}, "slot_mapping: expected at most a slot for each of 7 tokens"),
    "slots elsewhere": ({"slot_mapping": lambda x: x.to("meta")}, "slot_mapping: expected q's device cpu, got meta"),
    "one weight": ({"q_weight": torch.ones(16)}, "k_weight: expected a torch.Tensor beside q_weight, got None"),
    "a short weight": (
        {"q_weight": torch.ones(8), "k_weight": torch.ones(8)},
        r"q_weight: expected shape \(16,\)",
    ),
    "a scale without need": ({"k_scale": torch.ones(1)}, "k_scale: expected no scale for the dtype of key_cache"),
    "a scale of q": ({"q_scale": torch.ones(1)}, "q_scale: expected no scale for the dtype of q_out, float32"),
    "scales of other heads": ({**FLOAT8, "k_scale": torch.ones(2)}, r"k_scale: expected shape \(\), \(1,\) or \(3,\)"),
    "a scale in float64": ({**FLOAT8, "v_scale": torch.ones(3).double()}, "v_scale: expected one of float32, got"),
    "a number": ({**FLOAT8, "v_scale": 1.0}, "v_scale: expected a torch.Tensor, got float 1.0"),
    "scales apart": ({**FLOAT8, "v_scale": torch.ones(6)[::2]}, "v_scale: expected a contiguous tensor"),
    "an output of another shape": ({"q_out": torch.zeros(7, 5, 8)}, r"q_out: expected shape \(7, 5, 16\)"),
    "an output of another dtype": ({"k_out": torch.zeros(7, 3, 16).half()}, "k_out: expected one of float32, got"),
    "8-bit floats for k_out": (
        {"k_out": torch.zeros(7, 3, 16).to(FLOAT8_DTYPES[0])},
        "k_out: expected one of float32, got float8_e4m3fn",
    ),
    "an unknown layout": ({"layout": "neox"}, "layout: expected one of"),
    "a position without a row": ({"positions": torch.full((7,), 27)}, "positions: expected |positions| below"),
    "positions beside offsets": ({"offsets": 3}, "offsets: expected no offsets beside positions"),
    "negative eps": ({"eps": -1.0}, "eps: expected a finite number >= 0"),
    "an offset that is no number": ({"weight_offset": None}, "weight_offset: expected a number"),
    "q with a gradient": ({"q": grad}, r"q: expected a tensor without grad, or torch.no_grad\(\)"),
    "a cache with a gradient": ({"key_cache": grad}, "key_cache: expected a tensor without grad"),
    "a table with a gradient": ({"cos": grad}, "cos: expected a tensor without grad"),
}


@pytest.mark.parametrize("wrong", BAD)
def test_wrong_arguments_are_named_before_anything_is_written(torch_backend, wrong):
    changes, match = BAD[wrong]
    call = change(example(), **changes)
    before = [x.detach().clone() if isinstance(x, torch.Tensor) else x for x in (*call.caches, call.q)]
    with pytest.raises((TypeError, ValueError), match=match):
        call()
    for x, y in zip((*call.caches, call.q), before, strict=True):
        assert x is None or x.is_meta or torch.equal(x.float(), y.float())


def test_gradients_are_no_matter_without_autograd():
    call = change(example(), q=grad)
    with torch.no_grad():
        assert not call().requires_grad


def test_inference_tensors():
    with torch.inference_mode():
        call = example()
        expected = call()
        cache = call.key_cache.clone()
    call.options["q_out"] = torch.empty(7, 5, 16)
    with pytest.raises(ValueError, match="key_cache: expected a tensor that is not an inference tensor outside of"):
        call()
    with torch.inference_mode():
        assert_equal(call(), expected)
        assert_equal(call.key_cache, cache)


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("block_rows", [1, 8, 32])
@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize("heads", [(1, 1), (5, 1), (6, 3), (24, 16)])
def test_programs_of_any_size_give_the_same_bits(monkeypatch, block_rows, passes, heads):
    from ropelab.kernels import paged_cache_triton

    tile = paged_cache_triton.CacheTile(block_rows, 1, 4, passes)
    monkeypatch.setattr(paged_cache_triton, "choose_tile", lambda *arguments, **options: tile)
    forget(monkeypatch)
    call = example(heads=heads, norm=True, value_dim=40, tokens=5)
    with ropelab.use_backend("triton"):
        found = call()
    q, _, caches = call.separately()
    assert_equal(found, q)
    for cache, expected in zip(call.caches, caches, strict=True):
        assert_equal(cache, expected)


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_more_batches_than_a_launch_holds(monkeypatch):
    for module in (addressing, operation):
        monkeypatch.setattr(module, "MAX_BATCH", 2)
    forget(monkeypatch)
    call = example(batch=5, tokens=2, seq_format="bshd")
    with ropelab.use_backend("triton"):
        found = call()
    q, _, caches = call.separately()
    assert_equal(found, q)
    assert_equal(call.key_cache, caches[0])


# -------------------------------------------------------------------------------------------------------- compilers


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(torch_backend, in_place, dynamic):
    def step(q, k, v, kv, slots, positions):
        where = {"cos": cos, "sin": sin, "positions": positions}
        if in_place:
            where |= {"q_out": q, "k_out": k}
        return ropelab.rope_and_cache(q, k, v, kv[0], kv[1], slots, **where) + 1

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for tokens in (7, 9):
        call = example(tokens=tokens)
        cos, sin = call.options["cos"], call.options["sin"]
        cos, sin = torch.nn.functional.pad(cos, (0, 0, 0, 20)), torch.nn.functional.pad(sin, (0, 0, 0, 20))
        found = []
        for function in (step, compiled):
            q, k = call.q.clone(), call.k.clone()
            kv = torch.stack(call.caches)
            found.append([function(q, k, call.v, kv, call.slot_mapping, call.options["positions"]), q, k, kv])
        for a, b in zip(*found, strict=True):
            assert_equal(a, b)
        assert not (found[0][3] == POISON).all()


@pytest.mark.parametrize("eps", [0.0, 1e-6])
@pytest.mark.parametrize("across", [False, True], ids=["heads", "tokens"])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_zeros_stay_zeros(device, dtype, norm_first, across, eps):
    """Heads of zeros give zeros, and so does a token without a position, whatever it holds."""
    q, k = torch.randn(4, 3, 12, device=device).to(dtype), torch.randn(4, 2, 12, device=device).to(dtype)
    for x in (q, k):
        x[0], x[1], x[2] = 0, torch.nan, torch.inf
    cos, sin = ropelab.rotary_table(8, 8, device=device)
    positions = torch.tensor([3, ropelab.NO_POSITION, ropelab.NO_POSITION, -2], device=device)
    weights = [torch.randn(12 * (heads if across else 1), device=device) for heads in (3, 2)]
    key_cache, value_cache = (torch.ones(1, 4, 2, 12, device=device).to(dtype) for _ in range(2))
    k_out = torch.empty_like(k)
    q_out = ropelab.rope_and_cache(
        q, k, k, key_cache, value_cache, torch.arange(4, device=device), cos=cos, sin=sin, positions=positions,
        q_weight=weights[0], k_weight=weights[1], eps=eps, norm_first=norm_first, k_out=k_out,
    )  # fmt: skip
    for y in (q_out, k_out, key_cache[0]):
        assert (y[:3] == 0).all() and y[3].isfinite().all() and (y[3] != 0).any()
