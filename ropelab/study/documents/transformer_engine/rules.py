"""The rules that judge claims TE-01 to TE-21.

A claim about times or bits is judged on the file of the first version of the pull request, if a record has the compiled
file. Else the claim is judged on TransformerEngine 2.18 and 2.20, if they have the subject of the claim. Else it is
judged on our models (`ropelab.bench.varlen_models`), which tell nothing about the kernels themselves. A fact of the
source counts only if the file itself was read. A fact that is known from the document alone cannot tell whether the
document is right.
"""

from collections.abc import Callable
from functools import wraps

import pandas as pd

from ropelab.bench.rows import is_right
from ropelab.study.documents.transformer_engine import findings, grids, measure
from ropelab.study.documents.transformer_engine.dispatch import LEGACY, LINEAR
from ropelab.study.documents.transformer_engine.evidence import THREADS
from ropelab.study.documents.transformer_engine.findings import CELL
from ropelab.study.documents.transformer_engine.grids import ALL, CODE, FORCED, MODELS, NEW, OLD, PACKAGES, Grids
from ropelab.study.documents.transformer_engine.layer import ALONE, LAYER
from ropelab.study.documents.transformer_engine.measure import GIVEN, SUMMED, UNGUARDED
from ropelab.study.engine import noise
from ropelab.study.engine.claims import Claim
from ropelab.study.engine.judging import counted, longer, needed, size, sizes
from ropelab.study.engine.ledger import rule
from ropelab.study.engine.noise import Interval, exact
from ropelab.study.engine.verdict import Basis, Untold, Verdict, fact, untold
from ropelab.study.engine.words import by_count, followed, listed, value_range

ROUTINE = (128, 512)
"""The numbers of sequences in TE-02, which have 512 and 128 tokens each."""
PAST, LEFT = "reads past freqs", "left as allocated"
"""Two outcomes of the record te_past_the_end."""

Judge = Callable[..., Verdict]


# ---------------------------------------------------------------------------------------------- times of both grids


def _of_grids(*allowed: Grids) -> Callable[[Judge], Judge]:
    """Let a rule judge the chosen pair of a record under the names `OLD` and `NEW`, and state the basis of the pair."""

    def on_the_pair(judge: Judge) -> Judge:
        @wraps(judge)
        def judged(claim: Claim, record: pd.DataFrame, *others: pd.DataFrame) -> Verdict:
            try:
                verdict = judge(claim, grids.canonical(record, allowed), *others)
            except Untold as missing:
                verdict = untold(str(missing))
            return verdict.with_basis(grids.chosen(record, allowed).basis)

        return judged

    return on_the_pair


def _timed(kernels: pd.DataFrame, query: str = "cp_size > 0", step: str = GIVEN) -> pd.DataFrame:
    """The intervals of both grids in the study's cells that the query selects; no rows if a cell is missing."""
    expected = pd.DataFrame([case.columns for case in measure.cases() if step in case.steps]).query(query)
    table = findings.intervals(kernels, step).dropna(subset=[OLD, NEW])
    found = expected.merge(table, on=CELL)
    return found if len(found) == len(expected) else found.iloc[:0]


def _table_b(kernels: pd.DataFrame, step: str) -> pd.DataFrame:
    """`_timed` at all counts of table B.

    Raises:
        Untold: a count is missing.
    """
    needs = "both grids at all counts of table B, from a given cotangent and with sum()"
    return needed(_timed(kernels, "part == 'table B'", step), needs)


def _layer(layer: pd.DataFrame, published: pd.DataFrame, *whats: str) -> pd.DataFrame:
    """The intervals by n_seqs (rows), and by part of the layer and grid (columns); no rows if one is missing."""
    rows = layer[is_right(layer) & layer.contender.isin((OLD, NEW)) & layer.what.isin(whats)]
    rows = rows.assign(time=[noise.time(row) for _, row in rows.iterrows()])
    table = rows.pivot_table(index="n_seqs", columns=["what", "contender"], values="time", aggfunc="first")
    wanted = pd.MultiIndex.from_product((whats, (OLD, NEW)))
    table = table.reindex(index=published.n_seqs, columns=wanted)
    return table.iloc[:0] if table.isna().to_numpy().any() else table


