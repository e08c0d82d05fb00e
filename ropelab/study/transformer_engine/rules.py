"""The rules that judge claims TE-01 to TE-13."""

import pandas as pd

from ropelab.study.drawing import value_range
from ropelab.study.transformer_engine import findings
from ropelab.study.transformer_engine.dispatch import LEGACY, LINEAR
from ropelab.study.transformer_engine.evidence import THREADS
from ropelab.study.transformer_engine.findings import NEW, OLD
from ropelab.study.transformer_engine.measure import GIVEN, SUMMED
from ropelab.study.verdicts import Verdict, rule

CLOSE = 0.10
"""A ratio measured on another GPU confirms the published one down to 10 % below it, as for DeepSpeed#8052."""
FIT = 0.15
"""Time goes with the blocks if one number for each explains every cell to 15 %: between 28 and 65,536 different rows of
freqs are read, up to 33 MB beside the gigabyte of a pass, and short sequences find theirs in the cache."""
POINTS = 5
"""Percentage points by which a share of the layer may differ: another GPU, and a plain torch layer."""
MATTERS = 0.05
"""A part of the kernel's time that counts: what a tile or a layout is chosen for."""


@rule("TE-01", "te_kernels", "te_published_b")
def time_goes_with_blocks(kernels: pd.DataFrame, published: pd.DataFrame) -> Verdict:
    """One time for each dead block must explain every cell, whichever of freqs_len and n_seqs made it."""
    fit = findings.dead_block_fit(kernels)
    if fit.empty or fit.freqs_len.nunique() < 2 or fit.n_seqs.nunique() < 2:
        return Verdict.not_testable("the legacy grid under two lengths of freqs and two counts of sequences")
    off = (fit[OLD] / fit.fitted_us - 1).abs()
    ns = fit.ns_per_dead_block.dropna()
    stated = published.ns_per_dead_block[published.n_seqs >= 128]
    measured = (
        f"{ns.median():.2f} ns for each dead block and pass ({value_range(ns, '.2f')}; published "
        f"{value_range(stated, '.2f')}), which explains all {len(fit)} cells to {off.max():.0%}"
    )
    most = fit.loc[fit.dead_blocks.idxmax()]
    if most[OLD] <= findings.SLOWER * most[NEW]:
        return Verdict.refuted(measured, f"{most.dead_blocks:,} dead blocks do not make it slower than the new kernel")
    if off.max() <= FIT:
        return Verdict.confirmed(measured)
    worst = fit.loc[off.idxmax()]
    reason = f"off by {off.max():.0%} for {worst.n_seqs} sequences under {worst.freqs_len:,} rows"
    return Verdict.corrected(measured, reason) if off.median() <= FIT else Verdict.refuted(measured, reason)


@rule("TE-02", "te_kernels")
def routine_shapes_suffer(kernels: pd.DataFrame) -> Verdict:
    """128 sequences of 512: under the long table, and under one of as many rows as the longest has tokens."""
    table = findings.times(kernels)
    table = table[(table.n_seqs == 128) & (table.cp_size == 1) & table.part.isin(("table B", "freqs_len"))]
    table = table.dropna(subset=[OLD, NEW])
    if table.empty:
        return Verdict.not_testable("both grids for 128 balanced sequences")
    ratio = (table[OLD] / table[NEW]).to_numpy()
    longest, shortest = ratio[table.freqs_len.argmax()], ratio[table.freqs_len.argmin()]
    rows = table.freqs_len.max(), table.freqs_len.min()
    measured = (
        f"128 sequences of 512: the old kernel takes {longest:.2f} times as long as the new one with {rows[0]:,} rows "
        f"of freqs, {shortest:.2f} with {rows[1]:,}"
    )
    if longest <= findings.SLOWER:
        return Verdict.refuted(measured, "no loss under the long table")
    if rows[1] == table.longest.min() and shortest <= findings.SLOWER:
        return Verdict.corrected(
            measured,
            "what makes them suffer is a table far longer than the longest sequence: cut to that, equal sequences "
            "leave no block without a token. One long sequence among them takes that remedy away (TE-07)",
        )
    return Verdict.confirmed(measured)


