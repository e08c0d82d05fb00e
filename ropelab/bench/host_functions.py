"""Measure the time that the host takes for a warm call of a function, beside other packages' calls that do the same.

`host` measures the rotation alone, and `host.projection` the projection.
"""

import pandas as pd
import torch

from ropelab.bench import cells, timing
from ropelab.bench.block_scales import HEADS, Indexer, Input, Output
from ropelab.bench.cache_operations import PAGE, LatentCache, NormAndCache, WholeLatentCache
from ropelab.bench.cached_keys import CachedKeys
from ropelab.bench.latent_attention import PARTS, VIEW, Latent
from ropelab.bench.mrope import MODELS, MRope
from ropelab.bench.operation import Operation, checked, divided, tidy

TOKENS = 8


def functions(*, smoke: bool = False, device: torch.device | str = "cuda") -> pd.DataFrame:
    """Time the contenders of `operations` that are right, in eager calls with the same tensors, warm.

    Columns: function, tokens; contender, status, median_us, q20_us, q80_us, samples.
    """
    rounds = 3 if smoke else 25
    cases = [(name, case) for name, case in operations().items() if not smoke or isinstance(case, Indexer)]
    return cells.table(cases, lambda case: _compare(*case, device, rounds), lambda case: case[0])


def operations() -> dict[str, Operation]:
    """The function that a call is of, with what tells its calls apart -> the operation with few tokens."""
    latent = {part: Latent("thd", TOKENS, part=part, length=TOKENS) for part in PARTS}
    return {
        "rope_and_cache": NormAndCache(TOKENS, norm=False),
        "rope_and_cache, norm": NormAndCache(TOKENS),
        "rope_and_cache, latent, 8 bits": WholeLatentCache(TOKENS),
        "mla_rope_and_cache": LatentCache(TOKENS),
        "rotate_cached_keys": CachedKeys("a page of keys", PAGE),
        "rotate_mla_query": latent["q"],
        "assemble_mla_kv": latent["k and v"],
        "assemble_mla_kv, v a view": latent[VIEW],
        "rope_and_quantize": Output(TOKENS, HEADS[0]),
        "rope_and_block_scaled_cache": Input(TOKENS, HEADS[0]),
        "rope_and_quantize_indexer": Indexer(TOKENS),
        "apply_rope, axes": MRope(MODELS[1], "split_half", TOKENS, "apply_rope"),
        "apply_qk_norm_rope, axes": MRope(MODELS[1], "split_half", TOKENS, "qk_norm"),
    }


def _compare(name: str, operation: Operation, device: torch.device | str, rounds: int) -> pd.DataFrame:
    sets = operation.sets(device)
    found = operation.contenders(sets, device)
    step = operation.steps[0]
    right, wrong = divided(found, checked(operation, sets, found, device), step)
    calls = {contender: operation.prepared(one, sets[:1], step) for contender, one in right.items()}
    timed = {contender: lambda calls=calls: calls()[0] for contender, calls in calls.items()}
    return tidy(timing.host_times(timed, rounds=rounds, batch=40), {"function": name, "tokens": TOKENS}, wrong)
