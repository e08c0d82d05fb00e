"""The rules that judge claims SG-01 to SG-15.

Where the packages cannot be installed, the kernels of the first version and of vLLM are re-creations
(`ropelab.study.sglang.models`): the same division of the work and the same accesses, compiled by Triton. Figures that
rest on one say "(model)".
"""

from __future__ import annotations

import pandas as pd

from ropelab.study.sglang import evidence
from ropelab.study.sglang.contenders import (
    DOCUMENT,
    DOCUMENT_CAST,
    DOCUMENT_GATHER,
    DOCUMENT_LATER,
    FLASH,
    FLASH_FULL,
    FLASHINFER,
    FLASHINFER_NEWEST,
    PERSISTENT,
    SGL_KERNEL,
    VLLM,
)
from ropelab.study.sglang.evidence import THEIR_OPERATOR
from ropelab.study.sglang.models import FEW_TOKENS
from ropelab.study.sglang.steps import FAIR, LAST_STEP, NAMES, PUBLISHED, STEPS, ratios
from ropelab.study.verdicts import Verdict, rule

NOTICEABLE = 0.05
"""A difference of less than 5 % counts as none: medians of the same kernel on the same GPU repeat to 1 or 2 %, and two
of them are divided."""

CLOSE = 0.10
"""A published ratio is reached down to 10 % below it: another GPU, and kernels that Triton compiled."""

TABLES_COST = 0.10
"""Tables in the dtype of q are said to cost accuracy if they raise the error by a tenth: far beyond what 2**17 random
elements let a relative norm vary (below 1 %)."""

E2E_UNCHANGED = 1.0
"""Percent. The document states no spread; of its longer stages, two that no kernel of the change touches (text
encoding, decoding) differ by 1.7 and 3 % between the two runs."""

LAYERS = 32
"""Of a language model: so many layers share one gather of the tables of a step."""

FAST_POSITIONS = (FLASHINFER, SGL_KERNEL)
"""Contenders that are the positions API on FlashInfer's kernel."""


@rule("SG-01", "sglang_shapes", "sglang_flags")
def takes_every_shape(shapes: pd.DataFrame, flags: pd.DataFrame) -> Verdict:
    theirs = shapes[shapes.operator == THEIR_OPERATOR]
    claimed = theirs[theirs.claimed]
    wrong = claimed[claimed.outcome != "right"]
    measured = f"{len(claimed) - len(wrong)} of {len(claimed)} listed combinations are right in the model"
    if not wrong.empty:
        return Verdict.refuted(measured, "; ".join(f"{r.rank}-D, {r.layout}: {r.outcome}" for r in wrong.itertuples()))
    corrections = []
    flagged = flags[(flags.implementation == THEIR_OPERATOR) & (flags.formula != flags.says)]
    if not flagged.empty:
        row = flagged.iloc[0]
        same_flag = flags[(flags.flag == row.flag) & (flags.value == row.value) & (flags.formula == row.says)]
        corrections.append(
            f"{row.flag} = {row.value} rotates {row.formula}, where {_list(same_flag.implementation)} rotate {row.says}"
        )
    silent = theirs[(theirs.outcome == "wrong") & ~theirs.claimed]
    if not silent.empty:
        corrections.append(
            f"tables with a column {silent.tables.iloc[0]} are taken for {silent.layout.iloc[0]} without an error "
            "and turn other features: the width has two meanings"
        )
    return Verdict.corrected(measured, "; ".join(corrections)) if corrections else Verdict.confirmed(measured)


@rule("SG-02", "sglang_head_sizes")
def uncommon_head_sizes(sizes: pd.DataFrame) -> Verdict:
    rows = sizes[sizes.contender == DOCUMENT]
    uncommon = rows[rows.head_dim.map(lambda size: size & (size - 1) != 0)]
    if 80 not in set(uncommon.head_dim):
        return Verdict.not_testable("a time of head size 80")
    failed = uncommon[uncommon.status != "ok"]
    right = uncommon[uncommon.status == "ok"]
    measured = f"{_list(sorted(set(right.head_dim)))} run and are right (model)"
    if not right.empty:
        measured += f", at {_range(right.fraction_of_copy, '.2f')} of a copy"
    if 80 in set(failed.head_dim):
        return Verdict.refuted(measured, f"80: {failed[failed.head_dim == 80].status.iloc[0]}")
    if not failed.empty:
        return Verdict.corrected(measured, "not " + _list(sorted(set(failed.head_dim))))
    return Verdict.confirmed(measured)


