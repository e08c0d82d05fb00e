"""Every name of the library shows a call, and the call runs."""

import inspect
import re

import pytest
import torch

import ropelab

B, S, T, D, SLOTS = 1, 64, 64, 128, torch.arange(64)


def tables(rotary_dim):
    cos, sin = ropelab.rotary_table(4096, rotary_dim)
    return {"cos": cos, "sin": sin}


def rows(heads, features=D):
    return torch.randn(T, heads, features)


def paged(*shape):
    return torch.zeros(4, 16, *shape)


DENSE = {"q": torch.randn(B, S, 8, D), "k": torch.randn(B, S, 2, D), **tables(D)}
CACHED = {"q": rows(8), "k": rows(2), "v": rows(2), "key_cache": paged(2, D), "value_cache": paged(2, D)}
CACHED |= {"slots": SLOTS, "caches": (paged(2, D), paged(2, D)), **tables(D)}
LATENT = {"q": torch.randn(B, S, 8, D + 64), "kv": torch.randn(B, S, 8, 2 * D), "k_pe": torch.randn(B, S, 1, 64)}
LATENT |= {"nope_dim": D, **tables(64)}
CONFIG = {
    "model_type": "llama", "hidden_size": 512, "num_attention_heads": 4, "max_position_embeddings": 64,
    "rope_theta": 10_000.0,
}  # fmt: skip
GIVEN = {
    "qkv_rope": DENSE | {"x": torch.randn(B, S, 32), "weight": torch.randn(12 * D, 32)},
    "qkv_rope_and_cache": CACHED | {"x": torch.randn(T, 32), "weight": torch.randn(12 * D, 32)},
    "rope_and_cache": CACHED, "rotate_cached_keys": CACHED,
    "mla_rope_and_cache": {
        "q_pe": rows(8, 64), "k_pe": torch.randn(T, 64), "kv_c": torch.randn(T, 512), "kv_cache": paged(512 + 64),
        "slots": SLOTS, **tables(64),
    },
    "assemble_mla": LATENT, "assemble_mla_kv": LATENT, "rotate_mla_query": LATENT,
    "rope_and_quantize": {"x": rows(8, 512).bfloat16(), **tables(64)},
    "rope_and_quantize_indexer": {"q": rows(8), "weights": torch.randn(T, 8), **tables(64)},
    "rope_and_block_scaled_cache": {
        "q": rows(8, 512).bfloat16(), "kv": torch.randn(T, 512).bfloat16(), "slots": SLOTS,
        "kv_cache": torch.zeros(4, 64 * 584, dtype=torch.uint8), **tables(64),
    },
    "convert_layout": {"weight": torch.randn(8 * D, 32)},
    "axial_tables": {"positions": ropelab.text_positions(T), **tables(D)},
    "PackedSequences": {"q": rows(8), "k": rows(2), "cu_seqlens": torch.tensor([0, 10, T]), **tables(D)},
    "RotaryEmbedding": DENSE | {"cache_length": 4, "positions": SLOTS, "config": CONFIG},
    "mrope_axes": DENSE | {"positions": torch.arange(T).expand(3, T), **tables(64)},
}  # fmt: skip
"""Name -> what its example takes for granted; `DENSE` for all others."""
NAMES = [name for name in ropelab.__all__ if callable(getattr(ropelab, name))]


@pytest.mark.parametrize("name", NAMES)
def test_the_call_that_a_docstring_shows_runs(name, torch_backend):
    text = inspect.getdoc(getattr(ropelab, name))
    calls = re.findall(r"^Example: ``([^`]*)``\.$", text, re.MULTILINE)
    calls += [inspect.cleandoc("\n" + block) for block in re.findall(r"::\n\n((?:    .*\n)+)", text) if " = " in block]
    assert calls, f"{name}: its docstring shows no call"
    weights = {"q_weight": torch.ones(D), "k_weight": torch.ones(D), "config": CONFIG}
    exec(calls[0], {"torch": torch, **vars(ropelab), **weights, **GIVEN.get(name, DENSE)})
