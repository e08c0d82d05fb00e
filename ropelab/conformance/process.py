"""This file holds a function to the laws in a new process, which the function may end, crash or block."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ropelab.conformance.child import NOTES, REQUEST
from ropelab.conformance.markdown import markdown
from ropelab.conformance.report import as_dict, verdict

START = "the start of Python"
"""The step of a run before the first that its process notes."""
PAUSE = 0.5
# With -P no file of the working directory can take the place of a standard module.
_COMMAND = ("-P", "-c", "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); folder = sys.argv.pop(); "
            "from ropelab.conformance.child import main; main(folder)")  # fmt: skip


@dataclass
class Outcome:
    """The findings about a function after its process has ended.

    Attributes:
        results: law -> `Result.as_dict`, with the key ``words`` added: the failure in words, empty for other laws.
        stopped: why the run ended before the last law; empty if it did not.
        refused: why the function could not be called at all, for a reason outside of the function; empty if it could.
        about: the declaration, name by name.
        diagnosis: a line for each fault that explains the failures.
        diagnosis_words: the diagnosis as the report prints it; empty if the run ended before it.
        identification: `Identification.as_dict`; None for a right function, and if the run ended before it.
        identification_words: the identification as the report prints it; empty if there is none.
    """

    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    stopped: str = ""
    refused: str = ""
    about: dict[str, Any] = field(default_factory=dict)
    diagnosis: list[str] = field(default_factory=list)
    diagnosis_words: str = ""
    identification: dict[str, Any] | None = None
    identification_words: str = ""

    @property
    def failed(self) -> list[str]:
        """The names of the laws that do not hold."""
        return [law for law, result in self.results.items() if result["status"] in ("fail", "error")]

    @property
    def verdict(self) -> str:
        """One of ``VERDICTS``. A run that ended early can prove a function wrong, but not right."""
        compared = 0 if self.stopped or self.refused else sum(result["compared"] for result in self.results.values())
        return verdict(bool(self.failed), compared)

    def as_dict(self) -> dict[str, Any]:
        """Return the findings in the format of `Report.as_dict`."""
        stopped = self.stopped or self.refused
        results = [{key: value for key, value in result.items() if key != "words"} for result in self.results.values()]
        return as_dict(self.verdict, self.about, results, self.diagnosis, stopped, self.identification)

    def to_json(self) -> str:
        """Return `as_dict` as JSON."""
        return json.dumps(self.as_dict(), indent=1)

    def to_markdown(self) -> str:
        """Return the findings as a text for an issue or a comment on a pull request."""
        return markdown(self.as_dict())


def hold_apart(
    target: str,
    declared: dict[str, Any],
    law_names: list[str],
    timeout: float,
    tell: Callable[[str, int], object] = lambda begun, held: None,
) -> Outcome:
    """Import a function and hold it to laws, in a new process. The output of the function goes to stderr.

    Args:
        target: ``"package.module:function"``.
        declared: the arguments of `declare`, with the name of the dtype.
        law_names: the names of the laws of that declaration; the run is complete if all of them have a result.
        timeout: the seconds for import, laws and diagnosis together.
        tell: called about every `PAUSE` seconds with the step that has begun and the number of laws with a result.

    Raises:
        OSError: the process could not be started.
    """
    key = secrets.token_hex()
    with TemporaryDirectory(prefix="ropelab-") as folder:
        request = {"key": key, "target": target, "declared": declared}
        Path(folder, REQUEST).write_text(json.dumps(request), encoding="utf-8")

        def tell_of_notes() -> None:
            begun, held = START, 0
            for kind, value in _read(Path(folder, NOTES), key):
                begun = value if kind == "begun" else begun
                held += kind == "result"
            tell(begun, held)

        ended = _run([sys.executable, *_COMMAND, folder, json.dumps(sys.path)], timeout, tell_of_notes)
        notes = list(_read(Path(folder, NOTES), key))
    outcome, begun, reported = Outcome(about={"function": target, **declared}), START, False
    for kind, value in notes:
        if kind == "begun":
            begun = value
        elif kind == "result":
            outcome.results[value["law"]] = value
        elif kind == "refused":
            outcome.refused = value
        elif kind == "stopped":
            ended = value
        elif kind == "report":
            reported = outcome.results.keys() == set(law_names)
            outcome.diagnosis, outcome.diagnosis_words = value["diagnosis"], value["words"]
        elif kind == "identification":
            outcome.identification, outcome.identification_words = value["found"], value["words"]
    if not reported and not outcome.refused:
        outcome.stopped = f"{ended} during {begun}"
    return outcome


def _run(command: list[str], timeout: float, tell: Callable[[], None]) -> str:
    """Run a command, and return in words how it ended; call ``tell`` while it runs."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)
    ends, code = time.monotonic() + timeout, None
    try:
        while code is None:
            try:
                code = process.wait(max(0.0, min(PAUSE, ends - time.monotonic())))
            except subprocess.TimeoutExpired:
                if time.monotonic() >= ends:
                    return f"the time limit of {timeout:g} s was reached"
                tell()
    finally:
        if process.poll() is None:
            _kill(process)
    if code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"the process was ended by {names.get(-code, f'signal {-code}')}"
    return f"the process ended with exit code {code}"


def _kill(process: subprocess.Popen) -> None:
    """Kill the process and, where the system has process groups, every process that it started."""
    if hasattr(os, "killpg"):
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.wait()


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
