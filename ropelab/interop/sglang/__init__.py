"""The in-place operators of SGLang, vLLM and FlashInfer, over `ropelab.apply_rope`.

- `rotary_embedding_cos_sin` takes cosines and sines of each token, as in SGLang#14302 for diffusion models.
- `apply_rope_with_cos_sin_cache_inplace` takes positions and a cache of cosines and sines, as in vLLM, SGLang and
  FlashInfer.
- `apply_rope_qk_inplace` takes q and k of a diffusion model and its frequencies, complex numbers or a cache.

Read `operators` first, then `diffusion`, then `split_tables`, which keeps the tables that `diffusion` makes of complex
frequencies.
"""

from ropelab.interop.sglang.diffusion import apply_rope_qk_inplace
from ropelab.interop.sglang.operators import apply_rope_with_cos_sin_cache_inplace, rotary_embedding_cos_sin
from ropelab.interop.sglang.split_tables import KEPT, SplitTables

__all__ = [
    "KEPT",
    "SplitTables",
    "apply_rope_qk_inplace",
    "apply_rope_with_cos_sin_cache_inplace",
    "rotary_embedding_cos_sin",
]
