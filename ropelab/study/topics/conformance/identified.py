"""Measure the identification: known faults against recovered descriptions, as a record.

``TRITON_INTERPRET=1 python -m ropelab.study.topics.conformance.identified`` computes four files in the folder
``data/identification``. ``catalogue.csv`` has every fault of the catalogue, and ``pairs_of_faults.csv`` has two random
faults at a time. ``controls.csv`` has right implementations, and ``blind.csv`` has faults that were written after the
identification. The names of files as arguments choose some of them. Each row is written as soon as it is computed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any

import pandas as pd
import torch

from ropelab.bench import whole_file
from ropelab.bench.records import ROOT
from ropelab.bench.subjects import CONTENDERS
from ropelab.conformance.declared import Declaration, declare
from ropelab.conformance.faults import CONTROLS, FAULTS
from ropelab.conformance.identify import Identification, identify
from ropelab.conformance.identify.equivalence import equivalent
from ropelab.conformance.subject import Subject
from ropelab.conformance.surroundings import Surroundings
from ropelab.study.topics.conformance.blind import BLIND
from ropelab.study.topics.conformance.injected import INJECTED, Injected
from ropelab.study.topics.conformance.mutations import drawn

FOLDER = ROOT / "data" / "identification"
PAIRS = 200
SECONDS = 30.0
"""The limit of CPU time for each function."""
RIGHT = ("equal", "equivalent")
"""The outcomes of a right description."""


def main() -> None:
    """Compute the records that the command names, by default all, and write them."""
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    makers = {
        "controls": controls,
        "catalogue": lambda: catalogue(INJECTED),
        "pairs_of_faults": lambda: pairs_of_faults(range(PAIRS)),
        "blind": blind,
    }
    for name in sys.argv[1:] or makers:
        kept = []
        for row in makers[name]():
            kept.append(row)
            whole_file.write(FOLDER / f"{name}.csv", pd.DataFrame(kept).to_csv(index=False))


def read(name: str) -> pd.DataFrame:
    """Return a record: ``"catalogue"``, ``"pairs_of_faults"``, ``"controls"`` or ``"blind"``."""
    return pd.read_csv(FOLDER / f"{name}.csv", keep_default_na=False)


def sentences() -> list[str]:
    """Return the results of the records in words; the faults that the identification had never seen come first."""
    right, faults, pairs, fresh = (read(name) for name in ("controls", "catalogue", "pairs_of_faults", "blind"))
    counts, twofold, unseen = (frame.outcome.value_counts() for frame in (faults, pairs, fresh))
    same = indistinguishable(faults)
    return [
        f"Of {len(fresh)} faults that were written after the identification, {unseen.get('equivalent', 0)} are proven "
        f"to be recovered, and {unseen.get('wrong', 0)} are described wrongly. Unexplained: "
        f"{unseen.get('unexplained', 0)}.",
        f"Of {len(pairs)} functions with two random faults, {twofold.get('equivalent', 0)} are proven to be recovered, "
        f"and {twofold.get('wrong', 0)} are described wrongly. Unexplained: {twofold.get('unexplained', 0)}.",
        f"Of the {len(FAULTS)} faults of the catalogue that are code, {len(faults)} have a description that somebody "
        f"wrote from their code. {counts.get('equal', 0)} of these are recovered as injected, and "
        f"{counts.get('wrong', 0)} are described wrongly. Unexplained: {counts.get('unexplained', 0)}."
        + (f" No input tells apart the faults of these pairs: {'; '.join(map(' and '.join, same))}." if same else ""),
        f"In {right.silent.sum()} of {len(right)} right implementations the identification finds no deviation.",
    ]


def controls() -> Iterator[dict[str, object]]:
    """Yield a row for each right implementation, of the catalogue and of other packages; it says whether any deviates.

    ``seconds`` are CPU seconds of one core. Kernels that need a GPU or an interpreter are left out; the record of a GPU
    holds them to the laws.
    """
    for control in CONTROLS:
        yield _control(f"catalogue, {control.name}", control.function, control.convention, control.options)
    for contender in CONTENDERS:
        if not contender.triton and not contender.missing():
            yield _control(contender.name, contender.function, contender.convention, contender.options)


def _control(name: str, function: Callable, convention: str, options: Mapping[str, Any]) -> dict[str, object]:
    found, _, _, seconds = _identified(function, declare(convention, **options))
    return {"control": name, "convention": convention, "silent": found.silent,
            "recovered": _words(found), "seconds": round(seconds, 1)}  # fmt: skip


def catalogue(names: Iterable[str]) -> Iterator[dict[str, object]]:
    """Yield a row for each fault of the catalogue.

    ``outcome`` is "equal" if a recovered deviation has the injected kind and the injected parameters, and "wrong" if a
    proven description has neither. It is "unexplained" if nothing is proven, and "silent" if no answer deviates.
    ``same_as`` lists the earlier faults with the same convention and claims whose description is proven to be the same
    function. No input of the questions can tell these faults apart.
    """
    kept: dict[str, tuple] = {}
    for name in names:
        fault = FAULTS[name]
        found, subject, declaration, seconds = _identified(fault.function, declare(fault.convention, **fault.options))
        same = [
            other
            for other, (about, theirs) in kept.items()
            if about == declaration.about and equivalent(subject, declaration.sizes, theirs, found.deviations)
        ]
        if found.proven:
            kept[name] = declaration.about, found.deviations
        yield {"fault": name, "convention": fault.convention, "injected": _told(INJECTED[name]),
               "outcome": _outcome(found, INJECTED[name]), "recovered": _words(found), "same_as": " ".join(same),
               "repair": found.repair.words if found.repair else "", "seconds": round(seconds, 1)}  # fmt: skip


def pairs_of_faults(numbers: Iterable[int]) -> Iterator[dict[str, object]]:
    """Yield a row for each function with two random faults; see `drawn`.

    ``outcome`` is "equivalent" if the recovered description is proven to be the injected function, "wrong" if another
    description reproduces all answers, and "unexplained" if none does.
    """
    for number in numbers:
        function, convention, injected = drawn(number)
        found, subject, declaration, seconds = _identified(function, declare(convention))
        outcome = "unexplained"
        if found.proven:
            same = equivalent(subject, declaration.sizes, tuple(injected), found.deviations)
            outcome = "equivalent" if same else "wrong"
        yield {"number": number, "convention": convention, "injected": "; ".join(map(str, injected)),
               "outcome": outcome, "recovered": _words(found), "seconds": round(seconds, 1)}  # fmt: skip


def blind() -> Iterator[dict[str, object]]:
    """Yield a row for each fault of `ropelab.study.topics.conformance.blind`; see `pairs_of_faults` for ``outcome``."""
    for name, fault in BLIND.items():
        found, subject, declaration, seconds = _identified(fault.function, declare(fault.convention, **fault.options))
        outcome = "unexplained"
        if found.proven:
            same = equivalent(subject, declaration.sizes, (fault.deviation,), found.deviations)
            outcome = "equivalent" if same else "wrong"
        yield {"fault": name, "convention": fault.convention, "outcome": outcome, "recovered": _words(found),
               "seconds": round(seconds, 1)}  # fmt: skip


def indistinguishable(rows: pd.DataFrame) -> list[tuple[str, str]]:
    """Return the pairs of faults of a record that no input can tell apart."""
    return [pair for row in rows.itertuples() for pair in combinations((*str(row.same_as).split(), row.fault), 2)
            if row.fault in pair and row.same_as]  # fmt: skip


def _identified(function, declaration: Declaration) -> tuple[Identification, Subject, Declaration, float]:
    surroundings, started = Surroundings(), time.thread_time()
    with surroundings.ours():
        subject = declaration.subject(function, surroundings)
        found = identify(subject, declaration.sizes, SECONDS)
    return found, subject, declaration, time.thread_time() - started


def _outcome(found: Identification, injected: Injected) -> str:
    if found.silent:
        return "silent"
    if not found.proven:
        return "unexplained"
    return "equal" if any(_is(deviation, injected) for deviation in found.deviations) else "wrong"


def _is(deviation, injected: Injected) -> bool:
    if deviation.kind not in injected.kinds or injected.says not in str(deviation):
        return False
    if deviation.scope.gradient != injected.gradient or deviation.scope.name != injected.name:
        return False
    return all(_near(deviation.parameters.get(key), value) for key, value in injected.parameters.items())


def _near(got, value) -> bool:
    if isinstance(value, float):
        return got is not None and abs(float(got) - value) <= 1e-4 * abs(value)
    return got == value


def _told(injected: Injected) -> str:
    values = " ".join(f"{key}={value}" for key, value in injected.parameters.items())
    who = "gradient" if injected.gradient else injected.name
    return " ".join(filter(None, (who, " or ".join(injected.kinds), injected.says, values)))


def _words(found: Identification) -> str:
    return "; ".join(map(str, found.deviations)) if found.proven else "; ".join((*found.facts, *found.unexplained))


if __name__ == "__main__":
    main()
