"""Counters of the worst calls: their rank, the cells that a study runs for them, Nsight Compute's page, the causes."""

import csv
import io
import sys
from functools import partial

import pandas as pd
import pytest

from ropelab.bench import counters, ncu, operation, records, worst_calls
from ropelab.bench.cached_keys import cached_keys
from ropelab.bench.paged_cache import one_pass_cells
from ropelab.bench.row_scales import row_scales
from ropelab.bench.studies import STUDIES
from ropelab.bench.worst_calls import LARGE_BYTES, OURS
from ropelab.kernels import INTERPRETED
from ropelab.study.topics.performance import model_heads
from tests.study.sentences import numbers

GPU = "nvidia-h100-80gb-hbm3"
RANGE_COLUMN = "Id:Domain:Start/Stop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"


@pytest.fixture(scope="module")
def frames():
    return {study: records.load(study, gpu=GPU).frame for study in OURS}


def page(*kernels, units=None):
    """Nsight Compute's raw page: range, name and counters of each kernel; counters that are not given are 1."""
    head = ["ID", RANGE_COLUMN, "Kernel Name", *ncu.METRICS]
    units = {ncu.TIME: "ns", ncu.READ: "byte", ncu.WRITTEN: "byte"} | (units or {})
    rows = [head, ["", "", "", *(units.get(name, "inst") for name in ncu.METRICS)]]
    for number, (place, name, values) in enumerate(kernels):
        where = f'1 "<default domain>:ropelab range {place}:none:none:none"'
        rows.append([number, where, name, *(values.get(metric, "1") for metric in ncu.METRICS)])
    text = io.StringIO()
    csv.writer(text, quoting=csv.QUOTE_ALL).writerows(rows)
    return f"==WARNING== The clocks stay\nas they are.\n\n{text.getvalue()}==PROF== Disconnected\n"


@pytest.mark.parametrize("study", OURS)
def test_the_worst_calls_of_a_record(study, frames):
    frame = frames[study]
    worst = worst_calls.worst(study, frame, 3)
    assert set(worst.contender) <= set(OURS[study]) <= set(frame.contender)
    assert worst.fraction.between(0.1, 1.1).all() and (worst.large == (worst.moved_bytes >= LARGE_BYTES)).all()
    for large, rows in worst.groupby("large"):
        every = worst_calls.worst(study, frame, len(frame))
        every = every[every.large == large]
        assert list(rows.index) == list(every.fraction.sort_values(kind="stable").index[:3])
    if "bytes" in frame and study not in ("model_heads", "mrope"):
        assert (worst.moved_bytes == worst.bytes).all()
    # A record has the rows of a call one after another, and a call has a contender once.
    numbers = worst_calls.numbered(frame)
    assert numbers.is_monotonic_increasing and not frame.assign(call=numbers).duplicated(["call", "contender"]).any()


def test_the_limit_is_that_of_the_page(frames):
    judged = model_heads.judged(frames["model_heads"]).fraction_of_limit
    worst = worst_calls.worst("model_heads", frames["model_heads"])
    assert worst.fraction.equals(judged[worst.index])


