"""Judge the records `model_heads` and `tile_regret`: cells that meet their bar, and faster libraries."""

import math
import re

import pandas as pd

from ropelab.bench.peers import PEERS
from ropelab.bench.rows import need
from ropelab.bench.worst_calls import LARGE_BYTES, limit_us
from ropelab.study.engine.words import value_range

_LINE = 128
_ALIGNED, _UNALIGNED = 0.95, 0.90
_START_US = {True: 0.6, False: 0.3}
_OURS = "ropelab"
_VECTOR = 16
"""The bytes of the widest access of a thread."""
_REGISTERS, _SCHEDULERS, _MOST_WARPS, _LANES, _UNIT = 65536, 4, 64, 32, 8
"""A multiprocessor of sm_90: its registers, a quarter of which belongs to each of four schedulers, its warps, the
threads of a warp, and the unit of a thread's registers.

Source: CUDA C++ Programming Guide, technical specifications for compute capability 9.0.
"""


def judged(frame: pd.DataFrame) -> pd.DataFrame:
    """ropelab's rows with the limit of each cell, in microseconds, and whether the cell meets its bar.

    The limit is the time that the fastest copy would take for all necessary bytes, tables and positions included. If
    features stay where they are, the copy is a copy of the others to the same places. The
    bar of a large cell is a fraction of the limit: 0.95, or 0.90 where a row of a head is no multiple of 128 bytes. A
    smaller cell may take 0.3 us longer than the copy, or 0.6 us if it reads positions first.

    Columns: the columns of the record, and large, limit_us, fraction_of_limit, allowed_us, meets.
    """
    ours = frame[(frame.contender == _OURS) & (frame.status == "ok")]
    need(ours.contender, _OURS)
    itemsize = ours.dtype.map({"bfloat16": 2, "float16": 2, "float32": 4})
    bar = (ours.head_dim * itemsize % _LINE == 0).map({True: _ALIGNED, False: _UNALIGNED})
    copy_us = ours.places_us.fillna(ours.copy_us)
    limit = limit_us(ours)
    large = ours.bytes >= LARGE_BYTES
    allowed = (limit / bar).where(large, copy_us + (ours.positions != "none").map(_START_US))
    return ours.assign(
        large=large,
        limit_us=limit,
        fraction_of_limit=limit / ours.median_us,
        allowed_us=allowed,
        meets=ours.median_us <= allowed,
    )


def faster(frame: pd.DataFrame) -> pd.DataFrame:
    """The cells in which another library took less time than ropelab: cell, contender, and the quotient of the times.

    Columns: the columns that identify the cell, contender, median_us, ours_us, ours_over_theirs, leaves_rest.
        leaves_rest: whether the library overwrites its input and leaves the features that do not rotate, which ropelab
        has to copy to new tensors in this cell.
    """
    identity = ["model", "cell", "layout", "seq_format", "storage", "dtype", "positions", "in_place"]
    good = frame[frame.status == "ok"]
    ours = good[good.contender == _OURS].set_index(identity).median_us.rename("ours_us")
    others = good[good.contender != _OURS].join(ours, on=identity)
    others = others.assign(ours_over_theirs=others.ours_us / others.median_us)
    ahead = others[others.ours_over_theirs > 1].sort_values("ours_over_theirs", ascending=False)
    overwrites = ahead.contender.isin(peer.name for peer in PEERS if peer.in_place)
    ahead = ahead.assign(leaves_rest=overwrites & ~ahead.in_place & (ahead.rotary_dim < ahead.head_dim))
    return ahead[[*identity, "contender", "median_us", "ours_us", "ours_over_theirs", "leaves_rest"]]


NARROW, REGISTERS, SPILLS, NOTHING = (
    "accesses below 16 bytes", "registers leave room for fewer than 32 of 64 warps", "registers in local memory",
    "none of these",
)  # fmt: skip
EVERY = "all calls"
SIZES = "16 MB and more", "less than 16 MB"
"""The two sizes of calls in `causes`."""


def causes(frame: pd.DataFrame) -> pd.DataFrame:
    """The drawn calls by each fact that sets them apart from a copy; a call may have several.

    Returns:
        A row for each fact, for `NOTHING` and for all calls. For calls from 16 MB on and for smaller calls: their
        number, and the median of their fraction of the limit.
    """
    ours = judged(frame)
    found = ours.apply(lambda row: facts(row) or [NOTHING], axis=1)
    each = pd.concat([ours.assign(fact=EVERY), ours.assign(fact=found).explode("fact")])
    groups = each.groupby(["fact", "large"]).fraction_of_limit
    table = pd.DataFrame({"calls": groups.size(), "median": groups.median()}).unstack("large")
    table = table.sort_values(("median", True), ascending=False).sort_index(
        key=lambda facts: facts.map(lambda fact: {EVERY: 0, NOTHING: 1}.get(fact, 2)), kind="stable"
    )
    sizes = dict(zip((True, False), SIZES, strict=True))
    columns = [(name, large) for large in sizes for name in ("calls", "median")]
    named = [f"{sizes[large]}: {name}" for name, large in columns]
    return table.reindex(columns=columns).set_axis(named, axis=1).rename_axis(index="calls with")


