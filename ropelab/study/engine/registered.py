"""Every study: of the benchmarks, of the topics, and of the documents, each a module with ``STUDIES``."""

import importlib
from collections.abc import Sequence

from ropelab.bench import studies
from ropelab.bench.study import Study
from ropelab.study.engine.claims import documents

TOPICS = ("ropelab.study.topics.precision.gpu", "ropelab.study.topics.kernel_steps.timed")
"""The modules of topics that measure."""


def all_studies() -> dict[str, Study]:
    """Name -> study: the benchmarks, and the ``STUDIES`` of each topic and of each document's module.

    Raises:
        ValueError: two studies have one name.
    """
    found = dict(studies.STUDIES)
    modules = [importlib.import_module(name) for name in TOPICS]
    for module in [*modules, *(module for document in documents() for module in document.modules("studies"))]:
        if taken := found.keys() & module.STUDIES.keys():
            raise ValueError(f"{module.__name__}: expected names of studies of its own, got {sorted(taken)}")
        found |= module.STUDIES
    return found


def of_the_book() -> dict[str, Study]:
    """What ``make reproduce`` measures: each study of times that is no wide sweep, and the short part of those sweeps.

    The tables that are no times are results of tests on a GPU.
    """
    measured = {name: study for name, study in all_studies().items() if study.timed and (study.short or not study.wide)}
    return {name: study.in_short for name, study in measured.items()}


def named(only: Sequence[str] | None) -> list[str]:
    """The studies that are asked for by their names, by default all that time something but the wide sweeps.

    Raises:
        ValueError: a study is unknown.
    """
    known = all_studies()
    if unknown := set(only or ()) - known.keys():
        raise ValueError(f"only: expected names out of {', '.join(known)}, got {', '.join(sorted(unknown))}")
    return list(dict.fromkeys(only or [name for name, study in known.items() if study.timed and not study.wide]))