@pytest.mark.parametrize("study", OURS)
def test_numbers_lead_to_the_cells_of_a_record(study, frames, monkeypatch):
    """Every cell of the study, with nothing prepared, against the rows of the record that have the cell's number."""
    table, frame, cells = STUDIES[study].table, frames[study], []
    module = sys.modules[table.__module__]
    for owner, name in [(module, "_timed"), (operation, "compare")]:
        counted = lambda cell, *rest, **options: cells.append(cell) or pd.DataFrame([{}])  # noqa: E731
        monkeypatch.setattr(owner, name, counted, raising=False)
    calls = worst_calls.worst(study, frame).attrs["calls"]
    with pytest.raises(ValueError, match=f"expected as many calls in each of .* got {calls + 1} calls"):
        counters.prepared(table, calls + 1, {}, None)
    counters.prepared(table, calls, dict.fromkeys(range(calls), {}), None)
    firsts = frame.groupby(worst_calls.numbered(frame)).first().iloc[:: calls // len(cells)]
    for cell, (_, row) in zip(cells, firsts.iterrows(), strict=True):
        columns = getattr(cell, "columns", None) or {"model": cell.name}
        shared = [name for name in columns if name in row and columns[name] != ""]
        assert shared and [row[name] for name in shared] == [columns[name] for name in shared]


@pytest.mark.skipif(not INTERPRETED, reason="a GPU runs the studies themselves")
@pytest.mark.parametrize("study", [one_pass_cells, cached_keys, row_scales], ids=lambda study: study.__name__)
def test_a_study_runs_only_wanted_cells(study, frames):
    name, counted = study.__name__, []
    worst = worst_calls.worst(name, frames[name], 40)
    calls = worst[worst.moved_bytes < 2e5].groupby("call").head(1).iloc[[0, -1]]
    calls.attrs = worst.attrs
    ranges = counters.wanted(calls)
    found = counters.prepared(
        partial(study, device="cpu"), calls.attrs["calls"], ranges, lambda call, place: counted.append((place, call()))
    )
    assert {place for place, _ in counted} == {0, 1} and set(found.median_us.dropna()) == set(calls.call)
    kernels = ncu.parsed(page((0, "_a_kernel", {}), (1, "_a_kernel", {})))
    table = counters.table(name, calls, kernels, found)
    assert list(table.contender) == list(calls.contender)
    with pytest.raises(ValueError, match="expected the cell of the record"):
        counters.table(name, calls, kernels, found.assign(median_us=found.median_us.iloc[::-1].to_numpy()))
    with pytest.raises(ValueError, match="expected counters, got none"):
        counters.table(name, calls, kernels[kernels.range == 0], found)
    with pytest.raises(RuntimeError, match="expected the contender nobody, got"):
        counters.prepared(partial(study, device="cpu"), calls.attrs["calls"], {0: {"nobody": 0}}, None)


def test_the_page_of_nsight_compute():
    kernels = ncu.parsed(
        page((3, "_fill", {ncu.TIME: "1,500"}), (3, "_copy", {ncu.READ: "2,000,000", ncu.TIME: "n/a"}))
    )
    assert list(kernels.range) == [3, 3] and list(kernels.kernel) == ["_fill", "_copy"]
    assert kernels[ncu.TIME][0] == 1500 and kernels[ncu.READ][1] == 2e6 and pd.isna(kernels[ncu.TIME][1])
    with pytest.raises(ValueError, match=r"gpu__time_duration.sum: expected the unit ns or nsecond, got 'us'"):
        ncu.parsed(page((0, "_a_kernel", {}), units={ncu.TIME: "us"}))
    with pytest.raises(ValueError, match="_a_kernel: expected a range of ours"):
        ncu.parsed(page((0, "_a_kernel", {})).replace("ropelab range", "another range"))
    with pytest.raises(ValueError, match="expected a head, units and kernels, got '==WARNING== No kernels"):
        ncu.parsed("==WARNING== No kernels were profiled.\n")


def test_the_counters_of_a_call():
    """Two kernels: their traffic adds up, and the longer one tells waves, warps and stalls."""
    limits = {name: "32" for name in ncu.FITS} | {"launch__occupancy_limit_registers": "3", ncu.BLOCK: "256"}
    stalls = {ncu.stall(reason): "0" for reason in ncu.STALLS}
    stalls |= {ncu.stall("long_scoreboard"): "6", ncu.stall("wait"): "3", ncu.stall("drain"): "1"}
    long = {ncu.TIME: "9000", ncu.READ: "100", ncu.WRITTEN: "90", ncu.SECTORS[0]: "2", ncu.SECTORS[1]: "1"}
    short = {ncu.TIME: "1000", ncu.READ: "10", ncu.WRITTEN: "0", ncu.SECTORS[0]: "1", ncu.SECTORS[1]: "0"}
    found = counters._counted(ncu.parsed(page((0, "_short", short), (0, "_long", long | limits | stalls))), 100)
    assert (found["kernel"], found["kernels"], found["counted_us"]) == ("_long", 2, 10)
    assert (found["dram_over_bytes"], found["sectors_over_bytes"]) == (2, 1.28)
    assert (found["warps_fit"], found["fits_by"]) == (24, "registers")
    assert (found["stall"], found["stall_share"], found["second_stall"]) == ("long_scoreboard", 0.6, "wait")


PLAIN = {
    "large": True, "median_us": 10, "bytes_us": 9, "dram_over_bytes": 1.0, "sectors_over_bytes": 1.0, "waves": 20,
    "warps_fit": 64, "fits_by": "warps", "dram_percent": 60, "issue_percent": 20, "tensor_percent": float("nan"),
    "stall": "long_scoreboard", "stall_share": 0.9,
}  # fmt: skip


@pytest.mark.parametrize(
    "change, found",
    [
        ({}, []), ({"large": False, "bytes_us": 0.5}, [0.5, 10]), ({"large": False, "bytes_us": 5}, []),
        ({"dram_over_bytes": 1.25, "sectors_over_bytes": 1.1}, [1.25]), ({"sectors_over_bytes": 2}, [2, 2.00]),
        ({"waves": 0.25}, [25]), ({"waves": 2.4}, [40]), ({"waves": 9.5}, []),
        ({"warps_fit": 24, "fits_by": "registers"}, [24, 64]),
        ({"dram_percent": 91, "issue_percent": 80}, [91, 80]), ({"tensor_percent": 85}, [85]),
    ],
)  # fmt: skip
def test_causes(change, found):
    """Each cause with its numbers, and what most warps wait for."""
    assert numbers(counters.cause(pd.Series(PLAIN | change))) == [*found, 90]
