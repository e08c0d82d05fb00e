"""The rules that judge claims FS-01 to FS-13."""

from __future__ import annotations

import pandas as pd

from ropelab.study.drawing import value_range
from ropelab.study.engine.ledger import rule
from ropelab.study.engine.verdict import Verdict, agrees
from ropelab.study.fairseq2 import evidence  # noqa: F401  (registers what a CPU can compute)
from ropelab.study.fairseq2.evidence import IMPLEMENTATIONS, ratios
from ropelab.study.fairseq2.findings import apart, same_code, same_kernels

CLOSE = 0.10
"""A ratio of times measured here confirms the published one within 10 %. All contenders wait for memory, so their
ratios carry over from GPU to GPU as far as their caches compare; the log rounds to 0.1 ms, 10 % of its small cells."""

NOISE = 0.03
"""Medians of three to five rounds repeat to within 3 %: closer times are taken as equal. Where timings of the very same
kernels lie further apart in the record (`findings.same_kernels`), as of tensors of a gigabyte, they say what is equal:
the largest such distance for single cells, their mean for means of cells."""

ROUNDED_UP = 2**21
"""Bytes to which torch's allocator rounds large blocks: peaks that differ by less are the same."""

ONE_ROUNDING = 2.0**-24
"""Of a number near 1 in float32: two tables that are right differ by at most twice that."""

_CELL = ["batch", "seq_len", "encoding_dim", "mode", "direction"]
_NATIVE = 1.12  # FS-05
_ELEMENTS = 4 * 8192 * 8192  # of the shape of FS-06, which is not on the grid


@rule("FS-01", "fairseq2_inductor")
def no_code_for_complex_numbers(inductor: pd.DataFrame) -> Verdict:
    compiled = _compiled(inductor)
    products, formulas = (compiled[compiled.contender.str.startswith(name)] for name in ("RE ", "RRE "))
    if products.empty:
        return Verdict.not_testable("a compilation of RotaryEncoder on a GPU")
    warned, left = products.complex_warning.eq(True), products.fallbacks.fillna("").ne("")
    operators = ", ".join(sorted({name for names in products.fallbacks.dropna() for name in names.split(", ") if name}))
    measured = (
        f"RE: a warning of complex operators in {warned.sum()} of {len(products)} compilations, operators left to "
        f"eager in {left.sum()} ({operators or 'none'}); RRE: {formulas.complex_warning.eq(True).sum()} and "
        f"{formulas.fallbacks.fillna('').ne('').sum()} of {len(formulas)}"
    )
    if not left.any():
        return Verdict.refuted(measured, "no operator is left to eager: Inductor generates code for the product")
    if warned.all() and left.all():
        return Verdict.confirmed(measured)
    return Verdict.corrected(measured, "operators are left to eager, or warned of, only in some compilations")


@rule("FS-02", "fairseq2_grid", "fairseq2_inductor", "fairseq2_log")
def complex_numbers_are_not_slower(grid: pd.DataFrame, inductor: pd.DataFrame, log: pd.DataFrame) -> Verdict:
    """Each class as it was before: RE in pairs against RRE in halves, in every cell, mode and direction."""
    times = _ratio(grid, "native")
    if set(times["mode"]) != {"eager", "compiled"}:
        return Verdict.not_testable("times of RE llama and RRE reference, eager and compiled")
    parts = {key: rows.times for key, rows in times.groupby(["mode", "direction"], sort=False)}
    measured = "RRE takes " + "; ".join(
        f"{value_range(values, '.2f')} times as long ({mode}, {direction})"
        for (mode, direction), values in parts.items()
    )
    same = same_kernels(grid, inductor)
    repeat = {direction: max(NOISE, apart(same, direction)) for direction in times.direction.unique()}
    slower = times[times.times < 1 / (1 + times.direction.map(repeat))]
    by_compiling = times_by_compiling(grid, "RE llama"), times_by_compiling(log, "RE llama", "ms")
    aside = f"compiled RE takes {by_compiling[0]:.2f} times as long as eager RE (in the log {by_compiling[1]:.2f})"
    if slower.empty:
        return Verdict.confirmed(f"{measured}; {aside}")
    where = ", ".join(
        f"{n} of {len(parts[key])} {' '.join(key)} cells (the same kernels differ by up to "
        f"{apart(same, key[1]):.1%} there)"
        for key, n in _counts(slower).items()
    )
    note = f"RE is slower in {where}, by up to {1 / slower.times.min() - 1:.0%}; {aside}"
    if parts["compiled", "forward"].median() < 1 / (1 + repeat["forward"]):
        return Verdict.refuted(measured, note)
    return Verdict.corrected(measured, note)


