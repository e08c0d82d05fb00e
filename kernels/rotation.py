"""What a rotation computes, apart from the tensors: shared by both backends and by whoever plans a launch."""

from dataclasses import dataclass

import torch

NO_POSITION = -(2**31)
"""Stands for the position of a token, or the offset of a sequence, that is none: zeros, and zero gradient."""


INVALID_POSITION = NO_POSITION + 1
"""Stands for a position that cannot be told: no table has its row, so the token rotates to NaN."""


@dataclass(frozen=True)
class Rotation:
    """The rotation of ``rotary_dim`` features, the first of which is ``first``, of every head.

    Attributes:
        interleaved, out_interleaved: pairs are ``(2i, 2i+1)`` instead of ``(i, i + rotary_dim/2)`` in what is read
            and in what is written.
        transpose: apply the transpose of the rotation matrices; for tables with one angle a pair, the inverse.
        full_width: the tables have a column per feature, paired as the features of the input are, instead of
            one per pair.
        table_free: in place of tables there are frequencies, of which the kernels compute them (`angles_torch`).
        offsets: positions, where given, are the positions of the first tokens of the sequences.
    """

    rotary_dim: int
    first: int = 0
    interleaved: bool = False
    out_interleaved: bool = False
    transpose: bool = False
    full_width: bool = False
    table_free: bool = False
    offsets: bool = False


def row_count(cos: torch.Tensor) -> int:
    """The rows of ``cos`` that a kernel may read, as many as int32 can number; of frequencies it asks for none."""
    return min(cos.shape[-2], 2**31 - 1)


def position_count(cos: torch.Tensor) -> int:
    """How many positions ``cos`` serves from 0 on: a table one for each row, frequencies (integers) all of int32."""
    return 2**31 if cos.dtype == torch.int64 else row_count(cos)