def _speedup(effect: Interval, printed: float) -> Verdict:
    """The verdict on a printed ratio. A ratio within the noise of 1 claims that there is no effect."""
    return fact(1.0 in effect) if 1.0 in noise.relative(printed, noise.FLOOR) else size(effect, printed, digits=3)


@rule("TE-01", "te_kernels", "te_published_b", basis=Basis.MODEL)
@_of_grids(*ALL)
def time_scales_with_blocks(claim: Claim, kernels: pd.DataFrame, published: pd.DataFrame) -> Verdict:
    """The time beyond the live blocks' time must grow with the first power of the dead blocks, in either factor."""
    powers = findings.growth_with_blocks(kernels) if len(_timed(kernels)) else pd.DataFrame()
    needed(powers, "the old grid in all cells of te_kernels")
    none = untold("a second cell whose time is beyond that of its live blocks")
    verdict = sizes(
        [none if power is None else size(power, 1.0, no_effect=0.0) for power in powers.power], claim.quantifier
    )
    fit, stated = findings.dead_block_fit(kernels), published.ns_per_dead_block[published.n_seqs >= 128]
    off = (fit[OLD] / fit.fitted_us - 1).abs()
    shards = _timed(kernels, "part == 'context parallel' and kind == 'balanced' and cp_rank == 0")
    each = listed(f"{row.tokens:,} tokens take {row[OLD].value:,.0f} µs" for _, row in shards.iterrows())
    return verdict.with_text(
        f"with freqs or the sequences constant, the time beyond the live blocks grows with the power "
        f"{value_range(powers.power.dropna())} of the dead blocks; {findings.block_price(fit)}, in table B "
        f"{value_range(stated)} ns from 128 sequences on; with {fit.live_us.iloc[0]:,.0f} µs for the live blocks this "
        f"price explains {len(fit)} cells within {off.max():.0%}, half of them within {off.median():.0%}; under equal "
        f"blocks {each}",
        "few dead blocks cost less each: they hide behind live blocks",
    )


@rule("TE-02", "te_kernels", basis=Basis.MODEL)
@_of_grids(*ALL)
def routine_shapes_lose(claim: Claim, kernels: pd.DataFrame) -> Verdict:
    """The claim leaves the length of freqs open, so that each measured length is a cell."""
    table = _timed(kernels, f"part in ('table B', 'freqs_len') and n_seqs in {ROUTINE}")
    table = table.sort_values(["n_seqs", "freqs_len"])
    ratio = table[OLD] / table[NEW]
    told = [
        f"{row.n_seqs} of {row.longest}: {value.value:.2f} with {row.freqs_len:,} rows of freqs"
        for row, value in zip(table.itertuples(), ratio, strict=True)
    ]
    return counted(longer(ratio), claim.quantifier, "both grids for both shapes").with_text(
        f"time of the old kernel over the time of the new kernel, {'; '.join(told)}",
        "with freqs as long as the longest sequence, equal sequences have no block without a token and lose no time; "
        "one long sequence among them prevents this remedy (TE-14)",
    )


@rule("TE-03", "te_layer", "te_published_a", basis=Basis.MODEL)
@_of_grids(*ALL)
def layer_speedup(claim: Claim, layer: pd.DataFrame, published: pd.DataFrame) -> Verdict:
    table = _layer(layer, published, LAYER)
    ratio = table[LAYER, OLD] / table[LAYER, NEW]
    found = [_speedup(*pair) for pair in zip(ratio, published.stated_speedup[: len(ratio)], strict=True)]
    return sizes(found, claim.quantifier, "the layer with both grids at all counts of table A").with_text(
        f"time of a torch layer with the old grid over its time with the new grid: "
        f"{by_count(ratio, table.index)} sequences",
        "the layer is ours, not TransformerEngine's own",
    )


