"""Sum over the features of a head, in an order that depends on the width of the head only.

The compiler's own sum adds first the numbers of each thread and then the numbers of the threads. The order would depend
on the tile, on the number of warps, and on the alignment of the tensors, because they decide which numbers a thread
holds. A token would have other bits alone than among other tokens. Here each step adds neighbours, two at a time. The
steps take as many exchanges between threads as the compiler's sum.
"""

import triton
import triton.language as tl


@triton.jit
def sum_of_products(a0, b0, a1, b1):
    """The sum of ``a0 b0 + a1 b1`` over axis 2 of ``[tokens, heads, pairs]``, as ``[tokens, heads, 1]``.

    The number of pairs is a power of two. The two products of a pair round once together. No later step contains a
    product, so the compiler cannot fuse a product with a sum.
    """
    return sum_of_neighbours(tl.fma(a0, b0, a1 * b1))


@triton.jit
def sum_of_pieces(sums, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """The sum of a head from the sums of its pieces, from FIRST on.

    The sum has the bits of `sum_of_neighbours` over all pieces and zeros after them. COUNT is a power of two.
    """
    HALF: tl.constexpr = COUNT // 2
    if COUNT == 1:
        return sums[FIRST]
    elif FIRST + HALF >= len(sums):
        return sum_of_pieces(sums, FIRST, HALF)
    else:
        return sum_of_pieces(sums, FIRST, HALF) + sum_of_pieces(sums, FIRST + HALF, HALF)


@triton.jit
def sum_of_neighbours(x):
    """The sum over axis 2 of a tensor with three axes, as an axis of 1. The length of axis 2 is a power of two."""
    if x.shape[2] == 1:
        return x
    else:
        return sum_of_neighbours(tl.sum(tl.reshape(x, [x.shape[0], x.shape[1], x.shape[2] // 2, 2]), axis=3))
