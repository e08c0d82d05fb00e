"""The rules that judge claims TE-01 to TE-13."""

import pandas as pd

from ropelab.study.drawing import value_range
from ropelab.study.engine.ledger import rule
from ropelab.study.engine.verdict import Verdict, agrees
from ropelab.study.transformer_engine import findings
from ropelab.study.transformer_engine.dispatch import LEGACY, LINEAR, OVERRIDE
from ropelab.study.transformer_engine.evidence import THREADS
from ropelab.study.transformer_engine.findings import NEW, OLD
from ropelab.study.transformer_engine.measure import GIVEN, SUMMED

CLOSE = 0.10
"""A ratio measured on another GPU confirms the published one to 10 %, either way, as for the other documents."""
FIT = 0.15
"""Time goes with the blocks if one number for each explains every cell to 15 %: between 28 and 65,536 different rows of
freqs are read, up to 33 MB beside the gigabyte of a pass, and short sequences find theirs in the cache."""
MATTERS = 0.02
"""What the search adds is there if it is more than replays of one graph differ by; it matters if it is more than what
makes a grid the wrong choice (``findings.SLOWER``)."""
MODELS = "(models) "
"""Before what is measured of our models of TransformerEngine's kernels, the package itself being absent."""
LAYER = "(models, a torch layer) "
ROUTINE = (128, 512)
"""Sequences of TE-02, of 512 and of 128 tokens."""


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
        f"{MODELS}{ns.median():.2f} ns for each dead block and pass ({value_range(ns, '.2f')}; published "
        f"{value_range(stated, '.2f')}), which with {fit.live_us.iloc[0]:,.0f} µs for the live ones explains all "
        f"{len(fit)} cells to {off.max():.0%} ({FIT:.0%} are allowed), half of them to {off.median():.0%}"
    )
    most = fit.loc[fit.dead_blocks.idxmax()]
    if most[OLD] <= findings.SLOWER * most.live_us:
        return Verdict.refuted(measured, f"{most.dead_blocks:,} dead blocks take no time")
    if off.max() <= FIT:
        return Verdict.confirmed(measured)
    if off.median() > FIT:
        return Verdict.refuted(measured, "the blocks do not explain the times")
    worse = fit[off > FIT]
    cost = 1000 * worse.beyond_us / worse.dead_blocks / 2
    return Verdict.corrected(
        measured,
        f"not in {len(worse)} cells of {value_range(worse.dead_blocks, ',d')} dead blocks, which take "
        f"{value_range(cost, '.2f')} ns each: "
        + ("part of them hides behind blocks with a token" if (cost < ns.median()).all() else "the cost varies"),
    )


@rule("TE-02", "te_kernels")
def routine_shapes_suffer(kernels: pd.DataFrame) -> Verdict:
    """128 of 512 and 512 of 128: under the long table, and under one of as many rows as the longest has tokens."""
    table = findings.times(kernels)
    table = table[(table.cp_size == 1) & table.part.isin(("table B", "freqs_len"))].dropna(subset=[OLD, NEW])
    told, under_long, cut = [], [], []
    for n in ROUTINE:
        rows = table[table.n_seqs == n]
        if rows.empty:
            return Verdict.not_testable(f"both grids for {' and '.join(map(str, ROUTINE))} balanced sequences")
        ratio = rows[OLD] / rows[NEW]
        long, short = rows.freqs_len.idxmax(), rows.freqs_len.idxmin()
        under_long.append(ratio[long])
        told.append(f"{n} of {rows.longest.min()}: {ratio[long]:.2f} with {rows.freqs_len[long]:,} rows of freqs")
        if short != long:
            told[-1] += f", {ratio[short]:.2f} with {rows.freqs_len[short]:,}"
            if rows.freqs_len[short] == rows.longest.min():
                cut.append(ratio[short])
    measured = f"{MODELS}time of the old kernel over that of the new one, {'; '.join(told)}"
    if min(under_long) <= findings.SLOWER:
        return Verdict.refuted(measured, "no loss under the long table")
    if cut and min(cut) <= findings.SLOWER:
        return Verdict.corrected(
            measured,
            "what makes them suffer is a table far longer than the longest sequence: cut to that, equal sequences "
            "leave no block without a token. One long sequence among them takes that remedy away (TE-07)",
        )
    return Verdict.confirmed(measured)


