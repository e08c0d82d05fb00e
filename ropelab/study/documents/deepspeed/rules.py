"""The rules of the claims on DeepSpeed#8052 that are more than a comparison, and remarks."""

from __future__ import annotations

import re

import pandas as pd

from ropelab.bench.rows import is_right
from ropelab.study.documents.deepspeed.dispatch import rounding_bound
from ropelab.study.documents.deepspeed.names import DIRECTIONS, FORMULA, HEAD_DIM
from ropelab.study.documents.deepspeed.peers import REVIEWED
from ropelab.study.engine.claims import Claim
from ropelab.study.engine.judging import counted, needed
from ropelab.study.engine.ledger import remark, rule
from ropelab.study.engine.sources import facts
from ropelab.study.engine.verdict import Untold, Verdict, fact
from ropelab.study.engine.words import followed, listed, value_range

PRINTED = 5e-6
"""The largest relative error of a number that a record keeps to six significant digits."""


@rule("DS-01", "deepspeed_correctness")
def forward_is_right(claim: Claim, correctness: pd.DataFrame) -> Verdict:
    """The document's cells are its lengths in float32, with the version that it is about.

    Beyond it lie the other versions and dtypes, whose result must also have the dtype of the formula's result.
    """
    whole = correctness[correctness.table == "whole"]
    tested = facts("test", "deepspeed")[0]["parameters"]
    bounds = whole.result_dtype.map(rounding_bound, na_action="ignore")
    right = (whole.outcome == "ran") & (whole.forward_error <= bounds * (1 + PRINTED))
    same_dtype = whole.result_dtype == whole.formula_dtype
    stated = whole.seq_len.isin(tested["tokens"])
    own = stated & (whole.version.astype(str) == REVIEWED) & (whole[["dtype", "table_dtype"]] == "float32").all(axis=1)
    if own.sum() != len(tested["tokens"]):
        raise Untold(claim.needs)
    other, failed = whole[stated & ~same_dtype], whole[whole.outcome != "ran"]
    pairs = listed(f"{row.dtype} with {row.table_dtype} tables" for row in other.itertuples())
    beyond = counted(list((right & same_dtype)[stated & ~own]), claim.quantifier).with_text(
        f"numbers right in {right[stated & ~own].sum()}, dtype in {same_dtype[stated & ~own].sum()} of "
        f"{(stated & ~own).sum()} cells of other dtypes and versions; another dtype than the formula's for {pairs}"
    )
    return counted(list((right & same_dtype)[own]), claim.quantifier).with_text(
        f"torchembed {REVIEWED} in float32: right in {right[own].sum()} of {own.sum()} lengths, largest relative error "
        f"{whole.forward_error[own].max():.1e}",
        "" if failed.empty else f"no launch at S = {failed.seq_len.min()} and above ({failed.outcome.iloc[0]})",
        followed("not measured: head sizes ", sorted(set(tested["head_dim"]) - {HEAD_DIM})),
        right=right[own].sum(), lengths=own.sum(), worst=whole.forward_error[own].max(),
    ).beside(beyond)  # fmt: skip


@rule("DS-03", "deepspeed_packages")
def kernel_ships_since_0_3(claim: Claim, packages: pd.DataFrame) -> Verdict:
    ships, (without, first) = _ships(packages), claim.numbers
    if not {without, first} <= ships.keys():
        raise Untold(claim.needs)
    before = [has for version, has in ships.items() if _order(version) < _order(first)]
    return fact(ships[first] and not any(before)).with_text(
        _packages(ships), without=without, first=first, wheels=len(ships)
    )


@rule("DS-04", "deepspeed_tests")
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
        failing=found[0], cases=found[1], passing=found[2], reaching=reaching,
    )  # fmt: skip


@rule("DS-05", "deepspeed_dispatch")
def axis_bug_is_real(claim: Claim, dispatch: pd.DataFrame) -> Verdict:
    """A cell is the shape of a caller in DeepSpeed's tree, beyond one token.

    At first the kernel must take the heads for the sequence and the result must be wrong; when merged it must be right.
    """
    in_tree = dispatch[dispatch.in_tree & (dispatch.tokens > 1)].set_index("caller")
    first, merged = (needed(in_tree[in_tree.version == version], claim.needs) for version in ("first", "merged"))
    along_heads, wrong = first.kernel_tokens == first.heads, first.outcome != "equal"
    still = merged.outcome != "equal"
    return counted(list(along_heads & wrong & ~still), claim.quantifier).with_text(
        f"in the first version the kernel rotates along the heads for {along_heads.sum()} of {len(first)} shapes of "
        f"in-tree callers, {wrong.sum()} come out wrong; in the merged version {still.sum()} come out wrong",
        along=along_heads.sum(), shapes=len(first), still=still.sum(),
    )  # fmt: skip


