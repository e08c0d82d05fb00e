"""Decide whether a record can be believed: its table must fit its provenance, and make sense."""

import hashlib
import stat
import tomllib
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

TIMES = ("median_us", "q20_us", "q80_us")
NUMBER, TRUTH, WORD = "number", "truth", "word"
LARGEST = 64 * 2**20
"""The most bytes of a file that is read. The largest committed file has less than a megabyte."""
ROWS = Path(__file__).parents[2] / "data" / "rows.toml"
"""The number of rows of a whole run of each study."""
ROWS_OF = ("contender", "operator", "version", "grids", "method")
"""`ROWS` counts the rows with one value of the first of these columns that the table has, or else all rows."""
_SHAPE: dict[str, Any] = {
    "study": str, "utc": str, "command": str, "commit": str, "torch": str, "triton": str, "gpu": {"name": str},
    "csv_sha256": str, "rows": int, "columns": {"*": str}, "peers": {"*": str}, "kernels": {"*": str},
    "protocol": {"*": int}, "not_run": {"*": str},
    "parameters": {"smoke": bool, "seconds": float, "seconds_alone": float},
}  # fmt: skip
"""The type of each entry of a provenance, if it has the entry; ``*`` stands for every name."""
_WORDS = {str: "a text", int: "an integer", float: "a number", bool: "true or false", dict: "an object"}
WRITTEN = ("utc", "command", "commit", "gpu name")
"""The entries of every provenance that a run wrote."""


def described(csv: Path, frame: pd.DataFrame) -> dict[str, Any]:
    """The entries of a provenance that describe the table: ``csv_sha256``, ``rows`` and ``columns``.

    Args:
        frame: the table as read from ``csv``.

    Returns:
        ``columns`` maps the name of each column to the `kind` of its values.
    """
    return {"csv_sha256": sha256(csv), "rows": len(frame), "columns": {name: kind(frame[name]) for name in frame}}


def content(path: Path) -> bytes:
    """The bytes of a regular file.

    Raises:
        OSError: the file does not exist, is a pipe or a device, which may have no end, or is larger than `LARGEST`.
    """
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise OSError(f"expected a regular file, got {stat.filemode(about.st_mode)}")
    if about.st_size > LARGEST:
        raise OSError(f"expected at most {LARGEST} bytes, got {about.st_size}")
    return path.read_bytes()


def sha256(path: Path) -> str:
    """The checksum of a file. It raises the errors of `content`."""
    return hashlib.sha256(content(path)).hexdigest()


def wrong_types(provenance: object) -> Iterator[str]:
    """Yield a sentence for each entry of a provenance that has another type than a run writes."""
    yield from _wrong_types("", provenance, _SHAPE)


def _wrong_types(name: str, value: object, shape: Any) -> Iterator[str]:
    kind = dict if isinstance(shape, dict) else shape
    if not isinstance(value, (int, float) if kind is float else kind) or (type(value) is bool and kind is not bool):
        yield f"{name or 'provenance'}: expected {_WORDS[kind]}, got {value!r:.80}"
    elif isinstance(shape, dict):
        for key, entry in value.items():
            expected = shape.get(key, shape.get("*"))
            if expected and entry is not None:
                yield from _wrong_types(f"{name} {key}".strip(), entry, expected)


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
    yield from other_grid(frame, provenance)
    yield from _more_time_than_the_run(frame, provenance.get("parameters") or {})
    if provenance.get("study") != csv.stem:
        yield f"study: expected {csv.stem!r}, the name of the file, got {provenance.get('study')!r}"
    if sha256(csv) != provenance["csv_sha256"]:
        yield "its provenance describes another table (SHA-256 differs): the two were not written together"


@cache
def _rows_of_whole_runs() -> Mapping[str, Any]:
    return tomllib.loads(ROWS.read_text(encoding="utf-8"))


def other_grid(frame: pd.DataFrame, provenance: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence if the table of a whole run has more or fewer rows than the grid of its study.

    A contender that could not run has no rows, so the contender with the most rows counts: one of this project.
    """
    expected = _rows_of_whole_runs().get(str(provenance.get("study")))
    if expected is None or (provenance.get("parameters") or {}).get("smoke") is not False:
        return
    if isinstance(expected, Mapping):
        expected = next((number for name, number in expected.items() if name in frame), 0)
    column = next((name for name in ROWS_OF if name in frame), None)
    found = len(frame) if column is None else frame[column].value_counts().max()
    if found != expected:
        of = f" of each {column}" if column else ""
        yield f"expected {expected} rows{of}, as data/{ROWS.name} counts the grid of the study, got {found}"


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


def _odd(values: pd.Series, expected: str) -> str:
    present = values.dropna()
    if expected == NUMBER:
        words = present[pd.to_numeric(present, errors="coerce").isna()]
        return repr(words.iloc[0]) if len(words) else kind(values)
    return f"a {kind(values)}, {present.iloc[0]!r}"
