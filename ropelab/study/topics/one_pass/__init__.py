"""Study the pass from the projections to attention: norm, rotation, quantization and paged cache.

- `derivation`: the pass and its gradient, proven by computer algebra.
- `rounding`: how near a result can come to the derived bounds.
- `laws`: the pass and the catalogue of faults, held to the laws.
- `traffic`: the bytes of separate launches and of one pass, and the ceilings that follow.
- `findings`: sentences of the ceilings and of the record.
"""
