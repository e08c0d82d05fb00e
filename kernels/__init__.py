"""The device code, which works on tensors, strides and tiles.

The device code knows nothing of models and autograd, and it does not check arguments. Each operation has a Triton
module for GPUs and a torch module for all other devices. A function ``step`` of the torch module is the definition, and
``plan_step`` of the Triton module plans the launch that has the same bits (sums of a norm and of a product apart), on
the same tuples of tensors. `backends` chooses between the two, and `run` launches a plan for tensors of any strides.

Every kernel that rotates has the parameters ``(ptr, first_position, table_rows, ..., strides, C)``: the addresses and
the strides of the tensors as two named tuples (`tensors`), and everything that is known at compile time as one object
(`choices`). A kernel is a composition of stages:

=======================  ===========  ========  =============  ======  ============  ==================================
kernel                   place        read      norm           turn    convert       write
=======================  ===========  ========  =============  ======  ============  ==================================
`rotate_triton`          whole heads  pairs                    yes                   results, copies of what stays
`rotate_triton`          flat rows    pairs                    yes                   results, copies of what stays
`qk_norm_triton`         whole heads  heads     each head      yes                   results
its backward             whole heads  heads     its gradient   yes                   gradients, sums over tokens
`paged_cache_triton`     rows         heads     head or token  yes     8-bit floats  q, cache, scales, copies
`cached_keys_triton`     slots        cache                    yes     8-bit floats  cache, scales
`block_scales_triton`    whole heads  heads                    yes     block scales  results, scales, weights
`block_scales_triton`    whole heads  heads     each head      yes     block scales  q, rows of a cache
`latent_triton`          whole heads  heads                    yes                   key, value
its backward             whole heads  heads     sum of heads   yes                   gradients
`projection_triton`      tiles        product   each head      yes                   q, k and v
=======================  ===========  ========  =============  ======  ============  ==================================

`place_triton` finds the tokens and heads of a program, and their positions. `stages_triton` reads, normalizes, turns
and writes; `cache_rows_triton` has the stages of a paged cache. `angles_triton` computes cosines and sines where there
are no tables. `projection_quack` calls the product of another library. `float8_triton` converts, and `block_scales` has
the arithmetic of block scales. `tile_of` says how much a program of each kernel takes, and why; `addressing` plans a
launch, and `launch` repeats it.
"""

from ropelab.kernels.backends import HAS_TRITON, INTERPRETED, backend, use_backend, uses_triton
from ropelab.kernels.rotation import NO_POSITION, Norm, Rotation

__all__ = [
    "HAS_TRITON", "INTERPRETED", "NO_POSITION", "Norm", "Rotation", "backend", "use_backend", "uses_triton",
]  # fmt: skip
