"""Models of TransformerEngine's two kernels for packed sequences, to time how they divide the work.

The package's kernels are CUDA and need its build. These are written from what TransformerEngine#3057 and its review
say of them, in Triton, and are no measurement of the package:

- ``legacy_grid``: a program for every position below the length of the table and every sequence. Most find that
  their sequence has ended before that position, and return.
- ``token_linear``: a program for every token, which looks for its sequence in ``cu_seqlens`` by binary search.

Alike, as there: 256 threads take a token, a warp a head and a thread a feature at a time; the thread reads this
feature and its partner, so that every element is read twice, two bytes at once; cosine and sine are computed from a
float32 angle in every program. Different: no context parallelism, no start positions, contiguous tensors only, no
guard for tokens of no sequence; cosine and sine each reduce their angle, where CUDA has one function for both.
"""

import torch
import triton
import triton.language as tl

_WARPS, _LANES = tl.constexpr(8), tl.constexpr(32)


@triton.jit
def _rotate_token(
    x_ptr, y_ptr, angles_ptr, token, position, INVERSE: tl.constexpr,
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
            row = token.to(tl.int64) * (HEADS * HEAD_DIM) + head * HEAD_DIM
            mask = exists & (head < HEADS)
            x = tl.load(x_ptr + row + feature, mask=mask).to(tl.float32)
            other = tl.load(x_ptr + row + partner, mask=mask).to(tl.float32)
            tl.store(y_ptr + row + feature, (x * cos + other * sin).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _legacy_grid_kernel(
    x_ptr, y_ptr, angles_ptr, cu_seqlens_ptr, INVERSE: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    position, sequence = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(cu_seqlens_ptr + sequence), tl.load(cu_seqlens_ptr + sequence + 1)
    if position < end - start:
        _rotate_token(x_ptr, y_ptr, angles_ptr, start + position, position, INVERSE, HEADS, HEAD_DIM, INTERLEAVED)


@triton.jit
def _token_linear_kernel(
    x_ptr, y_ptr, angles_ptr, cu_seqlens_ptr, sequences, INVERSE: tl.constexpr,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0)
    low, high = 0, sequences  # the sequence is among those from low on, before high
    while high - low > 1:
        middle = (low + high) // 2
        begins_later = tl.load(cu_seqlens_ptr + middle) > token
        low = tl.where(begins_later, low, middle)
        high = tl.where(begins_later, middle, high)
    position = token - tl.load(cu_seqlens_ptr + low)
    _rotate_token(x_ptr, y_ptr, angles_ptr, token, position, INVERSE, HEADS, HEAD_DIM, INTERLEAVED)


def legacy_grid(
    x: torch.Tensor, angles: torch.Tensor, cu_seqlens: torch.Tensor, *, interleaved: bool, inverse: bool = False
) -> torch.Tensor:
    """Rotate packed tokens with a program for every row of ``angles`` and every sequence.

    Args:
        x: ``[T, H, D]`` contiguous, all T tokens in sequences.
        angles: float32 ``[P, D]``, P at least the longest sequence: of each feature, so each angle is there twice.
        cu_seqlens: int32 ``[n + 1]``, of at most 65,535 sequences.
    """
    y = torch.empty_like(x)
    grid = (len(angles), len(cu_seqlens) - 1)
    _legacy_grid_kernel[grid](x, y, angles, cu_seqlens, **_constants(x, interleaved, inverse))
    return y


def token_linear(
    x: torch.Tensor, angles: torch.Tensor, cu_seqlens: torch.Tensor, *, interleaved: bool, inverse: bool = False
) -> torch.Tensor:
    """Rotate packed tokens with a program for every token.

    Arguments as for ``legacy_grid``; any number of sequences.
    """
    y = torch.empty_like(x)
    sequences = len(cu_seqlens) - 1
    _token_linear_kernel[(len(x),)](x, y, angles, cu_seqlens, sequences, **_constants(x, interleaved, inverse))
    return y


def _constants(x: torch.Tensor, interleaved: bool, inverse: bool) -> dict:
    shape = {"HEADS": x.shape[1], "HEAD_DIM": x.shape[2]}
    return shape | {"INVERSE": inverse, "INTERLEAVED": interleaved, "num_warps": _WARPS.value}
