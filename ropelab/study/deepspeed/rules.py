"""The rules that judge claims DS-01 to DS-12."""

from __future__ import annotations

import pandas as pd

from ropelab.study.deepspeed import evidence  # noqa: F401  (registers what a CPU can compute)
from ropelab.study.engine.ledger import rule
from ropelab.study.engine.verdict import Verdict, agrees

EAGER, COMPILED, TORCHEMBED = "eager", "compile", "torchembed"
"""Contenders of the record deepspeed_table: the document's three columns."""

CLOSE = 0.10
"""A ratio measured on another GPU confirms the published one to 10 %, either way: GB10 and the GPU here differ in cache
and in bytes per second per SM, and the document rounds its milliseconds to 1 to 3 %."""

ROUNDING = {"float32": 2.0**-24, "bfloat16": 2.0**-9, "float16": 2.0**-12}
"""Half the distance between neighbouring numbers at 1, divided by 1: the largest relative error of one
rounding."""


@rule("DS-01", "deepspeed_correctness")
def forward_is_right(correctness: pd.DataFrame) -> Verdict:
    """Right within twice the plain formula's own error plus one rounding to the dtype of the result."""
    whole = correctness[correctness.table == "whole"]
    ran = whole[whole.outcome == "ran"]
    allowed = 2 * ran.formula_error + ran.result_dtype.map(ROUNDING)
    worst = ran.loc[(ran.forward_error / allowed).idxmax()]
    largest = ran.groupby("result_dtype", sort=False).forward_error.max()
    measured = f"{len(ran)} cases, S = {ran.seq_len.min()} to {ran.seq_len.max()}: largest relative error " + ", ".join(
        f"{error:.1e} in {dtype}" for dtype, error in largest.items()
    )
    if (ran.forward_error > allowed).any():
        return Verdict.refuted(
            measured,
            f"version {worst.version}, S = {worst.seq_len}, {worst['dtype']}: error "
            f"{worst.forward_error:.1e}, the formula's {worst.formula_error:.1e}",
        )
    limits = []
    other = ran[ran.result_dtype != ran.formula_dtype]
    if not other.empty:
        pairs = sorted(set(zip(other.dtype, other.table_dtype, other.formula_dtype, other.result_dtype, strict=True)))
        limits.append(
            "the dtype of the result differs where the tables are wider: "
            + "; ".join(
                f"{dtype} with {table} tables gives {got}, the formula {want}" for dtype, table, want, got in pairs
            )
        )
    failed = whole[whole.outcome != "ran"]
    if not failed.empty:
        limits.append(f"no launch at S = {failed.seq_len.min()} and above ({failed.outcome.iloc[0]})")
    return Verdict.corrected(measured, "; ".join(limits)) if limits else Verdict.confirmed(measured)


@rule("DS-02", "deepspeed_dispatch")
def reshaping_is_transparent(dispatch: pd.DataFrame) -> Verdict:
    """Transparent only if every caller for whom the formula is defined gets the formula's result."""
    first = dispatch[(dispatch.version == "first") & (dispatch.expected == "a result")]
    wrong = first[first.outcome != "equal"]
    measured = f"{len(first) - len(wrong)} of {len(first)} shapes get the formula's result (our model of that version)"
    if wrong.empty:
        return Verdict.confirmed(measured)
    worst = wrong.loc[wrong.error.idxmax() if wrong.error.notna().any() else wrong.index[0]]
    beyond = int((wrong.outcome == "reads past the tables").sum())
    return Verdict.refuted(
        measured,
        f"axis -2 is not the sequence for {len(wrong)}, the worst {worst.caller} "
        f"({_outcome(worst)}); {beyond} read past the tables",
    )


