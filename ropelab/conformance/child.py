"""Carry out a task in the new process, and leave notes for the parent.

The notes are lines of a file. The process opens the file anew for each line, so that a function that closes, redirects
or fills a stream cannot disturb them. Each line carries a key that the function does not know.
"""

from __future__ import annotations

import importlib
import inspect
import io
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ropelab.arguments import shown
from ropelab.command.process import NOTES, REQUEST, UNFINISHED
from ropelab.conformance.cache import CACHE_CONVENTIONS
from ropelab.conformance.conventions import CONVENTIONS
from ropelab.conformance.declared import DTYPES, Declaration, check_device, declare, laws_of
from ropelab.conformance.meant import conventions_of
from ropelab.conformance.result import Result
from ropelab.conformance.surroundings import Surroundings
from ropelab.conformance.verify import check_function, judge
from ropelab.conformance.words import failure, said
from ropelab.foreign import did_you_mean

KNOWN: dict[str, Any] = CONVENTIONS | CACHE_CONVENTIONS
LIBRARY = str(Path(__file__).parents[1])
SKIPPED = (LIBRARY, importlib.__file__, "<frozen ")
"""The beginnings of the names of files whose frames a traceback of foreign code leaves out."""
_end_process = os._exit  # kept here, because the function may replace os._exit


class Unusable(Exception):
    """The target cannot be imported or called; the message says why, in one line."""


class Stream(io.TextIOWrapper):
    """A standard stream on a copy of the descriptor 2, so that torch can print even after the function closed it."""

    def __init__(self):
        super().__init__(os.fdopen(os.dup(2), "wb"), "utf-8", "backslashreplace", line_buffering=True)

    def close(self) -> None:
        """Do nothing: the stream stays open."""


class Notes:
    """The notes for the parent, a line of JSON each."""

    def __init__(self, path: Path, key: str):
        self._path, self._key, self._process = path, key, os.getpid()

    def write(self, kind: str, value: Any = None) -> None:
        """Append a note. A process that the function forked from this process ends here instead."""
        if os.getpid() != self._process:
            _end_process(1)
        line = json.dumps({"key": self._key, "kind": kind, "value": value}, ensure_ascii=False)
        with open(self._path, "ab") as file:
            file.write(f"{line}\n".encode("utf-8", "replace"))  # a message may contain half of a surrogate pair

    def begun(self, step: str) -> None:
        """Append the name of the step that begins."""
        self.write("begun", step)

    def result(self, result: Result) -> None:
        """Append the result of a law, in numbers and, if the law does not hold, in words."""
        self.write("result", result.as_dict() | {"words": failure(result) if result.failed else ""})

    def report(self, name: str, report: Any) -> None:
        """Append a report on a model or a configuration, for JSON, in words and in a line."""
        line = ": ".join((name, report.verdict, report.message or "; ".join(map(str, getattr(report, "findings", ())))))
        about = {"verdict": report.verdict, "report": report.as_dict(), "words": str(report)}
        self.write("report", {"name": name, "line": line.removesuffix(": "), **about})


def main(folder: str) -> None:
    """Carry out the request in ``folder``, leave notes there, and end the process.

    Args:
        folder: the folder with the file ``REQUEST``; the notes are in its file ``NOTES``.
    """
    sys.stdout, sys.stderr = Stream(), Stream()
    warnings.simplefilter("ignore")
    request = json.loads(Path(folder, REQUEST).read_text(encoding="utf-8"))
    notes = Notes(Path(folder, NOTES), request["key"])
    try:
        TASKS[request["task"]](notes, **request["arguments"])
        notes.write("done")
    except Unusable as reason:
        notes.write("refused", str(reason))
    except BaseException as ended:
        if isinstance(ended, Exception):  # an error of this library
            traceback.print_exc()
        notes.write("stopped", f"{said(ended)} was raised")
    finally:
        _end_process(0)  # at once: Python's own exit would wait for threads of the function


