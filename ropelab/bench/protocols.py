"""The numbers of the timer and of each study: whoever changes how is measured raises one, and its records become old.

``data/protocols.toml`` has the hash of the measuring code beside each number. A test fails where the code has another
hash, and somebody decides: raise the number (records become old), or write the new hash (the numbers stay as they are).

    python -m ropelab.bench.protocols dense lengths     # writes the hashes of today's code for these studies
"""

import json
import sys
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from ropelab.bench.code_hash import DIGITS, code_hash

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "data" / "protocols.toml"
TIMER = "timer"
_TIMER = ("bench/timing.py", "bench/workloads.py", "bench/copies.py")
"""The code that times every study, and makes its inputs."""


@cache
def read() -> Mapping[str, Any]:
    return tomllib.loads(LIST.read_text(encoding="utf-8"))


def numbers(study: str) -> dict[str, int]:
    """The numbers that a record of the study notes."""
    known = read()["protocol"]
    return {TIMER: known[TIMER]["number"], "study": known.get(study, {}).get("number", 1)}


def same_code() -> Mapping[str, list[str]]:
    """The name of a function of a kernel -> the hashes of code that compiles to the machine code of today's."""
    return read().get("same_code", {})


def changed(study: str, noted: Mapping[str, int]) -> list[str]:
    """The words for each number that is another one today, as ``"the timer (1, today 2)"``."""
    today = numbers(study)
    return [f"the {name} ({number}, today {today[name]})" for name, number in noted.items() if number != today[name]]


def hashes() -> dict[str, str]:
    """``"timer"`` and each study -> the hash of its code of today."""
    from ropelab.study.engine.registered import all_studies

    found = {TIMER: [ROOT / "ropelab" / name for name in _TIMER]}
    for name, study in sorted(all_studies().items()):
        found[name] = [ROOT / f"{module.replace('.', '/')}.py" for module in study.modules]
    return {name: code_hash(paths, ROOT)[:DIGITS] for name, paths in found.items()}


def write(*names: str) -> None:
    """Write the hashes of today's code for these studies, and the number 1 for a study that has none."""
    known, today = dict(read()["protocol"]), hashes()
    if unknown := set(names) - today.keys():
        raise SystemExit(f"protocols: expected {TIMER} or studies, got {', '.join(sorted(unknown))}")
    for name in names:
        known[name] = {"number": known.get(name, {}).get("number", 1), "code": today[name]}
    _written(known, same_code())


def add_same_code(hashes: Mapping[str, str]) -> None:
    """Add an earlier hash of functions whose machine code is today's: ``python -m tests.same_code`` finds them."""
    same = {name: [*found] for name, found in same_code().items()}
    for name, digest in hashes.items():
        same[name] = sorted({*same.get(name, ()), digest})
    _written(read()["protocol"], same)


def _written(known: Mapping[str, Any], same: Mapping[str, list[str]]) -> None:
    head, mark, _ = LIST.read_text(encoding="utf-8").partition("[protocol]\n")
    order = sorted(known, key=lambda name: (name != TIMER, name))
    lines = [f'{name} = {{ number = {known[name]["number"]}, code = "{known[name]["code"]}" }}\n' for name in order]
    equal = [f'"{name}" = {json.dumps(found)}\n' for name, found in sorted(same.items())]
    LIST.write_text(f"{head}{mark}{''.join(lines)}\n[same_code]\n{''.join(equal)}", encoding="utf-8")
    read.cache_clear()


if __name__ == "__main__":
    write(*sys.argv[1:])
