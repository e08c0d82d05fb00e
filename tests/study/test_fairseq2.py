"""fairseq2#1213: the log, the measurements, and evidence that moves the outcomes of its rules."""

from functools import partial
from itertools import product
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

from ropelab.bench.records import ROOT, gpus, load
from ropelab.interop.fairseq2 import BatchLayout, KernelRotaryEncoder
from ropelab.study.documents import fairseq2
from ropelab.study.engine.claims import typed
from ropelab.study.engine.ledger import ledger
from ropelab.study.engine.verdict import Outcome
from tests.site.cells import run
from tests.study.conftest import slower
from tests.study.sentences import states
from tests.support import change

HOLDS, LARGER, SMALLER, SOME_CELLS, FAILS, UNTOLD = Outcome
NAMES = fairseq2.IMPLEMENTATIONS
DTYPE, BACKWARD = "dtype == 'bfloat16'", "direction == 'forward and backward'"

# Times in any unit, of NAMES, with every ratio as the document states it.
COMPILED = (10.0, 10 / 0.86, 11.2 / 0.66, 11.2)
EAGER = (10 / 1.87, 10 / 1.87 * 5.43, 20.0, 20 * 1.16)
FOUR_MS = 4000 / (COMPILED[2] - COMPILED[0])
"""The unit, in microseconds, in which RE takes 4 ms longer in halves than in pairs."""


def grid(eager=EAGER, compiled=COMPILED, shapes=tuple(cell.shape for cell in fairseq2.GRID)):
    """A record as fairseq2.grid() makes it, with these times of ``NAMES`` in every cell."""
    return pd.DataFrame(
        [
            {
                "batch": batch, "seq_len": seq_len, "encoding_dim": encoding_dim, "dtype": "float32",
                "direction": direction, "mode": mode, "contender": name, "status": "ok", "median_us": us,
                "fraction_of_copy": 5 / us,
            }
            for batch, seq_len, encoding_dim in shapes
            for direction in fairseq2.DIRECTIONS
            for mode, times in (("eager", eager), ("compiled", compiled))
            for name, us in zip(NAMES, times, strict=True)
        ]
    )  # fmt: skip


def of_two_shapes(eager=(10, 50, 40, 42), compiled=(10, 11.2, 17, 11.2)):
    """A small grid for figures."""
    return grid(eager, compiled, [(1, 2048, 1024), (4, 2048, 1024)])


