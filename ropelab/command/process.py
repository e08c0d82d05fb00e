"""Run a task of `conformance.child` in a new process, which the code under test may end, crash or block."""

from __future__ import annotations

import json
import math
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ropelab.command import guard

REQUEST, NOTES = "request.json", "notes"
"""The files of a task."""
UNFINISHED = "(the run ended)"
"""What a report says in place of the reason why its run ended early, until the run has ended."""
START = "the start of Python"
"""The step of a run before the first that its process notes."""
PAUSE = 0.5
LAST_SECONDS = 10.0
"""The time in which the guard has to end all processes. One that the kernel holds, in a driver, cannot be ended."""
# With -P no file of the working directory can take the place of a standard module.
_COMMAND = ("-P", "-c", "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); folder = sys.argv.pop(); "
            "from ropelab.conformance.child import main; main(folder)")  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """The limits of a run.

    Attributes:
        seconds: the time from the start of the process to its end.
        gibibytes: the memory of the process and of all that it starts, in 2**30 bytes. Only Linux has this limit.

    Raises:
        ValueError: a limit is not a finite number above 0.
    """

    seconds: float = 300.0
    gibibytes: float = 8.0

    def __post_init__(self):
        for name, value, unit in (("timeout", self.seconds, "seconds"), ("memory", self.gibibytes, "GiB")):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name}: expected a number of {unit} above 0, got {value}")


@dataclass(frozen=True)
class Run:
    """A run that has ended.

    Attributes:
        notes: the kind and the value of each note that the process left.
        ended: how the process ended, and during which step.
    """

    notes: list[tuple[str, Any]]
    ended: str


def run(task: str, arguments: dict[str, Any], limits: Limits, tell: Callable[[list[tuple[str, Any]]], object]) -> Run:
    """Carry out a task in a new process. Its output goes to stderr, and nothing that it started outlives it.

    Args:
        task: a name of `child.TASKS`.
        arguments: the arguments of the task, for JSON.
        limits: the limits of the run.
        tell: called about every `PAUSE` seconds with the notes so far.

    Raises:
        OSError: the process could not be started.
    """
    key = secrets.token_hex()
    with TemporaryDirectory(prefix="ropelab-", ignore_cleanup_errors=True) as folder:
        request = {"key": key, "task": task, "arguments": arguments}
        Path(folder, REQUEST).write_text(json.dumps(request), encoding="utf-8")
        command = [sys.executable, *_COMMAND, folder, json.dumps(sys.path)]
        ended = _run(command, limits, lambda: tell(list(_read(Path(folder, NOTES), key))))
        notes = list(_read(Path(folder, NOTES), key))
    said = dict(notes)  # the last note of each kind
    return Run(notes, f"{said.get('stopped', ended)} during {said.get('begun', START)}")


def _run(command: list[str], limits: Limits, tell: Callable[[], object]) -> str:
    """Run a command under the guard, and return in words how it ended; call ``tell`` while it runs."""
    guarded = [sys.executable, "-I", guard.__file__, str(int(limits.gibibytes * 2**30)), *command]
    ends = time.monotonic() + limits.seconds
    with subprocess.Popen(guarded, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        try:
            while (rest := ends - time.monotonic()) > 0:
                try:
                    process.wait(min(PAUSE, rest))
                    return _ended(process.stdout.read(), limits)
                except subprocess.TimeoutExpired:
                    tell()
            return f"the time limit of {limits.seconds:g} s was reached"
        finally:
            _stop(process)


def _stop(process: subprocess.Popen) -> None:
    """Let the guard end all that it started: it does so when its input ends."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        process.wait(LAST_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def _ended(said: bytes, limits: Limits) -> str:
    """Return in words how the command ended, from the output of the guard."""
    try:
        found = json.loads(said)
    except ValueError:
        return "the guard of the process was ended"
    if found["full"]:
        return f"the memory limit of {limits.gibibytes:g} GiB was reached"
    if (code := found["code"]) < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"the process was ended by {names.get(-code, f'signal {-code}')}"
    return f"the process ended with exit code {code}"


def _read(path: Path, key: str) -> Iterator[tuple[str, Any]]:
    """Yield kind and value of each note that has the key; all other text in the file is ignored."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
    for line in text.split("\n"):
        try:
            note = json.loads(line)
        except ValueError:
            continue
        if isinstance(note, dict) and note.get("key") == key:
            yield note["kind"], note["value"]
