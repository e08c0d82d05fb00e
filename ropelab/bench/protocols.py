"""The numbers of the timer and of each study: whoever changes how is measured raises one, and its records become old.

``data/protocols.toml`` has the hash of the measuring code beside each number. A test fails where the code has another
hash, and somebody decides: raise the number (records become old), or write the new hash (the numbers stay as they are):
`ropelab.study.engine.measuring_code`.
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "data" / "protocols.toml"
TIMER = "timer"


@cache
def read() -> Mapping[str, Any]:
    return tomllib.loads(LIST.read_text(encoding="utf-8"))


def numbers(study: str) -> dict[str, int]:
    """The numbers that a record of the study notes."""
    known = read()["protocol"]
    return {TIMER: known[TIMER]["number"], "study": known.get(study, {}).get("number", 1)}


def same_code() -> Mapping[str, list[str]]:
    """The name of a function of a kernel -> the hashes of code from which the compiler makes one machine code."""
    return read().get("same_code", {})


def changed(study: str, noted: Mapping[str, int]) -> list[str]:
    """The words for each number that is another one today, as ``"the timer (1, today 2)"``."""
    today = numbers(study)
    return [f"the {name} ({number}, today {today[name]})" for name, number in noted.items() if number != today[name]]