@rule("FS-03", "fairseq2_equality")
def same_mathematics(equality: pd.DataFrame) -> Verdict:
    """Same formula if integers give the same bits; the same numbers only if the tables agree to a rounding."""
    exact = equality[equality.what != "tables"]
    different = exact[~exact.equal.astype(bool)]
    measured = (
        f"{len(exact) - len(different)} of {len(exact)} comparisons agree in every bit: formulas on integers, layouts "
        "through the permutation, forward and backward"
    )
    if len(different):
        names = sorted(set(different["first"] + " and " + different["second"]))
        return Verdict.refuted(measured, f"different: {', '.join(names)}")
    tables = equality[equality.what == "tables"]
    own = tables[tables.second != "exact"].sort_values("positions")
    if (own.difference <= 2 * ONE_ROUNDING).all():
        return Verdict.confirmed(measured)
    errors = tables[(tables.second == "exact") & (tables.positions == tables.positions.max())].set_index("first")
    worst = own.iloc[-1]
    return Verdict.corrected(
        measured,
        f"their tables are not: up to position {worst.positions:,.0f} those of {worst['first']} and {worst['second']} "
        f"differ by up to {worst.difference:.1e} (from the exact ones by {errors.difference[worst['first']]:.1e} and "
        f"{errors.difference[worst['second']]:.1e}), as both round the angle to float32, and not alike",
    )


@rule("FS-04", "fairseq2_inductor")
def same_memory(inductor: pd.DataFrame) -> Verdict:
    compiled = _compiled(inductor)
    compiled = compiled[compiled.contender.isin(IMPLEMENTATIONS) & compiled.peak_bytes.notna()]
    groups = compiled.groupby(["dtype", "direction"], sort=False)
    if compiled.empty or (groups.contender.nunique() < len(IMPLEMENTATIONS)).any():
        return Verdict.not_testable("the peak memory of all four, compiled")
    spread = groups.peak_bytes.max() - groups.peak_bytes.min()
    same = spread <= ROUNDED_UP
    tensors = compiled.peak_bytes / compiled.result_bytes
    measured = "peak in results' sizes: " + "; ".join(
        f"{dtype} {direction} " + ", ".join(f"{row.contender} {tensors[row.Index]:.2f}" for row in rows.itertuples())
        for (dtype, direction), rows in groups
    )
    if not same.any():
        return Verdict.refuted(measured, f"the peaks differ by {spread.min() / 2**20:,.0f} MiB and more")
    state = compiled.groupby(compiled.contender.str.split().str[0]).state_bytes.max()
    corrections = []
    if not same.all():
        corrections.append("not the same in " + ", ".join(" ".join(key) for key in same.index[~same]))
    if state.nunique() > 1:
        corrections.append(
            "beside the call, RRE keeps tables of "
            f"{state['RRE'] / 2**20:,.0f} MiB where RE keeps {state['RE'] / 2**20:,.0f}"
        )
    return Verdict.corrected(measured, "; ".join(corrections)) if corrections else Verdict.confirmed(measured)


@rule("FS-05", "fairseq2_grid", "fairseq2_inductor", "fairseq2_log", "fairseq2_summary")
def native_speedup(grid: pd.DataFrame, inductor: pd.DataFrame, log: pd.DataFrame, summary: pd.DataFrame) -> Verdict:
    here = _mean(grid, "native")
    if here is None:
        return Verdict.not_testable("times of RE llama and RRE reference, compiled")
    native, column = (_mean(log, ratio) for ratio in ("native", "llama"))
    measured = (
        f"compiled, forward: native RRE takes {here:.2f} times as long as RE, mean of the cells "
        f"({_off(here, _NATIVE)}); log: {native:.3f}"
    )
    if here < 1 / (1 + _repeat_of_means(grid, inductor)):
        return Verdict.refuted(measured, "RE is the slower one here")
    corrections = []
    if not agrees(here, _NATIVE, CLOSE):
        corrections.append(f"{here:.2f} times on this GPU")
    if round(native, 2) != _NATIVE:
        corrections.append(
            f"the log's times give {native:.3f}; its printed {_NATIVE} is the mean of RRE llama over RE llama "
            f"({_logged(summary, 'llama'):.3f} from its ratios, {column:.3f} from its times, which are rounded too "
            "much to tell the two apart)"
        )
    return Verdict.corrected(measured, "; ".join(corrections)) if corrections else Verdict.confirmed(measured)


