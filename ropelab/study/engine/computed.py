"""Register the computations whose results are evidence: each runs in seconds on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from ropelab.bench.unavailable import Unavailable


@dataclass(frozen=True)
class Evidence:
    """A data frame, its source in words for the report, and ``measured``: whether it is the record of a GPU."""

    name: str
    frame: pd.DataFrame
    source: str
    measured: bool = False


_COMPUTATIONS: dict[str, tuple[Callable[[], pd.DataFrame], str]] = {}


def evidence(name: str, how: str) -> Callable[[Callable[[], pd.DataFrame]], Callable[[], pd.DataFrame]]:
    """Register a computation as evidence: it runs in seconds on a CPU, or raises `Unavailable`.

    ``how`` tells the reader where the evidence comes from. ``frame.attrs["source"]`` replaces ``how`` where a frame has
    it.
    """

    def register(compute: Callable[[], pd.DataFrame]) -> Callable[[], pd.DataFrame]:
        _COMPUTATIONS[name] = (compute, how)
        return compute

    return register


def computed(name: str) -> Evidence | None:
    """The evidence of that name, computed now; None where no computation has the name, or it is unavailable."""
    if name not in _COMPUTATIONS:
        return None
    compute, how = _COMPUTATIONS[name]
    try:
        frame = compute()
    except Unavailable:
        return None
    return Evidence(name, frame, frame.attrs.get("source", how))