def facts(row: pd.Series) -> list[str]:
    """The facts that set a call of ours apart from a copy with accesses of 16 bytes; ``row`` is a row of the record.

    The compiler's counters tell the width of the accesses and the room for warps.
    """
    narrowest = min(row.load_bytes, row.store_bytes)
    found = {
        NARROW: narrowest < _VECTOR,
        REGISTERS: _warps(row.registers) < _MOST_WARPS // 2,
        SPILLS: row.spills > 0,
        "rows of the tables by position": row.positions != "none" and not row.table_free,
        "no tables: cosines and sines are computed": row.table_free,
        "the result has the other layout": row.converts,
        "features that do not rotate are copied": row.rotary_dim < row.head_dim and not row.in_place,
        "features that do not rotate lie between": row.rotary_dim < row.head_dim and row.in_place,
    }
    return [fact for fact, applies in found.items() if applies]


def _warps(registers: float) -> int:
    """The warps of a multiprocessor for which there are registers, if each thread has so many; NaN if unknown."""
    each = math.ceil(registers / _UNIT) * _UNIT if registers == registers else 1
    return min(_MOST_WARPS, _SCHEDULERS * (_REGISTERS // _SCHEDULERS // (each * _LANES)))


def furthest(counters: pd.DataFrame) -> pd.DataFrame:
    """The large and the small call of each operator furthest from its limit, with the cause that its counters show.

    Args:
        counters: the record of `ropelab.bench.counters`.
    """
    names = {"study": "calls", "call": "call", "median_us": "µs", "fraction": "of its limit", "cause": "cause"}
    rows = counters.groupby(["large", "study"]).fraction.idxmin().sort_index(ascending=[False, True])
    found = counters.loc[rows, [*names]]
    found.insert(0, "size", counters.large[rows].map(dict(zip((True, False), SIZES, strict=True))))
    return found.assign(study=found.study.replace(_STUDIES), call=found.call.map(_without_defaults)).rename(
        columns=names
    )


_STUDIES = {
    "block_scales": "8-bit block scales", "cached_keys": "cached keys turned again", "latent_attention": "MLA",
    "model_heads": "drawn calls", "mrope": "M-RoPE", "one_pass_cells": "one pass", "packed": "packed sequences",
    "row_scales": "one pass, 8 bits and a scale for each token", "table_free": "without tables",
}  # fmt: skip


def _without_defaults(call: str) -> str:
    """A call without the columns that are off or follow from others, and without the names that its values explain."""
    call = re.sub(r", (?:\w+ False|storage contiguous|(?:\w*bytes|first|batch|seq_len) \d+)(?=,|$)", "", call)
    call = re.sub(r"\b(?:operation|model|cell|case|dtype|layout|seq_format|direction|step) ", "", call)
    return re.sub(r"(\w+) True\b", lambda flag: flag[1].replace("_", " "), call)


_CAUSES = (
    "memory at",
    "memory moves",
    "L2 cache",
    "wave is",
    "registers",
    "issue slots",
    "tensor cores",
    "launch time",
)


def counted(counters: pd.DataFrame) -> str:
    """How many of the counted calls have each cause; ``counters`` as for `furthest`."""
    large, small = counters[counters.large].cause, counters[~counters.large].cause
    plain = ~large.str.contains("|".join(_CAUSES))

    def having(causes: pd.Series, words: str) -> int:
        return int(causes.str.contains(words, regex=False).sum())

    busy = large.str.extract(r"memory at (\d+) %")[0].dropna().astype(int)
    peak = f" at {value_range(busy, '.0f')} % of its peak" if len(busy) else " near its peak"
    return (
        f"In {having(small, 'launch time')} of {len(small)} calls below 16 MB the launch takes longer than the bytes. "
        f"Of {len(large)} larger calls {len(busy)} have the memory{peak}. "
        f"The L2 cache moves more than the bytes in {having(large, 'L2 cache')}, "
        f"and the last wave is partly empty in {having(large, 'last wave')}. "
        f"Registers leave room for few warps in {having(large, 'registers')}. "
        f"{plain.sum()} have no such cause, and their counters tell only for what most warps wait."
    )


def regret(frame: pd.DataFrame) -> pd.DataFrame:
    """The time of the chosen tile over the time of the best tile, minus 1, for each cell of `tile_regret`.

    Columns: the columns that identify the cell, bytes, tiles (how many were tried), regret.
    """
    identity = ["model", "cell", "layout", "seq_format", "storage", "dtype", "direction", "positions", "in_place",
                "converts", "full_width", "bytes"]  # fmt: skip
    times = frame[frame.status == "ok"].groupby(identity, sort=False)
    chosen = frame[frame.chosen & (frame.status == "ok")].groupby(identity, sort=False).median_us.min()
    found = {"tiles": times.size(), "regret": chosen / times.median_us.min() - 1}
    return pd.DataFrame(found).reset_index()
