"""This file defines the workloads: shapes, dtypes and layouts, the bytes that they must move, and the tensors."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from ropelab.angles.tables import rotary_table
from ropelab.layout.pairing import LAYOUTS

DIRECTIONS = ("forward", "backward")
STORAGES = ("contiguous", "qkv")
MOST_SETS = 1024
"""Sets of buffers: to capture more calls than this takes longer than to measure them."""


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
    With ``storage = "qkv"`` q and k are views of one buffer that holds as many heads of v as of k (bshd only);
    their cotangents are contiguous, as attention hands them back. ``lengths`` are those of the sequences that
    ``seq_len`` tokens are packed of (thd only).
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
    storage: str = "contiguous"
    lengths: tuple[int, ...] = ()

    def __post_init__(self):
        if self.storage not in STORAGES:
            raise ValueError(f"storage: expected one of {STORAGES}, got {self.storage!r}")
        if self.storage == "qkv" and (self.seq_format != "bshd" or not self.k_heads):
            raise ValueError(f"storage: expected bshd and a k for 'qkv', got {self.seq_format}, {self.k_heads} k heads")
        packed = self.seq_format == "thd"
        if packed != bool(self.lengths) or (packed and (self.batch, self.seq_len) != (1, sum(self.lengths))):
            expected = f"those of {self.seq_len} tokens in one batch" if packed else "none but for thd"
            raise ValueError(f"lengths: expected {expected}, got a sum of {sum(self.lengths)}, batch {self.batch}")

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
            "seq_format": self.seq_format, "storage": self.storage, "direction": self.direction, "bytes": self.bytes,
        }  # fmt: skip

    @property
    def description(self) -> str:
        """For progress: what tells this cell from the others, but for the direction."""
        others = [self.seq_format if self.storage == "contiguous" else self.storage, self.layout]
        return ", ".join((self.name, *others))

    def shape(self, heads: int) -> tuple[int, ...]:
        """Shape of a tensor with ``heads`` heads in this workload's ``seq_format``."""
        b, s, d = self.batch, self.seq_len, self.head_dim
        shapes = {"bshd": (b, s, heads, d), "sbhd": (s, b, heads, d), "bhsd": (b, heads, s, d), "thd": (s, heads, d)}
        return shapes[self.seq_format]

    def cu_seqlens(self, device: torch.device | str) -> torch.Tensor:
        """int32 ``[n + 1]``: where the packed sequences begin and end."""
        return torch.tensor((0, *self.lengths), device=device).cumsum(0, dtype=torch.int32)

    def positions(self, device: torch.device | str) -> torch.Tensor | None:
        """int64 ``[T]``: of every packed token; None where nothing is packed."""
        return torch.cat([torch.arange(n) for n in self.lengths]).to(device) if self.lengths else None

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
            if self.storage == "qkv":
                heads = (self.q_heads, self.k_heads, self.k_heads)
                q, k, _ = draw(sum(heads)).split(heads, dim=2)
            else:
                q, k = draw(self.q_heads), draw(self.k_heads)
            dq, dk = draw(self.q_heads), draw(self.k_heads)
            for x in (q, k):
                if x is not None:
                    x.requires_grad_()
            sets.append(Buffers(q, k, dq, dk, cos, sin))
        return sets

    def cold_count(self, cache_bytes: int) -> int:
        """How many sets of buffers keep every access out of a cache of ``cache_bytes``.

        Between two uses of an element all others are used. What is read alone is to be twice the cache, so
        that out-of-place calls touch four times and in-place calls, which write where they read, twice its
        size. With few tokens ``MOST_SETS`` are less than that: one or two tokens are then found in the cache, where
        the projection before a rotation leaves them too.
        """
        return min(max(2, math.ceil(2 * cache_bytes / (self.bytes / 2))), MOST_SETS)


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

FORMATS = (("sbhd", "contiguous"), ("bhsd", "contiguous"), ("bshd", "qkv"))
"""seq_format and storage of the cells besides contiguous bshd."""

FEW_TOKENS_CELLS = tuple(_cell(1 / 1.2, 1, tokens, 32, 8, 128, first_position=1000) for tokens in (1, 2, 4, 8))

DEEPSPEED_CELLS = tuple(
    Workload(f"1x32x{seq_len}x128", 1, seq_len, 32, 0, 128, 128, dtype, "split_half", "bhsd", direction)
    for dtype in (torch.bfloat16, torch.float32)
    for seq_len in (2048, 4096, 8192)
    for direction in DIRECTIONS
)
"""The shapes of DeepSpeed#8052's table, (B, H, S, D) contiguous; its dtype and direction are not stated."""
