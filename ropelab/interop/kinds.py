"""The kinds of rotation that the kernel can take over: orders of the features, columns of the tables.

`ropelab.interop.over_kernel` finds the kind of a function by calling the function.
"""

from dataclasses import dataclass

import torch

from ropelab.interop.broadcast import norm_and_rotate_in_one_launch, rotate_in_one_launch


@dataclass(frozen=True)
class Kind:
    """A convention for the order of features and for the columns of tables.

    Attributes:
        layout, out_layout, inverse: as for `ropelab.apply_rope`.
        columns: ``"feature"`` for tables with a column for each feature, ``"pair"`` for a column for each pair, and
            ``"twice"`` for a column for each pair and then all columns again, where the kernel reads the first half.
        repeated: the columns that a function may read as well, and that have to be equal: ``"halves"`` of the tables,
            ``"pairs"`` of adjacent columns, or None. A function is compared with the kind for such tables only.
        trailing: tables narrower than a head rotate the last features instead of the first.
    """

    layout: str
    columns: str
    out_layout: str | None = None
    inverse: bool = False
    repeated: str | None = None
    trailing: bool = False

    def rotary_dim(self, cos: torch.Tensor) -> int:
        """The number of features that tables of this kind rotate."""
        return cos.shape[-1] * (2 if self.columns == "pair" else 1)

    def rotate(self, xs: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor] | None:
        """`ropelab.interop.broadcast.rotate_in_one_launch` with the tables of this kind."""
        cos, sin = self._read(cos, sin)
        return rotate_in_one_launch(
            xs, cos, sin, layout=self.layout, out_layout=self.out_layout, per_pair=self._per_pair,
            inverse=self.inverse, trailing=self.trailing,
        )  # fmt: skip

    def norm_and_rotate(
        self, xs: list[torch.Tensor], weights: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor, eps: float
    ) -> list[torch.Tensor] | None:
        """`ropelab.interop.broadcast.norm_and_rotate_in_one_launch` with the tables of this kind."""
        cos, sin = self._read(cos, sin)
        return norm_and_rotate_in_one_launch(
            xs, weights, cos, sin, eps=eps, layout=self.layout, per_pair=self._per_pair
        )

    @property
    def norms(self) -> bool:
        """Whether one launch can normalize heads and then rotate them in this convention."""
        return self.out_layout is None and not self.inverse and not self.trailing

    @property
    def _per_pair(self) -> bool:
        return self.columns != "feature"

    def _read(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The columns of the tables that the kernel reads."""
        if self.columns != "twice":
            return cos, sin
        half = cos.shape[-1] // 2
        return cos[..., :half], sin[..., :half]


KINDS = (
    Kind("split_half", "feature"),  # Llama, GPT-NeoX
    Kind("interleaved", "feature"),  # Cohere
    Kind("interleaved", "twice"),  # GLM
    Kind("split_half", "pair"),  # gpt-oss
    Kind("interleaved", "pair"),  # GPT-J, Llama 4
    Kind("interleaved", "pair", trailing=True),  # DeepSeek-V4
    Kind("interleaved", "twice", out_layout="split_half", repeated="halves"),  # DeepSeek-V3
    Kind("split_half", "twice", inverse=True, repeated="halves"),  # nanochat
    Kind("interleaved", "feature", repeated="pairs"),  # Wan
)
"""The kinds, in the order in which a function is compared with them."""
