"""The functions that measure a study, or compile it, in a process of its own.

A function gets the name of the study, because processes exchange names and not functions.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ropelab.bench import timing, tuning, turns
from ropelab.study.engine import registered
from ropelab.study.engine.outcome import JobResult, beside_others, sharing


def compile_flashinfer(version: str, compiles: Callable[[str], object]) -> JobResult:
    """Compile kernels of a version of FlashInfer by ``compiles``. The outcome has no table."""
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


def timed_in_turn(study: str, untimed: Any, folder: Path) -> JobResult:
    """Measure a study beside the studies that name the same folder: see `ropelab.bench.turns`.

    Args:
        untimed: the result of the untimed part of the study, or None.
    """
    known = registered.all_studies()[study]
    with turns.taking_part(folder) as seconds, tuning.in_turns():
        outcome = sharing(study, known if untimed is None else partial(known.table, untimed))
    return replace(outcome, spent=seconds)