@rule("TE-04", "te_layer", "te_published_a", basis=Basis.MODEL)
@_of_grids(*ALL)
def share_of_layer(claim: Claim, layer: pd.DataFrame, published: pd.DataFrame) -> Verdict:
    """The rule judges the share of the rotation of q and k alone, as the document does.

    It compares the ratio of the rotation to the rest of the layer, because near 100 % the share itself hardly changes.
    """
    table = _layer(layer, published, LAYER, ALONE)
    found, shown, ratios = [], [], []
    for name, column, when, digits in (
        (OLD, "old_share_percent", "before", 0),
        (NEW, "new_share_percent", "after", 1),
    ):
        stated = published[column][: len(table)] / 100
        stated = stated / (1 - stated)
        share = table[ALONE, name] / table[LAYER, name]
        rest = [_odds(value) for value in share]
        found += [size(*pair, digits=4, no_effect=0.0) for pair in zip(rest, stated, strict=True)]
        shown.append(", ".join(f"{100 * value.value:.{digits}f} %" for value in share) + f" {when}")
        ratios.append([value.value / odds for value, odds in zip(rest, stated, strict=True)])
    before, after = map(value_range, ratios)
    needs = "the layer and its rotation with both grids at all counts of table A"
    return sizes(needed(found, needs), claim.quantifier).with_text(
        f"a torch layer: {', '.join(shown)}; the rotation over the rest of the layer is {before} times the published "
        f"ratio before, and {after} times after"
    )


def _odds(share: Interval) -> Interval:
    return Interval(*(x / (1 - x) if x < 1 else float("inf") for x in (share.low, share.value, share.high)))


@rule("TE-05", "te_kernels", "te_published_b", basis=Basis.MODEL)
@_of_grids(*ALL)
def kernel_speedup(claim: Claim, kernels: pd.DataFrame, published: pd.DataFrame) -> Verdict:
    """A cell is a number of sequences, with a given cotangent or with the cotangent of a sum.

    The document does not say where the cotangent comes from.
    """
    found, told = [], []
    for step, how in ((SUMMED, "with sum()"), (GIVEN, "from a given cotangent")):
        table = _table_b(kernels, step)
        ratio = table[OLD] / table[NEW]
        stated = table.n_seqs.map(published.set_index("n_seqs").stated_speedup)
        found += [_speedup(*pair) for pair in zip(ratio, stated, strict=True)]
        told.append(f"{how} {by_count(ratio, table.n_seqs)} sequences")
    return sizes(found, claim.quantifier).with_text(
        f"old over new time, {'; '.join(told)}; {findings.added_by_sum(kernels, NEW)}",
        findings.beside_the_packages(findings.times(kernels, SUMMED).query("part == 'table B'")),
        "the benchmark of the pull request (6c46696) takes the sum",
    )


@rule("TE-06", "te_kernels", "te_published_b", basis=Basis.MODEL)
@_of_grids(*FORCED)
def search_does_not_matter(claim: Claim, kernels: pd.DataFrame, published: pd.DataFrame) -> Verdict:
    """A cell has more than one sequence, and fewer dead blocks than tokens, so that the search saves little.

    The search matters in a cell if the new kernel is slower there by more than the noise.
    """
    table = _timed(kernels)
    table = table[(table.dead_blocks < table.tokens) & (table.n_seqs > 1)]
    ratio = table[NEW] / table[OLD]
    ends = _timed(kernels, f"part == 'table B' and n_seqs in (1, {published.n_seqs.max()})")
    verdict = counted([x is not True for x in longer(ratio)], claim.quantifier, "both grids in all cells")
    if not len(ends):
        return verdict
    grown, stated = ends[NEW].iloc[-1] / ends[NEW].iloc[0], published.new_ms.iloc[-1] / published.new_ms.iloc[0]
    measured = (
        f"where dead blocks are fewer than tokens, the new kernel takes {value_range(ratio)} of the old kernel's time; "
        f"2,401 sequences take {grown.value - 1:+.1%} of the time of one (table B: {stated - 1:+.0%})"
    )
    if ends.ropelab.notna().all():
        given = ends.ropelab.iloc[-1] / ends.ropelab.iloc[0]
        measured += (
            f"; where positions are given {given.value - 1:+.1%}, so the search takes {(grown / given).value - 1:+.1%}"
        )
    return verdict.with_text(measured, "since the review one thread searches; here every thread searches")


