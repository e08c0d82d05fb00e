"""The rules that judge claims SG-01 to SG-15.

The kernels of the pull request and of vLLM are re-creations (`ropelab.study.sglang.models`): the same division of the
work and the same accesses, compiled by Triton. Figures that rest on one say "(model)". How the pull request's kernel
compares with another package's is judged only where that package was run: two models differ by what we wrote.
"""

from __future__ import annotations

import pandas as pd

from ropelab.study.engine.ledger import rule
from ropelab.study.engine.verdict import Status, Verdict
from ropelab.study.sglang import evidence
from ropelab.study.sglang.contenders import (
    COMPILED,
    DOCUMENT,
    DOCUMENT_CAST,
    DOCUMENT_GATHER,
    EAGER,
    FLASH,
    FLASH_FULL,
    FLASHINFER,
    FLASHINFER_NEWEST,
    PERSISTENT,
    REAL_VLLM,
    SECOND,
    SGL_KERNEL,
    THIRD,
    VLLM,
)
from ropelab.study.sglang.evidence import OUT_OF_BOUNDS, THEIR_OPERATOR
from ropelab.study.sglang.models import FEW_TOKENS
from ropelab.study.sglang.steps import APART, FAIR, PUBLISHED, STEP_NAMES, STEPS, ratios, timed_alike, timer

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

OF_LANGUAGE_MODELS = (REAL_VLLM, FLASHINFER, SGL_KERNEL)
"""What language models are served with."""

OTHERS = (FLASH, FLASHINFER, SGL_KERNEL, REAL_VLLM)
"""The packages that the document compares itself with, in the versions of its time."""

BARELY = 0.02
"""A ratio that is nearer than 2 % to the bound that decides is said to be: it may lie beyond it the next time."""


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
    for outcome, effect in (("wrong", "turn other features"), (OUT_OF_BOUNDS, "turn what lies past the head")):
        silent = theirs[(theirs.outcome == outcome) & ~theirs.claimed]
        if not silent.empty:
            names = f"tables with a column {silent.tables.iloc[0]} are taken for {silent.layout.iloc[0]}"
            corrections.append(f"{names} without an error and {effect}: their width has two meanings")
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
    others = sizes[sizes.contender.isin(OTHERS) & ~sizes.status.str.startswith("not run")]
    if others.empty:
        return Verdict.not_testable("one of the packages that are said to leave sizes out")
    left_out = others[(others.status != "ok") & others.head_dim.isin(uncommon.head_dim)]
    for name, rows in others.groupby("contender", sort=False):
        sizes_ = sorted(set(left_out[left_out.contender == name].head_dim))
        measured += f"; {name} leaves out {_list(sizes_)} of {rows.head_dim.nunique()}"
    corrections = []
    if not failed.empty:
        corrections.append("not " + _list(sorted(set(failed.head_dim))))
    if 80 not in set(left_out.head_dim):
        corrections.append(f"80 runs in {_list(dict.fromkeys(others.contender))} as well")
    verdict = Verdict.corrected(measured, "; ".join(corrections)) if corrections else Verdict.confirmed(measured)
    return verdict.of_model("that they run is shown for a model, which takes any size as the kernel's source does")


@rule("SG-03", "sglang_accuracy", "sglang_sources")
def matches_a_reference(accuracy: pd.DataFrame, sources: pd.DataFrame) -> Verdict:
    """Right if the error, against a reference with the very same tables, is below one rounding."""
    beyond = accuracy[accuracy.same > accuracy.rounding]
    measured = "error against the same tables (model): " + ", ".join(
        f"{dtype} {_range(rows.same, '.1e')}" for dtype, rows in accuracy.groupby("dtype", sort=False)
    )
    if not beyond.empty:
        row = beyond.loc[(beyond.same / beyond.rounding).idxmax()]
        return Verdict.refuted(measured, f"{row['dtype']}: {row.same:.1e}, one rounding is {row.rounding:.1e}")
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
    tested = sources[sources.tolerance.notna()]
    if tested.layouts.nunique() == 1:
        notes.append(f"its test rotates only {tested.layouts.iloc[0]}: the other layout was never compared")
    return Verdict.corrected(measured, "; ".join(notes)) if notes else Verdict.confirmed(measured)


