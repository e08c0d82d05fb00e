"""Rotary position embedding at the speed of a memory copy: the functions and layers of ropelab for `rotary_pos_emb`.

- `apply_rotary_pos_emb` and `apply_rotary_pos_emb_single` have the arguments of the functions in Transformers.
- `apply_rope` and `apply_qk_norm_rope` are ropelab's own functions, with positions, offsets, packed sequences and all
  orders of the axes; the second normalizes every head before it rotates.
- `layers` holds the same as layers without state, for ``kernels.kernelize``.

All of them have a backward and run under ``torch.compile`` without a graph break.
"""

from ropelab import first_calls as _first_calls  # noqa: F401  before any other module computes
from ropelab.qk_norm import apply_qk_norm_rope
from ropelab.rope import apply_rope

from . import layers
from .functions import apply_rotary_pos_emb, apply_rotary_pos_emb_single

__all__ = ["apply_qk_norm_rope", "apply_rope", "apply_rotary_pos_emb", "apply_rotary_pos_emb_single", "layers"]
