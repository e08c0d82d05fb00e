"""The findings about DeepSpeed#8052, in one place for the rules, README.md and the notebooks."""

import pandas as pd

from ropelab.bench.rows import is_right, need
from ropelab.study.engine.words import value_range


def gates_of_callers(dispatch: pd.DataFrame) -> tuple[pd.Series, pd.Series]:
    """For the merged gate and for ropelab's: the shapes of DeepSpeed's own callers for which it opens, and all."""
    own = dispatch[dispatch.in_tree & (dispatch.tokens > 1)].groupby("version").gate_open.agg(["sum", "size"])
    return own.loc["merged"], own.loc["ropelab"]


def gate_of_callers(dispatch: pd.DataFrame) -> str:
    """The number of shapes of DeepSpeed's own callers for which the merged gate opens, and ropelab's gate."""
    merged, ours = gates_of_callers(dispatch)
    return (
        f"the gate opens for {merged['sum']} of {merged['size']} shapes of DeepSpeed's own callers with more than one "
        f"token, and ropelab's gate opens for {ours['sum']}"
    )


def what_runs(dispatch: pd.DataFrame) -> pd.DataFrame:
    """A row for each caller, a column for each version: the kernel, the formula, or how the result is wrong."""
    ran = dispatch.gate_open.map({True: "kernel", False: "formula"})
    ran = ran.mask(dispatch.expected == "an error", "as the formula: an error")
    rows = dispatch.assign(ran=ran.where(dispatch.outcome == "equal", "wrong: " + dispatch.outcome))
    table = rows.pivot_table("ran", ["caller", "in_tree"], "version", aggfunc="first", sort=False).reset_index()
    return table.rename(columns={"in_tree": "in DeepSpeed's tree"})


def of_a_copy(table: pd.DataFrame, contender: str) -> str:
    """The speed of a contender as a fraction of the best copy, ``"0.89 to 0.97"``, over the cells where it is right."""
    return value_range(table[is_right(table) & (table.contender == contender)].fraction_of_copy)


def most_over(table: pd.DataFrame, contender: str) -> pd.Series:
    """The speed of the copy over the speed of a contender in each cell: the most by which any kernel can be faster."""
    return 1 / table[is_right(table) & (table.contender == contender)].fraction_of_copy


def table_sentence(table: pd.DataFrame) -> str:
    """torch.compile and ropelab at the shapes of the document's table, and the roof."""
    right = table[is_right(table)]
    need(right.contender, "compile", "ropelab")
    shapes = right.pivot_table(index=["dtype", "direction", "seq_len"], columns="contender", values="fraction_of_copy")
    roof = most_over(table, "compile").max()
    return (
        f"At the document's shapes torch.compile runs at {of_a_copy(table, 'compile')} of a copy, so a kernel at the "
        f"speed of a copy would be at most {roof:.2f} times as fast. ropelab's kernel is "
        f"{value_range(shapes.ropelab / shapes['compile'])} times as fast as torch.compile."
    )


def callers_sentence(callers: pd.DataFrame) -> str:
    """The speed of each contender at the shapes of DeepSpeed's own callers, as a fraction of a copy."""
    rows = callers.query("in_tree and status == 'ok'")
    same, promoted = (
        ", ".join(f"{name} {value_range(values)}" for name, values in part.groupby("contender").fraction_of_copy)
        for part in (rows.query("dtype == table_dtype"), rows.query("dtype != table_dtype"))
    )
    said = f"The speed for DeepSpeed's own callers, as a fraction of a copy: {same}."
    return said + (f" With tables of a wider dtype, which promote the result: {promoted}." if promoted else "")


def tests_reach(tests: pd.DataFrame) -> pd.DataFrame:
    """For each version and test: all cases, the cases whose tables broadcast, and the cases that reach the kernel."""
    return tests.groupby(["version", "test", "read", "device"], sort=False).agg(
        cases=("tokens", "size"), broadcasts=("broadcasts", "sum"), reaches_kernel=("reaches_kernel", "sum")
    )


def digits(error: float) -> str:
    """The distance of a ratio from 1 in words; records keep six digits."""
    return f"{error:.0e}" if error >= 1e-6 else "6 digits"
