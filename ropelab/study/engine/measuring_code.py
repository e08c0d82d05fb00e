"""Hash the code that measures, and write the hashes into ``data/protocols.toml`` beside the numbers.

python -m ropelab.study.engine.measuring_code dense lengths     # for these studies, as their code is today
"""

import json
import sys
from collections.abc import Mapping
from typing import Any

from ropelab.bench import protocols, whole_file
from ropelab.bench.code_hash import DIGITS, code_hash
from ropelab.bench.records import ROOT
from ropelab.study.engine.registered import all_studies

_TIMER = ("bench/timing.py", "bench/workloads.py", "bench/copies.py")
"""The code that times every study, and makes its inputs."""


def hashes() -> dict[str, str]:
    """``"timer"`` and each study of times -> the hash of its code of today."""
    found = {protocols.TIMER: [ROOT / "ropelab" / name for name in _TIMER]}
    for name, study in sorted(all_studies().items()):
        if study.timed:
            found[name] = [ROOT / f"{module.replace('.', '/')}.py" for module in study.modules]
    return {name: code_hash(paths, ROOT)[:DIGITS] for name, paths in found.items()}


def write(*names: str) -> None:
    """Write the hashes of today's code for these studies, and the number 1 for a study that has none."""
    known, today = dict(protocols.read()["protocol"]), hashes()
    if unknown := set(names) - today.keys():
        raise SystemExit(f"protocols: expected {protocols.TIMER} or studies, got {', '.join(sorted(unknown))}")
    for name in names:
        known[name] = {"number": known.get(name, {}).get("number", 1), "code": today[name]}
    _written(known, protocols.same_code())


def add_same_code(hashes: Mapping[str, tuple[str, str]]) -> None:
    """Add functions whose machine code is as before -> their hashes before and today; `tests.compile.same_code`.

    Where today's code had other machine code than the hashes that are listed, those go.
    """
    same = {name: [*found] for name, found in protocols.same_code().items()}
    for name, (before, today) in hashes.items():
        known = same.get(name, [])
        same[name] = [*dict.fromkeys((*(known if before in known else [before]), today))]
    _written(protocols.read()["protocol"], same)


def _written(known: Mapping[str, Any], same: Mapping[str, list[str]]) -> None:
    head, mark, _ = protocols.LIST.read_text(encoding="utf-8").partition("[protocol]\n")
    order = sorted(known, key=lambda name: (name != protocols.TIMER, name))
    lines = [f'{name} = {{ number = {known[name]["number"]}, code = "{known[name]["code"]}" }}\n' for name in order]
    equal = [f'"{name}" = {json.dumps(found)}\n' for name, found in sorted(same.items())]
    whole_file.write(protocols.LIST, f"{head}{mark}{''.join(lines)}\n[same_code]\n{''.join(equal)}")
    protocols.read.cache_clear()


if __name__ == "__main__":
    write(*sys.argv[1:])