@rule("SG-03", "sglang_accuracy")
def matches_a_reference(accuracy: pd.DataFrame) -> Verdict:
    """Right if the error, against a reference with the very same tables, is below one rounding."""
    beyond = accuracy[accuracy.same > accuracy.rounding]
    measured = "error against the same tables: " + ", ".join(
        f"{dtype} {_range(rows.same, '.1e')}" for dtype, rows in accuracy.groupby("dtype", sort=False)
    )
    if not beyond.empty:
        row = beyond.loc[(beyond.same / beyond.rounding).idxmax()]
        return Verdict.refuted(measured, f"{row.dtype}: {row.same:.1e}, one rounding is {row.rounding:.1e}")
    half = accuracy[accuracy.dtype.isin(("bfloat16", "float16"))]  # what its tests and benchmarks run in
    costly = half[half.exact > (1 + TABLES_COST) * half.same]
    notes = []
    if not costly.empty:
        more = 100 * (costly.exact / costly.same - 1)
        notes.append(
            "such a reference cannot see what rounding the tables to the dtype of q costs: against exact tables the "
            f"error is {_range(more, '.0f')} % larger in {_list(dict.fromkeys(costly.dtype))}"
        )
    drifting = half[half.float32_angles > (1 + TABLES_COST) * half.exact]
    if not drifting.empty:
        worst = drifting.loc[(drifting.float32_angles / drifting.exact).idxmax()]
        notes.append(
            f"tables from float32 angles, as its benchmark makes them, add to it far out ({worst['dtype']} at position "
            f"{worst.position:,}: {worst.float32_angles / worst.exact:.3g} times the error)"
        )
    return Verdict.corrected(measured, "; ".join(notes)) if notes else Verdict.confirmed(measured)


@rule("SG-04", "sglang_protocols")
def faster_than_vllm(protocols: pd.DataFrame) -> Verdict:
    """Where the tables are gathered once beforehand, as a diffusion model can, the last step does not apply."""
    claimed = evidence.published_speedups().low["SG-04"]
    return _judge_protocol(protocols, VLLM, pd.DataFrame.median, claimed, "median", "if the gather is not counted")


@rule("SG-05", "sglang_protocols", "sglang_bytes")
def faster_than_flash_attention(protocols: pd.DataFrame, moved: pd.DataFrame) -> Verdict:
    claimed = evidence.published_speedups().low["SG-05"]
    verdict = _judge_protocol(protocols, FLASH_FULL, pd.DataFrame.max, claimed, "at most")
    over = moved[moved.contender == FLASH].over
    bytes_ = f"; its benchmark let flash-attn move {_range(over, '.2f')} times the bytes"
    return Verdict(verdict.status, verdict.measured + bytes_, verdict.note) if verdict.measured else verdict


@rule("SG-06", "sglang_sources")
def helper_is_there_twice(sources: pd.DataFrame) -> Verdict:
    defining = sources[sources.defines]
    measured = f"{sources.helper.iloc[0]} is defined in {_list(defining.file)} of {len(sources)} file(s)"
    if len(sources) < 2:
        return Verdict.not_testable("both files, the benchmark and the test")
    return Verdict.confirmed(measured) if len(defining) > 1 else Verdict.refuted(measured, "it is not there twice")


@rule("SG-07", "sglang_vector_widths")
def wide_loads_help(widths: pd.DataFrame) -> Verdict:
    """Confirmed if 16-byte accesses are noticeably faster than 2-byte ones in both layouts, aligned."""
    times = _ok(widths[(widths.offset_bytes == 0) & widths.access_bytes.notna()])
    table = times.pivot_table(index="layout", columns="access_bytes", values="median_us")
    if not {2, 16} <= set(table) or table[[2, 16]].isna().any(axis=None):
        return Verdict.not_testable("times of 2-byte and 16-byte accesses in both layouts")
    gain = table[2] / table[16]
    fractions = times[times.access_bytes == 16].fraction_of_copy
    measured = "16-byte over 2-byte accesses: " + ", ".join(f"{layout} {value:.2f}x" for layout, value in gain.items())
    measured += f" (model, then at {_range(fractions, '.2f')} of a copy)"
    helped = gain >= 1 + NOTICEABLE
    if helped.all():
        return Verdict.confirmed(measured)
    if helped.any():
        return Verdict.corrected(measured, f"only {_list(gain.index[helped])}")
    return Verdict.refuted(measured, "the threads of a warp read neighbouring elements, so narrow loads are combined")


