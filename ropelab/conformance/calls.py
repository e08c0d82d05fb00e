"""Say which calls of a function are wrong, by what they have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import torch

from ropelab.conformance.watched import Seen
from ropelab.kernels import NO_POSITION


def _sequences_differ(seen: Seen) -> bool:
    positions = seen.case.token_positions()
    return len(positions) > 1 and bool((positions != positions[0]).any())


def _gaps(x: torch.Tensor) -> bool:
    """Return whether a tensor is dense in no order of its axes."""
    return x.numel() > 1 and not torch.empty_like(x).stride() == x.stride()


def _given(seen: Seen) -> torch.Tensor:
    return (seen.case.cotangents if seen.gradient else seen.case.inputs)[seen.which or 0]


Circumstances = Mapping[str, Callable[[Any], bool]]
Extents = Mapping[str, Callable[[Any], int]]
CIRCUMSTANCES: Circumstances = {
    "gradients": lambda s: s.gradient,
    "a position other than 0": lambda s: bool((s.positions[s.positions != NO_POSITION] != 0).any()),
    "several tokens": lambda s: s.case.shape[1] > 1,
    "several sequences": lambda s: s.case.shape[0] > 1,
    "several heads": lambda s: s.given.shape[2] > 1,
    "positions that differ between sequences": _sequences_differ,
    "an offset for each sequence": lambda s: isinstance(s.case.offsets, tuple) and s.case.lengths is None,
    "a first position other than 0": lambda s: bool((s.case.token_positions()[:, :1] != 0).any()),
    "positions that do not count up": lambda s: bool((s.case.token_positions().diff(dim=1) != 1).any()),
    "positions that are passed": lambda s: s.case.positions is not None,
    "negative positions": lambda s: bool(((p := s.case.token_positions()) < 0).logical_and(p != NO_POSITION).any()),
    "tokens without a position": lambda s: bool((s.case.token_positions() == NO_POSITION).any()),
    "packed documents": lambda s: s.case.lengths is not None,
    "empty documents": lambda s: 0 in (s.case.lengths or ()),
    "offsets of documents": lambda s: s.case.lengths is not None and isinstance(s.case.offsets, tuple),
    "a shard of context parallelism": lambda s: s.case.shard is not None,
    "a rank beyond the first": lambda s: s.case.shard is not None and s.case.shard[1] > 0,
    "positions along several axes": lambda s: s.case.axes is not None,
    "axes that take turns": lambda s: s.case.mrope_interleaved,
    "tables with a factor": lambda s: s.case.factor != 1,
    "a scale of positions": lambda s: s.case.interpolation != 1,
    "the inverse rotation": lambda s: s.case.inverse,
    "features that do not rotate": lambda s: s.case.rotary_dim < s.given.shape[-1],
    "an odd number of pairs": lambda s: s.case.rotary_dim % 4 == 2,
    "as many tokens as heads": lambda s: s.case.shape[1] == s.given.shape[2],
    "as many tokens as sequences": lambda s: s.case.shape[0] == s.case.shape[1],
    "16 bits": lambda s: s.case.inputs[0].dtype.itemsize == 2,
    "bfloat16": lambda s: s.case.inputs[0].dtype == torch.bfloat16,
    "float16": lambda s: s.case.inputs[0].dtype == torch.float16,
    "inputs with gaps in memory": lambda s: _gaps(_given(s)),
    "an expanded input": lambda s: 0 in _given(s).stride(),
}
"""What a call can have, in words."""
EXTENTS: Extents = {
    "tokens": lambda s: s.case.shape[1],
    "features in a head": lambda s: s.given.shape[-1],
    "heads": lambda s: s.given.shape[2],
}


def in_common(
    wrong: list, right: list, circumstances: Circumstances, extents: Extents, others: Sequence = ()
) -> tuple[str, int]:
    """Return what all wrong calls have and as few right calls as possible, in words; empty if nothing tells them apart.

    One circumstance or its opposite is tried, an extent beyond a limit, then two circumstances together. A single wrong
    call has too much that others lack, so of it the law is told, or what no right call has.

    Returns:
        The words, and how many of ``others`` have the same.
    """
    if not right:
        return "", 0
    calls = [*wrong, *right, *others]
    has = {words: np.array([holds(seen) for seen in calls]) for words, holds in circumstances.items()}
    for words, count in extents.items():
        longest = max(count(seen) for seen in right)
        has[f"more than {longest} {words}"] = np.array([count(seen) > longest for seen in calls])
    signed = {f"with {words}": mask for words, mask in has.items()}
    signed |= {_without(words): ~mask for words, mask in has.items() if not words.startswith("more")}
    n, end = len(wrong), len(wrong) + len(right)
    signed = {words: mask for words, mask in signed.items() if mask[:n].all() and not mask[n:end].all()}
    pairs = ((f"{a} and {b}", signed[a] & signed[b]) for a, b in combinations(signed if n > 1 else (), 2))
    for words, mask in (*signed.items(), *pairs):
        if not mask[n:end].any():
            return words, int(mask[end:].sum())
    laws = dict.fromkeys(seen.law for seen in wrong)
    if len(laws) <= 2 and not {seen.law for seen in right} & laws.keys():
        return f"of the law{'s' * (len(laws) > 1)} {' and '.join(laws)}", sum(seen.law in laws for seen in others)
    words, mask = min(signed.items(), key=lambda one: int(one[1][n:end].sum()), default=("", np.ones(end, bool)))
    if n == 1 or mask[n:end].mean() > 0.5:
        return "", 0
    too = int(mask[n:end].sum())
    return f"{words}, which holds for {too} right call{'s' * (too > 1)}, too", int(mask[end:].sum())


def _without(words: str) -> str:
    """Return the opposite of a circumstance."""
    return f"with a single {words[8:-1]}" if words.startswith("several ") else f"without {words}"


def lines(calls: list, circumstances: Circumstances = CIRCUMSTANCES, extents: Extents = EXTENTS) -> list[str]:
    """Return a line for each input and direction: in how many calls it is wrong, and what these have in common.

    Inputs of which the same is said share a line.

    Args:
        calls: what was seen of calls, with ``what``, ``law`` and ``wrong`` as `Seen` has.
        circumstances, extents: what a call can have, in words.
    """
    said: dict[str, list[str]] = {}
    such: dict[str, int] = {}
    of = {what: [seen for seen in calls if seen.what == what] for what in dict.fromkeys(seen.what for seen in calls)}
    for what, own in of.items():
        wrong, right = ([seen for seen in own if seen.wrong.any() == bad] for bad in (True, False))
        if not wrong:
            line = f"right in all {len(own)} calls, {such[what]} of them such" if what in such else "right in all calls"
        elif not right:
            line = "wrong in all calls"
        else:
            gradient = f"gradient of {what}"
            common, count = in_common(wrong, right, circumstances, extents, of.get(gradient, ()))
            which = "the only one" if len(wrong) == 1 else "those"
            line = f"wrong in {len(wrong)} of {len(own)} calls" + (f": {which} {common}" if common else "")
            such |= {gradient: count} if common else {}
        said.setdefault(line, []).append(what)
    return [f"{', '.join(names)} {line}" for line, names in said.items()]


def equal_differ(calls: list[Seen]) -> bool:
    """Return whether two calls with the same arguments, and the same right result, have a right and a wrong one."""
    known: dict[tuple, bool] = {}
    for seen in calls:
        case, given = seen.case, _given(seen)
        positions = case.token_positions().numpy()
        numbers = [x.tobytes() for x in (seen.given.astype(float), seen.right.astype(float), positions)]  # no padding
        key = (seen.what, given.dtype, given.stride(), *numbers, case.lengths, case.offsets, case.positions is None,
               case.shard, case.axes, case.inverse, case.factor, case.interpolation, case.spare_rows)  # fmt: skip
        if known.setdefault(key, bool(seen.wrong.any())) != seen.wrong.any():
            return True
    return False
