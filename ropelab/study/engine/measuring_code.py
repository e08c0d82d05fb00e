"""Hash the code that measures, and write the hashes into ``data/protocols.toml`` beside the numbers.

python -m ropelab.study.engine.measuring_code dense lengths     # for these studies, as their code is today

The code of a study is each function, class and constant that its functions reach in ``bench`` and ``study``, and its
``sources``, as the cells of a chapter. What all studies share, which times calls, makes their inputs and holds their
results to the formula, is the timer's. The adapters that call the peers have hashes of their own, so that an added peer
changes no other. Published code has its own entry in a record, and how work is spread over processes is no part of a
measurement.
"""

import ast
import json
import re
import sys
from collections.abc import Mapping, Sequence
from functools import cache, partial

from ropelab.bench import code_hash, staleness, whole_file
from ropelab.bench.records import ROOT
from ropelab.study.engine.registered import all_studies

_SOURCES = code_hash.of_folder(ROOT / "ropelab")
SHARED = ("bench.timing.", "bench.workloads.", "bench.copies.", "bench.cells.", "bench.operation.", "bench.rotation.")
APART = (
    "bench.peers", "bench.fetch_peers", "bench.packages", "bench.processes", "bench.workers", "bench.side_by_side",
    "bench.in_parts", "bench.compiling", "bench.reached", "bench.replaced", "bench.peer_table",
)  # fmt: skip
ADAPTERS = [path.stem for path in sorted((ROOT / "ropelab" / "bench" / "peers").glob("[!_]*.py"))]


def hashes(read: code_hash.Read = _SOURCES) -> dict[str, str]:
    """``"timer"`` and each study of times -> the hash of its code, as ``read`` gives it."""

    @cache
    def measuring(module: str) -> bytes | None:
        return read(module) if module.startswith(("bench.", "study.")) and not module.startswith(APART) else None

    reached = partial(code_hash.reached, read=measuring, package="ropelab")
    found = {name: reached(study.functions) for name, study in sorted(all_studies().items()) if study.timed}
    timer = reached({name for each in found.values() for name in each if name.startswith(SHARED)})
    own = {name: each.items() - timer.items() for name, each in found.items()}
    for name, study in all_studies().items():
        if study.sources:
            own[name] |= {(part, code_hash.digest(ast.parse(text))) for part, text in study.sources().items()}
    return {name: code_hash.digest(sorted(code)) for name, code in ({staleness.TIMER: timer.items()} | own).items()}


def adapters(read: code_hash.Read = _SOURCES) -> dict[str, str]:
    """The module of each adapter in ``bench.peers`` -> the hash of its code."""
    return {name: code_hash.digest(ast.parse(read(f"bench.peers.{name}") or b"")) for name in ADAPTERS}


def write(*names: str) -> None:
    """Write the hashes of today's code for these studies and adapters, and the number 1 for a study that has none."""
    known, today, called = staleness.protocols()["protocol"], hashes(), adapters()
    if unknown := set(names) - today.keys() - called.keys():
        raise SystemExit(
            f"protocols: expected {staleness.TIMER}, studies or adapters, got {', '.join(sorted(unknown))}"
        )
    _write("adapters", {name: f'"{called[name]}"' for name in names if name in called})
    numbers = {name: known.get(name, {}).get("number", 1) for name in names if name in today}
    _write("protocol", {name: f'{{ number = {number}, code = "{today[name]}" }}' for name, number in numbers.items()})


def add_same_code(hashes: Mapping[str, Sequence[str]]) -> None:
    """Add functions with the same machine code -> their hashes before, and that of today; `tests.compile.same_code`.

    Where today's code had other machine code than the hashes that are listed, those go.
    """
    lines = {}
    for name, (*before, today) in hashes.items():
        known = staleness.protocols()["same_code"].get(name, [])
        same = known if {*before, today} & {*known} else []
        lines[f'"{name}"'] = json.dumps([*dict.fromkeys((*same, *before, today))])
    _write("same_code", lines)


def _write(table: str, lines: Mapping[str, str]) -> None:
    """Replace these lines of a table of the file, or add them at its head."""
    text, head = staleness.PROTOCOLS.read_text(encoding="utf-8"), f"[{table}]\n"
    for name, value in lines.items():
        text, known = re.subn(f"(?m)^{re.escape(name)} = .*$", f"{name} = {value}", text)
        text = text if known else text.replace(head, f"{head}{name} = {value}\n")
    whole_file.write(staleness.PROTOCOLS, text)
    staleness.protocols.cache_clear()


if __name__ == "__main__":
    write(*sys.argv[1:])
