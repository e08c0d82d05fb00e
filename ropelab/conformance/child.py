"""This file runs in the new process: it holds a function to the laws, and leaves notes for the parent.

The notes are lines of a file. The process opens the file anew for each line, so that a function that closes, redirects
or fills a stream cannot disturb them. Each line carries a key that the function does not know.
"""

from __future__ import annotations

import ctypes
import importlib
import io
import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from ropelab.conformance.declared import DTYPES, check_device, declare
from ropelab.conformance.identify.identification import SECONDS
from ropelab.conformance.report import diagnosis, identification
from ropelab.conformance.result import Result
from ropelab.conformance.surroundings import Surroundings
from ropelab.conformance.verify import check_function, judge, measure
from ropelab.conformance.words import failure

REQUEST, NOTES = "request.json", "notes"
_end_process = os._exit  # kept here, because the function may replace os._exit


class Unusable(Exception):
    """The function cannot be imported or called; the message says why, in one line."""


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

    def write(self, kind: str, value: Any) -> None:
        """Append a note. A process that the function forked from this process ends here instead."""
        if os.getpid() != self._process:
            _end_process(1)
        line = json.dumps({"key": self._key, "kind": kind, "value": value}, ensure_ascii=False)
        with open(self._path, "ab") as file:
            file.write(f"{line}\n".encode("utf-8", "replace"))  # a message may contain half of a surrogate pair

    def result(self, result: Result) -> None:
        """Append the result of a law, in numbers and, if the law does not hold, in words."""
        self.write("result", result.as_dict() | {"words": failure(result) if result.failed else ""})


def main(folder: str) -> None:
    """Carry out the request in ``folder``, leave notes there, and end the process.

    Args:
        folder: the folder with the file ``REQUEST``; the notes are in its file ``NOTES``.
    """
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
        traceback.print_exc()  # an error of this library: the parent finds no report and says so
    finally:
        _end_process(0)  # at once: Python's own exit would wait for threads of the function


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
    if report.failed and not declaration.writes_cache:  # `measure` describes rotations
        # The report is complete. A function that hangs now ends the process soon, not at the time limit of the run.
        watchdog = threading.Timer(4 * SECONDS, _end_process, (0,))
        watchdog.daemon = True
        watchdog.start()
        found = measure(function, declaration, surroundings)
        notes.write("identification", {"found": found.as_dict(), "words": identification(found)})


def _load(target: str) -> Any:
    """Return the object that ``module:name`` names, in the working directory or on the path of Python."""
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
        raise Unusable(f"{wanted} (its import raised {_named(error)})") from None
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
    """On Linux, ask the system to kill this process when its parent ends for any reason."""
    if sys.platform == "linux":
        set_signal_of_parents_death = 1
        ctypes.CDLL(None).prctl(set_signal_of_parents_death, signal.SIGKILL)
