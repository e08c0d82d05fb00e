"""The workloads: shapes, dtypes and layouts, the bytes that they must move, and the tensors."""

import math
from dataclasses import dataclass

import torch

from ropelab.angles.tables import rotary_table

DIRECTIONS = ("forward", "backward")
STORAGES = ("contiguous", "qkv")
MOST_SETS = 512
"""The most sets of buffers. The capture of more calls takes longer than their measurement."""


@dataclass(frozen=True)
class Buffers:
    """A set of tensors for one call. Sets share the tables, and have their own ``q``, ``k`` and cotangents.

    Attributes:
        q, k: the inputs, which require grad; k is None if the workload has no k.
        dq, dk: the cotangents: the gradients of the results.
        cos, sin: float32 ``[S, rotary_dim/2]``.
    """

    q: torch.Tensor
    k: torch.Tensor | None
    dq: torch.Tensor
    dk: torch.Tensor | None
    cos: torch.Tensor
    sin: torch.Tensor

    @property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """The tensors to rotate: q, and k if the workload has a k."""
        return (self.q,) if self.k is None else (self.q, self.k)

    @property
    def cotangents(self) -> tuple[torch.Tensor, ...]:
        """The gradients of the results, a gradient for each of ``inputs``."""
        return (self.dq,) if self.dk is None else (self.dq, self.dk)


@dataclass(frozen=True)
class Workload:
    """One cell of a benchmark.

    Attributes:
        name: the name of the cell in records.
        batch, seq_len, q_heads, k_heads, head_dim: the sizes of q and k; ``k_heads = 0`` means that there is no k.
        rotary_dim: the number of features of a head that rotate.
        dtype, layout, seq_format: as for `ropelab.apply_rope`.
        direction: "forward" or "backward".
        first_position: the position of the first token of every sequence. At position 0 the rotation is the identity,
            so a check of sequences with one token would see no fault.
        storage: "contiguous", or "qkv" (bshd only) for q and k that are views of one buffer with as many heads of v as
            of k. The cotangents are contiguous, as attention returns them.
        lengths: the lengths of the packed sequences, ``seq_len`` tokens in total (thd only).

    Raises:
        ValueError: the storage is unknown, or attributes contradict each other.
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
            expected = f"a sum of {self.seq_len} and batch 1" if packed else "no lengths without thd"
            raise ValueError(f"lengths: expected {expected}, got a sum of {sum(self.lengths)}, batch {self.batch}")

    @property
    def bytes(self) -> int:
        """The least number of bytes of GPU memory that one call moves.

        ``2 B S (Hq + Hk) D sizeof(dtype)``: the forward reads q and k once, the backward reads their cotangents once,
        and both write the results once. The tables do not count, because all heads, batches and layers share them.
        """
        heads = self.q_heads + self.k_heads
        return 2 * self.batch * self.seq_len * heads * self.head_dim * self.dtype.itemsize

    @property
    def columns(self) -> dict[str, object]:
        """The columns that identify this workload in a record."""
        return {
            "cell": self.name, "batch": self.batch, "seq_len": self.seq_len, "q_heads": self.q_heads,
            "k_heads": self.k_heads, "head_dim": self.head_dim, "rotary_dim": self.rotary_dim,
            "dtype": str(self.dtype).removeprefix("torch."), "layout": self.layout,
            "seq_format": self.seq_format, "storage": self.storage, "direction": self.direction, "bytes": self.bytes,
        }  # fmt: skip

    @property
    def description(self) -> str:
        """The workload in a few words, without the direction, for lines of progress."""
        others = [self.seq_format if self.storage == "contiguous" else self.storage, self.layout]
        return ", ".join((self.name, *others))

    def shape(self, heads: int) -> tuple[int, ...]:
        """Shape of a tensor with ``heads`` heads in this workload's ``seq_format``."""
        b, s, d = self.batch, self.seq_len, self.head_dim
        shapes = {"bshd": (b, s, heads, d), "sbhd": (s, b, heads, d), "bhsd": (b, heads, s, d), "thd": (s, heads, d)}
        return shapes[self.seq_format]

    def cu_seqlens(self, device: torch.device | str) -> torch.Tensor:
        """int32 ``[n + 1]``: the boundaries of the packed sequences."""
        return torch.tensor((0, *self.lengths), device=device).cumsum(0, dtype=torch.int32)

    def positions(self, device: torch.device | str) -> torch.Tensor | None:
        """int64 ``[T]``: the position of every packed token; None for a workload that is not packed."""
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
        """The number of sets of buffers that keeps every access out of a cache of ``cache_bytes``.

        Calls take the sets in turn. The inputs of all sets together are at least twice as large as the cache. Between
        two uses of an element, calls into new tensors therefore touch four times the size of the cache, and calls in
        place touch twice its size. With few tokens, the limit ``MOST_SETS`` gives fewer sets, so the calls find one or
        two tokens in the cache. In a model, the projection before the rotation leaves these tokens in the cache too.
        """
        return min(max(2, math.ceil(2 * cache_bytes / (self.bytes / 2))), MOST_SETS)


@dataclass(frozen=True)
class Cell:
    """A shape of the dense benchmark, and the fraction of the copy that the kernel should reach at this shape."""

    workload: Workload
    bar: float


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
"""bfloat16 in bshd, named "batch x tokens, query/key heads, head_dim". In the last cell, 8 sequences decode a token."""

FORMATS = (("sbhd", "contiguous"), ("bhsd", "contiguous"), ("bshd", "qkv"))
"""(seq_format, storage) of the cells in other formats than contiguous bshd."""

FEW_TOKENS_CELLS = tuple(_cell(1 / 1.2, 1, tokens, 32, 8, 128, first_position=1000) for tokens in (1, 2, 4, 8))

LENGTHS = tuple(_cell(0, 1, n, 32, 8, 128).workload for n in (16, 64, 256, 1024, 4096, 16_384, 65_536, 131_072))
"""One sequence of Llama 3's heads, up to the longest context of Llama 3.1."""

DEEPSPEED_CELLS = tuple(
    Workload(f"1x32x{seq_len}x128", 1, seq_len, 32, 0, 128, 128, dtype, "split_half", "bhsd", direction)
    for dtype in (torch.bfloat16, torch.float32)
    for seq_len in (2048, 4096, 8192)
    for direction in DIRECTIONS
)
"""The contiguous shapes (B, H, S, D) of the table in DeepSpeed#8052. The table states no dtype and no direction."""
