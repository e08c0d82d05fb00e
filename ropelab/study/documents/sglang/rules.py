"""The rules that judge the claims of SGLang#14302.

The rules take the rows of the published kernels where a record has them (`judged`). A record without them has models
of the kernels: a verdict on a model has the basis `Basis.MODEL`, with which a claim neither holds nor fails. vLLM,
flash-attn and FlashInfer are the packages.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from statistics import median

import pandas as pd

from ropelab.bench.rows import is_right, timed
from ropelab.layout.pairing import LAYOUTS
from ropelab.study.documents.sglang import evidence, findings, measure
from ropelab.study.documents.sglang.calls import OUT_OF_BOUNDS
from ropelab.study.documents.sglang.cell_times import by_configuration, ran, ratio, ratios_of, rows_of, times_of
from ropelab.study.documents.sglang.contenders import (
    DOCUMENT,
    DOCUMENT_CAST,
    DOCUMENT_GATHER,
    EAGER,
    FLASH,
    FLASH_FULL,
    FLASH_PACKED,
    FLASHINFER,
    FLASHINFER_NEWEST,
    PERSISTENT_PEERS,
    REAL_VLLM,
    SECOND,
    SGL_KERNEL,
    THIRD,
    VLLM,
)
from ropelab.study.documents.sglang.evidence import THEIR_OPERATOR
from ropelab.study.documents.sglang.judged import judged, kernels_of
from ropelab.study.documents.sglang.kernel_contenders import (
    FIRST_KERNEL,
    JUST_IN_TIME,
    JUST_IN_TIME_CAST,
    LAST_KERNEL,
    THIRD_KERNEL,
)
from ropelab.study.documents.sglang.models import FEW_TOKENS
from ropelab.study.documents.sglang.steps import STEP_NAMES, STEPS, ratios, timed_alike, timer
from ropelab.study.engine import noise
from ropelab.study.engine.claims import Claim
from ropelab.study.engine.judging import above, below, counted, longer, needed, size, sizes
from ropelab.study.engine.ledger import rule
from ropelab.study.engine.noise import Interval
from ropelab.study.engine.verdict import FAILS, HOLDS, Basis, Untold, Verdict, fact, untold
from ropelab.study.engine.words import how_many, listed, value_range

LAYERS = 32
"""The layers of a language model that share one gather of the tables in a step: the layers of Llama 3 8B.