@rule("DS-03", "deepspeed_packages")
def kernel_ships_since_0_3(packages: pd.DataFrame) -> Verdict:
    measured = ", ".join(
        f"{row.version} {'has it' if row.has_triton_module else 'has not'}" for row in packages.itertuples()
    )
    ships = dict(zip(packages.version.astype(str), packages.has_triton_module.astype(bool), strict=True))
    if not {"0.2.4", "0.3.0"} <= ships.keys():
        return Verdict.not_testable("the wheels of torchembed 0.2.4 and 0.3.0")
    as_claimed = {version: has == (version != "0.2.4") for version, has in ships.items()}
    if all(as_claimed.values()):
        return Verdict.confirmed(measured)
    return Verdict.refuted(measured, "otherwise in " + ", ".join(v for v, holds in as_claimed.items() if not holds))


@rule("DS-04", "deepspeed_tests")
def tests_broadcast(tests: pd.DataFrame) -> Verdict:
    first, fixed = (tests[tests.version == version] for version in ("first", "fixed"))
    failing, passing = int((~first.broadcasts).sum()), int(fixed.broadcasts.sum())
    measured = f"{failing} of {len(first)} failed to broadcast, {passing} of {len(fixed)} do after the fix"
    if (failing, len(first), passing, len(fixed)) != (24, 35, 35, 35):
        return Verdict.refuted(measured, "the counts differ from the published ones")
    reaching = int(fixed.reaches_kernel.sum())
    if reaching < passing:
        later = tests[(tests.version == "later") & tests.reaches_kernel]
        added = f"; {len(later)} that do came later ({later['read'].iloc[0]})" if len(later) else ""
        return Verdict.corrected(
            measured,
            f"{reaching or 'none'} of the {passing} {'reaches' if reaching < 2 else 'reach'} the fused kernel: the "
            f"tensors are on the CPU, where the gate is shut{added}",
        )
    return Verdict.confirmed(measured)


@rule("DS-05", "deepspeed_dispatch")
def axis_bug_is_real(dispatch: pd.DataFrame) -> Verdict:
    in_tree = dispatch[dispatch.in_tree & (dispatch.tokens > 1)]
    first, merged = (in_tree[in_tree.version == version] for version in ("first", "merged"))
    wrong, still = first[first.outcome != "equal"], merged[merged.outcome != "equal"]
    measured = (
        f"first version (our model) wrong for {len(wrong)} of {len(first)} shapes of in-tree callers "
        f"({', '.join(_outcome(row) for row in wrong.itertuples())}); merged: {len(still)} wrong"
    )
    if wrong.empty:
        return Verdict.refuted(measured, "the first version gives the formula's result")
    if not still.empty:
        return Verdict.corrected(measured, f"not fixed for {'; '.join(still.caller)}")
    return Verdict.confirmed(measured).of_model(
        "the first version is modelled from its review: that it takes the heads for the sequence is how the model was "
        "written; which callers that hits is what was found"
    )


@rule("DS-06", "deepspeed_dispatch")
def mismatches_fall_back(dispatch: pd.DataFrame) -> Verdict:
    merged = dispatch[dispatch.version == "merged"]
    opened = merged[merged.gate_open]
    doubtful = opened[opened.outcome != "equal"]
    in_tree = merged[merged.in_tree & (merged.tokens > 1)]
    measured = f"gate opens for {len(opened)} of {len(merged)} shapes, {len(doubtful)} of them wrongly"
    if (in_tree.outcome != "equal").any():
        return Verdict.refuted(measured, "wrong for " + "; ".join(in_tree[in_tree.outcome != "equal"].caller))
    corrections = [f"opens for {row.caller}: {_outcome(row)}" for row in doubtful.itertuples()]
    if not in_tree.gate_open.any():
        corrections.append(
            "never opens for the in-tree callers beyond one token, whose tables lead with an axis "
            "of size 1: they fall back always"
        )
    return Verdict.corrected(measured, "; ".join(corrections)) if corrections else Verdict.confirmed(measured)


@rule("DS-07", "deepspeed_published", "deepspeed_table")
def faster_than_eager(published: pd.DataFrame, table: pd.DataFrame) -> Verdict:
    return _judge_speedup(published.set_index("seq_len").stated_speedup, table, EAGER)


@rule("DS-08", "deepspeed_published", "deepspeed_table")
def faster_than_compile(published: pd.DataFrame, table: pd.DataFrame) -> Verdict:
    return _judge_speedup(pd.Series(2.0, index=published.seq_len), table, COMPILED)