@rule("SG-08", "sglang_low_tokens")
def few_tokens_leave_processors_idle(low: pd.DataFrame) -> Verdict:
    times = _ok(low[low.family == "model"])
    cell = ["layout", "seq_len"]
    one = times[times.blocks == times.seq_len].set_index(cell)
    more = times[times.blocks > times.seq_len].groupby(cell).median_us.min()
    if one.empty or more.empty:
        return Verdict.not_testable("times of one and of several blocks a token")
    gain = (one.median_us / more).dropna()
    busy = one.blocks / one.multiprocessors
    measured = (
        f"one block a token keeps {_range(one.blocks, '.0f')} of {one.multiprocessors.iloc[0]:.0f} multiprocessors "
        f"busy; divided, {_list(dict.fromkeys(times.seq_len))} tokens are {_range(gain, '.2f')} times as fast (model)"
    )
    if (busy >= 1).all():
        return Verdict.refuted(measured, "no multiprocessor is idle")
    if (gain >= 1 + NOTICEABLE).all():
        return Verdict.confirmed(measured)
    if (gain >= 1 + NOTICEABLE).any():
        helped = gain.index[gain >= 1 + NOTICEABLE]
        return Verdict.corrected(
            measured, f"they are idle, but it costs noticeable time only at {_list(helped)} tokens"
        )
    return Verdict.refuted(measured, "they are idle, but the time is that of a launch either way")


@rule("SG-09", "sglang_diffusion", "sglang_low_tokens", "sglang_published_kernel")
def launch_and_loads_help(diffusion: pd.DataFrame, low: pd.DataFrame, published: pd.DataFrame) -> Verdict:
    times = _ok(diffusion[diffusion.cell == "Qwen-Image"]).set_index("contender")
    policy = _ok(low[(low.family == "later") & low.policy.isin(("on", "off"))])
    policy = policy[policy.seq_len <= FEW_TOKENS].pivot_table(
        index=["layout", "seq_len"], columns="policy", values="median_us"
    )
    if not {DOCUMENT, DOCUMENT_LATER} <= set(times.index) or not {"on", "off"} <= set(policy):
        return Verdict.not_testable("times of both versions at Qwen-Image's shape and with few tokens")
    stated, gain = published.ratio.iloc[0], times.median_us[DOCUMENT] / times.median_us[DOCUMENT_LATER]
    tokens = int(times.seq_len[DOCUMENT])
    few = (policy.off / policy.on).dropna()
    measured = (
        f"{gain:.2f}x at Qwen-Image's {tokens} tokens; launch policy alone {_range(few, '.2f')}x up to 4 tokens (model)"
    )
    if gain < 1 + NOTICEABLE and (few < 1 + NOTICEABLE).all():
        return Verdict.refuted(measured, "neither is noticeable here")
    corrections = []
    if gain < (1 - CLOSE) * stated:
        corrections.append(f"{gain:.2f}x instead of {stated:.3f}x at that shape")
    if tokens > FEW_TOKENS:
        corrections.append(
            "the launch for up to 4 tokens is not taken there: what is gained comes from the wider loads"
        )
    return Verdict.corrected(measured, "; ".join(corrections)) if corrections else Verdict.confirmed(measured)


@rule("SG-10", "sglang_protocols", "sglang_second_grid")
def faster_than_positions(protocols: pd.DataFrame, second: pd.DataFrame) -> Verdict:
    stated = evidence.published_speedups().low["SG-10"]
    graphs = protocols[
        (protocols.timer == "graph") & (~protocols.clones.astype(bool)) & (protocols.layout == "split_half")
    ]
    first = ratio(graphs, VLLM, DOCUMENT)
    here = pd.concat([ratio(frame, name, DOCUMENT) for frame in (graphs, second) for name in FAST_POSITIONS])
    if here.empty:
        stand_in = (
            f"; our model of a kernel with positions takes {first.median():.2f} times as long" if len(first) else ""
        )
        return Verdict.not_testable(f"FlashInfer or sgl_kernel on a GPU{stand_in}")
    measured = f"mean {here.mean():.2f}x over {len(here)} cells ({_range(here, '.2f')})"
    if here.mean() >= (1 - CLOSE) * stated:
        return Verdict.confirmed(measured)
    if here.mean() >= 1 + NOTICEABLE:
        return Verdict.corrected(measured, f"{here.mean():.2f}x instead of {stated:.2f}x")
    return Verdict.refuted(measured, "no noticeable difference")


