"""The rules that judge claims DS-01 to DS-17."""

from __future__ import annotations

import itertools
import re
from collections.abc import Container, Iterable

import pandas as pd

from ropelab.bench.rows import is_right
from ropelab.bench.workloads import DIRECTIONS
from ropelab.study.documents.deepspeed import callers, evidence, findings, measure
from ropelab.study.documents.deepspeed.dispatch import rounding_bound
from ropelab.study.documents.deepspeed.peers import REVIEWED
from ropelab.study.engine import noise
from ropelab.study.engine.claims import Claim
from ropelab.study.engine.judging import counted, needed, size, sizes
from ropelab.study.engine.ledger import rule
from ropelab.study.engine.noise import Interval
from ropelab.study.engine.sources import facts
from ropelab.study.engine.verdict import Basis, Untold, Verdict, fact
from ropelab.study.engine.words import followed, listed, value_range

EAGER, COMPILED, TORCHEMBED, MODULE = "eager", "compile", "torchembed", "torchembed API"
"""Contenders of the record deepspeed_table: the document's three columns, and torchembed's module."""

DTYPES = ("float32", "bfloat16")
"""The document states neither dtype nor direction, so every measured dtype and direction is a cell."""

PRINTED = 5e-6
"""The largest relative error of a number that a record keeps to six significant digits."""


@rule("DS-01", "deepspeed_correctness", basis=Basis.PACKAGE)
def forward_is_right(claim: Claim, correctness: pd.DataFrame) -> Verdict:
    """A cell is a version, a pair of dtypes and a length of the tests.

    The result must have the dtype and the numbers of the formula's result.
    """
    whole = correctness[correctness.table == "whole"]
    tested = facts("test", "deepspeed")[0]["parameters"]
    lengths, untried = tested["tokens"], set(tested["head_dim"]) - {measure.HEAD_DIM}
    _need_errors(claim, whole, lengths, {REVIEWED, *whole.version.astype(str)})
    right = whole.forward_error <= whole.result_dtype.map(rounding_bound, na_action="ignore") * (1 + PRINTED)
    same_dtype = whole.result_dtype == whole.formula_dtype
    stated, ran = whole.seq_len.isin(lengths), whole.outcome == "ran"
    largest = whole[ran].groupby("result_dtype", sort=False).forward_error.max()
    worst = ", ".join(f"{error:.1e} in {dtype}" for dtype, error in largest.items())
    other = whole[ran & ~same_dtype][["dtype", "table_dtype", "result_dtype", "formula_dtype"]].drop_duplicates()
    dtypes = "; ".join("{} with {} tables gives {}, the formula {}".format(*row) for row in other.values)
    failed = whole[~ran]
    return counted(list((right & same_dtype)[stated]), claim.quantifier).with_text(
        f"numbers right in {right[stated].sum()}, dtype in {same_dtype[stated].sum()} of {stated.sum()} cells; "
        f"{ran.sum()} cases, S = {whole.seq_len[ran].min()} to {whole.seq_len[ran].max()}: largest relative error "
        f"{worst}",
        dtypes and f"the dtype of the result differs where the tables are wider: {dtypes}",
        followed("beyond rounding at S = ", whole.seq_len[ran & ~right]),
        "" if failed.empty else f"no launch at S = {failed.seq_len.min()} and above ({failed.outcome.iloc[0]})",
        followed("not measured: head sizes ", sorted(untried)),
    )


@rule("DS-02", "deepspeed_dispatch", basis=Basis.CODE)
def reshaping_is_transparent(claim: Claim, dispatch: pd.DataFrame) -> Verdict:
    """Every shape for which the formula is defined must get the formula's result."""
    _need_callers(claim, dispatch, "first")
    first = dispatch[(dispatch.version == "first") & (dispatch.expected == "a result")]
    equal = first.outcome == "equal"
    beyond = first.outcome == evidence.PAST_THE_TABLES
    return counted(list(equal), claim.quantifier).with_text(
        f"{equal.sum()} of {len(first)} shapes get the formula's result ({', '.join(first.caller[equal]) or 'none'}); "
        f"{beyond.sum()} shapes read past the tables, {(~equal & ~beyond).sum()} more come out wrong",
        "the kernel uses the first two strides of the tables as the strides of rows and columns, and the helper passes "
        "tables with more axes" if beyond.any() else "",
        _code(first),
    )  # fmt: skip


@rule("DS-03", "deepspeed_packages", basis=Basis.SOURCE)
def kernel_ships_since_0_3(claim: Claim, packages: pd.DataFrame) -> Verdict:
    ships, (without, first) = _ships(packages), claim.numbers
    if not {without, first} <= ships.keys():
        raise Untold(claim.needs)
    before = [has for version, has in ships.items() if _order(version) < _order(first)]
    return fact(ships[first] and not any(before)).with_text(_packages(ships))


