"""Claims DS-01 to DS-12: the function under study, and evidence that moves every verdict."""

import functools

import pandas as pd
import pytest
import torch

from ropelab import reference, rotary_table
from ropelab.bench import timing
from ropelab.bench.packages import installations as packages_at_hand
from ropelab.study.deepspeed import callers, dispatch, evidence, figures, measure, rules
from ropelab.study.engine.ledger import ledger
from ropelab.study.engine.verdict import Status
from tests.support import change

CONFIRMED, REFUTED, CORRECTED, NOT_TESTABLE = Status


def correctness(**changes):
    """A record as measure.correctness() makes it, all well but for the backward of 0.3.0."""
    rows = [
        {
            "version": version,
            "device": "cuda",
            "seq_len": seq_len,
            "dtype": "float32",
            "table_dtype": "float32",
            "table": "whole",
            "outcome": "ran",
            "formula_dtype": "float32",
            "formula_error": 4e-8,
            "formula_gradient_error": 4e-8,
            "wrong_backward_error": 0.0 if seq_len == 1 else 0.7,
            "result_dtype": "float32",
            "forward_error": 4e-8,
            "gradient_error": 0.7 if version == "0.3.0" and seq_len > 1 else 4e-8,
            "norm_ratio": 1.0,
        }
        for version in ("0.3.0", "0.3.2")
        for seq_len in (1, 8, 128)
    ]
    return change(pd.DataFrame(rows), **changes)


def packages(**ships):
    return pd.DataFrame(
        [
            {"version": version.replace("_", ".").lstrip("v"), "has_triton_module": has}
            for version, has in ({"v0_2_4": False, "v0_3_0": True} | ships).items()
        ]
    )


def table(torchembed_us=100.0, eager_us=450.0, compile_us=200.0):
    return pd.DataFrame(
        [
            {
                "seq_len": seq_len,
                "dtype": dtype,
                "direction": "forward",
                "contender": contender,
                "status": "ok",
                "median_us": us * seq_len / 2048,
                "fraction_of_copy": 50 / us,
            }
            for seq_len in (2048, 4096, 8192)
            for dtype in ("float32", "bfloat16")
            for contender, us in (
                (rules.TORCHEMBED, torchembed_us),
                (rules.EAGER, eager_us),
                (rules.COMPILED, compile_us),
            )
        ]
    )


def launches(**changes):
    rows = [
        {
            "path": path,
            "input": "a tensor",
            "launches": 1,
            "tensor_bytes": 100,
            "extra_bytes": 0,
            "fraction_of_copy": 0.5,
        }
        for path in ("raw kernel", "DeepSpeed API")
    ]
    return change(pd.DataFrame(rows), **changes)


def inductor(**changes):
    rows = [
        {
            "dtype": dtype,
            "direction": direction,
            "kernels": 1,
            "buffers": 1,
            "result_buffers": 1,
            "fraction_of_copy": 0.6,
        }
        for dtype in ("float32", "bfloat16")
        for direction in ("forward", "backward")
    ]
    return change(pd.DataFrame(rows), **changes)