@rule("TE-03", "te_layer", "te_published_a")
def layer_speedup(layer: pd.DataFrame, published: pd.DataFrame) -> Verdict:
    wide = findings.shares(layer).pivot_table(index="n_seqs", columns="contender", values="layer_us")
    return _judge_speedup(wide, published.set_index("n_seqs").speedup, f"{LAYER}a layer")


@rule("TE-04", "te_layer", "te_published_a")
def share_of_layer(layer: pd.DataFrame, published: pd.DataFrame) -> Verdict:
    """As the document has it: q and k alone over the layer.

    What a share stands for is a ratio of times, of the rotation to the rest: ``s / (1 - s)``. That is held to the
    tolerance of every ratio. The claim fails if one does not fall from above to below the geometric mean of the
    published ones.
    """
    table = findings.shares(layer).pivot_table(index="n_seqs", columns="contender", values="share")
    stated = published.set_index("n_seqs")
    if not {OLD, NEW} <= set(table) or set(table.index) != set(stated.index):
        return Verdict.not_testable("the layer and its rotation with both kernels, at all counts of table A")
    found = [_odds(table[name]) for name in (OLD, NEW)]
    claimed = [_odds(stated[name] / 100) for name in ("old_share_percent", "new_share_percent")]
    shown = [", ".join(f"{100 * share:.{digits}f} %" for share in table[name]) for name, digits in ((OLD, 0), (NEW, 1))]
    measured = f"{LAYER}{shown[0]} before, {shown[1]} after"
    between = (claimed[0] * claimed[1]) ** 0.5
    if (found[0] <= between).any() or (found[1] >= between).any():
        return Verdict.refuted(measured, "the share does not fall like that")
    if all(agrees(*pair, CLOSE).all() for pair in zip(found, claimed, strict=True)):
        return Verdict.confirmed(measured)
    before, after = (value_range(a / b, ".2f") for a, b in zip(found, claimed, strict=True))
    return Verdict.corrected(
        measured,
        f"the rotation over the rest of the layer is {before} times the published ratio before and {after} times "
        "after: another GPU, and another layer",
    )


def _odds(share: pd.Series) -> pd.Series:
    return share / (1 - share)


@rule("TE-05", "te_kernels", "te_published_b")
def kernel_speedup(kernels: pd.DataFrame, published: pd.DataFrame) -> Verdict:
    """As the document times it, with the sum; without it the ratios stand in the note."""
    by_step = {
        step: table[table.part == "table B"].set_index("n_seqs")
        for step, table in ((step, findings.times(kernels, step)) for step in (SUMMED, GIVEN))
    }
    verdict = _judge_speedup(by_step[SUMMED], published.set_index("n_seqs").speedup, f"{MODELS}table B, with sum()")
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
    growth = table[NEW][2401] / table[NEW][1]
    stated = published.set_index("n_seqs").new_ms
    stated_growth = stated[2401] / stated[1] - 1
    measured = (
        f"{MODELS}2,401 sequences take the new kernel {growth - 1:+.1%} of the time of one (published "
        f"{stated_growth:+.0%})"
    )
    search = growth
    if table.ropelab.reindex([1, 2401]).notna().all():
        given = table.ropelab[2401] / table.ropelab[1]
        search = growth / given
        measured += f"; where positions are given {given - 1:+.1%}, so the search takes {search - 1:+.1%}"
    if search > findings.SLOWER:
        return Verdict.refuted(
            measured,
            f"more than the {findings.SLOWER - 1:.0%} that make a grid the wrong choice",
        )
    if search > 1 + MATTERS or stated_growth > MATTERS:
        where = "here and " * bool(search > 1 + MATTERS) + "in the document's own table"
        return Verdict.corrected(measured, f"it does {where}: more than {MATTERS:.0%} of the kernel")
    return Verdict.confirmed(measured)


@rule("TE-07", "te_kernels")
def heuristic_chooses_well(kernels: pd.DataFrame) -> Verdict:
    """Right if it takes the slower grid nowhere; beside it, what the merged heuristic makes of the same cells."""
    table = findings.choices(kernels)
    if table.empty:
        return Verdict.not_testable("both grids in the same cells")
    first, merged = (findings.missed(table, name) for name in ("first", "merged"))
    measured = f"{MODELS}takes the slower grid in {len(first)} of {len(table)} cells" + _worst(first, "first")
    note = f"the merged heuristic, as it is described, takes it in {len(merged)}" + _worst(merged, "merged")
    if first.empty:
        return Verdict.confirmed(f"{measured}; {note}")
    own = first[first.part == "table B"]
    if len(own):
        note = f"in the document's own table for {', '.join(map(str, sorted(own.n_seqs)))} sequences; {note}"
        return Verdict.refuted(measured, note)
    return Verdict.corrected(measured, note)