@rule("TE-14", "te_kernels", basis=Basis.MODEL)
@_of_grids(*ALL)
def mostly_pathological(claim: Claim, kernels: pd.DataFrame) -> Verdict:
    """A cell has as many rows of freqs as the longest sequence has tokens, so no table is longer than needed."""
    table = _timed(kernels, "freqs_len == longest")
    ratio = table[OLD] / table[NEW]
    told = "; ".join(f"{kind}: {value_range(rows)}" for kind, rows in ratio.groupby(table.kind, sort=False))
    return counted([x is not True for x in longer(ratio)], claim.quantifier, "both grids in all cells").with_text(
        f"old over new time where freqs is as long as the longest sequence, {told}",
        "the cells were chosen to find losses: their number is not how often a shape occurs",
    )


@rule("TE-15", "te_layer", "te_published_a", basis=Basis.MODEL)
@_of_grids(*ALL)
def layer_ms(claim: Claim, layer: pd.DataFrame, published: pd.DataFrame) -> Verdict:
    table = _layer(layer, published, LAYER)
    found, told = [], []
    for name, column in ((OLD, "old_ms"), (NEW, "new_ms")):
        times = [_ms(time) for time in table[LAYER, name]]
        stated = published[column][: len(times)]
        found += [size(*pair, digits=4, no_effect=0.0) for pair in zip(times, stated, strict=True)]
        told.append(f"{by_count(times, table.index)} sequences")
    return sizes(found, claim.quantifier, "the layer with both grids at all counts of table A").with_text(
        f"milliseconds of a torch layer with the old grid {told[0]}; with the new one {told[1]}",
        "the document does not state the GPU of its layers",
    )


@rule("TE-16", "te_kernels", "te_published_b", basis=Basis.MODEL)
@_of_grids(*ALL)
def kernel_ms(claim: Claim, kernels: pd.DataFrame, published: pd.DataFrame) -> Verdict:
    """The cells are times from a given cotangent and times with the sum, as in TE-05."""
    found, told = [], []
    for step in (SUMMED, GIVEN):
        table = _table_b(kernels, step)
        for name, column in ((OLD, "old_ms"), (NEW, "new_ms")):
            times = [_ms(time) for time in table[name]]
            stated = table.n_seqs.map(published.set_index("n_seqs")[column])
            found += [size(*pair, digits=4, no_effect=0.0) for pair in zip(times, stated, strict=True)]
            told.append(f"{name}, {step}: {by_count(times, table.n_seqs)} sequences")
    return sizes(found, claim.quantifier).with_text(f"milliseconds, {'; '.join(told)}", "the document's GPU is an H100")


def _ms(time: Interval) -> Interval:
    return time / exact(1000.0)


@rule("TE-19", "te_kernels", basis=Basis.MODEL)
@_of_grids(*FORCED)
def condition_avoids_overhead(claim: Claim, kernels: pd.DataFrame) -> Verdict:
    """The cells are the cells in which the condition takes the old kernel: the new kernel must be slower there."""
    complete = needed(_timed(kernels), "both grids in all cells of te_kernels")
    table = findings.choices(kernels)
    kept = complete.merge(table.loc[table["first"] == LEGACY, CELL], on=CELL)
    told = [f"the {name} condition {_worst(table, name)}" for name in ("first", "merged")]
    slower = findings.missed(table, "first").query("part == 'table B'").n_seqs
    return counted(longer(kept[NEW] / kept[OLD]), claim.quantifier).with_text(
        f"where the condition keeps the old kernel, the new one takes {value_range(kept[NEW] / kept[OLD])} of its "
        f"time; {'; '.join(told)}",
        f"in table B itself the condition takes the slower kernel for {listed(sorted(slower))} sequences",
    )


