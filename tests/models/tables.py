"""Write the tables of data/models: every architecture of Transformers, held to laws and patched.

``python -m tests.models.tables verify`` writes transformers.csv, ``... patch`` writes patched.csv,
``... diffusers`` writes diffusers.csv, and ``... configurations`` writes configurations.csv: `rope_from_config` beside
the rotary classes.
Rows that a table already has stay, so that an interrupted run goes on; ``--again`` begins anew.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ropelab.conformance.models.attention_laws import LAWS
from ropelab.conformance.models.factory import NotBuilt, architectures, build
from ropelab.conformance.models.trace import Traced, rotations
from ropelab.conformance.models.verify_model import FunctionReport, function_report, verify_model
from tests.models import diffusers_models, rotary_classes
from tests.models.patched import Compared, compare, compare_compiled

FOLDER = Path(__file__).parents[2] / "data" / "models"
VERIFIED = ("architecture", "model", "function", "convention", "layout", "out_layout", "sign", "rotary_dim", "head_dim",
            "function_verdict", *LAWS, "outcome", "reason")  # fmt: skip
PATCHED = ("architecture", "model", "outcome", "forward_and_gradients", "packed", "decoded", "compiled", "qk_norm",
           "reason")  # fmt: skip

CONFIGURATIONS = ("architecture", "rotary_class", "model_type", "layer_type", "outcome", "head_dim", "first_feature",
                  "rotary_dim", "layout", "out_layout", "axes", "attention_factor", "reason")  # fmt: skip
DIFFUSERS = ("model", "outcome", "difference", "allowed", "reason")

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


def patched_rows(architecture: str, *, compiled: bool = True) -> list[Row]:
    """One row: the model before and after the patch.

    Args:
        architecture: its name in Transformers.
        compiled: fill the column ``compiled`` too, which takes most of the time.
    """
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
        row["compiled"] = _tried(lambda: _shown(compare_compiled(tiny)))
    row["qk_norm"] = _tried(lambda: "; ".join(sorted({_shown(x) for x in compare(tiny, qk_norm=True).values()})))
    everything = [str(value) for value in row.values()]
    row["outcome"] = "differs" if any("differs" in value for value in everything) else "equal"
    return [row]


def diffusers_rows(name: str) -> list[Row]:
    """One row: a transformer of diffusers before and after the patch."""
    try:
        found = diffusers_models.compare(name)
    except ValueError as reason:
        return [{"model": name, "outcome": "refused", "reason": str(reason)}]
    numbers = {"difference": f"{found.difference:.0e}", "allowed": f"{found.allowed:.0e}"}
    return [{"model": name, "outcome": found.status} | numbers]


def configuration_rows(architecture: str) -> list[Row]:
    """A row for each rotary class, configuration and type of layers of an architecture."""
    rows = []
    for found in rotary_classes.compared(architecture):
        row: Row = {name: getattr(found, name) for name in CONFIGURATIONS if hasattr(found, name)}
        if (rope := found.rope) is not None:
            row |= {name: getattr(rope, name) for name in CONFIGURATIONS if hasattr(rope, name)}
            row["axes"] = 1 if rope.axes is None else max(rope.axes) + 1
        rows.append(row)
    return rows


def write(name: str, columns: tuple[str, ...], rows_of: Callable[[str], list[Row]], names: Iterable[str]) -> None:
    """Add the rows of the architectures that a table lacks, one architecture at a time."""
    path = FOLDER / name
    path.parent.mkdir(exist_ok=True)
    key = next(iter(columns))
    done = {row[key] for row in read(name)} if path.exists() else set()
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        if not done:
            writer.writeheader()
        for name_of_row in names:
            if name_of_row not in done:
                writer.writerows(rows_of(name_of_row))
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


_reports: dict[tuple, FunctionReport] = {}


def _judged_once(traced: Traced) -> FunctionReport:
    """`function_report`; functions with the same code, as most models have them, are held to the laws once."""
    if traced.function is None:
        return function_report(traced)
    code = _code(traced.function)
    if code not in _reports:
        _reports[code] = function_report(traced)
    return replace(
        _reports[code], name=traced.name, layout=traced.layout, out_layout=traced.out_layout,
        rotary_dim=traced.rotary_dim, head_dim=traced.head_dim, factor=traced.factor,
    )  # fmt: skip


def _code(function: Any) -> tuple:
    """The code of a function, and the code of the functions of its module that it calls."""
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
        "verify": ("transformers.csv", VERIFIED, verified_rows, architectures),
        "patch": ("patched.csv", PATCHED, patched_rows, architectures),
        "configurations": ("configurations.csv", CONFIGURATIONS, configuration_rows, architectures),
        "diffusers": ("diffusers.csv", DIFFUSERS, diffusers_rows, lambda: list(diffusers_models.MODELS)),
    }
    if not arguments or arguments[0] not in tables:
        raise SystemExit(f"table: expected one of {', '.join(tables)}, got {' '.join(arguments) or 'nothing'}")
    name, columns, rows_of, names = tables[arguments[0]]
    if "--again" in arguments:
        (FOLDER / name).unlink(missing_ok=True)
    write(name, columns, rows_of, names())


if __name__ == "__main__":
    main(sys.argv[1:])
