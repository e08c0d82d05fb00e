"""Check a model against the laws of the attention around a rotation.

The model runs in float64. All differences are the largest differences between elements of its first result, and the
results are divided by the largest element. Two runs of a right model differ by rounding alone. `Noise` bounds the
rounding from two measurements of the same model, so that no tolerance is chosen for a model.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ropelab.conformance.case import NotApplicable
from ropelab.conformance.models.angle_laws import decoded, excess, positions, ropes, rotated_heads
from ropelab.conformance.models.deliberate import DELIBERATE
from ropelab.conformance.models.factory import TinyModel, first_tensor
from ropelab.conformance.models.layers import first_difference, recorded

SHIFT = 11
"""The number of positions by which the law of distances moves a sequence."""
FLOAT32_UNIT = 2.0**-24


class NotOffered(Exception):
    """An error that says why a law does not apply to a model."""


@dataclass(frozen=True)
class ModelResult:
    """The outcome of one law.

    Attributes:
        law, statement: the name of the law, and what it says.
        status: ``"pass"``, ``"fail"`` or ``"not applicable"``.
        difference, allowed: the largest difference, and how large rounding may make it; None if not applicable.
        message: why the law does not apply; or where a law that fails begins to fail, and the key of the configuration.
    """

    law: str
    statement: str
    status: str
    difference: float | None = None
    allowed: float | None = None
    message: str = ""


@dataclass(frozen=True)
class Noise:
    """How far rounding may take two runs of a model apart.

    Attributes:
        arithmetic: the largest difference between the results in float32 and in float64. A model in float64 rounds
            fewer products to float32 (norms, softmax, tables), each as the model in float32 does.
        per_radian: the largest difference that moving one token by one position makes. The largest angle changes by
            one radian.
        positions: the largest position of any law. Tables in float32 have angles within 2 units of 2^-24 of the angle.
    """

    arithmetic: float
    per_radian: float
    positions: int

    @property
    def allowed(self) -> float:
        """The bound for two runs that are each off by at most this noise, times 2 for the measured samples."""
        angles = self.per_radian * 2 * FLOAT32_UNIT * self.positions
        return 2 * 2 * (self.arithmetic + angles)


def hold_attention(tiny: TinyModel) -> list[ModelResult]:
    """Check a model that takes tokens against all laws of this file; the model is in float64 afterwards."""
    with torch.no_grad():
        tiny = tiny.double()
        try:
            noise = _noise(tiny)
        except NotOffered as reason:
            return [
                ModelResult(name, law.__doc__ or "", "not applicable", message=str(reason))
                for name, law in LAWS.items()
            ]
        return [_held(name, law, tiny, noise) for name, law in LAWS.items()]


def _held(name: str, law: Callable[[TinyModel, Noise], tuple], tiny: TinyModel, noise: Noise) -> ModelResult:
    statement = law.__doc__ or ""
    if design := DELIBERATE.get((tiny.architecture, name)):
        return ModelResult(name, statement, "not applicable", message=f"by design: {design}")
    try:
        with recorded(tiny.model) as recorder:
            found = law(tiny, noise)
        holds, difference, allowed = found[:3]
        where = found[3] if len(found) > 3 else ""
        if not holds:
            where = where or first_difference(recorder.runs, noise.allowed)
            where = "; ".join(filter(None, (where, _shown(name, tiny))))
    except NotOffered as reason:
        return ModelResult(name, statement, "not applicable", message=str(reason))
    except Exception as error:  # the model does not take this call
        words = (str(error).strip().splitlines() or [""])[0][:120]
        return ModelResult(name, statement, "not applicable", message=f"{type(error).__name__}: {words}")
    return ModelResult(name, statement, "pass" if holds else "fail", difference, allowed, where)


def _positions(tiny: TinyModel) -> torch.Tensor:
    """0, 1, 2, ... for each sequence."""
    batch, tokens = tiny.inputs["input_ids"].shape
    return torch.arange(tokens)[None].expand(batch, -1)


def gap(positions: torch.Tensor) -> torch.Tensor:
    """The positions with one position left out in the middle."""
    return positions + (torch.arange(positions.shape[1]) >= positions.shape[1] // 2)


def _noise(tiny: TinyModel) -> Noise:
    if not tiny.takes_tokens:
        raise NotOffered("the model takes no tokens")
    if not _takes(tiny, "position_ids"):
        raise NotOffered("its forward takes no position_ids")
    positions = _positions(tiny)
    wide = _run(tiny)
    narrow = _run(tiny.single())
    tiny.double()
    try:
        moved = _run(tiny, position_ids=gap(positions))
        same = _run(tiny, position_ids=positions)
    except Exception as error:
        words = (str(error).strip().splitlines() or [""])[0][:100]
        raise NotOffered(f"it does not take position_ids [batch, tokens]: {type(error).__name__}: {words}") from error
    return Noise(apart(wide, narrow), apart(same, moved), positions.shape[1] + SHIFT)


def positions_are_used(tiny: TinyModel, noise: Noise) -> tuple[bool, float, float]:
    """Positions handed in are used: 0, 1, 2, ... changes nothing, and a gap changes the result."""
    default = apart(_run(tiny), _run(tiny, position_ids=_positions(tiny)))
    return default <= noise.allowed < noise.per_radian, default, noise.allowed


def distances_only(tiny: TinyModel, noise: Noise) -> tuple[bool, float, float]:
    """Scores depend on distances: the same shift of all positions changes nothing."""
    _visible(noise)
    positions = _positions(tiny)
    found = apart(_run(tiny, position_ids=positions), _run(tiny, position_ids=positions + SHIFT))
    return found <= noise.allowed, found, noise.allowed


def cached_is_prefill(tiny: TinyModel, noise: Noise) -> tuple[bool, float, float, str]:
    """Decoding with a cache, and a prefill in chunks, equal the prefill of all tokens at once."""
    _causal(tiny)
    _visible(noise)
    whole = tiny.output(use_cache=False)

    def difference(**way: Any) -> float:
        return apart(whole / _scale(whole), _in_parts(tiny, **way) / _scale(whole))

    count = tiny.inputs["input_ids"].shape[1]
    steps = (count - 3, 1, 1, 1)
    worst, said = difference(lengths=steps), ""
    for words, way in _ways(tiny, steps) if worst <= noise.allowed else ():
        with suppress(Exception):  # a model may refuse a way, but not give other results
            if (found := difference(**way)) > worst:
                worst, said = found, words
        if worst > noise.allowed:
            with recorded(tiny.model) as recorder:
                difference(**way), tiny.output(use_cache=False)
            *parts, at_once = recorder.runs
            said = "; ".join(filter(None, (said, first_difference([at_once, *parts], noise.allowed))))
            break
    return worst <= noise.allowed, worst, noise.allowed, said if worst > noise.allowed else ""


def _ways(tiny: TinyModel, steps: tuple[int, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Ways to hand tokens to a model that has a cache, in words and as arguments of `_in_parts`."""
    with suppress(NotOffered):
        _stateless(tiny)
        chunks = (1, 2, sum(steps) - 3)
        for lengths in (chunks, steps):
            for given in ("", "the chunk", "all tokens"):
                words = f"in parts of {', '.join(map(str, lengths))} tokens"
                words += f", with position_ids of {given}" if given else ""
                if given or lengths is chunks:
                    yield words, {"lengths": lengths, "given": given}
        yield "in steps, after a step that was taken back", {"lengths": steps, "taken_back": True}


