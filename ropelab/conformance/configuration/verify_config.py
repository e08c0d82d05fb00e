"""Say whether somebody's rotation is the one of a model's configuration and, if not, which key was read wrongly."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from ropelab.angles.model_config import stated as stated_in
from ropelab.angles.rope_parameters import ANY_LENGTH, Rope
from ropelab.command.summary import versions
from ropelab.conformance.angles import refined, simple, slopes
from ropelab.conformance.configuration.descriptions import LLAMA_CPP, described, layer_types, read, spelled, written
from ropelab.conformance.configuration.measured import Measured, measured, of_rope
from ropelab.conformance.configuration.readings import Reading, Stated, readings
from ropelab.conformance.words import unequal

FORMAT = 1
"""The version of the format of a report as JSON. A new key keeps the version; a key that changes or goes raises it."""
UNIT = 2.0**-24
"""The unit roundoff of float32, in which frequencies and angles may be computed."""
NOT_KEYS = {"", "layout", "layer_types", "dtype"}
"""What a finding names, and no configuration needs to have."""
FEW, MANY = 16, 4096
"""Each of the first positions is asked for; and up to this one where nothing states a length."""


@dataclass(frozen=True)
class Finding:
    """A key that is read wrongly.

    Attributes:
        layer_type: the type of layers; empty if all layers are alike.
        key: the key as the configuration spells it, or ``1 / key`` where it has the inverse; empty if no reading of a
            key explains the numbers.
        words: what happens to the key.
        example: a pair and a position with the expected and the measured number.
        also: other readings with the same numbers.
    """

    layer_type: str
    key: str
    words: str
    example: str = ""
    also: tuple[str, ...] = ()

    def __str__(self) -> str:
        said = f"{self.key} {self.words}".strip().replace(" :", ":")
        return f"{self.layer_type}: {said}" if self.layer_type else said


@dataclass(frozen=True)
class ConfigReport:
    """The outcome of a comparison with a configuration.

    Attributes:
        target: what was compared with the configuration.
        findings: the keys that are read wrongly.
        compared: what was compared, in words, for each type of layers.
        not_compared: what the target does not show.
        message: why nothing was compared; empty if something was.
    """

    target: str
    findings: tuple[Finding, ...] = ()
    compared: tuple[str, ...] = ()
    not_compared: tuple[str, ...] = ()
    message: str = ""

    @property
    def verdict(self) -> str:
        """``"wrong"`` with a finding, ``"right"`` if something was compared without one, else ``"not judged"``."""
        if self.findings:
            return "wrong"
        return "right" if self.compared and not self.message else "not judged"

    def as_dict(self) -> dict[str, Any]:
        """The report with its verdict and versions."""
        return {"format": FORMAT, "versions": versions("transformers"), "verdict": self.verdict} | asdict(self)

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(self.as_dict(), indent=1)

    def __str__(self) -> str:
        lines = [f"{self.target}: {self.verdict}"]
        lines += [f"  {self.message}"] if self.message else []
        for finding in self.findings:
            lines.append(f"  {finding}")
            lines += [f"    {finding.example}"] if finding.example else []
            lines += [f"    the same numbers: {'; '.join(finding.also)}"] if finding.also else []
        lines += [f"  compared: {line}" for line in self.compared]
        lines += [f"  not compared: {line}" for line in self.not_compared]
        return "\n".join(lines)


def verify_config(config: Any, against: Any, *, layer_type: str | None = None, name: str = "") -> ConfigReport:
    """Hold frequencies, tables, a rotary module or a function to the configuration of a model.

    Args:
        config: what `rope_from_config` takes; a file, folder, object or architecture that `descriptions.read` finds; or
            a description of vLLM, SGLang (``head_size``, ``rope_parameters``, ...) or llama.cpp (``freq_base``, ...).
        against: what `measured` takes, or such a description. A dict with the types of layers as keys has a target for
            each.
        layer_type: hold only layers of this type to the configuration.
        name: the target in words.

    Raises:
        TypeError, ValueError: the configuration cannot be read.
        NotMeasured: ``against`` is nothing that can be compared.
    """
    config = read(config)
    keys, given = spelled(config), written(config)

    def absent(key: str) -> bool:
        name = keys.get(key, key).removeprefix("1 / ")
        return given is not None and name not in given | NOT_KEYS

    config, layout = described(config)
    kinds = layer_types(config)
    if layer_type is not None:
        kinds = [layer_type]
    parts = {kind: stated_in(config, kind) for kind in kinds if _rotates(config, kind)}
    everything = {
        kind: stated_in(config, kind)[1] for kind in layer_types(config) if kind is not None and _rotates(config, kind)
    }
    findings: list[Finding] = []
    compared, missing = [], []
    for kind, (settings, parameters) in parts.items():
        others = {other: values for other, values in everything.items() if other != kind}
        stated = Stated(settings, parameters, kind, layout, None, others, absent)
        of_kind: list[Finding] = []
        for at_length in _lengths(stated):
            rope = at_length.rope()
            target = _target(against, rope, kind, config)
            found, words, left = _held(at_length, rope, target, kind or "")
            of_kind += [one for one in found if one not in of_kind]
            compared.append(f"{kind}: {words}" if kind else words)
            missing += [line for line in left if line not in missing]
            if target.rows is not None or not target.scaled:
                break  # a table has the frequencies of one length
        else:
            if of_kind and at_length is not stated and (words := _switch(stated, at_length, target)):
                of_kind = [Finding(kind or "", "long_factor", words, of_kind[0].example)]
        findings += [one for one in of_kind if one not in findings]
    findings = [
        replace(
            f,
            key=keys.get(f.key, f.key),
            also=tuple(_spelled(a, keys) for a in f.also),
            words=f.words + absent(f.key) * " (the configuration lacks the key: its default)",
        )  # fmt: skip
        for f in findings
    ]
    return ConfigReport(name or type(against).__name__, tuple(findings), tuple(compared), tuple(missing))


def _spelled(words: str, keys: Mapping[str, str]) -> str:
    """A reading in words, whose first word is a key."""
    key, _, rest = words.partition(" ")
    return f"{keys.get(key, key)} {rest}"


def _rotates(config: Any, kind: str | None) -> bool:
    try:
        stated_in(config, kind)
    except ValueError as refusal:
        if "whose parameters are None" in str(refusal):
            return False
        raise
    return True


def _lengths(stated: Stated) -> Iterator[Stated]:
    """The configuration at a short length and, where frequencies depend on the length, at a long one."""
    yield stated
    rope = stated.rope()
    if rope.lengths != ANY_LENGTH:
        yield replace(stated, seq_len=rope.lengths.stop + 16)


def _switch(short: Stated, long: Stated, target: Measured) -> str:
    """The number of tokens from which on a target has the frequencies of long sequences, in words, if it is wrong.

    It is empty if the target has other frequencies, or if the configuration has no frequencies for short and for long
    sequences.
    """
    if "long_factor" not in short.parameters:
        return ""
    right = short.rope().lengths.stop

    def fits(stated: Stated, length: int) -> bool:
        at = torch.tensor(sorted({*range(min(FEW, length)), length - 1}))
        return Measure(at.numpy(), *target.at(at), target, stated).fits(Reading.of(stated.rope()))

    low, high = 2, 2 * right  # a single token, at position 0, does not turn
    if fits(long, low) and fits(long, high):
        return f"is taken at every length, in place of {right} tokens and more"
    if fits(short, low) and fits(short, high):
        return f"is never taken, in place of at {right} tokens and more"
    if not (fits(short, low) and fits(long, high)):
        return ""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(long, middle) else (middle, high)
    return f"is taken at {high} tokens and more, in place of {right} tokens and more" if high != right else ""


def _target(against: Any, rope: Rope, kind: str | None, config: Any) -> Measured:
    if isinstance(against, Mapping) and kind in against:
        against = against[kind]
    keys = {str(key).removeprefix("--").replace("-", "_") for key in against} if isinstance(against, Mapping) else set()
    if "head_size" in keys or "rope_parameters" in keys or any(key.endswith(LLAMA_CPP) for key in keys):
        described_as, layout = described(against)
        return of_rope(Stated(*stated_in(described_as), None, layout).rope(), rope, "a description")
    return measured(against, rope, kind, config)


def _held(stated: Stated, rope: Rope, target: Measured, kind: str) -> tuple[list[Finding], str, list[str]]:
    findings: list[Finding] = []
    left: list[str] = []
    if target.layout is None:
        left.append("the layout of the features: the target has no features")
    elif target.layout != rope.layout:
        findings.append(Finding(kind, "layout", f"is {target.layout}, in place of {rope.layout}"))
    at = _positions(rope, target, stated.seq_len)
    if rope.axes is not None and target.axes == 1:
        left.append("mrope_section: the target takes positions along one axis")
        stated = replace(stated, parameters={k: v for k, v in stated.parameters.items() if not k.startswith("mrope")})
    longest = rope.max_seq_len
    if target.rows is not None and longest is not None and target.rows < longest:
        words = f"is not covered: the table has {target.rows} rows, for {longest} positions"
        findings.append(Finding(kind, "max_position_embeddings", words))
    if not target.scaled:
        left.append("the factor of cosines and sines: frequencies do not contain it")
    cos, sin = target.at(at)
    if target.layout is None and rope.inverse_frequencies[0] < 0:
        left.append("the direction of the rotation: the target has no features")
        sin = -sin if (sin[1:2, 0] > 0).any() else sin
    words = f"{cos.shape[1]} pairs at {cos.shape[0]} positions up to {int(at.max())}, from {target.kind}"
    if not (abs(cos).max() <= 1e6 and abs(sin).max() <= 1e6):  # NaN is not
        findings.append(_not_finite(stated, at, cos, sin, kind))
        return findings, words, left
    measure = Measure(at.numpy(), cos, sin, target, stated)
    right = Reading.of(rope)
    if target.axes == 1:
        right = replace(right, axes=None)
    if not measure.fits(right):
        findings += measure.explained(right, kind)
    return findings, words, left


def _positions(rope: Rope, target: Measured, seq_len: int | None) -> torch.Tensor:
    """The positions that are asked for, ``[K]``, or ``[axes, K]`` where the target takes several axes.

    The last position tells a function the length of the sequence, where frequencies depend on it.
    """
    last = seq_len or target.rows or min(rope.max_seq_len or MANY, 2**17)
    if seq_len is None:
        last = min(last, rope.lengths.stop - 1)
    far = (int(2**power) + odd for power in range(4, 31) for odd in (-1, 1, 5))
    at = torch.tensor(sorted({*range(min(FEW, last)), *(p for p in far if p < last), last - 1}))
    count = target.axes
    return at if count == 1 else torch.stack([(at * (axis + 1)) // count for axis in range(count)])


def _not_finite(stated: Stated, at: torch.Tensor, cos: np.ndarray, sin: np.ndarray, kind: str) -> Finding:
    bad = ~(np.isfinite(cos) & np.isfinite(sin)) | (np.maximum(abs(cos), abs(sin)) > 1e6)
    token, pair = map(int, np.argwhere(bad)[0])
    key, words = "", f"{bad.sum()} of {bad.size} cosines and sines are not finite"
    if stated.parameters.get("rope_type", stated.parameters.get("type")) == "dynamic" and bad[1:, 1:].all():
        key, words = "factor", "leads to numbers that are not finite: the base is a power of factor * length /"
        words += " max_position_embeddings - (factor - 1), which is negative for a length below max_position_embeddings"
    where = f"position {int(at[..., token].max())}, pair {pair}: cos {cos[token, pair]:g}, sin {sin[token, pair]:g}"
    return Finding(kind, key, words, where)


@dataclass(frozen=True)
class Measure:
    """Measured cosines and sines, and the comparison with readings."""

    at: np.ndarray
    cos: np.ndarray
    sin: np.ndarray
    target: Measured
    stated: Stated

    def share(self, reading: Reading, *, turn: bool = True, size: bool = True) -> np.ndarray:
        """The errors divided by their bounds, ``[K, pairs]``; infinite for another number of pairs.

        The bound has the rounding of the numbers; three roundings of the product and the frequency; ``ln(base)`` for
        the rounded exponent; and, where a ramp mixes scaled and unscaled frequencies, 4 units of the unscaled one.

        Args:
            turn, size: whether angles, and whether the factor, count.
        """
        if len(reading.theta) != self.cos.shape[1]:
            return np.full(self.cos.shape, np.inf)
        angles = reading.angles(self.at)
        if not np.isfinite(angles).all():
            return np.full(self.cos.shape, np.inf)
        base = float(self.stated.parameters.get("rope_theta") or 1e4)
        factor = float(self.stated.parameters.get("factor") or 1)
        units = 8 + math.log(max(base, 2)) + 4 * max(factor, 1)
        unit = self.target.unit if not self.target.scaled and self.target.unit < 2.0**-20 else UNIT
        relative = units * max(unit, UNIT)
        far = np.minimum(abs(angles) * relative, 2)
        bound = far + 2 * max(self.target.unit, UNIT)
        length = np.hypot(self.cos, self.sin)
        errors = np.zeros(self.cos.shape)
        if turn:
            scale = np.where(length > 0, length, 1)
            errors = np.hypot(self.cos / scale - np.cos(angles), self.sin / scale - np.sin(angles)) / (2 * bound)
        if size and self.target.scaled:
            allowed = 8 * max(self.target.unit, UNIT)
            errors = np.maximum(errors, abs(length / reading.factor - 1) / allowed)
        return errors

    def fits(self, reading: Reading, **which: bool) -> bool:
        """Whether a reading reproduces all numbers."""
        return bool((self.share(reading, **which) <= 1).all())

    def explained(self, right: Reading, kind: str) -> list[Finding]:
        """The wrong readings that reproduce the numbers: one, or one for the angles and one for the factor."""
        known = list(readings(self.stated))
        if right.axes is None:
            known = [replace(one, axes=None) for one in known]
        whole = [one for one in known if self.fits(one)]
        if whole:
            return [self._finding(whole, right, kind)]
        found = []
        if not self.fits(right, size=False):
            turned = [one for one in known if self.fits(one, size=False)]
            found.append(self._finding(turned or [self._recovered(right)], right, kind, size=False))
        if len(right.theta) == self.cos.shape[1] and not self.fits(right, turn=False):
            sized = [one for one in known if self.fits(one, turn=False)]
            factor = float(np.median(np.hypot(self.cos, self.sin)))
            sizes = np.hypot(self.cos, self.sin)
            words = "of cosines and sines is {}, in place of {}".format(*unequal(factor, right.factor))
            if (abs(sizes / factor - 1) > 8 * max(self.target.unit, UNIT)).any():
                words = "of cosines and sines is not one number: it goes from {} to {}".format(
                    *unequal(float(sizes.min()), float(sizes.max()))
                )
            found.append(self._finding(sized or [replace(right, key="attention_factor", words=words, factor=factor)],
                                       right, kind, turn=False))  # fmt: skip
        return found

    def _finding(self, fitting: list[Reading], right: Reading, kind: str, **which: bool) -> Finding:
        first, *rest = sorted(fitting, key=lambda one: self.stated.absent(one.key))
        rest = [one for one in rest if not self.stated.absent(one.key)]
        also = dict.fromkeys(f"{one.key} {one.words}".replace(" :", ":") for one in rest if one.key != first.key)
        return Finding(kind, first.key, first.words, self._example(right, **which), tuple(also)[:3])

    def _example(self, right: Reading, **which: bool) -> str:
        if len(right.theta) != self.cos.shape[1]:
            return f"{self.cos.shape[1]} pairs, in place of {len(right.theta)}"
        off = self.share(right, **which) > 1
        if not off.any():
            return ""
        token = int(np.argmax(off.any(1)))
        pair = int(np.argmax(self.share(right, **which)[token]))
        at = self.at[..., token].tolist()
        angle = right.angles(self.at)[token, pair]
        measured = float(self.cos[token, pair]), float(self.sin[token, pair])
        (cos, right_cos), (sin, right_sin) = (
            (f"{a:.6g}", f"{b:.6g}") if a == b else unequal(a, b)
            for a, b in zip(measured, (right.factor * np.cos(angle), right.factor * np.sin(angle)), strict=True)
        )
        numbers, expected = f"cos {cos}, sin {sin}", f"cos {right_cos}, sin {right_sin}"
        return f"position {at}, pair {pair}: {numbers}, in place of {expected}"

    def _recovered(self, right: Reading) -> Reading:
        """What reproduces the numbers, where no reading of a key does: a base, a factor, positions, pairs or axes.

        Where nothing does, the words say at which position the numbers are first wrong.
        """
        unknown = replace(right, key="")
        if len(right.theta) != self.cos.shape[1]:
            words = f"no reading of a key has these {self.cos.shape[1]} frequencies; expected {len(right.theta)}"
            return replace(unknown, words=words)
        tries = self._other_axes(right) if self.at.ndim > 1 else self._other_numbers(right, unknown)
        fitting = (reading for at, reading in tries if replace(self, at=at).fits(reading, size=False))
        return next(fitting, replace(unknown, words=self._first_wrong(right)))

    def _other_axes(self, right: Reading) -> Iterator[tuple[np.ndarray, Reading]]:
        """Positions ``[axes, K]``, and the axes that pairs read."""
        own = right.axes or (0,) * len(right.theta)
        shares = [
            self.share(replace(right, axes=(axis,) * len(own)), size=False).max(0) for axis in range(len(self.at))
        ]
        best = np.argmin(shares, 0)
        read = tuple(a if shares[a][pair] <= 1 else int(best[pair]) for pair, a in enumerate(own))
        for pair in [pair for pair, axis in enumerate(own) if read[pair] != axis][:1]:
            words = f"is another: pair {pair} reads axis {read[pair]}, in place of {own[pair]}"
            yield self.at, replace(right, key="mrope_section", axes=read, words=words)

    def _other_numbers(self, right: Reading, unknown: Reading) -> Iterator[tuple[np.ndarray, Reading]]:
        """Positions ``[K]`` and readings, from the frequencies that the first, consecutive positions show."""
        angles = np.arctan2(self.sin, self.cos)
        near = int(np.argmax(np.diff(self.at, append=self.at[-1]) != 1))
        slope, start = slopes(angles[: near + 1])
        theta = refined(slope, start, angles[near + 1 :], self.at[near + 1 :])
        for reading in self._solved(theta, right):
            yield self.at, reading
        slow = int(np.argmin(abs(theta - 1e-3)))  # within half a turn, and far above the rounding
        rows = round(float(start[slow] / theta[slow])) if theta[slow] else 0
        yield (
            self.at + rows,
            replace(unknown, words=f"position p has the angles of position p {'+-'[rows < 0]} {abs(rows)}"),
        )
        yield np.arange(len(self.at)), replace(unknown, words="a position has the angles of its place in the call")
        first, same = self._wrong_position(right)
        if same is not None and same < first:
            words = f"position p has the angles of position p modulo {first - same}"
            yield self.at % (first - same), replace(unknown, words=words)
            yield np.minimum(self.at, same), replace(unknown, words=f"no position has angles beyond those of {same}")
        ratio = theta / np.where(right.theta == 0, np.inf, right.theta)
        times = float(np.median(ratio))
        words = f"every frequency is multiplied by {times:.5g}"
        yield self.at, replace(unknown, theta=times * right.theta, words=words)
        wrong = np.flatnonzero(abs(ratio - 1) > 1e-5)
        pair = int(wrong[0]) if len(wrong) else 0
        words = f"no reading of a key has these frequencies: {len(wrong)} of {len(theta)} pairs differ, the first is"
        yield self.at, replace(unknown, theta=theta, words=f"{words} {pair}, by a factor of {ratio[pair]:.5g}")

    def _wrong_position(self, right: Reading) -> tuple[int, int | None]:
        """The first position with wrong angles, and the position, near it or 0, that has these; None if none has."""
        token = int((self.share(right, size=False) > 1).any(1).argmax())
        position = int(self.at[..., token].max())
        if self.at.ndim > 1:
            return position, None
        others = np.r_[: min(position, MANY), max(0, position - FEW) : position, position + 1 : position + FEW]
        cos, sin = (np.broadcast_to(wave[token], (len(others), wave.shape[1])) for wave in (self.cos, self.sin))
        same = (replace(self, at=others, cos=cos, sin=sin).share(right, size=False) <= 1).all(1)
        return position, int(others[same.argmax()]) if same.any() else None

    def _first_wrong(self, right: Reading) -> str:
        position, same = self._wrong_position(right)
        alike = "" if same is None else f", which has the angles of position {same}"
        return f"no frequencies give these numbers: position {position} is the first that is wrong{alike}"

    def _solved(self, theta: np.ndarray, right: Reading) -> Iterator[Reading]:
        """Readings with a base or a factor that the recovered frequencies give, rounded to few digits."""
        parameters, pairs = self.stated.parameters, len(theta)
        positive = theta[-1] > 0 and pairs > 1
        base = float(parameters["rope_theta"])
        if positive:
            solved = simple(float(theta[-1]) ** (-pairs / (pairs - 1)))
            powers = solved ** (-np.arange(pairs) / pairs)
            yield replace(right, key="rope_theta", theta=powers,
                          words=f"is {solved:.6g}, in place of {base:.6g}, and nothing is scaled")  # fmt: skip
        if positive and right.theta[-1] > 0:
            ratio = float(theta[-1] / right.theta[-1])
            tries = [("rope_theta", simple(base * ratio ** (-pairs / (pairs - 1))))]
            if parameters.get("factor") is not None:
                tries.append(("factor", simple(float(parameters["factor"]) / ratio)))
            for key, value in tries:
                try:
                    rope = self.stated.rope(dict(parameters, **{key: value}))
                except ValueError:
                    continue
                yield replace(Reading.of(rope, key, f"is {value:.6g}, in place of {parameters[key]:.6g}"),
                              axes=right.axes)  # fmt: skip
