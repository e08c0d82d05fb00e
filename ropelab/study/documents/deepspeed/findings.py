"""This file words the findings about DeepSpeed#8052 once, for the rules, README.md and the notebooks."""

import pandas as pd

from ropelab.bench.rows import is_right
from ropelab.study.engine.words import value_range


def gate_of_callers(dispatch: pd.DataFrame) -> str:
    """The number of shapes of DeepSpeed's own callers for which the merged gate opens, and ropelab's gate."""
    own = dispatch[dispatch.in_tree & (dispatch.tokens > 1)].groupby("version").gate_open.agg(["sum", "size"])
    merged, ours = (own.loc[version] for version in ("merged", "ropelab"))
    return (
        f"the gate opens for {merged['sum']} of {merged['size']} shapes that DeepSpeed's own callers pass beyond one "
        f"token, ropelab's for {ours['sum']}"
    )


def of_a_copy(table: pd.DataFrame, contender: str) -> str:
    """``"0.89 to 0.97"``: the speed of a contender in fractions of the best copy, over the cells where it is right."""
    return value_range(table[is_right(table) & (table.contender == contender)].fraction_of_copy)


def most_over(table: pd.DataFrame, contender: str) -> pd.Series:
    """How many times as fast as a contender a kernel would be that is as fast as the copy, cell by cell."""
    return 1 / table[is_right(table) & (table.contender == contender)].fraction_of_copy
