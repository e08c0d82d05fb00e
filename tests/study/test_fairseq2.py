"""fairseq2#1213: the log, the measurements, and evidence that moves the outcomes of its rules."""

from functools import partial
from itertools import product

import pandas as pd
import pytest
import torch

from ropelab.bench.records import ROOT, gpus, load
from ropelab.interop.fairseq2 import BatchLayout, KernelRotaryEncoder
from ropelab.study.documents.fairseq2 import evidence, figures, findings, measure
from ropelab.study.documents.fairseq2.encoders import Encoders
from ropelab.study.documents.fairseq2.studies import STUDIES
from ropelab.study.engine.ledger import ledger
from ropelab.study.engine.verdict import Outcome
from ropelab.study.plots.panels import said
from tests.study.conftest import slower
from tests.study.sentences import states
from tests.support import change

HOLDS, LARGER, SMALLER, SOME_CELLS, FAILS, UNTOLD = Outcome
NAMES = evidence.IMPLEMENTATIONS
DTYPE, BACKWARD = "dtype == 'bfloat16'", "direction == 'forward and backward'"

# Times in any unit, of NAMES, with every ratio as the document states it.
COMPILED = (10.0, 10 / 0.86, 11.2 / 0.66, 11.2)
EAGER = (10 / 1.87, 10 / 1.87 * 5.43, 20.0, 20 * 1.16)
FOUR_MS = 4000 / (COMPILED[2] - COMPILED[0])
"""The unit, in microseconds, in which RE takes 4 ms longer in halves than in pairs."""


def grid(eager=EAGER, compiled=COMPILED, shapes=tuple(cell.shape for cell in measure.GRID)):
    """A record as measure.grid() makes it, with these times of ``NAMES`` in every cell."""
    return pd.DataFrame(
        [
            {
                "batch": batch, "seq_len": seq_len, "encoding_dim": encoding_dim, "dtype": "float32",
                "direction": direction, "mode": mode, "contender": name, "status": "ok", "median_us": us,
                "fraction_of_copy": 5 / us,
            }
            for batch, seq_len, encoding_dim in shapes
            for direction in measure.DIRECTIONS
            for mode, times in (("eager", eager), ("compiled", compiled))
            for name, us in zip(NAMES, times, strict=True)
        ]
    )  # fmt: skip


def of_two_shapes(eager=(10, 50, 40, 42), compiled=(10, 11.2, 17, 11.2)):
    """A small grid for figures."""
    return grid(eager, compiled, [(1, 2048, 1024), (4, 2048, 1024)])


def inductor(where=None, **changes):
    """A record as measure.inductor() makes it: as the document has it, with equal tables."""
    rows = [
        {
            "batch": 4, "seq_len": 8192, "encoding_dim": 8192, "dtype": dtype, "direction": direction,
            "mode": mode, "contender": name, "status": "ok", "median_us": us * FOUR_MS * passes,
            "fraction_of_copy": 0.3, "kernels": passes * (3 if name == "RE reference" else 1),
            "generated": None if name == "RE llama" else "triton_a, triton_b",
            "fallbacks": "mul" if name.startswith("RE ") else None, "complex_warning": name.startswith("RE "),
            "launched": {"RE llama": "mul", "RE reference": "triton_a; mul; triton_b"}.get(name, "triton_c"),
            "peak_bytes": 2**31, "result_bytes": 2**30, "state_bytes": 2**28, "code": f"code of {name}",
        }
        for dtype in evidence.DTYPES
        for direction, passes in zip(measure.DIRECTIONS, (1, 2), strict=True)
        for mode, times in (("eager", EAGER), ("compiled", COMPILED))
        for name, us in zip(NAMES, times, strict=True)
    ]  # fmt: skip
    eager = dict.fromkeys(("generated", "fallbacks", "complex_warning", "code"))
    return change(change(pd.DataFrame(rows), "mode == 'eager'", **eager), where, **changes)


H100 = "nvidia-h100-80gb-hbm3"


def at_a_millisecond(compiled_us=1000.0):
    """In float32, every implementation takes 1000 us but compiled RE llama, one and the same kernel as eager."""
    frame = change(inductor(median_us=1000.0), "mode == 'compiled' and contender == 'RE llama'", median_us=compiled_us)
    return frame.query("dtype == 'float32'")


def recorded(name, gpu=H100):
    return load(f"fairseq2_{name}", gpu=gpu).frame


def swapped(frame, first, second):
    return frame.assign(contender=frame.contender.replace({first: second, second: first}))


