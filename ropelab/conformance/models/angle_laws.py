"""Compare the angles by which a model turns queries and keys with the angles that its configuration states.

The angles are measured from the arguments and results of the functions that rotate, so that every model can be asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ropelab.angles.model_config import rope_from_config
from ropelab.angles.model_config import stated as stated_in
from ropelab.angles.rope_parameters import Rope
from ropelab.conformance.angles import CLOSE, rows, waves
from ropelab.conformance.bounds import EXACT, FLOAT32_UNIT, exact
from ropelab.conformance.case import NotApplicable
from ropelab.conformance.configuration.measured import Measured
from ropelab.conformance.configuration.readings import Reading, Stated
from ropelab.conformance.configuration.verify_config import Measure
from ropelab.conformance.conventions import CONVENTIONS
from ropelab.conformance.models.layers import layers_of, recorded
from ropelab.conformance.models.trace import Traced, Turn, rotations
from ropelab.conformance.words import listed
from ropelab.layout.pairing import pairs

NEAR_ROWS = 300
"""Positions of a decoded token are looked for up to this number."""


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


@dataclass(frozen=True)
class Excess:
    """The cosine or sine of a model that exceeds its bound most, or comes nearest to it.

    Attributes:
        error, bound: the error and its bound.
        where: layer, tensor, token and head, and the key of the configuration that is read wrongly, if one is found.
    """

    error: float
    bound: float
    where: str = ""

    @property
    def share(self) -> float:
        """The error divided by its bound."""
        return self.error / self.bound


def excess(call: Callable[[], Any], at: torch.Tensor, config: Any, model: torch.nn.Module) -> Excess:
    """The excess over all layers of a model; of layers beyond their bounds, the first.

    Args:
        call: runs the model in float64.
        at: the positions of the tokens in that call, as `positions` returns them.
        config: the configuration of the model.
        model: the model, whose layers are watched.

    Raises:
        NotApplicable: `rope_from_config` refuses the configuration, or no rotation has the axes of the tokens.
    """
    stated = ropes(config)
    types = getattr(config, "layer_types", None) or [None]
    layers = [kind for kind in types if kind in stated]
    with recorded(model) as recorder:
        traced = rotations(call, lambda: recorder.layer)
    each, rest = divmod(sum(one.calls for one in traced), len(layers))
    measured = []
    for function, turn in ((one, part) for one in traced for whole in one.turns for part in whole.parts()):
        if turn.layer is not None and len(types) > turn.layer and types[turn.layer] in stated:
            kinds = [types[turn.layer]]
        else:  # calls belong to the layers in turn; if no number of calls fits all layers, a call may belong to any
            kinds = list(stated) if rest or turn.layer is not None else [layers[turn.call // each]]
        outcomes = (_compared(function, turn, stated[kind], at, config, kind) for kind in kinds)
        if known := [outcome for outcome in outcomes if outcome is not None]:
            measured.append(min(known, key=lambda outcome: outcome.share))
    if not measured:
        raise NotApplicable("no function rotates tensors with the axes sequences, tokens and heads")
    beyond = next((outcome for outcome in measured if outcome.share > 1), None)
    turning = {turn.layer for one in traced for turn in one.turns}
    still = [] if None in turning else [n for n in range(len(layers_of(model))) if n not in turning]
    told = (
        f"layer{'s' * (len(still) > 1)} {listed(np.array(still))} turn{'s' * (len(still) == 1)} nothing"
        if still
        else ""
    )
    return beyond or replace(max(measured, key=lambda outcome: outcome.share), where=told)


def decoded(call: Callable[[], Any], place: int, config: Any, model: torch.nn.Module) -> str:
    """Return what the first wrong rotation of a decoding step does, in words; empty if all turn the new token rightly.

    Args:
        call: runs the step.
        place: the position of the new token.
        config: the configuration of the model.
        model: the model, whose layers are watched.
    """
    rope = next(iter(ropes(config).values()))
    with recorded(model) as recorder:
        traced = rotations(call, lambda: recorder.layer)
    for turn in (turn for one in traced for turn in one.turns):
        who = f"layer {turn.layer}, {turn.name or 'a tensor'}" if turn.layer is not None else turn.name or "a tensor"
        sizes = turn.before.shape[1:3] if turn.before.ndim == 4 else ()
        if many := [size for size in sizes if size in (place, place + 1)]:
            return f"{who}: a step turns {many[0]} tokens, not only the new one: tokens of the cache turn again"
        if 1 not in sizes or turn.before.shape[-1] != rope.rotary_dim:
            continue
        (x0, x1), (y0, y1) = (
            pairs(exact(z), layout) for z, layout in ((turn.before, turn.layout), (turn.after, turn.out_layout))
        )
        size = (x0 * x0 + x1 * x1) * rope.attention_factor
        values = np.concatenate(((x0 * y0 + x1 * y1) / size, (x0 * y1 - x1 * y0) / size), axis=-1)
        table = waves(tuple(rope.inverse_frequencies.tolist()), NEAR_ROWS)
        values = values.reshape(-1, values.shape[-1]).astype(np.float64)
        found = rows(values, table, -NEAR_ROWS, np.full(len(values), place), CLOSE)
        if found is not None and (wrong := set(found.tolist()) - {place, -place}):
            return f"{who}: the new token turns by position {min(wrong)} in place of {place}"
    return ""


def rotated_heads(call: Callable[[], Any], tokens: int, model: torch.nn.Module) -> str:
    """Return which layer rotates another number of heads than most layers, in words; empty if none does.

    Args:
        call: runs the model on sequences of ``tokens`` tokens.
        tokens: their number.
        model: the model, whose layers are watched.
    """
    with recorded(model) as recorder:
        traced = rotations(call, lambda: recorder.layer)
    found: dict[str, dict[int, int]] = {}
    for turn in (turn for one in traced for turn in one.turns):
        if turn.layer is not None and turn.before.ndim == 4 and tokens in turn.before.shape[1:3]:
            axis = turn.before.shape.index(tokens, 1)
            found.setdefault(turn.name, {})[turn.layer] = turn.before.shape[3 - axis]
    for name, heads in found.items():
        usual = Counter(heads.values()).most_common(1)[0][0]
        if odd := [layer for layer, count in heads.items() if count != usual]:
            told = f"layer {odd[0]}: {heads[odd[0]]} head{'s' * (heads[odd[0]] > 1)} of {name}"
            return f"{told} rotated, in place of {usual} in other layers"
    return ""


def _compared(traced: Traced, turn: Turn, rope: Rope, at: torch.Tensor, config: Any, kind: str | None) -> Excess | None:
    """The largest excess for one tensor ``[B, ., ., D]``; None if it has other axes or features."""
    x, y, (batch, tokens) = turn.before, turn.after, at.shape[-2:]
    first, end = rope.rotary_slice if x.shape[-1] > rope.rotary_dim else (0, rope.rotary_dim)
    if x.ndim != 4 or x.shape[0] != batch or tokens not in x.shape[1:3] or end > x.shape[-1]:
        return None
    axis = x.shape.index(tokens, 1)
    (x0, x1), (y0, y1) = (
        pairs(exact(z.transpose(1, axis)[..., first:end]), layout)
        for z, layout in ((x, turn.layout), (y, turn.out_layout))
    )
    size = x0 * x0 + x1 * x1
    with np.errstate(invalid="ignore"):  # a pair of zeros, as a model makes of a padding token, shows no angle
        cosine, sine = (x0 * y0 + x1 * y1) / size, (x0 * y1 - x1 * y0) / size
    rope = rope.at_length(int(at.max()) + 1)
    frequencies = exact(rope.inverse_frequencies)
    read = at.numpy().astype(EXACT)
    read = np.stack([read] * len(frequencies), -1) if rope.axes is None else np.moveaxis(read[list(rope.axes)], 0, -1)
    angles = (read * frequencies)[:, :, None]
    factor = EXACT(rope.attention_factor)
    bound = np.broadcast_to(factor * _angle_error(angles, frequencies), cosine.shape)
    found = []
    for sense in (1, -1):  # a model may turn by minus the angle
        apart = np.hypot(cosine - factor * np.cos(angles), sine - sense * factor * np.sin(angles))
        apart = np.where(size > 0, apart, 0)
        place = np.unravel_index(int((apart / bound).argmax()), apart.shape)
        found.append((Excess(float(apart[place]), float(bound[place])), sense, np.asarray((apart > bound).any(-1))))
    best, sense, wrong = min(found, key=lambda one: one[0].share)
    if best.share <= 1:
        return best
    sequence, _, head = map(int, np.argwhere(wrong)[0])
    site = (sequence, slice(None), head)
    keys = _shown(cosine, sense * sine, wrong, at, rope) or _rounded(cosine, sense * sine, wrong, at, rope)
    if not keys and rope.axes is None:
        keys = _keys(cosine[site], sense * sine[site], at[sequence], config, kind, rope)
    hit_tokens, hit_heads = (sorted(set(np.argwhere(wrong)[:, axis].tolist())) for axis in (1, 2))
    told = [f"layer {turn.layer}"] if turn.layer is not None else []
    told.append(f"{turn.name or 'a tensor'}, tokens {_listed(hit_tokens, tokens)}")
    told += [f"heads {_listed(hit_heads, wrong.shape[2])}"] if len(hit_heads) < wrong.shape[2] else []
    return replace(best, where=", ".join(told) + (f": {keys}" if keys else ""))


def _shown(cosine: np.ndarray, sine: np.ndarray, wrong: np.ndarray, at: torch.Tensor, rope: Rope) -> str:
    """Return what the cosines and sines ``[B, S, H, pairs]`` of the wrong heads show: a factor, axes or positions."""
    size = np.hypot(cosine, sine)[wrong].astype(np.float64)
    factor, right = float(np.median(size)), float(rope.attention_factor)
    if not np.isfinite(size).all() or abs(size - factor).max() > CLOSE:
        return ""
    cos, sin = (x.astype(np.float64) / factor for x in (cosine, sine))
    frequencies = rope.inverse_frequencies.double().numpy()
    of = at.numpy().reshape(-1, *at.shape[-2:])  # [axes, B, S]
    angles = of[..., None] * frequencies
    apart = np.hypot(cos[None] - np.cos(angles)[:, :, :, None], sin[None] - np.sin(angles)[:, :, :, None])
    meant = list(rope.axes or (0,) * len(frequencies))
    read = [next((axis for axis in (right_axis, *range(len(of))) if (apart[axis][wrong][:, i] < CLOSE).all()), -1)
            for i, right_axis in enumerate(meant)]  # fmt: skip
    turned = np.stack([angles[axis][..., i] for i, axis in enumerate(rope.axes or (0,) * len(frequencies))], -1)
    if (np.hypot(cos - np.sin(turned)[:, :, None], sin - np.cos(turned)[:, :, None])[wrong] < CLOSE).all():
        return "cosines and sines are exchanged"
    if read == meant:
        return f"cosines and sines have the factor {factor:.6g} in place of {right:.6g}"
    if abs(factor / right - 1) > CLOSE:
        return ""
    if rope.axes is not None:
        hits = [i for i, axis in enumerate(read) if axis != meant[i]]  # a slow pair may fit several axes
        ours, theirs = ([axes[i] for i in hits] for axes in (read, meant))
        told = f"pairs {listed(np.array(hits))} turn by the positions of axes {listed(np.array(ours))}"
        return f"{told} in place of {listed(np.array(theirs))}" if -1 not in read else ""
    values = np.concatenate((cos, sin), axis=-1)[wrong]
    table = waves(tuple(frequencies.tolist()), 2 * int(at.max()) + 2)
    found = rows(values, table, -len(table) // 2, np.zeros(len(values)), CLOSE)
    if found is None:
        return ""
    if not found.any():
        return "not rotated"
    numbered = np.broadcast_to(at.numpy()[..., None], wrong.shape).copy()
    if rule := _rule(numbered[wrong], found, np.nonzero(wrong)[2]):
        return rule
    sequence, _, head = map(int, np.argwhere(wrong)[0])
    turned, hit = at[sequence].numpy().copy(), wrong[sequence, :, head]
    numbered[wrong] = found
    turned[hit] = numbered[sequence, hit, head]
    others = (f", which are those of sequence {n}" for n, p in enumerate(of[0]) if (p == turned).all())
    return (f"sequence {sequence} turns by positions {listed(turned)} in place of {listed(at[sequence].numpy())}"
            f"{next(others, '')}")  # fmt: skip


def _rounded(cosine: np.ndarray, sine: np.ndarray, wrong: np.ndarray, at: torch.Tensor, rope: Rope) -> str:
    """Return what of the wrong heads' cosines and sines ``[B, S, H, pairs]`` is in 16 bits; empty if nothing is."""
    if at.ndim != 2:
        return ""
    exactly, position = rope.inverse_frequencies.float(), at[..., None].float()
    for dtype in (torch.float16, torch.bfloat16):

        def low(x: torch.Tensor, dtype=dtype) -> torch.Tensor:
            return x.to(dtype).float()

        angles = {
            "angles are rounded to": low(position * exactly),
            "angles are products, in {}, of positions and frequencies in": low(low(position) * low(exactly)),
            "frequencies are rounded to": position * low(exactly),
            "positions are rounded to": low(position) * exactly,
            "cosines and sines are rounded to": position * exactly,
        }
        for words, angle in angles.items():
            cos, sin = angle.double().cos(), angle.double().sin()
            tables = (low(cos), low(sin)) if words.startswith("cosines") else (cos, sin)
            near = 4 * FLOAT32_UNIT * (1 + abs(angle.double().numpy()))[:, :, None]
            pairs_of = zip((cosine, sine), tables, strict=True)
            apart = (abs(x / rope.attention_factor - t.numpy()[:, :, None]) for x, t in pairs_of)
            if all((a <= near)[wrong].all() for a in apart):
                name = str(dtype).removeprefix("torch.")
                return f"{words.format(name)} {name}"
    return ""


