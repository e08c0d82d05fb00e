"""Shrink the configuration of any architecture of Transformers to a model of a few thousand weights."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

HIDDEN, HEADS, KEY_HEADS, HEAD_DIM, LAYERS, VOCABULARY, POSITIONS = 64, 4, 2, 16, 2, 96, 128

_SIZES: tuple[tuple[str, Any], ...] = (
    # a pattern for the name of a field -> its value
    (r"vocab_size(_per_layer_input)?|text_vocab_size|unpadded_vocab_size|n_vocab|audio_vocab_size", VOCABULARY),
    (r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_source_positions|max_text_tokens)", POSITIONS),
    (r"(decoder_|encoder_|num_)?(num_)?(hidden_layers|layers)|n_layers?|depth|num_(encoder|decoder)_layers", LAYERS),
    (r"(encoder|decoder)_layers|(encoder|decoder)_num_hidden_layers|n_layer", LAYERS),
    (r"(\w+_)?(num_attention_heads|attention_heads)|n_heads?|num_heads|query_heads", HEADS),
    (r"(\w+_)?(num_key_value_heads|kv_n_heads|num_kv_heads|n_head_kv)", KEY_HEADS),
    (r"(swa_|global_|cross_|mamba_|linear_|mla_)?(head_dim|key_head_dim|value_head_dim|d_head|kv_channels)", HEAD_DIM),
    (r"attention_head_dim|linear_(key|value)_head_dim|mamba_headdim|mamba_d_head", HEAD_DIM),
    (r"linear_num_(key|value)_heads|linear_num_heads|mamba_num_heads|mamba_n_heads", 4),
    (r"(\w+_)?hidden_size(_global)?|d_model|n_embd|embed_dim|dim|word_embed_proj_dim|embedding_size", HIDDEN),
    (r"out_hidden_size|projection_dim|output_dim|encoder_hidden_size|cross_hidden_size", HIDDEN),
    (
        r"(\w+_)?(intermediate_size|intermediate_dim|ffn_dim|ffn_hidden_size|mlp_dim|inner_dim)(_mlp)?|n_inner|ff_dim",
        48,
    ),
    (r"d_ff|encoder_ffn_dim|decoder_ffn_dim", 48),
    (r"hidden_size_per_layer_input", 8),
    (r"num_kv_shared_layers|num_nextn_predict_layers|num_mtp_layers|num_dense_layers|num_hash_layers", 0),
    (r"(n_routed|num|num_local|moe_num|mlp_num)_experts", 4),
    (r"num_experts_per_tok|moe_topk|top_k_experts|moe_k|num_experts_per_token|moe_top_k|num_selected_experts", 2),
    (r"(n|num|moe_num)_shared_experts|n_group|topk_group|num_expert_group", 1),
    (r"first_k_dense_replace|moe_layer_start_index", 1),
    (r"(moe|expert|shared_expert|shared|dense)_(intermediate_size|ffn_hidden_size)", 16),
    (r"q_lora_rank|kv_lora_rank|o_lora_rank", 16),
    (r"qk_rope_head_dim|qk_nope_head_dim", 8),
    (r"v_head_dim", 16),
    (r"qk_head_dim", 16),
    (r"index_head_dim", 16),
    (r"index_n_heads|index_num_heads", 4),
    (r"index_topk", POSITIONS),
    (r"mamba_d_state|ssm_state_size|state_size", 8),
    (r"mamba_n_groups|n_groups|mamba_ngroups", 1),
    (r"mamba_d_ssm", None),
    (r"mamba_chunk_size|chunk_size", 16),
    (r"sliding_window(_size)?|local_attention(_window_len)?|window_size|attention_chunk_size", 64),
    (r"query_pre_attn_scalar", HEAD_DIM),
    (r"rotary_dim", HEAD_DIM // 2),
    (r"image_size|crop_size|resolution", 16),
    (r"patch_size", 4),
    (r"pad_token_id|blank_token_id", 0),
    (r"bos_token_id|decoder_start_token_id", 1),
    (r"eos_token_id", 2),
    (r"lm_head_size|audio_token_index|image_token_(id|index)|video_token_(id|index)|audio_token_id", VOCABULARY - 1),
    (
        r"vision_(start|end)_token_id|image_(start|end)_token_id|boi_token_\w+|eoi_token_\w+|boa_token_id",
        VOCABULARY - 2,
    ),
)
_NEEDED = re.compile(r"head_dim|num_key_value_heads|num_attention_heads|\w*_experts|num_experts_per_tok|\w*_group$")
"""The fields that get a value even if their default is None."""
_SIZES_COMPILED = tuple((re.compile(f"(?:{pattern})$"), value) for pattern, value in _SIZES)

_ALL_KEY_HEADS = {"num_key_value_heads": HEADS}
_DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
_SECTIONS = _DEFAULT | {"mrope_section": [3, 3, 2]}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": HEAD_DIM}
SPECIAL: Mapping[str, Mapping[str, Any]] = {
    "BambaConfig": _MAMBA | {"attn_layer_indices": [1]},
    "FalconH1Config": _MAMBA,
    "GraniteMoeHybridConfig": _MAMBA | {"layer_types": ["mamba", "attention"], "position_embedding_type": "rope"},
    "PaddleOCRTextConfig": {"rope_parameters": _SECTIONS},
    "GlmImageTextConfig": {"rope_parameters": _SECTIONS},
    "HunYuanVLTextConfig": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "xdrope_section": [2, 2, 2, 2]}
    },
    "EsmConfig": {"vocab_size": VOCABULARY, "position_embedding_type": "rotary", "pad_token_id": 0},
    "EsmcConfig": _ALL_KEY_HEADS,
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"]},
    "MoonshineConfig": {"encoder_num_key_value_heads": HEADS, "decoder_num_key_value_heads": HEADS},
    "Nemotron3DiarizationConfig": _ALL_KEY_HEADS,
    "Nemotron3DiarizationAudioConfig": _ALL_KEY_HEADS,
    "UnlimitedOcrTextConfig": _ALL_KEY_HEADS,
    "ZayaConfig": {"num_experts_per_tok": 1},
}
"""The name of a configuration's class -> fields that the rules leave wrong."""


