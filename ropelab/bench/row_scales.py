"""Measure `rope_and_cache` with a scale for each head of a token that the pass makes, beside given scales."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import pandas as pd
import torch

import ropelab
from ropelab.bench.agreement import disagreement
from ropelab.bench.cache_operations import NormAndCache, Tensors, WholeLatentCache, other_slots, rows
from ropelab.bench.operation import Contender, Operation, table
from ropelab.bench.paged_cache import TOKENS
from ropelab.layout.pairing import LAYOUTS

MADE, GIVEN = "ropelab, scales made in the pass", "ropelab, given scales"


@dataclass(frozen=True)
class RowScales(Operation):
    """A pass with q and caches in 8-bit floats: keys and values with heads, or latent attention.

    The bytes are those of the pass with given scales, so the scales that are made count as time only.
    """

    case: NormAndCache | WholeLatentCache

    scaled = True

    @property
    def columns(self):
        return self.case.columns

    @property
    def description(self):
        return self.case.description

    @property
    def tokens(self) -> int:
        return self.case.tokens

    @property
    def bytes(self):
        return self.case.bytes

    def sets(self, device):
        sets = self.case.sets(device)
        scales = self.scales(sets[0])
        return [call | scales for call in sets]

    def to_copy(self, call, step=""):
        return self.case.to_copy(call)

    def places(self, call, step=""):
        return self.case.places(call)

    def scales(self, call: Tensors) -> Tensors:
        """``q scales`` ``[tokens, Hq]``, and those of each cache, one for each head of a slot.

        An entry of a latent cache, in two tensors here, has one scale.
        """
        heads = self.case.q_heads if isinstance(self.case, NormAndCache) else 128
        found = {"q scales": torch.zeros(self.tokens, heads, device=call["slots"].device)}
        for name in self.case.cached:
            x = call[name]
            found[f"{name} scales"] = torch.zeros((*x.shape[:2], x.shape[2] if x.ndim == 4 else 1), device=x.device)
        if isinstance(self.case, WholeLatentCache):
            found["latent cache scales"] = found["k cache scales"]
        return found

    def contenders(self, sets, device):
        return {MADE: Contender(self.made(device)), GIVEN: Contender(self.case.ours(device), check=self.case.check)}

    def made(self, device: torch.device | str) -> Callable[[Tensors], Tensors]:
        """The pass that makes the scales."""
        cos, sin = self.case.tables(device)
        options = {"cos": cos, "sin": sin, "layout": self.case.layout}
        names = ("k cache", "v cache") if isinstance(self.case, NormAndCache) else ("k cache", "k cache")

        def run(call: Tensors) -> Tensors:
            k_scales, v_scales = (call[f"{name} scales"] for name in names)
            q = ropelab.rope_and_cache(
                **self.case.arguments(call), slot_mapping=call["slots"], positions=call["positions"],
                q_scale_out=call["q scales"], k_scale_cache=k_scales, v_scale_cache=v_scales, **options,
            )  # fmt: skip
            return self.case.results(call, q)

        return run

    def check(self, run, call, step=""):
        """``"ok"`` if stored numbers times their scales agree with float64, and other slots keep codes and scales."""
        case, slots = self.case, call["slots"]
        fresh = {name: x.clone() for name, x in call.items()}
        if isinstance(case, WholeLatentCache):
            fresh["latent cache scales"] = fresh["k cache scales"]
        right = {name: y for name, y in case.right(call).items() if name != "k"}
        with torch.no_grad():
            found = dict(run(fresh))
        scales: dict[str, torch.Tensor] = dict.fromkeys(found, fresh["q scales"][..., None])
        for name in case.cached:
            stored, of_slots = case.stored(name, rows(fresh, name, slots)), rows(fresh, f"{name} scales", slots)
            found |= stored
            scales |= dict.fromkeys(stored, of_slots[..., None] if fresh[name].ndim == 4 else of_slots)
        kept = [name for cache in case.cached for name in (cache, f"{cache} scales")]
        found_others, right_others = (other_slots(x, slots, *kept) for x in (fresh, call))
        return disagreement(found | found_others, right | right_others, case.roundings, scale=scales)


def row_scales(*, smoke: bool = False, device: torch.device | str = "cuda") -> pd.DataFrame:
    """Time passes with q and caches in 8-bit floats. The status judges results and scales.

    Columns: the columns of `ropelab.bench.paged_cache.paged_cache` but version and sha256.
    """
    cases = every_case()[:2] if smoke else every_case()
    return table(cases, rounds=3 if smoke else 9, device=device)


def every_case() -> list[RowScales]:
    """All numbers of tokens, both layouts, with and without a norm, and few heads for each head of k."""
    kinds: list[Callable[..., NormAndCache | WholeLatentCache]] = [
        partial(NormAndCache, float8=True, float8_q=True, norm=False),
        partial(NormAndCache, float8=True, float8_q=True),
        partial(NormAndCache, float8=True, float8_q=True, norm=False, q_heads=64),
        WholeLatentCache,
    ]
    return [RowScales(kind(tokens, layout)) for tokens, layout, kind in product(TOKENS, LAYOUTS, kinds)]