def both(tamper=None, *arguments, of=(grid, inductor)):
    """Evidence by name: the two records of times, both tampered with alike."""
    records = dict(zip(("fairseq2_grid", "fairseq2_inductor"), of, strict=True))
    if tamper is None:
        return records
    return {name: lambda make=make: tamper(make(), *arguments) for name, make in records.items()}


def one(name, make, **changes):
    return {name: partial(make, **changes)}


without = partial(both, pd.DataFrame.query)
halves, compiled = "contender == 'RE reference'", "mode == 'compiled'"
large = partial(one, "fairseq2_inductor", inductor)


def tampered(tamper, *arguments):
    """The record of the large shape."""
    return {"fairseq2_inductor": lambda: tamper(inductor(), *arguments)}


def reorderings(where=None, **changes):
    rows = [
        {
            "batch": 4, "seq_len": 8192, "encoding_dim": 8192, "dtype": "float32",
            "variant": name, "status": "ok", "median_us": 100.0, "code": "a", "kernels": 3,
            "generated": "triton_a, triton_b", "generated_bytes": 1e9,
        }
        for name in measure.REORDERINGS
    ]  # fmt: skip
    return change(pd.DataFrame(rows), where, **changes)


CASES = [
    # claim, evidence, outcome
    ("FS-06", large(), HOLDS),
    ("FS-06", large(where=f"{halves} and {DTYPE}", kernels=1), HOLDS),  # beyond the document
    ("FS-06", large(where=halves, kernels=1), FAILS),
    ("FS-06", tampered(slower, halves, 0.5), FAILS),
    ("FS-06", tampered(slower, halves, 1 / 1.697), UNTOLD),
    ("FS-06", tampered(swapped, "RE llama", "RE reference"), FAILS),
    ("FS-06", tampered(pd.DataFrame.query, "dtype != 'float32'"), UNTOLD),
    ("FS-09", one("fairseq2_reorderings", reorderings), UNTOLD),  # the document shows no way of its own
    ("FS-11", both(), HOLDS),
    ("FS-11", both(slower, "contender == 'RRE llama'", 1.5), FAILS),
    ("FS-11", both(slower, f"contender == 'RRE llama' and {BACKWARD}", 1.5), HOLDS),  # beyond the document
    ("FS-11", both(swapped, "RE reference", "RRE llama"), FAILS),
    ("FS-11", without("contender != 'RE reference'"), UNTOLD),
    ("FS-15", large(), UNTOLD),  # milliseconds of a GPU that the document does not name
]  # fmt: skip


# ------------------------------------------------------------------------------------------------------ outcomes


def ledger_of(frames, only):
    """The ledger by these frames and by what a CPU computes; no record is read."""
    return ledger(frames, document="fairseq2", only=only, records=ROOT / "no records").set_index("id")


@pytest.mark.parametrize("code, expected", [("a", "holds"), ("b", "does not hold")])
def test_beyond_the_document_the_ways_to_reorder_are_compared(code, expected):
    frames = one("fairseq2_reorderings", reorderings, where="variant == 'unsqueeze, cat'", code=code)
    row = ledger_of({name: make() for name, make in frames.items()}, ["FS-09"]).loc["FS-09"]
    assert row.beyond.startswith(f"{expected}: ")


@pytest.mark.parametrize("frames, expected", [
    (large(), HOLDS), (tampered(slower, compiled, 1.2), LARGER), (tampered(slower, halves, 8), LARGER),
    (tampered(swapped, "RE llama", "RE reference"), FAILS),
])  # fmt: skip
def test_beyond_the_document_the_milliseconds_of_the_reordering_are_compared(frames, expected):
    beyond = ledger_of({name: make() for name, make in frames.items()}, ["FS-15"]).loc["FS-15", "beyond"]
    assert beyond.startswith(expected) and "times the effect" not in beyond


@pytest.mark.parametrize("claim, frames, expected", CASES, ids=[f"{n}-{case[0]}" for n, case in enumerate(CASES)])
def test_the_outcome_follows_the_evidence(claim, frames, expected):
    row = ledger_of({name: make() for name, make in frames.items()}, [claim]).loc[claim]
    assert row.outcome == expected, (row.words, row.measured, row.needs)


# ------------------------------------------------------------------------------------------------------- the log


def test_the_log_is_complete():
    found = evidence.log()
    sizes = found.groupby("contender").size()
    assert sizes.to_dict() == dict.fromkeys(NAMES, 54)
    cells = found.drop_duplicates(evidence.CELL)
    assert set(cells["mode"]) == {"eager", "compiled"} and len(cells) == 54
    shapes = set(zip(cells.seq_len, cells.batch, cells.encoding_dim, strict=True))
    assert shapes == {(c.seq_len, c.batch, c.encoding_dim) for c in measure.GRID}


