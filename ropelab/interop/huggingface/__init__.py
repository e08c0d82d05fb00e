"""The rotation of Transformers over the kernel, and a patch that makes a model use the kernel.

Read the files in this order:

1. `function` holds ``apply_rotary_pos_emb``.
2. `layers` finds the attention layers that normalize q and k before they rotate q and k.
3. `projections` makes the projections and the rotation of an attention layer one call.
4. `caches` makes the rotation and the update of a static cache one call.
5. `model` holds `patch`, `unpatch` and `is_patched`, and lists how the rotations of Transformers are called.
"""

from ropelab.interop.huggingface.function import apply_rotary_pos_emb
from ropelab.interop.huggingface.model import is_patched, patch, unpatch

__all__ = ["apply_rotary_pos_emb", "is_patched", "patch", "unpatch"]
