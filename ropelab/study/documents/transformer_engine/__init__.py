"""TransformerEngine#3057: fused RoPE of packed sequences with a block for each token.

``dispatch`` has the two grids as launch strategies and the heuristics that choose, and ``packings`` has the shapes.
``measure`` makes the records, ``evidence`` computes what needs no GPU, and ``findings`` has the tables behind the
chapter and ``rules``, the remarks on the claims.
"""
