"""This file writes the tables of data/models: every architecture of Transformers, held to laws and patched.

``python -m ropelab.study.topics.models.tables verify`` writes transformers.csv, and ``... patch`` writes patched.csv.
Rows that a table already has stay, so that an interrupted run goes on; ``--again`` begins anew.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from ropelab.conformance.models.attention_laws import LAWS
from ropelab.conformance.models.factory import NotBuilt, architectures, build
from ropelab.conformance.models.patched import Compared, compare
from ropelab.conformance.models.trace import Traced, rotations
from ropelab.conformance.models.verify_model import FunctionReport, function_report, verify_model

FOLDER = Path(__file__).parents[4] / "data" / "models"
VERIFIED = ("architecture", "model", "function", "convention", "layout", "out_layout", "sign", "rotary_dim", "head_dim",
            "function_verdict", *LAWS, "outcome", "reason")  # fmt: skip
PATCHED = ("architecture", "model", "outcome", "forward_and_gradients", "packed", "decoded", "compiled", "qk_norm",
           "reason")  # fmt: skip

Row = dict[str, Any]


def verified_rows(architecture: str) -> list[Row]:
    """One row for each function that rotates in a model of the architecture, or one row that says why there is none."""
    report = verify_model(architecture, laws_of=_judged_once)
    if not report.functions:
        return [
            {"architecture": architecture, "model": report.model, "outcome": report.verdict, "reason": report.message}
        ]
    laws = {law.law: law.status for law in report.laws}
    failed = [f"{law.law}: {law.difference:.2g} apart, {law.allowed:.2g} allowed" for law in report.laws
              if law.status == "fail"]  # fmt: skip
    why = next((law.message for law in report.laws if law.status == "not applicable"), "")
    return [
        {
            "architecture": architecture, "model": report.model, "function": f.name.split(".")[-1],
            "convention": f.convention, "layout": f.layout, "out_layout": f.out_layout, "sign": f.sign,
            "rotary_dim": f.rotary_dim, "head_dim": f.head_dim, "function_verdict": f.verdict, **laws,
            "outcome": report.verdict, "reason": "; ".join(filter(None, (*f.failed, *failed, f.message))) or why,
        }
        for f in report.functions
    ]  # fmt: skip


def patched_rows(architecture: str, *, compiled: bool = False) -> list[Row]:
    """One row: the model before and after the patch."""
    row: Row = {"architecture": architecture}
    try:
        tiny = build(architecture, lambda made: bool(rotations(made.double().output)))
    except (NotBuilt, ImportError) as reason:
        return [row | {"outcome": "no model", "reason": str(reason)}]
    row["model"] = type(tiny.model).__name__
    try:
        plain = compare(tiny)
    except ValueError as reason:
        return [row | {"outcome": "refused", "reason": str(reason)}]
    row |= {name.replace(" ", "_"): _shown(found) for name, found in plain.items()}
    if compiled:
        row["compiled"] = _tried(lambda: _shown(compare(tiny, compiled=True)["forward and gradients"]))
    row["qk_norm"] = _tried(lambda: "; ".join(sorted({_shown(x) for x in compare(tiny, qk_norm=True).values()})))
    everything = [str(value) for value in row.values()]
    row["outcome"] = "differs" if any("differs" in value for value in everything) else "equal"
    return [row]


def write(name: str, columns: Iterable[str], rows_of: Callable[[str], list[Row]], names: Iterable[str]) -> None:
    """Add the rows of the architectures that a table lacks, one architecture at a time."""
    path = FOLDER / name
    path.parent.mkdir(exist_ok=True)
    done = {row["architecture"] for row in read(name)} if path.exists() else set()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, tuple(columns), lineterminator="\n")
        if not done:
            writer.writeheader()
        for architecture in names:
            if architecture not in done:
                writer.writerows(rows_of(architecture))
                file.flush()


def read(name: str) -> list[dict[str, str]]:
    """The rows of a table of data/models."""
    with (FOLDER / name).open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _shown(found: Compared) -> str:
    return f"equal ({found.difference:.0e})" if found.status == "equal" else (
        f"differs ({found.difference:.1e}, {found.allowed:.1e} allowed)" if found.status == "differs" else found.status
    )  # fmt: skip


def _tried(run: Callable[[], str]) -> str:
    try:
        return run()
    except ValueError as reason:
        return f"refused: {str(reason).rpartition(': ')[2]}"
    except Exception as error:
        return f"failed: {type(error).__name__}"


def _judged_once(traced: Traced) -> FunctionReport:
    """`function_report`; functions with the same code, as most models have them, are held to the laws once."""
    return _judged(_code(traced.function), _Equal(traced)) if traced.function is not None else function_report(traced)


class _Equal:
    """A value that a cache does not tell apart from others."""

    def __init__(self, value: Traced):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Equal)

    def __hash__(self) -> int:
        return 0


@cache
def _verdict(code: tuple, traced: _Equal) -> FunctionReport:
    return function_report(traced.value)


def _judged(code: tuple, traced: _Equal) -> FunctionReport:
    from dataclasses import replace

    known, now = _verdict(code, traced), traced.value
    return replace(
        known, name=now.name, layout=now.layout, out_layout=now.out_layout, rotary_dim=now.rotary_dim,
        head_dim=now.head_dim, factor=now.factor,
    )  # fmt: skip


def _code(function: Any) -> tuple:
    """What a function computes: its code, and the code of the functions of its module that it calls."""
    function = getattr(function, "__wrapped__", function)
    code = function.__code__
    helpers = tuple(
        helper.__code__.co_code
        for name in code.co_names
        if hasattr(helper := function.__globals__.get(name), "__code__")
    )
    constants = tuple(value for value in code.co_consts if not isinstance(value, str))
    return code.co_code, repr(constants), code.co_names, code.co_varnames, helpers


def main(arguments: list[str]) -> None:
    tables = {
        "verify": ("transformers.csv", VERIFIED, verified_rows),
        "patch": ("patched.csv", PATCHED, patched_rows),
    }
    if not arguments or arguments[0] not in tables:
        raise SystemExit(f"table: expected one of {', '.join(tables)}, got {' '.join(arguments) or 'nothing'}")
    name, columns, rows_of = tables[arguments[0]]
    if "--again" in arguments:
        (FOLDER / name).unlink(missing_ok=True)
    write(name, columns, rows_of, architectures())


if __name__ == "__main__":
    main(sys.argv[1:])