def inductor(where=None, **changes):
    """A record as fairseq2.inductor() makes it: as the document has it, with equal tables."""
    rows = [
        {
            "batch": 4, "seq_len": 8192, "encoding_dim": 8192, "dtype": dtype, "direction": direction,
            "mode": mode, "contender": name, "status": "ok", "median_us": us * FOUR_MS * passes,
            "fraction_of_copy": 0.3, "kernels": passes * (3 if name == "RE reference" else 1),
            "generated": None if name == "RE llama" else "triton_a, triton_b",
            "fallbacks": "mul" if name.startswith("RE ") else None, "complex_warning": name.startswith("RE "),
            "launched": {"RE llama": "mul", "RE reference": "triton_a; mul; triton_b"}.get(name, "triton_c"),
            "peak_bytes": 2**31, "result_bytes": 2**30, "state_bytes": 2**28, "code": f"code of {name}",
            "generated_bytes": 1e9, "warnings": None,
        }
        for dtype in ("float32", "bfloat16")
        for direction, passes in zip(fairseq2.DIRECTIONS, (1, 2), strict=True)
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
        for name in fairseq2.REORDERINGS
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


LOG = typed("fairseq2_log").frame


def test_the_log_is_complete():
    cells = LOG.drop_duplicates(["mode", *fairseq2.SHAPE])
    assert set(cells["mode"]) == {"eager", "compiled"} and len(cells) == len(LOG) == 54 and LOG.notna().all(axis=None)
    assert set(map(tuple, LOG[fairseq2.SHAPE].values.tolist())) == {cell.shape for cell in fairseq2.GRID}


def test_the_printed_ratios_follow_from_the_printed_times():
    """The ratios agree as far as times with one decimal and ratios with two decimals can show."""
    for impl in ("llama", "reference"):
        over, under = LOG[f"rre_{impl}_ms"], LOG[f"re_{impl}_ms"]
        stated = LOG[f"stated_rre_over_re_{impl}"]
        assert (stated >= (over - 0.05) / (under + 0.05) - 0.005).all()
        assert (stated <= (over + 0.05) / (under - 0.05) + 0.005).all()


def test_what_the_log_does_not_say():
    """Compiling makes RotaryEncoder slower, in every cell, and all others faster from a millisecond on."""
    eager, compiled = (LOG[LOG["mode"] == mode].set_index(fairseq2.SHAPE) for mode in ("eager", "compiled"))
    assert (compiled.re_llama_ms / eager.re_llama_ms > 1.5).all()
    assert (compiled.rre_llama_ms / eager.rre_llama_ms < 0.6).all()


# -------------------------------------------------------------------------------------------------- what is measured


@pytest.mark.parametrize("fault", [1e-5, float("nan")])
def test_the_check_sees_small_errors(monkeypatch, fault):
    monkeypatch.setattr(fairseq2, "proposed", lambda: SimpleNamespace(BatchLayout=BatchLayout))
    monkeypatch.setattr(fairseq2, "_device", lambda: torch.device("cpu"))
    right = KernelRotaryEncoder(16, 16, impl="llama")

    def almost(seqs, layout):
        y = right(seqs, layout).clone()
        y[1, 2, 3] += fault
        return y

    (call,) = fairseq2._calls(fairseq2.Cell(2, 5, 16), "forward", 1)
    assert fairseq2._check(call, right, "interleaved", inverse=False) == "ok"
    assert fairseq2._check(call, almost, "interleaved", inverse=False).startswith("wrong")


def with_kernel(frame):
    """The record with our kernel in both layouts as well, at 5 µs."""
    one = frame[(frame["mode"] == "compiled") & frame.contender.isin(NAMES[:2])]
    names = "ropelab " + one.contender.str.split().str[1].where(one.contender == NAMES[0], "reference")
    kernel = one.assign(mode="kernel", contender=names, median_us=5.0)
    return pd.concat([frame, kernel], ignore_index=True)


def in_the_chapter(monkeypatch, *cells, grid=None, inductor=None, cache=8e6):
    """The names that these cells of the chapter leave, on records made up here."""
    about = {"gpu": {"l2_bytes": cache}, "torch": "2.11"}
    grid, inductor = (
        None if frame is None else SimpleNamespace(frame=frame, provenance=about) for frame in (grid, inductor)
    )
    return run(monkeypatch, "12", *cells, instead={"grid": grid, "inductor": inductor})


def test_the_chapter_says_what_the_records_say(monkeypatch):
    record = with_kernel(of_two_shapes())
    names = in_the_chapter(monkeypatch, "log", "over", "ratios", "memory", grid=record, inductor=at_a_millisecond())
    fastest = record[(record.direction == "forward") & (record["mode"] != "kernel")].median_us.min()
    assert names.over["median"].is_monotonic_increasing and names.over["min"].min() == pytest.approx(fastest / 5)
    assert states(names.told, 5.00, 5.43) and states(names.told, 1.12, 1.12) and states(names.told, 1.00, 1.87)
    native = names.long[(names.long["mode"] == "compiled") & names.long.whose.str.startswith("here")]
    native = native[native.ratio == "native"].times
    assert len(native) == 4 and native.round(3).eq(1.12).all()
    with_peaks = in_the_chapter(monkeypatch, "memory", inductor=with_kernel(at_a_millisecond()))
    assert states(with_peaks.findings_shown[0], 2.0, 2.0, 2.0)


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
    found = fairseq2.read_code([CODE])
    assert found["generated"] == "triton_a_0, triton_b_1"
    assert found["fallbacks"] == "mul"
    assert found["generated_bytes"] == 2e9
    renamed = CODE.replace("triton_a_0", "triton_z_0").replace("a comment", "another")
    assert fairseq2.read_code([renamed])["code"] == found["code"]
    assert fairseq2.read_code([CODE.replace("x0 = 2", "x0 = 3")])["code"] != found["code"]


@pytest.mark.parametrize(
    "reached, cache, expected",
    [(0.67, 8e6, "every batch reads"), (0.88, 8e6, "share"), (0.67, 9e6, "the copy reads no tables")],
)
def test_who_reads_the_tables(reached, cache, expected, monkeypatch):
    """Four batches leave 8/9 of a copy if they share tables as large as one of them, and 2/3 if each reads them."""
    record = with_kernel(of_two_shapes()).assign(fraction_of_copy=reached)
    halves = with_kernel(at_a_millisecond().assign(dtype="bfloat16", fraction_of_copy=0.6))
    names = in_the_chapter(monkeypatch, "picture", "bytes-of", "wide-heads", grid=record, inductor=halves, cache=cache)
    four = names.of_a_copy(record).query("batch == 4")
    assert four.tables.eq(2048 * 1024 * 4).all()
    assert four.once.round(6).eq(round(8 / 9, 6)).all() and four.each.round(6).eq(round(2 / 3, 6)).all()
    assert names.of_a_copy(record.assign(dtype="bfloat16")).each.eq(0.5).all()
    assert states(names.told, reached, 4, 0.60, 0.50) and expected in names.told


def test_what_is_generated_is_what_runs():
    """Inductor's code and the profiler show the same kernels, each as often."""
    for name, gpu in product(("inductor", "reorderings"), gpus()):
        frame = recorded(name, gpu)
        frame = frame[(frame.status == "ok") & frame.generated_bytes.notna()]
        assert len(frame)
        for row in frame.fillna({"generated": ""}).itertuples():
            launched = [name for name in row.launched.split("; ") if name.startswith("triton_")]
            assert launched == [fairseq2._short(name) for name in row.generated.split(", ") if name], row


def test_two_timings_of_the_same_kernels(monkeypatch):
    """All timings count, of the grid and of the large cell, eager and compiled, unless other kernels run."""
    record, large = with_kernel(of_two_shapes(compiled=(10.5, 11.2, 17, 11.2))), at_a_millisecond(900)
    names = in_the_chapter(monkeypatch, "over", grid=record, inductor=large)
    assert len(names.twice) == 2 * (2 + 1)
    assert names.apart.to_dict() == pytest.approx(dict.fromkeys(fairseq2.DIRECTIONS, 1000 / 900 - 1))
    others = change(large, "mode == 'compiled' and direction == 'forward'", launched="triton_mul")
    names = in_the_chapter(monkeypatch, "over", grid=record, inductor=others)
    assert set(names.apart.index) == {"forward and backward"}


@pytest.mark.process
@pytest.mark.gpu
def test_the_gpu_evidence_runs():
    torch.use_deterministic_algorithms(False)  # which would fill fresh memory, in launches of its own
    timed = {name: study for name, study in fairseq2.STUDIES.items() if study.timed}
    frames = {name: study(smoke=True) for name, study in timed.items()}
    for name, frame in frames.items():
        assert (frame.status == "ok").all(), (name, frame[frame.status != "ok"])
    assert all(frame.median_us.notna().all() for name, frame in frames.items())


def test_the_kernel_is_beside_the_fastest_implementation_and_a_copy_is_none(monkeypatch):
    shape = {"batch": 1, "seq_len": 2, "encoding_dim": 4, "direction": "forward", "dtype": "float32", "status": "ok"}
    times = {("kernel", "ropelab llama"): 2.0, ("kernel", "ropelab reference"): 2.5, ("eager", "RE llama"): 3.0,
             ("eager", "copy: a kernel"): 1.0} | {("compiled", name): 4.0 for name in NAMES}  # fmt: skip
    rows = [shape | {"mode": mode, "contender": name, "median_us": us} for (mode, name), us in times.items()]
    names = in_the_chapter(monkeypatch, "over", grid=pd.DataFrame(rows))
    assert states(names.told, 1.20, 1.20, 1, 1.20)