@rule("DS-04", "deepspeed_tests", basis=Basis.SOURCE)
def tests_broadcast(claim: Claim, tests: pd.DataFrame) -> Verdict:
    first, fixed = (needed(tests[tests.version == version], claim.needs) for version in ("first", "fixed"))
    failing, cases, passing = map(int, claim.numbers)
    found = ((~first.broadcasts).sum(), len(first), fixed.passes.sum(), len(fixed))
    later = tests[(tests.version == "later") & tests.reaches_kernel]
    added = f"; {len(later)} cases that do came later ({later['read'].iloc[0]})" if len(later) else ""
    reaching = fixed.reaches_kernel.sum()
    return fact(found == (failing, cases, passing, cases)).with_text(
        f"{found[0]} of {found[1]} do not broadcast, {found[2]} of {found[3]} pass after the fix",
        "" if reaching == len(fixed) else f"{reaching or 'none'} of the {len(fixed)} reach the fused kernel: the "
        f"tensors are on the CPU, where the gate is shut{added}",
    )  # fmt: skip


@rule("DS-05", "deepspeed_dispatch", basis=Basis.CODE)
def axis_bug_is_real(claim: Claim, dispatch: pd.DataFrame) -> Verdict:
    """A cell is the shape of a caller in DeepSpeed's tree, beyond one token.

    At first the kernel must take the heads for the sequence and the result must be wrong; when merged it must be right.
    """
    _need_callers(claim, dispatch, "first", "merged")
    in_tree = dispatch[dispatch.in_tree & (dispatch.tokens > 1)].set_index("caller")
    first, merged = (in_tree[in_tree.version == version] for version in ("first", "merged"))
    along_heads, wrong = first.kernel_tokens == first.heads, first.outcome != "equal"
    still = merged.outcome != "equal"
    return counted(list(along_heads & wrong & ~still), claim.quantifier).with_text(
        f"in the first version the kernel rotates along the heads for {along_heads.sum()} of {len(first)} shapes of "
        f"in-tree callers, {wrong.sum()} come out wrong ({listed(first.outcome[wrong])}); in the merged version "
        f"{still.sum()} come out wrong",
        _code(in_tree[in_tree.version.isin(("first", "merged"))]),
    )


@rule("DS-06", "deepspeed_dispatch", basis=Basis.PACKAGE)
def mismatches_fall_back(claim: Claim, dispatch: pd.DataFrame) -> Verdict:
    """A cell is a shape: with the gate open or shut, the result must be the formula's."""
    _need_callers(claim, dispatch, "merged", "ropelab")
    merged = dispatch[dispatch.version == "merged"]
    right, opened = merged.outcome == "equal", merged[merged.gate_open]
    wrong = "; ".join(f"{row.caller}: {_outcome(row)}" for row in merged[~right].itertuples())
    return counted(list(right), claim.quantifier).with_text(
        f"gate opens for {len(opened)} of {len(merged)} shapes, {(opened.outcome != 'equal').sum()} of them wrongly"
        + (f" ({wrong})" if wrong else ""),
        _code(merged),
        findings.gate_of_callers(dispatch),
    )


@rule("DS-07", "deepspeed_published", "deepspeed_table", basis=Basis.PACKAGE)
def faster_than_eager(claim: Claim, published: pd.DataFrame, table: pd.DataFrame) -> Verdict:
    return _judge_speedup(claim, published.set_index("seq_len").stated_speedup, 1, table, EAGER, TORCHEMBED)


@rule("DS-08", "deepspeed_published", "deepspeed_table", basis=Basis.PACKAGE)
def faster_than_compile(claim: Claim, published: pd.DataFrame, table: pd.DataFrame) -> Verdict:
    stated = pd.Series(float(*claim.numbers), index=published.seq_len)
    found = _judge_speedup(claim, stated, 0, table, COMPILED, TORCHEMBED)
    return found.with_text(found.measured, f"the document's own times give {value_range(published.over_compile)}")


@rule("DS-09", "deepspeed_inductor", basis=Basis.PACKAGE)
def compile_keeps_intermediates(claim: Claim, inductor: pd.DataFrame) -> Verdict:
    _need(inductor, claim.needs, dtype=DTYPES, direction=DIRECTIONS)
    extra = inductor.buffers - inductor.result_buffers
    forward = inductor[inductor.direction == "forward"]
    return counted(list(extra > 0), claim.quantifier).with_text(
        f"Inductor generates {value_range(inductor.kernels, '')} kernel(s) with {value_range(extra, '')} buffer(s) "
        f"besides the result; forward at {value_range(forward.fraction_of_copy)} of the copy",
        f"torch {listed(inductor.torch)} compiled the formula in our words",
        "" if extra.any() else "the rest of the gap to the copy has another cause",
    )


