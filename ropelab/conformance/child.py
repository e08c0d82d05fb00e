"""The process in which the command line holds a function to the laws, and nothing else.

It says what it found in a file that it opens for each line anew: no stream that the function closes, redirects or
prints to is involved. Each line carries a key that the function does not know.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from ropelab.conformance.declared import DTYPES, check_device, declare
from ropelab.conformance.report import diagnosis, failure
from ropelab.conformance.result import Result
from ropelab.conformance.surroundings import Surroundings
from ropelab.conformance.verify import check_function, judge

REQUEST, NOTES = "request.json", "notes"
_end_process = os._exit  # the function may replace it


class Unusable(Exception):
    """The function cannot be had; the message says why, in one line."""


class Stream(io.TextIOWrapper):
    """Standard output or error, on a descriptor of its own: torch prints there too, after the function closed it."""

    def __init__(self):
        super().__init__(os.fdopen(os.dup(2), "wb"), "utf-8", "backslashreplace", line_buffering=True)

    def close(self) -> None:
        """Stay open."""


class Notes:
    """What the parent is told, a line of JSON each."""

    def __init__(self, path: Path, key: str):
        self._path, self._key, self._process = path, key, os.getpid()

    def write(self, kind: str, value: Any) -> None:
        """Append a line. A copy of this process that the function made, with ``os.fork``, ends here instead."""
        if os.getpid() != self._process:
            _end_process(1)
        line = json.dumps({"key": self._key, "kind": kind, "value": value}, ensure_ascii=False)
        with open(self._path, "ab") as file:
            file.write(f"{line}\n".encode("utf-8", "replace"))  # a message may have half a surrogate pair

    def result(self, result: Result) -> None:
        """What came of a law, in numbers and in words."""
        self.write("result", result.as_dict() | {"words": failure(result) if result.failed else ""})


def main(folder: str) -> None:
    """Do what the request in ``folder`` says, and leave notes there. Does not return."""
    _die_with_parent()
    sys.stdout, sys.stderr = Stream(), Stream()
    request = json.loads(Path(folder, REQUEST).read_text(encoding="utf-8"))
    notes = Notes(Path(folder, NOTES), request["key"])
    try:
        _hold(notes, request["target"], request["declared"])
    except Unusable as reason:
        notes.write("refused", str(reason))
    except (SystemExit, KeyboardInterrupt) as ended:
        notes.write("stopped", f"the function raised {_named(ended)}")
    except Exception:
        traceback.print_exc()  # an error of ours: the report is missing, and the parent says so
    finally:
        _end_process(0)  # without the rest of Python's end, which threads of the function could hold up


def _hold(notes: Notes, target: str, declared: dict[str, Any]) -> None:
    declaration = declare(**declared | {"dtype": DTYPES[declared["dtype"]]})
    device = declaration.about["device"]
    notes.write("begun", f"a first use of the device {device}")
    try:
        check_device(device)
    except ValueError as reason:
        raise Unusable(str(reason)) from None
    notes.write("begun", f"the import of {target}")
    surroundings = Surroundings()
    with surroundings.importing():
        function = _load(target)
    report = judge(
        function, declaration, surroundings, begun=lambda what: notes.write("begun", what), found=notes.result
    )
    notes.write("report", {"diagnosis": [str(fault) for fault in report.diagnosis], "words": diagnosis(report)})


def _load(target: str) -> Any:
    """The object that ``module:name`` is; modules of the working directory are found."""
    module_name, _, path = target.partition(":")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    wanted = f"target: expected package.module:function, got {target}"
    try:
        found = importlib.import_module(module_name)
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # a module may raise anything
        if isinstance(error, ModuleNotFoundError) and f"{module_name}.".startswith(f"{error.name}."):
            raise Unusable(f"{wanted} ({error})") from None
        traceback.print_exc()
        raise Unusable(f"{wanted}, the import of which raised {_named(error)}") from None
    try:
        for name in path.split("."):
            found = getattr(found, name)
        check_function(found)
    except (AttributeError, TypeError) as error:
        raise Unusable(f"{wanted} ({error})") from None
    return found


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}({', '.join(map(repr, error.args))})"


def _die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, however it does; Linux alone can."""
    if sys.platform == "linux":
        set_signal_of_parents_death = 1
        ctypes.CDLL(None).prctl(set_signal_of_parents_death, signal.SIGKILL)
