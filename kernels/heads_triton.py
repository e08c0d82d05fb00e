"""This file holds the code that moves whole heads and reads their rotations; the fused kernels share it.

A tile has heads ``[tokens, heads, pairs]``. Features that do not rotate form pairs too, whose angle is zero, so that
one tile holds all features of a head. A program that takes rows, each a head of a token, has the rows on the first axis
and a single head on the second axis.
"""

import triton
import triton.language as tl

from ropelab.kernels.addressing import load_table, narrow, sign_of, table_rows_of


@triton.jit
def slot_of(MEMBER: tl.constexpr, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
            BLOCK_PAIRS: tl.constexpr):  # fmt: skip
    """The slot of member 0 or 1 of every pair, and whether the member exists.

    Slots number the features of a head: the features that rotate come first. The features that do not rotate form pairs
    in the same way as the features that rotate; the last of these pairs may lack its member 1.
    """
    pair = tl.arange(0, BLOCK_PAIRS)
    ROTARY: tl.constexpr = ROTARY_DIM // 2
    if INTERLEAVED:
        slot = 2 * pair + MEMBER
        return slot, slot < HEAD_DIM
    elif HEAD_DIM == ROTARY_DIM:
        return pair + MEMBER * ROTARY, pair < ROTARY
    else:
        REST: tl.constexpr = (HEAD_DIM - ROTARY_DIM + 1) // 2
        slot = pair + tl.where(pair < ROTARY, MEMBER * ROTARY, ROTARY + MEMBER * REST)
        inside = pair < ROTARY + REST
        if (HEAD_DIM - ROTARY_DIM) % 2:
            inside &= slot < HEAD_DIM
        return slot, inside


@triton.jit
def feature_of(slot, ROTARY_DIM: tl.constexpr, FIRST: tl.constexpr):
    """The feature in a slot. The first slots hold ``[FIRST, FIRST + ROTARY_DIM)``, the others all other features."""
    if FIRST == 0:
        return slot
    else:
        return tl.where(slot < ROTARY_DIM, FIRST + slot, tl.where(slot < ROTARY_DIM + FIRST, slot - ROTARY_DIM, slot))


@triton.jit
def places(row, slot, ROTARY_DIM: tl.constexpr, FIRST: tl.constexpr, SLOTS: tl.constexpr):
    """The addresses ``[tokens, heads, slots]``.

    SLOTS successive slots hold adjacent features, and the first of them is a multiple of SLOTS. The compiler may not
    find this itself, so it gets a hint. After a wrong hint a GPU reads other features, or faults.
    """
    feature = tl.multiple_of(tl.max_contiguous(feature_of(slot, ROTARY_DIM, FIRST), SLOTS), SLOTS)[None, None, :]
    return row + tl.multiple_of(tl.max_contiguous(feature, [1, 1, SLOTS]), [1, 1, SLOTS])


@triton.jit
def load_heads(row, mask, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, FIRST: tl.constexpr,
               INTERLEAVED: tl.constexpr, GROUP: tl.constexpr, BLOCK_PAIRS: tl.constexpr, DTYPE: tl.constexpr,
               EVICTION: tl.constexpr):  # fmt: skip
    """Both members of every pair of whole heads, each ``[tokens, heads, BLOCK_PAIRS]``; zeros for missing members.

    GROUP is a power of two that divides FIRST, the number of pairs that rotate, and the number of all other pairs.
    """
    if INTERLEAVED:
        SLOTS: tl.constexpr = 2 * GROUP if FIRST % (2 * GROUP) == 0 else GROUP
        slot = tl.arange(0, 2 * BLOCK_PAIRS)
        at = places(row, slot, ROTARY_DIM, FIRST, SLOTS)
        at = tl.broadcast_to(at, [mask.shape[0], mask.shape[1], 2 * BLOCK_PAIRS])
        x = tl.load(at, mask=mask & (slot < HEAD_DIM)[None, None, :], other=0, eviction_policy=EVICTION)
        x0, x1 = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], BLOCK_PAIRS, 2]))
        return x0.to(DTYPE), x1.to(DTYPE)
    else:
        slot0, inside0 = slot_of(0, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)
        slot1, inside1 = slot_of(1, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)
        at0 = tl.broadcast_to(places(row, slot0, ROTARY_DIM, FIRST, GROUP), [mask.shape[0], mask.shape[1], BLOCK_PAIRS])
        at1 = tl.broadcast_to(places(row, slot1, ROTARY_DIM, FIRST, GROUP), [mask.shape[0], mask.shape[1], BLOCK_PAIRS])
        x0 = tl.load(at0, mask=mask & inside0[None, None, :], other=0, eviction_policy=EVICTION)
        x1 = tl.load(at1, mask=mask & inside1[None, None, :], other=0, eviction_policy=EVICTION)
        return x0.to(DTYPE), x1.to(DTYPE)


