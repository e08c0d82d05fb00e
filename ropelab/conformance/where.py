"""Describe where wrong elements lie; the description often reveals the fault."""

from __future__ import annotations

import numpy as np

from ropelab.conformance.law import Comparison


def pattern(comparison: Comparison, rotary_dim: int) -> str:
    """Return in words how many elements are wrong, and the part of each axis that they are confined to.

    An example is ``"80 of 960 elements of q; only features >= 12, which do not rotate"``.

    Args:
        comparison: a comparison that failed.
        rotary_dim: R of its case.
    """
    wrong = comparison.excess > 1
    found = []
    for axis, name in enumerate(comparison.axes):
        hit = np.asarray(wrong.any(axis=tuple(i for i in range(wrong.ndim) if i != axis)))
        if hit.all() or not hit.any():
            continue
        found.append(_describe(hit, name, rotary_dim, comparison.numbers(axis)))
    share = f"{wrong.sum()} of {wrong.size} elements of {comparison.what}"
    return f"{share}; only {', '.join(found)}" if found else f"{share}, along all axes"


def _describe(hit: np.ndarray, name: str, rotary_dim: int, numbers: np.ndarray) -> str:
    plural = f"{name}es" if name.endswith("ch") else f"{name}s"
    places, last = np.flatnonzero(hit), len(hit) - 1
    indices, of = numbers[places], f" of {len(hit)}" * bool(numbers[-1] == last)  # a part of the tokens has no extent
    if name == "feature" and rotary_dim < len(hit):
        if np.array_equal(places, np.arange(rotary_dim, len(hit))):
            return f"features >= {rotary_dim}, which do not rotate"
        if np.array_equal(places, np.arange(rotary_dim)):
            return f"features < {rotary_dim}, which rotate"
    if len(indices) == 1:
        return f"{name} {indices[0]}{of}"
    if np.array_equal(places, np.arange(places[0], len(hit))):
        return f"{plural} >= {indices[0]}{of}"
    if np.array_equal(places, np.arange(places[-1] + 1)):
        return f"{plural} <= {indices[-1]}"
    step = np.diff(indices)
    if len(set(step)) == 1:
        if step[0] == 1:
            return f"{plural} {indices[0]} to {indices[-1]}"
        ends = step[0] == 2 and places[-1] >= last - 1
        kind = {0: "even", 1: "odd"}.get(int(indices[0])) if ends else None
        if kind or len(indices) > 3:
            return f"{kind} {plural}" if kind else f"{plural} {indices[0]}, {indices[1]}, ... {indices[-1]}"
    listed = ", ".join(map(str, indices[:6])) + (", ..." if len(indices) > 6 else "")
    return f"{plural} {listed}"