def tiny(config_class: type, **chosen: Any) -> Any:
    """A small configuration of an architecture.

    Args:
        config_class: a subclass of Transformers' configurations.
        chosen: fields with a value of their own.

    Raises:
        Exception: whatever the class raises for a field that the rules leave wrong.
    """
    default = config_class()
    fields: dict[str, Any] = {}
    names = [p.name for p in inspect.signature(config_class).parameters.values()]
    given = dict(SPECIAL.get(config_class.__name__, {})) | chosen
    for name in names:
        try:
            value = getattr(default, name, _DERIVED)
        except Exception:  # a field that differs from layer to layer has no value
            value = None
        if value is _DERIVED:
            continue
        if name in getattr(config_class, "sub_configs", {}) and hasattr(value, "to_dict"):
            fields[name] = tiny(type(value)).to_dict()
            continue
        small = _small(name, value)
        if small is not _KEEP:
            fields[name] = small
    if "kv_lora_rank" in names:  # keys have the heads of the queries, and head_dim follows from the parts
        fields["num_key_value_heads"] = HEADS
        fields.pop("head_dim", None)
    fields |= given
    if isinstance(rope := getattr(default, "rope_parameters", None), dict) and "rope_parameters" in names:
        fields.setdefault("rope_parameters", _rope(rope, fields.get("head_dim") or HEAD_DIM))
    return config_class(**{name: value for name, value in fields.items() if value is not _DERIVED})


_KEEP, _DERIVED = object(), object()


def _small(name: str, value: Any) -> Any:
    """The value of a field in the small configuration; `_KEEP` for the default."""
    if name.endswith("_types") and isinstance(value, (list, tuple)) and len(value) > LAYERS:
        return _first_of_each(list(value))
    if isinstance(value, bool) or isinstance(value, str) or isinstance(value, dict):
        return _KEEP
    if "dropout" in name or name in ("attn_pdrop", "resid_pdrop", "embd_pdrop", "layerdrop"):
        return 0.0 if isinstance(value, (int, float)) else _KEEP
    if not (isinstance(value, int) or value is None):
        return _KEEP
    for pattern, small in _SIZES_COMPILED:
        if pattern.match(name):
            return _KEEP if value is None and not _NEEDED.match(name) else small
    return _KEEP


def _first_of_each(kinds: list[str]) -> list[str]:
    """Two layers, of two kinds if there are two."""
    others = [kind for kind in kinds if kind != kinds[0]]
    return [kinds[0], others[0] if others else kinds[0]]


def _rope(parameters: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """The parameters of the rotation, with sections that fit a small head."""
    if any(isinstance(value, dict) for value in parameters.values()):
        return {key: _rope(value, head_dim) if isinstance(value, dict) else value for key, value in parameters.items()}
    found = dict(parameters)
    if "mrope_section" in found:
        pairs = int(head_dim * found.get("partial_rotary_factor", 1.0)) // 2
        count = len(found["mrope_section"])
        found["mrope_section"] = [pairs // count + (axis < pairs % count) for axis in range(count)]
    return found