dispatched = functools.cache(evidence.dispatch)  # Triton's interpreter takes its time
WRONG_AXIS = "version == 'first' and in_tree and tokens > 1"
CASES = [
    # claim, evidence, what it says, verdict: tests/test_verdicts.py judges them
    ("DS-01", "deepspeed_correctness", correctness, CONFIRMED),
    (
        "DS-01",
        "deepspeed_correctness",
        lambda: correctness(where="seq_len == 8", forward_error=1e-6),
        REFUTED,
    ),
    (
        "DS-01",
        "deepspeed_correctness",
        lambda: correctness(where="seq_len == 8", outcome="RuntimeError"),
        CORRECTED,
    ),
    ("DS-01", "deepspeed_correctness", lambda: correctness(result_dtype="float16"), CORRECTED),
    ("DS-02", "deepspeed_dispatch", dispatched, REFUTED),
    ("DS-02", "deepspeed_dispatch", lambda: change(dispatched(), outcome="equal"), CONFIRMED),
    ("DS-03", "deepspeed_packages", packages, CONFIRMED),
    ("DS-03", "deepspeed_packages", lambda: packages(v0_3_1=False), REFUTED),
    ("DS-03", "deepspeed_packages", lambda: packages().iloc[1:], NOT_TESTABLE),
    ("DS-04", "deepspeed_tests", evidence.tests, CORRECTED),
    ("DS-04", "deepspeed_tests", lambda: change(evidence.tests(), reaches_kernel=True), CONFIRMED),
    ("DS-04", "deepspeed_tests", lambda: change(evidence.tests(), "tokens == 17", broadcasts=True), REFUTED),
    ("DS-05", "deepspeed_dispatch", dispatched, CORRECTED),
    (
        "DS-05",
        "deepspeed_dispatch",
        lambda: change(dispatched(), WRONG_AXIS, outcome="equal"),
        REFUTED,
    ),
    (
        "DS-05",
        "deepspeed_dispatch",
        lambda: change(dispatched(), "in_tree", outcome="different"),
        CORRECTED,
    ),
    ("DS-06", "deepspeed_dispatch", dispatched, CORRECTED),
    (
        "DS-06",
        "deepspeed_dispatch",
        lambda: change(dispatched(), "in_tree", outcome="different"),
        REFUTED,
    ),
    (
        "DS-06",
        "deepspeed_dispatch",
        lambda: change(dispatched(), outcome="equal", gate_open=True),
        CONFIRMED,
    ),
    ("DS-07", "deepspeed_table", table, CONFIRMED),
    ("DS-07", "deepspeed_table", lambda: table(eager_us=300.0), CORRECTED),
    ("DS-07", "deepspeed_table", lambda: table(eager_us=90.0), REFUTED),
    ("DS-07", "deepspeed_table", lambda: table().query("contender != @rules.EAGER"), NOT_TESTABLE),
    ("DS-08", "deepspeed_table", table, CONFIRMED),
    ("DS-08", "deepspeed_table", lambda: table(compile_us=130.0), CORRECTED),
    ("DS-08", "deepspeed_table", lambda: table(compile_us=40.0), REFUTED),
    ("DS-08", "deepspeed_table", lambda: table().query("seq_len < 8192"), NOT_TESTABLE),
    ("DS-09", "deepspeed_inductor", inductor, REFUTED),
    ("DS-09", "deepspeed_inductor", lambda: inductor(buffers=3), CONFIRMED),
    ("DS-09", "deepspeed_inductor", lambda: inductor(where="direction == 'backward'", kernels=2), CORRECTED),
    ("DS-10", "deepspeed_launches", launches, CONFIRMED),
    ("DS-10", "deepspeed_launches", lambda: launches(where="path == 'DeepSpeed API'", launches=4), CORRECTED),
    ("DS-10", "deepspeed_launches", lambda: launches(extra_bytes=100), REFUTED),
    ("DS-11", "deepspeed_fallback", evidence.fallback, CORRECTED),
    ("DS-11", "deepspeed_fallback", lambda: change(evidence.fallback(), outcome="equal"), CONFIRMED),
    (
        "DS-11",
        "deepspeed_fallback",
        lambda: change(evidence.fallback(), outcome="raises ImportError"),
        REFUTED,
    ),
    ("DS-12", "deepspeed_correctness", lambda: correctness().query("version == '0.3.0'"), CONFIRMED),
    ("DS-12", "deepspeed_correctness", correctness, CORRECTED),
    ("DS-12", "deepspeed_correctness", lambda: correctness(gradient_error=4e-8), REFUTED),
    ("DS-12", "deepspeed_correctness", lambda: correctness().query("version != '0.3.0'"), NOT_TESTABLE),
]


def test_the_published_ratios_follow_from_the_published_times():
    published = evidence.published()
    assert (published.over_eager.round(1) == published.stated_speedup).all()


def test_the_formula_is_the_definition():
    t = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    cos, sin = rotary_table(5, 6, dtype=torch.float64)
    wide = [torch.cat((half, half), -1)[None, :, None] for half in (cos, sin)]
    torch.testing.assert_close(dispatch.formula(t, *wide), reference.rotate(t, cos, sin))


def test_the_formula_promotes_and_the_kernel_does_not():
    t, table = torch.zeros(5, 8, dtype=torch.float16), torch.zeros(5, 8)
    assert dispatch.formula(t, table, table).dtype == torch.float32
    assert dispatch.kernel_contract(t, t, table, table)[0].dtype == torch.float16


@pytest.mark.parametrize("caller, in_tree, t_shape, table_shape", evidence.CALLERS)
def test_the_gate_looks_at_the_leading_axis_only(caller, in_tree, t_shape, table_shape):
    gate = dispatch.merged_gate(torch.empty(t_shape), torch.empty(table_shape))
    assert gate == (t_shape[0] == table_shape[0] == torch.Size(table_shape[:-1]).numel())


