"""A rotation and a norm without their tensors, for both backends and for the code that plans a launch."""

from dataclasses import dataclass

import torch

NO_POSITION = -(2**31)
"""The position of a token without a position, and the offset of a sequence without positions.

Such a token becomes zeros and gets zero gradient."""


INVALID_POSITION = NO_POSITION + 1
"""The position of a token whose position cannot be computed: no table has a row for it, so the token becomes NaN."""


@dataclass(frozen=True)
class Rotation:
    """The rotation of ``rotary_dim`` features of every head, from feature ``first`` on.

    Attributes:
        interleaved, out_interleaved: the pairs of the input, and of the output, are ``(2i, 2i+1)`` instead of
            ``(i, i + rotary_dim/2)``.
        transpose: apply the transpose of the rotation matrices; for tables with one angle a pair, the transpose is the
            inverse.
        full_width: the tables have a column for each feature, paired as the features of the input are, instead of a
            column for each pair.
        table_free: frequencies take the place of tables, and the kernels compute cosines and sines (`angles_torch`).
        offsets: positions, where given, are the positions of the first tokens of the sequences.
        axes: the axis of positions that each pair reads, where tokens have positions along several axes.
    """

    rotary_dim: int
    first: int = 0
    interleaved: bool = False
    out_interleaved: bool = False
    transpose: bool = False
    full_width: bool = False
    table_free: bool = False
    offsets: bool = False
    axes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Norm:
    """An RMS norm of q and k.

    Attributes:
        eps: the number that is added to the mean of the squares.
        weight_offset: the number that is added to the weights.
        first: normalize before the rotation, otherwise after it.
    """

    eps: float
    weight_offset: float = 0.0
    first: bool = True


MAX_BATCH = 65535
"""The most batches of one launch: the grid axis of the batches ends here. More batches take several launches."""

MOST_ROWS = 2**31 - 1
"""The most rows of a table that a kernel reads: as many as int32 can number."""


def row_count(cos: torch.Tensor) -> int:
    """The number of rows of ``cos`` that a kernel may read, at most `MOST_ROWS`.

    Kernels ignore this number if ``cos`` holds frequencies.
    """
    return min(cos.shape[-2], MOST_ROWS)


def pairs_of_head(head_dim: int, rotation: Rotation) -> int:
    """The pairs of a whole head; features that do not rotate form pairs too, and the last may lack a member."""
    return rotation.rotary_dim // 2 + (head_dim - rotation.rotary_dim + 1) // 2
