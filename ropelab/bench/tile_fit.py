"""Fit the weights of `ropelab.kernels.tile_cost` to measured times.

    python -m ropelab.bench.tile_fit

prints the weights, and the regret of the choice for the models of the fit and for the models that were held out.
"""

from collections.abc import Sequence
from dataclasses import astuple, fields
from pathlib import Path

import numpy as np
import pandas as pd

from ropelab.bench import records
from ropelab.bench.model_cells import on_meta
from ropelab.bench.model_shapes import halves
from ropelab.bench.tile_regret import numbered, tile_of_row, work_of
from ropelab.kernels.tile_cost import Terms, terms

TIMES = records.ROOT / "data" / "tile_times.csv"

_MOST = 0.5
"""A tile that is slower than the best by more than this factor counts as slower by this factor."""

_TURNS = 2000

_TERMS = [f"term_{field.name}" for field in fields(Terms)]
"""The columns of the terms."""


def read(path: Path = TIMES) -> pd.DataFrame:
    """The table with a column for each of the `Terms`.

    Columns: number (the index of the cell in `numbered`), model, the attributes of the tile, median_us, ``_TERMS``.
    """
    frame = pd.read_csv(path)
    drawn = numbered()
    works = {number: work_of(on_meta(drawn[number])) for number in frame.number.unique()}
    found = [astuple(terms(works[row["number"]], tile_of_row(row))) for row in frame.to_dict("records")]
    return frame.join(pd.DataFrame(found, columns=_TERMS, index=frame.index))


def fit(frame: pd.DataFrame) -> Terms:
    """The weights, each at least 0, for which the cost comes closest to the logarithm of the time.

    Both are compared within a call: the mean of the call's tiles is subtracted. Least squares by coordinates, which
    ends at the same numbers in every run.
    """
    times = np.log(frame.median_us)
    slower = (times - times.groupby(frame.number).transform("min")).clip(upper=_MOST)
    centred = frame[_TERMS] - frame.groupby("number")[_TERMS].transform("mean")
    x, y = centred.to_numpy(), (slower - slower.groupby(frame.number).transform("mean")).to_numpy()
    normal, right, weights = x.T @ x + 1e-9 * np.eye(len(_TERMS)), x.T @ y, np.zeros(len(_TERMS))
    for _ in range(_TURNS):
        for j in range(len(_TERMS)):
            weights[j] = max(0.0, weights[j] + (right[j] - normal[j] @ weights) / normal[j, j])
    return Terms(*(float(f"{weight:.3g}") for weight in weights))


def regret(frame: pd.DataFrame, weights: Terms) -> pd.Series:
    """For each call, the time of the tile that costs least over the time of the best tile, minus 1."""
    chosen = (frame[_TERMS] @ np.array(astuple(weights))).groupby(frame.number).idxmin()
    best = frame.groupby("number").median_us.min()
    return frame.loc[chosen].set_index("number").median_us / best - 1


def main() -> None:
    frame = read()
    fitted, held_out = (frame[frame.model.isin(half)] for half in halves())
    weights = fit(fitted)
    print(weights)
    for name, part in (("models of the fit", fitted), ("models held out", held_out)):
        print(f"{name}: {_words(regret(part, weights))}")


def _words(found: Sequence[float]) -> str:
    mean, median, most = np.mean(found), np.median(found), np.max(found)
    return f"{len(found)} calls, regret {mean:.1%} on average, median {median:.1%}, at most {most:.1%}"


if __name__ == "__main__":
    main()