@rule("SG-04", "sglang_protocols")
def faster_than_vllm(protocols: pd.DataFrame) -> Verdict:
    """Against vLLM's own kernel, with the gather of the tables that it does itself; corrected if only without.

    Where that is not to be had, the two models show what the protocol makes of equal kernels.
    """
    claimed = evidence.published_speedups().low["SG-04"]
    graphs = timed_alike(protocols)
    gathered, without = (ratio(graphs, REAL_VLLM, name) for name in (DOCUMENT_GATHER, DOCUMENT))
    if gathered.empty:
        found = ratios(protocols, VLLM).median()
        steps = [(step.name, found[step.name]) for step in STEPS[VLLM] if not pd.isna(found[step.name])]
        said = ", ".join(f"{STEP_NAMES[VLLM].get(name, name)} {value:.2f}x" for name, value in steps)
        alone = f"the protocol alone, on two models that differ by one load, median: {said}"
        measured = "; ".join(filter(None, (alone, timer(protocols)))) if steps else ""
        return Verdict(
            Status.NOT_TESTABLE, measured, "vLLM on a GPU; models of two kernels cannot tell which is faster"
        )
    measured = f"median over {len(gathered)} cells (model): {without.median():.2f}x, "
    measured += f"with the same gather {gathered.median():.2f}x"
    reached = max(1 + NOTICEABLE, (1 - CLOSE) * claimed)
    if gathered.median() >= reached:
        return Verdict.confirmed(measured)
    if without.median() >= reached:
        return Verdict.corrected(measured, f"{without.median():.2f}x if the gather is not counted")
    return Verdict.refuted(measured, "not noticeably faster when fairly compared")


@rule("SG-05", "sglang_protocols", "sglang_bytes")
def faster_than_flash_attention(protocols: pd.DataFrame, moved: pd.DataFrame) -> Verdict:
    """At most over the cells, with q and k packed (flash-attn rotates them in one launch) and apart (in two).

    Confirmed if both reach the claim; corrected if either is noticeable; else refuted, whatever the protocol gives.
    """
    claimed = evidence.published_speedups().low["SG-05"]
    table = ratios(protocols, FLASH_FULL)
    most = table.max()
    if most[[PUBLISHED, FAIR, APART]].isna().any():
        return Verdict.not_testable("times of the first version's kernel and of flash-attn under both protocols")
    steps = [(STEP_NAMES[FLASH_FULL].get(step.name, step.name), most[step.name]) for step in STEPS[FLASH_FULL]]
    over = moved[moved.contender == FLASH].over
    measured = (
        f"at most over {len(table)} cells (model): " + ", ".join(f"{name} {value:.2f}x" for name, value in steps)
    ) + f"; its benchmark let flash-attn move {_range(over, '.2f')} times the bytes"
    if said := timer(protocols):
        measured += f"; {said}"
    apart, packed = most[APART], most[FAIR]
    reached = (1 - CLOSE) * claimed
    if min(apart, packed) >= reached:
        return Verdict.confirmed(measured)
    if max(apart, packed) >= 1 + NOTICEABLE:
        largest = table[APART].idxmax()
        return Verdict.corrected(
            measured,
            f"{apart:.2f}x where q and k lie apart (two launches of flash-attn; at {largest}), "
            f"{packed:.2f}x where they are packed",
        )
    by_protocol = "; it is the protocol that reaches the claim" if most[PUBLISHED] >= reached else ""
    return Verdict.refuted(measured, f"not noticeably faster when fairly compared{by_protocol}")


@rule("SG-06", "sglang_sources")
def helper_is_there_twice(sources: pd.DataFrame) -> Verdict:
    if len(sources) < 2:
        return Verdict.not_testable("both files, the benchmark and the test")
    defining = sources[sources.defines]
    where = [f"{row.file} at {row.commit[:8]}" for row in defining.itertuples()]
    measured = f"{sources.helper.iloc[0]} is defined in {_list(where)}"
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
    """Of the second version; what 16-byte accesses then add is said beside it."""
    times = _ok(diffusion[diffusion.cell == "Qwen-Image"]).set_index("contender")
    policy = _ok(low[(low.family == "second") & low.policy.isin(("on", "off"))])
    policy = policy[policy.seq_len <= FEW_TOKENS].pivot_table(
        index=["layout", "seq_len"], columns="policy", values="median_us"
    )
    if not {DOCUMENT, SECOND} <= set(times.index) or not {"on", "off"} <= set(policy):
        return Verdict.not_testable("times of both versions at Qwen-Image's shape and with few tokens")
    stated, gain = published.ratio.iloc[0], times.median_us[DOCUMENT] / times.median_us[SECOND]
    tokens = int(times.seq_len[DOCUMENT])
    few = (policy.off / policy.on).dropna()
    measured = f"{gain:.2f}x at Qwen-Image's {tokens} tokens; launch policy alone {_range(few, '.2f')}x up to 4 tokens"
    if THIRD in times.index:
        measured += f"; the third version's 16-byte accesses {times.median_us[DOCUMENT] / times.median_us[THIRD]:.2f}x"
    measured += " (models)"
    if gain < 1 + NOTICEABLE and (few < 1 + NOTICEABLE).all():
        return Verdict.refuted(measured, "neither is noticeable here")
    corrections = []
    if gain < (1 - CLOSE) * stated:
        small = ", which is not noticeable" if gain < 1 + NOTICEABLE else ""
        corrections.append(f"{gain:.2f}x instead of {stated:.3f}x at that shape{small}")
    if tokens > FEW_TOKENS:
        corrections.append(
            f"neither is in use there: the launch is for up to {FEW_TOKENS} tokens, the float2 path for float32 "
            "tensors; what changes in bf16 is the size of the blocks, 128 threads instead of 512"
        )
    return Verdict.corrected(measured, "; ".join(corrections)) if corrections else Verdict.confirmed(measured)


