"""TransformerEngine#3057: fused RoPE of packed sequences with a block for each token.

``dispatch`` has the two grids as launch strategies and the heuristics that choose, and ``packings`` has the shapes.
``measure`` makes the records, and ``evidence`` computes what needs no GPU. ``rules`` has remarks
on the claims, and ``figures`` draws.
"""
