"""Check a whole model against laws: the function that rotates, and the attention around it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ropelab.arguments import shown
from ropelab.command.summary import versions
from ropelab.conformance.case import NotApplicable
from ropelab.conformance.models.angle_laws import ropes
from ropelab.conformance.models.attention_laws import ModelResult, hold_attention
from ropelab.conformance.models.class_law import turns, turns_as_its_class
from ropelab.conformance.models.factory import NotBuilt, TinyModel, build
from ropelab.conformance.models.function_laws import convention, hold_function, understood
from ropelab.conformance.models.replay import NotUnderstood
from ropelab.conformance.models.replay import understood as replay
from ropelab.conformance.models.trace import Traced, rotations
from ropelab.conformance.result import json_number

FORMAT = 1
"""The version of the format of a report as JSON. A new key keeps the version; a key that changes or goes raises it."""


@dataclass(frozen=True)
class FunctionReport:
    """One function that rotates, and its laws.

    Attributes:
        name: module and qualified name.
        convention: how it is called, in words; empty if unknown.
        layout, out_layout: the pairs of features before and after the rotation.
        sign: ``"standard"``, ``"reversed"``, or ``""`` if unknown.
        rotary_dim, head_dim: the number of features that rotate, and of all features of the call.
        factor: the factor of the lengths; 1 but for an attention factor in the tables.
        verdict: the verdict of `ropelab.conformance.verify`: ``"right"``, ``"wrong"`` or ``"not judged"``.
        failed: the names of the laws that do not hold.
        message: why the function is not judged.
    """

    name: str
    convention: str
    layout: str
    out_layout: str
    sign: str
    rotary_dim: int
    head_dim: int
    factor: float
    verdict: str
    failed: tuple[str, ...] = ()
    message: str = ""


@dataclass(frozen=True)
class ModelReport:
    """The outcome of the laws for a model.

    Attributes:
        architecture: the name of the architecture, or of the model's class.
        model: the name of the model's class.
        functions: the functions that rotate.
        laws: the laws of the attention around them.
        message: why nothing is judged, if the model has no rotation or could not be built.
        stopped: why the run ended early; empty if it did not.
    """

    architecture: str
    model: str
    functions: tuple[FunctionReport, ...] = ()
    laws: tuple[ModelResult, ...] = ()
    message: str = ""
    stopped: str = ""

    @property
    def verdict(self) -> str:
        """``"wrong"`` if a law does not hold; ``"right"`` if all functions are right; else ``"not judged"``.

        Where no function only rotates, a model is right if its scores are those of its class in Transformers. A run
        that ended early can prove a model wrong, but not right.
        """
        if any(f.verdict == "wrong" for f in self.functions) or any(law.status == "fail" for law in self.laws):
            return "wrong"
        proven = self.functions or any(law.law == "turns_as_its_class" and law.status == "pass" for law in self.laws)
        right = proven and all(f.verdict == "right" for f in self.functions) and not self.stopped
        return "right" if right else "not judged"

    def as_dict(self) -> dict[str, Any]:
        """The report in the format of ``report.schema.json``, a JSON Schema beside this file."""
        laws = [asdict(law) | {n: json_number(getattr(law, n)) for n in ("difference", "allowed")} for law in self.laws]
        about = {"format": FORMAT, "versions": versions("transformers"), "verdict": self.verdict}
        return about | asdict(self) | {"laws": laws}

    def to_json(self) -> str:
        """The report as JSON."""
        return json.dumps(self.as_dict(), indent=1)

    def __str__(self) -> str:
        lines = [f"{self.architecture} ({self.model or 'no model'}): {self.verdict}"]
        lines += [f"  {line}" for line in (self.message, self.stopped) if line]
        for f in self.functions:
            pairs = f.layout if f.out_layout == f.layout else f"{f.layout}, then {f.out_layout}"
            part = f"{f.rotary_dim} of {f.head_dim} features"
            lines.append(f"  {f.name}: {f.verdict}")
            lines.append(f"    {f.convention or 'unknown convention'}; {pairs}; {part}; {f.sign or 'unknown'} sign")
            lines += [f"    does not hold: {', '.join(f.failed)}"] if f.failed else []
            lines += [f"    {f.message}"] if f.message else []
        for law in self.laws:
            numbers = "" if law.difference is None else f": {law.difference:.2g} apart, {law.allowed:.2g} allowed"
            lines.append(f"  {law.law}: {law.status}{numbers}{': ' + law.message if law.message else ''}")
        return "\n".join(lines)


def verify_model(
    model: str | torch.nn.Module | TinyModel,
    inputs: Mapping[str, Any] | None = None,
    *,
    laws_of: Callable[[Traced], FunctionReport] | None = None,
) -> ModelReport:
    """Find the functions that rotate in a model, and check them and the attention around them.

    Args:
        model: the name of an architecture of Transformers (``"llama"``), of which a tiny random model is made; or a
            model. A model is copied, and the copy runs on the CPU in float64: small models only.
        inputs: the keyword arguments of a call of the model; by default two sequences of nine random tokens.
        laws_of: checks a function against its laws; by default `ropelab.conformance.verify` does.

    Raises:
        TypeError: ``model`` is neither a name nor a model.
    """
    found: list[Traced] = []
    if isinstance(model, str):

        def rotates(tiny: TinyModel) -> bool:
            found[:] = rotations(tiny.double().output)
            return bool(found)

        try:
            tiny = build(model, rotates)
        except NotBuilt as reason:
            return ModelReport(model, "", message=str(reason))
        except ModuleNotFoundError as error:
            return ModelReport(model, "", message=str(error))
    else:
        tiny = model if isinstance(model, TinyModel) else tiny_of(copy.deepcopy(_checked(model)), inputs)
        found = rotations(tiny.double().output)
    name = type(tiny.model).__name__
    handed = not isinstance(model, str)
    if not found and not (handed and turns(tiny)):
        return ModelReport(tiny.architecture, name, message="no function rotates in a call of the model")
    tiny.single()
    stated = _stated(getattr(tiny.model, "config", None))
    functions = tuple((laws_of or function_report)(replace(one, stated=stated)) for one in found)
    laws = tuple(hold_attention(tiny)) + ((turns_as_its_class(tiny),) if handed else ())
    if not found:
        said = "queries and keys turn, but no function does nothing else"
        return ModelReport(tiny.architecture, name, laws=laws, message=said)
    message = disagreement(found) if len(found) > 1 and any(law.status == "fail" for law in laws) else ""
    return ModelReport(tiny.architecture, name, functions, laws, message)


def disagreement(found: list[Traced]) -> str:
    """Which tensors have other pairs of features than the first, in words; empty if all have the same."""
    layouts: dict[str, str] = {}
    of_layers: dict[int | str | None, set[str]] = {}
    for traced in found:
        whole = traced.name if len({turn.name for turn in traced.turns}) > 1 else None  # it turns q and k of its layers
        for turn in traced.turns:
            layouts.setdefault(turn.layout, turn.name if len(found) == 1 else f"{turn.name} of {traced.name}")
            of_layers.setdefault(whole if turn.layer is None else turn.layer, set()).add(turn.layout)
    said = " and ".join(f"{name} is paired as {layout}" for layout, name in layouts.items())
    if max(map(len, of_layers.values()), default=0) < 2:  # each layer has one layout
        return f"{said}, in different layers" if len(layouts) > 1 else ""
    return f"{said}: scores between them mix features of different pairs"


def function_report(traced: Traced) -> FunctionReport:
    """Check a traced function against the laws of `ropelab verify`."""
    known = FunctionReport(
        traced.name, "", traced.layout, traced.out_layout, "", traced.rotary_dim, traced.head_dim, traced.factor,
        "not judged",
    )  # fmt: skip
    if apart := disagreement([traced]):
        return replace(known, verdict="wrong", failed=("layout",), message=apart)
    try:
        if traced.function is None:
            return _replayed(known, traced)
        found = understood(traced.name, traced.function)
    except ValueError:
        return _replayed(known, traced)
    # A model always has tokens, so the law about empty tensors is left out.
    report = hold_function(traced.function, found, shrink=False, skip=("empty",))
    failed = tuple(result.law for result in report.results if result.failed)
    sign = "reversed" if found.kind.inverse else "standard"
    return replace(known, convention=convention(found), sign=sign, verdict=report.verdict, failed=failed)


def _replayed(known: FunctionReport, traced: Traced) -> FunctionReport:
    """Check a function without a known convention against the laws, by calls like its first in the model."""
    try:
        found = replay(traced)
        reports = dict(found.reports())
    except NotUnderstood as reason:
        return replace(known, message=f"its arguments are not understood: {reason}")
    failed = tuple(f"{result.law} ({name})" for name, report in reports.items() for result in report.results
                   if result.failed)  # fmt: skip
    right = all(report.verdict == "right" for report in reports.values())
    message = next((f"{r.law}: {r.message}" for report in reports.values() for r in report.results
                    if r.failed and r.message), "")  # fmt: skip
    return replace(
        known, convention=f"called as in the model, with {found.words}", failed=failed, message=message,
        sign="reversed" if found.reversed else "standard",
        verdict="wrong" if failed else "right" if right else "not judged",
    )  # fmt: skip


def _stated(config: Any) -> tuple[torch.Tensor, ...]:
    """The frequencies that a configuration states for each type of layers; none if it states none."""
    try:
        return tuple(rope.inverse_frequencies for rope in ropes(config).values())
    except (AttributeError, TypeError, ValueError, NotApplicable):
        return ()


def _checked(model: Any) -> torch.nn.Module:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"model: expected the name of an architecture or a torch.nn.Module, got {shown(model)}")
    return model


def tiny_of(model: torch.nn.Module, inputs: Mapping[str, Any] | None = None) -> TinyModel:
    """A model with the arguments of a call, on the CPU and in evaluation mode; `verify_model` describes them.

    Raises:
        TypeError: ``inputs`` is missing, and the model's configuration names no ``vocab_size``.
    """
    if inputs is None:
        config = getattr(model, "config", None)
        text: Any = config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config
        size = getattr(text, "vocab_size", None)
        if not isinstance(size, int):
            raise TypeError("inputs: expected the arguments of a call, as the model's config names no vocab_size")
        tokens = torch.randint(0, size - 1, (2, 9), generator=torch.Generator().manual_seed(1))
        pad = getattr(text, "pad_token_id", None)
        inputs = {"input_ids": tokens if pad is None else tokens + (tokens >= pad)}  # padding may be a vector of zeros
    name = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    model = model.cpu().eval()
    part: Any
    for part in model.modules():
        if hasattr(part, "set_experts_implementation"):
            part.set_experts_implementation("eager")  # the grouped product of experts takes no float64
    return TinyModel(name, model, dict(inputs))
