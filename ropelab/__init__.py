"""Rotary position embedding at the speed of a memory copy, and the proof."""

from ropelab.rope import apply_rope
from ropelab.tables import rotary_table

__all__ = ["apply_rope", "rotary_table"]
__version__ = "0.1.0"
