"""Valid calls of every public function, in which `hostile_adapters` replaces each argument of the signature."""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

import numpy as np
import torch

import ropelab
from tests.ops.adapter_calls import CONFIG, COS, LATENT, PROJECTION, QKV, SIN, SLOTS, THETA, K, Q
from tests.ops.hostile_adapters import Adapter, copied
from tests.ops.specs import OPERATORS, arguments

EIGHT = torch.float8_e4m3fn
TABLES = {"cos": COS, "sin": SIN}
PLACED = TABLES | {"positions": torch.arange(4)}
CACHE = torch.zeros(5, 4, 1, 16)  # larger than any other tensor of a call
CACHES = {"key_cache": CACHE, "value_cache": CACHE + 1, "slot_mapping": SLOTS}
OF_FREQUENCIES = {
    "x": Q[0, :, 0, :4], "seq_format": "thd", "cos": None, "sin": None, "frequencies": ropelab.rotary_frequencies(16),
}  # fmt: skip
ROTARY = ropelab.RotaryEmbedding(ropelab.rope_from_config(CONFIG))


def of(function: Callable, *free: str, **arguments: Any) -> Adapter:
    """The function with a valid call. Caches may have 8-bit floats, and frequencies any int64."""
    free += ("beyond",) * ("frequencies" in arguments)
    free += ("of 8 bits",) * any(name.endswith("cache") for name in arguments)
    return Adapter(function, lambda: copied(arguments), free)


def of_operator(name: str, *free: str, **more: Any) -> Adapter:
    """The function with the valid call of `tests.ops.specs`."""
    return of(OPERATORS[name].function, *free, **arguments(name) | more)


@wraps(ropelab.use_backend)
def use_backend(**arguments: Any) -> None:
    with ropelab.use_backend(**arguments):
        pass


@wraps(ropelab.grid_positions)
def grid_positions(*, sizes: Any, **options: Any) -> torch.Tensor:
    return ropelab.grid_positions(*(sizes if isinstance(sizes, (tuple, list, np.ndarray)) else (sizes,)), **options)