def _rule(meant: np.ndarray, found: np.ndarray, head: np.ndarray) -> str:
    """Return by which rule positions ``meant [N]`` became ``found [N]`` in heads ``head [N]``; empty if by none."""
    last, apart = int(found.max()), found - meant
    if len(set(meant.tolist())) > 1 and (found == last).all() and (meant > last).all():
        return f"positions beyond {last} turn by position {last}"
    if len(set(head.tolist())) > 1 and (apart == head).all():
        return "head h turns by the position plus h"
    if (apart == apart[0]).all():
        return f"turns by the position {apart[0]:+d}"
    times = found[meant != 0] / meant[meant != 0]
    if len(times) and (found == times[0] * meant).all():
        return f"turns by {times[0]:g} times the position"
    for dtype in (torch.bfloat16, torch.float16):
        if (found == torch.from_numpy(meant).to(dtype).long().numpy()).all():
            return f"positions are rounded to {str(dtype).removeprefix('torch.')}"
    wrap = int(np.gcd.reduce(apart))
    moduli = [m for m in range(last + 1, wrap + 1) if wrap % m == 0 and (found == meant % m).all()]
    return f"turns by positions modulo {moduli[0]}" if moduli and (found >= 0).all() else ""


def _listed(hits: list[int], size: int) -> str:
    """Numbers in words: all of them, a range or a list."""
    if len(hits) > 3 and hits == list(range(hits[0], hits[-1] + 1)):
        return f"{hits[0]} to {hits[-1]}"
    return ", ".join(map(str, hits[:4])) + (", ..." if len(hits) > 4 else "")


