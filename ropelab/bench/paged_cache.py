"""Measure rotations that also write into a paged cache: in one launch, and as separate launches."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import pandas as pd
import torch

from ropelab.bench import copies, packages, same_places, timing
from ropelab.bench.agreement import disagreement
from ropelab.bench.cache_operations import (
    PAGE,
    POSITIONS,
    SCALE,
    LatentCache,
    NormAndCache,
    Operation,
    Run,
    Tensors,
    WholeLatentCache,
    as_bytes,
)
from ropelab.bench.cells import progress
from ropelab.bench.compare import tidy
from ropelab.bench.peers import flashinfer, vllm
from ropelab.bench.rows import are_copies
from ropelab.layout.pairing import LAYOUTS

OURS, SEPARATE, VLLM, FLASHINFER = "ropelab, one launch", "ropelab, separate launches", "vLLM", "FlashInfer"
FLASHINFER_VERSION = "0.7.2.post1"
TOKENS = (1, 8, 64, 512, 4096, 8192)
GROUPED_HEADS = ((32, 8), (8, 8), (28, 4), (64, 8))
"""Heads of q and of k with 4, 1, 7 and 8 heads of q for each head of k."""
MOST_DECODED = 64
"""Up to this number, every token belongs to another sequence. More tokens are one prompt."""


def paged_cache(*, smoke: bool = False, device: torch.device | str = "cuda") -> pd.DataFrame:
    """Time the operations of `headline_cases`.

    Columns: operation, tokens, cache, q_out (the dtypes of the caches and of the results for q), q_heads, k_heads
        (an entry of the cache in heads), head_dim, dtype, layout, bytes (that must move); contender, status, median_us,
        q20_us, q80_us, samples; fraction_of_copy; version and sha256 of the library of a package. The copy reads the
        tensors that the operation must read, and writes as many bytes. Where the operation writes fewer bytes, the time
        of the copy is multiplied by the share of the bytes that must move. `SAME_PLACES` is the fastest copy that
        reads and writes what the operation must; it is absent where the copy does the same.
    """
    cases = [NormAndCache(1), LatentCache(1)] if smoke else headline_cases()
    return _table(cases, device, rounds=3 if smoke else 9)


def one_pass_cells(*, smoke: bool = False, device: torch.device | str = "cuda") -> pd.DataFrame:
    """Time all operations in both layouts, for all numbers of heads and tokens. Columns: as `paged_cache`."""
    return _table(all_cases()[:1] if smoke else all_cases(), device, rounds=3 if smoke else 9)


def headline_cases() -> list[Operation]:
    """Both operations for all numbers of tokens, and their variants for 4,096 tokens."""
    cases: list[Operation] = [kind(tokens) for kind in (NormAndCache, LatentCache) for tokens in TOKENS]
    cases += [NormAndCache(4096, q_heads=hq, k_heads=hk) for hq, hk in GROUPED_HEADS[1:]]
    cases += [NormAndCache(tokens, "interleaved") for tokens in (1, 4096)]
    cases += [NormAndCache(4096, layout, norm=False) for layout in LAYOUTS]
    cases += [NormAndCache(4096, layout, float8=True) for layout in LAYOUTS]
    cases += [LatentCache(4096, "split_half"), LatentCache(4096, float8=True)]
    return [*cases, NormAndCache(4096, norm=False, float8=True, float8_q=True), WholeLatentCache(4096)]


def all_cases() -> list[Operation]:
    """Every operation in both layouts: with and without the norm, with caches of 16 and of 8 bits."""
    cases: list[Operation] = []
    for layout, tokens in product(LAYOUTS, TOKENS):
        cases += [NormAndCache(tokens, layout, q_heads=hq, k_heads=hk) for hq, hk in GROUPED_HEADS]
        cases += [NormAndCache(tokens, layout, norm=False), NormAndCache(tokens, layout, float8=True)]
        cases += [NormAndCache(tokens, layout, norm=False, float8=True, float8_q=True)]
        cases += [LatentCache(tokens, layout), LatentCache(tokens, layout, float8=True)]
        cases += [WholeLatentCache(tokens, layout)]
    return cases


def _table(cases: Sequence[Operation], device: torch.device | str, rounds: int) -> pd.DataFrame:
    described = progress(cases, lambda case: case.description)
    return pd.concat([_compare(case, device, rounds) for case in described], ignore_index=True)


def _compare(case: Operation, device: torch.device | str, rounds: int) -> pd.DataFrame:
    sets = calls(case, case.work.cold_count(timing.cache_bytes()), device)
    runs, status, facts = contenders(case, device)
    status |= {name: check(case, run, sets[0]) for name, run in runs.items()}
    timed = {name: partial(_ready, run, sets) for name, run in runs.items() if status[name] == "ok"}
    copied = [case.to_copy(call) for call in sets]
    timed |= copies.contenders(copied)
    if places := [parts for call in sets if (parts := case.places(call))]:
        timed |= same_places.contenders(places)
    with torch.no_grad():
        frame = same_places.fastest_alone(timing.gpu_times(timed, rounds=rounds))
    frame = fraction_of_bytes(frame, case, copied[0])
    frame = tidy(frame, case.columns, {name: why for name, why in status.items() if why != "ok"})
    torch.cuda.empty_cache()  # the graphs have memory of their own
    return frame.assign(**{name: [values.get(one, "") for one in frame.contender] for name, values in facts.items()})


def fraction_of_bytes(frame: pd.DataFrame, case: Operation, copied: Sequence[torch.Tensor]) -> pd.DataFrame:
    """``frame`` with ``fraction_of_copy``, where the copies copied the tensors ``copied``: see `paged_cache`."""
    frame = copies.with_fraction(frame)
    share = case.bytes / (2 * sum(x.numel() * x.itemsize for x in copied))
    is_copy = are_copies(frame)
    return frame.assign(fraction_of_copy=frame.fraction_of_copy.where(is_copy, frame.fraction_of_copy * share))


def _ready(run: Run, sets: Sequence[Tensors]) -> list[Callable[[], object]]:
    return [partial(run, call) for call in sets]


def contenders(
    case: Operation, device: torch.device | str
) -> tuple[dict[str, Run], dict[str, str], dict[str, dict[str, str]]]:
    """The runs by name; the status of each contender that cannot run; and the facts of packages, column by column.

    A contender that does not compute the operation is left out.
    """
    runs, status = {OURS: case.ours(device)}, {}
    facts: dict[str, dict[str, str]] = {"version": {}, "sha256": {}}
    if separate := case.separate(device):
        runs[SEPARATE] = separate
    try:
        operators = vllm.operators()
        if run := case.vllm(operators, device):
            runs[VLLM] = run
            facts["version"][VLLM], facts["sha256"][VLLM] = operators.version, operators.sha256
    except packages.NotInstalled as error:
        status[VLLM] = f"not run: {error}"
    if case.flashinfer_function:
        try:
            function = flashinfer.function(FLASHINFER_VERSION, case.flashinfer_function)
            runs[FLASHINFER], facts["version"][FLASHINFER] = case.flashinfer(function, device), FLASHINFER_VERSION
        except (packages.NotInstalled, ValueError) as error:  # ValueError: there is no kernel for this GPU
            status[FLASHINFER] = f"not run: {error}"
    return runs, status, facts


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
        found = {"positions": positions, "slots": slots} | caches | case.inputs(draw)
        sets.append(found | case.for_flashinfer(found, decodes))
    return sets


def check(case: Operation, run: Run, call: Tensors) -> str:
    """``"ok"`` if a run agrees with float64, writes the slots of its tokens, and leaves all other slots alone.

    The run gets copies of the tensors. With the clock stopped, nothing runs and nothing is compared.
    """
    if timing.is_stopped():
        return "ok"
    fresh = {name: x.clone() for name, x in call.items()}
    right, slots = case.right(call), call["slots"]
    try:
        with torch.no_grad():
            found = dict(run(fresh))
    except Exception as error:  # the status records the error
        return timing.failure(error)
    for name in case.cached:
        after, before = (as_bytes(x[name]).flatten(0, 1) for x in (fresh, call))
        found |= case.stored(name, after[slots].view(call[name].dtype))
        others = torch.ones(len(after), dtype=torch.bool, device=slots.device).index_fill_(0, slots, False)
        found[f"{name}, other slots"], right[f"{name}, other slots"] = after[others], before[others]
    # A run may write the rotated k to the cache only.
    right = {name: y for name, y in right.items() if name in found or name != "k"}
    return disagreement(found, right, case.roundings, scale=SCALE)
