"""Model TransformerEngine's two kernels for packed sequences, to time how they divide the work.

The kernels of the package are CUDA code (`ropelab.bench.peers.te_library`, `ropelab.bench.peers.te_source`). The models
are Triton code that follows the description in TransformerEngine#3057 and its review. A time of a model is not a
measurement of the package.

- ``legacy_grid``: a program for every pair of a row of the table of angles and a sequence. If the sequence ends before
  the row, the program returns at once, as most programs do.
- ``token_linear``: a program for every token. The program finds its sequence in ``cu_seqlens`` by binary search.

The models share these properties with the CUDA kernels:

- A program has 8 warps, below 16 heads 4 warps, and rotates one token. A warp rotates one head at a time, and a thread
  one feature.
- A thread reads a feature and its partner, so every element is read twice, with one access for each element. The
  tensor may have any strides.
- Every program computes cosines and sines from float32 angles.
- A rank may hold two chunks of every sequence, and sequences may have start positions.

The models differ from the CUDA kernels in these properties:

- Heads rotate whole.
- Cosine and sine each reduce the angle. CUDA has one function for both.
- Every warp computes its own cosines and sines. In later versions of the package, a block shares them.
- Every thread searches for the sequence. In later versions of the package, one thread of a block searches.
"""

import math

import torch
import triton
import triton.language as tl

_LANES = tl.constexpr(32)
_WARPS, _WARPS_OF_FEW_HEADS, _FEW_HEADS = 8, 4, 16


@triton.jit
def _rotate_token(
    x_ptr, y_ptr, angles_ptr, token, position, token_stride, head_stride, feature_stride, INVERSE: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """``y = x cos + partner sin``. In every iteration, a thread computes one feature of one head."""
    thread = tl.arange(0, WARPS * _LANES)
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
        for first_head in tl.static_range(0, HEADS, WARPS):
            head = first_head + thread // _LANES
            x_row = token.to(tl.int64) * token_stride + head * head_stride
            y_row = token.to(tl.int64) * (HEADS * HEAD_DIM) + head * HEAD_DIM
            mask = exists & (head < HEADS)
            x = tl.load(x_ptr + x_row + feature * feature_stride, mask=mask).to(tl.float32)
            other = tl.load(x_ptr + x_row + partner * feature_stride, mask=mask).to(tl.float32)
            tl.store(y_ptr + y_row + feature, (x * cos + other * sin).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _position(row, length, sequence, starts_ptr, cp_size, cp_rank, STARTS: tl.constexpr):
    """The position of a row of a sequence on a rank that holds two of the 2 cp_size chunks of the sequence."""
    half = length // 2
    position = row + tl.where(row < half, cp_rank, 2 * cp_size - 2 - cp_rank) * half
    if STARTS:
        position += tl.load(starts_ptr + sequence)
    return position


@triton.jit(do_not_specialize=["cp_size", "cp_rank"])
def _legacy_grid_kernel(
    x_ptr, y_ptr, angles_ptr, cu_seqlens_ptr, starts_ptr, token_stride, head_stride, feature_stride, cp_size, cp_rank,
    STARTS: tl.constexpr,
    INVERSE: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    row, sequence = tl.program_id(0), tl.program_id(1)
    start = tl.load(cu_seqlens_ptr + sequence) // cp_size
    length = tl.load(cu_seqlens_ptr + sequence + 1) // cp_size - start
    if row < length:
        position = _position(row, length, sequence, starts_ptr, cp_size, cp_rank, STARTS)
        _rotate_token(x_ptr, y_ptr, angles_ptr, start + row, position, token_stride, head_stride, feature_stride,
                      INVERSE, HEADS, HEAD_DIM, INTERLEAVED, WARPS)  # fmt: skip


@triton.jit(do_not_specialize=["cp_size", "cp_rank", "sequences"])
def _token_linear_kernel(
    x_ptr, y_ptr, angles_ptr, cu_seqlens_ptr, starts_ptr, token_stride, head_stride, feature_stride, cp_size, cp_rank,
    sequences, GUARD: tl.constexpr, STARTS: tl.constexpr,
    INVERSE: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, INTERLEAVED: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    low, high = 0, sequences  # the sequence of the token is in [low, high)
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
                      INVERSE, HEADS, HEAD_DIM, INTERLEAVED, WARPS)  # fmt: skip


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
        x: ``[T, H, D]``, with any strides.
        angles: contiguous float32 ``[P, D]`` in rad, with a column for each feature, so each angle occurs twice. P is
            at least the length of the longest sequence on the rank, and every position has a row.
        cu_seqlens: int32 ``[n + 1]``, the boundaries of at most 65,535 whole sequences. If ``cp_size`` is above 1,
            ``2 cp_size`` divides every length.
        interleaved: whether the pairs are adjacent features. Otherwise the pairs are halves of the head.
        inverse: turn by minus the angle.
        start_positions: int32 ``[n]``, the position of the first token of each sequence; by default 0.
        cp_size, cp_rank: ``x`` holds the chunks ``cp_rank`` and ``2 cp_size - 1 - cp_rank`` of every sequence.

    Returns:
        A contiguous tensor of the shape and dtype of ``x``. Rows outside of all sequences are uninitialized.
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

    `legacy_grid` describes the other arguments. The number of sequences has no limit.

    Args:
        guard: leave out rows outside of all sequences. Without the guard, as in the first proposal, a row after the
            last sequence counts as a further token of the last sequence. Its row of ``angles`` may not exist.
    """
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    arguments = _arguments(x, y, angles, cu_seqlens, start_positions, cp_size, cp_rank)
    sequences = len(cu_seqlens) - 1
    if len(x) and sequences:
        constants = _constants(x, interleaved, inverse, start_positions)
        _token_linear_kernel[(len(x),)](*arguments, sequences, GUARD=guard, **constants)
    return y


def _arguments(x, y, angles, cu_seqlens, start_positions, cp_size: int, cp_rank: int) -> tuple:
    starts = cu_seqlens if start_positions is None else start_positions  # a stand-in if None
    return x, y, angles, cu_seqlens, starts, *x.stride(), cp_size, cp_rank


def _constants(x: torch.Tensor, interleaved: bool, inverse: bool, start_positions: torch.Tensor | None = None) -> dict:
    shape = {"HEADS": x.shape[1], "HEAD_DIM": x.shape[2]}
    warps = _WARPS_OF_FEW_HEADS if x.shape[1] < _FEW_HEADS else _WARPS
    constants = {"STARTS": start_positions is not None, "INVERSE": inverse, **shape, "INTERLEAVED": interleaved}
    return constants | {"WARPS": warps, "num_warps": warps}
