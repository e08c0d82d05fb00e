"""Calls of `rope_and_cache`: wrong arguments, compilers, remembered calls, autograd, programs of any size."""

import pytest
import torch

import ropelab
from ropelab.call import operation
from ropelab.kernels import INTERPRETED, run
from tests.ops.test_paged_cache import assert_equal, example
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
    from ropelab.kernels import tile_of

    tile = tile_of.CacheTile(block_rows, 1, 4, passes)
    monkeypatch.setattr(tile_of, "cache_rows", lambda *arguments, **options: tile)
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
    for module in (run, operation):
        monkeypatch.setattr(module, "MAX_BATCH", 2)
    forget(monkeypatch)
    call = example(batch=5, tokens=2, seq_format="bshd")
    with ropelab.use_backend("triton"):
        found = call()
    q, _, caches = call.separately()
    assert_equal(found, q)
    assert_equal(call.key_cache, caches[0])


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
