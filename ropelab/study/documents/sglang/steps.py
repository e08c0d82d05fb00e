"""The steps from the document's protocol to a fair protocol, one flaw at a time, and the times that each compares."""

from dataclasses import dataclass

import pandas as pd

from ropelab.bench.rows import is_right
from ropelab.study.documents.sglang.names import (
    FIRST_KERNEL,
    FIRST_KERNEL_GATHER,
    FLASH,
    FLASH_FULL,
    FLASH_PACKED,
    VLLM,
)

PUBLISHED, FAIR, APART = "as published", "corrected", "q and k apart"


@dataclass(frozen=True)
class Timing:
    """The attributes that identify a row of the record sglang_protocols within its cell."""

    contender: str
    layout: str = "split_half"
    timer: str = "graph"
    clones: bool = False


@dataclass(frozen=True)
class Step:
    """A comparison of the peer's time with the kernel's time; ``name`` is the correction since the step before."""

    name: str
    kernel: Timing
    peer: Timing


def _until_right_flag(peer: str) -> tuple[Step, ...]:
    """The steps that correct the flaws that all comparisons of the document share."""
    return (
        Step(
            PUBLISHED,
            Timing(FIRST_KERNEL, "interleaved", "do_bench", clones=True),
            Timing(peer, timer="do_bench", clones=True),
        ),
        Step("CUDA graphs for both", Timing(FIRST_KERNEL, "interleaved", clones=True), Timing(peer, clones=True)),
        Step("no clones", Timing(FIRST_KERNEL, "interleaved"), Timing(peer)),
        Step("same layout", Timing(FIRST_KERNEL), Timing(peer)),
    )


STEPS: dict[str, tuple[Step, ...]] = {
    VLLM: (*_until_right_flag(VLLM), Step(FAIR, Timing(FIRST_KERNEL_GATHER), Timing(VLLM))),
    FLASH_FULL: (
        *_until_right_flag(FLASH_FULL),
        Step(FAIR, Timing(FIRST_KERNEL), Timing(FLASH_PACKED)),
        Step(APART, Timing(FIRST_KERNEL), Timing(FLASH)),
    ),
}
"""Peer -> steps.

Against vLLM, in the last step both look up the tables in the timed region. Against flash-attn, in the last two steps
both rotate the same heads. flash-attn takes one launch for q and k packed in a qkv, and two launches for q and k apart,
as the document's operator takes them.
"""

STEP_NAMES = {
    VLLM: {FAIR: "the same gather"},
    FLASH_FULL: {FAIR: "the same heads in one call", APART: "the same heads in two calls"},
}
"""Peer -> the corrections of its last steps, in words."""


def ratios(protocols: pd.DataFrame, peer: str) -> pd.DataFrame:
    """The peer's time over the kernel's time: a row for each cell, a column for each step; NaN if not measured."""
    columns = {step.name: _time(protocols, step.peer) / _time(protocols, step.kernel) for step in STEPS[peer]}
    cells = list(dict.fromkeys(protocols.cell))
    return pd.DataFrame(columns).reindex(cells)


def mixed_timers(protocols: pd.DataFrame, peer: str) -> pd.Series:
    """The peer's time over the kernel's time in each cell, by different timers, as in one version of the benchmark.

    The published timer times the peer, and CUDA graphs time the kernel.
    """
    published, graphs = STEPS[peer][:2]
    return _time(protocols, published.peer) / _time(protocols, graphs.kernel)


def timer(protocols: pd.DataFrame) -> str:
    """How well the published timer and CUDA graphs repeat, in words; empty if no call was timed twice.

    The benchmark hands flash-attn as many heads of k as of q. So cells that differ only in the heads of k time the same
    call.
    """
    call = ["batch", "seq_len", "q_heads", "head_dim"]
    published, graphs = (_time(protocols, step.peer) for step in STEPS[FLASH_FULL][:2])
    cells = protocols.drop_duplicates("cell").set_index("cell")[call]
    times = cells.assign(published=published, graphs=graphs).dropna().groupby(call)
    most = (times.max() / times.min())[times.size() > 1].max()
    if most.isna().any():
        return ""
    return (
        f"the very same call of flash-attn takes up to {most.published:.2f} times as long in another row of "
        f"the document's table by the published timer, {most.graphs:.2f} times by CUDA graphs"
    )


def timed_alike(protocols: pd.DataFrame) -> pd.DataFrame:
    """The rows that CUDA graphs timed, without clones and with halves."""
    return protocols[(protocols.timer == "graph") & ~protocols.clones.astype(bool) & (protocols.layout == "split_half")]


def without_models(frame: pd.DataFrame) -> pd.DataFrame:
    """The record without the models of published kernels, which records of November 2026 have beside the kernels."""
    return frame[~frame.contender.str.contains(r"^(?:first|second|third) version \(model\)|^vLLM \(model\)|^model, ")]


def _time(protocols: pd.DataFrame, timing: Timing) -> pd.Series:
    """The microseconds of a timing, by cell."""
    rows = protocols[
        is_right(protocols)
        & (protocols.contender == timing.contender)
        & (protocols.layout == timing.layout)
        & (protocols.timer == timing.timer)
        & (protocols.clones.astype(bool) == timing.clones)
    ]
    return rows.set_index("cell").median_us.groupby(level=0, sort=False).first()