The heads of Llama 3 8B are the document's 32/8 heads of 128.
"""

FAST_POSITIONS = (FLASHINFER,)
"""The contenders that are the positions API on FlashInfer's kernel. SGLang's own package no longer has this kernel."""

OF_LANGUAGE_MODELS = (REAL_VLLM, FLASHINFER, SGL_KERNEL)
"""Packages that serve language models."""

EARLIER = (FLASH, FLASHINFER)
"""The packages that a record of head sizes must have, in versions from the time of the pull request."""

AHEAD_OF_TIME = "the model is that of a kernel compiled ahead of time; the document times one compiled just in time"


# ----------------------------------------------------------------------------------------------------- supported shapes


@rule("SG-01", "sglang_shapes", "sglang_flags", basis=Basis.MODEL)
def takes_every_shape(claim: Claim, shapes: pd.DataFrame, flags: pd.DataFrame) -> Verdict:
    basis, name = (Basis.CODE, FIRST_KERNEL) if FIRST_KERNEL in set(shapes.operator) else (Basis.MODEL, THEIR_OPERATOR)
    theirs = shapes[shapes.operator == name]
    claimed = theirs[theirs.claimed]
    expected = set(product((2, 3), LAYOUTS, ("4/4", "4/2", "4/1")))
    if set(claimed[["rank", "layout", "heads"]].itertuples(index=False, name=None)) != expected:
        raise Untold(claim.needs)
    right = claimed.outcome == "right"
    remarks = [f"{row.rank}-D, {row.layout}, {row.heads}: {row.outcome}" for row in claimed[~right].itertuples()]
    flagged = flags[(flags.implementation == THEIR_OPERATOR) & (flags.formula != flags.says)]
    for row in flagged.head(1).itertuples():
        same_flag = flags[(flags.flag == row.flag) & (flags.value == row.value) & (flags.formula == row.says)]
        others = listed(same_flag.implementation)
        remarks.append(f"{row.flag} = {row.value} rotates {row.formula}, where {others} rotate {row.says}")
    for outcome, effect in (("wrong", "rotate the wrong features"), (OUT_OF_BOUNDS, "rotate features past the head")):
        for row in theirs[(theirs.outcome == outcome) & ~theirs.claimed].head(1).itertuples():
            remarks.append(
                f"tables with a column {row.tables} are taken for {row.layout} without an error and {effect}: their "
                "width has two meanings"
            )
    measured = f"{right.sum()} of {len(claimed)} listed combinations are right"
    return counted(list(right), claim.quantifier).with_text(measured, *remarks).with_basis(basis)


@rule("SG-02", "sglang_head_sizes", basis=Basis.PACKAGE)
def others_leave_sizes_out(claim: Claim, by_size: pd.DataFrame) -> Verdict:
    """A cell is a package that was run at the head size that the claim names."""
    (named,) = map(float, claim.numbers)
    rows = ran(by_size)
    at_named = rows[(rows.head_dim == named) & rows.contender.isin((*EARLIER, SGL_KERNEL, REAL_VLLM))]
    if not set(EARLIER) <= set(at_named.contender):
        raise Untold(claim.needs)
    left_out = rows[~is_right(rows) & rows.contender.isin(at_named.contender)].groupby("contender").head_dim
    said = {name: listed(sorted(set(dims))) for name, dims in left_out}
    return counted(list(~is_right(at_named)), claim.quantifier).with_text(
        "; ".join(
            f"{name} leaves out {said.get(name, 'none')} of {rows[rows.contender == name].head_dim.nunique()}"
            for name in at_named.contender
        ),
        f"{named:g} runs in {listed(at_named[is_right(at_named)].contender)}",
        f"not run: {listed(by_size.contender[by_size.status.str.startswith('not run')])}",
    )


@rule("SG-16", "sglang_head_sizes", basis=Basis.MODEL)
def runs_uncommon_sizes(claim: Claim, by_size: pd.DataFrame) -> Verdict:
    """A cell is a head size that is no power of two, in a layout."""
    uncommon = [cell for cell in measure.head_size_cells() if cell.head_dim & (cell.head_dim - 1)]
    by_size, basis = judged(by_size, kernels_of(DOCUMENT))
    rows = needed(rows_of(by_size, uncommon, DOCUMENT), claim.needs)
    runs = is_right(rows)
    measured = f"{listed(sorted(set(rows[runs].head_dim)))} run and are right"
    if runs.any():
        measured += f", at {value_range(rows[runs].fraction_of_copy)} of a copy"
    return (
        counted(list(runs), claim.quantifier)
        .with_text(measured, "the kernel's source takes any size")
        .with_basis(basis)
    )


@rule("SG-03", "sglang_accuracy", "sglang_sources", basis=Basis.MODEL)
def matches_a_reference(claim: Claim, accuracy: pd.DataFrame, sources: pd.DataFrame) -> Verdict:
    """The rule takes dtypes and tolerance from the test. It judges a model with and without fused multiply-adds."""
    run = accuracy[accuracy.operator != THEIR_OPERATOR]
    accuracy = accuracy[accuracy.operator == THEIR_OPERATOR]
    half = accuracy[accuracy.dtype.isin(("bfloat16", "float16"))]
    tested = sources[sources.tolerance.notna()]
    if half.dtype.nunique() < 2 or tested.empty:
        raise Untold(claim.needs)
    tolerance = float(tested.tolerance.iloc[0])
    differences = list(run.difference) or list(pd.concat([half.difference, half.fused]))
    found = [difference < tolerance for difference in differences]
    cases = f" in {run.calls.sum():,.0f} calls" if len(run) else ", with and without fused multiply-adds"
    more, drift = 100 * (half.exact / half.same - 1), half.float32_angles / half.exact
    worst = half.loc[drift.idxmax()]
    errors = listed(f"{name} {value_range(rows.same, '.1e')}" for name, rows in accuracy.groupby("dtype", sort=False))
    return (
        counted(found, claim.quantifier)
        .with_text(
            f"at most {max(differences):.2g} from the reference{cases}; its test allows {tolerance:g}; "
            f"relative error of our model: {errors}",
            "products of two 16-bit numbers are exact in float32, so kernels that add them there round alike",
            "a reference with the same tables does not show the cost of rounding them: against exact tables the error "
            f"is {value_range(more, '.0f')} % larger",
            "tables from float32 angles, as its benchmark makes them, add to it far out "
            f"({worst['dtype']} at position {worst.position:,}: {drift.max():.3g} times the error)",
            f"its test rotates only {tested.layouts.iloc[0]}: the other layout was never compared"
            if tested.layouts.nunique() == 1
            else "",
        )
        .with_basis(Basis.CODE if len(run) else Basis.MODEL)
    )


@rule("SG-11", "sglang_head_sizes", basis=Basis.PACKAGE)
def flashinfer_is_limited(claim: Claim, by_size: pd.DataFrame) -> Verdict:
    """A cell is a layout, at the head size that the claim names."""
    (named,) = map(float, claim.numbers)
    cells = [cell for cell in measure.head_size_cells() if cell.head_dim == named]
    rows = needed(rows_of(by_size, cells, FLASHINFER), claim.needs)
    own, newest = (ran(by_size[by_size.contender == name]) for name in (FLASHINFER, FLASHINFER_NEWEST))
    return counted(list(rows.status.str.startswith("failed")), claim.quantifier).with_text(
        _where_it_fails(own), f"in place, the newest version {_where_it_fails(newest)}" if len(newest) else ""
    )


# ------------------------------------------------------------------------------------------ speed beside other packages


@rule("SG-04", "sglang_protocols", basis=Basis.MODEL)
def faster_than_vllm(claim: Claim, protocols: pd.DataFrame) -> Verdict:
    """The rule compares with vLLM's own kernel twice: without a gather, and with the gather that vLLM does itself.

    Without a gather, the kernel under review finds a row of its tables for each token. Where vLLM was not run, the
    model of its kernel shows how the protocol alone separates two kernels that differ by one load.
    """
    stated = evidence.published_speedups().loc["SG-04"]
    protocols, basis = judged(protocols, kernels_of(DOCUMENT, DOCUMENT_GATHER, VLLM))
    found = ratios(protocols, VLLM).median().dropna()
    steps = ", ".join(f"{STEP_NAMES[VLLM].get(name, name)} {value:.2f}x" for name, value in found.items())
    what = "by protocol" if basis is Basis.CODE else "the protocol alone, on two models that differ by one load"
    alone = f"{what}, median: {steps}" if steps else ""
    times = times_of(timed_alike(protocols), measure.first_cells(), DOCUMENT, DOCUMENT_GATHER, REAL_VLLM)
    if times.empty:
        return untold(claim.needs).with_text("; ".join(filter(None, (alone, timer(protocols))))).with_basis(basis)
    effects = {name: list(times[REAL_VLLM] / times[name]) for name in (DOCUMENT, DOCUMENT_GATHER)}
    verdicts = [size(x, min(max(x.value, stated.low), stated.high)) for found in effects.values() for x in found]
    return (
        sizes(verdicts, claim.quantifier, claim.needs)
        .with_text(
            f"{value_range(effects[DOCUMENT])}x in {len(times)} cells, with the same gather "
            f"{value_range(effects[DOCUMENT_GATHER])}x",
            alone,
        )
        .with_basis(basis)
    )


@rule("SG-05", "sglang_protocols", "sglang_bytes", basis=Basis.MODEL)
def faster_than_flash_attention(claim: Claim, protocols: pd.DataFrame, moved: pd.DataFrame) -> Verdict:
    """A cell is a fair way to call flash-attn: one launch for packed q and k, or two launches for separate q and k.

    The claim says "up to", so the largest ratio of the first grid counts.
    """
    stated = evidence.published_speedups().low["SG-05"]
    protocols, basis = judged(protocols, kernels_of(DOCUMENT))
    times = needed(times_of(timed_alike(protocols), measure.first_cells(), DOCUMENT, FLASH, FLASH_PACKED), claim.needs)
    effects = {name: list(times[name] / times[DOCUMENT]) for name in (FLASH_PACKED, FLASH)}
    most = {name: max(found, key=lambda x: x.value) for name, found in effects.items()}
    steps = ratios(protocols, FLASH_FULL)
    measured = "; ".join(
        f"{name} takes at most {largest} times as long, median {median(x.value for x in effects[name]):.2f}, longer in "
        f"{how_many(longer(effects[name]))}"
        for name, largest in most.items()
    )
    published = ", ".join(
        f"{STEP_NAMES[FLASH_FULL].get(step.name, step.name)} {steps[step.name].max():.2f}x"
        for step in STEPS[FLASH_FULL]
    )
    return (
        sizes([size(x, max(stated, x.value)) for x in most.values()], claim.quantifier, claim.needs)
        .with_text(
            measured,
            f"at most, by protocol: {published}",
            f"its benchmark lets flash-attn move {value_range(moved[moved.contender == FLASH].over)} times the bytes",
            timer(protocols),
        )
        .with_basis(basis)
    )


@rule("SG-09", "sglang_diffusion", "sglang_published_kernel", basis=Basis.MODEL)
def second_version_is_faster(claim: Claim, diffusion: pd.DataFrame, published: pd.DataFrame) -> Verdict:
    cells = [cell for cell in measure.diffusion_cells() if cell.name == measure.QWEN_IMAGE]
    diffusion, basis = judged(diffusion, kernels_of(DOCUMENT, SECOND, THIRD))
    times = needed(times_of(diffusion, cells, DOCUMENT, SECOND, THIRD), claim.needs)
    (first, second, third), (row,) = times.iloc[0], published.itertuples()
    tokens = int(rows_of(diffusion, cells, SECOND).seq_len.iloc[0])
    return (
        size(first / second, row.ratio, digits=3)
        .with_text(
            f"{first / second} times as fast at Qwen-Image's {tokens:,} tokens; the third version {first / third}",
            f"the printed times are {row.ratio:.3f}x apart",
            f"neither change is in use there: the launch is for up to {FEW_TOKENS} tokens, the float2 path for float32 "
            "tensors; in bf16 only the size of the blocks changes, from 512 threads to 128"
            if tokens > FEW_TOKENS
            else "",
        )
        .with_basis(basis)
    )


@rule("SG-10", "sglang_protocols", basis=Basis.MODEL)
def faster_than_positions(claim: Claim, protocols: pd.DataFrame) -> Verdict:
    """A cell is a positions API, compared over the first grid with the second version's kernel.

    The comment is about the second version. The document says "On average (weighted across configs)". The times of a
    configuration are averaged over its lengths, as the benchmark prints them. Then the ratios of these averages are
    averaged over the configurations.
    """
    protocols, basis = judged(protocols, kernels_of(SECOND, THIRD, DOCUMENT, DOCUMENT_GATHER))
    stated, graphs = evidence.published_speedups().low["SG-10"], timed_alike(protocols)
    said, found = [], []
    for name in FAST_POSITIONS:
        times = times_of(graphs, measure.first_cells(), name, SECOND, THIRD, DOCUMENT, DOCUMENT_GATHER)
        if times.empty:
            continue
        means = {version: by_configuration(times, name, version) for version in (SECOND, THIRD)}
        cells = list(times[name] / times[SECOND])
        found.append(noise.mean(means[SECOND]))
        said.append(
            f"{name} takes {found[-1]} times as long as the second version (mean of {len(means[SECOND])} "
            f"configurations; {value_range(cells)} by cell, above 1 in {how_many(longer(cells))}) and "
            f"{noise.mean(means[THIRD])} times as long as the third; {name} finds its rows by itself: gathering them "
            f"makes the first version take {value_range(times[DOCUMENT_GATHER] / times[DOCUMENT])} times as long"
        )
    return (
        sizes([size(effect, stated) for effect in found], claim.quantifier, claim.needs)
        .with_text("; ".join(said), "the second version reads bf16 two bytes at a time, FlashInfer and the third 16")
        .with_basis(basis)
    )


@rule("SG-17", "sglang_second_grid", basis=Basis.MODEL)
def flashinfer_is_mostly_slower(claim: Claim, second: pd.DataFrame) -> Verdict:
    """The rule takes the kernel of the day of the comment, or the model of the third version where it was not run."""
    second, basis = judged(second, {THIRD: JUST_IN_TIME})
    effects = ratios_of(second, measure.second_cells(), FLASHINFER, THIRD)
    return _most(longer(effects), claim.needs).with_text(_against(effects, basis), _then(basis)).with_basis(basis)


@rule("SG-18", "sglang_second_grid", basis=Basis.MODEL)
def flashinfer_is_never_faster(claim: Claim, second: pd.DataFrame) -> Verdict:
    """The rule takes the same kernel as the rule of SG-17."""
    second, basis = judged(second, {THIRD: JUST_IN_TIME})
    effects = ratios_of(second, measure.second_cells(), FLASHINFER, THIRD)
    faster = [below(x, 1) for x in effects]
    found = [None if x is None else not x for x in faster]
    measured = f"{_against(effects, basis)}, shorter in {how_many(faster)}"
    return counted(found, claim.quantifier, claim.needs).with_text(measured, _then(basis)).with_basis(basis)


@rule("SG-14", "sglang_protocols", basis=Basis.MODEL)
def helps_language_models(claim: Claim, protocols: pd.DataFrame) -> Verdict:
    """The rule compares each package with the last version's kernel, in GQA and MQA cells.

    The kernel's tables are gathered once a step. A record without the published kernels has the model of the third
    version.
    """
    protocols, basis = judged(protocols, {THIRD: LAST_KERNEL} | kernels_of(DOCUMENT, DOCUMENT_GATHER))
    name_of = LAST_KERNEL if basis is Basis.CODE else "third version"
    cells = [cell for cell in measure.first_cells() if cell.q_heads > cell.k_heads]
    found: dict[str, list[Interval]] = {}
    for name in (*OF_LANGUAGE_MODELS, EAGER):
        times = times_of(timed_alike(protocols), cells, name, THIRD, DOCUMENT, DOCUMENT_GATHER)
        for _, row in times.iterrows():
            plain, gathered, kernel = row[DOCUMENT], row[DOCUMENT_GATHER], row[THIRD]
            shared = Interval(
                kernel.low + (gathered.low - plain.high) / LAYERS,
                kernel.value + (gathered.value - plain.value) / LAYERS,
                kernel.high + (gathered.high - plain.low) / LAYERS,
            )
            found.setdefault(name, []).append(row[name] / shared)
    eager = found.pop(EAGER, [])
    helped = [x for effects in found.values() for x in longer(effects)]
    said = [
        f"{name} takes {value_range(effects)} times as long as the {name_of} with GQA and MQA, longer in "
        f"{how_many(longer(effects))}; a gather is shared by {LAYERS} layers"
        for name, effects in found.items()
    ]
    return (
        counted(helped, claim.quantifier, claim.needs)
        .with_text("; ".join(said), f"plain torch takes {value_range(eager)} times as long" if eager else "")
        .with_basis(basis)
    )


# --------------------------------------------------------------------------------------------- the division of the work


@rule("SG-07", "sglang_vector_widths", basis=Basis.MODEL)
def wide_loads_help(claim: Claim, widths: pd.DataFrame) -> Verdict:
    """A cell is a layout, and a version where a record has the kernels, at addresses that are multiples of 16 bytes."""
    if (verdict := _narrow_and_wide(claim, widths)) is not None:
        return verdict
    aligned = timed(widths[widths.offset_bytes == 0]).set_index(["layout", "access_bytes"])
    if not set(product(LAYOUTS, (2, 16))) <= set(aligned.index):
        raise Untold(claim.needs)
    gain = {layout: ratio(aligned, (layout, 2), (layout, 16)) for layout in LAYOUTS}
    fractions = aligned[aligned.index.get_level_values("access_bytes") == 16].fraction_of_copy
    widest = timed(widths[widths.pairs_per_thread == widths.pairs_per_thread.max()])
    offset = widest.pivot_table(index="layout", columns=widest.offset_bytes > 0, values="median_us")
    return counted(longer(gain.values()), claim.quantifier, claim.needs).with_text(
        "16-byte over 2-byte accesses: "
        + ", ".join(f"{layout} {x}x" for layout, x in gain.items())
        + f", then at {value_range(fractions)} of a copy",
        f"2 bytes off a multiple of 16 they take {value_range(offset[True] / offset[False])} times as long"
        if len(offset.T) == 2
        else "",
    )


def _narrow_and_wide(claim: Claim, widths: pd.DataFrame) -> Verdict | None:
    """The verdict by published kernels with wide and with narrow accesses; None where the record lacks such kernels."""
    rows = timed(widths).set_index(["contender", "layout", "offset_bytes"])
    pairs = [(f"{name}, narrow", name) for name in (THIRD_KERNEL, LAST_KERNEL)]
    if not set(product((name for pair in pairs for name in pair), LAYOUTS, (0,))) <= set(rows.index):
        return None
    gain = {
        (name, layout): ratio(rows, (narrow, layout, 0), (name, layout, 0))
        for (narrow, name), layout in product(pairs, LAYOUTS)
    }
    shifted = {key: key[:2] for key in rows.index if key[0] in (THIRD_KERNEL, LAST_KERNEL) and key[2] > 0}
    slower = [ratio(rows, key, (*aligned, 0)) for key, aligned in shifted.items()]
    return (
        counted(longer(gain.values()), claim.quantifier, claim.needs)
        .with_text(
            "16-byte over 2-byte accesses of the same kernel: "
            + ", ".join(f"{name}, {layout} {x}x" for (name, layout), x in gain.items()),
            f"2 bytes off a multiple of 16 they take {value_range(slower)} times as long" if slower else "",
        )
        .with_basis(Basis.CODE)
    )


@rule("SG-08", "sglang_low_tokens", basis=Basis.MODEL)
def few_tokens_leave_processors_idle(claim: Claim, low: pd.DataFrame) -> Verdict:
    """A cell is a layout, a number of tokens and a number of blocks a token.

    One block a token must leave multiprocessors idle, and more blocks a token must be faster.
    """
    basis, family = (Basis.CODE, "first kernel") if "first kernel" in set(timed(low).family) else (Basis.MODEL, "model")
    rows = timed(low[low.family == family])
    rows = rows.assign(per_token=rows.blocks // rows.seq_len).set_index(["layout", "seq_len", "per_token"])
    cells = list(product(LAYOUTS, measure.LOW_TOKENS, measure.BLOCKS_A_TOKEN))
    if not set(cells) <= set(rows.index):
        raise Untold(claim.needs)
    divided = [(*cell, tiles) for *cell, tiles in cells if tiles > 1]
    gain = [ratio(rows, (layout, tokens, 1), (layout, tokens, tiles)) for layout, tokens, tiles in divided]
    one = rows.xs(1, level="per_token")
    idle = {key: row.blocks < row.multiprocessors for key, row in one.iterrows()}
    found = [above(x, 1) if idle[cell[:2]] else False for x, cell in zip(gain, divided, strict=True)]
    return (
        counted(found, claim.quantifier, claim.needs)
        .with_text(
            f"one block a token keeps {value_range(one.blocks, '.0f')} of {one.multiprocessors.iloc[0]:.0f} "
            f"multiprocessors busy; divided, {listed(measure.LOW_TOKENS)} tokens are {value_range(gain)} times as fast"
        )
        .with_basis(basis)
    )


@rule("SG-19", "sglang_low_tokens", basis=Basis.MODEL)
def launch_policy_helps(claim: Claim, low: pd.DataFrame) -> Verdict:
    """A cell is a layout and a number of tokens: the policy must give the second version more blocks and more speed."""
    rows = timed(low[low.policy.isin(("on", "off"))]).set_index(["family", "layout", "seq_len", "policy"])
    few = [tokens for tokens in measure.LOW_TOKENS if tokens <= FEW_TOKENS]
    cells = list(product(LAYOUTS, few))
    run = "second kernel" in set(rows.index.get_level_values("family"))
    families = ("second kernel", "third kernel", "last kernel") if run else ("second", "third")
    if not set(product(families, LAYOUTS, few, ("on", "off"))) <= set(rows.index):
        raise Untold(claim.needs)
    gain = {
        family: [ratio(rows, (family, *cell, "off"), (family, *cell, "on")) for cell in cells] for family in families
    }
    blocks = {family: rows.blocks.xs(family).unstack("policy").loc[cells] for family in families}
    second = blocks[families[0]]
    found = [above(x, 1) if more else False for x, more in zip(gain[families[0]], second.on > second.off, strict=True)]
    later = [
        f"the {family.split()[0]} version's policy {value_range(gain[family])}"
        + (" (the same blocks)" if (blocks[family].on == blocks[family].off).all() else "")
        for family in families[1:]
    ]
    return (
        counted(found, claim.quantifier, claim.needs)
        .with_text(
            f"{value_range(second.on, '.0f')} blocks instead of {value_range(second.off, '.0f')}, "
            f"{value_range(gain[families[0]])} times as fast up to {FEW_TOKENS} tokens; {'; '.join(later)}"
        )
        .with_basis(Basis.CODE if run else Basis.MODEL)
    )


@rule("SG-15", "sglang_protocols", "sglang_diffusion", basis=Basis.MODEL)
def simpler_is_enough(claim: Claim, protocols: pd.DataFrame, diffusion: pd.DataFrame) -> Verdict:
    """A cell is a shape of the first grid or of diffusion, and a number of blocks, which the comment leaves open.

    The persistent kernel must not be slower, beyond the noise, than the kernel under review. The persistent kernel is
    ours, and follows the comment's description. A record without the published kernels has the model of the third
    version in the place of the kernel under review.
    """
    cells = [*measure.first_cells(), *measure.diffusion_cells()]
    variants = [peer.name for peer in PERSISTENT_PEERS]
    together, basis = judged(pd.concat([timed_alike(protocols), diffusion]), {THIRD: LAST_KERNEL})
    reviewed = LAST_KERNEL if basis is Basis.CODE else "third version"
    times = times_of(together, cells, THIRD, *variants)
    slower = {name: [x is True for x in longer(times[name] / times[THIRD])] for name in variants if len(times)}
    tokens = {cell.name: cell.batch * cell.seq_len for cell in cells}
    said = []
    for name, found in slower.items():
        first = min((tokens[cell] for (cell, _), x in zip(times.index, found, strict=True) if x), default=None)
        said.append(
            f"{name} a multiprocessor: {value_range(times[THIRD] / times[name])} times as fast as the {reviewed}, "
            f"slower in {how_many(found)}" + (f", the smallest of {first:,} tokens" if first else "")
        )
    enough = [not x for found in slower.values() for x in found]
    return (
        counted(enough, claim.quantifier, claim.needs)
        .with_text(
            "; ".join(said),
            "the document does not say how much loss is too much; here every loss beyond the noise counts",
            "nobody has published the persistent kernel: it is our Triton kernel, as the comment describes one",
        )
        .with_basis(basis)
    )


@rule("SG-13", "sglang_diffusion", basis=Basis.MODEL)
def keeping_tables_saves(claim: Claim, diffusion: pd.DataFrame) -> Verdict:
    diffusion, basis = judged(diffusion, {DOCUMENT: JUST_IN_TIME, DOCUMENT_CAST: JUST_IN_TIME_CAST})
    cells = measure.diffusion_cells()
    times = needed(times_of(diffusion, cells, DOCUMENT, DOCUMENT_CAST), claim.needs)
    effects = list(times[DOCUMENT_CAST] / times[DOCUMENT])
    cast, kept = (rows_of(diffusion, cells, name).launches.to_numpy() for name in (DOCUMENT_CAST, DOCUMENT))
    return (
        counted(longer(effects), claim.quantifier, claim.needs)
        .with_text(
            f"converting adds {value_range(cast - kept, '.0f')} launches and makes a call take longer: "
            + ", ".join(f"{x} times at {cell}" for (cell, _), x in zip(times.index, effects, strict=True)),
            "the call with the conversion contains the call without it, so only the size of the difference is open",
        )
        .with_basis(basis)
    )


# -------------------------------------------------------------------------------------- the document's files and tables


@rule("SG-06", "sglang_sources", basis=Basis.SOURCE)
def helper_is_there_twice(claim: Claim, sources: pd.DataFrame) -> Verdict:
    if len(sources) < 2:
        raise Untold(claim.needs)
    defining = sources[sources.defines]
    where = listed(f"{row.file} at {row.commit[:8]}" for row in defining.itertuples())
    return fact(len(defining) > 1).with_text(f"{sources.helper.iloc[0]} is defined in {where}")


@rule("SG-12", "sglang_published_e2e", "sglang_published_kernel", basis=Basis.DOCUMENT)
def end_to_end_is_unchanged(claim: Claim, e2e: pd.DataFrame, kernel: pd.DataFrame) -> Verdict:
    """The change of the whole must lie within the noise of two runs. The document prints no variance.

    The stages that the change does not touch give two bounds for the noise: the difference of their sum between the two
    runs, and the largest difference of one stage. Printed times may be off by 0.005 ms each.
    """
    total, stages = e2e[e2e.row == "E2E Latency"], e2e[e2e.row != "E2E Latency"]
    untouched = stages[stages.row != "DenoisingStage"]
    if total.empty or untouched.empty:
        raise Untold(claim.needs)
    (total,) = total.itertuples()
    together = 100 * abs(untouched.change_ms.sum()) / untouched.baseline.sum()
    alone = (100 * (untouched.change_ms.abs() - 0.01).clip(lower=0) / untouched.baseline).max()
    change, (least, most) = abs(total.change_percent), sorted((together, alone))
    verdict = untold(claim.needs) if least < change <= most else fact(change <= least)
    return verdict.with_text(
        f"{total.change_percent:+.2f} % as a whole, {stages.change_ms.sum():+.0f} ms in the stages; stages that the "
        f"change does not touch differ by {together:.1f} % in sum and up to {alone:.1f} % each",
        findings.share_of_image(kernel, total.baseline),
        "the two runs differ by more than that gain, so they say nothing about the kernel"
        if 100 * kernel.expected_ms.item() / total.baseline < change
        else "",
        "the document has one run of each; repeated runs would show the variance",
    )


@rule("SG-21", "sglang_published_e2e", basis=Basis.DOCUMENT)
def throughput_is_unchanged(claim: Claim, e2e: pd.DataFrame) -> Verdict:
    """Images run one at a time, so the printed throughput must be the rounded reciprocal of the printed latency."""
    total = e2e[e2e.row == "E2E Latency"]
    if total.empty:
        raise Untold(claim.needs)
    (row,), printed = total.itertuples(), list(map(float, claim.numbers))
    found = [1000 / row.baseline, 1000 / row.new]
    return fact(printed[0] == printed[1] and [round(x, 2) for x in found] == printed).with_text(
        f"the latencies are {found[0]:.4f} and {found[1]:.4f} images a second",
        f"two decimals show no change below {100 * 0.005 / found[0]:.0f} %",
    )


@rule("SG-20", "sglang_alignment", basis=Basis.DOCUMENT)
def heads_are_aligned(claim: Claim, alignment: pd.DataFrame) -> Verdict:
    """A cell is a head size of the document's benchmarks, in 16-bit numbers."""
    (least,) = map(float, claim.numbers)
    heads = alignment[(alignment.part == "head") & alignment.listed]
    aligned = heads.multiple >= least
    return _most(list(aligned), claim.needs).with_text(
        f"at multiples of {least:g} bytes: heads of {listed(heads[aligned].head_dim)} features in 16 bits, not of "
        f"{listed(heads[~aligned].head_dim)}",
        findings.aligned_parts(alignment),
    )