@rule("FS-06", "fairseq2_inductor", "fairseq2_log")
def two_more_kernels(inductor: pd.DataFrame, log: pd.DataFrame) -> Verdict:
    compiled = _compiled(inductor)
    forward = compiled[(compiled.dtype == "float32") & (compiled.direction == "forward")].set_index("contender")
    if not {"RE llama", "RE reference"} <= set(forward.index):
        return Verdict.not_testable("RE in both layouts, compiled")
    plain, reordered = forward.loc["RE llama"], forward.loc["RE reference"]
    more = int(reordered.kernels - plain.kernels)
    names = ", ".join(name for name in reordered.launched.split("; ") if name.startswith("triton_")) or "none generated"
    measured = (
        f"{more} more kernels ({names}), {reordered.median_us / plain.median_us:.2f} times as long: "
        f"{(reordered.median_us - plain.median_us) / 1000:.2f} ms more at {_shape(reordered)} here"
    )
    if more <= 0:
        return Verdict.refuted(measured, "reordering launches no further kernel")
    cells = log[(log["mode"] == "compiled") & (log.batch * log.seq_len * log.encoding_dim == _ELEMENTS)]
    ms = cells.pivot_table(index=["batch", "seq_len", "encoding_dim"], columns="contender", values="ms")
    logged = ms["RE reference"] - ms["RE llama"]
    corrections = []
    if more != 2:
        corrections.append(f"{more} kernels, not two")
    if ((logged / 4 - 1).abs() > 0.25).any():
        corrections.append(
            f"in the document's own log cells of that size differ by {value_range(logged, '.1f')} ms, not by about 4"
        )
    return Verdict.corrected(measured, "; ".join(corrections)) if corrections else Verdict.confirmed(measured)


@rule("FS-07", "fairseq2_grid", "fairseq2_inductor", "fairseq2_summary")
def halves_by_complex_numbers(grid: pd.DataFrame, inductor: pd.DataFrame, summary: pd.DataFrame) -> Verdict:
    """RRE's time over that of RE in halves is RE's speed."""
    speeds = _mean(grid, "reference"), _logged(summary, "reference")
    return _judge_degradation(0.66, "RE + reference", *speeds, _repeat_of_means(grid, inductor))


@rule("FS-08", "fairseq2_grid", "fairseq2_inductor", "fairseq2_summary")
def pairs_by_cosines(grid: pd.DataFrame, inductor: pd.DataFrame, summary: pd.DataFrame) -> Verdict:
    """RRE's time in pairs over that of RE is what its speed is the reciprocal of: of the mean, here and in the log."""
    times = _mean(grid, "llama"), _logged(summary, "llama")
    speeds = (None if time is None else 1 / time for time in times)
    return _judge_degradation(0.86, "RRE + llama", *speeds, _repeat_of_means(grid, inductor))