@rule("SG-10", "sglang_protocols")
def faster_than_positions(protocols: pd.DataFrame) -> Verdict:
    """The second version's kernel, of which it was said, over the first grid, whose benchmark has the positions API.

    "On average (weighted across configs)": the times of a configuration are averaged over its lengths, as the benchmark
    prints them, and the ratios of these averages over the configurations.
    """
    stated = evidence.published_speedups().low["SG-10"]
    graphs = timed_alike(protocols)
    names = [name for name in FAST_POSITIONS if not ratio(graphs, name, SECOND).empty]
    if not names:
        return Verdict.not_testable("FlashInfer or sgl_kernel, and the model of the second version, on a GPU")
    said = []
    for name in names:
        means, cells = _by_configuration(graphs, name, SECOND), ratio(graphs, name, SECOND)
        third = None if ratio(graphs, name, THIRD).empty else _by_configuration(graphs, name, THIRD).mean()
        said.append(
            f"{name} takes {means.mean():.2f} times as long as the second version (model; mean of {means.size} "
            f"configurations, {_range(cells, '.2f')} in {len(cells)} cells)"
            + (f" and {third:.2f} times as long as the third" if third is not None else "")
        )
    measured, name = "; ".join(said), names[0]
    gathered = ratio(graphs, DOCUMENT_GATHER, DOCUMENT)
    if not gathered.empty:
        measured += (
            f"; {name} finds its rows by itself: gathering them makes the first version take "
            f"{_range(gathered, '.2f')} times as long"
        )
    gain, cells = _by_configuration(graphs, name, SECOND).mean(), ratio(graphs, name, SECOND)
    if gain >= (1 - CLOSE) * stated:
        return Verdict.confirmed(measured)
    if gain >= 1 + NOTICEABLE:
        return Verdict.corrected(measured, f"{gain:.2f}x instead of {stated:.2f}x")
    why = "that version reads bf16 two bytes at a time, FlashInfer 16"
    wide = ratio(graphs, name, THIRD)
    noticeable = cells >= 1 + NOTICEABLE
    where = f", though in {noticeable.sum()} of {len(noticeable)} cells" if noticeable.any() else ""
    note = f"not noticeably faster on average{where}: {why}"
    if not wide.empty and (later := _by_configuration(graphs, name, THIRD).mean()) >= 1 + NOTICEABLE:
        note += f"; the third version (model) is {later:.2f} times as fast"
    return Verdict.refuted(measured, note)


@rule("SG-11", "sglang_head_sizes", "sglang_second_grid")
def flashinfer_is_limited(sizes: pd.DataFrame, second: pd.DataFrame) -> Verdict:
    """Of the version of that time, against the third version's kernel; the newest at hand is said beside it.

    "Slower" is what takes noticeably longer; "mostly", more than half of the cells of the later grid, which is the one
    that the statement was made with.
    """
    rows = sizes[(sizes.contender == FLASHINFER) & ~sizes.status.str.startswith("not run")]
    slower = ratio(second, FLASHINFER, THIRD)
    if rows.empty or slower.empty:
        return Verdict.not_testable("FlashInfer, and the model of the third version, on a GPU")
    failed = rows[rows.status != "ok"]
    takes = "takes {} times as long as the third version (model)"
    longer = slower >= 1 + NOTICEABLE
    measured = f"{_where_it_fails(rows)}; {takes.format(_range(slower, '.2f'))}, "
    measured += f"noticeably longer in {longer.sum()} of {len(slower)} cells"
    newest = sizes[(sizes.contender == FLASHINFER_NEWEST) & ~sizes.status.str.startswith("not run")]
    if len(newest):
        measured += f"; in place, the newest version {_where_it_fails(newest)}"
    unsupported, mostly = 96 in set(failed.head_dim), longer.mean() > 0.5
    if unsupported and mostly:
        return Verdict.confirmed(measured)
    if unsupported or mostly:
        how_many = f"in {longer.sum()} of {len(slower)} cells"
        held = f"that it is mostly slower holds ({how_many}), that 96 fails does not"
        if unsupported:
            held = f"that 96 fails holds, that it is mostly slower does not ({how_many})"
        return Verdict.corrected(measured, held)
    return Verdict.refuted(measured, "neither holds")


