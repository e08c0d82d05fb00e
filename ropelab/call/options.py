"""This file normalizes the arguments of `apply_rope` that are not queries, keys or angles."""

from typing import NamedTuple

import torch

from ropelab.arguments import check_tensor, integer, integers
from ropelab.call.angles import Angles
from ropelab.kernels import Rotation
from ropelab.layout.seq_format import check_seq_format, rank, to_bshd


class Options(NamedTuple):
    """The arguments of `apply_rope` that are neither tensors nor positions.

    Attributes:
        layout, out_layout, seq_format, rotary_slice: as for `apply_rope`.
        offsets: the tensor of positions holds the position of the first token of each sequence.
        transpose: apply the transposed rotation matrices.
        overwrites: the caller writes the result over q and k, so no two of their elements may share an address.
    """

    layout: str
    out_layout: str
    seq_format: str
    rotary_slice: tuple[int, int] | None
    offsets: bool
    transpose: bool
    overwrites: bool = False

    def transposed(self) -> "Options":
        """The options of the transposed rotation, which reads the layout that this rotation writes."""
        return self._replace(
            layout=self.out_layout, out_layout=self.layout, transpose=not self.transpose, overwrites=False
        )

    def slice(self, columns: int) -> tuple[int, int]:
        """``(first, end)`` of the features that rotate, for tables or frequencies with ``columns`` columns."""
        return self.rotary_slice or (0, 2 * columns)

    def rotation(self, angles: Angles) -> Rotation:
        """The rotation by ``angles`` in the kernels' terms."""
        first, end = self.slice(angles.columns)
        return Rotation(
            rotary_dim=end - first,
            first=first,
            interleaved=self.layout == "interleaved",
            out_interleaved=self.out_layout == "interleaved",
            transpose=self.transpose,
            full_width=angles.columns == end - first and not angles.table_free,
            table_free=angles.table_free,
            offsets=self.offsets,
        )


def locate(
    q: torch.Tensor, positions: torch.Tensor | None, offsets: int | torch.Tensor, seq_format: str
) -> tuple[torch.Tensor | None, int, bool]:
    """Bring ``positions`` and ``offsets`` of `apply_rope` into the form that the kernels read.

    Returns:
        A tensor of positions or offsets, or None; the position of the first token where there is no tensor; and
        whether the tensor holds offsets. `ropelab.positions` says which row of the tables a position reads.

    Raises:
        TypeError: ``offsets`` is neither an integer nor a tensor.
        ValueError: the caller gave positions and offsets, or an offset below int64.
    """
    if isinstance(offsets, torch.Tensor):
        if positions is not None:
            raise ValueError("offsets: expected no offsets beside positions, got both")
        return offsets, 0, True
    if type(offsets) is not int:
        offsets = integer("offsets", offsets)
    if positions is not None:
        if offsets:
            raise ValueError("offsets: expected no offsets beside positions, got both")
        return positions, 0, False
    if offsets < 0:  # kernels count from a start of 0 or more; they read a negative start from a tensor
        check_seq_format(seq_format)
        check_tensor("q", q, (rank(seq_format),), f"{seq_format} of rank {rank(seq_format)}")
        if offsets < -(2**63):
            raise ValueError(f"offsets: expected an integer >= -2**63, got {offsets}")
        batch = to_bshd(q, seq_format).shape[:1]
        return torch.full(batch, offsets, dtype=torch.int64, device=q.device), 0, True
    return None, offsets, False


def features(rotary_slice: tuple[int, int]) -> tuple[int, int]:
    """``rotary_slice`` as two ints.

    Raises:
        TypeError: ``rotary_slice`` is not a sequence of integers.
        ValueError: ``rotary_slice`` does not have two elements.
    """
    ends = integers("rotary_slice", rotary_slice)
    if len(ends) != 2:
        raise ValueError(f"rotary_slice: expected (first, end), got {ends}")
    return ends