@rule("DS-09", "deepspeed_inductor")
def compile_keeps_intermediates(inductor: pd.DataFrame) -> Verdict:
    extra = inductor.buffers - inductor.result_buffers
    forward = inductor[inductor.direction == "forward"]
    measured = (
        f"Inductor generates {_range(inductor.kernels)} kernel(s) with {_range(extra)} buffer(s) besides the "
        f"result; forward at {_range(forward.fraction_of_copy, '.2f')} of the copy"
    )
    if (extra > 0).all():
        return Verdict.confirmed(measured)
    if (extra == 0).all() and (inductor.kernels == 1).all():
        return Verdict.refuted(
            measured,
            "one kernel and no intermediate: the rest of the gap to the copy has another cause",
        )
    where = inductor[(extra > 0) | (inductor.kernels > 1)]
    return Verdict.corrected(
        measured, "only in " + ", ".join(f"{row.dtype} {row.direction}" for row in where.itertuples())
    )


@rule("DS-10", "deepspeed_launches")
def one_read_one_write(launches: pd.DataFrame) -> Verdict:
    raw, api = launches[launches.path == "raw kernel"], launches[launches.path == "DeepSpeed API"]
    measured = "; ".join(
        f"{row.path} ({row.input}): {row.launches} launch(es), "
        f"{row.extra_bytes / row.tensor_bytes:.1f} tensors of extra memory, "
        f"{row.fraction_of_copy:.2f} of the copy"
        for row in pd.concat((raw, api)).itertuples()
    )
    clean = (launches.launches == 1) & (launches.extra_bytes == 0)
    if not clean[raw.index].all():
        return Verdict.refuted(measured, "the raw kernel itself takes more than one launch or extra memory")
    if clean[api.index].all():
        return Verdict.confirmed(measured)
    return Verdict.corrected(
        measured,
        "true of the raw kernel; DeepSpeed's function hands it q as q and as k, throws "
        f"one result away and copies, so it takes {_range(api.launches)} launches and "
        f"{_range(api.extra_bytes / api.tensor_bytes, '.1f')} tensors of extra memory",
    )


@rule("DS-11", "deepspeed_fallback")
def works_without_torchembed(fallback: pd.DataFrame) -> Verdict:
    absent = fallback[fallback.case == "torchembed is not installed"]
    measured = "; ".join(f"{row.case}: {_outcome(row)}" for row in fallback.itertuples())
    if (absent.outcome != "equal").any():
        return Verdict.refuted(measured, "the result without torchembed is not the formula's")
    others = fallback[fallback.outcome != "equal"]
    if others.empty:
        return Verdict.confirmed(measured)
    return Verdict.corrected(measured, "no fallback, an error instead, where " + " or where ".join(others.case))


@rule("DS-12", "deepspeed_correctness", "wrong_backward")
def backward_repeats_forward(correctness: pd.DataFrame, mutant: pd.DataFrame) -> Verdict:
    """Confirmed for the version under review if its error is that of the closed form (to 1 %) at every S > 1.

    fp32 only: there the rounding of the kernel is far below the effect. The mutant must follow the closed
    form too.
    """
    fp32 = correctness[
        (correctness.dtype == "float32") & (correctness.table == "whole") & (correctness.outcome == "ran")
    ]
    reviewed = fp32[(fp32.version.astype(str) == "0.3.0") & (fp32.seq_len > 1)]
    if reviewed.empty:
        return Verdict.not_testable("torchembed 0.3.0, the version under review")
    by_length = reviewed.sort_values("seq_len")
    at = by_length[by_length.seq_len.isin((8, 128))] if by_length.seq_len.isin((8, 128)).any() else by_length
    measured = "0.3.0: " + ", ".join(
        f"gradient off by {row.gradient_error:.3f} at S = {row.seq_len}" for row in at.itertuples()
    )
    measured += f" with the norm right to {digits((reviewed.norm_ratio - 1).abs().max())}"
    follows = all(
        ((frame.gradient_error / frame.wrong_backward_error - 1).abs() < 0.01).all()
        for frame in (reviewed, mutant[mutant.seq_len > 1])
    )
    if not follows:
        return Verdict.refuted(measured, "the error is not that of a repeated forward")
    notes = []
    later = fp32[fp32.version.astype(str) != "0.3.0"]
    within = later.gradient_error <= 2 * later.formula_gradient_error + ROUNDING["float32"]
    right = within.groupby(later.version.astype(str)).all()
    if right.any():
        notes.append(f"no longer so in {', '.join(right.index[right])}")
    if not right.all():
        notes.append(f"wrong still in {', '.join(right.index[~right])}")
    sliced = correctness[
        (correctness.table == "column slice")
        & (correctness.version.astype(str).isin(right.index))
        & (correctness.gradient_error > 1e-3)
    ]
    if not sliced.empty:
        notes.append(
            f"but where the tables are columns of wider ones the gradient of {', '.join(sliced.version)} is "
            f"off by {_range(sliced.gradient_error, '.2f')}: the negated sine has another row stride"
        )
    return Verdict.corrected(measured, "; ".join(notes)) if notes else Verdict.confirmed(measured)


