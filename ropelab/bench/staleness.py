"""Say what has changed since a record was measured: a kernel that it launched, a peer that it timed, or its protocol.

A record knows the code that its numbers depend on. All other code may change, and the record stays what it is. A table
that is no times has no protocol: a test on a GPU wrote it, and it is as old as its run.

A protocol is two numbers of ``data/protocols.toml``, of the timer and of the study: whoever changes how is measured
raises one, and its records become old. The hash of the measuring code stands beside each number, and a test fails where
the code has another one, until `ropelab.study.engine.measuring_code` has written it.
"""

import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ropelab.bench import fetch_peers, reached

PROTOCOLS = Path(__file__).resolve().parents[2] / "data" / "protocols.toml"
TIMER = "timer"
_KERNELS = "kernels."


@cache
def protocols() -> Mapping[str, Any]:
    """The tables ``protocol`` (``"timer"`` or study -> number and code) and ``same_code`` (`reached.changed`)."""
    return tomllib.loads(PROTOCOLS.read_text(encoding="utf-8"))


def numbers(study: str, known: Mapping[str, Any] | None = None) -> dict[str, int]:
    """The numbers that a record of the study notes; ``known`` is the table ``protocol``, by default today's."""
    known = protocols()["protocol"] if known is None else known
    return {what: known.get(name, {}).get("number", 1) for what, name in ((TIMER, TIMER), ("study", study))}


def stale(provenance: Mapping[str, Any]) -> tuple[str, ...]:
    """What has changed: functions of kernels by name, then peers, then the timer and the study with their numbers.

    A peer has changed where ``data/peers.toml`` lists its package and no longer this version. Packages that the list
    does not have came from the environment, and are not compared.
    """
    if not provenance["protocol"]:
        return ()
    kernels = reached.changed(provenance["kernels"], protocols()["same_code"])
    listed = fetch_peers.versions()
    gone = [name for name in provenance["peers"] if name not in listed.get(name.partition(" ")[0], {name})]
    today = numbers(provenance["study"])
    raised = [
        f"the {name} ({n}, today {today[name]})" for name, n in provenance["protocol"].items() if n != today[name]
    ]
    return (*(f"{_KERNELS}{name}" for name in kernels), *gone, *raised)


def of_kernels(changed: Iterable[str]) -> list[str]:
    """The names of `stale` that are functions of kernels."""
    return [name for name in changed if name.startswith(_KERNELS)]
