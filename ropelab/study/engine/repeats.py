"""Measure how far the times of two runs lie apart, from the records in the history of this repository.

Where the code of the packages compared with did not change between two records, their times should be the same.
``python -m ropelab.study.engine.repeats`` compares each record with the one before it and writes ``data/repeats.csv``.
"""

from __future__ import annotations

import io
import json
import subprocess
from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ropelab.bench import whole_file
from ropelab.bench.records import MEASUREMENTS, ROOT, gpus

REPEATS = ROOT / "data" / "repeats.csv"

OURS = "ropelab"
"""The name with which the contenders of this project begin."""
TIMING = "ropelab.bench.timing"
"""The module that times."""
SHARE = 0.95
"""The share of the cells whose times in two runs lie within the distance that counts as noise."""

CELL = [
    "cell", "case", "part", "kind", "what", "caller", "encoder", "variant", "batch", "seq_len", "encoding_dim",
    "n_seqs", "longest", "tokens", "freqs_len", "q_heads", "k_heads", "heads", "head_dim", "rotary_dim", "dtype",
    "layout", "seq_format", "storage", "direction", "step", "mode", "timer", "clones", "contender",
]  # fmt: skip
"""The columns that describe a cell, where a record has them."""


@cache
def _table(path: Path = REPEATS) -> pd.DataFrame:
    return pd.read_csv(path, keep_default_na=False).set_index(["study", "timer"])["distance"]


def between_runs(study: str, frame: pd.DataFrame) -> pd.Series:
    """The relative distance between the medians of two runs, for each row of the record of ``study``.

    A study that was measured once has no distance of its own; it gets the median of all studies.
    """
    table = _table()
    timers = frame["timer"] if "timer" in frame else pd.Series("", frame.index)
    usual = float(table.median())
    # Of no rows, pandas would keep the type of the timers, which is text.
    return timers.map(lambda timer: table.get((study, timer), usual)).astype(float)


def distances(earlier: pd.DataFrame, later: pd.DataFrame) -> pd.DataFrame:
    """The relative distance of the medians of two records of one study, for every cell of another package's code.

    Returns:
        Columns timer (``""`` where the record has none) and distance.
    """
    both = [frame.assign(timer=frame["timer"] if "timer" in frame else "") for frame in (earlier, later)]
    keys = [name for name in CELL if all(name in frame for frame in both)]
    times = [
        frame[frame.median_us.notna() & ~frame.contender.str.startswith(OURS)].drop_duplicates(keys, keep=False)
        for frame in both
    ]
    cells = times[0].merge(times[1], on=keys)
    return cells.assign(distance=np.expm1(np.log(cells.median_us_x / cells.median_us_y).abs()))[["timer", "distance"]]


def measured(*folders: str) -> pd.DataFrame:
    """The distances of all studies with records under the folders in the history: a row for each study and timer.

    Two successive records count if each file that both name has the same checksum in both: the files of other packages,
    and the code that times. Times of two methods lie apart for more reasons than noise.

    Returns:
        Columns study, timer, distance (`SHARE` of the cells lie within it), cells, and records (the times of day).
    """
    found, records = {}, {}
    for path in _git("ls-files", *(f"{folder}/*.csv" for folder in folders)).split():
        study, history = Path(path).stem, list(_history(path))
        records.setdefault(study, []).extend(utc[:16] for utc, *_ in history)
        found.setdefault(study, [pd.DataFrame(columns=["timer", "distance"])]).extend(
            distances(earlier, later)
            for (_, before, earlier), (_, after, later) in pairwise(history)
            if all(after[name] == checksum for name, checksum in before.items() if name in after)
        )
    rows = []
    for study, frames in sorted(found.items()):
        for timer, cells in pd.concat([frame for frame in frames if len(frame)] or frames).groupby("timer"):
            distance = round(float(cells.distance.quantile(SHARE)), 4)
            rows.append((study, timer, distance, len(cells), " ".join(sorted(records[study]))))
    return pd.DataFrame(rows, columns=["study", "timer", "distance", "cells", "records"])


def _history(path: str):
    """The time, the checksums of files, and the table of each record of ``path``, the earliest first.

    The files belong to other packages, or time.
    """
    seen = set()
    for commit in reversed(_git("log", "--format=%h", "--", path).split()):
        about = json.loads(_git("show", f"{commit}:{path.removesuffix('.csv')}.json"))
        frame = pd.read_csv(io.StringIO(_git("show", f"{commit}:{path}")))
        if about["utc"] not in seen and {"median_us", "contender"} <= set(frame):
            seen.add(about["utc"])
            yield about["utc"], _hashes(about), frame


def _hashes(about: Mapping[str, Any]) -> dict[str, Any]:
    """The hash of each peer, and what times; records of 27 November 2026 and before have a hash of each file.

    The two forms differ in `TIMING`, so that records of both are never taken for two runs of the same code.
    """
    if "protocol" in about:
        return {**about["peers"], TIMING: about["protocol"].get("timer")}
    times = {name: digest for name, digest in (about.get("modules") or {}).items() if name == TIMING}
    return (about.get("peer_files") or {}) | times


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    table = measured(*(f"data/measurements/{gpu}" for gpu in gpus(MEASUREMENTS)))
    whole_file.write(REPEATS, table.to_csv(index=False))