def test_the_printed_ratios_follow_from_the_printed_times():
    """The ratios agree as far as times with one decimal and ratios with two decimals can show."""
    found = pd.read_csv(evidence.LOG)
    for impl in ("llama", "reference"):
        over, under = found[f"rre_{impl}_ms"], found[f"re_{impl}_ms"]
        stated = found[f"stated_rre_over_re_{impl}"]
        assert (stated >= (over - 0.05) / (under + 0.05) - 0.005).all()
        assert (stated <= (over + 0.05) / (under - 0.05) + 0.005).all()


def test_what_the_log_does_not_say():
    """Compiling makes RotaryEncoder slower, in every cell, and all others faster from a millisecond on."""
    times = evidence.log().pivot_table(index=evidence.CELL[1:] + ["contender"], columns="mode", values="ms")
    ratio = (times.compiled / times.eager).unstack("contender")
    assert (ratio["RE llama"] > 1.5).all()
    assert (ratio["RRE llama"] < 0.6).all()


def test_ratios_of_a_log_and_of_a_record():
    columns = [*findings.SHAPE, "mode", "direction", "contender", "median_us"]
    found = evidence.ratios(of_two_shapes()[columns], "median_us")
    native = found[(found["mode"] == "compiled") & (found.ratio == "native")]
    assert len(native) == 4 and native.times.round(3).eq(1.12).all()


# -------------------------------------------------------------------------------------------------- what is measured


@pytest.mark.parametrize("fault", [1e-5, float("nan")])
def test_the_check_sees_small_errors(monkeypatch, fault):
    monkeypatch.setattr(measure, "proposed", lambda: Encoders("ours", {}, BatchLayout))
    monkeypatch.setattr(measure, "_device", lambda: torch.device("cpu"))
    right = KernelRotaryEncoder(16, 16, impl="llama")

    def almost(seqs, layout):
        y = right(seqs, layout).clone()
        y[1, 2, 3] += fault
        return y

    (call,) = measure._calls(measure.Cell(2, 5, 16), "forward", 1)
    assert measure._check(call, right, "interleaved", inverse=False) == "ok"
    assert measure._check(call, almost, "interleaved", inverse=False).startswith("wrong")


def with_kernel(frame):
    """The record with our kernel in both layouts as well, at 5 µs."""
    one = frame[(frame["mode"] == "compiled") & frame.contender.isin(NAMES[:2])]
    names = "ropelab " + one.contender.str.split().str[1].where(one.contender == NAMES[0], "reference")
    kernel = one.assign(mode="kernel", contender=names, median_us=5.0)
    return pd.concat([frame, kernel], ignore_index=True)


def test_figures_say_what_the_record_says():
    record = with_kernel(of_two_shapes())
    over = findings.over_ropelab(record)
    fastest = record[(record.direction == "forward") & (record["mode"] != "kernel")].median_us.min()
    assert over["median"].is_monotonic_increasing and over.least.min() == pytest.approx(fastest / 5)
    assert states(said(figures.of_a_copy(record)), 0.45, 0.50)
    ratios = findings.ratios_sentence(record)
    assert all(states(ratios, *pair) for pair in ((5.00, 5.43), (1.12, 1.12), (1.00, 1.87)))
    assert states(said(figures.memory_and_kernels(with_kernel(at_a_millisecond()))), 2.0, 2.0)


CODE = """
triton_a_0 = async_compile.triton('triton_a_0', '''
@triton_heuristics.pointwise(inductor_meta={'kernel_num_gb': 1.5, 'mutated_arg_names': []})
@triton.jit
def triton_a_0(in_ptr0, out_ptr0, xnumel):
    x0 = 1  # a comment

def call(args):
    with torch.cuda._DeviceGuard(0):
        triton_a_0.run(*args, stream=stream0)
''', device_str='cuda')
triton_b_1 = async_compile.triton('triton_b_1', '''
@triton_heuristics.pointwise(inductor_meta={'kernel_num_gb': 5e-01})
@triton.jit
def triton_b_1(in_ptr0, out_ptr0, xnumel):
    x0 = 2

def call(args):
    with torch.cuda._DeviceGuard(0):
        triton_b_1.run(*args, stream=stream0)
''', device_str='cuda')
def call(args):
        buf1 = torch.ops.aten.view_as_complex.default(buf0)
        buf2 = torch.ops.aten.mul.Tensor(buf1, buf5)
        triton_a_0.run(arg0_1, buf0, 8388608, stream=stream0)
        triton_b_1.run(buf0, buf3, 8388608, stream=stream0)
"""