@rule("DS-12", "deepspeed_correctness", "wrong_backward")
def backward_repeats_forward(claim: Claim, correctness: pd.DataFrame, mutant: pd.DataFrame) -> Verdict:
    """A cell is a dtype and a length beyond 1: error and norm must be a repeated forward's, up to rounding.

    A repeated forward R g has the closed form's distance from the gradient, and the gradient's norm. Rounding moves
    both by at most `rounding_bound`. Our own backward that repeats the forward shows that the closed form is right.
    """
    whole = correctness[correctness.table == "whole"].astype({"version": str})
    longer = whole[(whole.seq_len > 1) & (whole.outcome == "ran")]
    ran = needed(longer[longer.version == REVIEWED], claim.needs)
    if not all(_repeats_forward(mutant[mutant.seq_len > 1].assign(dtype="float32"))):
        raise Untold("our own backward that repeats the forward, with the errors of the closed form")
    norm = (ran.norm_ratio - 1).abs().max()
    at = ran[(ran.dtype == "float32") & ran.seq_len.isin((8, 128))].sort_values("seq_len")
    shown = ", ".join(f"gradient off by {row.gradient_error:.3f} at S = {row.seq_len}" for row in at.itertuples())
    later = longer[longer.version != REVIEWED]
    bounds = later.dtype.map(rounding_bound).astype(float) * (1 + PRINTED)
    right = (later.gradient_error <= bounds).groupby(later.version).all()
    return counted(_repeats_forward(ran), claim.quantifier).with_text(
        f"{REVIEWED}: {shown} in float32, with the norm right to {f'{norm:.0e}' if norm >= 1e-6 else '6 digits'} "
        f"in {len(ran)} cases of {listed(ran.dtype)}",
        followed("no longer so in ", right.index[right]), followed("wrong still in ", right.index[~right]),
        version=REVIEWED, **{f"at_{row.seq_len}": row.gradient_error for row in at.itertuples()},
    )  # fmt: skip


@rule("DS-13", "deepspeed_extra", "deepspeed_packages")
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
        release=required.release, least=required.least, admitted=len(allowed), having=sum(allowed.values()),
    )  # fmt: skip


@rule("DS-16", "deepspeed_inductor", "deepspeed_callers")
def compile_launches_less(claim: Claim, inductor: pd.DataFrame, calls: pd.DataFrame) -> Verdict:
    """The rule compares launches of the formula and of Inductor's code for one bfloat16 tensor (1, 32, 4096, 128)."""
    eager = calls[(calls.contender == FORMULA) & calls.caller.str.startswith("[b, h, s, d]")]
    eager = eager[is_right(eager)].set_index("direction").launches
    compiled = inductor[inductor.dtype == "bfloat16"].set_index("direction").kernels
    if not set(DIRECTIONS) <= set(eager.index) & set(compiled.index):
        raise Untold(claim.needs)
    return counted([bool(compiled[name] < eager[name]) for name in DIRECTIONS], claim.quantifier).with_text(
        "; ".join(f"{name}: {eager[name]:.0f} launches, {compiled[name]:.0f} compiled" for name in DIRECTIONS),
        "launches were counted, not the host's time",
        eager=eager["forward"], compiled=compiled["forward"],
    )  # fmt: skip


@remark("DS-06", "deepspeed_dispatch")
def gate_of_callers(dispatch: pd.DataFrame) -> tuple[str, dict[str, object]]:
    own = dispatch[dispatch.in_tree & (dispatch.tokens > 1)].groupby("version").gate_open.agg(["sum", "size"])
    (opens, all_own), ours = own.loc["merged"], own.loc["ropelab", "sum"]
    return (
        f"the gate opens for {opens} of {all_own} shapes of DeepSpeed's own callers with more than one token, and "
        f"ropelab's gate opens for {ours}"
    ), {"opens": opens, "own": all_own}


@remark("DS-08", "deepspeed_published", "deepspeed_table")
def roofs(published: pd.DataFrame, table: pd.DataFrame) -> tuple[str, dict[str, object]]:
    right = table[is_right(table)]
    each = ((name, right.fraction_of_copy[right.contender == name]) for name in ("torchembed", "compile"))
    speeds = " and ".join(f"{name} at {value_range(fractions)}" for name, fractions in each)
    least, most = published.over_compile.min(), published.over_compile.max()
    return (f"the document's own times give {least:.2f} to {most:.2f}; here {speeds} of the copy's speed"), {
        "printed_least": least,
        "printed_most": most,
    }


def _repeats_forward(frame: pd.DataFrame) -> list[bool]:
    """For each row, whether the error is the closed form's and the norm is the gradient's, up to rounding."""
    slack = frame.dtype.map(rounding_bound) + 2 * PRINTED * frame.wrong_backward_error.clip(lower=1)
    error = (frame.gradient_error - frame.wrong_backward_error).abs()
    return list((error <= slack) & ((frame.norm_ratio - 1).abs() <= slack) & (frame.wrong_backward_error > 2 * slack))


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _ships(packages: pd.DataFrame) -> dict[str, bool]:
    return dict(zip(packages.version.astype(str), packages.has_triton_module.astype(bool), strict=True))


def _packages(ships: dict[str, bool]) -> str:
    return listed(f"{version} {'has it' if has else 'has not'}" for version, has in ships.items())