@rule("TE-08", "te_parity")
def same_bits(parity: pd.DataFrame) -> Verdict:
    """Equal in every row that is in a sequence, and right: two wrong kernels may agree."""
    measured = (
        f"{MODELS}{int((parity.same_result & parity.same_gradient).sum())} of {len(parity)} cases equal in result and "
        f"gradient (random cotangents, {', '.join(parity.dtype.unique())}, cp_size up to {parity.cp_size.max()}); "
        f"largest error {parity.worst.max():.2f} of its bound"
    )
    if "ropelab_same_bits" in parity:
        measured += (
            f"; {value_range(parity.ropelab_same_bits, '.1%')} of the elements have the bits of ropelab's kernel"
        )
    if parity.worst.max() > 1:
        return Verdict.refuted(measured, "the results are not the rotation")
    if not parity.same_result.all():
        other = parity[~parity.same_result]
        return Verdict.refuted(measured, f"{len(other)} results differ, the first {_case(other.iloc[0])}")
    if not parity.same_gradient.all():
        other = parity[~parity.same_gradient]
        return Verdict.corrected(measured, f"forward only; {len(other)} gradients differ, {_case(other.iloc[0])}")
    return Verdict.confirmed(measured).of_model(
        "of our models of the two grids, which launch one rotation of a token, as TransformerEngine's kernels do; the "
        "package's bits were not compared"
    )


@rule("TE-09", "te_source")
def override_forces(source: pd.DataFrame) -> Verdict:
    """What the source says; that our model of the dispatch does the same is no evidence, and is said beside it."""
    forces = (source.zero == LEGACY) & (source.one == LINEAR)
    obeyed = forces & (source.variable == OVERRIDE)
    measured = "; ".join(
        f"{row.version} ({row.read}): {row.variable} {'forces either' if yes else 'does not force'}"
        for row, yes in zip(source.itertuples(), forces, strict=True)
    )
    measured += f"; our model does the same in {source.model.sum()} of {len(source)}"
    if not obeyed[source.version == "first"].any():
        return Verdict.refuted(measured, "the first version does not obey it")
    if not source.read[obeyed].str.contains("the file").any():
        return Verdict.confirmed(measured).of_model("as the document says; no file of it was read")
    other = source[~obeyed]
    if len(other):
        names = ", ".join(f"{row.variable} in {row.read}" for row in other.itertuples())
        return Verdict.corrected(measured, f"under that name until the review; later {names}")
    return Verdict.confirmed(measured)


@rule("TE-10", "te_past_the_end", "te_source")
def no_guard(past: pd.DataFrame, source: pd.DataFrame) -> Verdict:
    """That the first version has no guard is read in its source; what follows is seen in our model of it."""
    outcome = past.set_index("contender").outcome
    guards = "; ".join(f"{row.version} ({row.read}): {'a' if row.guard else 'no'} guard" for row in source.itertuples())
    measured = f"{guards}; {MODELS}{'; '.join(f'{name}: {what}' for name, what in outcome.items())}"
    if source.guard[source.version == "first"].any():
        return Verdict.refuted(measured, "the first version has one")
    reads = outcome.index[outcome == "reads past freqs"]
    if "token-linear, as first proposed" not in reads:
        return Verdict.refuted(measured, "the first version reads nothing that is not there")
    if len(reads) > 1:
        return Verdict.corrected(measured, f"and so does {', '.join(name for name in reads if 'first' not in name)}")
    return Verdict.confirmed(measured).of_model(
        "that there is none is known from the source; what is read behind freqs for want of it, from our model"
    )


