"""The rules that judge claims FS-01 to FS-17.

The evidence says whose encoders ran (`ropelab.study.documents.fairseq2.encoders`): the pull request's own at its
commit, or our models of them. The rule of a claim about the encoders takes its basis from the evidence, so
`rule_on_encoders` registers the rule. Evidence without the column ``encoder_code`` is evidence of our models. Inductor
is a package and is run itself.

The rules compare a number that the document states of its grid with the mean of the recorded ratios, once for each set
of shapes, dtype and direction. If a cell is not recorded, the claim cannot be told.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from itertools import product

import pandas as pd

from ropelab.bench.rows import is_right, timed
from ropelab.study.documents.fairseq2.encoders import ENCODER_CODE, MODEL
from ropelab.study.documents.fairseq2.evidence import (
    CELL,
    DIRECTIONS,
    DTYPES,
    IMPLEMENTATIONS,
    LAYOUTS,
    RATIOS,
    default_cases,
    log,
    published,
    ratios,
)
from ropelab.study.documents.fairseq2.findings import SHAPE, apart, same_kernels
from ropelab.study.documents.fairseq2.peers import PROPOSED
from ropelab.study.engine import noise
from ropelab.study.engine.claims import Claim
from ropelab.study.engine.judging import counted, longer, size, sizes
from ropelab.study.engine.ledger import rule
from ropelab.study.engine.noise import Interval
from ropelab.study.engine.verdict import Basis, Outcome, Untold, Verdict, fact, untold
from ropelab.study.engine.words import listed, value_range

NOISE = 2 * noise.FLOOR
"""The least relative half-width of the interval of a ratio of two times."""

_PART = ["shapes", "dtype", "direction"]
_PASSES = {"forward": 1, "forward and backward": 2}
_ROUNDED = 0.005
"""The log prints ratios with two decimals."""

_OF_THE_DOCUMENT = ("fairseq2_log", "fairseq2_summary")
"""Evidence from the document alone: no encoder ran here."""

# --------------------------------------------------------------------------------------------------- whose encoders


def rule_on_encoders(claim_id: str, *evidence_names: str) -> Callable[[Callable[..., Verdict]], Callable[..., Verdict]]:
    """Register the rule of a claim about the encoders.

    The basis is `Basis.CODE` if all evidence comes from the pull request's own encoders, else `Basis.MODEL`.
    """

    def register(judge: Callable[..., Verdict]) -> Callable[..., Verdict]:
        @wraps(judge)
        def judged(claim: Claim, *frames: pd.DataFrame) -> Verdict:
            made = [f for name, f in zip(evidence_names, frames, strict=True) if name not in _OF_THE_DOCUMENT]
            basis = Basis.CODE if all(whose(f).startswith(PROPOSED) for f in made) else Basis.MODEL
            try:
                return judge(claim, *frames).with_basis(basis)
            except Untold as missing:
                return untold(str(missing)).with_basis(basis)

        return rule(claim_id, *evidence_names, basis=Basis.CODE)(judged)

    return register


def whose(frame: pd.DataFrame) -> str:
    """The code that made the table, as `Encoders.source`: our model if the table lacks the column or has several."""
    rows = frame[frame.contender.isin(IMPLEMENTATIONS)] if "contender" in frame else frame
    sources = set(rows[ENCODER_CODE].fillna(MODEL)) if ENCODER_CODE in frame else set()
    return sources.pop() if len(sources) == 1 else MODEL


# -------------------------------------------------------------------------------------------- what Inductor makes


@rule("FS-01", "fairseq2_inductor", basis=Basis.PACKAGE)
def no_code_for_complex_numbers(claim: Claim, inductor: pd.DataFrame) -> Verdict:
    """A cell is a compilation of RE: Inductor must warn of complex numbers, and leave operators to eager."""
    compiled = _compiled(inductor)
    products, formulas = (compiled[compiled.contender.str.startswith(name)] for name in ("RE ", "RRE "))
    _need(products[["status", "complex_warning"]], "compilations of RE")
    warned, left = products.complex_warning.eq(True), products.fallbacks.fillna("").ne("")
    operators = sorted({name for names in products.fallbacks.dropna() for name in names.split(", ") if name})
    return counted(list(warned & left), claim.quantifier).with_text(
        f"RE: a warning of complex operators in {warned.sum()} of {len(products)} compilations, operators left to "
        f"eager in {left.sum()} ({listed(operators)}); RRE: {formulas.complex_warning.eq(True).sum()} and "
        f"{formulas.fallbacks.fillna('').ne('').sum()} of {len(formulas)}"
    )


@rule_on_encoders("FS-04", "fairseq2_inductor")
def same_memory(claim: Claim, inductor: pd.DataFrame) -> Verdict:
    """The peaks of a call must be equal to the byte in all four implementations."""
    compiled = _compiled(inductor)
    _need(compiled[["peak_bytes"]], "peaks of compiled calls")
    groups = compiled.groupby(["dtype", "direction"], sort=False)
    results = compiled.peak_bytes / compiled.result_bytes
    spread = (groups.peak_bytes.max() - groups.peak_bytes.min()) / 2**20
    measured = "peak in results' sizes: " + "; ".join(
        f"{dtype} {direction} " + ", ".join(f"{row.contender} {results[row.Index]:.2f}" for row in rows.itertuples())
        for (dtype, direction), rows in groups
    )
    state = compiled.groupby(compiled.contender.str.split().str[0]).state_bytes.max() / 2**20
    return counted(list(groups.peak_bytes.nunique() == 1), claim.quantifier).with_text(
        f"{measured}; the peaks differ by {value_range(spread, ',.0f')} MiB",
        f"beside the call, RRE keeps tables of {state['RRE']:,.0f} MiB and RE of {state['RE']:,.0f} MiB",
    )


@rule_on_encoders("FS-06", "fairseq2_inductor")
def two_more_kernels(claim: Claim, inductor: pd.DataFrame) -> Verdict:
    """A cell is a dtype and a direction.

    In every pass RE in halves must launch the stated number of further kernels, and RE in halves must be slower.
    """
    plain, reordered = _reordering(inductor, "kernels")
    more = reordered.kernels - plain.kernels
    expected = published()["kernels"] * more.index.get_level_values("direction").map(_PASSES)
    is_longer = longer(noise.time(reordered.loc[part]) / noise.time(plain.loc[part]) for part in plain.index)
    found = [bool(n == stated) and slower for n, stated, slower in zip(more, expected, is_longer, strict=True)]
    names = reordered.launched.str.split("; ").map(lambda names: ", ".join(n for n in names if n.startswith("triton_")))
    times = (reordered.median_us / plain.median_us).map("{:.2f} times as long".format)
    return counted(found, claim.quantifier).with_text(
        "; ".join(
            f"{' '.join(part)}: {more[part]:.0f} more kernels, {times[part]} ({names[part] or 'none generated'})"
            for part in more.index
        ),
        "the names in the document have no cast (_to_copy), as those here in float32 and unlike those in bfloat16",
    )


@rule_on_encoders("FS-14", "fairseq2_inductor")
def no_other_has_them(claim: Claim, inductor: pd.DataFrame) -> Verdict:
    """A cell is a compilation of another implementation: no kernel may be generated around a complex product."""
    compiled = _compiled(inductor)
    others = compiled[compiled.contender != "RE reference"]
    _need(others[["status", "kernels"]], "compilations of the other three")
    around = others.fallbacks.fillna("").ne("") & others.generated.fillna("").ne("")
    which = listed(f"{row.contender} {row.dtype} {row.direction}" for row in others[around].itertuples())
    return counted(list(~around), claim.quantifier).with_text(
        f"in {(~around).sum()} of {len(others)} compilations of the others no kernel is generated beside a complex "
        f"product (with such kernels: {which})",
        "in bfloat16 the casts of native RE are kernels of their own" if around.any() else "",
    )


@rule_on_encoders("FS-15", "fairseq2_inductor", "fairseq2_log")
def about_four_ms(claim: Claim, inductor: pd.DataFrame, document: pd.DataFrame) -> Verdict:
    """The time that RE in halves takes beyond RE in pairs, in each dtype and direction, for each pass.

    The document does not name its GPU. Times on another GPU may agree with the document's, but cannot refute them.
    """
    plain, reordered = _reordering(inductor, "median_us")
    added = {}
    for part in plain.index:
        more = noise.difference(noise.time(reordered.loc[part]), noise.time(plain.loc[part]))
        scale = 1000 * _PASSES[part[1]]
        added[part] = Interval(more.low / scale, more.value / scale, more.high / scale)
    shape = published()["shape"]
    same_size = document[
        (document["mode"] == "compiled")
        & (document.batch == shape[0])
        & (document.seq_len * document.encoding_dim == shape[1] * shape[2])
    ].pivot_table(index=SHAPE, columns="contender", values="ms")
    logged = same_size["RE reference"] - same_size["RE llama"]
    stated = published()["kernels_ms"]
    verdict = sizes([size(x, stated, digits=0, no_effect=0) for x in added.values()], claim.quantifier)
    if verdict.outcome in (Outcome.FAILS, Outcome.SOME_CELLS):
        verdict = untold("times on the document's GPU, which the document does not name")
    of_one = abs(logged.mean() / 2 - stated) < abs(logged.mean() - stated)
    return verdict.with_text(
        f"added at {_named(*shape)} in each pass: " + "; ".join(f"{x} ms ({' '.join(p)})" for p, x in added.items()),
        f"in the log, the cell of as many bytes differs by {value_range(logged, '.1f')} ms"
        + (f": {stated} ms are rather the time of one kernel than of two" if of_one else ""),
    )


@rule_on_encoders("FS-09", "fairseq2_reorderings")
def reorderings_compile_alike(claim: Claim, reorderings: pd.DataFrame) -> Verdict:
    """For all ways with only the named operators, Inductor must generate the same code, up to names."""
    ran = reorderings[is_right(reorderings)]
    operators = {*published()["reorderings"], published()["reordering_used"]}
    named = ran.variant.map(lambda variant: set(variant.split(", ")) <= operators)
    if named.sum() < 2 or ran.code.isna().any():
        raise Untold("at least two ways to reorder with the named operators, compiled")
    measured = f"{len(ran)} ways: " + "; ".join(
        f"{row.variant}: code {row.code}, {row.kernels:.0f} kernels, the generated ones "
        f"{row.generated_bytes / 1e9:.1f} GB, {row.median_us / 1000:.2f} ms"
        for row in ran.itertuples()
    )
    others = ran[~named & (ran.code != ran[named].code.iloc[0])]
    longest = ran.median_us.max() / ran.median_us.min() - 1
    return fact(ran[named].code.nunique() == 1).with_text(
        measured,
        "the document does not show its ways: the first is the pull request's, the others are ours",
        f"other code, by operators that the document does not name: {'; '.join(others.variant)}" if len(others) else "",
        f"times differ by {longest:.0%}",
    )


# ----------------------------------------------------------------------------------------------------------- times


@rule_on_encoders("FS-02", "fairseq2_grid", "fairseq2_inductor")
def complex_numbers_are_not_slower(claim: Claim, grid: pd.DataFrame, inductor: pd.DataFrame) -> Verdict:
    """Each class in its layout before the pull request: RE in pairs, RRE in halves; all cells, modes and directions."""
    times = pd.concat({mode: _times(grid, inductor, mode) for mode in ("compiled", "eager")}, names=["mode"])
    over, under = RATIOS["native"]
    _need(times[[over, under]], "times of native RE and RRE")
    ratio = _ratio(times, over, under)
    found = pd.Series(longer(ratio), ratio.index, dtype=object)
    groups = ["mode", *_PART]
    measured = "RRE takes " + "; ".join(
        f"{value_range(rows)} times as long ({' '.join(part)}: not slower in "
        f"{found[rows.index].eq(True).sum()} of {len(rows)})"
        for part, rows in ratio.groupby(groups, sort=False)
    )
    slower = ratio[found.eq(False)]
    same = same_kernels(grid, inductor)
    return counted(list(found), claim.quantifier).with_text(
        measured,
        f"RE is slower in {len(slower)} cells, by up to {1 / min(x.value for x in slower) - 1:.0%}"
        if len(slower)
        else "",
        f"two timings of the same kernels differ by up to {max(apart(same, d) for d in DIRECTIONS):.1%}",
    )


@rule_on_encoders("FS-05", "fairseq2_grid", "fairseq2_inductor", "fairseq2_log", "fairseq2_summary")
def native_speedup(
    claim: Claim, grid: pd.DataFrame, inductor: pd.DataFrame, document: pd.DataFrame, summary: pd.DataFrame
) -> Verdict:
    """The compiled times of each class in its layout before the pull request: RE in pairs, RRE in halves."""
    native, llama = (_logged_times(document, ratio) for ratio in ("native", "llama"))
    stated = published()["native_ratio"]
    verdict = _sized(claim, _times(grid, inductor, "compiled"), {RATIOS["native"]: stated})
    return verdict.with_text(
        verdict.measured,
        f"the log's times give {native.mean():.3f}; its printed {stated} is the mean of RRE llama over RE llama "
        f"({_logged_ratios(summary, 'llama'):.3f} from its ratios, {llama.mean():.3f} from its times, which are "
        "rounded too much to tell the two apart)",
    )


@rule_on_encoders("FS-07", "fairseq2_grid", "fairseq2_inductor", "fairseq2_summary")
def halves_by_complex_numbers(
    claim: Claim, grid: pd.DataFrame, inductor: pd.DataFrame, summary: pd.DataFrame
) -> Verdict:
    """Both in halves: the speed of RE is the time of RRE over the time of RE."""
    stated = published()["re_reference_speed"]
    verdict = _sized(claim, _times(grid, inductor, "compiled"), {RATIOS["reference"]: stated})
    return verdict.with_text(verdict.measured, f"the mean of the log is {_logged_ratios(summary, 'reference'):.2f}")


@rule_on_encoders("FS-08", "fairseq2_grid", "fairseq2_inductor", "fairseq2_summary")
def pairs_by_cosines(claim: Claim, grid: pd.DataFrame, inductor: pd.DataFrame, summary: pd.DataFrame) -> Verdict:
    """Both in pairs: the speed of RRE is the time of RE over the time of RRE."""
    stated = published()["rre_llama_speed"]
    verdict = _sized(claim, _times(grid, inductor, "compiled"), {RATIOS["llama"][::-1]: stated})
    return verdict.with_text(
        verdict.measured, f"the log's mean ratio of times gives {1 / _logged_ratios(summary, 'llama'):.2f}"
    )


@rule_on_encoders("FS-11", "fairseq2_grid", "fairseq2_inductor")
def cosines_as_baseline(claim: Claim, grid: pd.DataFrame, inductor: pd.DataFrame) -> Verdict:
    """The speed of RRE in pairs must be larger than the speed of RE in halves, cell by cell.

    Each speed is a fraction of the speed of the class whose own layout this is. The document compares 0.86 and 0.66 in
    this way.
    """
    compiled, eager = (_times(grid, inductor, mode) for mode in ("compiled", "eager"))
    _need(compiled, "times of all four implementations")
    speeds = [_ratio(compiled, *pair) for pair in _FOREIGN]
    found = longer(rre / re for rre, re in zip(*speeds, strict=True))
    rre, re = ({part: x.value for part, x in _means(rows).items()} for rows in speeds)
    return counted(found, claim.quantifier).with_text(
        "speed in the foreign layout, of the class at home there, RRE and RE: "
        + "; ".join(f"{rre[part]:.2f} and {re[part]:.2f} ({' '.join(part)})" for part in rre),
        _elsewhere(compiled, "compiled"),
        _elsewhere(eager, "eager"),
    )


@rule_on_encoders("FS-16", "fairseq2_grid", "fairseq2_inductor", "fairseq2_summary")
def eager_means(claim: Claim, grid: pd.DataFrame, inductor: pd.DataFrame, summary: pd.DataFrame) -> Verdict:
    """The rule judges both means that the summary prints for eager calls."""
    printed = summary[summary["mode"] == "eager"].set_index("ratio").printed
    return _sized(claim, _times(grid, inductor, "eager"), {RATIOS[ratio]: stated for ratio, stated in printed.items()})


@rule_on_encoders("FS-17", "fairseq2_grid", "fairseq2_inductor", "fairseq2_log")
def compiling_costs(claim: Claim, grid: pd.DataFrame, inductor: pd.DataFrame, document: pd.DataFrame) -> Verdict:
    """The rule judges the compiled time over the eager time. The log prints times with one decimal."""
    stated = times_by_compiling(document, _NATIVE, "ms")
    modes = {mode: _times(grid, inductor, mode)[_NATIVE] for mode in ("compiled", "eager")}
    verdict = _sized(claim, pd.DataFrame(modes), {("compiled", "eager"): stated}, digits=1)
    return verdict.with_text(verdict.measured, f"the log: {stated:.2f}")


# ---------------------------------------------------------------------------------------- what a CPU or a file says


@rule_on_encoders("FS-03", "fairseq2_equality")
def same_mathematics(claim: Claim, equality: pd.DataFrame) -> Verdict:
    """Formulas that agree in every bit on integers are the same. Rounded tables do not count as mathematics."""
    key = ["what", "first", "second", "layout", "direction"]
    ways = "forward", "backward"
    wanted = [("formula", "RE", "RRE", layout, way) for layout, way in product(LAYOUTS.values(), ways)]
    wanted += [("permutation", f"{name} reference", f"{name} llama", "", way) for name in ("RE", "RRE") for way in ways]
    exact = equality[equality.what != "tables"]
    equal = exact.fillna({"layout": ""}).set_index(key).equal.astype(bool).to_dict()
    if missing := set(wanted) - set(equal):
        raise Untold(f"{len(missing)} of {len(wanted)} further comparisons")
    found = [equal[k] for k in wanted]
    tables = equality[equality.what == "tables"].sort_values("positions")
    worst, remark = tables[(tables["first"] == "RE") & (tables.second == "RRE")].tail(1), ""
    if len(worst) and not worst.equal.item():
        errors = tables[tables.second == "exact"].groupby("first").difference.last()
        remark = (
            f"their tables differ: up to position {worst.positions.item():,.0f} by up to {worst.difference.item():.1e} "
            f"(RE and RRE from the exact ones by {errors['RE']:.1e} and {errors['RRE']:.1e}), as both round the angle "
            "to float32, and not alike"
        )
    return counted(found, claim.quantifier).with_text(
        f"{sum(found)} of {len(found)} comparisons agree in every bit: formulas on integers, layouts through the "
        f"permutation, forward and backward (with our kernel's, {exact.equal.sum()} of {len(exact)})",
        remark,
    )


@rule("FS-10", "fairseq2_summary", basis=Basis.DOCUMENT)
def summary_follows(claim: Claim, summary: pd.DataFrame) -> Verdict:
    """The mean of ratios with two decimals is right to half of the last decimal."""
    if len(summary) < 4:
        raise Untold("all four means of the log")
    means = [Interval(x - _ROUNDED, x, x + _ROUNDED) for x in summary.of_ratios]
    return sizes([size(*pair) for pair in zip(means, summary.printed, strict=True)], claim.quantifier).with_text(
        "; ".join(
            f"{row.mode} {row.ratio} {row.of_ratios:.3f} (printed {row.printed}, from the rounded times "
            f"{row.of_times:.2f})"
            for row in summary.itertuples()
        )
    )


@rule_on_encoders("FS-12", "fairseq2_defaults")
def defaults_are_kept(claim: Claim, defaults: pd.DataFrame) -> Verdict:
    """The rule compares the encoders without ``impl`` with the encoders of the released package."""
    equal = defaults.set_index(["encoder", "case"]).equal.astype(bool)
    if missing := set(default_cases()) - set(equal.index):
        raise Untold(f"{len(missing)} of {len(default_cases())} further comparisons")
    broken = "; ".join(": ".join(case) for case in equal.index[~equal])
    return counted(list(equal), claim.quantifier).with_text(
        f"{whose(defaults)}, impl left out: {equal.sum()} of {len(equal)} comparisons with the "
        "released ones agree (results in bits, buffers, checkpoint, signature)",
        f"different: {broken}" if broken else "",
    )


@rule("FS-13", "fairseq2_changes", "fairseq2_session", basis=Basis.SOURCE)
def tests_are_missing(claim: Claim, changes: pd.DataFrame, session: pd.DataFrame) -> Verdict:
    """The claim holds if no file that the commits change is a test."""
    files = sorted(set(changes.file))
    tests = [file for file in files if "test" in file]
    items = session.set_index("kind")["items"]
    commits = listed(changes.commit.str[:7])
    return fact(not tests).with_text(
        f"commits {commits} change {listed(files)}: {len(tests)} tests",
        f"of {items.sum()} items of the logged session {items['timings']} time, {items['summary']} sums up, "
        f"{items['anything else']} may compare results",
    )


# --------------------------------------------------------------------------------------------------------- helpers

_NATIVE = "RE llama"
_FOREIGN = RATIOS["llama"][::-1], RATIOS["reference"]
"""For RRE and for RE: the two times whose ratio is the speed in the foreign layout, over the class of that layout."""


def _named(batch: int, seq_len: int, encoding_dim: int) -> str:
    return f"B{batch} S{seq_len} E{encoding_dim}"


def _dtypes(frame: pd.DataFrame, wanted: tuple[str, ...]) -> list[str]:
    """The dtypes that a record should have, and the dtypes that the record has."""
    return list(dict.fromkeys([*wanted, *frame.dtype]))


def _need(frame: pd.DataFrame, what: str) -> None:
    """Raise `Untold` where a cell of the frame is missing."""
    if missing := frame.isna().any(axis=1).sum() if len(frame) else 1:
        raise Untold(f"{what}: {missing} of {len(frame)} cells are missing")


def _compiled(inductor: pd.DataFrame) -> pd.DataFrame:
    """A row for each compilation that the record should have; the row is empty where the record lacks it."""
    keys = ["dtype", "direction", "contender"]
    rows = timed(inductor)
    rows = rows[(rows["mode"] == "compiled") & rows.contender.isin(IMPLEMENTATIONS)].set_index(keys)
    wanted = pd.MultiIndex.from_tuples(product(_dtypes(inductor, DTYPES), DIRECTIONS, IMPLEMENTATIONS), names=keys)
    return rows.reindex(wanted).reset_index()


def _reordering(inductor: pd.DataFrame, column: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """RE compiled in pairs and in halves, by dtype and direction.

    Raises:
        Untold: the column has gaps.
    """
    compiled = _compiled(inductor).set_index(["dtype", "direction"])
    plain, reordered = (compiled[compiled.contender == name] for name in ("RE llama", "RE reference"))
    _need(pd.DataFrame({"plain": plain[column], "reordered": reordered[column]}), "RE compiled in both layouts")
    return plain, reordered


def _times(grid: pd.DataFrame, inductor: pd.DataFrame, mode: str) -> pd.DataFrame:
    """The intervals of the times in a mode: a row for each cell, a column for each implementation.

    The rows are the cells that the records should have: the document's 27 shapes and its large shape, in every recorded
    dtype and in both directions.
    """
    shapes = log()[SHAPE].drop_duplicates().itertuples(index=False, name=None)
    large = tuple(published()["shape"])
    sets = {"27 shapes": (grid, list(shapes), DTYPES[:1]), _named(*large): (inductor, [large], DTYPES)}
    wanted = [
        (name, dtype, direction, *shape)
        for name, (frame, cells, dtypes) in sets.items()
        for dtype, direction, shape in product(_dtypes(frame, dtypes), DIRECTIONS, cells)
    ]
    rows = pd.concat([timed(frame).assign(shapes=name) for name, (frame, *_) in sets.items()])
    rows = rows[(rows["mode"] == mode) & rows.contender.isin(IMPLEMENTATIONS)]
    keys = [*_PART, *SHAPE]
    found = pd.Series(
        [noise.time(row) for _, row in rows.iterrows()],
        pd.MultiIndex.from_frame(rows[[*keys, "contender"]]), dtype=object,
    )  # fmt: skip
    index = pd.MultiIndex.from_tuples(wanted, names=keys)
    return found.unstack("contender").reindex(index=index, columns=list(IMPLEMENTATIONS))


def _ratio(times: pd.DataFrame, over: str, under: str) -> pd.Series:
    """The ratio of two contenders' times in each cell, an `Interval`."""
    return pd.Series([a / b for a, b in zip(times[over], times[under], strict=True)], times.index, dtype=object)


