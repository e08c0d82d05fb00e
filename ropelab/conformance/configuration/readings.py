"""Read a configuration with each key left out, replaced, applied twice or exchanged.

A reading is a hypothesis about somebody's code. `rope_of` computes most of them from changed parameters, so that this
file knows what can be misread, and no formula of a variant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch

from ropelab.angles import frequencies
from ropelab.angles.model_config import rope_of
from ropelab.angles.rope_parameters import Rope

TRAINED, LONGEST = "original_max_position_embeddings", "max_position_embeddings"
DEFAULTS: Mapping[str, tuple[float, ...]] = {
    "rope_theta": (10_000.0, 500_000.0, 1_000_000.0),
    "factor": (1.0,),
    "beta_fast": (32.0,),
    "beta_slow": (1.0,),
    "low_freq_factor": (1.0,),
    "high_freq_factor": (4.0,),
    TRAINED: (2048, 4096, 8192),
}
"""Key -> the numbers that code takes in its place."""
EXCHANGED = (("low_freq_factor", "high_freq_factor"), ("beta_fast", "beta_slow"), ("mscale", "mscale_all_dim"),
             ("short_factor", "long_factor"), (TRAINED, LONGEST), ("factor", "attention_factor"))  # fmt: skip
"""Keys that are mistaken for each other."""
ALIKE = ("factor", "rope_theta", TRAINED, "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor", "mscale",
         "mscale_all_dim", "attention_factor")  # fmt: skip
"""Keys whose number may be read wrongly by a factor of two, or squared."""
ROUNDED = {"bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Reading:
    """One way to read a configuration.

    Attributes:
        key: the key that is read wrongly; empty for the right reading.
        words: what happens to it.
        theta: the frequencies, float64 ``[R/2]``.
        factor: the factor of cosines and sines.
        axes: the axis of positions that each pair reads; None for one axis.
        rounded: what is rounded to 16 bits, and to which dtype; None for nothing.
    """

    key: str
    words: str
    theta: np.ndarray
    factor: float = 1.0
    axes: tuple[int, ...] | None = None
    rounded: tuple[str, torch.dtype] | None = None

    @classmethod
    def of(cls, rope: Rope, key: str = "", words: str = "") -> Reading:
        """The reading that leads to a rotation."""
        return cls(key, words, rope.inverse_frequencies.numpy(), rope.attention_factor, rope.axes)

    def angles(self, positions: np.ndarray) -> np.ndarray:
        """The angles ``[K, R/2]`` of positions ``[K]`` or ``[axes, K]``."""
        what, dtype = self.rounded or ("", torch.float64)

        def rounded(name: str, x: np.ndarray) -> np.ndarray:
            return torch.from_numpy(x).to(dtype).double().numpy() if name == what else x

        axes = self.axes if self.axes is not None else (0,) * len(self.theta)
        at = positions[None] if positions.ndim == 1 else positions
        at = at[np.minimum(axes, len(at) - 1)].T.astype(np.float64)
        theta = rounded("frequencies", self.theta)
        return rounded("angles", rounded("positions", at) * theta)


@dataclass(frozen=True)
class Stated:
    """What a configuration states for one type of layers.

    Attributes:
        settings, parameters: the results of `stated`.
        layer_type, layout, seq_len: as for `rope_from_config`.
        others: the parameters of the other types of layers, by name.
        absent: whether the configuration lacks a key.
    """

    settings: dict[str, Any]
    parameters: dict[str, Any]
    layer_type: str | None = None
    layout: str | None = None
    seq_len: int | None = None
    others: Mapping[str, dict[str, Any]] | None = None
    absent: Callable[[str], bool] = lambda key: False

    def rope(self, parameters: Mapping[str, Any] | None = None, settings: Mapping[str, Any] | None = None) -> Rope:
        """The rotation, from other parameters or settings if they are given.

        Raises:
            TypeError, ValueError: no rotation has these parameters.
        """
        chosen = dict(self.parameters if parameters is None else parameters)
        found = dict(self.settings if settings is None else settings)
        return rope_of(found, chosen, layer_type=self.layer_type, layout=self.layout, seq_len=self.seq_len)


def readings(stated: Stated) -> Iterator[Reading]:
    """Yield wrong readings, the likeliest first. Readings that no rotation has are left out."""
    right = Reading.of(stated.rope())
    for make in MISREAD:
        for key, words, rope in make(stated):
            try:
                yield Reading.of(rope(), key, words)
            except (TypeError, ValueError, ArithmeticError):
                continue
    yield from _magnitudes(stated, right)
    yield from _precision(right)


def _ignored(stated: Stated) -> Iterator[tuple[str, str, Callable[[], Rope]]]:
    parameters = stated.parameters
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    common: dict[str, Any] = {key: parameters[key] for key in ("rope_theta", "partial_rotary_factor", "mrope_section",
                                               "mrope_interleaved") if key in parameters}  # fmt: skip
    if kind not in ("default", "axial"):
        yield kind_key(parameters), f"is ignored: nothing is scaled by {kind!r}", partial(stated.rope, common)
        plain = common | {"rope_theta": 10_000.0}
        yield "rope_parameters", "are ignored: the base is 10000, and nothing is scaled", partial(stated.rope, plain)
    for key in parameters:
        if key not in ("rope_type", "type", "rope_theta", "mrope_section", "mrope_interleaved",
                       "partial_rotary_factor"):  # fmt: skip
            left = {name: value for name, value in parameters.items() if name != key}
            yield key, "is ignored", partial(stated.rope, left)
    factor = parameters.get("factor")
    for other in ("linear", "ntk", "yarn", "llama3"):
        if factor is not None and other != kind:
            extra = {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if other == "llama3" else {}
            extra |= {TRAINED: parameters[TRAINED]} if TRAINED in parameters and other in ("yarn", "llama3") else {}
            read = common | extra | {"rope_type": other, "factor": factor}
            yield kind_key(parameters), f"is read as {other!r}", partial(stated.rope, read)


def kind_key(parameters: Mapping[str, Any]) -> str:
    """The key that names the variant."""
    return "rope_type" if parameters.get("rope_type") is not None or "type" not in parameters else "type"


def _layers(stated: Stated) -> Iterator[tuple[str, str, Callable[[], Rope]]]:
    own = stated.layer_type
    for name, parameters in (stated.others or {}).items():
        words = f"are exchanged: these layers have the parameters of {name!r}"
        yield "layer_types", words, partial(stated.rope, parameters)
        theta = parameters.get("rope_theta")
        if theta is not None and theta != stated.parameters.get("rope_theta"):
            read = dict(stated.parameters, rope_theta=theta)
            yield "rope_theta", f"of {own!r} is read from {name!r}: {theta:g}", partial(stated.rope, read)
            read = dict(parameters, rope_theta=stated.parameters.get("rope_theta"))
            words = f"of {name!r} is applied to {own!r}, with the base of {own!r}"
            yield kind_key(parameters), words, partial(stated.rope, read)


def _exchanged(stated: Stated) -> Iterator[tuple[str, str, Callable[[], Rope]]]:
    for one, other in EXCHANGED:
        both = [stated.parameters.get(key, stated.settings.get(key)) for key in (one, other)]
        if None in both or both[0] == both[1]:
            continue
        exchanged = dict(zip((one, other), reversed(both), strict=True))
        inside = stated.parameters | {key: value for key, value in exchanged.items() if key in stated.parameters}
        outside = stated.settings | {key: value for key, value in exchanged.items() if key in stated.settings}
        words = f"and {other} are exchanged"
        if one == "short_factor":  # a length has only one of the two, so that the other may be right
            words = f"or {other} is taken in place of the other, at the lengths that were asked for"
        yield one, words, partial(stated.rope, inside, outside)
    if stated.parameters.get(TRAINED) is not None and stated.settings.get(LONGEST) is not None:
        read = dict(stated.parameters, **{TRAINED: stated.settings[LONGEST]})
        words = f"is ignored: {LONGEST} takes its place"
        yield TRAINED, words, partial(stated.rope, read, dict(stated.settings, **{TRAINED: None}))


def _head_dim(stated: Stated) -> Iterator[tuple[str, str, Callable[[], Rope]]]:
    width, heads = (stated.settings.get(name) or 0 for name in ("hidden_size", "num_attention_heads"))
    head_dim = stated.settings.get("head_dim")
    if head_dim and heads and width % heads == 0 and width // heads != head_dim:
        words = f"is ignored: it is hidden_size / num_attention_heads = {width // heads}, in place of {head_dim}"
        yield "head_dim", words, partial(stated.rope, settings=dict(stated.settings, head_dim=None))


def _partial(stated: Stated) -> Iterator[tuple[str, str, Callable[[], Rope]]]:
    rope = stated.rope()
    head_dim, rotary_dim = rope.head_dim or rope.rotary_dim, rope.rotary_dim
    key = next((name for name in ("rotary_dim", "qk_rope_head_dim") if stated.settings.get(name) is not None),
               "partial_rotary_factor")  # fmt: skip
    theta = rope.inverse_frequencies
    turning = int((theta != 0).sum())
    if turning < len(theta):
        words = f"leads to {turning} pairs, of features i and i + {turning} in place of i and i + {len(theta)}"
        yield key, words, partial(_with, rope, theta[theta != 0])
    settings = dict(stated.settings, rotary_dim=None)
    whole = dict(stated.parameters, partial_rotary_factor=1.0)
    if rotary_dim != head_dim or turning < len(theta):
        yield key, f"is ignored: all {head_dim} features rotate", partial(stated.rope, whole, settings)

        def over_the_head() -> Rope:
            wide = stated.rope(whole, settings)
            return _with(rope, wide.inverse_frequencies[: rotary_dim // 2])

        words = f"is not in the exponents: the frequencies are the first of those for {head_dim} features"
        yield key, words, over_the_head
        narrow = dict(stated.parameters, partial_rotary_factor=(rotary_dim / head_dim) ** 2)
        yield key, "is applied twice", partial(stated.rope, narrow, settings)
    base = float(stated.parameters.get("rope_theta") or 0)
    if turning < len(theta) and base > 0:
        plain = frequencies.inverse_frequencies(2 * turning, base)
        yield (
            key,
            f"is in the exponents: they divide by {2 * turning}",
            partial(_with, rope, torch.cat((plain, plain.new_zeros(len(theta) - turning)))),
        )


def _with(rope: Rope, theta: torch.Tensor) -> Rope:
    return replace(rope, inverse_frequencies=theta, head_dim=None, first_feature=0, axes=None)


def _lengths(stated: Stated) -> Iterator[tuple[str, str, Callable[[], Rope]]]:
    """The frequencies of another length, where they depend on it."""
    if stated.rope().remake is None:
        return
    factor = float(stated.parameters.get("factor") or 1)
    longest = int(stated.settings.get(LONGEST) or stated.parameters.get(TRAINED) or 0)
    for length in (0, int(longest * factor), longest, 2 * longest):
        words = f"is not followed: at {stated.seq_len or 0} tokens the frequencies are those of {length} tokens"
        yield kind_key(stated.parameters), words, partial(_at_length, stated, length)


def _at_length(stated: Stated, length: int) -> Rope:
    return replace(stated, seq_len=length).rope()


def _replaced(stated: Stated) -> Iterator[tuple[str, str, Callable[[], Rope]]]:
    for key, values in DEFAULTS.items():
        for value in values:
            if stated.parameters.get(key) not in (None, value):
                read = dict(stated.parameters, **{key: value})
                yield (
                    key,
                    f"is ignored: it is {value:g}, in place of {_said(stated.parameters[key])}",
                    (partial(stated.rope, read)),
                )
    if stated.parameters.get("rope_type") == "yarn":
        read = dict(stated.parameters, truncate=not stated.parameters.get("truncate", True))
        yield "truncate", f"is read as {read['truncate']}", partial(stated.rope, read)


def _twice(stated: Stated) -> Iterator[tuple[str, str, Callable[[], Rope]]]:
    rope = stated.rope()
    theta = rope.inverse_frequencies
    base = float(stated.parameters["rope_theta"])
    factor = stated.parameters.get("factor")
    if factor is not None:
        read = dict(stated.parameters, factor=1 / factor)
        yield "factor", "multiplies the frequencies, in place of dividing them", partial(stated.rope, read)
        squared = dict(stated.parameters, factor=factor**2)
        yield "factor", f"is applied twice: it is {factor**2:g}", partial(stated.rope, squared)
        if len(theta):
            plain = frequencies.inverse_frequencies(2 * len(theta), base)
            if bool((plain != theta).any()):
                yield "factor", "is applied twice", partial(replace, rope, inverse_frequencies=theta**2 / plain)
                inverted = plain * plain / torch.where(theta == 0, torch.ones_like(theta), theta)
                yield "factor", "is inverted", partial(replace, rope, inverse_frequencies=inverted)
                yield (
                    "factor",
                    "divides all frequencies, those outside of the ramp as well",
                    (partial(replace, rope, inverse_frequencies=theta / factor)),
                )
                if stated.parameters.get("rope_type") == "yarn":
                    power = plain ** (1 + math.log(factor) / math.log(base))
                    words = "multiplies the base inside of the power"
                    yield "factor", words, partial(replace, rope, inverse_frequencies=power)


def _ramps(stated: Stated) -> Iterator[tuple[str, str, Callable[[], Rope]]]:
    """The ramps between kept and divided frequencies, with a mistake inside of the formula."""
    rope, parameters = stated.rope(), stated.parameters
    kind, factor = parameters.get("rope_type") or parameters.get("type"), parameters.get("factor")
    length = parameters.get(TRAINED) or stated.settings.get(TRAINED)
    if kind not in ("yarn", "llama3") or not factor or not length:
        return
    theta = frequencies.inverse_frequencies(rope.rotary_dim, float(parameters["rope_theta"]))
    ramps = _yarn_ramps if kind == "yarn" else _llama3_ramps
    for key, words, slowed in ramps(parameters, rope, theta, float(length)):
        mixed = slowed * theta / factor + (1 - slowed) * theta
        yield key, words, partial(replace, rope, inverse_frequencies=mixed)


def _yarn_ramps(parameters, rope: Rope, theta: torch.Tensor, length: float) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Wrong ramps of YaRN: key, words, and the share ``[pairs]`` of the divided frequency."""
    fast, slow = float(parameters.get("beta_fast") or 32), float(parameters.get("beta_slow") or 1)
    base, width = float(parameters["rope_theta"]), rope.rotary_dim
    pair = torch.arange(len(theta), dtype=torch.float64)
    ends: dict[str, Callable[[float], float]] = {"floor": math.floor, "ceil": math.ceil, "as they are": float}
    whole = ("floor", "ceil") if parameters.get("truncate", True) else ("as they are", "as they are")

    def ramp(fast=fast, slow=slow, width=width, turn=2 * math.pi, ends_are=whole, most=None, pair=pair, clamped=True):
        first, last = (width * math.log(length / (n * turn)) / (2 * math.log(base)) for n in (fast, slow))
        first, last = (ends[how](end) for how, end in zip(ends_are, (first, last), strict=True))
        first, last = max(first, 0), min(last, (most or width) - 1)
        found = (pair - first) / (last - first if last != first else 0.001)
        return found.clamp(0, 1) if clamped else found

    yield "beta_fast", "and beta_slow are exchanged: slow pairs keep their frequency", 1 - ramp()
    yield "beta_fast", "and beta_slow are exchanged before they are rounded", ramp(fast=slow, slow=fast)
    for one, other in ((a, b) for a in ends for b in ends):
        words = f"is not followed: the first end of the ramp is rounded by {one}, the last by {other}"
        yield "truncate", words, ramp(ends_are=(one, other))
    for name, wide in (("pairs", width // 2), ("features of a head", rope.head_dim), ("twice the features", 2 * width)):
        if wide and wide != width:
            words = f"and beta_slow give a ramp for the number of {name}, {wide}, in place of {width}"
            yield "beta_fast", words, ramp(width=wide, most=width)
    yield "beta_fast", "and beta_slow count radians in place of turns: 2 pi is missing", ramp(turn=1.0)
    yield "beta_fast", "and beta_slow give a ramp over features in place of pairs", ramp(pair=2 * pair)
    yield "beta_fast", "and beta_slow give a ramp without ends: it is not clamped to 0 and 1", ramp(clamped=False)
    yield "beta_fast", "and beta_slow give a step in place of a ramp", (ramp() > 0).double()
    yield "beta_fast", "and beta_slow give a ramp that ends with the pairs", ramp(most=width // 2)
    soft = ramp()
    inverse = soft * parameters["factor"] + 1 - soft  # the mean of wavelengths
    rate = (1 - 1 / inverse) / (1 - 1 / parameters["factor"])
    yield "beta_fast", "and beta_slow mix wavelengths in place of frequencies", rate


def _llama3_ramps(parameters, rope: Rope, theta, length: float) -> Iterator[tuple[str, str, torch.Tensor]]:
    """Wrong ramps of Llama 3, as for `_yarn_ramps`."""
    low, high = float(parameters.get("low_freq_factor") or 1), float(parameters.get("high_freq_factor") or 4)
    turns = length * theta / (2 * math.pi)
    if low >= high:
        return
    yield "low_freq_factor", "and high_freq_factor are exchanged", ((turns - low) / (high - low)).clamp(0, 1)
    words = "and high_freq_factor are exchanged: every pair below high_freq_factor turns is divided by the factor"
    yield "low_freq_factor", words, (turns < high).double()
    words = "has no effect: there is a step in place of the ramp"
    yield "high_freq_factor", words, (turns <= low).double()
    words = "is a threshold: every pair below it is divided by the factor, without a ramp"
    yield "high_freq_factor", words, (turns < high).double()
    middle = ((high - turns * 2 * math.pi) / (high - low)).clamp(0, 1)
    yield "low_freq_factor", "and high_freq_factor count radians in place of turns: 2 pi is missing", middle
    waves = ((1 / turns - 1 / high) / (1 / low - 1 / high)).clamp(0, 1)
    yield "low_freq_factor", "and high_freq_factor give a ramp over wavelengths in place of frequencies", waves
    unclamped = (high - turns) / (high - low)
    yield "low_freq_factor", "and high_freq_factor give a ramp without ends: it is not clamped to 0 and 1", unclamped


def _sections(stated: Stated) -> Iterator[tuple[str, str, Callable[[], Rope]]]:
    rope = stated.rope()
    if rope.axes is None:
        return
    key = "mrope_section"
    yield key, "is ignored: every pair reads axis 0", partial(replace, rope, axes=(0,) * (rope.rotary_dim // 2))
    count = max(rope.axes) + 1
    for i in range(count):
        for j in range(i):
            order = {i: j, j: i}
            swapped = tuple(order.get(axis, axis) for axis in rope.axes)
            yield key, f"has the axes {j} and {i} exchanged", partial(replace, rope, axes=swapped)
    widths = [rope.axes.count(axis) for axis in range(count)]
    bands = tuple(axis for axis, width in enumerate(widths) for _ in range(width))
    if bands != rope.axes:
        words = "is ignored: each axis has adjacent pairs, in place of turns"
        yield "mrope_interleaved", words, partial(replace, rope, axes=bands)
    else:
        turns = [axis % count for axis in range(len(bands))]
        turns = [axis if place < count * widths[axis] else 0 for place, axis in enumerate(turns)]
        words = "is read as true: the axes take turns, in place of adjacent pairs"
        yield "mrope_interleaved", words, partial(replace, rope, axes=tuple(turns))


def _alike(stated: Stated) -> Iterator[tuple[str, str, Callable[[], Rope]]]:
    for key in ALIKE:
        value = stated.parameters.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        for times in (2, 0.5):
            other = type(value)(value * times)
            read = dict(stated.parameters, **{key: other})
            yield key, f"is read as {_said(other)}, in place of {_said(value)}", partial(stated.rope, read)
    for key in ("beta_fast", "beta_slow"):
        if stated.parameters.get("rope_type") == "yarn" and key not in stated.parameters:
            for value in (4, 8, 16, 64, 2, 1, 32):
                read = dict(stated.parameters, **{key: value})
                yield key, f"is {value}, in place of its default", partial(stated.rope, read)


def _two(stated: Stated) -> Iterator[tuple[str, str, Callable[[], Rope]]]:
    for one, other in combinations([key for key in ALIKE if key in stated.parameters and key != "rope_theta"], 2):
        left = {name: value for name, value in stated.parameters.items() if name not in (one, other)}
        yield one, f"is ignored, as is {other}", partial(stated.rope, left)


MISREAD = (
    _layers, _ignored, _exchanged, _head_dim, _partial, _lengths, _replaced, _twice, _ramps, _sections, _alike, _two,
)  # fmt: skip
"""The functions that change keys, the likeliest first; each yields a key, what happens to it and a rotation."""


def _magnitudes(stated: Stated, right: Reading) -> Iterator[Reading]:
    """Other factors of cosines and sines. The frequencies are right."""
    parameters, found = stated.parameters, right.factor
    named = next((key for key in ("attention_factor", "mscale") if parameters.get(key) is not None), None)
    key = named or ("factor" if parameters.get("factor") is not None and found != 1 else "attention_factor")
    factor = float(parameters.get("factor") or 1)
    which = "gives cosines and sines a factor, which " if key == "factor" else ""  # not the divisor of frequencies

    def m(scale: float) -> float:
        return frequencies.yarn_attention_factor(factor, scale, 1e-300) if scale else 1.0

    hypotheses: list[tuple[str, str, float]] = [
        (key, f"{which}is not applied", 1.0),
        (key, f"{which}is applied twice", found**2),
        (key, f"{which}divides in place of multiplying", 1 / found),
    ]
    if factor > 1:
        log = 0.1 * math.log(factor)
        hypotheses += [
            (key, f"{which}is ignored: it is 0.1 ln(factor) + 1", log + 1),
            (key, f"{which}goes through 0.1 m ln(factor) + 1 a second time", found * log + 1),
            (key, f"{which}is multiplied by 0.1 ln(factor) + 1", found * (log + 1)),
            ("factor", "is itself the factor of cosines and sines", factor),
            (key, f"{which}is ln(factor) + 1: the 0.1 is missing", 10 * log + 1),
            (key, f"{which}is 0.1 log10(factor) + 1, in place of the natural logarithm", log / math.log(10) + 1),
            (key, f"{which}is 0.1 log2(factor) + 1, in place of the natural logarithm", log / math.log(2) + 1),
            (key, f"{which}is 0.1 ln(factor): the 1 is missing", log),
            (key, f"{which}is applied as its square root", found**0.5),
        ]
        for name in ("mscale", "mscale_all_dim"):
            if parameters.get(name):
                other = "mscale_all_dim" if name == "mscale" else "mscale"
                hypotheses.append((other, "is ignored", m(float(parameters[name]))))
        if parameters.get("mscale") and parameters.get("mscale_all_dim"):
            product = math.prod(m(float(parameters[name])) for name in ("mscale", "mscale_all_dim"))
            hypotheses.append(("mscale_all_dim", "multiplies the factor of mscale, in place of dividing it", product))
    for name, words, value in hypotheses:
        if abs(value - found) > 1e-9 * found:
            yield replace(right, key=name, words=words, factor=value)


def _precision(right: Reading) -> Iterator[Reading]:
    for name, dtype in ROUNDED.items():
        for what in ("frequencies", "angles", "positions"):
            yield replace(right, key="dtype", words=f": the {what} are rounded to {name}", rounded=(what, dtype))


def _said(value: Any) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)
