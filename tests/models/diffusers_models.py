"""Build tiny random transformers of diffusers, and compare each before and after the patch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ropelab.conformance.models.factory import TinyModel, randomize
from ropelab.interop.diffusers import patch
from tests.models.patched import Compared, compare_runs, forward_and_gradients


def _draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _ids(rows: int) -> torch.Tensor:
    return torch.stack((torch.zeros(rows), torch.arange(rows) // 2, torch.arange(rows) % 2), dim=-1)


_TIME, _STEP = torch.tensor([0.5]), torch.tensor([3])
_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}


def _tables(rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines with each column twice in a row, as the pipeline of CogVideoX makes them."""
    angles = torch.arange(rows)[:, None] * 0.9 ** torch.arange(width // 2)
    return angles.cos().repeat_interleave(2, dim=-1), angles.sin().repeat_interleave(2, dim=-1)


MODELS: dict[str, Callable[[], tuple[dict[str, Any], dict[str, Any]]]] = {
    "FluxTransformer2DModel": lambda: (
        _HEADS | {"in_channels": 4, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 12,
                  "pooled_projection_dim": 10, "axes_dims_rope": (4, 4, 8)},
        {"hidden_states": _draw(1, 6, 4), "encoder_hidden_states": _draw(1, 3, 12), "pooled_projections": _draw(1, 10),
         "timestep": _TIME, "img_ids": _ids(6), "txt_ids": torch.zeros(3, 3)},
    ),
    "ChromaTransformer2DModel": lambda: (
        _HEADS | {"in_channels": 4, "num_layers": 1, "num_single_layers": 1, "joint_attention_dim": 12,
                  "axes_dims_rope": (4, 4, 8), "approximator_num_channels": 8, "approximator_hidden_dim": 16,
                  "approximator_layers": 1},
        {"hidden_states": _draw(1, 6, 4), "encoder_hidden_states": _draw(1, 3, 12), "timestep": _TIME,
         "img_ids": _ids(6), "txt_ids": torch.zeros(3, 3)},
    ),
    "QwenImageTransformer2DModel": lambda: (
        _HEADS | {"in_channels": 4, "out_channels": 1, "num_layers": 1, "joint_attention_dim": 12,
                  "axes_dims_rope": (4, 4, 8)},
        {"hidden_states": _draw(1, 6, 4), "encoder_hidden_states": _draw(1, 3, 12), "timestep": _TIME,
         "encoder_hidden_states_mask": torch.ones(1, 3), "img_shapes": [[(1, 2, 3)]]},
    ),
    "HunyuanVideoTransformer3DModel": lambda: (
        _HEADS | {"in_channels": 4, "out_channels": 4, "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1,
                  "text_embed_dim": 12, "pooled_projection_dim": 8, "rope_axes_dim": (4, 4, 8)},
        {"hidden_states": _draw(1, 4, 2, 4, 4), "timestep": _TIME, "encoder_hidden_states": _draw(1, 3, 12),
         "encoder_attention_mask": torch.ones(1, 3), "pooled_projections": _draw(1, 8),
         "guidance": torch.tensor([6.0])},
    ),
    "CogVideoXTransformer3DModel": lambda: (
        _HEADS | {"in_channels": 4, "out_channels": 4, "time_embed_dim": 4, "text_embed_dim": 12, "num_layers": 1,
                  "sample_width": 4, "sample_height": 4, "sample_frames": 1, "max_text_seq_length": 3,
                  "use_rotary_positional_embeddings": True},
        {"hidden_states": _draw(1, 1, 4, 4, 4), "encoder_hidden_states": _draw(1, 3, 12), "timestep": _TIME,
         "image_rotary_emb": _tables(4, 16)},
    ),
    "CogView4Transformer2DModel": lambda: (
        _HEADS | {"in_channels": 4, "out_channels": 4, "num_layers": 1, "text_embed_dim": 12, "time_embed_dim": 8,
                  "condition_dim": 4, "sample_size": 4, "rope_axes_dim": (8, 8)},
        {"hidden_states": _draw(1, 4, 4, 4), "encoder_hidden_states": _draw(1, 3, 12), "timestep": _TIME,
         "original_size": torch.tensor([[4.0, 4.0]]), "target_size": torch.tensor([[4.0, 4.0]]),
         "crop_coords": torch.tensor([[0.0, 0.0]])},
    ),
    "LTXVideoTransformer3DModel": lambda: (
        _HEADS | {"in_channels": 4, "out_channels": 4, "cross_attention_dim": 32, "num_layers": 1,
                  "caption_channels": 12},
        {"hidden_states": _draw(1, 8, 4), "encoder_hidden_states": _draw(1, 3, 12), "timestep": _TIME,
         "encoder_attention_mask": torch.ones(1, 3), "num_frames": 2, "height": 2, "width": 2},
    ),
    "Lumina2Transformer2DModel": lambda: (
        {"sample_size": 8, "in_channels": 4, "hidden_size": 32, "num_layers": 1, "num_refiner_layers": 1,
         "num_attention_heads": 2, "num_kv_heads": 1, "multiple_of": 4, "axes_dim_rope": (4, 4, 8),
         "axes_lens": (32, 32, 32), "cap_feat_dim": 12},
        {"hidden_states": _draw(1, 4, 8, 8), "timestep": _TIME, "encoder_hidden_states": _draw(1, 3, 12),
         "encoder_attention_mask": torch.ones(1, 3, dtype=torch.bool)},
    ),
    "WanTransformer3DModel": lambda: (
        _HEADS | {"in_channels": 4, "out_channels": 4, "text_dim": 12, "freq_dim": 8, "ffn_dim": 24, "num_layers": 1,
                  "rope_max_seq_len": 32},
        {"hidden_states": _draw(1, 4, 2, 4, 4), "timestep": _STEP, "encoder_hidden_states": _draw(1, 3, 12)},
    ),
    "SkyReelsV2Transformer3DModel": lambda: (
        _HEADS | {"in_channels": 4, "out_channels": 4, "text_dim": 12, "freq_dim": 8, "ffn_dim": 24, "num_layers": 1,
                  "rope_max_seq_len": 32},
        {"hidden_states": _draw(1, 4, 2, 4, 4), "timestep": _STEP, "encoder_hidden_states": _draw(1, 3, 12)},
    ),
}  # fmt: skip
"""The name of a class of diffusers -> its configuration, and the arguments of a call."""


def tiny_transformer(name: str) -> TinyModel:
    """A tiny random model of a class of `MODELS`."""
    import diffusers

    config, inputs = MODELS[name]()
    torch.manual_seed(0)
    model = getattr(diffusers, name)(**config).eval()
    randomize(model, 0)
    return TinyModel(name, model, inputs | {"return_dict": False})


def compare(name: str) -> Compared:
    """The results and the gradients before and after the patch.

    Raises:
        ValueError: `ropelab.interop.diffusers.patch` refuses the model.
    """
    tiny = tiny_transformer(name)
    return compare_runs(tiny, forward_and_gradients, lambda: patch(tiny.model))