@rule("TE-03", "te_layer", "te_published_a")
def layer_speedup(layer: pd.DataFrame, published: pd.DataFrame) -> Verdict:
    wide = findings.shares(layer).pivot_table(index="n_seqs", columns="contender", values="layer_us")
    return _judge_speedup(wide, published.set_index("n_seqs").speedup, "a layer")


@rule("TE-04", "te_layer", "te_published_a")
def share_of_layer(layer: pd.DataFrame, published: pd.DataFrame) -> Verdict:
    """As the document has it: q and k alone over the layer. In between: most of a layer before, under 15 % after."""
    table = 100 * findings.shares(layer).pivot_table(index="n_seqs", columns="contender", values="share")
    stated = published.set_index("n_seqs")
    if not {OLD, NEW} <= set(table) or set(table.index) != set(stated.index):
        return Verdict.not_testable("the layer and its rotation with both kernels, at all counts of table A")
    old, new = table[OLD], table[NEW]
    measured = f"{', '.join(f'{x:.0f} %' for x in old)} before, {', '.join(f'{x:.1f} %' for x in new)} after"
    off = max((old - stated.old_share_percent).abs().max(), (new - stated.new_share_percent).abs().max())
    if off <= POINTS:
        return Verdict.confirmed(measured)
    reason = f"up to {off:.0f} percentage points from the published shares: another GPU, and another layer"
    if old.iloc[-1] > 50 and new.max() < 15:
        return Verdict.corrected(measured, reason)
    return Verdict.refuted(measured, reason)


@rule("TE-05", "te_kernels", "te_published_b")
def kernel_speedup(kernels: pd.DataFrame, published: pd.DataFrame) -> Verdict:
    """As the document times it, with the sum; without it the ratios stand in the note."""
    by_step = {
        step: table[table.part == "table B"].set_index("n_seqs")
        for step, table in ((step, findings.times(kernels, step)) for step in (SUMMED, GIVEN))
    }
    verdict = _judge_speedup(by_step[SUMMED], published.set_index("n_seqs").speedup, "table B, with sum()")
    given, summed = by_step[GIVEN], by_step[SUMMED]
    if not verdict.measured:
        return verdict
    alone, added = given[OLD] / given[NEW], (summed[NEW] / given[NEW] - 1).median()
    note = (
        f"from a given cotangent {alone.iloc[0]:.2f} to {alone.iloc[-1]:.0f} times: the sum, and the backward from its "
        f"gradient, change the new kernel's time by {added:+.0%}"
    )
    return Verdict(verdict.status, verdict.measured, "; ".join(filter(None, (verdict.note, note))))


@rule("TE-06", "te_kernels", "te_published_b")
def search_does_not_matter(kernels: pd.DataFrame, published: pd.DataFrame) -> Verdict:
    """The new kernel from one sequence to 2,401: the tokens and their work stay, the search grows.

    ropelab with its positions given, which searches nothing, says what else changes with the packing.
    """
    table = findings.times(kernels)
    table = table[table.part == "table B"].set_index("n_seqs")
    if not {1, 2401} <= set(table.index[table[NEW].notna()]):
        return Verdict.not_testable("the token-linear grid for 1 and for 2,401 sequences")
    growth = table[NEW][2401] / table[NEW][1] - 1
    stated = published.set_index("n_seqs").new_ms
    stated_growth = stated[2401] / stated[1] - 1
    measured = f"2,401 sequences take the new kernel {growth:+.1%} of the time of one (published {stated_growth:+.0%})"
    if table.ropelab.notna().all():
        measured += f"; where positions are given {table.ropelab[2401] / table.ropelab[1] - 1:+.1%}"
    if growth > 3 * MATTERS:
        return Verdict.refuted(measured, "that is no small part of the kernel")
    if growth > MATTERS or stated_growth > MATTERS:
        where = "here and " * bool(growth > MATTERS) + "in the document's own table"
        return Verdict.corrected(measured, f"it does {where}: more than {MATTERS:.0%} of the kernel")
    return Verdict.confirmed(measured)