def digits(error: float) -> str:
    """How far a ratio that should be 1 is from it; records keep six digits."""
    return f"{error:.0e}" if error >= 1e-6 else "6 digits"


def speedups(table: pd.DataFrame, baseline: str, contender: str = TORCHEMBED) -> pd.DataFrame:
    """Forward speed-ups over a baseline, where both ran right: columns seq_len, dtype, speedup."""
    forward = table[(table.direction == "forward") & (table.status == "ok")]
    times = forward.pivot_table(index=["seq_len", "dtype"], columns="contender", values="median_us")
    if not {baseline, contender} <= set(times.columns):
        return pd.DataFrame(columns=["seq_len", "dtype", "speedup"])
    return (times[baseline] / times[contender]).rename("speedup").dropna().reset_index()


def _judge_speedup(claimed: pd.Series, table: pd.DataFrame, baseline: str) -> Verdict:
    """Judge a claimed speed-up of the fused kernel over a baseline, indexed by sequence length.

    Confirmed if the measured one is within CLOSE of it at every S and in every dtype measured (the document states
    neither dtype nor direction; forward is taken). Refuted if the kernel is not faster in
    some cell. In between the direction holds and the size is corrected.
    """
    cells = speedups(table, baseline)
    cells = cells[cells.seq_len.isin(claimed.index)]
    if set(cells.seq_len) != set(claimed.index):
        lengths = ", ".join(map(str, claimed.index))
        return Verdict.not_testable(f"times of {TORCHEMBED} and of {baseline} at S = {lengths}")
    measured = "; ".join(
        f"{dtype} {', '.join(f'{value:.2f}x' for value in rows.sort_values('seq_len').speedup)}"
        for dtype, rows in cells.groupby("dtype")
    )
    forward = table[(table.direction == "forward") & (table.status == "ok")].groupby("contender").fraction_of_copy
    roofs = " and ".join(f"{name} at {_range(forward.get_group(name), '.2f')}" for name in (TORCHEMBED, baseline))
    here = f"of the copy's speed {roofs}"
    slower = cells[cells.speedup <= 1]
    if len(slower):
        return Verdict.refuted(
            measured,
            f"not faster in {len(slower)} of {len(cells)} cells: the win does not carry over from the GB10 "
            f"to this GPU; {here}",
        )
    if not agrees(cells.speedup, cells.seq_len.map(claimed), CLOSE).all():
        return Verdict.corrected(measured, f"{_range(cells.speedup, '.2f')} times as fast on this GPU; {here}")
    return Verdict.confirmed(f"{measured}; {here}")


def _range(values: pd.Series, spec: str = "") -> str:
    low, high = format(values.min(), spec), format(values.max(), spec)
    return low if low == high else f"{low} to {high}"


def _outcome(row) -> str:
    return f"off by {row.error:.2f}" if row.outcome == "different" else row.outcome
