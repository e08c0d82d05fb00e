"""Measure how far two runs lie apart, from the records in the history of this repository.

Where the code of the packages compared with did not change between two records, their times should be the same, and so
should the ratios of their times, which lie closer together: what slows a whole run down cancels. A run of the same
method is one thing, and a run by another timer, or with libraries that were built or cut anew, is another.
``python -m ropelab.study.engine.repeats`` compares each record with the one before it and writes ``data/repeats.csv``.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
from collections.abc import Mapping
from functools import cache
from itertools import combinations, pairwise
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
LIBRARY = re.compile(r"\.so$|-sm_\d+$")
"""The end of the name of a library."""
PARTS = ["distance", "ratio", "changed_distance", "changed_ratio"]
"""The distances of times and of their ratios, in runs of one method, and in runs of two methods."""
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
    return pd.read_csv(path, keep_default_na=False, na_values={name: [""] for name in PARTS}).set_index(
        ["study", "timer"]
    )


def between_runs(study: str, frame: pd.DataFrame, part: str = "distance") -> pd.Series:
    """How far two runs lie apart, for each row of the record of ``study``: relative, by one of `PARTS`.

    A study without a distance of its own, such as one that was measured once, gets that of its timer in other studies,
    or the median of all studies.
    """
    table = _table()[part].dropna()
    timers = frame["timer"] if "timer" in frame else pd.Series("", frame.index)
    known, usual = table.to_dict(), float(table.median())
    of_timer = table.drop("", level="timer").groupby(level="timer").median().to_dict()
    # Of no rows, pandas would keep the type of the timers, which is text.
    return timers.map(lambda timer: known.get((study, timer), of_timer.get(timer, usual))).astype(float)


def by_any_method(study: str, frame: pd.DataFrame) -> pd.DataFrame:
    """The record of ``study``, whose runs lie at least as far apart as runs of two methods."""
    columns = {"between_runs": "changed_distance", "between_ratios": "changed_ratio"}
    apart = {name: frame[name].clip(lower=between_runs(study, frame, part)) for name, part in columns.items()}
    return frame.assign(**apart)


def distances(earlier: pd.DataFrame, later: pd.DataFrame) -> pd.DataFrame:
    """The relative distances of two records of one study, for the code of other packages.

    Returns:
        Columns timer (``""`` where the record has none), what and distance: a row ``"distance"`` for the median of each
        contender in each cell, and a row ``"ratio"`` for the ratio of each two contenders of a cell.
    """
    both = [frame.assign(timer=frame["timer"] if "timer" in frame else "") for frame in (earlier, later)]
    keys = [name for name in CELL if all(name in frame for frame in both)]
    times = [
        frame[frame.median_us.notna() & ~frame.contender.str.startswith(OURS)].drop_duplicates(keys, keep=False)
        for frame in both
    ]
    found = times[0].merge(times[1], on=keys)
    found["apart"] = np.log(found.median_us_x / found.median_us_y)
    rows = [("distance", timer, apart) for timer, apart in zip(found.timer, found.apart, strict=True)]
    for _, cell in found.groupby([name for name in keys if name != "contender"], dropna=False):
        rows += [("ratio", cell.timer.iloc[0], one - other) for one, other in combinations(cell.apart, 2)]
    table = pd.DataFrame(rows, columns=["what", "timer", "apart"])
    return table.assign(distance=np.expm1(table.apart.astype(float).abs())).drop(columns="apart")


def measured(*folders: str) -> pd.DataFrame:
    """The distances of all studies with records under the folders in the history: a row for each study and timer.

    Two successive records count if each file of other packages that both name has the same checksum in both. The method
    is another one where the code that times has another checksum, or a library, which is compiled or cut for a machine.

    Returns:
        Columns study, timer, distance of times and ratio (`SHARE` of the cells lie within them) by the same method,
        changed_distance and changed_ratio by another one (empty where there are no such records), cells (by the same
        method), and records (the times of day).
    """
    found, records = {}, {}
    for path in _git("ls-files", *(f"{folder}/*.csv" for folder in folders)).split():
        study, history = Path(path).stem, list(_history(path))
        records.setdefault(study, []).extend(utc[:16] for utc, *_ in history)
        for (_, before, earlier), (_, after, later) in pairwise(history):
            other = {name for name, checksum in before.items() if after.get(name, checksum) != checksum}
            if all(name == TIMING or LIBRARY.search(name) for name in other):
                found.setdefault(study, []).append(distances(earlier, later).assign(changed=bool(other)))
    rows = []
    for study, frames in sorted(found.items()):
        for timer, cells in pd.concat(frames).groupby("timer"):
            apart = cells.groupby(cells.changed.map({False: "", True: "changed_"}) + cells.what).distance
            parts, count = apart.quantile(SHARE).round(4).reindex(PARTS), apart.size().get("distance", 0)
            if count:
                rows.append((study, timer, *parts, count, " ".join(sorted(records[study]))))
    return pd.DataFrame(rows, columns=["study", "timer", *PARTS, "cells", "records"])


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
