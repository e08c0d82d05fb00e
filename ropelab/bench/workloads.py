"""What is timed: shapes, dtypes and layouts, the bytes they must move, and the tensors themselves."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ropelab.layout import LAYOUTS
from ropelab.tables import rotary_table

DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Buffers:
    """One set of tensors for one call. Sets differ in ``q``, ``k`` and their cotangents and share the tables.

    ``q`` and ``k`` require grad. ``cos`` and ``sin`` are float32 ``[S, rotary_dim/2]``.
    """

    q: torch.Tensor
    k: torch.Tensor | None
    dq: torch.Tensor
    dk: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The tensors rotated, q and if there is one k."""
        return (self.q,) if self.k is None else (self.q, self.k)

    @property
    def cotangents(self) -> tuple[torch.Tensor, ...]:
        """The gradients that the backward starts from, one for each of ``inputs``."""
        return (self.dq,) if self.dk is None else (self.dq, self.dk)


@dataclass(frozen=True)
class Workload:
    """One cell of a benchmark.

    ``k_heads = 0`` means that there is no k. ``first_position`` is the position of the first token of every
    sequence: with one token a sequence, position 0 would make the rotation the identity and any check blind.
    """

    name: str
    batch: int
    seq_len: int
    q_heads: int
    k_heads: int
    head_dim: int
    rotary_dim: int
    dtype: torch.dtype = torch.bfloat16
    layout: str = "split_half"
    seq_format: str = "bshd"
    direction: str = "forward"
    first_position: int = 0

    @property
    def bytes(self) -> int:
        """Fewest bytes of device memory that one call moves.

        ``2 B S (Hq + Hk) D sizeof(dtype)``: q and k (backward: their cotangents) are read once and the
        results written once. The tables are left out: all heads, batches and layers share them.
        """
        heads = self.q_heads + self.k_heads
        return 2 * self.batch * self.seq_len * heads * self.head_dim * self.dtype.itemsize

    @property
    def columns(self) -> dict[str, object]:
        """What identifies this workload in a record."""
        return {
            "cell": self.name, "batch": self.batch, "seq_len": self.seq_len, "q_heads": self.q_heads,
            "k_heads": self.k_heads, "head_dim": self.head_dim, "rotary_dim": self.rotary_dim,
            "dtype": str(self.dtype).removeprefix("torch."), "layout": self.layout,
            "seq_format": self.seq_format, "direction": self.direction, "bytes": self.bytes,
        }  # fmt: skip

    def shape(self, heads: int) -> tuple[int, ...]:
        """Shape of a tensor with ``heads`` heads in this workload's ``seq_format``."""
        b, s, d = self.batch, self.seq_len, self.head_dim
        return {"bshd": (b, s, heads, d), "sbhd": (s, b, heads, d), "bhsd": (b, heads, s, d)}[self.seq_format]

    def buffers(self, count: int = 1, device: torch.device | str = "cuda", seed: int = 0) -> list[Buffers]:
        """``count`` sets of normally distributed q, k and cotangents."""
        generator = torch.Generator(device).manual_seed(seed)

        def draw(heads: int) -> torch.Tensor | None:
            options = {"generator": generator, "device": device, "dtype": self.dtype}
            return torch.randn(self.shape(heads), **options) if heads else None

        last = self.first_position + self.seq_len
        cos, sin = (t[self.first_position :] for t in rotary_table(last, self.rotary_dim, device=device))
        sets = []
        for _ in range(count):
            q, k, dq, dk = draw(self.q_heads), draw(self.k_heads), draw(self.q_heads), draw(self.k_heads)
            for x in (q, k):
                if x is not None:
                    x.requires_grad_()
            sets.append(Buffers(q, k, dq, dk, cos, sin))
        return sets

    def cold_count(self, cache_bytes: int) -> int:
        """How many sets of buffers keep every access out of a cache of ``cache_bytes``.

        Between two uses of an element all others are used. What is read alone is to be twice the cache, so
        that out-of-place calls touch four times and in-place calls, which write where they read, twice its
        size.
        """
        return max(2, math.ceil(2 * cache_bytes / (self.bytes / 2)))


@dataclass(frozen=True)
class Cell:
    """A shape of the dense benchmark and the fraction of the copy that the kernel is to reach there."""

    workload: Workload
    bar: float

    def variants(self) -> Iterator[Workload]:
        """Both layouts, forward and backward."""
        for layout in LAYOUTS:
            for direction in DIRECTIONS:
                yield replace(self.workload, layout=layout, direction=direction)


def _cell(bar: float, batch: int, seq_len: int, q_heads: int, k_heads: int, head_dim: int, **more) -> Cell:
    name = f"{batch}x{seq_len} {q_heads}/{k_heads} {head_dim}"
    return Cell(Workload(name, batch, seq_len, q_heads, k_heads, head_dim, head_dim, **more), bar)


DENSE_CELLS = (
    _cell(0.96, 4, 4096, 32, 8, 128),
    _cell(0.96, 1, 4096, 32, 8, 128),
    _cell(0.96, 1, 4096, 32, 8, 64),
    _cell(0.92, 1, 512, 32, 8, 128),
    _cell(0.94, 1, 4096, 16, 1, 256),
    _cell(0.94, 1, 4096, 32, 32, 80),
    _cell(0.94, 1, 4096, 32, 32, 96),
    _cell(0.85, 8, 1, 32, 8, 128, first_position=1000),
)
"""bf16, bshd, named "batch x tokens query/key heads head_dim"; in the last, 8 sequences decode a token."""

DEEPSPEED_CELLS = tuple(
    Workload(f"1x32x{seq_len}x128", 1, seq_len, 32, 0, 128, 128, dtype, "split_half", "bhsd", direction)
    for dtype in (torch.bfloat16, torch.float32)
    for seq_len in (2048, 4096, 8192)
    for direction in DIRECTIONS
)
"""The shapes of DeepSpeed#8052's table, (B, H, S, D) contiguous; its dtype and direction are not stated."""