@rule("SG-11", "sglang_head_sizes", "sglang_second_grid")
def flashinfer_is_limited(sizes: pd.DataFrame, second: pd.DataFrame) -> Verdict:
    """Of the version of that time; what the newest at hand takes is said beside it."""
    rows = sizes[(sizes.contender == FLASHINFER) & ~sizes.status.str.startswith("not run")]
    if rows.empty:
        return Verdict.not_testable("FlashInfer on a GPU")
    failed = rows[rows.status != "ok"]
    slower = ratio(second, FLASHINFER, DOCUMENT)
    measured = _where_it_fails(rows)
    measured += f"; {(slower > 1).sum()} of {len(slower)} cells slower than the first version (model)"
    newest = sizes[(sizes.contender == FLASHINFER_NEWEST) & ~sizes.status.str.startswith("not run")]
    if len(newest):
        measured += f"; the newest version {_where_it_fails(newest)}"
    unsupported, mostly = 96 in set(failed.head_dim), (slower > 1).mean() > 0.5
    if unsupported and mostly:
        return Verdict.confirmed(measured)
    if unsupported or mostly:
        return Verdict.corrected(measured, "only that it is slower" if mostly else "only that 96 fails")
    return Verdict.refuted(measured, "neither holds")


def _where_it_fails(rows: pd.DataFrame) -> str:
    failed = rows[rows.status != "ok"]
    sizes = _list(sorted(set(failed.head_dim)))
    return f"fails at head sizes {sizes}" if len(failed) else "runs at every head size measured"


@rule("SG-12", "sglang_published_e2e", "sglang_published_kernel")
def end_to_end_is_unchanged(e2e: pd.DataFrame, kernel: pd.DataFrame) -> Verdict:
    """The document's own numbers: the change of the whole, the sum of its stages, and the most the kernel can do."""
    total, stages = e2e[e2e.row == "E2E Latency"].iloc[0], e2e[e2e.row != "E2E Latency"]
    most = 100 * kernel.most_saved_ms.iloc[0] / total.baseline
    measured = (
        f"{total.change_percent:+.2f} % as a whole, {stages.change_ms.sum():+.0f} ms in the stages; "
        f"all {kernel.calls.iloc[0]} calls at the published gain would save {most:.2f} %"
    )
    if abs(total.change_percent) > E2E_UNCHANGED:
        return Verdict.refuted(measured, f"more than {E2E_UNCHANGED:g} %")
    if most < abs(total.change_percent):
        return Verdict.corrected(
            measured,
            "it could not have changed: the most that the kernel saves is less than the two runs differ, so they say "
            "nothing about the kernel (a new measurement needs SGLang and Qwen-Image)",
        )
    return Verdict.confirmed(measured)


@rule("SG-13", "sglang_diffusion")
def keeping_tables_saves(diffusion: pd.DataFrame) -> Verdict:
    times = _ok(diffusion).set_index(["cell", "contender"])
    both = times.median_us.unstack()
    if not {DOCUMENT, DOCUMENT_CAST} <= set(both):
        return Verdict.not_testable("times with and without the conversion")
    both = both[[DOCUMENT, DOCUMENT_CAST]].dropna()
    factor = both[DOCUMENT_CAST] / both[DOCUMENT]
    extra = (times.launches.unstack()[DOCUMENT_CAST] - times.launches.unstack()[DOCUMENT]).reindex(both.index)
    longer = _range(factor, ".2f")
    measured = f"converting adds {_range(extra, '.0f')} launches and makes a call {longer} times as long (model)"
    if (factor >= 1 + NOTICEABLE).all():
        return Verdict.confirmed(measured)
    if (factor >= 1 + NOTICEABLE).any():
        return Verdict.corrected(measured, f"noticeable only for {_list(factor.index[factor >= 1 + NOTICEABLE])}")
    return Verdict.refuted(measured, "no noticeable difference on the GPU")


@rule("SG-14", "sglang_protocols")
def helps_language_models(protocols: pd.DataFrame) -> Verdict:
    """GQA and MQA cells, whose tables are gathered once a step and shared by the layers."""
    graphs = protocols[
        (protocols.timer == "graph") & (~protocols.clones.astype(bool)) & (protocols.layout == "split_half")
    ]
    graphs = graphs[graphs.q_heads > graphs.k_heads]
    times = _ok(graphs).pivot_table(index="cell", columns="contender", values="median_us", sort=False)
    if not {DOCUMENT, DOCUMENT_GATHER, VLLM} <= set(times):
        return Verdict.not_testable("times of the kernel, of its gather and of vLLM's kernel")
    shared = times[DOCUMENT] + (times[DOCUMENT_GATHER] - times[DOCUMENT]) / LAYERS
    gain = (times[VLLM] / shared).dropna()
    measured = (
        f"{_range(gain, '.2f')}x over vLLM's kernel in {len(gain)} GQA and MQA cells, "
        f"a gather shared by {LAYERS} layers (models)"
    )
    helped = gain >= 1 + NOTICEABLE
    if helped.all():
        return Verdict.confirmed(measured)
    if helped.any():
        return Verdict.corrected(
            measured, f"noticeable in {helped.sum()} of {len(gain)} cells: {_list(gain.index[helped])}"
        )
    return Verdict.refuted(measured, "as fast as what language models have, at most")


