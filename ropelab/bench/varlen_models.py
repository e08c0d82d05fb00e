"""This file models TransformerEngine's two kernels for packed sequences, to time how they divide the work.

The package's kernels are CUDA and need its build. These are written from what TransformerEngine#3057 and its review
say of them, in Triton, and are no measurement of the package:

- ``legacy_grid``: a program for every position below the length of the table and every sequence. Most find that
  their sequence has ended before that position, and return.
- ``token_linear``: a program for every token, which looks for its sequence in ``cu_seqlens`` by binary search.

Alike, as there: 256 threads take a token, a warp a head and a thread a feature at a time; the thread reads this
feature and its partner, so that every element is read twice, two bytes at once, with whatever strides the tensor has;
cosine and sine are computed from a float32 angle in every program. A rank's two chunks of every sequence and start
positions are served as well. Different: heads rotate whole; cosine and sine each reduce their angle, where CUDA has
one function for both, and every warp computes its own, which a block of later versions shares; the search is one
thread's in those, here every thread does it.
"""

import math

import torch
import triton
import triton.language as tl

_WARPS, _LANES = tl.constexpr(8), tl.constexpr(32)


@triton.jit
def _rotate_token(
    x_ptr, y_ptr, angles_ptr, token, position, token_stride, head_stride, feature_stride, INVERSE: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """``y = x cos + partner sin``, of one feature of one head per thread and turn."""
    thread = tl.arange(0, _WARPS * _LANES)
    for first in tl.static_range(0, HEAD_DIM, _LANES):
        feature = first + thread % _LANES
        if INTERLEAVED:
            is_first, partner = feature % 2 == 0, feature ^ 1
        else:
            is_first = feature < HEAD_DIM // 2
            partner = tl.where(is_first, feature + HEAD_DIM // 2, feature - HEAD_DIM // 2)
        exists = feature < HEAD_DIM
        angle = tl.load(angles_ptr + position.to(tl.int64) * HEAD_DIM + feature, mask=exists, other=0.0)
        cos, sin = tl.cos(angle), tl.sin(angle)
        sin = tl.where(is_first == INVERSE, sin, -sin)
        for first_head in tl.static_range(0, HEADS, _WARPS):
            head = first_head + thread // _LANES
            x_row = token.to(tl.int64) * token_stride + head * head_stride
            y_row = token.to(tl.int64) * (HEADS * HEAD_DIM) + head * HEAD_DIM
            mask = exists & (head < HEADS)
            x = tl.load(x_ptr + x_row + feature * feature_stride, mask=mask).to(tl.float32)
            other = tl.load(x_ptr + x_row + partner * feature_stride, mask=mask).to(tl.float32)
            tl.store(y_ptr + y_row + feature, (x * cos + other * sin).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _position(row, length, sequence, starts_ptr, cp_size, cp_rank, STARTS: tl.constexpr):
    """Of a sequence's row on this rank, which has two of its 2 cp_size chunks."""
    half = length // 2
    position = row + tl.where(row < half, cp_rank, 2 * cp_size - 2 - cp_rank) * half
    if STARTS:
        position += tl.load(starts_ptr + sequence)
    return position


@triton.jit(do_not_specialize=["cp_size", "cp_rank"])
def _legacy_grid_kernel(
    x_ptr, y_ptr, angles_ptr, cu_seqlens_ptr, starts_ptr, token_stride, head_stride, feature_stride, cp_size, cp_rank,
    STARTS: tl.constexpr,
    INVERSE: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    row, sequence = tl.program_id(0), tl.program_id(1)
    start = tl.load(cu_seqlens_ptr + sequence) // cp_size
    length = tl.load(cu_seqlens_ptr + sequence + 1) // cp_size - start
    if row < length:
        position = _position(row, length, sequence, starts_ptr, cp_size, cp_rank, STARTS)
        _rotate_token(x_ptr, y_ptr, angles_ptr, start + row, position, token_stride, head_stride, feature_stride,
                      INVERSE, HEADS, HEAD_DIM, INTERLEAVED)  # fmt: skip


@triton.jit(do_not_specialize=["cp_size", "cp_rank", "sequences"])
def _token_linear_kernel(
    x_ptr, y_ptr, angles_ptr, cu_seqlens_ptr, starts_ptr, token_stride, head_stride, feature_stride, cp_size, cp_rank,
    sequences, GUARD: tl.constexpr, STARTS: tl.constexpr,
    INVERSE: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    low, high = 0, sequences  # the sequence is among those from low on, before high
    while high - low > 1:
        middle = (low + high) // 2
        begins_later = tl.load(cu_seqlens_ptr + middle) // cp_size > token
        low = tl.where(begins_later, low, middle)
        high = tl.where(begins_later, middle, high)
    start, end = tl.load(cu_seqlens_ptr + low) // cp_size, tl.load(cu_seqlens_ptr + low + 1) // cp_size
    last = end if GUARD else token + 1
    if token < last:
        position = _position(token - start, end - start, low, starts_ptr, cp_size, cp_rank, STARTS)
        _rotate_token(x_ptr, y_ptr, angles_ptr, token, position, token_stride, head_stride, feature_stride,
                      INVERSE, HEADS, HEAD_DIM, INTERLEAVED)  # fmt: skip


def legacy_grid(
    x: torch.Tensor,
    angles: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    interleaved: bool,
    inverse: bool = False,
    start_positions: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """Rotate packed tokens with a program for every row of ``angles`` and every sequence.

    Args:
        x: ``[T, H, D]``, any strides. Rows that are in no sequence are left out: the result there is what the
            allocation held.
        angles: float32 ``[P, D]`` contiguous, of each feature, so each angle is there twice. P is at least the longest
            sequence on the rank, and has a row for every position.
        cu_seqlens: int32 ``[n + 1]``, of at most 65,535 sequences, not sharded; lengths divisible by ``2 cp_size``.
        start_positions: int32 ``[n]``, of the sequences' first tokens.
        cp_size, cp_rank: ``x`` has the chunks ``cp_rank`` and ``2 cp_size - 1 - cp_rank`` of every sequence.
    """
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    grid = (len(angles), len(cu_seqlens) - 1)
    arguments = _arguments(x, y, angles, cu_seqlens, start_positions, cp_size, cp_rank)
    if math.prod(grid):
        _legacy_grid_kernel[grid](*arguments, **_constants(x, interleaved, inverse, start_positions))
    return y


def token_linear(
    x: torch.Tensor,
    angles: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    interleaved: bool,
    inverse: bool = False,
    start_positions: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
    guard: bool = True,
) -> torch.Tensor:
    """Rotate packed tokens with a program for every token.

    Arguments as for ``legacy_grid``; any number of sequences. Without ``guard``, as first proposed, a row that is in
    no sequence counts as one more token of the last, and reads the row of ``angles`` that this leads to.
    """
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    arguments = _arguments(x, y, angles, cu_seqlens, start_positions, cp_size, cp_rank)
    sequences = len(cu_seqlens) - 1
    if len(x) and sequences:
        constants = _constants(x, interleaved, inverse, start_positions)
        _token_linear_kernel[(len(x),)](*arguments, sequences, GUARD=guard, **constants)
    return y


def _arguments(x, y, angles, cu_seqlens, start_positions, cp_size: int, cp_rank: int) -> tuple:
    starts = cu_seqlens if start_positions is None else start_positions  # ignored where there are none
    return x, y, angles, cu_seqlens, starts, *x.stride(), cp_size, cp_rank


def _constants(x: torch.Tensor, interleaved: bool, inverse: bool, start_positions: torch.Tensor | None = None) -> dict:
    shape = {"HEADS": x.shape[1], "HEAD_DIM": x.shape[2]}
    constants = {"STARTS": start_positions is not None, "INVERSE": inverse, **shape, "INTERLEAVED": interleaved}
    return constants | {"num_warps": _WARPS.value}
