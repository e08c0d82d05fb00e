"""Make copies that touch the same places in memory as a rotation of some features of each row.

A copy of contiguous tensors (`ropelab.bench.copies`) is the limit of a call that moves whole rows. If a call leaves a
part of each row alone, or writes narrower elements than it reads, the memory serves the same number of bytes at
another rate. The fastest copy of this file is the limit of such a call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd

import pandas as pd
import torch
import triton
import triton.language as tl

from ropelab.bench.names import SAME_PLACES
from ropelab.kernels.tiles import ACCESS_BYTES

_PROGRAMS = ((128, 4), (256, 4), (512, 4), (1024, 4), (512, 8))
"""(accesses, warps) of a program."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Part:
    """Features to copy: ``width`` features of every row of ``source`` to as many features of a row of ``target``.

    Attributes:
        source: ``[rows, n]``, contiguous.
        target: ``[rows, m]``, contiguous, on the same device. It may be ``source``, and may have narrower elements: the
            copy then keeps the low bytes.
        width: the number of features.
        first, target_first: the first feature in the source and in the target.
    """

    source: torch.Tensor
    target: torch.Tensor
    width: int
    first: int = 0
    target_first: int = 0

    @property
    def numbers(self) -> tuple[int, ...]:
        """The constants of the kernel: row lengths, first features, width, and the features of an access."""
        n, m = self.source.shape[-1], self.target.shape[-1]
        divisor = gcd(n, m, self.width, self.first, self.target_first, ACCESS_BYTES // self.source.itemsize)
        return n, m, self.first, self.target_first, self.width, divisor

    @property
    def accesses(self) -> int:
        """The number of accesses of all rows."""
        return self.source.shape[0] * self.width // self.numbers[-1]

    @property
    def pointers(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Source and target as integers."""
        return self.source.view(_INTEGERS[self.source.itemsize]), self.target.view(_INTEGERS[self.target.itemsize])


def in_place(x: torch.Tensor, first: int, width: int) -> Part:
    """The features of every row that stay where they are; ``x`` is ``[..., n]``, and contiguous or copied once."""
    rows = x.detach().contiguous().flatten(0, -2)
    return Part(rows, rows, width, first, first)


def to_new(x: torch.Tensor, itemsize: int | None = None) -> Part:
    """All features of ``x``, contiguous or copied once, to a new tensor, with ``itemsize`` bytes for an element."""
    rows = x.detach().contiguous().flatten(0, -2)
    target = torch.empty(rows.shape, dtype=_INTEGERS[itemsize or x.itemsize], device=x.device)
    return Part(rows, target, rows.shape[-1])


@triton.jit
def _copy_part(
    source_ptr, target_ptr, program, accesses, N: tl.constexpr, M: tl.constexpr, FIRST: tl.constexpr,
    TARGET_FIRST: tl.constexpr, WIDTH: tl.constexpr, ACCESS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    access = program * BLOCK + tl.arange(0, BLOCK)
    row, column = (access // (WIDTH // ACCESS)).to(tl.int64), access % (WIDTH // ACCESS) * ACCESS
    feature = column[:, None] + tl.arange(0, ACCESS)[None, :]
    mask = (access < accesses)[:, None]
    x = tl.load(source_ptr + row[:, None] * N + FIRST + feature, mask=mask)
    tl.store(target_ptr + row[:, None] * M + TARGET_FIRST + feature, x.to(target_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _copy_parts_kernel(
    x_ptr, x_target_ptr, y_ptr, y_target_ptr, x_accesses, y_accesses, X: tl.constexpr, Y: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy the parts x and y in one launch: the first programs copy x, the other programs copy y.

    X and Y are the `Part.numbers` of x and y.
    """
    program = tl.program_id(0)
    x_programs = tl.cdiv(x_accesses, BLOCK)
    if program < x_programs:
        _copy_part(x_ptr, x_target_ptr, program, x_accesses, X[0], X[1], X[2], X[3], X[4], X[5], BLOCK)
    else:
        _copy_part(y_ptr, y_target_ptr, program - x_programs, y_accesses, Y[0], Y[1], Y[2], Y[3], Y[4], Y[5], BLOCK)


def copy(parts: Sequence[Part], *, block: int = 256, warps: int = 4) -> None:
    """Copy one or two parts in one launch.

    Args:
        parts: the parts. Each has fewer than 2^31 accesses.
        block: the accesses of a program, a power of two.
        warps: the warps of a program.
    """
    x, y = parts[0], parts[-1]
    counts = [x.accesses, y.accesses if len(parts) == 2 else 0]
    programs = sum(triton.cdiv(count, block) for count in counts)
    _copy_parts_kernel[(programs,)](
        *x.pointers, *y.pointers, *counts, X=x.numbers, Y=y.numbers, BLOCK=block, num_warps=warps
    )


def contenders(sets: Sequence[Sequence[Part]]) -> dict[str, Callable[[], list[Callable]]]:
    """The copies as contenders of `timing.gpu_times`; each element of ``sets`` holds the parts of one call."""
    return {
        f"{SAME_PLACES}: {block} accesses, {warps} warps": partial(_calls, sets, block, warps)
        for block, warps in _PROGRAMS
    }


def _calls(sets: Sequence[Sequence[Part]], block: int, warps: int) -> list[Callable]:
    return [partial(copy, parts, block=block, warps=warps) for parts in sets]


def fastest_alone(frame: pd.DataFrame) -> pd.DataFrame:
    """``frame`` with one row instead of the rows of the copies: the row of the fastest copy, as ``SAME_PLACES``."""
    mine = frame.contender.str.startswith(SAME_PLACES)
    if not mine.any():
        return frame
    times = frame[mine].median_us
    best = frame.loc[[times.idxmin() if times.notna().any() else times.index[0]]]
    return pd.concat([frame[~mine], best.assign(contender=SAME_PLACES)], ignore_index=True)
