"""Hold a model to the laws in a new process, and collect the findings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ropelab.conformance.models.attention_laws import ModelResult
from ropelab.conformance.models.verify_model import FunctionReport, ModelReport
from ropelab.conformance.process import START, Limits, run


def hold_model_apart(target: str, limits: Limits, tell: Callable[[str], object] = lambda begun: None) -> ModelReport:
    """Import or make a model and hold it to laws, in a new process. The output of the model goes to stderr.

    Args:
        target: the name of an architecture of Transformers, or ``"package.module:name"`` of a model, or of a function
            without arguments that returns a model.
        limits: the limits of import, calls and laws together.
        tell: called about every half second with the step that has begun.

    Raises:
        OSError: the process could not be started.
    """
    done = run("verify-model", {"target": target}, limits, lambda notes: tell(dict(notes).get("begun", START)))
    found: dict[str, Any] = {"architecture": target, "model": "", "functions": [], "laws": []}
    for kind, value in done.notes:
        if kind == "model":
            found = value
        elif kind == "function":
            found["functions"].append(value)
        elif kind == "refused":
            found["message"] = value
    if not any(kind in ("done", "refused") for kind, _ in done.notes):
        found["stopped"] = done.ended
    functions = (FunctionReport(**f | {"failed": tuple(f["failed"])}) for f in found.pop("functions"))
    laws = (ModelResult(**law) for law in found.pop("laws"))
    return ModelReport(**found, functions=tuple(functions), laws=tuple(laws))