@rule("FS-09", "fairseq2_reorderings", "fairseq2_inductor", "fairseq2_grid")
def reorderings_compile_alike(reorderings: pd.DataFrame, inductor: pd.DataFrame, grid: pd.DataFrame) -> Verdict:
    """The same code; or other code that launches as many kernels, moves as many bytes and takes as long: no two times
    further apart than those of the same kernels are."""
    ran = reorderings[reorderings.status == "ok"].sort_values("median_us")
    if len(ran) < 2 or "kernels" not in ran:
        return Verdict.not_testable("at least two ways to reorder that compile, and how many kernels each launches")
    measured = f"{len(ran)} ways: " + "; ".join(
        f"{row.variant} {row.kernels:.0f} kernels, the generated ones {row.generated_bytes / 1e9:.1f} GB, "
        f"{row.median_us / 1000:.2f} ms"
        for row in ran.itertuples()
    )
    if ran.code.nunique() == 1:
        return Verdict.confirmed(f"{measured}; the same code")
    repeat = max(apart(same_kernels(grid, inductor)), (same_code(reorderings, inductor) or 1) - 1)
    times = ran.median_us.max() / ran.median_us.min()
    spread = f"times differ by {times - 1:.0%}, those of the same kernels by up to {repeat:.0%}"
    if ran.kernels.nunique() > 1 or ran.generated_bytes.nunique() > 1:
        return Verdict.refuted(measured, f"not as many kernels or bytes; {spread}")
    if times > 1 + max(NOISE, repeat):
        return Verdict.refuted(
            measured, f"{ran.variant.iloc[-1]} takes {times:.2f} times as long as {ran.variant.iloc[0]}; {spread}"
        )
    return Verdict.corrected(measured, f"not the same code, but as many kernels and bytes; {spread}")


@rule("FS-10", "fairseq2_summary")
def summary_follows(summary: pd.DataFrame) -> Verdict:
    """The log's ratios have two decimals, so their means are right to half of the last."""
    off = (summary.of_ratios - summary.printed).abs()
    measured = "; ".join(
        f"{row.mode} {row.ratio} {row.of_ratios:.3f} (printed {row.printed}, from the rounded times {row.of_times:.2f})"
        for row in summary.itertuples()
    )
    wrong = summary[off > 0.01]
    if len(wrong):
        return Verdict.refuted(measured, f"{len(wrong)} of {len(summary)} do not follow")
    return Verdict.confirmed(measured)


@rule("FS-11", "fairseq2_grid", "fairseq2_inductor")
def cosines_as_baseline(grid: pd.DataFrame, inductor: pd.DataFrame) -> Verdict:
    """What each class loses by the foreign layout: its time there over that at home, mean of the cells. Beside it what
    a choice for both layouts depends on besides: the time for one of each."""
    times = _ok(grid).pivot_table(index=_CELL, columns="contender", values="median_us")
    if not set(IMPLEMENTATIONS) <= set(times):
        return Verdict.not_testable("times of all four implementations")
    times = times.dropna(subset=list(IMPLEMENTATIONS))
    parts = ["mode", "direction"]
    re = (times["RE reference"] / times["RE llama"]).groupby(parts).mean()
    rre = (times["RRE llama"] / times["RRE reference"]).groupby(parts).mean()
    for_both = (times["RE llama"] + times["RE reference"]) / (times["RRE llama"] + times["RRE reference"])
    for_both = for_both.groupby(parts).mean()
    measured = "in the foreign layout RE and RRE take " + "; ".join(
        f"{re[part]:.2f} and {rre[part]:.2f} times as long as at home ({', '.join(part)})" for part in re.index
    )
    equal = 1 + _repeat_of_means(grid, inductor)
    less = rre * equal < re
    if not less.get(("compiled", "forward"), False):
        return Verdict.refuted(measured, "compiled, where it is recommended, RRE loses no less than RE")
    corrections = []
    if not less.all():
        corrections.append(f"not in {_parts(less.index[~less])}")
    if len(faster := for_both[for_both * equal < 1]):
        corrections.append(
            f"yet for one of each layout RE takes {value_range(faster, '.2f')} of RRE's time ({_parts(faster.index)})"
        )
    return Verdict.corrected(measured, "; ".join(corrections)) if corrections else Verdict.confirmed(measured)


@rule("FS-12", "fairseq2_defaults")
def defaults_are_kept(defaults: pd.DataFrame) -> Verdict:
    broken = defaults[~defaults.equal.astype(bool)]
    measured = (
        f"our encoders, written after the proposal, impl left out: {len(defaults) - len(broken)} of {len(defaults)} "
        "comparisons with the released ones agree (results in bits, buffers, checkpoint, signature)"
    )
    if broken.empty:
        return Verdict.confirmed(measured).of_model("of encoders written anew; the pull request's own were not run")
    cases = "; ".join(f"{row.encoder}: {row.case}" for row in broken.itertuples())
    if len(broken) == len(defaults):
        return Verdict.refuted(measured, "nothing is as it was")
    return Verdict.corrected(measured, f"broken: {cases}")