# ------------------------------------------------------------------------------------ instructions, sources, failures


@rule("SG-22", "sglang_vector_instructions", basis=Basis.CODE)
def aligned_vector_is_wide(claim: Claim, instructions: pd.DataFrame) -> Verdict:
    """A cell is a dtype: the widest accesses of ``AlignedVector`` must be at least as wide as those with ``float4``."""
    bytes_ = instructions.set_index(["form", "dtype"])[["load_bytes", "store_bytes"]].min(axis=1).unstack("form")
    if not {"float4", "AlignedVector"} <= set(bytes_) or bytes_.isna().any(axis=None):
        raise Untold(claim.needs)
    found = list(bytes_["AlignedVector"] >= bytes_["float4"])
    return counted(found, claim.quantifier).with_text(f"{value_range(bytes_['AlignedVector'], '.0f')} bytes an access")


@rule("SG-23", "sglang_rocm_parts", basis=Basis.SOURCE)
def rocm_is_repaired(claim: Claim, parts: pd.DataFrame) -> Verdict:
    """A cell is a part of inference that lost its ROCm path by a pull request that the comment names."""
    named = [int(number) for number in claim.statement.replace(",", " ").replace("#", " ").split() if number.isdigit()]
    broken = parts[parts.missing_since.isin(named)]
    others = parts[~parts.missing_since.isin(named)]
    return counted(list(broken.repaired), claim.quantifier, claim.needs).with_text(
        "; ".join(f"{row.part} {row.before} since #{row.missing_since}, and then {row.after}"
                  for row in broken.itertuples()),
        "; ".join(f"{row.part} has had no path for ROCm since #{row.missing_since}, which the comment does not name"
                  for row in others.itertuples()),
        "the continuous integration on AMD's GPUs was not run",
    )  # fmt: skip


