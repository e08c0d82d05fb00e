"""SGLang#14302: a rotary kernel for diffusion models, in place, with separate cos and sin per token.

``models`` re-creates the kernels of which the document and its review speak. ``contenders`` puts these kernels and the
packages at hand behind one signature. ``measure`` makes the records, and ``evidence`` computes what needs no GPU.
``steps`` leads from the document's protocol to a fair one, and ``rules`` judges the claims.
"""