@rule("FS-13", "fairseq2_session")
def tests_are_missing(session: pd.DataFrame) -> Verdict:
    items = session.set_index("kind")["items"]
    measured = f"of {items.sum()} items of the session {items['timings']} time, {items['summary']} sums up"
    if items["anything else"] == 0:
        return Verdict.corrected(
            f"{measured}, none compares results",
            "shown for the session whose log the document gives; the pull request's list of files was not read",
        )
    return Verdict.refuted(measured, f"{items['anything else']} may compare results")


# ---------------------------------------------------------------------------------------------------- helpers


def _ok(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[(frame.status == "ok") & frame.median_us.notna()] if "status" in frame else frame


def _compiled(frame: pd.DataFrame) -> pd.DataFrame:
    return _ok(frame)[_ok(frame)["mode"] == "compiled"]


def _ratio(frame: pd.DataFrame, ratio: str) -> pd.DataFrame:
    """One of ``evidence.RATIOS`` in each cell of the grid or of the log."""
    value = "ms" if "ms" in frame else "median_us"
    columns = [name for name in _CELL if name in frame]
    found = ratios(_ok(frame)[[*columns, "contender", value]], value)
    return found[found.ratio == ratio]


def _mean(frame: pd.DataFrame, ratio: str) -> float | None:
    """Mean over the compiled forward cells, as the document takes it; None without any."""
    found = _ratio(frame, ratio)
    found = found[found["mode"] == "compiled"]
    if "direction" in found:
        found = found[found.direction == "forward"]
    return None if found.empty else float(found.times.mean())


def _repeat_of_means(grid: pd.DataFrame, inductor: pd.DataFrame) -> float:
    """How far apart two means of cells can be without meaning anything: see ``NOISE``."""
    return max(NOISE, apart(same_kernels(grid, inductor), how="mean"))


def _off(here: float, stated: float) -> str:
    """``"9.1% below the stated 0.86, 10% are allowed"``."""
    side = "below" if here < stated else "above"
    return f"{abs(here / stated - 1):.1%} {side} the stated {stated}, {CLOSE:.0%} are allowed"


def _logged(summary: pd.DataFrame, ratio: str) -> float:
    """The mean of the log's own ratios, compiled."""
    return float(summary[(summary["mode"] == "compiled") & (summary.ratio == ratio)].of_ratios.iloc[0])


def times_by_compiling(frame: pd.DataFrame, contender: str, value: str = "median_us") -> float:
    """Mean over the forward cells of the time compiled over that of eager."""
    rows = _ok(frame)[_ok(frame).contender == contender]
    if "direction" in rows:
        rows = rows[rows.direction == "forward"]
    wide = rows.pivot_table(index=["batch", "seq_len", "encoding_dim"], columns="mode", values=value)
    return float((wide.compiled / wide.eager).mean())


def _judge_degradation(stated: float, what: str, here: float | None, logged: float, repeat: float) -> Verdict:
    """Speed of one class in the other's layout over that of the class at home; below 1 it is the slower one."""
    if here is None:
        return Verdict.not_testable(f"times of {what} and of the class whose layout that is, compiled")
    measured = (
        f"{what}: {here:.2f} of the speed, from the mean of the compiled forward cells ({_off(here, stated)}); "
        f"log: {logged:.2f}"
    )
    if here * (1 + repeat) >= 1:
        return Verdict.refuted(measured, "not slower on this GPU and torch")
    corrections = []
    if not agrees(here, stated, CLOSE):
        corrections.append(f"{here:.2f} on this GPU")
    if round(abs(logged - stated), 2) > 0.01:  # a unit of the last digit printed
        corrections.append(f"the mean of the document's own log is {logged:.2f}")
    return Verdict.corrected(measured, "; ".join(corrections)) if corrections else Verdict.confirmed(measured)


def _parts(index: pd.Index) -> str:
    return ", ".join(" ".join(part) for part in index)


def _counts(rows: pd.DataFrame) -> dict[tuple[str, str], int]:
    return rows.groupby(["mode", "direction"], sort=False).size().to_dict()


def _shape(row: pd.Series) -> str:
    return f"B{row.batch} S{row.seq_len} E{row.encoding_dim}"
