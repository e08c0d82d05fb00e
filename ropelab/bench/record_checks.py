"""Decide whether a record can be believed: a run wrote it, its table is its provenance's, and its times make sense."""

import hashlib
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

TIMES = ("median_us", "q20_us", "q80_us")
WRITTEN = ("study", "utc", "command", "commit", "torch", "triton", "csv_sha256")
"""The texts in the provenance of every run."""
FACTS = ("parameters", "peers", "not_run", "kernels", "protocol")
"""The entries of every provenance that are objects, besides its GPU."""


def sha256(path: Path) -> str:
    """The checksum of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def of_no_run(provenance: Any) -> str:
    """Why no run wrote such a provenance; "" if one did."""
    if not isinstance(provenance, dict):
        return f"provenance: expected an object, got {provenance!r:.80}"
    for name in WRITTEN:
        if not (isinstance(provenance.get(name), str) and provenance[name]):
            return f"{name}: expected a text, got {provenance.get(name)!r:.80}"
    for name in ("gpu", *FACTS):
        if not isinstance(provenance.get(name), dict):
            return f"{name}: expected an object, got {provenance.get(name)!r:.80}"
    if not isinstance(provenance["gpu"].get("name"), str):
        return f"gpu name: expected a text, got {provenance['gpu'].get('name')!r:.80}"
    try:
        datetime.fromisoformat(provenance["utc"])
    except ValueError:
        return f"utc: expected the time of a run, got {provenance['utc']!r}"
    return ""


def flaws(csv: Path, frame: pd.DataFrame, provenance: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each contradiction between a table and its provenance, and for each impossible time."""
    if provenance["study"] != csv.stem:
        yield f"study: expected {csv.stem!r}, the name of the file, got {provenance['study']!r}"
    if sha256(csv) != provenance["csv_sha256"]:
        yield "its provenance describes another table (SHA-256 differs): the two were not written together"
    yield from senseless_times(frame)
    yield from _more_time_than_the_run(frame, provenance["parameters"])


def _more_time_than_the_run(frame: pd.DataFrame, parameters: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence if the samples take longer than the run. At least half of them take the median or longer.

    Older records note as ``seconds_alone`` the part of the run in which nothing ran beside the study.
    """
    seconds = parameters.get("seconds_alone") or parameters.get("seconds")
    if seconds and {"median_us", "samples"} <= set(frame):
        times, samples = (pd.to_numeric(frame[name], errors="coerce") for name in ("median_us", "samples"))
        if (least := (times * samples).sum() / 2e6) > seconds + 0.05:  # seconds are rounded to a tenth
            yield f"expected times that fit into the {seconds} s of the run, got samples of at least {least:.1f} s"


def senseless_times(frame: pd.DataFrame) -> Iterator[str]:
    """Yield a sentence for each column with an impossible or a missing time.

    Times in columns ``*_us`` must be finite and above 0. Rows with the status "ok", or all rows of a table without
    ``status``, must have every column of ``TIMES`` that the table has, with q20_us <= median_us <= q80_us. Quantiles
    need the median beside them.
    """
    if "q20_us" in frame and "median_us" not in frame:
        yield "the table has no column median_us beside q20_us"
    right = frame.status.eq("ok") if "status" in frame else pd.Series(True, frame.index)
    times = {name: pd.to_numeric(frame[name], errors="coerce") for name in frame if name.endswith("_us")}
    for name, values in times.items():
        if (impossible := values.notna() & ~(np.isfinite(values) & (values > 0))).any():
            yield f"column {name}: expected times above 0, got {values[impossible].iloc[0]:g} in row {_row(impossible)}"
        if name in TIMES and (lost := right & values.isna()).any():
            yield f"column {name}: expected a time in every row with the status ok, got no time in row {_row(lost)}"
    if set(TIMES) <= times.keys():
        median, low, high = (times[name] for name in TIMES)
        if (disordered := (low > median) | (median > high)).any():
            yield f"expected q20_us <= median_us <= q80_us, got another order in row {_row(disordered)}"


def _row(wrong: pd.Series) -> int:
    """The number of the first wrong row in the file; the header is row 1."""
    return int(np.argmax(wrong.to_numpy())) + 2