def hold(notes: Notes, target: str, declared: dict[str, Any]) -> None:
    """Import a function, and check it against the laws; the arguments are those of `hold_apart`."""
    device = declared.get("device", "cpu")
    if (convention := declared["convention"]) is not None:
        declaration = _declared(declared, convention)
    notes.begun(f"a first use of the device {device}")
    try:
        check_device(device)
    except ValueError as reason:
        raise Unusable(str(reason)) from None
    notes.begun(f"the import of {target}")
    surroundings = Surroundings()
    with surroundings.importing():
        function = load(target)
    try:
        check_function(function, convention or "module")
    except TypeError as reason:
        raise Unusable(f"target: expected package.module:function, got {target} ({reason})") from None
    with surroundings.ours():
        if convention is None:
            declaration = _declared(declared, _guessed(function))
    laws, every = declaration.laws, laws_of(declaration.convention).values()
    about = {"convention": declaration.convention, "signature": KNOWN[declaration.convention].signature}
    about |= {"laws": [law.name for law in laws], "of": sum(law.by_default for law in every)}
    notes.write("declared", about)
    report = judge(function, declaration, surroundings, begun=notes.begun, found=notes.result, target=target)
    notes.begun("the measurement of the function")
    if report.screen is not None:
        notes.write("screen", report.screen.as_dict())


def _declared(declared: dict[str, Any], convention: str) -> Declaration:
    try:
        return declare(**declared | {"convention": convention, "dtype": DTYPES[declared["dtype"]]})
    except ValueError as reason:
        raise Unusable(str(reason)) from None


def _guessed(function: Any) -> str:
    """Return the one convention that the parameters of a function fit."""
    fitting, near = conventions_of(function, KNOWN)
    if len(fitting) == 1:
        return fitting[0]
    which = f"the parameters fit {' and '.join(fitting)}" if fitting else "the parameters fit none"
    listed = "".join(f"\n  {name}: {KNOWN[name].signature}" for name in fitting or near)
    raise Unusable(f"convention: expected --convention, because {which}{'; the nearest:' * (not fitting)}{listed}")


def hold_model(notes: Notes, target: str) -> None:
    """Import or make a model, and check it against the laws.

    Args:
        notes: the notes for the parent.
        target: the name of an architecture of Transformers, or ``"package.module:name"`` of a model, or of a function
            without arguments that returns a model.
    """
    from torch.nn import Module

    from ropelab.conformance.models.trace import Traced
    from ropelab.conformance.models.verify_model import (
        FunctionReport,
        ModelReport,
        function_report,
        tiny_of,
        verify_model,
    )

    notes.report(target, ModelReport(target, "", stopped=UNFINISHED))
    functions: list[FunctionReport] = []
    model: Any = target
    if ":" in target:
        notes.begun(f"the import of {target}")
        model = load(target)
        if not isinstance(model, Module):
            wanted = f"target: expected a model, or a function that returns one, got {target}"
            notes.begun(f"a call of {target}")
            model = _foreign(wanted, model)
            if not isinstance(model, Module):
                raise Unusable(f"{wanted} ({shown(model)})")

    def judged(traced: Traced) -> FunctionReport:
        notes.begun(f"the laws of {traced.name}")
        functions.append(function_report(traced))
        notes.report(target, ModelReport(target, "", tuple(functions), stopped=UNFINISHED))
        notes.begun("the laws of the attention")
        return functions[-1]

    notes.begun("a call of the model")
    # The process is the model's own. A copy would leave functions that somebody put into it with the original.
    tiny = model if isinstance(model, str) else _foreign("the model cannot be judged", tiny_of, model)
    notes.report(target, _foreign("the model cannot be judged", verify_model, tiny, laws_of=judged))