def _in_parts(tiny: TinyModel, lengths: tuple[int, ...], given: str = "", taken_back: bool = False) -> torch.Tensor:
    """The result for tokens that come in parts, with a cache.

    Args:
        tiny: the model.
        lengths: the number of tokens of each part.
        given: whose ``position_ids`` each call gets: ``"the chunk"``, ``"all tokens"``, or ``""`` for none.
        taken_back: whether another token comes after the first part, and the cache is cropped then.

    Raises:
        NotOffered: the model has no such cache, or takes the positions of all tokens for more tokens.
    """
    tokens, positions, axes = tiny.inputs["input_ids"], _positions(tiny), _axes(tiny.model.config)
    positions = positions.expand(axes, -1, -1) if axes else positions
    cache: Any = None
    parts: list[torch.Tensor] = []
    first = 0

    def step(ids: torch.Tensor, end: int) -> Any:
        call = {"input_ids": ids, "use_cache": True}
        call |= {"past_key_values": cache} if first else {}
        call |= {"position_ids": positions[..., first if given == "the chunk" else 0 : end]} if given else {}
        returned = tiny.model(**(tiny.inputs | call))
        if getattr(returned, "past_key_values", None) is None:
            raise NotOffered("it returns no cache")
        return returned

    for length in lengths:
        end = first + length
        if taken_back and first == lengths[0]:
            step(tokens[:, -1:], end)
            cache.crop(-length)
            if cache.get_seq_length() != first:
                raise NotOffered("its cache takes no token back")
        returned = step(tokens[:, first:end], end)
        cache, first = returned.past_key_values, end
        parts.append(first_tensor(returned))
        if parts[-1].shape[:2] != (len(tokens), length):
            raise NotOffered("its results have other tokens")
    return torch.cat(parts, dim=1)


