"""This file decides whether a record can be believed: its table must fit its provenance, and make sense."""

import hashlib
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

TIMES = ("median_us", "q20_us", "q80_us")
NUMBER, TRUTH, WORD = "number", "truth", "word"
WRITTEN = ("utc", "command", "commit", "kernels_sha256", "gpu name")
"""The entries of every provenance that a run wrote."""


def described(csv: Path, frame: pd.DataFrame) -> dict[str, Any]:
    """The entries of a provenance that describe the table: ``csv_sha256``, ``rows`` and ``columns``.

    Args:
        frame: the table as read from ``csv``.

    Returns:
        ``columns`` maps the name of each column to the `kind` of its values.
    """
    return {"csv_sha256": sha256(csv), "rows": len(frame), "columns": {name: kind(frame[name]) for name in frame}}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def kind(values: pd.Series) -> str:
    """``"number"``, ``"truth"`` or ``"word"``. Missing values do not count."""
    present = values.dropna()
    if pd.api.types.is_bool_dtype(present) or (len(present) and present.map(type).eq(bool).all()):
        return TRUTH
    return NUMBER if pd.api.types.is_numeric_dtype(values) else WORD


def hand_written(provenance: Mapping[str, Any]) -> str:
    """The reason why a record counts as written by hand; "" if its provenance has all entries that a run writes."""
    if provenance.get("hand_written"):
        return "its provenance says so"
    about = {**provenance, "gpu name": provenance.get("gpu", {}).get("name")}
    if missing := [name for name in WRITTEN if not about.get(name)]:
        return f"its provenance lacks {', '.join(missing)}"
    try:
        datetime.fromisoformat(provenance["utc"])
    except ValueError:
        return f"utc: expected the time of a run, got {provenance['utc']!r}"
    return ""


def flaws(csv: Path, frame: pd.DataFrame, provenance: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each contradiction between a table and its provenance, and for each impossible time."""
    if missing := {"csv_sha256", "rows", "columns"} - provenance.keys():
        yield f"its provenance lacks {', '.join(sorted(missing))}"
        return
    expected = provenance["columns"]
    if missing := [name for name in expected if name not in frame]:
        yield f"the table lacks the column {', '.join(missing)}"
    if more := [name for name in frame if name not in expected]:
        yield f"its provenance does not know the column {', '.join(more)}"
    if len(frame) != provenance["rows"]:
        yield f"expected {provenance['rows']} rows, got {len(frame)}"
    for name in frame:
        if name in expected and frame[name].notna().any() and kind(frame[name]) != expected[name]:
            yield f"column {name}: expected a {expected[name]} in every row, got {_odd(frame[name], expected[name])}"
    yield from senseless_times(frame)
    if sha256(csv) != provenance["csv_sha256"]:
        yield "its provenance describes another table (SHA-256 differs): the two were not written together"


def senseless_times(frame: pd.DataFrame) -> Iterator[str]:
    """Yield a sentence for each column with an impossible or a missing time.

    Times in columns ``*_us`` must be finite and above 0. Rows with the status "ok", or all rows of a table without
    ``status``, must have every column of ``TIMES`` that the table has, with q20_us <= median_us <= q80_us.
    """
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


def _odd(values: pd.Series, expected: str) -> str:
    present = values.dropna()
    if expected == NUMBER:
        words = present[pd.to_numeric(present, errors="coerce").isna()]
        return repr(words.iloc[0]) if len(words) else kind(values)
    return f"a {kind(values)}, {present.iloc[0]!r}"
