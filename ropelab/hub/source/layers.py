"""Layers without state, whose ``forward`` replaces the forward of a layer ``rotary_pos_emb``.

Models of Transformers give the same name, ``rotary_pos_emb``, to functions of different conventions. Choose the layer
that computes what the model computes:

- `RotaryPosEmb`: pairs ``(i, i + R/2)``: Llama, Mistral, Qwen, Phi and most models, also where ``R < head_dim``
- `RotaryPosEmbSingle`: the same for one tensor
- `RotaryPosEmbAdjacent`: pairs ``(2i, 2i + 1)``, each column of the tables twice in a row: Cohere
- `RotaryPosEmbAdjacentTwice`: pairs ``(2i, 2i + 1)``, all columns and then all columns again: GLM
"""

import torch

from .functions import apply_rotary_pos_emb, apply_rotary_pos_emb_single


class RotaryPosEmb(torch.nn.Module):
    """Rotates the pairs ``(i, i + R/2)`` of q and k. The tables ``[B, S, R]`` have a column for each feature."""

    has_backward: bool = True
    can_torch_compile: bool = True

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rotated q and k; features from R on pass unchanged."""
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim)


class RotaryPosEmbSingle(torch.nn.Module):
    """Rotates the pairs ``(i, i + R/2)`` of one tensor. The tables ``[B, S, R]`` have a column for each feature."""

    has_backward: bool = True
    can_torch_compile: bool = True

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> torch.Tensor:
        """The rotated x; features from R on pass unchanged."""
        return apply_rotary_pos_emb_single(x, cos, sin, unsqueeze_dim)


class RotaryPosEmbAdjacent(torch.nn.Module):
    """Rotates the pairs ``(2i, 2i + 1)`` of q and k. The tables ``[B, S, R]`` have a column for each feature."""

    has_backward: bool = True
    can_torch_compile: bool = True

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rotated q and k; features from R on pass unchanged."""
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim, layout="interleaved")


class RotaryPosEmbAdjacentTwice(torch.nn.Module):
    """Rotates the pairs ``(2i, 2i + 1)`` of q and k. The first R/2 of the R columns of the tables are for the pairs."""

    has_backward: bool = True
    can_torch_compile: bool = True

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rotated q and k; features from R on pass unchanged."""
        cos, sin = (t[..., : t.shape[-1] // 2].repeat_interleave(2, dim=-1) for t in (cos, sin))
        return apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim, layout="interleaved")
