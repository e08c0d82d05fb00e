"""Everything that a kernel knows when it is compiled, as one constexpr object."""

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import triton.language as tl

from ropelab.kernels.backends import INTERPRETED


def plain(value: Any) -> Any:
    """Constants as JSON has them; a field of `Choices` is a constexpr where a kernel is compiled."""
    value = getattr(value, "value", value) if type(value).__name__ == "constexpr" else value
    if is_dataclass(value):
        return {f.name: plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, tuple | list):
        return [plain(x) for x in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


@dataclass(frozen=True)
class Choices(dict):
    """The base of a kernel's choices. A kernel reads a choice as ``C.NAME``; groups of choices may be nested.

    Triton 3.6 takes only constexprs out of an object, so each field becomes one. The interpreter takes plain values,
    and the sum of a constexpr and a tensor would be no tensor there. Triton describes a new kernel in JSON to whoever
    watches compilations (``triton.knobs.runtime.jit_post_compile_hook``), so the object is a dict of plain values too.

    Attributes:
        ALIGNED: the addresses of all tensors are multiples of 16. `launch.Launch` decides it for each call.
    """

    ALIGNED: bool = field(default=True, kw_only=True)

    def __post_init__(self):
        self.update((each.name, plain(getattr(self, each.name))) for each in fields(self))
        if not INTERPRETED:
            for each in fields(self):
                object.__setattr__(self, each.name, tl.constexpr(getattr(self, each.name)))


@dataclass(frozen=True)
class Turning(Choices):
    """How the heads of a program turn. Every kernel that rotates has these choices.

    A thread holds pairs. The pairs of a head cover its features ``[0, LANE_DIM)``, of which ``[FIRST, FIRST +
    ROTARY_DIM)`` rotate. The other features form pairs too, whose angle is zero.

    Attributes:
        LANE_DIM, ROTARY_DIM, FIRST: see above.
        INTERLEAVED, OUT_INTERLEAVED, TRANSPOSE, FULL_WIDTH, TABLE_FREE: as in `Rotation`.
        SHARED_COLUMNS: the threads of a program share cosines and sines, see `angles_triton.shared_columns`.
        POSITIONS: the source of positions, see `place_triton.position_of`.
        COMPUTE_DTYPE: the dtype of the arithmetic.
        BLOCK_PAIRS: the pairs of a head, or of a piece of a head, padded to a power of two.
        GROUP: so many adjacent pairs have adjacent members, and the first of these features is a multiple of GROUP; 0
            where the compiler sees this itself.
        ALIGN: a power of two that divides all strides of heads.
        AXES: the axes along which a token has a position.
        PAIR_BITS: which pair reads which axis, see `addressing.axes_of_pairs`.
        AXIS_UNIT: four adjacent pairs, or a larger power of two if so many adjacent pairs read the same axis.
        UNIT_BITS: which pair of which unit reads which axis.
        SAME_AXIS: for each of four pairs of a unit, the first of them that reads the same axis in every unit.
        TABLE_ALIGN: a power of two that divides all strides of tables.
        SAME_TABLES: cos and sin have the same strides.
        OFFSETS_64: offsets within a tile take 64 bits.
        INNERMOST: the order of the programs, see `tiles.Tile`.
    """

    LANE_DIM: int
    ROTARY_DIM: int
    FIRST: int
    INTERLEAVED: bool
    OUT_INTERLEAVED: bool
    TRANSPOSE: bool
    FULL_WIDTH: bool
    TABLE_FREE: bool
    SHARED_COLUMNS: bool
    POSITIONS: str
    COMPUTE_DTYPE: tl.dtype
    BLOCK_PAIRS: int
    GROUP: int
    ALIGN: int
    AXES: int
    PAIR_BITS: int
    AXIS_UNIT: int
    UNIT_BITS: int
    SAME_AXIS: int
    TABLE_ALIGN: int
    SAME_TABLES: bool
    OFFSETS_64: bool
    INNERMOST: str