@rule("DS-10", "deepspeed_launches", "deepspeed_kernel", basis=Basis.PACKAGE)
def one_read_one_write(claim: Claim, launches: pd.DataFrame, kernel: pd.DataFrame) -> Verdict:
    """The claim is about the kernel: one launch without extra memory, and a source that repeats no access."""
    raw = needed(launches[launches.path == "raw kernel"], claim.needs)
    api = launches[launches.path == "DeepSpeed API"]
    runs = list((raw.launches == 1) & (raw.extra_bytes == 0))
    once = list((kernel.repeated == 0) & (kernel.loops == 0))
    shown = "; ".join(
        f"{row.path} ({row.input}): {row.launches} launch(es), {row.extra_bytes / row.tensor_bytes:.1f} tensors of "
        f"extra memory, {row.fraction_of_copy:.2f} of the copy"
        for row in pd.concat((raw, api)).itertuples()
    )
    return counted(runs + once, claim.quantifier).with_text(
        f"{shown}; source of {listed(kernel.version)}: {value_range(kernel.loads, '')} loads of x and "
        f"{value_range(kernel.stores, '')} stores, {value_range(kernel.repeated, '')} repeated, "
        f"{value_range(kernel.loops, '')} loops",
        "" if api.empty else "DeepSpeed's function passes q as q and as k, discards one result and "
        f"copies, so it takes {value_range(api.launches, '')} launches and "
        f"{value_range(api.extra_bytes / api.tensor_bytes, '.1f')} tensors of extra memory",
    )  # fmt: skip


@rule("DS-11", "deepspeed_fallback", basis=Basis.PACKAGE)
def works_without_torchembed(claim: Claim, fallback: pd.DataFrame) -> Verdict:
    absent, others = (fallback[(fallback.case == evidence.ABSENT) == here] for here in (True, False))
    errors = others[others.outcome != "equal"]
    return counted(list((absent.outcome == "equal") & ~absent.available), claim.quantifier, claim.needs).with_text(
        "; ".join(f"{row.case}: {_outcome(row)}" for row in fallback.itertuples()),
        "" if errors.empty else "no fallback, an error instead, where " + " or where ".join(errors.case),
    )  # fmt: skip


@rule("DS-12", "deepspeed_correctness", "wrong_backward", basis=Basis.PACKAGE)
def backward_repeats_forward(claim: Claim, correctness: pd.DataFrame, mutant: pd.DataFrame) -> Verdict:
    """A cell is a dtype and a length beyond 1: error and norm must be a repeated forward's, up to rounding.

    A repeated forward R g has the closed form's distance from the gradient, and the gradient's norm. Rounding moves
    both by at most `rounding_bound`. Our own backward that repeats the forward shows that the closed form is right.
    """
    whole = correctness[correctness.table == "whole"].astype({"version": str})
    longer = whole[whole.seq_len > 1]
    reviewed = longer[longer.version == REVIEWED]
    _need_errors(claim, reviewed, [n for n in measure.SEQ_LENS[_device(whole)] if n > 1], {REVIEWED})
    if not all(_repeats_forward(mutant[mutant.seq_len > 1].assign(dtype="float32"))):
        raise Untold("our own backward that repeats the forward, with the errors of the closed form")
    ran = reviewed[reviewed.outcome == "ran"]
    at = ran[(ran.dtype == "float32") & ran.seq_len.isin((8, 128))].sort_values("seq_len")
    shown = ", ".join(f"gradient off by {row.gradient_error:.3f} at S = {row.seq_len}" for row in at.itertuples())
    later = longer[(longer.version != REVIEWED) & (longer.outcome == "ran")]
    bounds = later.dtype.map(rounding_bound).astype(float) * (1 + PRINTED)
    right = (later.gradient_error <= bounds).groupby(later.version).all()
    sliced = correctness[(correctness.table == "column slice") & correctness.version.astype(str).isin(right.index)]
    sliced = sliced[sliced.gradient_error > sliced.dtype.map(rounding_bound).astype(float)]
    return counted(_repeats_forward(ran), claim.quantifier).with_text(
        f"{REVIEWED}: {shown} in float32, with the norm right to {digits((ran.norm_ratio - 1).abs().max())} in "
        f"{len(ran)} cases of {listed(ran.dtype)}",
        followed("no longer so in ", right.index[right]), followed("wrong still in ", right.index[~right]),
        "" if sliced.empty else "where the tables are columns of wider ones the gradient of "
        f"{listed(sliced.version)} is off by {value_range(sliced.gradient_error)}: the negated sine has another row "
        "stride",
    )  # fmt: skip


