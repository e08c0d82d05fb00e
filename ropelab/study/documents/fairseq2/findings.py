"""Turn the records into the tables behind the rules and the figures, and word them."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ropelab.bench.rows import is_right, need, timed
from ropelab.study.documents.fairseq2 import evidence
from ropelab.study.documents.fairseq2.encoders import ENCODER_CODE
from ropelab.study.engine import noise
from ropelab.study.engine.words import listed, value_range
from ropelab.study.topics.performance import comparison

NOISE = 2 * noise.FLOOR
"""The least relative half-width of the interval of a ratio of two times."""
SHAPE = ["batch", "seq_len", "encoding_dim"]
_SAME = "RE llama"
_KEYS = [*SHAPE, "dtype", "direction"]


def same_kernels(grid: pd.DataFrame, inductor: pd.DataFrame) -> pd.DataFrame:
    """RE llama eager and compiled: two timings of the same code, wherever both launch the very same kernels.

    Inductor leaves its product of complex numbers to eager, and there is nothing else. Whether that holds in a
    direction is read off the names of the kernels in ``inductor``; if not, its rows are not here.

    Returns:
        Columns of the shape, dtype, direction, and apart: the longer of the two times over the shorter.
    """
    launched = inductor[(inductor.contender == _SAME) & (inductor.dtype == "float32")]
    launched = launched.pivot_table(index="direction", columns="mode", values="launched", aggfunc="first")
    launched = launched.reindex(columns=["eager", "compiled"]).dropna()
    directions = launched.index[launched.eager == launched.compiled]
    rows = timed(pd.concat([grid, inductor[inductor.dtype == "float32"]], ignore_index=True))
    rows = rows[(rows.contender == _SAME) & rows.direction.isin(directions)]
    times = rows.pivot_table(index=_KEYS, columns="mode", values="median_us", sort=False)
    times = times.reindex(columns=["eager", "compiled"]).dropna()
    return (times.max(axis=1) / times.min(axis=1)).rename("apart").reset_index()


def apart(same: pd.DataFrame, direction: str = "forward", how: str = "max") -> float:
    """How far timings of the same kernels lie apart in a direction, as a fraction; 0 if there are no timings.

    ``how`` is ``"max"`` for the largest of the cells, or ``"mean"``.
    """
    found = same[same.direction == direction].apart
    return float(found.agg(how)) - 1 if len(found) else 0.0


def of_a_copy(grid: pd.DataFrame) -> pd.DataFrame:
    """The share of the speed of a copy of x that ropelab's kernel reaches, and the share that the tables leave.

    A copy reads no tables. A call at the speed of the copy that also reads tables takes longer in proportion to its
    bytes. Cosines and sines have a column per pair in float32: ``S E 4`` bytes. They count once if the batches of a
    position share the rows that are read, and once for each batch if not.

    Returns:
        A row per shape, direction and layout: the columns of the record, tables_bytes, and once and each_batch: the
        fractions of a copy that remain.
    """
    ours = timed(grid)
    ours = ours[(ours["mode"] == "kernel") & ours.fraction_of_copy.notna()]
    tables = ours.seq_len * ours.encoding_dim * 4
    itemsize = ours.dtype.map({"float32": 4, "bfloat16": 2})
    # The bytes of a pass without its tables: x in, y out.
    moved = 2 * ours.batch * ours.seq_len * ours.encoding_dim * itemsize
    return ours.assign(
        tables_bytes=tables, once=moved / (moved + tables), each_batch=moved / (moved + ours.batch * tables)
    )


def over_ropelab(grid: pd.DataFrame) -> pd.DataFrame:
    """The time of each encoder's forward over that of ropelab's kernel in the same layout, the fastest encoder first.

    Columns: contender, mode, and of the shapes with both times: shapes (their number), least, median and most.
    """
    rows = comparison.timed(grid).query("direction == 'forward'")
    rows = rows.assign(layout=rows.contender.str.split().str[1])
    ours = rows["mode"] == "kernel"
    both = rows[~ours].merge(rows[ours], on=[*SHAPE, "layout"], suffixes=("", "_ours"))
    over = (both.median_us / both.median_us_ours).groupby([both.contender, both["mode"]])
    return over.agg(shapes="size", least="min", median="median", most="max").sort_values("median").reset_index()


def wide_heads(grid: pd.DataFrame, inductor: pd.DataFrame, cache_bytes: float) -> str:
    """A few sentences on the speed of ropelab's kernel where a head is as wide as the model, and on shared tables.

    Cells with tables larger than the cache decide whether the batches share the rows that they read.
    """
    found = of_a_copy(grid)
    cells = found.groupby([*SHAPE, "direction"]).ngroups
    text = (
        f"{value_range(found.fraction_of_copy)} of a copy in {cells} cells (median "
        f"{found.fraction_of_copy.median():.2f}); the copy reads no tables."
    )
    beyond, one = found.tables_bytes >= cache_bytes, found.batch == 1
    more = (found.fraction_of_copy / found.once)[one].groupby(beyond).max() - 1
    if more.get(True, 0) > 0:
        text += (
            f" With one batch element and tables larger than the cache of {cache_bytes / 1e6:.0f} MB it moves up to "
            f"{more[True]:.1%} more bytes a second than that copy."
        )
        if more.get(False, 0) > 0:
            text += f" With smaller tables it is up to {more[False]:.0%}, because they stay in the cache."
    far = found[beyond & ~one]
    if len(far):
        anew = (far.fraction_of_copy - far.each_batch).abs().median() < (far.fraction_of_copy - far.once).abs().median()
        text += (
            f" With several batches and tables larger than the cache of {cache_bytes / 1e6:.0f} MB it reaches "
            f"{value_range(far.fraction_of_copy)}. The bytes allow {value_range(far.each_batch)} if each batch element "
            f"reads the tables again, and {value_range(far.once)} if all share one reading. "
        )
        text += "So every batch reads them again." if anew else "So batches share rows, in most cells nearly all."
    narrow = of_a_copy(inductor[inductor.dtype == "bfloat16"])
    if len(narrow):
        row = narrow.iloc[0]
        text += (
            f" In bfloat16 a row of the tables has twice the bytes of a token's x. The kernel reaches "
            f"{value_range(narrow.fraction_of_copy)} at B{row.batch} S{row.seq_len} E{row.encoding_dim}, where the "
            f"bytes allow {row.each_batch:.2f} and {row.once:.2f}."
        )
    return text


def whose(frame: pd.DataFrame) -> str:
    """The code that made the table, as `Encoders.source`."""
    return listed(frame[ENCODER_CODE].dropna())


def times_by_compiling(frame: pd.DataFrame, contender: str, value: str = "median_us") -> float:
    """The mean over the forward cells of the compiled time over the eager time."""
    rows = frame[is_right(frame) & (frame.contender == contender)]
    need(rows.contender, contender)
    if "direction" in rows:
        rows = rows[rows.direction == "forward"]
    wide = rows.pivot_table(index=SHAPE, columns="mode", values=value)
    return float((wide.compiled / wide.eager).mean())


def tables_sentence(equality: pd.DataFrame) -> str:
    """How far the tables of both encoders are apart, and those of ropelab's kernel from the exact ones.

    Args:
        equality: the evidence `fairseq2_equality`.
    """
    tables = equality[equality.what == "tables"].sort_values("positions")
    far = tables.groupby(["first", "second"]).last()
    apart, exact = far.difference["RE", "RRE"], far.difference["kernel", "exact"]
    return (
        f"Up to position {far.positions.max():,.0f} the tables of RE and RRE differ by up to {apart:.1e}. "
        f"The tables of ropelab's kernel are exact to {exact:.0e}."
    )


def defaults_sentence(defaults: pd.DataFrame) -> str:
    """The cases in which the encoders without ``impl`` equal the released ones, from `fairseq2_defaults`."""
    cases = defaults.groupby("encoder").equal.agg(["sum", "size"])
    each = [f"{row['sum']} of {row['size']} with {name}" for name, row in cases.iterrows()]
    return f"Calls without impl that have the bits of the released encoder: {', '.join(each)}."


def log_sentence(log: pd.DataFrame, ratios: pd.DataFrame) -> str:
    """What the document's log says of compiling, and of the native encoders in eager mode."""
    native = ratios.groupby(["mode", "ratio"]).times.mean()["eager", "native"]
    re, rre = (times_by_compiling(log, name, "ms") for name in ("RE llama", "RRE llama"))
    return (
        f"In the document's own log, RRE llama takes {rre:.2f} times as long compiled as eager, and native RE "
        f"{re:.2f} times. In eager mode, native RRE takes {native:.1f} times as long as native RE."
    )