def _keys(cosine: np.ndarray, sine: np.ndarray, at: torch.Tensor, config: Any, kind: str | None, rope: Rope) -> str:
    """The keys whose wrong reading explains cosines and sines ``[S, pairs]`` at positions ``[S]``; else empty."""
    cos, sin = cosine.astype(np.float64), sine.astype(np.float64)
    size = np.hypot(cos, sin)
    if abs(size - np.median(size)).max() > CLOSE:  # these pairs do not turn, so that no key explains them
        return ""
    types = [name for name in dict.fromkeys(getattr(config, "layer_types", None) or ()) if name != kind]
    try:
        settings, parameters = stated_in(config, kind)
        others = {name: stated_in(config, name)[1] for name in types} if kind is not None else {}
        stated = Stated(settings, parameters, kind, rope.layout, None, others)
        measure = Measure(at.numpy(), cos, sin, Measured(lambda _: (cos, sin), "a layer", cos.shape[1]), stated)
        findings = measure.explained(Reading.of(rope), "")
    except (TypeError, ValueError):
        return ""
    return "; ".join(str(finding) for finding in findings if finding.key)


def _angle_error(angles: np.ndarray, frequencies: np.ndarray) -> np.ndarray:
    """How far cosine and sine in float32 may be from the exact ones together, divided by the factor.

    Scaled frequencies have up to four more roundings than those of `ropelab.conformance.conventions.Plain`. Cosine and
    sine are each within an ulp of float32, and their product with the factor rounds once more, as does the factor.
    """
    known = CONVENTIONS["plain"].angle_error(angles, np.where(frequencies > 0, frequencies, 1))
    return known + 4 * FLOAT32_UNIT * abs(angles) + 2**0.5 * 4 * FLOAT32_UNIT
