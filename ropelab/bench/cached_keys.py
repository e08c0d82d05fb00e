"""Measure the rotation of keys that a paged cache holds: in place in one launch, and as separate launches."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import pandas as pd
import torch

import ropelab
from ropelab import reference
from ropelab.bench import same_places, timing
from ropelab.bench.agreement import disagreement
from ropelab.bench.cache_operations import OURS, PAGE, POSITIONS, SEPARATE, Tensors, as_bytes, other_slots, rows
from ropelab.bench.operation import Contender, Operation, table
from ropelab.bench.workloads import Workload
from ropelab.kernels.float8 import FLOAT8_DTYPES, to_float8
from ropelab.layout.pairing import LAYOUTS

SLOTS = (16, 256, 2048, 8192, 32768)
"""Numbers of slots: whole pages, as a reused prefix has them."""
ROUNDINGS = 6
"""The table, two products, a difference and the result are rounded; see `LatentCache` of `cache_operations`."""


@dataclass(frozen=True)
class CachedKeys(Operation):
    """Keys in slots of a cache ``[pages, PAGE, heads, head_dim]``, of which the last ``rotary_dim`` features turn.

    Attributes:
        name, heads, head_dim, rotary_dim, slots, layout: the sizes.
        dtype: of the cache.
        row_scales: each row has a scale, and gets a new one.
    """

    name: str
    slots: int
    heads: int = 8
    head_dim: int = 128
    rotary_dim: int = 128
    layout: str = "split_half"
    dtype: torch.dtype = torch.bfloat16
    row_scales: bool = False

    @property
    def moved(self) -> int:
        """The features of a row that must move: a new scale changes all of them."""
        return self.head_dim if self.row_scales else self.rotary_dim

    @property
    def bytes(self) -> int:
        """The bytes that must move: every feature that changes, and every scale, is read and written once."""
        row = self.moved * self.dtype.itemsize + (4 if self.row_scales else 0)
        return 2 * self.slots * self.heads * row

    @property
    def columns(self):
        return {
            "operation": self.name, "slots": self.slots, "heads": self.heads, "head_dim": self.head_dim,
            "rotary_dim": self.rotary_dim, "dtype": str(self.dtype).removeprefix("torch."), "layout": self.layout,
            "row_scales": self.row_scales, "bytes": self.bytes,
        }  # fmt: skip

    @property
    def description(self):
        return f"{self.name}, {self.layout}, {self.slots} slots"

    @property
    def options(self) -> dict[str, object]:
        """The arguments that all calls share, but the tables."""
        return {"layout": self.layout, "rotary_slice": (self.head_dim - self.rotary_dim, self.head_dim)}

    def sets(self, device):
        """The calls share a cache and have slots of their own."""
        work = Workload(self.name, 1, self.slots, self.heads, 0, self.head_dim, self.head_dim, layout=self.layout)
        count, pages = work.cold_count(timing.cache_bytes()), self.slots // PAGE
        generator = torch.Generator(device).manual_seed(0)
        shape = 2 * count * pages, PAGE, self.heads, self.head_dim
        cache = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
        cache = to_float8(cache, self.dtype) if self.dtype in FLOAT8_DTYPES else cache
        shared = {"cache": cache}
        if self.row_scales:
            shared["scales"] = torch.rand(shape[:3], generator=generator, device=device) + 0.5
        mine = torch.randperm(2 * count * pages, generator=generator, device=device)[: count * pages].split(pages)
        within = torch.arange(PAGE, device=device)
        return [
            shared | {
                "slots": (page[:, None] * PAGE + within).flatten(),
                "deltas": torch.randint(-POSITIONS + 1, POSITIONS, (self.slots,), generator=generator, device=device),
            }
            for page in mine
        ]  # fmt: skip

    def tables(self, device: torch.device | str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
        """Cosines and sines ``[POSITIONS, R/2]``."""
        tables = ropelab.rotary_table(POSITIONS, self.rotary_dim, dtype=dtype, device=device)
        return dict(zip(("cos", "sin"), tables, strict=True))

    def contenders(self, sets, device):
        found = {OURS: self.ours(device), SEPARATE: self.separate(device)}
        return {name: Contender(run) for name, run in found.items() if run}

    def ours(self, device: torch.device | str) -> Callable[[Tensors], None]:
        """The one launch."""
        tables = self.tables(device)

        def run(call: Tensors) -> None:
            ropelab.rotate_cached_keys(
                call["cache"], call["slots"], call["deltas"], k_scale_cache=call.get("scales"), **tables, **self.options
            )

        return run

    def separate(self, device: torch.device | str) -> Callable[[Tensors], None] | None:
        """A gather, a rotation in place, and ``index_copy_``; None for 8-bit floats."""
        if self.dtype in FLOAT8_DTYPES:
            return None
        tables = self.tables(device)

        def run(call: Tensors) -> None:
            rows = call["cache"].flatten(0, 1)
            keys = rows[call["slots"]]
            ropelab.apply_rope(
                keys, positions=call["deltas"], seq_format="thd", inplace=True, **tables, **self.options
            )  # fmt: skip
            rows.index_copy_(0, call["slots"], keys)

        return run

    def to_copy(self, call, step=""):
        """As many bytes as a row must read, without its scale."""
        width = self.moved * self.dtype.itemsize // 2
        return (torch.zeros(self.slots, self.heads * width, dtype=torch.bfloat16, device=call["slots"].device),)

    def places(self, call, step=""):
        """The features of contiguous rows that the operation reads and writes."""
        moved = as_bytes(call["cache"]).flatten(0, 1)[call["slots"]]
        return [same_places.in_place(moved, self.head_dim - self.moved, self.moved)]

    def check(self, run, call, step=""):
        """``"ok"`` if a run agrees with float64 in its slots, and leaves all other slots and scales alone."""
        fresh, slots = {name: x.clone() for name, x in call.items()}, call["slots"]
        with torch.no_grad():
            run(fresh)
        keys = rows(call, "cache", slots).double()
        keys = keys * rows(call, "scales", slots).double()[..., None] if self.row_scales else keys
        where = {"positions": call["deltas"], "seq_format": "thd", **self.tables(slots.device, torch.float64)}
        right = {"keys": reference.rotate(keys, **where, **self.options)}
        kept = ("cache", "scales") if self.row_scales else ("cache",)
        found_others, right_others = (other_slots(x, slots, *kept) for x in (fresh, call))
        found = {"keys": rows(fresh, "cache", slots)} | found_others
        scale = {"keys": rows(fresh, "scales", slots)[..., None]} if self.row_scales else 1.0
        return disagreement(found, right | right_others, ROUNDINGS, scale=scale)


def cached_keys(*, smoke: bool = False, device: torch.device | str = "cuda") -> pd.DataFrame:
    """Time the rotation of cached keys by a delta for each slot.

    Columns: `CachedKeys.columns`, and those of `operation.compare`. The copy moves as many bytes between contiguous
        tensors.
    """
    return table(every_case()[:1] if smoke else every_case(), rounds=3 if smoke else 9, device=device)


def every_case() -> list[CachedKeys]:
    """Keys with heads and the entries of a latent cache (DeepSeek-V3), in 16 and 8 bits, for all numbers of slots."""
    float8, latent = FLOAT8_DTYPES[0], {"heads": 1, "head_dim": 576, "rotary_dim": 64}
    kinds: list[Callable[..., CachedKeys]] = [
        partial(CachedKeys, "keys"), partial(CachedKeys, "keys", dtype=float8),
        partial(CachedKeys, "keys", dtype=float8, row_scales=True), partial(CachedKeys, "latent cache", **latent),
        partial(CachedKeys, "latent cache", dtype=float8, row_scales=True, **latent),
    ]  # fmt: skip
    return [kind(slots, layout=layout) for kind, layout, slots in product(kinds, LAYOUTS, SLOTS)]