@rule("TE-07", "te_kernels")
def heuristic_chooses_well(kernels: pd.DataFrame) -> Verdict:
    """Right if it takes the slower grid nowhere; beside it, what the merged heuristic makes of the same cells."""
    table = findings.choices(kernels)
    if table.empty:
        return Verdict.not_testable("both grids in the same cells")
    first, merged = (findings.missed(table, name) for name in ("first", "merged"))
    measured = f"takes the slower grid in {len(first)} of {len(table)} cells" + _worst(first, "first")
    note = f"the merged one in {len(merged)}" + _worst(merged, "merged")
    if first.empty:
        return Verdict.confirmed(f"{measured}; {note}")
    own = first[first.part == "table B"]
    if len(own):
        note = f"of the document's own table for {', '.join(map(str, sorted(own.n_seqs)))} sequences; {note}"
        return Verdict.refuted(measured, note)
    return Verdict.corrected(measured, note)


@rule("TE-08", "te_parity")
def same_bits(parity: pd.DataFrame) -> Verdict:
    """Equal in every row that is in a sequence, and right: two wrong kernels may agree."""
    measured = (
        f"{int((parity.same_result & parity.same_gradient).sum())} of {len(parity)} cases equal in result and gradient "
        f"(random cotangents, {', '.join(parity.dtype.unique())}, cp_size up to {parity.cp_size.max()}); largest error "
        f"{parity.worst.max():.2f} of its bound"
    )
    if parity.worst.max() > 1:
        return Verdict.refuted(measured, "the results are not the rotation")
    if not parity.same_result.all():
        other = parity[~parity.same_result]
        return Verdict.refuted(measured, f"{len(other)} results differ, the first {_case(other.iloc[0])}")
    if not parity.same_gradient.all():
        other = parity[~parity.same_gradient]
        return Verdict.corrected(measured, f"forward only; {len(other)} gradients differ, {_case(other.iloc[0])}")
    return Verdict.confirmed(measured)


@rule("TE-09", "te_dispatch")
def override_forces(dispatch: pd.DataFrame) -> Verdict:
    wanted = dispatch.override.map({"0": LEGACY, "1": LINEAR})
    obeys = (dispatch.strategy == wanted)[wanted.notna()].groupby(dispatch.version).all()
    measured = ", ".join(f"{version}: {'obeyed' if yes else 'not read'}" for version, yes in obeys.items())
    if not obeys.get("first", False):
        return Verdict.refuted(measured, "the first version does not obey it")
    ignored = obeys.index[~obeys]
    if len(ignored):
        return Verdict.corrected(
            measured, f"of the first version; the {' and '.join(ignored)} one has no such variable"
        )
    return Verdict.confirmed(measured)


@rule("TE-10", "te_past_the_end")
def no_guard(past: pd.DataFrame) -> Verdict:
    outcome = past.set_index("contender").outcome
    measured = "; ".join(f"{name}: {what}" for name, what in outcome.items())
    reads = outcome.index[outcome == "reads past freqs"]
    if "token-linear, as first proposed" not in reads:
        return Verdict.refuted(measured, "the first version reads nothing that is not there")
    if len(reads) > 1:
        return Verdict.corrected(measured, f"and so does {', '.join(name for name in reads if 'first' not in name)}")
    return Verdict.confirmed(measured)


@rule("TE-11", "te_search")
def search_is_repeated(search: pd.DataFrame) -> Verdict:
    """The count must be the published one; what the hardware makes of equal addresses is the correction."""
    row = search[search.n_seqs == 2401].squeeze()
    measured = f"2,401 sequences: {row.steps} steps x {THREADS} threads = {row.thread_reads:,} reads in a block"
    if row.thread_reads != 3072:
        return Verdict.refuted(measured, "another count than 3,072")
    if row.warp_requests < row.thread_reads:
        return Verdict.corrected(
            measured, f"the threads of a warp ask for one address together: {row.warp_requests} requests, not 3,072"
        )
    return Verdict.confirmed(measured)


