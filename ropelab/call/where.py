"""By what the tokens of a call turn: `Where` has the angles, the positions and the options."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ropelab.arguments import integer, integers
from ropelab.call.angles import Angles
from ropelab.kernels import Rotation
from ropelab.layout.seq_format import check_heads, check_seq_format, to_bshd


class Options(NamedTuple):
    """The arguments of `apply_rope` that are neither tensors nor positions.

    Attributes:
        layout, out_layout, seq_format, rotary_slice: as for `apply_rope`.
        offsets: the tensor of positions holds the position of the first token of each sequence.
        axes: as for `apply_rope`; the tensor of positions then has an axis in front for the axes.
        transpose: apply the transposed rotation matrices.
        overwrites: the caller writes the result over q and k, so no two of their elements may share an address.
    """

    layout: str
    out_layout: str
    seq_format: str
    rotary_slice: tuple[int, int] | None
    offsets: bool
    axes: tuple[int, ...] | None
    transpose: bool
    overwrites: bool = False

    def slice(self, columns: int) -> tuple[int, int]:
        """``(first, end)`` of the features that rotate, for tables or frequencies with ``columns`` columns."""
        return self.rotary_slice or (0, 2 * columns)


class Where(NamedTuple):
    """By what the tokens of a call turn.

    Attributes:
        angles: tables or frequencies.
        positions: the positions of the tokens or, with ``options.offsets``, of the first tokens of the sequences; None
            where all sequences count from ``first_position``.
        first_position: the position of the first token if there are no positions.
        options: see `Options`.
    """

    angles: Angles
    positions: torch.Tensor | None
    first_position: int
    options: Options

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Both tensors of the angles, and the positions, for functions that take only tensors."""
        return *self.angles, self.positions

    @property
    def flat(self) -> tuple:
        """The tensors and then the other fields, from which `of` makes the object again."""
        return *self.angles, *self[1:]

    @classmethod
    def of(cls, *flat: Any) -> "Where":
        """The object with the fields of `flat`."""
        cos, sin, positions, first_position, options = flat
        return cls(Angles(cos, sin), positions, first_position, options)

    @property
    def for_operators(self) -> tuple:
        """The arguments of an operator of PyTorch's dispatcher; see `of_operator`."""
        return *self.angles, self.positions, self.first_position, *self.options[:-1]

    @classmethod
    def of_operator(cls, cos, sin, positions, first_position: int, *fields) -> "Where":
        """The object with the fields of `for_operators`; the dispatcher makes lists of the slice and of the axes."""
        layout, out_layout, seq_format, slice_, offsets, axes, transpose = fields
        slice_ = None if slice_ is None else (slice_[0], slice_[1])
        axes = None if axes is None else tuple(axes)
        options = Options(layout, out_layout, seq_format, slice_, offsets, axes, transpose)
        return cls.of(cos, sin, positions, first_position, options)

    @property
    def read(self) -> dict[str, torch.Tensor | None]:
        """The tensors by the names of the arguments."""
        return {**self.angles.named, "offsets" if self.options.offsets else "positions": self.positions}

    @property
    def rotation(self) -> Rotation:
        """The rotation in the kernels' terms."""
        angles, options = self.angles, self.options
        first, end = options.slice(angles.columns)
        return Rotation(
            rotary_dim=end - first,
            first=first,
            interleaved=options.layout == "interleaved",
            out_interleaved=options.out_layout == "interleaved",
            transpose=options.transpose,
            full_width=angles.columns == end - first and not angles.table_free,
            table_free=angles.table_free,
            offsets=options.offsets,
            axes=options.axes,
        )

    def transposed(self) -> "Where":
        """The transposed rotation, which reads the layout that this rotation writes."""
        options = self.options
        back = options._replace(
            layout=options.out_layout, out_layout=options.layout, transpose=not options.transpose, overwrites=False
        )
        return self._replace(options=back)


SCHEMA = (
    "Tensor cos, Tensor? sin, Tensor? positions, SymInt first_position, str layout, str out_layout, str seq_format, "
    "SymInt[]? rotary_slice, bool offsets, int[]? axes, bool transpose"
)
"""The schema of `Where.for_operators`."""


def located(
    x: torch.Tensor,
    angles: Angles,
    positions: torch.Tensor | None,
    offsets: int | torch.Tensor,
    layout: str,
    out_layout: str | None,
    seq_format: str,
    rotary_slice: tuple[int, int] | None,
    inverse: bool = False,
    axes: Sequence[int] | None = None,
) -> Where:
    """The `Where` of a public function, from its arguments and from ``x``, which has the tokens of the call.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: positions and offsets, axes without positions, an offset below int64, or a slice without two
            ends.
    """
    if axes is not None:
        if positions is None:
            raise ValueError("axes: expected positions beside axes, got None")
        if type(axes) is not tuple or not all(type(axis) is int for axis in axes):  # True is no axis, though it is 1
            axes = integers("axes", axes)
    slice_ = None if rotary_slice is None else _features(rotary_slice)
    is_offset, first_position = False, 0
    if isinstance(offsets, torch.Tensor):
        check_one_start(positions, offsets)
        positions, is_offset = offsets, True
    else:
        if type(offsets) is not int:
            offsets = integer("offsets", offsets)
        check_one_start(positions, offsets)
        first_position = offsets
    if positions is None and first_position < 0:  # a kernel reads a negative start from a tensor
        positions, first_position, is_offset = _negative_start(x, first_position, seq_format), 0, True
    options = Options(
        layout, layout if out_layout is None else out_layout, seq_format, slice_, is_offset, axes, inverse
    )
    return Where(angles, positions, first_position, options)


def check_one_start(positions: torch.Tensor | None, offsets: int | torch.Tensor) -> None:
    """Raise ValueError for offsets beside positions."""
    if positions is not None and (isinstance(offsets, torch.Tensor) or offsets):
        raise ValueError("offsets: expected no offsets beside positions, got both")


def _negative_start(x: torch.Tensor, offset: int, seq_format: str) -> torch.Tensor:
    check_seq_format(seq_format)
    check_heads("q", x, seq_format)
    if offset < -(2**63):
        raise ValueError(f"offsets: expected an integer >= -2**63, got {offset}")
    return torch.full(to_bshd(x, seq_format).shape[:1], offset, dtype=torch.int64, device=x.device)


def _features(rotary_slice: Sequence[int]) -> tuple[int, int]:
    if isinstance(rotary_slice, int):
        meant = (0, rotary_slice)
        raise TypeError(f"rotary_slice: expected (first, end), got int {rotary_slice}; did you mean {meant}?")
    ends = integers("rotary_slice", rotary_slice)
    if len(ends) != 2:
        raise ValueError(f"rotary_slice: expected (first, end), got {ends}")
    return ends


def along_axes(positions: torch.Tensor, axes: tuple[int, ...]) -> torch.Tensor:
    """The positions that the pairs read, ``[axes, 1 or B, S]``, of ``[axes, S]`` or ``[axes, 1 or B, S]``."""
    positions = positions[: max(axes) + 1]
    return positions.unsqueeze(1) if positions.ndim == 2 else positions
