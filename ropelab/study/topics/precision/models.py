"""The parts of ``config.json`` that set the rotation, for one model of each family.

Keys that `ropelab.rope_from_config` does not read are left out. Each model has its name on the Hugging Face hub.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Model:
    """A configuration, and the type of the layers."""

    config: Mapping[str, Any] = field(repr=False)
    layer_type: str | None = None


def _model(layer_type: str | None = None, **config: Any) -> Model:
    return Model(config, layer_type)


_PHI4_MINI_LONG = [
    1, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898,
    2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424,
    6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252, 16.37415215,
    18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23, 32.6, 32.61, 32.64,
    32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
]  # fmt: skip

_GEMMA3 = {
    "head_dim": 128, "max_position_embeddings": 131072, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}  # fmt: skip

MODELS: dict[str, Model] = {
    "gpt-neox-20b": _model(
        model_type="gpt_neox", hidden_size=6144, num_attention_heads=64, rotary_pct=0.25, rotary_emb_base=10000,
        max_position_embeddings=2048,
    ),
    "Llama-2-7b": _model(head_dim=128, rope_theta=1e4, max_position_embeddings=4096),
    "Llama-3.1-8B": _model(
        head_dim=128, rope_theta=5e5, max_position_embeddings=131072,
        rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                      "original_max_position_embeddings": 8192},
    ),
    "Llama-4-Scout": _model(
        model_type="llama4_text", head_dim=128, rope_theta=5e5, max_position_embeddings=10485760,
        rope_scaling={"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 1.0,
                      "original_max_position_embeddings": 8192},
    ),
    "Qwen3-8B": _model(model_type="qwen3", head_dim=128, rope_theta=1e6, max_position_embeddings=40960),
    "Qwen2.5-7B-Instruct-1M": _model(
        model_type="qwen2", hidden_size=3584, num_attention_heads=28, rope_theta=1e7, max_position_embeddings=1010000,
    ),
    "Qwen3-VL-8B (M-RoPE)": _model(
        model_type="qwen3_vl_text", head_dim=128, rope_theta=5e6, max_position_embeddings=262144,
        rope_scaling={"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
    ),
    "Qwen3-Next-80B": _model(
        model_type="qwen3_next", head_dim=256, partial_rotary_factor=0.25, rope_theta=1e7,
        max_position_embeddings=262144,
    ),
    "Qwen3.5-397B, YaRN to 1M": _model(
        head_dim=256, max_position_embeddings=1010000,
        rope_parameters={"rope_type": "yarn", "rope_theta": 1e7, "factor": 4.0,
                         "original_max_position_embeddings": 262144, "partial_rotary_factor": 0.25,
                         "mrope_section": [11, 11, 10], "mrope_interleaved": True},
    ),
    "DeepSeek-V3": _model(
        model_type="deepseek_v3", qk_rope_head_dim=64, rope_theta=1e4, max_position_embeddings=163840,
        rope_scaling={"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
                      "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    ),
    "gpt-oss-120b": _model(
        model_type="gpt_oss", head_dim=64, rope_theta=150000, max_position_embeddings=131072,
        rope_scaling={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
                      "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    ),
    "Phi-4-mini (LongRoPE)": _model(
        model_type="phi3", hidden_size=3072, num_attention_heads=24, partial_rotary_factor=0.75, rope_theta=1e4,
        max_position_embeddings=131072, original_max_position_embeddings=4096,
        rope_scaling={"type": "longrope", "short_factor": [1.0] * 48, "long_factor": _PHI4_MINI_LONG},
    ),
    "internlm2-chat-7b (dynamic NTK)": _model(
        head_dim=128, rope_theta=1e6, max_position_embeddings=32768, rope_scaling={"type": "dynamic", "factor": 2.0},
    ),
    "GLM-4.5": _model(
        model_type="glm4_moe", head_dim=128, partial_rotary_factor=0.5, rope_theta=1e6,
        max_position_embeddings=131072,
    ),
    "MiniMax-M1": _model(
        head_dim=128, rotary_dim=64, rope_theta=1e7, max_position_embeddings=10240000,
    ),
    "gemma-3-27b, full attention": Model(_GEMMA3, "full_attention"),
    "gemma-3-27b, sliding window": Model(_GEMMA3, "sliding_attention"),
    "gemma-4-31B, full attention (proportional)": _model(
        "full_attention", model_type="gemma4_text", head_dim=256, global_head_dim=512, max_position_embeddings=262144,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6}},
    ),
}  # fmt: skip
"""Name -> model, in the order of families."""
