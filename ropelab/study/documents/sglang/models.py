"""Models of the kernels in SGLang#14302 and of vLLM's kernel, to time how they divide the work and read memory.

The packages' kernels are CUDA and need their builds. These models are Triton, and no measurement of the packages. Block
sizes, blocks a token and widths follow the pull request's kernel in the states of `kernels.STATES`; see `VERSIONS`.

- ``rotate_tokens``: a block walks over the pairs of all query heads of a token, and then of its key heads. With a row
  of the tables for each token this models the versions of the pull request, and with positions it models vLLM's kernel.
- ``rotate_heads``: the reviewer's alternative, with a warp for every head of q and k. The number of blocks does not
  depend on the tokens, and each block takes one group of heads after the other.

Models and kernels agree in this: they rotate in place in float32, with one product and sum for each element, and read
and write every element once.

They differ in this: the models' tables have a column for each pair in both layouts, and the kernels' tables for halves
have a column for each feature. The models' blocks have a power of two of threads, and their tensors are contiguous.
Triton decides how a thread's loads are combined. One pair a thread gives 2-byte loads, and 16 bytes of pairs give
16-byte loads where addresses allow. The models leave out the third version's copy of a token's tables to shared memory.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

FEW_TOKENS = 4
"""The most tokens for which the second and the third version start several blocks a token."""
BLOCKS_PER_MULTIPROCESSOR = (4, 8, 16)
"""The numbers of blocks for `rotate_heads`. With 16 blocks a multiprocessor has all the warps that it can hold."""

_WARPS = 4
_ACCESS_BYTES = 16


@dataclass(frozen=True)
class Launch:
    """A launch of `rotate_tokens`: threads of a block, pairs that a thread takes at a time, blocks a token (tiles)."""

    threads: int
    pairs_per_thread: int = 1
    tiles: int = 1


def first_launch(
    tokens: int, heads: int, pairs: int, interleaved: bool = False, *, pairs_per_thread: int = 1, tiles: int = 1
) -> Launch:
    """Commit 02f22ef8: a block for each token, with a thread for each pair and at most 512 threads; and variations."""
    return Launch(_power_of_2(min(512, heads * pairs // pairs_per_thread)), pairs_per_thread, tiles)


def second_launch(tokens: int, heads: int, pairs: int, interleaved: bool = False, policy: bool = True) -> Launch:
    """The state of the comment of 2025-12-12: up to four tokens get enough blocks for one pair a thread.

    As in its source, blocks have 128 to 256 threads, whatever the number of tokens. The ``float2`` path is for float32
    tensors alone. With 16-bit numbers a thread takes one pair at a time, as before.
    """
    threads = _power_of_2(min(256, max(128, pairs)))
    return Launch(threads, tiles=triton.cdiv(heads * pairs, threads) if policy and tokens <= FEW_TOKENS else 1)


def third_launch(tokens: int, heads: int, pairs: int, interleaved: bool = False, policy: bool = True) -> Launch:
    """The state after the second: 16-byte accesses where they divide a 16-bit head, and up to 512 threads again."""
    together = _ACCESS_BYTES // 2 // (2 if interleaved else 1)
    together = together if pairs % together == 0 else 1
    wanted = triton.cdiv(heads * pairs, together)
    few = _power_of_2(min(256, max(128, pairs)))
    tiles = triton.cdiv(wanted, few)
    if policy and tokens <= FEW_TOKENS and tiles > 1:
        return Launch(few, together, tiles)
    return Launch(_power_of_2(min(512, max(128, wanted))), together)


def last_launch(tokens: int, heads: int, pairs: int, interleaved: bool = False, policy: bool = True) -> Launch:
    """The state of January 2026: blocks have up to 512 threads for few tokens too.

    32 heads of 128 features have work for one such block with 16-byte accesses, so a token gets one block.
    """
    one = third_launch(FEW_TOKENS + 1, heads, pairs, interleaved)
    tiles = triton.cdiv(triton.cdiv(heads * pairs, one.pairs_per_thread), one.threads)
    return Launch(one.threads, one.pairs_per_thread, tiles if policy and tokens <= FEW_TOKENS else 1)


VERSIONS: dict[str, Callable[..., Launch]] = {
    "first": first_launch,
    "second": second_launch,
    "third": third_launch,
    "last": last_launch,
}
"""Version of the pull request's kernel -> its launch, a function of tokens, heads and pairs of a head.