def packed_is_separate(tiny: TinyModel, noise: Noise) -> tuple[bool, float, float]:
    """Two sequences in one row, with positions that begin again, give what each gives alone."""
    _causal(tiny)
    _visible(noise)
    _packs(tiny)
    tokens = tiny.inputs["input_ids"][:1]
    first = tokens.shape[1] - 4
    lengths = (first, 4)
    packed_positions = torch.cat([torch.arange(n) for n in lengths])[None]
    if axes := _axes(tiny.model.config):  # such models take a row of positions for the mask, and a row for each axis
        packed_positions = packed_positions.expand(1 + axes, 1, -1)
    packed = tiny.output(input_ids=tokens, position_ids=packed_positions, use_cache=False)
    parts = [tiny.output(input_ids=part, use_cache=False) for part in tokens.split(lengths, dim=1)]
    found = apart(packed / _scale(packed), torch.cat(parts, dim=1) / _scale(packed))
    return found <= noise.allowed, found, noise.allowed


def rows_have_positions(tiny: TinyModel, noise: Noise) -> tuple[bool, float, float]:
    """Each sequence of a batch has its own positions: it gives what it gives alone."""
    _visible(noise)
    tokens, places = tiny.inputs["input_ids"], positions(0, *tiny.inputs["input_ids"].shape)
    together = outputs(tiny, input_ids=tokens, position_ids=places)
    alone = [outputs(tiny, input_ids=t[None], position_ids=p[None]) for t, p in zip(tokens, places, strict=True)]
    return _alike(noise, together, torch.cat(alone))