@triton.jit
def store_heads(row, mask, y0, y1, HEAD_DIM: tl.constexpr, ROTARY_DIM: tl.constexpr, FIRST: tl.constexpr,
                INTERLEAVED: tl.constexpr, GROUP: tl.constexpr, BLOCK_PAIRS: tl.constexpr):  # fmt: skip
    """Write both members of every pair of whole heads in the dtype of ``row``; see `load_heads`."""
    dtype = row.dtype.element_ty
    if INTERLEAVED:
        SLOTS: tl.constexpr = 2 * GROUP if FIRST % (2 * GROUP) == 0 else GROUP
        slot = tl.arange(0, 2 * BLOCK_PAIRS)
        y = tl.reshape(tl.join(y0, y1), [y0.shape[0], y0.shape[1], 2 * BLOCK_PAIRS])
        # One instruction converts two adjacent features, so the conversion follows the join.
        at = places(row, slot, ROTARY_DIM, FIRST, SLOTS)
        tl.store(at, narrow(y, dtype), mask=mask & (slot < HEAD_DIM)[None, None, :])
    else:
        slot0, inside0 = slot_of(0, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)
        slot1, inside1 = slot_of(1, HEAD_DIM, ROTARY_DIM, INTERLEAVED, BLOCK_PAIRS)
        tl.store(places(row, slot0, ROTARY_DIM, FIRST, GROUP), narrow(y0, dtype), mask=mask & inside0[None, None, :])
        tl.store(places(row, slot1, ROTARY_DIM, FIRST, GROUP), narrow(y1, dtype), mask=mask & inside1[None, None, :])


@triton.jit
def load_rotation(
    cos_ptr, sin_ptr, positions_ptr, first_position, table_rows,
    cos_stride_b, cos_stride_p, sin_stride_b, sin_stride_p, positions_stride_b, positions_stride_s,
    batch, first_seq, token, is_token, mask,
    ROTARY_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, FULL_WIDTH: tl.constexpr, POSITIONS: tl.constexpr,
    TABLE_ALIGN: tl.constexpr, SAME_STRIDES: tl.constexpr, BLOCK_PAIRS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The cosines and sines of both members of every pair, and whether each token has a position.

    The cosines and sines are ``[tokens, heads, BLOCK_PAIRS]``. Positions and tables are used as in `rotate_triton`. The
    angle of a pair that does not rotate is zero, and so is the angle of a place without a pair: a sum over a head may
    include such places.
    """
    SIGNED: tl.constexpr = POSITIONS != "none"
    positions = positions_ptr, positions_stride_b, positions_stride_s, first_position
    tables = table_rows, cos_stride_b, cos_stride_p, sin_stride_b, sin_stride_p
    cos_at, sin_at, has_row, has_position, is_negative = table_rows_of(
        positions, tables, batch, first_seq, token, is_token, POSITIONS, TABLE_ALIGN, SAME_STRIDES
    )
    cos_at, sin_at = cos_at[:, None, None], sin_at[:, None, None]
    has_row, has_position, is_negative = has_row[:, None, None], has_position[:, None, None], is_negative[:, None, None]
    inside = mask & has_row if SIGNED else mask
    other: tl.constexpr = None if SIGNED else 0.0  # the sign of a token without a row makes every number NaN
    ROTARY: tl.constexpr = ROTARY_DIM // 2
    cos0, cos1 = load_table(cos_ptr + cos_at, inside, other, ROTARY, BLOCK_PAIRS, INTERLEAVED, FULL_WIDTH)
    sin0, sin1 = load_table(sin_ptr + sin_at, inside, other, ROTARY, BLOCK_PAIRS, INTERLEAVED, FULL_WIDTH)
    cos0, cos1, sin0, sin1 = cos0.to(DTYPE), cos1.to(DTYPE), sin0.to(DTYPE), sin1.to(DTYPE)
    if SIGNED:
        sign = sign_of(has_row, is_negative, DTYPE)
        sin0, sin1 = sin0 * sign, sin1 * sign
    if BLOCK_PAIRS > ROTARY:
        rotates = (tl.arange(0, BLOCK_PAIRS) < ROTARY)[None, None, :]
        cos0, cos1 = tl.where(rotates, cos0, 1.0), tl.where(rotates, cos1, 1.0)
        sin0, sin1 = tl.where(rotates, sin0, 0.0), tl.where(rotates, sin1, 0.0)
    return cos0, cos1, sin0, sin1, has_position
