"""The launches of the kernel in SGLang#14302, and a model of the kernel that a reviewer describes.

The launches (`VERSIONS`) follow the pull request's public source in the states of `kernels.STATES`. The
reviewer's alternative is in no public source: `rotate_heads` is a Triton kernel with a warp for every head of q and k.
The number of its blocks does not depend on the tokens, and each block takes one group of heads after the other.
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
    """A launch of the kernel: threads of a block, pairs that a thread takes at a time, blocks a token (tiles)."""

    threads: int
    pairs_per_thread: int = 1
    tiles: int = 1


def first_launch(tokens: int, heads: int, pairs: int, interleaved: bool = False) -> Launch:
    """Commit 02f22ef8: a block for each token, with a thread for each pair and at most 512 threads."""
    return Launch(_power_of_2(min(512, heads * pairs)))


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


def rotate_heads(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool, blocks: int
) -> None:
    """Rotate q and k in place, a warp for each head, by ``blocks`` blocks of four warps.

    Args:
        q, k: ``[T, H, D]`` contiguous, of one dtype.
        cos, sin: ``[T, R/2]``.
    """
    items = len(q) * (q.shape[1] + k.shape[1])
    if not items:
        return
    _rotate_heads_kernel[(min(blocks, triton.cdiv(items, _WARPS)),)](
        q, k, cos, sin, len(q), q.shape[1], k.shape[1],
        HEAD_DIM=q.shape[2], PAIRS=cos.shape[-1], INTERLEAVED=interleaved,
        BLOCK_PAIRS=triton.next_power_of_2(cos.shape[-1]), HEADS_AT_ONCE=_WARPS, num_warps=_WARPS,
    )  # fmt: skip
