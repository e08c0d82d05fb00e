"""Rotary position embedding at the speed of a memory copy, and the proof."""

from ropelab.positions import NO_POSITION, PackedSequences, context_parallel_positions
from ropelab.qk_norm import apply_qk_norm_rope
from ropelab.rope import apply_rope
from ropelab.tables import axial_tables, rotary_table

__all__ = [
    "NO_POSITION",
    "PackedSequences",
    "apply_qk_norm_rope",
    "apply_rope",
    "axial_tables",
    "context_parallel_positions",
    "rotary_table",
]
__version__ = "0.1.0"