@rule("DS-13", "deepspeed_extra", "deepspeed_packages", basis=Basis.SOURCE)
def extra_brings_the_kernel(claim: Claim, extra: pd.DataFrame, packages: pd.DataFrame) -> Verdict:
    """A cell is a version that the document's bound or the release's bound admits: the version must have the kernel."""
    ships, (stated,) = _ships(packages), claim.numbers
    required = extra.iloc[0]
    bound = min(_order(stated), _order(required.least))
    allowed = {version: has for version, has in ships.items() if _order(version) >= bound}
    if not allowed or min(map(_order, ships)) >= _order(stated):
        raise Untold(claim.needs)
    return counted([*allowed.values(), bool(required.requirement)], claim.quantifier).with_text(
        f"DeepSpeed {required.release} requires {required.requirement or 'nothing'}; {_packages(ships)}",
        "the release requires a later version than the document, so it also excludes the wrong gradient of DS-12"
        if _order(required.least) > _order(REVIEWED) else "",
    )  # fmt: skip


@rule("DS-14", "deepspeed_fallback", basis=Basis.PACKAGE)
def silent_with_the_old_package(claim: Claim, fallback: pd.DataFrame) -> Verdict:
    old = needed(fallback[fallback.case == evidence.OLD], claim.needs)
    row = old.iloc[0]
    return fact(not row.available and row.warnings == 0 and row.outcome == "equal").with_text(
        f"{row.case}: the guarded import {'finds' if row.available else 'does not find'} the kernel, "
        f"{row.warnings} warning(s), result and formula: {_outcome(row)}"
    )  # fmt: skip


@rule("DS-15", "deepspeed_published", "deepspeed_table", basis=Basis.PACKAGE)
def compile_is_faster(claim: Claim, published: pd.DataFrame, table: pd.DataFrame) -> Verdict:
    by_length = published.set_index("seq_len")
    return _judge_speedup(claim, by_length.eager_ms / by_length.compile_ms, 1, table, EAGER, COMPILED)


@rule("DS-16", "deepspeed_inductor", "deepspeed_callers", basis=Basis.PACKAGE)
def compile_launches_less(claim: Claim, inductor: pd.DataFrame, calls: pd.DataFrame) -> Verdict:
    """The rule compares launches of the formula and of Inductor's code for one bfloat16 tensor (1, 32, 4096, 128)."""
    eager = calls[(calls.contender == callers.FORMULA) & calls.caller.str.startswith("[b, h, s, d]")]
    eager = eager[is_right(eager)].set_index("direction").launches
    compiled = inductor[inductor.dtype == "bfloat16"].set_index("direction").kernels
    if not set(DIRECTIONS) <= set(eager.index) & set(compiled.index):
        raise Untold(claim.needs)
    return counted([bool(compiled[name] < eager[name]) for name in DIRECTIONS], claim.quantifier).with_text(
        "; ".join(f"{name}: {eager[name]:.0f} launches, {compiled[name]:.0f} compiled" for name in DIRECTIONS),
        "launches were counted, not the host's time",
    )


@rule("DS-17", "deepspeed_patterns", basis=Basis.SOURCE)
def others_do_the_same(claim: Claim, patterns: pd.DataFrame) -> Verdict:
    """A cell is a project: the import of an optional rotation is guarded, and the project computes without it."""
    _need(patterns, claim.needs, project=("transformers", "vLLM"))
    shown = "; ".join(
        f"{row.project} {row.release} imports {row.optional}, catches {row.catches} and "
        f"{'falls back' if row.falls_back else 'does not fall back'} ({row.path})" for row in patterns.itertuples()
    )  # fmt: skip
    return counted(list(patterns.guarded_import.astype(bool)), claim.quantifier).with_text(
        shown,
        *(f"{row.project} calls {row.optional} {row.only}" for row in patterns.itertuples()),
        followed("no file names torchembed in ", patterns.project[~patterns.names_torchembed.astype(bool)]),
    )


def digits(error: float) -> str:
    """The distance of a ratio from 1 in words; records keep six digits."""
    return f"{error:.0e}" if error >= 1e-6 else "6 digits"