PUBLIC = {
    "apply_rope": of(
        ropelab.apply_rope, q=Q, k=K, **PLACED, layout="split_half", out_layout="interleaved", seq_format="bshd",
        rotary_slice=(0, 16), inverse=True, inplace=False,
    ),
    "apply_rope, frequencies": of(
        ropelab.apply_rope, "below 0", q=Q, k=K, frequencies=ropelab.rotary_frequencies(16), offsets=3, inplace=True
    ),
    "apply_rope, in place": of(ropelab.apply_rope, "below 0", q=Q, k=K, **TABLES, offsets=1, inplace=True),
    "apply_rope, axes": of(
        ropelab.apply_rope, q=Q, k=K, **TABLES, positions=torch.arange(8).view(2, 4) % 5, axes=(0, 0, 1, 1, 0, 0, 1, 1)
    ),
    "apply_rope, offsets": of(ropelab.apply_rope, q=Q, k=K, **TABLES, offsets=torch.tensor([1, 2])),
    "apply_rope, rows": of(ropelab.apply_rope, q=Q, k=K, **TABLES),
    "apply_qk_norm_rope": of(
        ropelab.apply_qk_norm_rope, q=Q, k=K, q_weight=COS[0].repeat(2), k_weight=SIN[1].repeat(2), **PLACED,
        eps=1e-6, layout="split_half", seq_format="bshd", rotary_slice=(0, 16),
    ),
    "apply_qk_norm_rope, axes": of(
        ropelab.apply_qk_norm_rope, q=Q, k=K, q_weight=COS[0].repeat(2), k_weight=SIN[1].repeat(2), **TABLES,
        positions=torch.arange(8).view(2, 4) % 5, axes=(0, 0, 1, 1, 0, 0, 1, 1),
    ),
    "apply_qk_norm_rope, rows": of(
        ropelab.apply_qk_norm_rope, "below 0", q=Q, k=K, q_weight=COS[0].repeat(2), k_weight=SIN[1].repeat(2), **TABLES,
        offsets=1,
    ),
    "assemble_mla": of_operator(
        "assemble_mla", layout="interleaved", out_layout="interleaved", seq_format="bshd", inverse=True, inplace=False,
        copy_value=True,
    ),
    "assemble_mla, in place": of_operator("assemble_mla, in place"),
    "assemble_mla, rows": of(
        ropelab.assemble_mla, "below 0", q=Q, kv=torch.cat((Q, Q), -1)[..., :20], k_pe=K[..., :8], cos=COS[:, ::2],
        sin=SIN[:, ::2], offsets=1,
    ),
    "assemble_mla_kv": of_operator(
        "assemble_mla_kv", layout="interleaved", out_layout="interleaved", seq_format="bshd", inverse=True,
        copy_value=True,
    ),
    "assemble_mla_kv, rows": of(
        ropelab.assemble_mla_kv, "below 0", kv=torch.cat((Q, Q), -1)[..., :20], k_pe=K[..., :8], nope_dim=8,
        cos=COS[:, ::2], sin=SIN[:, ::2], offsets=1,
    ),
    "rotate_mla_query": of_operator(
        "rotate_mla_query, consumed", layout="interleaved", out_layout="interleaved", seq_format="bshd", inverse=True
    ),
    "rotate_mla_query, rows": of(
        ropelab.rotate_mla_query, "below 0", q=Q, nope_dim=8, cos=COS[:, ::2], sin=SIN[:, ::2], offsets=1
    ),
    "rope_and_cache": of_operator("rope_and_cache", layout="split_half", rotary_slice=(0, 8)),
    "rope_and_cache, numbers": of(
        ropelab.rope_and_cache, "below 0", q=Q[0], k=K[0], v=K[1], **CACHES, **TABLES, q_weight=COS[0].repeat(2),
        k_weight=SIN[1].repeat(2), weight_offset=1.0, norm_first=True, seq_format="thd", offsets=1,
    ),
    "rope_and_cache, frequencies": of(
        ropelab.rope_and_cache, q=Q[0], k=K[0], v=K[1], **CACHES, frequencies=ropelab.rotary_frequencies(16),
        positions=torch.arange(8).view(2, 4), axes=(0, 0, 1, 1, 0, 0, 1, 1),
    ),
    "rope_and_cache, q apart": of_operator("rope_and_cache, q apart"),
    "rope_and_cache, 8-bit floats": of_operator("rope_and_cache, 8-bit floats"),
    "rope_and_cache, made scales": of_operator("rope_and_cache, made scales"),
    "mla_rope_and_cache": of(
        ropelab.mla_rope_and_cache, q_pe=Q[0, ..., :8], k_pe=K[0, :, 0, :8], kv_c=K[1, :, 0, :12],
        kv_cache=LATENT.to(EIGHT), slot_mapping=SLOTS, cos=COS[:, ::2], sin=SIN[:, ::2], layout="interleaved",
        positions=torch.arange(4), q_out=Q[1, ..., :8].to(EIGHT), k_out=K[1, :, 0, :8] + 1, q_nope=Q[0, ..., 8:],
        q_nope_out=Q[1, ..., 8:].to(EIGHT), q_scale=torch.ones(1), kv_scale=torch.ones(1),
    ),
    "mla_rope_and_cache, made scales": of(
        ropelab.mla_rope_and_cache, q_pe=Q[0, ..., :8], k_pe=K[0, :, 0, :8], kv_c=K[1, :, 0, :12],
        kv_cache=LATENT.to(EIGHT), slot_mapping=SLOTS, frequencies=ropelab.rotary_frequencies(8),
        positions=torch.arange(8).view(2, 4), axes=(0, 0, 1, 1), q_out=Q[1, ..., :8].to(EIGHT),
        q_scale_out=Q[0, ..., 0] + 1, kv_scale_cache=LATENT[..., 0] + 1,
    ),
    "mla_rope_and_cache, rows": of(
        ropelab.mla_rope_and_cache, "below 0", q_pe=Q[0, ..., :8], k_pe=K[0, :, 0, :8], kv_c=K[1, :, 0, :12],
        kv_cache=LATENT, slot_mapping=SLOTS, cos=COS[:, ::2], sin=SIN[:, ::2], offsets=1,
    ),
    "qkv_rope": of(
        ropelab.qkv_rope, path="pass", **PROJECTION, bias=QKV[2], q_weight=COS[0].repeat(2), k_weight=SIN[1].repeat(2),
        eps=1e-6, positions=torch.arange(4), rotary_slice=(0, 16),
    ),
    "qkv_rope, frequencies": of(
        ropelab.qkv_rope, x=Q[:, :, 0, :4], weight=QKV.T.split((48, 16, 16)), q_heads=3, k_heads=1,
        frequencies=ropelab.rotary_frequencies(16),
        positions=torch.arange(8).view(2, 4), axes=(0, 0, 1, 1, 0, 0, 1, 1),
    ),
    "qkv_rope, rows": of(ropelab.qkv_rope, "below 0", **PROJECTION, offsets=1),
    "qkv_rope_and_cache": of(
        ropelab.qkv_rope_and_cache, path="pass", **PROJECTION | {"x": Q[0, :, 0, :4], "seq_format": "thd"}, **CACHES,
        bias=QKV[2], positions=torch.arange(4),
    ),
    "qkv_rope_and_cache, results": of(
        ropelab.qkv_rope_and_cache, "below 0", **PROJECTION | {"x": Q[0, :, 0, :4], "seq_format": "thd"}, **CACHES,
        q_out=Q[0] + 1, k_out=K[0] + 1, v_out=K[1] + 1, q_weight=COS[0].repeat(2), k_weight=SIN[1].repeat(2), eps=1e-6,
        weight_offset=1.0, norm_first=True, rotary_slice=(0, 16), offsets=1,
    ),
    "qkv_rope_and_cache, 8-bit floats": of(
        ropelab.qkv_rope_and_cache, **PROJECTION | OF_FREQUENCIES, slot_mapping=SLOTS, key_cache=CACHE.to(EIGHT),
        value_cache=CACHE.to(EIGHT), q_out=Q[0].to(EIGHT), q_nope=Q[0, ..., :4], q_nope_out=Q[1, ..., :4].to(EIGHT),
        q_scale=torch.ones(1), k_scale=torch.ones(1), v_scale=torch.ones(1), positions=torch.arange(8).view(2, 4),
        axes=(0, 0, 1, 1, 0, 0, 1, 1),
    ),
    "qkv_rope_and_cache, made scales": of(
        ropelab.qkv_rope_and_cache, **PROJECTION | OF_FREQUENCIES, slot_mapping=SLOTS, key_cache=CACHE.to(EIGHT),
        value_cache=CACHE.to(EIGHT), q_out=Q[0].to(EIGHT), q_scale_out=Q[0, ..., 0] + 1, k_scale_cache=CACHE[..., 0],
        v_scale_cache=CACHE[..., 1],
    ),
    "rotate_cached_keys": of_operator("rotate_cached_keys, 8-bit floats", layout="interleaved", rotary_slice=(0, 8)),
    "rotate_cached_keys, frequencies": of(
        ropelab.rotate_cached_keys, "below 0", "a tensor", key_cache=CACHE + 1, slots=SLOTS, deltas=-2,
        frequencies=ropelab.rotary_frequencies(16),
    ),
    "rotate_cached_keys, axes": of(
        ropelab.rotate_cached_keys, "below 0", key_cache=CACHE + 1, slots=SLOTS, **TABLES,
        deltas=torch.tensor([[3, -2, 5, 1], [0, 7, -7, 2]]), axes=(0, 1) * 4,
    ),
    "rope_and_quantize": of(
        ropelab.rope_and_quantize, x=Q[0], **PLACED, groups=3, block_dim=8, scale_dtype=torch.float32,
        amax_epsilon=1e-4, round_first=True, inverse=True, rotary_slice=(0, 16),
    ),
    "rope_and_quantize, results": of(
        ropelab.rope_and_quantize, "below 0", x=Q[0], **TABLES, offsets=1, groups=3, block_dim=8,
        scale_dtype=torch.float32, out=Q[0].to(EIGHT), scales=Q[0, ..., :2],
    ),
    "rope_and_quantize_indexer": of(
        ropelab.rope_and_quantize_indexer, q=Q[0], weights=COS[:4, :3], **PLACED, weight_scale=0.5, amax_epsilon=1e-4,
        rotary_slice=(0, 16), out=Q[0].to(EIGHT), weights_out=SIN[:4, :3],
    ),
    "rope_and_quantize_indexer, rows": of(
        ropelab.rope_and_quantize_indexer, "below 0", q=Q[0], weights=COS[:4, :3], **TABLES, offsets=1
    ),
    "rope_and_block_scaled_cache": of(
        ropelab.rope_and_block_scaled_cache, q=Q[0].half(), kv=Q[1, :, 0].half(), slot_mapping=SLOTS,
        kv_cache=torch.zeros(3, 112, dtype=torch.uint8), cos=COS[:, :4], sin=SIN[:, :4], eps=1e-6, block_size=4,
        block_dim=8, positions=torch.arange(4), rotary_slice=(8, 16), q_out=Q[0].half() + 1,
    ),
    "rope_and_block_scaled_cache, rows": of(
        ropelab.rope_and_block_scaled_cache, "below 0", q=Q[0].half(), kv=Q[1, :, 0].half(), slot_mapping=SLOTS,
        kv_cache=torch.zeros(3, 112, dtype=torch.uint8), cos=COS[:, :4], sin=SIN[:, :4], block_size=4, block_dim=8,
        offsets=1,
    ),
    "rotary_table": of(
        ropelab.rotary_table, "huge", seq_len=5, rotary_dim=16, base=1e4, dtype=torch.float32, device="cpu"
    ),
    "rotary_frequencies": of(ropelab.rotary_frequencies, "huge", rotary_dim=16, base=1e4, device="cpu"),
    "axial_tables": of(
        ropelab.axial_tables, "beyond", **TABLES, positions=torch.arange(8).view(2, 4), axes=(0, 0, 1, 1, 0, 0, 1, 1)
    ),
    "axial_rope": of(ropelab.axial_rope, "huge", axes_dims=(4, 6), base=1e4, layout="interleaved"),
    "Rope": of(
        ropelab.Rope, "huge", "axes beyond integers", inverse_frequencies=THETA, attention_factor=1.5, head_dim=24,
        first_feature=8, layout="split_half", out_layout="interleaved", axes=(0, 1) * 4, max_seq_len=128,
    ),
    "Rope.tables": of(
        ropelab.axial_rope((4, 6, 6)).tables, "beyond", seq_len=5, positions=torch.zeros(3, 4, dtype=torch.long),
        dtype=torch.float32, device="cpu",
    ),
    "Rope.frequencies": of(ropelab.Rope(THETA).frequencies, device="cpu"),
    "Rope.relative_to": of(ropelab.Rope(THETA).relative_to, other=ropelab.Rope(2 * THETA)),
    "Rope.at_length": of(
        ropelab.rope_from_config(CONFIG | {"rope_scaling": {"type": "dynamic", "factor": 2.0}}).at_length, seq_len=200
    ),
    "rope_from_config": of(
        ropelab.rope_from_config,
        config=CONFIG | {"layer_types": ["full_attention"], "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        layer_type="full_attention", layout="split_half", seq_len=200,
    ),
    "rope_from_config, layer": of(ropelab.rope_from_config, config=CONFIG | {"num_hidden_layers": 4}, layer=1),
    "RotaryEmbedding": of(
        ropelab.RotaryEmbedding, "huge", rope=16, base=1e4, layout="split_half", seq_format="bshd", dtype=torch.float32
    ),
    "RotaryEmbedding.from_config": of(
        ropelab.RotaryEmbedding.from_config, config=CONFIG | {"layer_types": ["full_attention"]},
        layer_type="full_attention", layout="split_half",
    ),
    "RotaryEmbedding.forward": of(
        ROTARY.forward, q=Q, k=K, positions=torch.arange(4), seq_len=8, inverse=True, inplace=True
    ),
    "RotaryEmbedding.forward, lengths unsaid": of(ROTARY.forward, q=Q, k=K, offsets=torch.tensor([1, 2])),
    "RotaryEmbedding.forward, one start": of(ROTARY.forward, "below 0", q=Q, k=K, offsets=3),
    "RotaryEmbedding.tables": of(ROTARY.tables, seq_len=5, device="cpu"),
    "RotaryEmbedding.prepare": of(ROTARY.prepare, seq_len=5, device="cpu"),
    "convert_layout": of(
        ropelab.convert_layout, "on meta", "bool", "complex", "of another dtype", "of 8 bits",
        x=torch.arange(96.0).view(48, 2), head_dim=16, source="split_half", target="interleaved", rotary_slice=(4, 12),
        heads=2,
    ),
    "mrope_axes": of(ropelab.mrope_axes, mrope_section=(2, 3, 3), mrope_interleaved=False),
    "grid_positions": of(grid_positions, "below 0", sizes=(2, 3), start=1, centred=(1,), device="cpu"),
    "text_positions": of(ropelab.text_positions, "below 0", tokens=4, start=2, axes=3, device="cpu"),
    "PackedSequences": of(
        ropelab.PackedSequences, "on meta", "below 0", cu_seqlens=torch.tensor([0, 4, 8]), total_tokens=10, offsets=3,
        cp_size=1, cp_rank=0, chunks="dual",
    ),
    "PackedSequences, offsets": of(
        ropelab.PackedSequences, cu_seqlens=torch.tensor([0, 4, 8]), total_tokens=10, offsets=torch.tensor([1, 2])
    ),
    "context_parallel_positions": of(
        ropelab.context_parallel_positions, seq_len=8, cp_size=2, cp_rank=1, chunks="dual", device="cpu"
    ),
    "use_backend": of(use_backend, name="torch"),
}  # fmt: skip


OPERATIONS = {
    "apply_rope", "apply_qk_norm_rope", "assemble_mla", "assemble_mla_kv", "rotate_mla_query", "rope_and_cache",
    "mla_rope_and_cache", "qkv_rope", "qkv_rope_and_cache", "rotate_cached_keys", "rope_and_quantize",
    "rope_and_quantize_indexer", "rope_and_block_scaled_cache",
}  # fmt: skip
"""The functions that launch a kernel."""
INFERRED = {"Rope": {"lengths", "remake", "inferred"}}
"""The parameters that only `ropelab.rope_from_config` gives."""


def functions() -> dict[str, set[str]]:
    """The public functions, classes and methods of ropelab with parameters -> the parameters."""
    found = {name: getattr(ropelab, name) for name in ropelab.__all__ if callable(getattr(ropelab, name))}
    for name, x in [*found.items()]:
        if isinstance(x, type):
            methods = [method for method, value in vars(x).items() if method[0] != "_" and hasattr(x, "__module__")]
            found |= {f"{name}.{method}": getattr(x, method) for method in methods if callable(getattr(x, method))}
    found = {
        name: {*signature(x).parameters} - {"self", "options"} - INFERRED.get(name, set()) for name, x in found.items()
    }
    return {name: parameters for name, parameters in found.items() if parameters}