def ratios_sentence(grid: pd.DataFrame) -> str:
    """How many of the document's four mean ratios lie on the same side of 1 here, and both means of the forward."""
    here = evidence.ratios(timed(grid)[[*SHAPE, "mode", "direction", "contender", "median_us"]], "median_us")
    printed = evidence.summary().set_index(["mode", "ratio"])[["printed"]]
    means = {way: printed.assign(here=rows.groupby(["mode", "ratio"]).times.mean()).dropna()
             for way, rows in here.groupby("direction")}  # fmt: skip
    both = means["forward"]
    same = {way: f"{((rows.here > 1) == (rows.printed > 1)).sum()} of {len(rows)}" for way, rows in means.items()}
    backward = others = ""
    if "forward and backward" in means:
        crossed = means["forward and backward"].query("(here > 1) != (printed > 1)").here.map("{:.2f}".format)
        backward = f"; with the backward, {same['forward and backward']}"
        others = f" FS-16 has the interval of the other: {listed(crossed)}." * bool(len(crossed))
    layouts = {"llama": "pairs", "reference": "halves"}
    each = [f"{mode} {layouts[ratio]} {row.here:.2f} ({row.printed:.2f})" for (mode, ratio), row in both.iterrows()]
    compiled = [times_by_compiling(*of) for of in ((grid, "RE llama"), (evidence.log(), "RE llama", "ms"))]
    return (
        f"Of the forward, {same['forward']} means of RRE's time over RE's lie on the same side of 1 as published"
        f"{backward}.{others} The mean of the forward here (and as published): {listed(each)}. Compiled, native RE "
        f"takes {compiled[0]:.2f} ({compiled[1]:.2f}) times as long as eager."
    )


