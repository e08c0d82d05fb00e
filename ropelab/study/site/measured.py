"""Hold the times of a run beside the committed ones."""

import pandas as pd

from ropelab.bench import records
from ropelab.study.engine.measure import Measured
from ropelab.study.engine.repeats import CELL


def beside_committed(measured: Measured) -> pd.DataFrame:
    """A row for each study and contender that the run timed: its times beside the committed ones of the same GPU.

    Returns:
        Columns study, contender (``""`` where the study names none), cells, here_us and committed_us (medians over
        these cells) and ratio (the median of here over committed). The cells are those with a time in both records.
        Where nothing is committed, they are all that the run timed, and committed_us and ratio are missing.
    """
    columns = ["study", "contender", "cells", "here_us", "committed_us", "ratio"]
    rows = []
    for study in measured.studies:
        own = records.load(study, measured.directory, gpu=records.here()).frame
        if "median_us" not in own:
            continue  # its table holds no times
        try:
            committed = records.load(study, records.MEASUREMENTS, gpu=records.here()).frame
        except records.Unusable:
            committed = own.assign(median_us=float("nan"))
        for contender, cells in _paired(own, committed).groupby("contender", sort=False):
            both = cells.dropna() if cells.committed_us.notna().any() else cells
            ratio = (both.here_us / both.committed_us).median()
            rows.append((study, contender, len(both), both.here_us.median(), both.committed_us.median(), ratio))
    return pd.DataFrame(rows, columns=columns)


def _paired(own: pd.DataFrame, committed: pd.DataFrame) -> pd.DataFrame:
    """Columns contender, here_us and committed_us, for each row with a time in ``own``.

    Rows that the columns of a cell do not tell apart are paired in their order, which is that of the study's grid.
    """
    both = [frame if "contender" in frame else frame.assign(contender="") for frame in (own, committed)]
    keys = [name for name in CELL if all(name in frame for frame in both)]
    own, committed = (
        frame[[*keys, "median_us"]].assign(turn=frame.groupby(keys, dropna=False).cumcount()) for frame in both
    )
    pairs = own.merge(committed, "left", on=[*keys, "turn"], suffixes=("_here", "_committed"))
    pairs = pairs.rename(columns={"median_us_here": "here_us", "median_us_committed": "committed_us"})
    return pairs.loc[pairs.here_us.notna(), ["contender", "here_us", "committed_us"]]