def test_generated_code_is_read():
    """Sources launch their kernel too, to be timed alone; only the wrapper's launches count."""
    found = measure.read_code([CODE])
    assert found["generated"] == "triton_a_0, triton_b_1"
    assert found["fallbacks"] == "mul"
    assert found["generated_bytes"] == 2e9
    renamed = CODE.replace("triton_a_0", "triton_z_0").replace("a comment", "another")
    assert measure.read_code([renamed])["code"] == found["code"]
    assert measure.read_code([CODE.replace("x0 = 2", "x0 = 3")])["code"] != found["code"]


@pytest.mark.parametrize(
    "reached, cache, expected",
    [(0.67, 8e6, "every batch reads"), (0.88, 8e6, "share"), (0.67, 9e6, "the copy reads no tables")],
)
def test_who_reads_the_tables(reached, cache, expected):
    """Four batches leave 8/9 of a copy if they share tables as large as one of them, and 2/3 if each reads them."""
    record = with_kernel(of_two_shapes()).assign(fraction_of_copy=reached)
    found = findings.of_a_copy(record)
    four = found[found.batch == 4]
    assert four.tables_bytes.eq(2048 * 1024 * 4).all()
    assert four.once.round(6).eq(round(8 / 9, 6)).all() and four.each_batch.round(6).eq(round(2 / 3, 6)).all()
    halves = findings.of_a_copy(record.assign(dtype="bfloat16"))
    assert halves.each_batch.eq(0.5).all()
    text = findings.wide_heads(record, at_a_millisecond(), cache)
    assert states(text, reached, 4) and expected in text
    halves = with_kernel(at_a_millisecond().assign(dtype="bfloat16", fraction_of_copy=0.6))
    assert states(findings.wide_heads(record, halves, cache), 0.60, 0.50)


def test_what_is_generated_is_what_runs():
    """Inductor's code and the profiler show the same kernels, each as often."""
    for name, gpu in product(("inductor", "reorderings"), gpus()):
        frame = recorded(name, gpu)
        frame = frame[(frame.status == "ok") & frame.generated_bytes.notna()]
        assert len(frame)
        for row in frame.fillna({"generated": ""}).itertuples():
            launched = [name for name in row.launched.split("; ") if name.startswith("triton_")]
            assert launched == [measure._short(name) for name in row.generated.split(", ") if name], row


def test_two_timings_of_the_same_kernels():
    """All timings count, of the grid and of the large cell, eager and compiled, unless other kernels run."""
    times = of_two_shapes(compiled=(10.5, 11.2, 17, 11.2)), at_a_millisecond(900)
    same = findings.same_kernels(*times)
    assert len(same) == 2 * (2 + 1)
    assert findings.apart(same) == pytest.approx(1000 / 900 - 1)
    assert findings.apart(same, how="mean") == pytest.approx((2 * 1.05 + 1000 / 900) / 3 - 1)
    others = change(times[1], "mode == 'compiled' and direction == 'forward'", launched="triton_mul")
    assert set(findings.same_kernels(times[0], others).direction) == {"forward and backward"}
    assert findings.apart(findings.same_kernels(times[0], others)) == 0


@pytest.mark.process
@pytest.mark.gpu
def test_the_gpu_evidence_runs():
    torch.use_deterministic_algorithms(False)  # which would fill fresh memory, in launches of its own
    timed = {name: study for name, study in STUDIES.items() if study.timed}
    frames = {name: study(smoke=True) for name, study in timed.items()}
    for name, frame in frames.items():
        assert (frame.status == "ok").all(), (name, frame[frame.status != "ok"])
    assert all(frame.median_us.notna().all() for name, frame in frames.items())


def test_the_kernel_is_beside_the_fastest_implementation_and_a_copy_is_none():
    shape = {"batch": 1, "seq_len": 2, "encoding_dim": 4, "direction": "forward", "dtype": "float32", "status": "ok"}
    times = {("kernel", "ropelab llama"): 2.0, ("kernel", "ropelab reference"): 2.5, ("eager", "RE llama"): 3.0,
             ("compiled", "RRE reference"): 4.0, ("eager", "copy: a kernel"): 1.0}  # fmt: skip
    rows = [shape | {"mode": mode, "contender": name, "median_us": us} for (mode, name), us in times.items()]
    assert states(findings.fastest_sentence(pd.DataFrame(rows), None), 1.20, 1.20, 1, 1.20)
