"""Check a function, a model or a target in a new process, and collect the findings."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ropelab.command import summary
from ropelab.command.markdown import markdown
from ropelab.command.process import START, UNFINISHED, Limits, run


@dataclass
class ProcessEnd:
    """The findings about a function after its process has ended.

    Attributes:
        results: law -> `Result.as_dict`, with the key ``words`` added: the failure in words, empty for other laws.
        stopped: why the run ended before the last law; empty if it did not.
        refused: why the function could not be called at all, for a reason outside of the function; empty if it could.
        about: the declaration, name by name.
        laws: the names of the laws that the function is checked against; empty if the run ended before the declaration.
        of: the number of laws that it would be checked against by default.
        signature: the call of its convention.
        screen: `Screen.as_dict`; None for a right function, and if the run ended before it.
    """

    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    stopped: str = ""
    refused: str = ""
    about: dict[str, Any] = field(default_factory=dict)
    laws: list[str] = field(default_factory=list)
    of: int = 0
    signature: str = ""
    screen: dict[str, Any] | None = None

    @property
    def failed(self) -> list[str]:
        """The names of the laws that do not hold."""
        return [result["law"] for result in summary.failed(list(self.results.values()))]

    @property
    def verdict(self) -> str:
        """One of ``VERDICTS``."""
        return summary.verdict(list(self.results.values()), self.stopped or self.refused)

    def as_dict(self) -> dict[str, Any]:
        """Return the findings in the format of `Report.as_dict`."""
        results = [{key: value for key, value in result.items() if key != "words"} for result in self.results.values()]
        return summary.as_dict(self.about, results, self.stopped or self.refused, self.screen)

    def to_json(self) -> str:
        """Return `as_dict` as JSON."""
        return json.dumps(self.as_dict(), indent=1)

    def to_markdown(self) -> str:
        """Return the findings as a text for an issue or a comment on a pull request."""
        return markdown(self.as_dict())


def hold_apart(
    target: str,
    declared: dict[str, Any],
    limits: Limits,
    tell: Callable[[str, int, int], object] = lambda begun, held, asked: None,
    broke: Callable[[str], object] = lambda words: None,
) -> ProcessEnd:
    """Import a function and check it against the laws, in a new process. The output of the function goes to stderr.

    Args:
        target: ``"package.module:function"``.
        declared: the arguments of `declare`, with the name of the dtype; the convention may be None, to be guessed.
        limits: the limits of import and laws together.
        tell: called about every half second with the step that has begun, the number of laws with a result and the
            number of laws, which is 0 before the declaration.
        broke: called once, with the first law that does not hold and its counterexample, in words.

    Raises:
        OSError: the process could not be started.
    """

    told: list[str] = []

    def tell_of_notes(notes: list[tuple[str, Any]]) -> None:
        results = {value["law"]: value for kind, value in notes if kind == "result"}
        broken = [result for result in results.values() if result.get("status") in ("fail", "error")]
        if broken and not told:
            told.append(broken[0]["law"])
            broke(broken[0]["words"])
        said = dict(notes)
        tell(said.get("begun", START), len(results), len(said["declared"]["laws"]) if "declared" in said else 0)

    done = run("verify", {"target": target, "declared": declared}, limits, tell_of_notes)
    outcome = ProcessEnd(about={"function": target, **declared})
    complete = False
    for kind, value in done.notes:
        if kind == "result":
            outcome.results[value["law"]] = value
        elif kind == "declared":
            outcome.about["convention"] = value["convention"]
            outcome.laws, outcome.of, outcome.signature = value["laws"], value["of"], value["signature"]
        elif kind == "refused":
            outcome.refused = value
        elif kind == "screen":
            outcome.screen = value
        complete = kind == "done" and outcome.results.keys() == set(outcome.laws)
    if not complete and not outcome.refused:
        outcome.stopped = done.ended
    return outcome


def report_apart(
    task: str, arguments: dict[str, Any], limits: Limits, tell: Callable[[str], object] = lambda begun: None
) -> dict[str, dict[str, Any]]:
    """Carry out another task in a new process: name -> the last report that it left of a model or configuration.

    A report has its ``verdict``, itself as ``report`` for JSON, and in ``words`` and in a ``line``. The output of the
    code under test goes to stderr.

    Args:
        task, arguments, limits: as for `run`.
        tell: called about every half second with the step that has begun.

    Raises:
        OSError: the process could not be started, or ended before its first report.
    """
    done = run(task, arguments, limits, lambda notes: tell(dict(notes).get("begun", START)))
    found = {value["name"]: value for kind, value in done.notes if kind == "report"}
    if not found:
        raise OSError(done.ended)
    why = json.dumps(dict(done.notes).get("refused", done.ended))[1:-1]
    return json.loads(json.dumps(found).replace(UNFINISHED, why))
