"""Measure `rope_and_cache` with a scale for each head of a token that the pass makes, beside given scales."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import pandas as pd
import torch

import ropelab
from ropelab.bench import copies, same_places, timing
from ropelab.bench.agreement import disagreement
from ropelab.bench.cache_operations import NormAndCache, Tensors, WholeLatentCache, as_bytes
from ropelab.bench.cells import progress
from ropelab.bench.compare import tidy
from ropelab.bench.paged_cache import TOKENS, calls, fraction_of_bytes
from ropelab.layout.pairing import LAYOUTS

MADE, GIVEN = "ropelab, scales made in the pass", "ropelab, given scales"

Case = NormAndCache | WholeLatentCache


def row_scales(*, smoke: bool = False, device: torch.device | str = "cuda") -> pd.DataFrame:
    """Time passes with q and caches in 8-bit floats: keys and values with heads, and latent attention.

    Columns: the columns of `ropelab.bench.paged_cache.paged_cache` but version and sha256. The status judges results
    and scales. ``bytes`` has the bytes of the pass with given scales, so the scales that are made count as time only.
    """
    cases = every_case()[:2] if smoke else every_case()
    described = progress(cases, lambda case: case.description)
    return pd.concat([_compare(case, device, rounds=3 if smoke else 9) for case in described], ignore_index=True)


def every_case() -> list[Case]:
    """All numbers of tokens, both layouts, with and without a norm, and few heads for each head of k."""
    kinds: list[Callable[..., Case]] = [
        partial(NormAndCache, float8=True, float8_q=True, norm=False),
        partial(NormAndCache, float8=True, float8_q=True),
        partial(NormAndCache, float8=True, float8_q=True, norm=False, q_heads=64),
        WholeLatentCache,
    ]
    return [kind(tokens, layout) for tokens, layout, kind in product(TOKENS, LAYOUTS, kinds)]


def _compare(case: Case, device: torch.device | str, rounds: int) -> pd.DataFrame:
    sets = calls(case, case.work.cold_count(timing.cache_bytes()), device)
    scales = scales_of(case, sets[0])
    sets = [call | scales for call in sets]
    runs = {MADE: made(case, device), GIVEN: case.ours(device)}
    status = check(case, runs[MADE], sets[0])
    timed = {name: partial(_ready, run, sets) for name, run in runs.items() if name == GIVEN or status == "ok"}
    copied = [case.to_copy(call) for call in sets]
    timed |= copies.contenders(copied) | same_places.contenders([case.places(call) for call in sets])
    with torch.no_grad():
        frame = same_places.fastest_alone(timing.gpu_times(timed, rounds=rounds))
    frame = fraction_of_bytes(frame, case, copied[0])
    torch.cuda.empty_cache()  # the graphs have memory of their own
    return tidy(frame, case.columns, {} if status == "ok" else {MADE: status})


def _ready(run: Callable, sets: Sequence[Tensors]) -> list[Callable[[], object]]:
    return [partial(run, call) for call in sets]


def scales_of(case: Case, call: Tensors) -> Tensors:
    """The tensors for the scales of a call: ``q scales`` ``[tokens, Hq]``, and those of each cache, one for each head.

    An entry of a latent cache, in two tensors here, has one scale.
    """
    heads = case.q_heads if isinstance(case, NormAndCache) else 128
    caches = [call[name] for name in case.cached]
    shapes = [(*x.shape[:2], x.shape[2] if x.ndim == 4 else 1) for x in caches]
    names = [f"{name} scales" for name in case.cached]
    found = {name: torch.zeros(shape, device=x.device) for name, shape, x in zip(names, shapes, caches, strict=True)}
    if isinstance(case, WholeLatentCache):
        found[names[0]] = found[names[1]]
    return found | {"q scales": torch.zeros(case.tokens, heads, device=call["slots"].device)}


def made(case: Case, device: torch.device | str) -> Callable[[Tensors], Tensors]:
    """The pass that makes the scales; it returns q."""
    cos, sin = case.tables(device)
    options = {"cos": cos, "sin": sin, "layout": case.layout}

    def run(call: Tensors) -> Tensors:
        if isinstance(case, NormAndCache):
            outs = {"q": call["q out"]}
            given = (*case.parts(call), *(call[name] for name in case.cached))
            scales, weights, nope = [call[f"{name} scales"] for name in case.cached], case._weights(call), {}
        else:
            outs, weights = case._outs(call), {}
            latent, keys = (call[name][:, :, None] for name in case.cached)
            given = call["q"][..., 128:], call["kv"][:, None, 512:], call["latent"][:, None], keys, latent
            scales = [call["k cache scales"]] * 2
            nope = {"q_nope": call["absorbed"], "q_nope_out": outs["other q"]}
        ropelab.rope_and_cache(
            *given, call["slots"], positions=call["positions"], q_out=outs["q"], q_scale_out=call["q scales"],
            k_scale_cache=scales[0], v_scale_cache=scales[1], **weights, **nope, **options,
        )  # fmt: skip
        return outs

    return run


def check(case: Case, run: Callable[[Tensors], Tensors], call: Tensors) -> str:
    """``"ok"`` if the stored numbers times their scales agree with float64, and other slots keep codes and scales.

    With the clock stopped, nothing runs and nothing is compared.
    """
    if timing.is_stopped():
        return "ok"
    fresh = {name: x.clone() for name, x in call.items()}
    if isinstance(case, WholeLatentCache):
        fresh["latent cache scales"] = fresh["k cache scales"]
    slots, right = call["slots"], {name: y for name, y in case.right(call).items() if name != "k"}
    with torch.no_grad():
        found = dict(run(fresh))
    scales: dict[str, torch.Tensor] = dict.fromkeys(found, fresh["q scales"][..., None])
    for name in case.cached:
        of_slots = fresh[f"{name} scales"].flatten(0, 1)
        rows = case.stored(name, as_bytes(fresh[name]).flatten(0, 1)[slots].view(call[name].dtype))
        found |= rows
        scales |= dict.fromkeys(rows, of_slots[slots][..., None] if fresh[name].ndim == 4 else of_slots[slots])
        others = torch.ones(len(of_slots), dtype=torch.bool, device=slots.device).index_fill_(0, slots, False)
        for kept in (name, f"{name} scales"):
            after, before = (as_bytes(x[kept]).flatten(0, 1)[others] for x in (fresh, call))
            found[f"{kept}, other slots"], right[f"{kept}, other slots"] = after, before
    return disagreement(found, right, case.roundings, scale=scales)
