"""Conformance of operators that rotate queries and keys and write a paged cache.

The operator normalizes the heads of q and k, if it does so at all, rotates them, and writes k and v into slots of a
paged cache, in the usual dtypes or in 8-bit floats. The laws compare with the definition, and with other results of the
operator itself. Reading order:

- `case`: a call in terms that suit every convention, and the memory of its caches.
- `convention`, `conventions`: how operators are called; `block_scales` has those with a scale for each block.
- `subject`: an operator that takes cases, next to the exact results and their bounds.
- `laws`: the laws.
"""

from ropelab.conformance.cache.case import CacheCase
from ropelab.conformance.cache.conventions import CACHE_CONVENTIONS
from ropelab.conformance.cache.laws import CACHE_LAWS
from ropelab.conformance.cache.subject import CacheSubject

__all__ = ["CACHE_CONVENTIONS", "CACHE_LAWS", "CacheCase", "CacheSubject"]