def _judge_speedup(
    claim: Claim, stated: pd.Series, decimals: int, table: pd.DataFrame, slow: str, fast: str
) -> Verdict:
    """A cell is a length, a dtype and a direction; ``stated`` has the claimed ratio of each length."""
    ratios = _ratios(table, slow, fast)
    cells = list(itertools.product(DTYPES, DIRECTIONS, stated.index))
    _all_there(cells, ratios, claim.needs)
    found = sizes([size(ratios[cell], stated[cell[-1]], digits=decimals) for cell in cells], claim.quantifier)
    shown = [
        f"{dtype} {direction} " + ", ".join(f"{ratios[dtype, direction, n].value:.2f}x" for n in sorted(stated.index))
        for dtype, direction in itertools.product(DTYPES, DIRECTIONS)
    ]
    roofs = " and ".join(f"{name} at {findings.of_a_copy(table, name)}" for name in (fast, slow))
    module = [x for cell, x in _ratios(table, slow, MODULE).items() if DIRECTIONS[0] in cell]
    return found.with_text(
        f"{'; '.join(shown)}; of the copy's speed {roofs}",
        "the document measured on a GB10, not on this GPU",
        f"forward through torchembed's module, with q as q and as k: {value_range(module)}x"
        if module and fast == TORCHEMBED else "",
    )  # fmt: skip


def _ratios(table: pd.DataFrame, slow: str, fast: str) -> dict[tuple[str, str, int], Interval]:
    """(dtype, direction, seq_len) -> time of ``slow`` over time of ``fast``, where both ran right."""
    times: dict[str, dict] = {slow: {}, fast: {}}
    for _, row in table[is_right(table) & table.contender.isin(times)].iterrows():
        times[row.contender][row["dtype"], row.direction, row.seq_len] = noise.time(row)
    return {cell: times[slow][cell] / times[fast][cell] for cell in times[slow] if cell in times[fast]}


def _repeats_forward(frame: pd.DataFrame) -> list[bool]:
    """For each row, whether the error is the closed form's and the norm is the gradient's, up to rounding."""
    slack = frame.dtype.map(rounding_bound) + 2 * PRINTED * frame.wrong_backward_error.clip(lower=1)
    error = (frame.gradient_error - frame.wrong_backward_error).abs()
    return list((error <= slack) & ((frame.norm_ratio - 1).abs() <= slack) & (frame.wrong_backward_error > 2 * slack))


def _need_errors(claim: Claim, frame: pd.DataFrame, lengths: Iterable[int], versions: set[str]) -> None:
    """Raise `Untold` if the record deepspeed_correctness lacks a length, a version or a pair of dtypes."""
    pairs = [" with ".join(str(x).removeprefix("torch.") for x in pair) for pair in measure.DTYPES[_device(frame)]]
    frame = frame.assign(version=frame.version.astype(str), pair=frame.dtype + " with " + frame.table_dtype)
    _need(frame, claim.needs, version=sorted(versions), pair=pairs, seq_len=lengths)


def _need_callers(claim: Claim, dispatch: pd.DataFrame, *versions: str) -> None:
    """Raise `Untold` if the evidence deepspeed_dispatch lacks the shape of a caller in one of these versions."""
    if missing := sorted({*versions} - {*dispatch.version}):
        raise Untold(f"{claim.needs}; missing: {listed(missing)}")
    _need(dispatch, "the shapes of all callers", version=versions, caller=[caller for caller, *_ in evidence.CALLERS])


def _need(frame: pd.DataFrame, needs: str, **expected: Iterable) -> None:
    """Raise `Untold` if a combination of the expected values has no row."""
    present = set(frame[list(expected)].itertuples(index=False, name=None))
    _all_there(itertools.product(*expected.values()), present, needs)


def _all_there(cells: Iterable[tuple], present: Container, needs: str) -> None:
    """Raise `Untold` if a cell is not present; the message names each such cell."""
    if missing := [" ".join(map(str, cell)) for cell in cells if cell not in present]:
        raise Untold(f"{needs}; missing: {'; '.join(missing)}")


def _device(correctness: pd.DataFrame) -> str:
    return "cuda" if correctness.empty else correctness.device.iloc[0]


def _code(frame: pd.DataFrame) -> str:
    """The source of the code that was run, and the place."""
    return f"run on the CPU, the kernel in Triton's interpreter: {listed(frame.code)}"


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _ships(packages: pd.DataFrame) -> dict[str, bool]:
    return dict(zip(packages.version.astype(str), packages.has_triton_module.astype(bool), strict=True))


def _packages(ships: dict[str, bool]) -> str:
    return listed(f"{version} {'has it' if has else 'has not'}" for version, has in ships.items())


def _outcome(row) -> str:
    return f"off by {row.error:.2f}" if row.outcome == "different" else row.outcome
