"""The functions that measure a study, or compile it, in a process of its own.

A function gets the name of the study and the study itself, whose functions stand at module level.
"""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from ropelab.bench import timing, tuning
from ropelab.bench.study import Study
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


def without_timing(name: str, study: Study) -> JobResult:
    """Measure a study, or a part of a study, that times nothing."""
    with timing.refused():
        return beside_others(name, study.untimed or study)


def compile_only(name: str, study: Study) -> JobResult:
    """Call every contender of a study once, so that the kernels are compiled. The outcome has no table."""
    with timing.stopped(), tuning.not_kept():
        return replace(beside_others(name, partial(study.table, {}) if study.untimed else study), found=None)


def measured(name: str, study: Study, untimed: Any, smoke: bool) -> Iterator[JobResult]:
    """Measure a study with nothing beside it, and yield an outcome for each table, which may grow.

    Args:
        untimed: the result of the untimed part of the study, or None if there is none yet.
    """
    import_tvm_ffi()
    return growing(name, partial(study if untimed is None else partial(study.table, untimed), smoke=smoke))


def measured_whole(name: str, study: Study, untimed: Any) -> JobResult:
    """The last outcome of `measured`."""
    (*_, last) = measured(name, study, untimed, smoke=False)
    return last