@rule("TE-11", "te_search", "te_source")
def search_is_repeated(search: pd.DataFrame, source: pd.DataFrame) -> Verdict:
    """The count must be the published one; what the hardware makes of equal addresses is the correction."""
    row = search[search.n_seqs == 2401].squeeze()
    measured = f"2,401 sequences: {row.steps} steps x {THREADS} threads = {row.thread_reads:,} reads in a block"
    once = source[source.threads == 1]
    if len(once):
        measured += f"; one thread searches since {once['read'].iloc[0]}"
    if (source.threads[source.version == "first"] == 1).all():
        return Verdict.refuted(measured, "in the first version one thread searches")
    if row.thread_reads != 3072:
        return Verdict.refuted(measured, "another count than 3,072")
    if row.warp_requests < row.thread_reads:
        return Verdict.corrected(
            measured, f"the threads of a warp ask for one address together: {row.warp_requests} requests, not 3,072"
        )
    return Verdict.confirmed(measured)


@rule("TE-12", "te_parity_tests", "te_parity")
def untested_cases(tests: pd.DataFrame, parity: pd.DataFrame) -> Verdict:
    """The parity test under review leaves them out; whether they hold is tried here."""
    both = tests[tests.kernels == "both"]
    first = both[both.version == "first"].squeeze()
    left_out = (parity.dtype == "float16") | (parity.cp_rank > 0)
    held = (parity.same_result & parity.same_gradient & (parity.worst <= 1))[left_out]
    described = "; ".join(
        f"{row.version} ({row.read}): fp16 {_tested(row.float16)}, cp_rank > 0 {_tested(row.rank_above_0)}"
        for row in both.itertuples()
    )
    measured = f"{described}; here {held.sum()} of {len(held)} such cases hold (models)"
    if first.float16 and first.rank_above_0:
        return Verdict.refuted(measured, "the test has both")
    if not left_out.any():
        return Verdict.not_testable("the cases that the test left out, in the record te_parity")
    if not held.all():
        return Verdict.corrected(measured, "and what it leaves out does not hold")
    if first.float16 or first.rank_above_0:
        return Verdict.corrected(measured, f"only {'ranks above 0' if first.float16 else 'fp16'}")
    return Verdict.confirmed(measured)


@rule("TE-13", "te_parity_tests", "te_parity")
def empty_sequences(tests: pd.DataFrame, parity: pd.DataFrame) -> Verdict:
    both = tests[tests.kernels == "both"]
    cases = parity[parity["empty"] > 0]
    held = cases.same_result & cases.same_gradient & (cases.worst <= 1)
    described = "; ".join(f"{row.version} ({row.read}): {_tested(row.empty)}" for row in both.itertuples())
    measured = f"{described}; here {held.sum()} of {len(held)} cases with empty sequences hold (models)"
    if cases.empty:
        return Verdict.not_testable("cases with empty sequences in the record te_parity")
    covered = both.set_index("version")["empty"]
    if not covered["first"] or not held.all():
        return Verdict.refuted(measured, "not covered" if not covered["first"] else "they do not hold")
    if not covered.all():
        return Verdict.corrected(measured, f"not in the {', '.join(covered.index[~covered])} version")
    return Verdict.confirmed(measured)


def _judge_speedup(times: pd.DataFrame, stated: pd.Series, what: str) -> Verdict:
    """Of the new kernel over the old, by n_seqs.

    Confirmed if all are the published ones to CLOSE. Refuted if the new kernel is no faster for some count for which
    the document says so (by more than CLOSE). In between the direction holds and the size is corrected.
    """
    package = findings.beside_the_package(times)
    times = times.reindex(columns=[OLD, NEW]).dropna()
    if not set(stated.index) <= set(times.index):
        counts = ", ".join(f"{n:,}" for n in stated.index)
        return Verdict.not_testable(f"times with both kernels for {counts} sequences")
    ratio = (times[OLD] / times[NEW]).reindex(stated.index)
    measured = f"{what}: " + ", ".join(f"{ratio[n]:.4g}x for {n:,}" for n in stated.index)
    measured += f"; {package}" * bool(package)
    off = ~agrees(ratio, stated, CLOSE)
    if not off.any():
        return Verdict.confirmed(measured)
    lost = off & (ratio <= 1) & (stated > 1 + CLOSE)
    listed = ", ".join(f"{ratio[n]:.4g}x instead of {stated[n]:.4g}x for {n:,}" for n in stated.index[off])
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
    return f"{row.kind}, {row['dtype']}, {row.layout}, rank {row.cp_rank} of {row.cp_size}"


def _tested(yes: bool) -> str:
    return "tested" if yes else "not tested"