def _where_it_fails(rows: pd.DataFrame) -> str:
    said = []
    for word, some in (
        ("gives wrong results", rows.status.str.startswith("wrong")),
        ("fails", rows.status.str.startswith("failed")),
    ):
        if some.any():
            said.append(f"{word} at head sizes {_list(sorted(set(rows[some].head_dim)))}")
    return " and ".join(said) or "runs at every head size measured"


@rule("SG-12", "sglang_published_e2e", "sglang_published_kernel")
def end_to_end_is_unchanged(e2e: pd.DataFrame, kernel: pd.DataFrame) -> Verdict:
    """The document's own numbers: the change of the whole, the sum of its stages, and what the kernel can do to it."""
    total, stages = e2e[e2e.row == "E2E Latency"].iloc[0], e2e[e2e.row != "E2E Latency"]
    (row,) = kernel.itertuples()
    expected, everything = (100 * value / total.baseline for value in (row.expected_ms, row.all_ms))
    measured = (
        f"{total.change_percent:+.2f} % as a whole, {stages.change_ms.sum():+.0f} ms in the stages; assuming "
        f"{row.calls:,} calls an image, a kernel as much faster as claimed saves {row.expected_ms:.0f} ms, "
        f"{expected:.2f} %, and all of the rotation is {everything:.1f} %"
    )
    if abs(total.change_percent) > E2E_UNCHANGED:
        return Verdict.refuted(measured, f"more than {E2E_UNCHANGED:g} %")
    if expected < abs(total.change_percent):
        return Verdict.corrected(
            measured,
            "a gain of that size would not show: it is less than the two runs differ, so they say nothing about the "
            "kernel (a new measurement needs SGLang and Qwen-Image)",
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
    if abs(factor.min() / (1 + NOTICEABLE) - 1) < BARELY:
        measured += f"; at {factor.idxmin()} barely on this side of the {NOTICEABLE:.0%} that count"
    if (factor >= 1 + NOTICEABLE).all():
        return Verdict.confirmed(measured)
    if (factor >= 1 + NOTICEABLE).any():
        return Verdict.corrected(measured, f"noticeable only for {_list(factor.index[factor >= 1 + NOTICEABLE])}")
    return Verdict.refuted(measured, "no noticeable difference on the GPU")


@rule("SG-14", "sglang_protocols")
def helps_language_models(protocols: pd.DataFrame) -> Verdict:
    """GQA and MQA cells, whose tables are gathered once a step and shared by the layers, against what serves them."""
    graphs = timed_alike(protocols)
    graphs = graphs[graphs.q_heads > graphs.k_heads]
    times = _ok(graphs).pivot_table(index="cell", columns="contender", values="median_us", sort=False)
    if not {DOCUMENT, DOCUMENT_GATHER} <= set(times):
        return Verdict.not_testable("times of the kernel and of its gather")
    gather = (times[DOCUMENT_GATHER] - times[DOCUMENT]) / LAYERS
    shared = times[[name for name in (DOCUMENT, SECOND, THIRD) if name in times]].min(axis=1) + gather
    theirs = [name for name in OF_LANGUAGE_MODELS if name in times]
    if not theirs:
        plain = {name: (times[name] / shared).dropna() for name in (EAGER, COMPILED) if name in times}
        said = ", ".join(f"{name} {_range(gain, '.1f')}x" for name, gain in plain.items())
        measured = f"over plain torch, a gather shared by {LAYERS} layers (model): {said}" if said else ""
        return Verdict(Status.NOT_TESTABLE, measured, f"one of {_list(OF_LANGUAGE_MODELS)} on a GPU")
    gain = (times[theirs].min(axis=1) / shared).dropna()
    measured = (
        f"its fastest version (model) {_range(gain, '.2f')}x over {_list(theirs)} in {len(gain)} GQA and MQA cells, "
        f"a gather shared by {LAYERS} layers"
    )
    helped = gain >= 1 + NOTICEABLE
    if helped.all():
        return Verdict.confirmed(measured)
    if helped.any():
        return Verdict.corrected(
            measured, f"noticeable in {helped.sum()} of {len(gain)} cells: {_list(gain.index[helped])}"
        )
    return Verdict.refuted(measured, "as fast as what language models have, at most")


@rule("SG-15", "sglang_protocols", "sglang_diffusion", "sglang_vector_widths", "sglang_alignment")
def simpler_is_enough(
    protocols: pd.DataFrame, diffusion: pd.DataFrame, widths: pd.DataFrame, alignment: pd.DataFrame
) -> Verdict:
    """Two parts: the persistent kernel is not noticeably slower; by shape alone nothing is unaligned.

    Over the first grid and the diffusion shapes, with the number of blocks that is best in each cell; against the third
    version, which reads 16 bytes at a time as the one under review did.
    """
    frames = [_ok(frame) for frame in (timed_alike(protocols), diffusion)]
    cells = pd.concat(frames).assign(tokens=lambda rows: rows.batch * rows.seq_len)
    times = cells.pivot_table(index=["tokens", "cell", "layout"], columns="contender", values="median_us", sort=False)
    variants = [name for name in times if name.startswith(PERSISTENT)]
    if THIRD not in times or not variants:
        return Verdict.not_testable("times of the third version and of the persistent kernel")
    speed = (times[THIRD] / times[variants].min(axis=1)).dropna()
    aligned = bool(alignment.aligned.all())
    model = _ok(widths[widths.pairs_per_thread == widths.pairs_per_thread.max()])
    offset = model.pivot_table(index="layout", columns=model.offset_bytes > 0, values="median_us")
    cost = (
        f"; 2 bytes off they take {_range(offset[True] / offset[False], '.2f')} times as long"
        if len(offset.T) == 2
        else ""
    )
    enough = speed >= 1 - NOTICEABLE
    measured = (
        f"a warp per head is {_range(speed, '.2f')} times as fast as the third version (models, best of "
        f"{len(variants)} numbers of blocks), in {enough.sum()} of {len(speed)} cells as fast; "
        f"{int(alignment.aligned.sum())} of {len(alignment)} parts of heads and tables lie at 16 bytes{cost}"
    )
    if enough.all() and aligned:
        return Verdict.confirmed(measured)
    tokens = speed.index.get_level_values("tokens")
    first_slow = tokens[~enough].min() if not enough.all() else None
    if first_slow is None:
        return Verdict.corrected(measured, "only the kernel: head sizes leave parts unaligned")
    below = tokens < first_slow
    where = f"as fast only below {first_slow:,} tokens ({_range(speed[below], '.2f')})" if below.any() else "slower"
    beyond = f"{where}, from there {_range(speed[~below], '.2f')}" if below.any() else where
    if aligned or below.any():
        return Verdict.corrected(measured, f"the kernel is {beyond}" + ("" if aligned else "; parts lie unaligned"))
    return Verdict.refuted(measured, "it is slower, and head sizes leave parts unaligned")


# -------------------------------------------------------------------------------------------------------- helpers


def ratio(frame: pd.DataFrame, slower: str, faster: str) -> pd.Series:
    """Time of one contender over that of another, by cell and layout, where both ran."""
    times = _ok(frame).pivot_table(index=["cell", "layout"], columns="contender", values="median_us", sort=False)
    if not {slower, faster} <= set(times):
        return pd.Series(dtype=float)
    return (times[slower] / times[faster]).dropna()


def _by_configuration(graphs: pd.DataFrame, slower: str, faster: str) -> pd.Series:
    """Mean time of one contender over that of another, by configuration, over the lengths at which both ran."""
    configuration = ["batch", "q_heads", "k_heads", "head_dim"]
    times = _ok(graphs).pivot_table(index=[*configuration, "seq_len"], columns="contender", values="median_us")
    both = times[[slower, faster]].dropna().groupby(configuration).mean()
    return both[slower] / both[faster]


def _ok(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[(frame.status == "ok") & frame.median_us.notna()]


def _range(values: pd.Series, spec: str = "") -> str:
    low, high = format(values.min(), spec), format(values.max(), spec)
    return low if low == high else f"{low} to {high}"


def _list(values) -> str:
    return ", ".join(str(value) for value in values) or "none"