@rule("TE-12", "te_parity_tests", "te_parity")
def untested_cases(tests: pd.DataFrame, parity: pd.DataFrame) -> Verdict:
    """The test leaves them out; whether they hold is tried here."""
    first = tests[tests.version == "first"].squeeze()
    left_out = (parity.dtype == "float16") | (parity.cp_rank > 0)
    held = (parity.same_result & parity.same_gradient & (parity.worst <= 1))[left_out]
    tested = f"fp16 {_tested(first.float16)}, cp_rank > 0 {_tested(first.rank_above_0)}"
    measured = f"{tested}; here {held.sum()} of {len(held)} such cases hold"
    if first.float16 and first.rank_above_0:
        return Verdict.refuted(measured, "the test has both")
    if not left_out.any():
        return Verdict.not_testable("the cases that the test left out, in the record te_parity")
    if not held.all():
        return Verdict.corrected(measured, "and what it leaves out does not hold")
    return Verdict.confirmed(measured)


@rule("TE-13", "te_parity_tests", "te_parity")
def empty_sequences(tests: pd.DataFrame, parity: pd.DataFrame) -> Verdict:
    covered = tests.set_index("version")["empty"]
    cases = parity[parity["empty"] > 0]
    held = cases.same_result & cases.same_gradient & (cases.worst <= 1)
    measured = (
        f"{', '.join(f'{version} test: {_tested(yes)}' for version, yes in covered.items())}; here {held.sum()} of "
        f"{len(held)} cases with empty sequences hold"
    )
    if cases.empty:
        return Verdict.not_testable("cases with empty sequences in the record te_parity")
    if not covered["first"] or not held.all():
        return Verdict.refuted(measured, "not covered" if not covered["first"] else "they do not hold")
    if not covered.all():
        return Verdict.corrected(measured, "true of the first version; the test as merged has none")
    return Verdict.confirmed(measured)


def _judge_speedup(times: pd.DataFrame, stated: pd.Series, what: str) -> Verdict:
    """Of the new kernel over the old, by n_seqs.

    Confirmed down to CLOSE below the published ones. Refuted if the new kernel is no faster for some count for which
    the document says so (by more than CLOSE). In between the direction holds and the size is corrected.
    """
    times = times.reindex(columns=[OLD, NEW]).dropna()
    if not set(stated.index) <= set(times.index):
        counts = ", ".join(f"{n:,}" for n in stated.index)
        return Verdict.not_testable(f"times with both kernels for {counts} sequences")
    ratio = (times[OLD] / times[NEW]).reindex(stated.index)
    measured = f"{what}: " + ", ".join(f"{ratio[n]:.4g}x for {n:,}" for n in stated.index)
    short = ratio < (1 - CLOSE) * stated
    if not short.any():
        return Verdict.confirmed(measured)
    lost = short & (ratio <= 1) & (stated > 1 + CLOSE)
    listed = ", ".join(f"{ratio[n]:.4g}x instead of {stated[n]:.4g}x for {n:,}" for n in stated.index[short])
    return Verdict.refuted(measured, listed) if lost.any() else Verdict.corrected(measured, listed)


def _worst(missed: pd.DataFrame, name: str) -> str:
    """The worst cell of a heuristic, and the kinds of all."""
    if missed.empty:
        return ""
    row = missed.iloc[0]
    rank = f", {row.cp_size} ranks" if row.cp_size > 1 else ""
    kinds = ", ".join(f"{count} {kind}" for kind, count in missed.kind.value_counts().items())
    cell = f"{row.n_seqs} sequences, the longest of {row.longest:,}, {row.freqs_len:,} rows of freqs{rank}"
    return f", {row[f'{name}_costs']:.2f} times as long at worst ({cell}; {kinds})"


def _case(row: pd.Series) -> str:
    return f"{row.kind}, {row.dtype}, {row.layout}, rank {row.cp_rank} of {row.cp_size}"


def _tested(yes: bool) -> str:
    return "tested" if yes else "not tested"