def _means(ratio: pd.Series) -> dict[tuple[str, str, str], Interval]:
    """The mean of the cells of each set of shapes, dtype and direction."""
    return {part: noise.mean(list(rows)) for part, rows in ratio.groupby(_PART, sort=False)}


def _sized(claim: Claim, times: pd.DataFrame, stated: dict[tuple[str, str], float], digits: int = 2) -> Verdict:
    """The verdict on ratios of times, from their means.

    Args:
        times: a table as `_times` makes it.
        stated: numerator and denominator -> the stated mean.
    """
    _need(times[list({name for pair in stated for name in pair})], "times")
    verdicts, words = [], []
    for (over, under), number in stated.items():
        means = _means(_ratio(times, over, under))
        verdicts += [size(x, number, digits=digits) for x in means.values()]
        words.append(f"{over} / {under}: " + "; ".join(f"{x} ({' '.join(part)})" for part, x in means.items()))
    return sizes(verdicts, claim.quantifier).with_text("; ".join(words))


def _elsewhere(times: pd.DataFrame, mode: str) -> str:
    """The remark of FS-11 on other grounds for the choice of one class for both layouts."""
    if times.isna().any(axis=None):
        return ""
    values = times.map(lambda x: x.value)
    means = pd.DataFrame(
        {
            "RE": values["RE reference"] / values["RE llama"],
            "RRE": values["RRE llama"] / values["RRE reference"],
            "both": (values["RE llama"] + values["RE reference"]) / (values["RRE llama"] + values["RRE reference"]),
            "RRE speed": values["RE llama"] / values["RRE llama"],
            "RE speed": values["RRE reference"] / values["RE reference"],
        }
    )
    ranges = means.groupby(_PART, sort=False).mean().apply(value_range, spec=".2f")
    return (
        f"{mode}, the foreign layout takes RE {ranges['RE']} and RRE {ranges['RRE']} times as long as its own; for one "
        f"of each layout RE takes {ranges['both']} of RRE's time"
        + (
            f"; by the measure above RRE runs at {ranges['RRE speed']}, RE at {ranges['RE speed']}"
            if mode == "eager"
            else ""
        )
    )


def _logged_times(document: pd.DataFrame, ratio: str) -> pd.Series:
    """The ratios of the compiled times that the log prints."""
    found = ratios(document[[*CELL, "contender", "ms"]], "ms")
    return found[(found.ratio == ratio) & (found["mode"] == "compiled")].times


def _logged_ratios(summary: pd.DataFrame, ratio: str) -> float:
    """The mean of the ratios that the log prints for compiled calls."""
    return float(summary[(summary["mode"] == "compiled") & (summary.ratio == ratio)].of_ratios.iloc[0])


def times_by_compiling(frame: pd.DataFrame, contender: str, value: str = "median_us") -> float:
    """The mean over the forward cells of the compiled time over the eager time."""
    rows = frame[is_right(frame) & (frame.contender == contender)]
    if "direction" in rows:
        rows = rows[rows.direction == "forward"]
    wide = rows.pivot_table(index=SHAPE, columns="mode", values=value)
    return float((wide.compiled / wide.eager).mean())
