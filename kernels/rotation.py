"""What a rotation computes, apart from the tensors: shared by both backends and by whoever plans a launch."""

from dataclasses import dataclass

NO_POSITION = -(2**31)
"""Stands for the position of a token, or the offset of a sequence, that is none: zeros, and zero gradient."""


@dataclass(frozen=True)
class Rotation:
    """The rotation of ``rotary_dim`` features, the first of which is ``first``, of every head.

    Attributes:
        interleaved, out_interleaved: pairs are ``(2i, 2i+1)`` instead of ``(i, i + rotary_dim/2)`` in what is read
            and in what is written.
        transpose: apply the transpose of the rotation matrices; for tables with one angle a pair, the inverse.
        full_width: the tables have a column per feature, paired as the features of the input are, instead of
            one per pair.
        offsets: positions, where given, are the positions of the first tokens of the sequences.
    """

    rotary_dim: int
    first: int = 0
    interleaved: bool = False
    out_interleaved: bool = False
    transpose: bool = False
    full_width: bool = False
    offsets: bool = False
