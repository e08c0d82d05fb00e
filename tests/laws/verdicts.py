"""The verdict, the broken laws and the noted laws of every wrong and every right function at hand, in a table.

``python -m tests.laws.verdicts`` writes ``verdicts.csv`` anew, in minutes, on a machine without a GPU. A change of the
laws that changes a row changes a verdict: its commit says why. The verdicts of whole models are in
``data/models/transformers.csv``.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

import tests.conftest  # noqa: F401  chooses Triton's interpreter without a GPU, before a kernel is defined
from ropelab.bench.subjects import CONTENDERS, Contender
from ropelab.bench.unavailable import Unavailable
from ropelab.conformance import CACHE_CONVENTIONS, verify
from ropelab.conformance.configuration import verify_config
from ropelab.kernels import use_backend
from ropelab.study.faults import CONTROLS, FAULTS
from ropelab.study.topics.conformance import laws_for
from tests.laws.cache_correct import CORRECT
from tests.laws.cache_faults import CACHE_FAULTS
from tests.laws.test_right_functions import RIGHT, Wrapped, angles_by_matmul, both_by_matmul
from tests.laws.test_verify_config import REPORTED
from tests.laws.wrong_functions import WRONG

TABLE = Path(__file__).with_name("verdicts.csv")
COLUMNS = ("kind", "name", "verdict", "broken", "noted")
OTHERS = {"angles by a product": (angles_by_matmul, "plain", {}), "all by products": (both_by_matmul, "plain", {}),
          "tables that begin again": (Wrapped, "module", {})}  # fmt: skip

Row = tuple[str, str, str]
"""A verdict, the broken laws and the noted laws."""


def judged() -> Iterator[tuple[str, str, Callable[[], Row]]]:
    """Yield a kind, a name, and a function that computes the rest of the row."""
    for name, fault in FAULTS.items():
        yield "fault", name, partial(_row, fault.function, fault.convention, laws=laws_for(fault), **fault.options)
    for name, fault in CACHE_FAULTS.items():
        yield "fault of an operator", name, partial(_row, fault.function, fault.convention, skip=(), **fault.options)
    for name, (function, convention, options) in (WRONG | OTHERS).items():
        yield "wrong function", name, partial(_row, function, convention, **options)
    for control in CONTROLS:
        yield "right function", control.name, partial(_row, control.function, control.convention, **control.options)
    for name, (function, convention, options) in RIGHT.items():
        yield "right function", name, partial(_row, function, convention, **options)
    for name, operator in CORRECT.items():
        dtype = torch.float32 if torch.float32 in CACHE_CONVENTIONS[name].dtypes else torch.bfloat16
        yield "right operator", name, partial(_row, operator, name, skip=(), dtype=dtype)
    for contender in CONTENDERS:
        yield "peer", contender.name, partial(_peer, contender)
    for name, (config, target, _) in REPORTED.items():
        yield "misread configuration", name, lambda config=config, target=target: _config(config, target())


def _row(function, convention, *, skip=("compile",), **options) -> Row:
    report = verify(function, convention, shrink=False, skip=() if "laws" in options else skip, **options)
    noted = (result.law for result in report.results if result.status == "note")
    return report.verdict, " ".join(report.failed), " ".join(noted)


def _peer(contender: Contender) -> Row:
    if reason := contender.missing():
        raise Unavailable(reason)
    skip = ("compile", *contender.not_claimed, *(contender.not_interpreted if contender.triton else ()))
    with use_backend("torch"):
        return _row(contender.function, contender.convention, skip=skip, **contender.options)


def _config(config, target) -> Row:
    report = verify_config(config, target)
    return report.verdict, " ".join(dict.fromkeys(finding.key for finding in report.findings)), ""


def read() -> dict[tuple[str, str], Row]:
    """Return the table: kind and name -> the rest of the row."""
    with TABLE.open(newline="", encoding="utf-8") as file:
        return {(kind, name): tuple(rest) for kind, name, *rest in list(csv.reader(file))[1:]}


def main() -> None:
    """Write the table, without the peers that are not installed."""
    with TABLE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for kind, name, compute in judged():
            try:
                writer.writerow((kind, name, *compute()))
                file.flush()
            except Unavailable:
                continue


if __name__ == "__main__":
    main()
