"""Compare the angles by which a model turns queries and keys with the angles that its configuration states.

The angles are measured from the arguments and results of the functions that rotate, so that every model can be asked.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ropelab.angles.model_config import rope_from_config
from ropelab.angles.rope_parameters import Rope
from ropelab.conformance.bounds import EXACT, FLOAT32_UNIT, exact
from ropelab.conformance.case import NotApplicable
from ropelab.conformance.conventions import CONVENTIONS
from ropelab.conformance.models.trace import Traced, Turn, rotations
from ropelab.layout.pairing import pairs


def positions(axes: int, batch: int, tokens: int) -> torch.Tensor:
    """Positions that differ between sequences and between axes: int64 ``[B, S]``, or ``[axes, B, S]`` for several axes.

    Each sequence and each axis has a distance between tokens of its own.
    """
    sequence, axis = torch.arange(batch)[:, None], torch.arange(max(axes, 1))[:, None, None]
    found = (1 + sequence + axis) * torch.arange(tokens) + sequence
    return found if axes else found[0]


def ropes(config: Any) -> dict[str | None, Rope]:
    """The rotation of each type of layers that rotates; the key None if all layers are alike.

    Raises:
        NotApplicable: `rope_from_config` refuses the configuration.
    """
    types = list(dict.fromkeys(getattr(config, "layer_types", None) or [None]))
    found, refusals = {}, []
    for layer_type in types:
        try:
            found[layer_type] = rope_from_config(config, layer_type=layer_type)
        except (TypeError, ValueError) as refusal:
            refusals.append(str(refusal))
    if not found:
        raise NotApplicable(refusals[0])
    return found


def excess(call: Callable[[], Any], at: torch.Tensor, config: Any) -> tuple[float, float]:
    """The error of the cosine or sine that exceeds its bound most, or comes nearest to it, and its bound.

    Args:
        call: runs the model in float64.
        at: the positions of the tokens in that call, as `positions` returns them.
        config: the configuration of the model.

    Raises:
        NotApplicable: `rope_from_config` refuses the configuration, or no rotation has the axes of the tokens.
    """
    stated = ropes(config)
    layers = [kind for kind in getattr(config, "layer_types", None) or [None] if kind in stated]
    traced = rotations(call)
    each, rest = divmod(sum(one.calls for one in traced), len(layers))
    measured = []
    for function, turn in ((one, turn) for one in traced for turn in one.turns):
        # Calls belong to the layers in turn. If no number of calls fits all layers, a call may belong to any of them.
        kinds = list(stated) if rest else [layers[turn.call // each]]
        outcomes = (_compared(function, turn, stated[kind], at) for kind in kinds)
        if known := [outcome for outcome in outcomes if outcome is not None]:
            measured.append(min(known, key=_share))
    if not measured:
        raise NotApplicable("no function rotates tensors with the axes sequences, tokens and heads")
    return max(measured, key=_share)


def _share(measured: tuple[float, float]) -> float:
    error, bound = measured
    return error / bound


def _compared(traced: Traced, turn: Turn, rope: Rope, at: torch.Tensor) -> tuple[float, float] | None:
    """The largest excess for one tensor ``[B, ., ., D]``; None if it has other axes or features."""
    x, y, (batch, tokens) = turn.before, turn.after, at.shape[-2:]
    first, end = rope.rotary_slice if x.shape[-1] > rope.rotary_dim else (0, rope.rotary_dim)
    if x.ndim != 4 or x.shape[0] != batch or tokens not in x.shape[1:3] or end > x.shape[-1]:
        return None
    axis = x.shape.index(tokens, 1)
    (x0, x1), (y0, y1) = (
        pairs(exact(z.transpose(1, axis)[..., first:end]), layout)
        for z, layout in ((x, traced.layout), (y, traced.out_layout))
    )
    size = x0 * x0 + x1 * x1
    cosine, sine = (x0 * y0 + x1 * y1) / size, (x0 * y1 - x1 * y0) / size
    rope = rope.at_length(int(at.max()) + 1)
    frequencies = exact(rope.inverse_frequencies)
    read = at.numpy().astype(EXACT)
    read = np.stack([read] * len(frequencies), -1) if rope.axes is None else np.moveaxis(read[list(rope.axes)], 0, -1)
    angles = (read * frequencies)[:, :, None]
    factor = EXACT(rope.attention_factor)
    bound = np.broadcast_to(factor * _angle_error(angles, frequencies), cosine.shape)
    errors = []
    for sense in (1, -1):  # a model may turn by minus the angle
        apart = np.hypot(cosine - factor * np.cos(angles), sine - sense * factor * np.sin(angles))
        at_most = np.unravel_index(int((apart / bound).argmax()), apart.shape)
        errors.append((float(apart[at_most]), float(bound[at_most])))
    return min(errors, key=_share)


def _angle_error(angles: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """How far cosine and sine in float32 may be from the exact ones together, divided by the factor.

    Scaled frequencies have up to four more roundings than those of `ropelab.conformance.conventions.Plain`. Cosine and
    sine are each within an ulp of float32, and their product with the factor rounds once more, as does the factor.
    """
    known = CONVENTIONS["plain"].angle_error(angles, np.where(frequencies > 0, frequencies, 1))
    return known + 4 * FLOAT32_UNIT * abs(angles) + 2**0.5 * 4 * FLOAT32_UNIT