def _worst(table: pd.DataFrame, name: str) -> str:
    """The number of cells in which a heuristic takes the slower grid, the worst cell, and their kinds, in words."""
    missed = findings.missed(table, name)
    said = findings.missed_words(table, name)
    if missed.empty:
        return said
    row = missed.iloc[0]
    rank = f", {row.cp_size} ranks" if row.cp_size > 1 else ""
    kinds = listed(f"{count} {kind}" for kind, count in missed.kind.value_counts().items())
    cell = f"{row.n_seqs} sequences, the longest of {row.longest:,}, {row.freqs_len:,} rows of freqs{rank}"
    return f"{said} ({cell}; {kinds})"


# ----------------------------------------------------------------------------------------------- bits of both grids


@rule("TE-08", "te_parity", basis=Basis.MODEL)
def same_bits(claim: Claim, parity: pd.DataFrame) -> Verdict:
    """The results must be equal in every row of a sequence, and right, because two wrong kernels may agree."""
    pairs = {pair: rows for pair in ALL if len(rows := _of_pair(parity, pair))}
    pair, rows = next(iter(pairs.items()))
    cases = len(measure.SHARDS) * len(measure.DTYPES["cuda"]) * len(measure.LAYOUTS)
    if len(rows.drop_duplicates(["dtype", "layout", "cp_size", "cp_rank"])) < cases:
        return untold("both grids in every dtype, layout and rank").with_basis(pair.basis)
    equal = _equal(rows)
    right = equal & (rows.worst <= 1)
    left_out = (rows.dtype == "float16") | (rows.cp_rank > 0)
    empty = rows["empty"] > 0
    measured = (
        f"{equal.sum()} of {len(rows)} cases equal in result and gradient (random cotangents, "
        f"{listed(rows.dtype)}, cp_size up to {rows.cp_size.max()}); largest error "
        f"{rows.worst.max():.2f} of its bound; equal and right in {right[left_out].sum()} of {left_out.sum()} cases "
        f"of float16 or a rank above 0, and in {right[empty].sum()} of {empty.sum()} with empty sequences"
    )
    if "ropelab_same_bits" in rows:
        measured += f"; {value_range(rows.ropelab_same_bits, '.1%')} of the elements have the bits of ropelab's kernel"
    wrong = rows[~right]
    first = "" if wrong.empty else f"the first case that differs or is wrong: {_case(wrong.iloc[0])}"
    packages = _packages_bits(pairs[PACKAGES]) if PACKAGES in pairs else ""
    ours = "both models launch one rotation of a token, as TransformerEngine's kernels do" if pair == MODELS else ""
    return counted(right.tolist(), claim.quantifier).with_text(measured, first, packages, ours).with_basis(pair.basis)


def _of_pair(parity: pd.DataFrame, pair: Grids) -> pd.DataFrame:
    """The rows of a pair; older records have the rows of the models alone."""
    if "grids" not in parity:
        return parity if pair == MODELS else parity.iloc[:0]
    return parity[parity.grids == " and ".join(pair.names)]


def _equal(rows: pd.DataFrame) -> pd.Series:
    return (rows.same_result & rows.same_gradient).astype(bool)


def _packages_bits(rows: pd.DataFrame) -> str:
    linear = rows.merged_takes == LINEAR
    return (
        f"{' and '.join(PACKAGES.names)}: equal in {_equal(rows[linear]).sum()} of {linear.sum()} cases in which the "
        f"merged condition takes the new grid, and in {_equal(rows[~linear]).sum()} of {(~linear).sum()} others"
    )


def _case(row: pd.Series) -> str:
    what = "result" if not row.same_result else "gradient" if not row.same_gradient else "error"
    return f"{what} of {row.kind}, {row['dtype']}, {row.layout}, rank {row.cp_rank} of {row.cp_size}"