def fastest_sentence(grid: pd.DataFrame, inductor: pd.DataFrame | None) -> str:
    """ropelab's kernel in its slower layout beside the fastest other implementation, and the cells within noise.

    Two timings of the same kernels (`same_kernels`) show which differences mean nothing.
    """
    rows = comparison.timed(grid)  # without the copies
    ours, cell = rows["mode"] == "kernel", [*SHAPE, "direction"]
    faster = (rows[~ours].groupby(cell).median_us.min() / rows[ours].groupby(cell).median_us.max()).dropna()
    text = (
        f"In its slower layout, ropelab's kernel is {faster.min():.2f} to {faster.max():.2f} times as fast as the "
        f"fastest of the eight other implementations, eager or compiled, in {len(faster)} cells (median "
        f"{faster.median():.2f})."
    )
    if inductor is None or (same := same_kernels(grid, inductor)).empty:
        return text
    nothing = {d: max(apart(same, d), NOISE) for d in faster.index.unique("direction")}
    equal = (abs(np.log(faster)) <= np.log1p(faster.index.get_level_values("direction").map(nothing))).sum()
    return f"{text} In {equal} of {len(faster)} cells the difference is within noise."


def warnings_sentence(compiled: pd.DataFrame, torch_version: str) -> str:
    """The warnings while compiling, in markdown."""
    heard = sorted({text for texts in compiled.warnings.dropna() for text in texts.split("; ")})
    said = "; ".join(f"*{text}*" for text in heard)
    return f"torch {torch_version} {f'warns while it compiles: {said}' if said else 'gives no warning.'}"