def left_padding(tiny: TinyModel, noise: Noise) -> tuple[bool, float, float]:
    """Tokens on the left that the mask hides change nothing, with the positions of the model or with given ones."""
    _visible(noise)
    _masks(tiny)
    tokens, hidden = tiny.inputs["input_ids"], 3
    mask = torch.ones_like(tokens)
    mask[0, :hidden] = 0
    ways: list[dict[str, Any]] = [{"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}]
    if (tiny.architecture, "distances_only") not in DELIBERATE:
        ways.append({})
    tiny.single()  # a mask of float64's least number is minus infinity in a softmax in float32
    try:
        short, whole = outputs(tiny, input_ids=tokens[:1, hidden:]), outputs(tiny, input_ids=tokens[1:])
        padded = [outputs(tiny, input_ids=tokens * mask, attention_mask=mask, **way) for way in ways]
    finally:
        tiny.double()
    found = [part.flatten(0, 1) for y in padded for part in (y[:1, hidden:], y[1:])]
    return _alike(noise, torch.cat(found), torch.cat([part[0] for part in (short, *whole.split(1))] * len(ways)))


def angles_of_the_configuration(tiny: TinyModel, noise: Noise) -> tuple[bool, float, float, str]:
    """Every layer turns by the frequencies, the factor and the axes of positions that its configuration states."""
    config = _text_config(tiny)
    batch, tokens = tiny.inputs["input_ids"].shape
    try:
        axes = max((1 + max(rope.axes) for rope in ropes(config).values() if rope.axes), default=0)
        at = positions(axes, batch, tokens)
        worst = excess(lambda: _run(tiny, position_ids=at), at, config, tiny.model)
        last = getattr(config, "max_position_embeddings", None)
        if worst.share <= 1 and isinstance(last, int) and last > int(at.max()) + 1:
            far = last - 1 - int(at.max()) + at  # up to the last position that the configuration has
            with suppress(Exception):  # a model may refuse positions, but not turn by others
                found = excess(lambda: _run(tiny, position_ids=far), far, config, tiny.model)
                worst = max(worst, found, key=lambda one: one.share)
    except NotApplicable as reason:
        raise NotOffered(str(reason)) from reason
    return worst.error <= worst.bound, worst.error, worst.bound, worst.where


LAWS: dict[str, Callable[[TinyModel, Noise], tuple]] = {
    law.__name__: law
    for law in (
        positions_are_used, distances_only, cached_is_prefill, packed_is_separate, rows_have_positions, left_padding,
        angles_of_the_configuration,
    )
}  # fmt: skip
"""Name -> law. A law returns whether it holds, the difference that it found, and the difference that is allowed.

The law about angles also returns in words where it does not hold, or which layers do not rotate."""


def _text_config(tiny: TinyModel) -> Any:
    config: Any = tiny.model.config
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _shown(name: str, tiny: TinyModel) -> str:
    """Return what the rotations of a call show after a law failed, in words; empty if they show nothing."""
    tokens, prompt = tiny.inputs["input_ids"], tiny.inputs["input_ids"].shape[1] - 3
    try:
        if name == "cached_is_prefill":
            returned = tiny.model(**(tiny.inputs | {"input_ids": tokens[:, :prompt], "use_cache": True}))
            step = {"input_ids": tokens[:, prompt : prompt + 1], "past_key_values": returned.past_key_values}
            call = partial(tiny.model, **(tiny.inputs | step | {"use_cache": True}))
            return decoded(call, prompt, _text_config(tiny), tiny.model)
        return rotated_heads(lambda: _run(tiny), tokens.shape[1], tiny.model) if name == "distances_only" else ""
    except NotApplicable:  # the configuration states no rotation
        return ""


def _visible(noise: Noise) -> None:
    """Raise `NotOffered` if a wrong position would be smaller than rounding."""
    if noise.per_radian <= noise.allowed:
        raise NotOffered("a moved token changes the result by no more than rounding")


def _causal(tiny: TinyModel) -> None:
    if not _takes(tiny, "past_key_values") or not hasattr(tiny.model.config, "use_cache"):
        raise NotOffered("it has no cache")


def _packs(tiny: TinyModel) -> None:
    """Raise `NotOffered` unless masks come from ``create_causal_mask``, and no layer has a state of its own."""
    module = inspect.getmodule(type(tiny.model))
    if not hasattr(module, "create_causal_mask"):
        raise NotOffered("its masks do not follow from position_ids")
    _stateless(tiny)


def _masks(tiny: TinyModel) -> None:
    if not _takes(tiny, "attention_mask"):
        raise NotOffered("it takes no attention_mask")
    _stateless(tiny)


def _stateless(tiny: TinyModel) -> None:
    """Raise `NotOffered` if a layer has a state of its own."""
    kinds = {str(kind) for kind in getattr(tiny.model.config, "layer_types", None) or ()}
    stateful = getattr(tiny.model, "_is_stateful", False) or any(
        "linear" in kind or not kind.endswith("attention") for kind in kinds
    )
    if stateful:
        raise NotOffered("layers with a state (convolution, linear attention) go across sequences")


def _axes(config: Any) -> int:
    """The number of axes on which a token has a position; 0 for models with one position."""
    parameters = getattr(config, "rope_parameters", None) or {}
    sections = parameters.get("mrope_section") or parameters.get("xdrope_section") or ()
    return len(sections)


def _takes(tiny: TinyModel, name: str) -> bool:
    return name in inspect.signature(tiny.model.forward).parameters


def _run(tiny: TinyModel, **changed: Any) -> torch.Tensor:
    """The result in float64, divided by its largest element."""
    y = outputs(tiny, **changed)
    return y / _scale(y)


def outputs(tiny: TinyModel, **changed: Any) -> torch.Tensor:
    """The result in float64, without a cache. Given a mask, models see no new sequence at a gap."""
    if _takes(tiny, "attention_mask"):
        tokens = changed.get("input_ids", tiny.inputs["input_ids"])
        changed = {"attention_mask": torch.ones_like(tokens)} | changed
    if _takes(tiny, "use_cache"):
        changed = {"use_cache": False} | changed
    return tiny.output(**changed).double()


def _alike(noise: Noise, found: torch.Tensor, expected: torch.Tensor) -> tuple[bool, float, float]:
    """Whether two results are equal but for rounding, both divided by the largest element of the second."""
    difference = apart(found / _scale(expected), expected / _scale(expected))
    return difference <= noise.allowed, difference, noise.allowed


def _scale(y: torch.Tensor) -> torch.Tensor:
    return y[y.isfinite()].abs().max()


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference; an element that only one result has finite counts as infinitely far."""
    both = torch.stack((one.double(), other.double()))
    if (both[0].isfinite() != both[1].isfinite()).any():
        return float("inf")
    return float((both[0] - both[1])[both[0].isfinite()].abs().max())
