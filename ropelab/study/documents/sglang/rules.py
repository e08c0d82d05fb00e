"""The rules of the claims on SGLang#14302 that are more than a comparison, and remarks."""

from __future__ import annotations

import pandas as pd

from ropelab.bench.rows import timed
from ropelab.study.documents.sglang import steps
from ropelab.study.documents.sglang.evidence import THEIR_OPERATOR
from ropelab.study.documents.sglang.names import FLASH_FULL, VLLM
from ropelab.study.engine.claims import Claim
from ropelab.study.engine.ledger import remark, rule
from ropelab.study.engine.verdict import Untold, Verdict, fact, untold
from ropelab.study.engine.words import listed, value_range

SHORT_MS = 1
"""The time of a stage up to which the printed decimals, 0.01 ms, are a percent and more of it."""


@rule("SG-12", "sglang_published_e2e", "sglang_published_kernel")
def end_to_end_is_unchanged(claim: Claim, e2e: pd.DataFrame, kernel: pd.DataFrame) -> Verdict:
    """The change of the whole must lie within the noise of two runs. The document prints no variance.

    The stages that the change does not touch give two bounds for the noise: the difference of their sum between the two
    runs, and the largest difference of one stage that takes longer than `SHORT_MS`.
    """
    total, stages = e2e[e2e.row == "E2E Latency"], e2e[e2e.row != "E2E Latency"]
    untouched = stages[stages.row != "DenoisingStage"]
    if total.empty or untouched.empty:
        raise Untold(claim.needs)
    (total,) = total.itertuples()
    together = 100 * abs(untouched.change_ms.sum()) / untouched.baseline.sum()
    alone = untouched.change_percent[untouched.baseline > SHORT_MS].abs().max()
    change, (least, most) = abs(total.change_percent), sorted((together, alone))
    verdict = untold(claim.needs) if least < change <= most else fact(change <= least)
    return verdict.with_text(
        f"{total.change_percent:+.2f} % as a whole, {stages.change_ms.sum():+.0f} ms in the stages; stages that the "
        f"change does not touch differ by {together:.1f} % in sum, and each of more than {SHORT_MS} ms by up to "
        f"{alone:.1f} %",
        _share_of_image(kernel, total.baseline),
        change=total.change_percent, alone=alone,
    )  # fmt: skip


@remark("SG-01", "sglang_flags")
def flag_is_inverted(flags: pd.DataFrame) -> str:
    for row in flags[(flags.implementation == THEIR_OPERATOR) & (flags.formula != flags.says)].itertuples():
        same = flags[(flags.flag == row.flag) & (flags.value == row.value) & (flags.formula == row.says)]
        return f"{row.flag} = {row.value} rotates {row.formula}, where {listed(same.implementation)} rotate {row.says}"
    return ""


@remark("SG-02", "sglang_head_sizes")
def not_called(sizes: pd.DataFrame) -> tuple[str, dict[str, object]]:
    """The study does not call FlashInfer's newest release for heads past whose end it would read."""
    found = sizes[(sizes.contender == "FlashInfer, newest") & (sizes.head_dim == 80)]
    uncalled = found[found.status.str.contains("reads past q's end")].layout
    said = f"FlashInfer's newest release would read past q's end in {listed(uncalled)}, and is not called there"
    return said if len(uncalled) else "", {"uncalled": len(uncalled)}


@remark("SG-03", "sglang_accuracy", "sglang_sources")
def what_the_test_misses(accuracy: pd.DataFrame, sources: pd.DataFrame) -> str:
    half = accuracy[(accuracy.operator == THEIR_OPERATOR) & accuracy.dtype.isin(("bfloat16", "float16"))]
    more = 100 * (half.exact / half.same - 1)
    return (
        "a reference with the same tables does not show the cost of rounding them: against exact tables the error is "
        f"{value_range(more, '.0f')} % larger; its test rotates only {listed(dict.fromkeys(sources.layout))}"
    )


def _protocols(peer: str):
    def say(protocols: pd.DataFrame) -> str:
        medians = steps.ratios(protocols, peer).median().dropna()
        names = steps.STEP_NAMES[peer]
        shown = ", ".join(f"{names.get(name, name)} {value:.2f}x" for name, value in medians.items())
        return "; ".join(filter(None, (f"by protocol, median: {shown}", steps.timer(protocols))))

    return say


remark("SG-04", "sglang_protocols")(_protocols(VLLM))


@remark("SG-05", "sglang_protocols")
def twice_as_long(protocols: pd.DataFrame) -> tuple[str, dict[str, object]]:
    """The cells in which flash-attn takes at least twice as long; the largest of all is the noise of the host."""
    found = steps.ratios(protocols, FLASH_FULL)
    twice, graphs = ((found[step.name].dropna() >= 2).sum() for step in steps.STEPS[FLASH_FULL][:2])
    said = f"at least twice in {twice} of {len(found)} cells by the document's timer, in {graphs} by CUDA graphs"
    return f"{said}; {_protocols(FLASH_FULL)(protocols)}", {
        "timed_twice": twice, "graphs_twice": graphs, "cells": len(found),
    }  # fmt: skip


@remark("SG-10", "sglang_protocols")
def arithmetic_mean(protocols: pd.DataFrame) -> tuple[str, dict[str, object]]:
    """The document does not say which mean it takes, and a ratio above 1 in one may be below 1 in the other."""
    alike = timed(steps.timed_alike(protocols), "sgl_kernel", "second version")
    times = alike.pivot_table(index="cell", columns="contender", values="median_us")
    mean = (times["sgl_kernel"] / times["second version"]).mean()
    return f"the arithmetic mean of the ratios of sgl_kernel is {mean:.2f}", {"arithmetic": mean}


@remark("SG-20", "sglang_alignment")
def aligned_parts(parts: pd.DataFrame) -> str:
    """The parts of heads and tables that 16-byte accesses can read."""
    return (
        f"{parts.aligned.sum()} of {len(parts)} parts of heads and tables, of the document's head sizes and 96, lie at "
        "multiples of 16 bytes"
    )


def _share_of_image(kernel: pd.DataFrame, baseline_ms: float) -> str:
    """The most that the rotation can save of an image that takes ``baseline_ms``."""
    (row,) = kernel.itertuples()
    return (
        f"with {row.calls:,} calls in one image (an assumption), the claimed gain over the positions API saves "
        f"{row.expected_ms:.0f} ms of {baseline_ms:,.0f} ({100 * row.expected_ms / baseline_ms:.2f} %); the whole "
        f"rotation takes at most {row.all_ms:.0f} ms ({100 * row.all_ms / baseline_ms:.1f} %)"
    )
