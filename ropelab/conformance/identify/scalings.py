"""Recognise published scalings of frequencies in measured frequencies."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ropelab.conformance.identify.angles import simple

NEAR = 1e-4
"""Measured and computed ratios agree if they differ by less; proofs use the derived bound instead."""


@dataclass(frozen=True)
class Scaling:
    """A change of all inverse frequencies.

    Attributes:
        words: the change, with its parameters.
        parameters: the recovered parameters.
        apply: ``frequency [pairs] -> frequency [pairs]`` in rad per token.
    """

    words: str
    parameters: dict[str, Any]
    apply: Callable[[np.ndarray], np.ndarray]


def scalings(frequency: np.ndarray, measured: np.ndarray, base: float) -> Iterator[Scaling]:
    """Yield the published scalings that give the measured inverse frequencies.

    Args:
        frequency: the inverse frequencies of the definition, ``[pairs]`` in rad per token.
        measured: the measured inverse frequencies, ``[pairs]``.
        base: the base of the frequencies.
    """
    ratio = measured / frequency
    if len(ratio) < 3 or not np.isfinite(ratio).all() or not (ratio > 0).all() or abs(ratio - 1).max() < NEAR:
        return
    for found in (_ntk(ratio, base), _llama(frequency, ratio), _yarn(ratio), _long(ratio)):
        if found is not None:
            yield found


def _ntk(ratio: np.ndarray, base: float) -> Scaling | None:
    """NTK-aware scaling by s has the base ``base * s ** (R / (R - 2))``; the last pair turns s times slower."""
    factor, pairs = simple(1 / float(ratio[-1])), len(ratio)
    power = np.arange(pairs) / (pairs - 1)
    if factor <= 1 or abs(ratio / factor**-power - 1).max() > NEAR:
        return None
    return Scaling(f"NTK-aware scaling by {factor:g} (the base {base * factor ** (pairs / (pairs - 1)):.6g})",
                   {"scaling": "ntk", "factor": factor},
                   lambda f: f * factor ** (-np.arange(len(f)) / (len(f) - 1)))  # fmt: skip


def _llama(frequency: np.ndarray, ratio: np.ndarray) -> Scaling | None:
    """The scaling of Llama 3: in between, the ratio grows linearly with the frequency.

    With ``L f / (2 pi) = r`` turns in the original length, the ratio is 1 for ``r > high``, ``1 / s`` for ``r < low``,
    and between these ``(1 - g) / s + g`` with ``g = (r - low) / (high - low)``. Only the two frequencies at which the
    scaling begins and ends can be measured: other lengths with other factors give the same frequencies.
    """
    factor = simple(1 / float(ratio[-1]))
    between = (ratio < 1 - NEAR) & (ratio > 1 / factor + NEAR)
    if factor <= 1 or not between.any():
        return None
    g = (ratio - 1 / factor) / (1 - 1 / factor)
    if between.sum() > 1:
        slope, start = np.polyfit(frequency[between], g[between], 1)
        low, high = -start / slope, (1 - start) / slope
    else:  # a single pair determines the length if high is 4 low, as in all published models
        low = float(frequency[between][0]) / (1 + 3 * float(g[between][0]))
        high = 4 * low
    if not 0 < low < high:
        return None

    def apply(f: np.ndarray) -> np.ndarray:
        blend = ((f - low) / (high - low)).clip(0, 1)
        return f * ((1 - blend) / factor + blend)

    if abs(apply(frequency) / frequency - ratio).max() > NEAR:
        return None
    length = simple(2 * math.pi / low)
    shortest = simple(2 * math.pi / high)
    words = f"Llama 3 scaling by {factor:g}, between {shortest:.5g} and {length:.5g} tokens per turn"
    return Scaling(words, {"scaling": "llama3", "factor": factor, "original_length": length,
                           "high_over_low": simple(high / low)}, apply)  # fmt: skip


def _yarn(ratio: np.ndarray) -> Scaling | None:
    """YaRN: the ratio is ``g / s + 1 - g`` with a ramp g that grows linearly with the pair, from ``low`` to ``high``.

    The two ends of the ramp follow from betas and original length, and different betas and lengths give the same ends.
    """
    factor = simple(1 / float(ratio[-1]))
    if factor <= 1:
        return None
    g = (1 - ratio) / (1 - 1 / factor)
    between = np.flatnonzero((g > NEAR) & (g < 1 - NEAR))
    if len(between) < 2:
        return None
    slope, start = np.polyfit(between, g[between], 1)
    if slope <= 0:
        return None
    low, high = simple(-start / slope), simple((1 - start) / slope)

    def apply(f: np.ndarray) -> np.ndarray:
        ramp = ((np.arange(len(f)) - low) / (high - low)).clip(0, 1)
        return f * (ramp / factor + 1 - ramp)

    if abs(apply(np.ones(len(ratio))) - ratio).max() > NEAR:
        return None
    return Scaling(f"YaRN by {factor:g}, with a ramp from pair {low:g} to pair {high:g}",
                   {"scaling": "yarn", "factor": factor, "low": low, "high": high}, apply)  # fmt: skip


def _long(ratio: np.ndarray) -> Scaling | None:
    """LongRoPE divides each frequency by a number of its own, at least 1; any such frequencies are LongRoPE."""
    factors = [simple(1 / float(r)) for r in ratio]
    if min(factors) < 1 - NEAR:
        return None
    listed = ", ".join(f"{factor:.5g}" for factor in factors)

    def apply(f: np.ndarray) -> np.ndarray:
        return f / np.array(factors) if len(f) == len(factors) else f

    return Scaling(f"a divisor for each pair, as in LongRoPE: [{listed}]", {"scaling": "longrope", "factors": factors},
                   apply)  # fmt: skip