@pytest.mark.skipif(
    not packages_at_hand("deepspeed"), reason="DeepSpeed's source is not under build/peers: run make peers"
)
@pytest.mark.parametrize("caller, in_tree, t_shape, table_shape", evidence.CALLERS)
def test_our_model_is_the_merged_code(caller, in_tree, t_shape, table_shape):
    merged, code = dispatch.merged_function()
    assert "own source" in code
    t = torch.randn(t_shape, dtype=torch.float64)
    tables = evidence._tables(table_shape)
    ours, theirs = (evidence._attempt(function, t, *tables) for function in (dispatch.merged_dispatch, merged))
    assert evidence._compare(theirs, ours)["outcome"] == "equal"


def test_generated_code_is_counted():
    code = """
    def call(args):
        buf0 = empty_strided_cuda((1, 32, 4096, 64), (1, 1, 1, 1), torch.bfloat16)
        triton_poi_fused_neg_0.run(arg0_1, buf0, 8388608, stream=stream0)
        buf1 = empty_strided_cuda((1, 32, 4096, 128), (1, 1, 1, 1), torch.bfloat16)
        extern_kernels.mm(buf0, arg1_1, out=buf1)
        triton_poi_fused_add_mul_1.run(arg0_1, buf0, buf1, 16777216, stream=stream0)
    """
    assert measure.generated(code) == {
        "kernels": 3,
        "buffers": 2,
        "names": "triton_poi_fused_neg_0, triton_poi_fused_add_mul_1, extern_kernels.mm",
    }


# --------------------------------------------------------------------------------------------- the callers

TINY = callers.Caller("tiny", (6, 2, 3, 8), (6, 1, 1, 8), dtype=torch.float32, table_dtype=torch.float32)


@pytest.fixture
def without_a_gpu(monkeypatch):
    """A timer that calls every contender once, and nothing that a GPU would have to count."""

    def gpu_times(contenders, rounds):
        rows = []
        for place, (name, prepare) in enumerate(contenders.items(), 1):
            for call in prepare():
                call()
            rows.append({"contender": name, "status": "ok", "median_us": float(place)})
        return pd.DataFrame(rows)

    monkeypatch.setattr(timing, "gpu_times", gpu_times)
    monkeypatch.setattr(callers, "kernel_names", lambda call: [type(call()).__name__])
    monkeypatch.setattr(callers, "peak_bytes", lambda call: 1000)
    monkeypatch.setattr(callers, "copies", lambda: {"copy: one": lambda tensors: [x.clone() for x in tensors]})


@pytest.mark.parametrize(
    "case", [TINY, callers.Caller("fpdt", (2, 6, 3, 8), (1, 6, 1, 8), True, torch.float32, torch.float32)], ids=str
)
def test_every_caller_is_checked_and_counted(without_a_gpu, case):
    frame = callers._case(case, "cpu", smoke=True)
    assert set(frame.contender) >= {callers.FORMULA, callers.OURS} and set(frame.direction) == {"forward", "backward"}
    right = frame[frame.contender.isin((callers.FORMULA, callers.OURS))]
    assert (right.status == "ok").all() and right.median_us.notna().all() and (right.launches == 1).all()
    torchembed = frame[frame.contender == callers.TORCHEMBED]
    assert (torchembed.gate_open == (case is TINY)).all() and not frame[
        frame.contender != callers.TORCHEMBED
    ].gate_open.any()
    assert (right.extra_bytes == 1000 - right.tensor_bytes).all()


def test_a_wrong_function_is_not_timed():
    t, g = torch.randn(2, *TINY.t)
    tables = callers.caller_tables(TINY, "cpu")
    how = {"direction": "forward"}
    check = callers.checked
    assert check(dispatch.formula, TINY, t, g, tables, **how)["status"] == "ok"
    assert check(lambda t, c, s: dispatch.formula(t, c, -s), TINY, t, g, tables, **how)["status"].startswith(
        "wrong: rel"
    )
    assert "float64, the formula's float32" in check(lambda t, *_: t.double(), TINY, t, g, tables, **how)["status"]
    assert check(lambda t, *_: 1 / 0, TINY, t, g, tables, **how)["status"].startswith("failed: ZeroDivisionError")
    detached = callers.checked(lambda t, c, s: dispatch.formula(t, c, s).detach(), TINY, t, g, tables, "backward")
    assert detached["status"].startswith("failed: RuntimeError")