``heads`` is the larger number of heads, of q or of k.
"""


def _power_of_2(threads: int) -> int:
    """The number of threads rounded up to a block that Triton can start: a power of two, at least a warp."""
    return max(32, triton.next_power_of_2(threads))


@triton.jit
def _walk(
    x_ptr, cos_row, sin_row, heads, first_tile, tiles,
    HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, STEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Rotate the pairs of a token's heads, STEP of them at a time."""
    for first in range(first_tile * STEP, heads * PAIRS, tiles * STEP):
        i = first + tl.arange(0, STEP)
        mask = i < heads * PAIRS
        cos = tl.load(cos_row + i % PAIRS, mask=mask).to(tl.float32)
        sin = tl.load(sin_row + i % PAIRS, mask=mask).to(tl.float32)
        if INTERLEAVED and WIDE:
            j = 2 * first + tl.arange(0, 2 * STEP)
            at = x_ptr + (j // (2 * PAIRS)) * HEAD_DIM + j % (2 * PAIRS)
            both = tl.load(at, mask=j < 2 * heads * PAIRS).to(tl.float32)
            x0, x1 = tl.split(tl.reshape(both, [STEP, 2]))
            y = tl.reshape(tl.join(x0 * cos - x1 * sin, x1 * cos + x0 * sin), [2 * STEP])
            tl.store(at, y.to(x_ptr.dtype.element_ty), mask=j < 2 * heads * PAIRS)
        else:
            head = x_ptr + (i // PAIRS) * HEAD_DIM
            if INTERLEAVED:
                at0, at1 = head + 2 * (i % PAIRS), head + 2 * (i % PAIRS) + 1
            else:
                at0, at1 = head + i % PAIRS, head + PAIRS + i % PAIRS
            x0, x1 = tl.load(at0, mask=mask).to(tl.float32), tl.load(at1, mask=mask).to(tl.float32)
            tl.store(at0, (x0 * cos - x1 * sin).to(x_ptr.dtype.element_ty), mask=mask)
            tl.store(at1, (x1 * cos + x0 * sin).to(x_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rotate_tokens_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, positions_ptr, q_heads, k_heads, table_stride,
    HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr, POSITIONS: tl.constexpr,
    STEP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    token, tile, tiles = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row = token
    if POSITIONS:
        row = tl.load(positions_ptr + token)
    cos_row, sin_row = cos_ptr + row * table_stride, sin_ptr + row * table_stride
    q_row, k_row = q_ptr + token * q_heads * HEAD_DIM, k_ptr + token * k_heads * HEAD_DIM
    _walk(q_row, cos_row, sin_row, q_heads, tile, tiles, HEAD_DIM, PAIRS, INTERLEAVED, STEP, WIDE)
    _walk(k_row, cos_row, sin_row, k_heads, tile, tiles, HEAD_DIM, PAIRS, INTERLEAVED, STEP, WIDE)


@triton.jit
def _rotate_heads_kernel(
    q_ptr, k_ptr, cos_ptr, sin_ptr, tokens, q_heads, k_heads,
    HEAD_DIM: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr, HEADS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    heads = q_heads + k_heads
    end = tokens * heads
    pair = tl.arange(0, BLOCK_PAIRS)[None, :]
    for first in range(tl.program_id(0) * HEADS_AT_ONCE, end, tl.num_programs(0) * HEADS_AT_ONCE):
        item = first + tl.arange(0, HEADS_AT_ONCE)
        token, head = (item // heads).to(tl.int64), item % heads
        x_ptr = tl.where(
            head < q_heads,
            q_ptr + (token * q_heads + head) * HEAD_DIM,
            k_ptr + (token * k_heads + head - q_heads) * HEAD_DIM,
        )[:, None]
        mask = (item < end)[:, None] & (pair < PAIRS)
        cos = tl.load(cos_ptr + token[:, None] * PAIRS + pair, mask=mask).to(tl.float32)
        sin = tl.load(sin_ptr + token[:, None] * PAIRS + pair, mask=mask).to(tl.float32)
        if INTERLEAVED:
            feature = tl.arange(0, 2 * BLOCK_PAIRS)[None, :]
            inside = (item < end)[:, None] & (feature < 2 * PAIRS)
            both = tl.load(x_ptr + feature, mask=inside).to(tl.float32)
            x0, x1 = tl.split(tl.reshape(both, [HEADS_AT_ONCE, BLOCK_PAIRS, 2]))
            y = tl.reshape(tl.join(x0 * cos - x1 * sin, x1 * cos + x0 * sin), [HEADS_AT_ONCE, 2 * BLOCK_PAIRS])
            tl.store(x_ptr + feature, y.to(q_ptr.dtype.element_ty), mask=inside)
        else:
            x0 = tl.load(x_ptr + pair, mask=mask).to(tl.float32)
            x1 = tl.load(x_ptr + PAIRS + pair, mask=mask).to(tl.float32)
            tl.store(x_ptr + pair, (x0 * cos - x1 * sin).to(q_ptr.dtype.element_ty), mask=mask)
            tl.store(x_ptr + PAIRS + pair, (x1 * cos + x0 * sin).to(q_ptr.dtype.element_ty), mask=mask)


def rotate_tokens(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool,
    positions: torch.Tensor | None = None,
    launch: Launch | None = None,
) -> None:
    """Rotate q and k in place.

    Args:
        q, k: ``[T, H, D]`` contiguous, of one dtype.
        cos, sin: ``[T, R/2]``, or ``[P, R/2]`` with positions; of one row stride and dtype.
        positions: ``[T]`` int64. As in vLLM, a position without a row makes the kernel read past the tables.
        launch: by default the first version's launch.
    """
    heads, pairs = max(q.shape[1], k.shape[1]), cos.shape[-1]
    launch = launch or first_launch(len(q), heads, pairs)
    _rotate_tokens_kernel[(len(q), launch.tiles)](
        q, k, cos, sin, cos if positions is None else positions, q.shape[1], k.shape[1], cos.stride(0),
        HEAD_DIM=q.shape[2], PAIRS=pairs, INTERLEAVED=interleaved, POSITIONS=positions is not None,
        STEP=launch.threads * launch.pairs_per_thread, WIDE=launch.pairs_per_thread > 1,
        num_warps=launch.threads // 32,
    )  # fmt: skip


def rotate_heads(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool, blocks: int
) -> None:
    """Rotate q and k in place, a warp for each head, by ``blocks`` blocks of four warps; else as `rotate_tokens`."""
    items = len(q) * (q.shape[1] + k.shape[1])
    if not items:
        return
    _rotate_heads_kernel[(min(blocks, triton.cdiv(items, _WARPS)),)](
        q, k, cos, sin, len(q), q.shape[1], k.shape[1],
        HEAD_DIM=q.shape[2], PAIRS=cos.shape[-1], INTERLEAVED=interleaved,
        BLOCK_PAIRS=triton.next_power_of_2(cos.shape[-1]), HEADS_AT_ONCE=_WARPS, num_warps=_WARPS,
    )  # fmt: skip