@rule("SG-24", "sglang_benchmark_flaws", basis=Basis.SOURCE)
def benchmark_is_fairer(claim: Claim, flaws: pd.DataFrame) -> Verdict:
    """A cell is a flaw that the files had before or have after the change. After the change it must be gone."""
    had = flaws[flaws.before | flaws.after]
    kept, new = had[had.before & had.after].flaw, had[~had.before].flaw
    return counted(list(~had.after), claim.quantifier, claim.needs).with_text(
        f"gone: {listed(had[~had.after].flaw)}", f"kept: {listed(kept)}", f"new: {listed(new)}"
    )


@rule("SG-25", "sglang_synchronize", basis=Basis.PACKAGE)
def synchronize_raises_another(claim: Claim, failures: pd.DataFrame) -> Verdict:
    """A cell is a failure of a kernel after which torch.cuda.synchronize raises an exception.

    A call that raises nothing is no cell, because the reviewer speaks of the exception to expect from a failure.
    """
    raised = failures[failures.exception.fillna("") != ""]
    found = [exception != "AcceleratorError" for exception in raised.exception]
    said = ", ".join(f"{row.failure}: {row.exception}" for row in raised.itertuples())
    return _most(found, claim.needs).with_text(said)


# -------------------------------------------------------------------------------------------------------------- helpers


def _most(found: Sequence[bool | None], needs: str) -> Verdict:
    """The verdict on a claim about most cells: more than half must hold, even if no cell in doubt holds."""
    holding, failing = (sum(x is told for x in found) for told in (True, False))
    if 2 * holding > len(found):
        return HOLDS
    return FAILS if found and 2 * failing >= len(found) else untold(needs)


def _against(effects: list[Interval], basis: Basis) -> str:
    if not effects:
        return ""
    much, often = value_range(effects), how_many(longer(effects))
    name = JUST_IN_TIME if basis is Basis.CODE else "third version"
    return f"FlashInfer takes {much} times as long as the {name}, longer in {often}"


def _then(basis: Basis) -> str:
    return AHEAD_OF_TIME if basis is Basis.MODEL else ""


def _where_it_fails(rows: pd.DataFrame) -> str:
    said = []
    for word, start in (("gives wrong results", "wrong"), ("fails", "failed")):
        some = rows[rows.status.str.startswith(start)]
        if len(some):
            said.append(f"{word} at head sizes {listed(sorted(set(some.head_dim)))}")
    return " and ".join(said) or "runs at every head size measured"
