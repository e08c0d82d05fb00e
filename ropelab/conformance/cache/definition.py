"""The parts of the definition of an operator that an identification exchanges for mistaken ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ropelab.conformance.bounds import rotate_exactly
from ropelab.conformance.cache_bounds import rms_norm
from ropelab.layout.pairing import pairs

Pair = tuple[np.ndarray, np.ndarray]


def yarn(frequencies: np.ndarray, place: np.ndarray, factor: float) -> np.ndarray:
    """Return YaRN's frequencies ``[R/2]``: kept below place 0 of the ramp, divided by the factor beyond place 1."""
    share = np.clip(place, 0, 1)
    return frequencies * (1 - share) + frequencies / factor * share


def _unchanged(cos: np.ndarray, sin: np.ndarray, attention_factor: float) -> Pair:
    return cos, sin


def _normed(z: np.ndarray, weight: np.ndarray, eps: float, turning: slice) -> np.ndarray:
    return rms_norm(z, weight, eps)


def _members(x: np.ndarray, turning: slice, layout: str) -> Pair:
    return pairs(x[..., turning], layout)


@dataclass(frozen=True)
class Definition:
    """The definition in parts.

    Attributes:
        scaling: YaRN's frequencies, from the unscaled ones, the places of the pairs on the ramp, and the factor.
        tables: cosines and sines, from the right ones ``[T, 1, R/2]`` and the attention factor that they have.
        norm: the normalized heads of ``z [T, H, D]``, from weights ``[D]`` or ``[H D]``, eps, the features that turn.
        members: views of the first and of the second members of all pairs, from ``x [..., D]``, the features that turn
            and the layout.
        stores: as members, where the rotated pairs are written; None for the places where they were read.
        turn: the rotated pair, from its members, cosine and sine.
    """

    scaling: Callable[[np.ndarray, np.ndarray, float], np.ndarray] = yarn
    tables: Callable[[np.ndarray, np.ndarray, float], Pair] = _unchanged
    norm: Callable[[np.ndarray, np.ndarray, float, slice], np.ndarray] = _normed
    members: Callable[[np.ndarray, slice, str], Pair] = _members
    stores: Callable[[np.ndarray, slice, str], Pair] | None = None
    turn: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], Pair] = rotate_exactly