@rule("TE-20", "te_past_the_end", basis=Basis.MODEL)
def reads_past_the_end(claim: Claim, past: pd.DataFrame) -> Verdict:
    outcome = past.set_index("contender").outcome
    is_code = bool({*CODE.names} & {*outcome.index})
    old, unguarded = CODE.names if is_code else (MODELS.old, UNGUARDED)
    basis = CODE.basis if is_code else MODELS.basis
    if not {old, unguarded} <= set(outcome.index):
        return untold("the old grid, and the new one without a guard").with_basis(basis)
    return (
        fact(outcome[unguarded] == PAST and outcome[old] == LEFT)
        .with_text("; ".join(f"{name}: {what}" for name, what in outcome.items()))
        .with_basis(basis)
    )


# ---------------------------------------------------------------------------------------------------------- the source


def _of_file(row: pd.Series, verdict: Verdict, claim: Claim) -> Verdict:
    """The verdict on a fact of a version; the claim cannot be told if only the document states the fact."""
    return verdict if "the file" in row.read else untold(claim.needs)


def _version(frame: pd.DataFrame, version: str = "first") -> pd.Series:
    return frame[frame.version == version].iloc[0]


def _versions(source: pd.DataFrame, words) -> str:
    return "; ".join(f"{row.version} ({row.read}): {words(row)}" for row in source.itertuples())


@rule("TE-07", "te_source", basis=Basis.SOURCE)
def condition_of_the_new_kernel(claim: Claim, source: pd.DataFrame) -> Verdict:
    first, (sequences, blocks) = _version(source), map(int, claim.numbers)
    same = (first.least_sequences, first.blocks_per_token) == (sequences, blocks)
    return _of_file(first, fact(same and not first.more_than and not first.times_cp_size), claim).with_text(
        _versions(source, _condition), "unless the variable forces a kernel (TE-09)", "TE-19 has the times"
    )


def _condition(row) -> str:
    blocks = f"{'more than' if row.more_than else 'at least'} {row.blocks_per_token}{' cp_size' * row.times_cp_size}"
    dead = f", and {row.least_dead_blocks:,} dead blocks" * bool(row.least_dead_blocks)
    return f"at least {row.least_sequences} sequences, {blocks} times as many blocks as tokens{dead}"


@rule("TE-09", "te_source", basis=Basis.SOURCE)
def variable_forces(claim: Claim, source: pd.DataFrame) -> Verdict:
    """The earliest version whose file was read decides. Later names and the model's dispatch do not count."""
    read = needed(source[source.read.str.contains("the file")], claim.needs)
    forces = (source.zero == LEGACY) & (source.one == LINEAR)
    first = read.index[0]
    words = _versions(
        source.assign(forces=forces),
        lambda row: f"{row.variable} {'forces either' if row.forces else 'does not force'}" if row.variable else "none",
    )
    later = [row.version for row in read.itertuples() if row.variable != read.variable[first]]
    return fact(bool(forces[first]) and read.variable[first] in claim.statement).with_text(
        f"{words}; our model of the dispatch does the same in {source.model.sum()} of {len(source)}",
        followed("no longer under that name in: ", later),
    )


@rule("TE-10", "te_source", basis=Basis.SOURCE)
def no_guard(claim: Claim, source: pd.DataFrame) -> Verdict:
    first = _version(source)
    guarded = source.version[source.guard.astype(bool)]
    return _of_file(first, fact(not first.guard), claim).with_text(
        _versions(source, lambda row: f"{'a' if row.guard else 'no'} guard"),
        f"added in the {guarded.iloc[0]} version" if len(guarded) else "",
    )


@rule("TE-11", "te_search", "te_source", basis=Basis.SOURCE)
def search_is_repeated(claim: Claim, search: pd.DataFrame, source: pd.DataFrame) -> Verdict:
    n, steps, threads, reads = map(int, claim.numbers)
    row, first = search[search.n_seqs == n].squeeze(), _version(source)
    found = int(row.steps) * int(first.threads)
    verdict = fact((row.steps, first.threads) == (steps, threads)) if found == reads else size(exact(found), reads)
    return _of_file(first, verdict, claim).with_text(
        f"{n:,} sequences: {row.steps} steps x {first.threads} threads = {found:,} reads in a block",
        f"the threads of a warp ask for one address together: {row.warp_requests} requests of {THREADS} threads",
        "a block of fewer than 16 heads, as in table A, has half as many threads",
        _versions(source[source.threads == 1], lambda row: "one thread searches"),
    )