@rule("SG-15", "sglang_diffusion", "sglang_vector_widths", "sglang_alignment")
def simpler_is_enough(diffusion: pd.DataFrame, widths: pd.DataFrame, alignment: pd.DataFrame) -> Verdict:
    """Two parts: the persistent kernel is not noticeably slower; by shape alone nothing is unaligned."""
    times = _ok(diffusion).pivot_table(index="cell", columns="contender", values="median_us", sort=False)
    if not {DOCUMENT_LATER, PERSISTENT} <= set(times):
        return Verdict.not_testable("times of the later version and of the persistent kernel")
    speed = (times[DOCUMENT_LATER] / times[PERSISTENT]).dropna()
    aligned = bool(alignment.aligned.all())
    model = _ok(widths[widths.pairs_per_thread == widths.pairs_per_thread.max()])
    offset = model.pivot_table(index="layout", columns=model.offset_bytes > 0, values="median_us")
    cost = (
        f"; 2 bytes off they take {_range(offset[True] / offset[False], '.2f')} times as long"
        if len(offset.T) == 2
        else ""
    )
    measured = (
        f"a warp per head is {_range(speed, '.2f')} times as fast as the later version (models); "
        f"{int(alignment.aligned.sum())} of {len(alignment)} parts of heads and tables lie at 16 bytes{cost}"
    )
    simple = bool((speed >= 1 - NOTICEABLE).all())
    if simple and aligned:
        return Verdict.confirmed(measured)
    if simple or aligned:
        return Verdict.corrected(measured, "only the alignment: it is slower" if aligned else "only the kernel")
    return Verdict.refuted(measured, "it is slower, and head sizes leave parts unaligned")


# -------------------------------------------------------------------------------------------------------- helpers


def ratio(frame: pd.DataFrame, slower: str, faster: str) -> pd.Series:
    """Time of one contender over that of another, by cell and layout, where both ran."""
    times = _ok(frame).pivot_table(index=["cell", "layout"], columns="contender", values="median_us", sort=False)
    if not {slower, faster} <= set(times):
        return pd.Series(dtype=float)
    return (times[slower] / times[faster]).dropna()


def _judge_protocol(
    protocols: pd.DataFrame, peer: str, over_cells, claimed: float, word: str, but_for_last: str | None = None
) -> Verdict:
    """Confirmed if a fair comparison reaches the claim; corrected if it is a smaller gain, or holds ``but_for_last``.

    Refuted if the kernel is not noticeably faster when fairly compared, whatever the published protocol gives.
    """
    table = ratios(protocols, peer)
    found = over_cells(table)
    if found[[PUBLISHED, FAIR]].isna().any():
        return Verdict.not_testable(f"times of the first version's kernel and of {NAMES[peer]} under both protocols")
    names = [step.name if step.name != FAIR else f"{LAST_STEP[peer]} (fair)" for step in STEPS[peer]]
    measured = f"{word} over {len(table)} cells: " + ", ".join(
        f"{name} {value:.2f}x" for name, value in zip(names, found, strict=True)
    )
    reached = max(1 + NOTICEABLE, (1 - CLOSE) * claimed)
    if found[FAIR] >= reached:
        return Verdict.confirmed(measured)
    if found[FAIR] >= 1 + NOTICEABLE:
        return Verdict.corrected(measured, f"{found[FAIR]:.2f}x when fairly compared")
    if but_for_last and found.iloc[-2] >= reached:
        return Verdict.corrected(measured, f"{found.iloc[-2]:.2f}x {but_for_last}")
    by_protocol = "; it is the protocol that reaches the claim" if found[PUBLISHED] >= reached else ""
    return Verdict.refuted(measured, f"not noticeably faster when fairly compared{by_protocol}")


def _ok(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[(frame.status == "ok") & frame.median_us.notna()]


def _range(values: pd.Series, spec: str = "") -> str:
    low, high = format(values.min(), spec), format(values.max(), spec)
    return low if low == high else f"{low} to {high}"


def _list(values) -> str:
    return ", ".join(str(value) for value in values) or "none"
