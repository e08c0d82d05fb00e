"""TransformerEngine#3057: fused RoPE of packed sequences with a block for each token.

``dispatch`` has the two grids as launch strategies and the heuristics that choose, ``packings`` the shapes, ``measure``
makes the records, ``evidence`` what a CPU computes, ``rules`` judges TE-01 to TE-21, ``figures`` draws.
"""