@rule("TE-12", "te_parity_tests", basis=Basis.SOURCE)
def untested_cases(claim: Claim, tests: pd.DataFrame) -> Verdict:
    both = tests[tests.kernels == "both"]
    first = _version(both)
    verdict = counted([not first.float16, not first.rank_above_0], claim.quantifier)
    return _of_file(first, verdict, claim).with_text(
        _versions(both, lambda row: f"fp16 {_tested(row.float16)}, cp_rank > 0 {_tested(row.rank_above_0)}"),
        "TE-08 has these cases",
    )


@rule("TE-13", "te_parity_tests", basis=Basis.SOURCE)
def covered_cases(claim: Claim, tests: pd.DataFrame) -> Verdict:
    both = tests[tests.kernels == "both"]
    first = _version(both)
    verdict = counted([bool(first["empty"]), bool(first.context_parallel)], claim.quantifier)
    gone = sorted(set(tests.version) - set(both.version))
    return _of_file(first, verdict, claim).with_text(
        _versions(both, lambda row: f"empty {_tested(row.empty)}, cp_size > 1 {_tested(row.context_parallel)}"),
        followed("no test compares both kernels in: ", gone),
        "TE-08 has these cases",
    )


def _tested(yes: bool) -> str:
    return "tested" if yes else "not tested"


@rule("TE-17", "te_search", "te_source", basis=Basis.SOURCE)
def one_thread_suffices(claim: Claim, search: pd.DataFrame, source: pd.DataFrame) -> Verdict:
    """In the versions after the review, a block must not read more often than one search does."""
    most = search.steps.max()
    later = needed(source[(source.version != "first") & source.read.str.contains("the file")], claim.needs)
    redundant = [int(most * (threads - 1)) for threads in later.threads]
    before = most * (_version(source).threads - 1)
    return counted([count == 0 for count in redundant], claim.quantifier).with_text(
        f"{before:,} redundant reads of a block at {search.n_seqs.max():,} sequences in the first version; "
        + _versions(later.assign(left=redundant), lambda row: f"{row.left:,}"),
        "the other threads wait for the thread that searches; the time of this wait is not measured",
    )


@rule("TE-18", "te_source", basis=Basis.SOURCE)
def no_tokens(claim: Claim, source: pd.DataFrame) -> Verdict:
    first = _version(source)
    verdict = fact(first.no_tokens == LEGACY) if first.no_tokens else untold(claim.needs)
    return _of_file(first, verdict, claim).with_text(
        f"{first.version} ({first.read}): the kernel for no tokens is {first.no_tokens or 'not known'}"
    )


# ------------------------------------------------------------------------------------------------ the document's tables


@rule("TE-21", "te_published_a", "te_published_b", basis=Basis.DOCUMENT)
def ratios_follow(claim: Claim, layers: pd.DataFrame, kernels: pd.DataFrame) -> Verdict:
    """The printed ratios must follow from the printed times, which may be off by half of their last digit."""
    rows = pd.concat((layers, kernels))
    found = [_rounded(row.old_ms, 4) / _rounded(row.new_ms, 4) for row in rows.itertuples()]
    printed = [_rounded(value, 3) for value in rows.stated_speedup]
    agree = [a.low <= b.high and b.low <= a.high for a, b in zip(found, printed, strict=True)]
    return counted(agree, claim.quantifier).with_text(
        f"{sum(agree)} of {len(agree)} ratios are those of the printed times, rounded"
    )


def _rounded(value: float, digits: int) -> Interval:
    half = 0.5 * 10.0**-digits
    return Interval(value - half, value, value + half)