def hold_config(notes: Notes, configs: list[str], against: str, layer_type: str | None) -> None:
    """Import or read a target, and check it against configurations.

    Args:
        notes: the notes for the parent.
        configs, layer_type: as for `verify_config`.
        against: ``"package.module:name"`` or a file.
    """
    from ropelab.conformance.configuration import ConfigReport, verify_config
    from ropelab.conformance.configuration.descriptions import is_file, read, read_json
    from ropelab.conformance.configuration.measured import NotMeasured
    from ropelab.conformance.configuration.measured import load as load_tensors

    for config in configs:
        notes.report(config, ConfigReport(against, message=UNFINISHED))
    notes.begun(f"the import of {against}")
    path = Path(against)
    target: Any
    if is_file(against):
        target = (
            _foreign("", read_json, "against", path) if path.suffix == ".json" else _foreign("", load_tensors, path)
        )
    else:
        target = load(against, "against")
    if callable(target) and not _takes_arguments(target):
        notes.begun(f"a call of {against}")
        target = _foreign(f"against: expected a target, or a function that returns one, got {against}", target)

    def compared(config: str, stated: Any) -> ConfigReport:
        try:
            return verify_config(stated, target, layer_type=layer_type, name=against)
        except NotMeasured:
            raise
        except (TypeError, ValueError) as error:
            raise ValueError(f"{config}: {error}") from None

    def report_on(config: str) -> ConfigReport:
        if ":" in config and not is_file(config):
            stated = load(config, "config")
            if callable(stated):
                wanted = f"config: expected a configuration, or a function that returns one, got {config}"
                stated = _foreign(wanted, stated)
        else:
            stated = _foreign("", read, config)
        return _foreign("", compared, config, stated)

    for config in configs:
        notes.begun(f"the comparison with {config}")
        try:
            report = report_on(config)
        except Unusable as reason:
            report = ConfigReport(against, message=str(reason))
        notes.report(config, report)


def _takes_arguments(function: Any) -> bool:
    """Return whether a function, or the forward of a module, has a parameter without a default."""
    try:
        called = function if inspect.isclass(function) else getattr(function, "forward", function)
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        return True
    open_kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return any(p.default is p.empty and p.kind not in open_kinds for p in parameters)


TASKS: dict[str, Callable[..., None]] = {"verify": hold, "verify-model": hold_model, "verify-config": hold_config}


def load(target: str, argument: str = "target") -> Any:
    """Return the object that ``module:name`` names, in the working directory or on the path of Python."""
    module_name, _, path = target.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    wanted = f"{argument}: expected package.module:name, got {target}"
    if not module_name or not path or module_name.startswith("."):
        raise Unusable(wanted)
    try:
        found = importlib.import_module(module_name)
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # a module may raise anything
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise Unusable(f"{wanted} ({error})") from None
        _print_frames(error)
        raise Unusable(f"{wanted} (its import raised {said(error)})") from None
    try:
        for name in path.split("."):
            found = getattr(found, name)
    except AttributeError as error:
        near = _inside(found, name) or did_you_mean(name, dir(found))
        raise Unusable(f"{wanted} ({error}{near})") from None
    return found


def _inside(module: Any, name: str) -> str:
    """Return how to reach a function of this name that a function of a module makes; empty if there is none."""
    for outer, function in inspect.getmembers(module, inspect.isfunction):
        if any(inspect.iscode(made) and made.co_name == name for made in function.__code__.co_consts):
            passed = "*arguments, **options"
            return f"; {outer} makes it, so write def {name}({passed}): return {outer}(...)({passed})"
    return ""


def _foreign(wanted: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Return the result of a call that runs foreign code, whose exceptions become the reason of `Unusable`.

    An exception of this library needs no ``wanted``: its message says what was expected.
    """
    try:
        return function(*arguments, **options)
    except Exception as error:
        ours = _raised_here(error) and isinstance(error, (TypeError, ValueError))
        if error.__cause__ is not None or not ours:
            _print_frames(error.__cause__ or error)
        raise Unusable(str(error) if ours else f"{wanted} ({said(error)})") from None


def _raised_here(error: BaseException) -> bool:
    """Return whether a frame of this library raised an exception."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(LIBRARY)


def _print_frames(error: BaseException) -> None:
    """Print the traceback of an exception; without frames of this library, if foreign code raised it."""
    found = traceback.TracebackException.from_exception(error)
    if not _raised_here(error):
        found.__cause__ = found.__context__ = None
        foreign = (frame for frame in found.stack if not frame.filename.startswith(SKIPPED))
        found.stack = traceback.StackSummary.from_list(foreign)
    print("".join(found.format()), end="", file=sys.stderr)