def test_the_cases_are_those_of_the_callers():
    cases = callers.cases()
    assert sum(case.in_tree for case in cases) == 3
    assert {torch.Size(case.t).numel() for case in cases} == {4096 * 32 * 128}
    for case in cases:
        torch.broadcast_shapes(case.t[:-1], case.tables[:-1])


# ---------------------------------------------------------------------------------------------- the figures


def caller_frame(ours_us=20.0):
    """A record as callers.callers() makes it."""
    rows = []
    for case in callers.cases():
        for direction in ("forward", "backward"):
            for name, us, launched in (
                (callers.TORCHEMBED, 200.0, 4),
                (callers.FORMULA, 220.0, 5),
                (callers.OURS, ours_us, 1),
            ):
                rows.append({
                    "caller": case.name, "in_tree": case.in_tree, "t": str(case.t), "tables": str(case.tables),
                    "dtype": str(case.dtype), "table_dtype": str(case.table_dtype), "direction": direction,
                    "contender": name, "status": "ok", "launches": launched, "tensor_bytes": 100, "extra_bytes": 100,
                    "median_us": us, "copy_us": 18.0, "fraction_of_copy": 18.0 / us,
                })  # fmt: skip
    return pd.DataFrame(rows)


def test_the_figures_say_what_the_records_say(tmp_path):
    for frame, phrase in (
        (caller_frame(), "ropelab launches 1 kernels where DeepSpeed with torchembed launches 4, and is 10.0 times"),
        (caller_frame(ours_us=400.0), "is 0.5 times as fast"),
        (
            change(caller_frame(), "contender == 'DeepSpeed with torchembed'", status="failed: it is absent"),
            "launches 1 kernels",
        ),
    ):
        fig = figures.callers(frame, "footer")
        assert phrase in fig.get_suptitle().replace("\n", " ")
        fig.savefig(tmp_path / "figure.png")
    for frame, phrase in (
        (correctness(), "torchembed 0.3.0 is off by up to 0.70 times its norm"),
        (correctness(gradient_error=4e-8), "of every version is right"),
    ):
        assert phrase in figures.gradients(frame).get_suptitle().replace("\n", " ")
    slow = launches(where="path == 'DeepSpeed API'", launches=4, extra_bytes=300).assign(
        median_us=[20.0, 60.0], copy_us=10.0
    )
    assert "3.0 times as long as alone: 4 launches, 3 tensors" in figures.paths(slow).get_suptitle().replace("\n", " ")
    figures.gates(dispatched()).savefig(tmp_path / "gates.png")


def test_the_figure_of_the_gate_counts():
    """0 of 3 after the merge; with ours, all."""
    title = figures.gates(dispatched()).get_suptitle().replace("\n", " ")
    assert "runs for 0 of 3 shapes of DeepSpeed's own callers after the merge, with ropelab for 3" in title
    assert "the merged one 3 and ropelab 0" in title
    wrong = change(dispatched(), "version == 'ropelab'", outcome="different")
    assert "ropelab 12" in figures.gates(wrong).get_suptitle()


def test_bytes_per_second_of_both_readings():
    timed = table().assign(**{"bytes": 2 * 32 * 2048 * 128 * 4})
    frame = evidence.bandwidths(timed).set_index(["where", "dtype", "contender", "seq_len"]).gb_s
    published = frame["published (GB10)"]
    assert (published["float32"] / published["bfloat16"]).to_list() == pytest.approx([2] * 9)
    assert published["bfloat16", "torchembed", 2048] == pytest.approx(4 * 32 * 2048 * 128 / 0.34e-3 / 1e9)
    assert frame["measured here", "float32", "torchembed", 2048] == pytest.approx(
        2 * 32 * 2048 * 128 * 4 / 100e-6 / 1e9
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_gpu_evidence_runs():
    if not packages_at_hand("torchembed"):
        pytest.skip("torchembed is not under build/peers: run make peers")
    frames = {
        "deepspeed_correctness": measure.correctness(),
        "deepspeed_launches": measure.launch_evidence(),
        "deepspeed_inductor": measure.inductor_evidence(),
    }
    assert (callers.callers(smoke=True).query("contender == @callers.OURS").status == "ok").all()
    found = ledger(frames, only=["DS-01", "DS-09", "DS-10", "DS-12"])
    assert not (found.verdict == NOT_TESTABLE).any()
