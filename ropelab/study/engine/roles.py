"""Choose whose code stands for a role in a record: the published code, else a package, else our model."""

from collections.abc import Mapping, Sequence

import pandas as pd

from ropelab.bench.rows import is_right


def first_that_ran(frame: pd.DataFrame, rungs: Sequence[Mapping[str, str]]) -> int:
    """The number of the first rung whose contenders all have right rows in the record; the last where none has.

    Args:
        rungs: each a role -> the name of its contender, the strongest evidence first.
    """
    present = set(frame.contender[is_right(frame)])
    return next((i for i, rung in enumerate(rungs) if {*rung.values()} <= present), len(rungs) - 1)


def under_roles(frame: pd.DataFrame, rung: Mapping[str, str]) -> pd.DataFrame:
    """The record with the names of the roles for the contenders of a rung; others with such a name are left out."""
    names = {contender: role for role, contender in rung.items()}
    kept = frame[~frame.contender.isin(set(rung) - set(rung.values()))]
    return kept.assign(contender=kept.contender.replace(names))
