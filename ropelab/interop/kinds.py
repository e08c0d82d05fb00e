"""The kinds of rotation that the kernel can take over: orders of the features, columns of the tables.

`ropelab.interop.over_kernel` finds the kind of a function by calling the function.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ropelab.arguments import DTYPES
from ropelab.interop.broadcast import norm_and_rotate_in_one_launch, rotate_in_one_launch
from ropelab.layout.pairing import Layout
from ropelab.layout.seq_format import SEQ_AXIS, SeqFormat
from ropelab.rope import apply_rope


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

    layout: Layout
    columns: str
    out_layout: Layout | None = None
    inverse: bool = False
    repeated: str | None = None
    trailing: bool = False

    def rotary_dim(self, cos: torch.Tensor) -> int:
        """The number of features that tables of this kind rotate."""
        return cos.shape[-1] * (2 if self.columns == "pair" else 1)

    def rotate(self, xs: list[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor) -> list[torch.Tensor] | None:
        """`ropelab.interop.broadcast.rotate_in_one_launch` with the tables of this kind.

        Most models pass tensors and tables in a format of `apply_rope`. That call names the axes at once, because
        finding them takes the host longer than the launch.
        """
        rotary_dim, features = self.rotary_dim(cos), xs[0].shape[-1]
        cos, sin = self._read(cos, sin)
        seq_format = _format_of(xs, cos, sin)
        if seq_format is None or not 0 < rotary_dim <= features or rotary_dim % 2:
            return rotate_in_one_launch(
                xs, cos, sin, layout=self.layout, out_layout=self.out_layout, per_pair=self._per_pair,
                inverse=self.inverse, trailing=self.trailing,
            )  # fmt: skip
        ends = (features - rotary_dim, features) if self.trailing else None if self._per_pair else (0, rotary_dim)
        heads = seq_format.index("h")
        ys = apply_rope(
            *xs, cos=_rows(cos, heads), sin=_rows(sin, heads), layout=self.layout, out_layout=self.out_layout,
            seq_format=seq_format, rotary_slice=ends, inverse=self.inverse,
        )  # fmt: skip
        return [ys] if isinstance(ys, torch.Tensor) else list(ys)

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
        return cos[..., : cos.shape[-1] // 2], sin[..., : sin.shape[-1] // 2]


def _format_of(xs: Sequence[torch.Tensor], cos: torch.Tensor, sin: torch.Tensor) -> SeqFormat | None:
    """``"bhsd"`` or ``"bshd"`` where tables ``[B or 1, 1, S, W]`` or ``[B or 1, S, 1, W]`` serve all tensors, or None.

    A table of one token serves in either format, and the results are the same.
    """
    x, table = xs[0], cos.shape
    same = cos.dtype == sin.dtype and cos.dtype in DTYPES and x.dtype in DTYPES and cos.device == sin.device
    if not same or len(table) != 4 or table != sin.shape or any(y.ndim != 4 for y in xs):
        return None
    seq_format: SeqFormat = "bhsd" if table[1] == 1 and table[2] == x.shape[2] else "bshd"
    seq = SEQ_AXIS[seq_format]
    if table[3 - seq] != 1 or table[0] not in (1, x.shape[0]):
        return None
    for y in xs:
        if y.shape[0] != x.shape[0] or y.shape[seq] != table[seq] or y.shape[3] != x.shape[3]:
            return None
        if y.dtype != x.dtype or y.device != cos.device:
            return None
    return seq_format


def _rows(table: torch.Tensor, heads: int) -> torch.Tensor:
    """The table without the axis of the heads, and without an axis of one batch: ``[B, S, W]`` or ``[S, W]``."""
    rows = table.select(heads, 0)
    return rows if len(rows) != 1 else rows[0]


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
