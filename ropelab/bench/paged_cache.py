"""This file measures rotations that also write into a paged cache: fused, and as the launches that ropelab needs."""

from collections.abc import Callable, Sequence
from functools import partial

import pandas as pd
import torch

from ropelab.bench import copies, packages, timing
from ropelab.bench.agreement import disagreement
from ropelab.bench.cache_operations import PAGE, POSITIONS, LatentCache, NormAndCache, Operation, Run, Tensors
from ropelab.bench.compare import progress, tidy
from ropelab.bench.peers import vllm

OURS, VLLM = "ropelab, separate launches", "vLLM"
TOKENS = (1, 64, 4096)
MOST_DECODED = 64
"""Up to this number, every token belongs to another sequence. More tokens are one prompt."""


def paged_cache(*, smoke: bool = False, device: torch.device | str = "cuda") -> pd.DataFrame:
    """Time both operations for 1, 64 and 4,096 tokens.

    Columns: operation, tokens, q_heads, k_heads (an entry of the cache in heads), head_dim, dtype, layout, bytes;
        contender, status, median_us, q20_us, q80_us, samples; fraction_of_copy; version and sha256 of the library of a
        package. The copy reads the tensors that the operation must read, and writes as many bytes.
    """
    cases = [kind(tokens) for kind in (NormAndCache, LatentCache) for tokens in (TOKENS[:1] if smoke else TOKENS)]
    described = progress(cases, lambda case: f"{case.name}, {case.tokens} tokens")
    return pd.concat([_compare(case, device, rounds=3 if smoke else 15) for case in described], ignore_index=True)


def _compare(case: Operation, device: torch.device | str, rounds: int) -> pd.DataFrame:
    sets = calls(case, case.work.cold_count(timing.cache_bytes()), device)
    runs, status, facts = contenders(case, device)
    status |= {name: check(case, run, sets[0]) for name, run in runs.items()}
    timed = {name: partial(_ready, run, sets) for name, run in runs.items() if status[name] == "ok"}
    with torch.no_grad():
        frame = timing.gpu_times(timed | copies.contenders([case.to_copy(call) for call in sets]), rounds=rounds)
    work = case.work.columns
    identity = {"operation": case.name, "tokens": case.tokens} | {
        name: work[name] for name in ("q_heads", "k_heads", "head_dim", "dtype", "layout", "bytes")
    }
    frame = tidy(copies.with_fraction(frame), identity, {name: why for name, why in status.items() if why != "ok"})
    torch.cuda.empty_cache()  # the graphs have memory of their own
    return frame.assign(**{name: [values.get(one, "") for one in frame.contender] for name, values in facts.items()})


def _ready(run: Run, sets: Sequence[Tensors]) -> list[Callable[[], object]]:
    return [partial(run, call) for call in sets]


def contenders(
    case: Operation, device: torch.device | str
) -> tuple[dict[str, Run], dict[str, str], dict[str, dict[str, str]]]:
    """The runs by name; the status of each contender that cannot run; and the facts of packages, column by column."""
    runs = {OURS: case.ours(device)}
    try:
        operators = vllm.operators()
        runs[VLLM] = case.vllm(operators, device)
    except packages.NotInstalled as error:
        return runs, {VLLM: f"not run: {error}"}, {"version": {}, "sha256": {}}
    return runs, {}, {"version": {VLLM: operators.version}, "sha256": {VLLM: operators.sha256}}


def calls(case: Operation, count: int, device: torch.device | str, seed: int = 0) -> list[Tensors]:
    """The tensors of ``count`` calls. The calls share the caches. Each call writes to slots of its own."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=case.work.dtype)

    decodes = case.tokens <= MOST_DECODED
    pages = case.tokens if decodes else case.tokens // PAGE
    caches = case.caches(2 * count * pages, draw)
    sets = []
    for mine in torch.randperm(2 * count * pages, generator=generator, device=device)[: count * pages].split(pages):
        if decodes:
            positions = torch.randint(POSITIONS, (case.tokens,), generator=generator, device=device)
            slots = mine * PAGE + positions % PAGE
        else:
            positions = torch.arange(case.tokens, device=device)
            slots = (mine[:, None] * PAGE + torch.arange(PAGE, device=device)).flatten()
        sets.append({"positions": positions, "slots": slots} | caches | case.inputs(draw))
    return sets


def check(case: Operation, run: Run, call: Tensors) -> str:
    """``"ok"`` if a run agrees with float64, writes the slots of its tokens, and leaves all other slots alone.

    The run gets copies of the tensors.
    """
    fresh = {name: x.clone() for name, x in call.items()}
    right, slots = case.right(call), call["slots"]
    try:
        with torch.no_grad():
            found = dict(run(fresh))
    except Exception as error:  # the status records the error
        return timing.failure(error)
    for name in case.cached:
        after, before = fresh[name].flatten(0, 1), call[name].flatten(0, 1)
        found |= case.stored(name, after[slots])
        others = torch.ones(len(after), dtype=torch.bool, device=slots.device).index_fill_(0, slots, False)
        found[f"{name}, other slots"], right[f"{name}, other slots"] = after[others], before[others]
    return disagreement(found, right, case.roundings)
