"""The functions that measure a study, or compile it, in a process of its own.

A function gets the name of the study, because processes exchange names and not functions.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from ropelab.bench import timing, tuning
from ropelab.study.engine import registered
from ropelab.study.engine.outcome import JobResult, beside_others, growing


def import_tvm_ffi() -> None:
    """Import tvm_ffi from the environment, if it has the package.

    FlashInfer compiles its kernels anew where tvm_ffi lies in another folder, and `ropelab.bench.peers.quack` would
    import it from a new folder in each process.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("tvm_ffi")


def compile_flashinfer(version: str, compiles: Callable[[str], object]) -> JobResult:
    """Compile kernels of a version of FlashInfer by ``compiles``. The outcome has no table."""
    import_tvm_ffi()
    return replace(beside_others(f"FlashInfer {version}", partial(compiles, version)), found=None)


def without_timing(study: str) -> JobResult:
    """Measure a study, or a part of a study, that times nothing."""
    known = registered.all_studies()[study]
    with timing.refused():
        return beside_others(study, known.untimed or known)


def compile_only(study: str) -> JobResult:
    """Call every contender of a study once, so that the kernels are compiled. The outcome has no table."""
    known = registered.all_studies()[study]
    with timing.stopped(), tuning.not_kept():
        return replace(beside_others(study, partial(known.table, {}) if known.untimed else known), found=None)


def measured(study: str, untimed: Any, smoke: bool) -> Iterator[JobResult]:
    """Measure a study with nothing beside it, and yield an outcome for each table, which may grow.

    Args:
        untimed: the result of the untimed part of the study, or None if there is none yet.
    """
    import_tvm_ffi()
    known = registered.all_studies()[study]
    return growing(study, partial(known if untimed is None else partial(known.table, untimed), smoke=smoke))


def measured_whole(study: str, untimed: Any) -> JobResult:
    """The last outcome of `measured`."""
    (*_, last) = measured(study, untimed, smoke=False)
    return last
