"""Compare the logits of vLLM's engines with those of the same model in float32.

Greedy tokens say little where the two best logits nearly tie: 16 bits then let any change of the order of operations
choose another token. So all engines see the tokens that ``stock`` chose, and their logits at each place are compared.
"""

import importlib.util
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ropelab.bench import timing
from ropelab.bench.server_engine import EXACT, OURS, STOCK
from ropelab.bench.servers import GROUPS, TINY, TOKENS, Engine, running
from ropelab.bench.unavailable import Unavailable

COLUMNS = ("model", "engine", "places", "largest_error", "rms_error", "other_tokens", "largest_gap", "within_bound")
QWEN3 = GROUPS[0][0]
_START_SECONDS = 300

Logits = Sequence[Mapping[str, float]]
"""For each place, some of the largest logits by token."""


def server_logits(*, smoke: bool = False) -> pd.DataFrame:
    """Compare the engines of a model. Needs vLLM.

    Columns: model, engine, places (32 sequences with 256 tokens each), largest_error and rms_error (of the largest
        logits, from float32), other_tokens (places whose best token is another one than in ``stock``), largest_gap (in
        float32, between the best tokens of the engine and of ``stock`` at these places), and within_bound (those of
        these places whose gap is at most the sum of the largest errors of both engines).
    """
    if timing.is_stopped():
        return pd.DataFrame(columns=COLUMNS)
    if importlib.util.find_spec("vllm") is None:
        raise Unavailable("vllm is not installed")
    model = replace(TINY if smoke else QWEN3, engines=(STOCK, OURS, EXACT), cache_gib=4)
    with tempfile.TemporaryDirectory() as folder, running(model, Path(folder)) as engines:
        try:
            for name, engine in engines.items():
                print(f"    {model.name}, {name}: {engine.answer(_START_SECONDS)}", flush=True)
            found = _logits(engines)
        finally:
            for name, engine in engines.items():
                print(f"    {model.name}, {name}:{engine.said()}", flush=True)
    return pd.DataFrame([{"model": model.name, **row} for row in rows(found)], columns=COLUMNS)


def _logits(engines: Mapping[str, Engine]) -> dict[str, list[dict[str, float]]]:
    """Engine -> its logits at all places."""
    sequences = engines[STOCK].do("sequences", **TOKENS)
    found = {}
    for name, engine in engines.items():
        answer = engine.do("logits", sequences=sequences, first=TOKENS["length"])
        found[name] = [place for sequence in answer for place in sequence]
    return found


def rows(found: Mapping[str, Logits]) -> list[dict[str, Any]]:
    """The row of each engine but `EXACT`.

    Args:
        found: engine -> its logits at all places.
    """
    exact, stock = found[EXACT], found[STOCK]
    made: list[dict[str, Any]] = []
    for name in [STOCK, *(name for name in found if name not in (STOCK, EXACT))]:
        pairs = zip(found[name], exact, strict=True)
        errors = np.array([ours[t] - right[t] for ours, right in pairs for t in ours.keys() & right.keys()])
        largest = float(np.abs(errors).max())
        bound = largest + (made[0]["largest_error"] if made else largest)
        gaps = []
        for ours, theirs, right in zip(found[name], stock, exact, strict=True):
            a, b = max(ours, key=ours.__getitem__), max(theirs, key=theirs.__getitem__)
            if a != b:
                gaps.append(abs(right[a] - right[b]) if a in right and b in right else np.inf)
        made.append({
            "engine": name, "places": len(exact), "largest_error": largest,
            "rms_error": float(np.sqrt(np.square(errors).mean())), "other_tokens": len(gaps),
            "largest_gap": max(gaps, default=0.0), "within_bound": sum(gap <= bound for gap in gaps),
        })  # fmt: skip
    return made
