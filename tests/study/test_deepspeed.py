"""DeepSpeed#8052: the function under study, and evidence that moves the verdicts of its rules."""

import functools

import pandas as pd
import pytest
import torch

from ropelab import reference, rotary_table
from ropelab.bench import packages as at_hand
from ropelab.bench.records import MEASUREMENTS, Record, Selection, load
from ropelab.bench.unavailable import Unavailable
from ropelab.interop.broadcast import formula
from ropelab.study.documents import deepspeed
from ropelab.study.engine.claims import load_claims
from ropelab.study.engine.computed import Evidence
from ropelab.study.engine.ledger import ledger
from ropelab.study.engine.verdict import Outcome
from ropelab.study.shown import Shown
from tests.site.cells import run
from tests.study.sentences import states
from tests.support import change

H200 = Selection(MEASUREMENTS, "nvidia-h200")


@functools.cache
def record(name):
    return load(name, H200).frame


def changed(name, where=None, **changes):
    """Makes a copy of the committed record with new values in some rows."""
    return lambda: change(record(name), where, **changes)


def without(name, where):
    """Makes a copy of the committed record without some rows."""
    return lambda: record(name).query(f"not ({where})")


dispatched = functools.cache(deepspeed.dispatch)  # loading DeepSpeed's source takes its time
parametrised = functools.cache(deepspeed.tests)


def but(make, where=None, **changes):
    """Makes a copy of what `make` makes, with new values in some rows."""
    return lambda: change(make(), where, **changes)


def lacking(make, where):
    return lambda: make().query(f"not ({where})")


def packages(**ships):
    ships = {"v0_2_4": False, "v0_3_0": True, "v0_3_2": True} | ships
    rows = [(version.replace("_", ".").lstrip("v"), has) for version, has in ships.items() if has is not None]
    return lambda: pd.DataFrame(rows, columns=["version", "has_triton_module"])


def extra(requirement="torchembed>=0.3.0"):
    return lambda: pd.DataFrame(
        [{"release": "0.19.8", "requirement": requirement, "least": requirement.partition(">=")[2] or "0"}]
    )


def mutant(**changes):
    rows = [{"seq_len": n, "gradient_error": e, "wrong_backward_error": e, "norm_ratio": 1.0} | changes
            for n, e in ((1, 0.0), (8, 0.7), (128, 1.07))]  # fmt: skip
    return lambda: pd.DataFrame(rows)


HOLDS, _, _, SOME_CELLS, FAILS, UNTOLD = Outcome
CALLER = "caller.str.startswith('[b, h, s, d]') and contender == 'DeepSpeed without torchembed'"


def cases(claims, name, *rows, **besides):
    """Cases of claims on the evidence of one name; `besides` is further evidence for all of them."""
    return [(claim, {name: make} | besides, expected) for claim in claims.split() for make, expected in rows]


CASES = [
    # claim, evidence by name and what makes it, outcome
    *cases(
        "DS-01", "deepspeed_correctness",
        (changed("deepspeed_correctness"), HOLDS),
        (changed("deepspeed_correctness", "dtype != 'float32' or version != '0.3.0'", forward_error=0.1), HOLDS),
        (changed("deepspeed_correctness", "outcome == 'ran'", forward_error=0.1), FAILS),
        (changed("deepspeed_correctness", "outcome == 'ran'", result_dtype="float64"), FAILS),
        (changed("deepspeed_correctness", "seq_len > 1", forward_error=3e-7), SOME_CELLS),
        (without("deepspeed_correctness", "version == '0.3.0'"), UNTOLD),
        (without("deepspeed_correctness", "seq_len == 17"), UNTOLD),
        (without("deepspeed_correctness", "seq_len > 1 or dtype != 'float32'"), UNTOLD),
    ),
    *cases(
        "DS-03", "deepspeed_packages",
        (packages(), HOLDS),
        (changed("deepspeed_packages"), HOLDS),
        (packages(v0_3_0=False), FAILS),
        (packages(v0_2_4=True), FAILS),
        (packages(v0_2_5=True), FAILS),  # then 0.3.0 is not the first
        (packages(v0_2_4=None), UNTOLD),
        (packages(v0_3_0=None), UNTOLD),
    ),
    *cases(
        "DS-04", "deepspeed_tests",
        (parametrised, HOLDS),
        (but(parametrised, reaches_kernel=True), HOLDS),
        (but(parametrised, "tokens == 17", broadcasts=True), FAILS),
        (but(parametrised, "version == 'fixed' and tokens == 17", passes=False), FAILS),
        (lacking(parametrised, "tokens == 128"), FAILS),  # then the counts are others
        (lacking(parametrised, "version == 'fixed'"), UNTOLD),
    ),
    *cases(
        "DS-05", "deepspeed_dispatch",
        (dispatched, HOLDS),
        (but(dispatched, "version == 'first'", outcome="equal"), FAILS),
        (but(dispatched, "version == 'first'", kernel_tokens=5), FAILS),  # then along the tokens
        (but(dispatched, "version == 'first' and caller.str.endswith('one sequence')", outcome="equal"), FAILS),
        (but(dispatched, "version == 'merged' and in_tree", outcome="different"), FAILS),
        (lacking(dispatched, "version == 'first'"), UNTOLD),
    ),
    *cases(
        "DS-12", "deepspeed_correctness",
        (changed("deepspeed_correctness"), HOLDS),
        (without("deepspeed_correctness", "version != '0.3.0'"), HOLDS),
        (changed("deepspeed_correctness", "version == '0.3.0'", gradient_error=4e-8), FAILS),
        (changed("deepspeed_correctness", "version == '0.3.0'", norm_ratio=2.0), FAILS),
        (changed("deepspeed_correctness", "version == '0.3.0' and dtype == 'float32'", norm_ratio=1.001), FAILS),
        (changed("deepspeed_correctness", "version == '0.3.0' and seq_len == 128", gradient_error=1.1), FAILS),
        (without("deepspeed_correctness", "version == '0.3.0'"), UNTOLD),
        wrong_backward=mutant(),
    ),
    *cases("DS-12", "wrong_backward", (deepspeed.wrong_backward, HOLDS), (mutant(gradient_error=4e-8), UNTOLD),
           (mutant(norm_ratio=2.0), UNTOLD), deepspeed_correctness=changed("deepspeed_correctness")),
    *cases(
        "DS-13", "deepspeed_extra",
        (extra(), HOLDS), (extra("torchembed>=0.3.1"), HOLDS),
        (extra("torchembed"), FAILS), (extra("torchembed>=0.2.4"), FAILS), (extra(""), FAILS),
        deepspeed_packages=packages(),
    ),
    *cases("DS-13", "deepspeed_packages", (packages(v0_3_1=False), FAILS), (packages(v0_2_4=None), UNTOLD),
           (packages(v0_3_0=None, v0_3_2=None), UNTOLD), deepspeed_extra=extra()),
    *cases(
        "DS-16", "deepspeed_inductor",
        (changed("deepspeed_inductor"), HOLDS),
        (changed("deepspeed_inductor", kernels=5), FAILS),
        (changed("deepspeed_inductor", "direction == 'backward'", kernels=9), FAILS),
        (without("deepspeed_inductor", "dtype == 'bfloat16'"), UNTOLD),
        deepspeed_callers=changed("deepspeed_callers"),
    ),
    *cases("DS-16", "deepspeed_callers", (changed("deepspeed_callers", CALLER, launches=1), FAILS),
           (without("deepspeed_callers", CALLER), UNTOLD), deepspeed_inductor=changed("deepspeed_inductor")),
]  # fmt: skip

NEEDS_PEERS = {"DS-04", "DS-05"}


@pytest.fixture
def published():
    """DeepSpeed, the first commit of its pull request and torchembed; without one of them a test is skipped by name."""
    return at_hand.locate("deepspeed"), at_hand.locate("torchembed"), deepspeed.first_source()


def marked(claim):
    return [pytest.mark.peers] if claim in NEEDS_PEERS else []


@pytest.mark.parametrize(
    "claim, given, expected",
    [pytest.param(*case, id=f"{case[0]}-{n}", marks=marked(case[0])) for n, case in enumerate(CASES)],
)
def test_evidence_decides_the_verdict(claim, given, expected, tmp_path, request):
    """Without a record, the given evidence decides, and only missing evidence is computed."""
    if claim in NEEDS_PEERS:
        request.getfixturevalue("published")
    frames = {name: make() for name, make in given.items()}
    (row,) = ledger(frames, document="deepspeed", only=[claim], records=tmp_path).itertuples()
    assert row.outcome == expected, f"{row.words}: {row.measured} [{row.needs}]"


def test_the_published_numbers_are_those_of_the_quotes():
    published, quotes = deepspeed.published(), {claim.id: claim.quote for claim in load_claims("deepspeed")}
    for row in published.itertuples():
        assert f"{row.stated_speedup}x" in quotes["DS-07"]


@pytest.mark.peers
def test_the_source_of_the_kernel_is_counted(monkeypatch, tmp_path):
    assert deepspeed.kernel_source().drop(columns="version").eq([2, 2, 0, 0]).all(axis=None)
    source = deepspeed.torchembed_file("0.3.2").read_text()
    twice = tmp_path / "_triton.py"
    twice.write_text(source.replace("out1 = ", "x0 = tl.load(x_ptr)\n        x1 = tl.load(x_ptr)\n        out1 = ", 1))
    monkeypatch.setattr(deepspeed, "torchembed_file", lambda version: twice)
    assert (deepspeed.kernel_source().repeated == 1).all()


def test_the_published_ratios_follow_from_the_published_times():
    published = deepspeed.published()
    assert (published.over_eager.round(1) == published.stated_speedup).all()


def test_the_formula_is_the_definition():
    t = torch.randn(2, 5, 3, 8, dtype=torch.float64)
    cos, sin = rotary_table(5, 6, dtype=torch.float64)
    wide = [torch.cat((half, half), -1)[None, :, None] for half in (cos, sin)]
    torch.testing.assert_close(formula(t, *wide), reference.rotate(t, cos, sin))


@pytest.mark.peers
def test_the_formula_promotes_and_the_kernel_does_not(published):
    t, table = torch.zeros(5, 8, dtype=torch.float16), torch.zeros(5, 8)
    assert formula(t, table, table).dtype == torch.float32
    assert deepspeed.interpreted_kernel("0.3.2")(t, t, table, table)[0].dtype == torch.float16


@pytest.mark.peers
def test_the_versions_are_deepspeeds_own_code(published):
    """The versions' source is compiled as it is, and each version reshapes the kernel's arguments in its own way."""
    t, table = torch.randn(2, 5, 3, 8), torch.ones(2, 1, 1, 8)
    seen = []

    def rotate(q, k, cos, sin):
        seen.append((tuple(q.shape), tuple(cos.shape), type(q)))
        return q, k

    for make, x, tables in (
        (deepspeed.first_function, (10, 3, 8), (2, 1, 1, 8)),
        (deepspeed.merged_function, (5, 3, 2, 8), (2, 8)),
    ):
        function, code = make(rotate)
        assert "own source" in code
        assert type(function(t, table, table)) is torch.Tensor
        assert seen.pop() == (x, tables, torch.Tensor)
        for shut in ({"available": False}, {"on_device": lambda t: False}):
            assert torch.equal(make(rotate, **shut)[0](t, table, table), formula(t, table, table))
        assert not seen


@pytest.mark.peers
def test_the_reviewed_code_is_that_of_the_first_commit(published):
    """The first version gets a single shape right: as many heads as tokens, and tables of two axes."""
    first = dispatched().query("version == 'first' and expected == 'a result'")
    assert list(first.caller[first.outcome == "equal"]) == ["[s, h, d] with [s, d], as many heads as tokens"]
    assert (first.kernel_tokens == first.heads).all()
    merged = dispatched().query("version == 'merged' and gate_open")
    assert (merged.kernel_tokens == merged.t.str[0]).all()


def test_a_read_past_the_tables_shows():
    table = torch.rand(1, 5, 1, 8)
    t = torch.rand(2, 5, 3, 8)
    guarded = deepspeed._before_nan(table, t)
    assert torch.equal(guarded, table) and guarded.stride() == table.stride()
    first_two = guarded.as_strided((3, 4), table.stride()[:2])  # as torchembed's kernel reads them
    assert first_two[0].isfinite().all() and first_two[1:].isnan().all()


def test_without_the_packages_nothing_is_computed(monkeypatch):
    monkeypatch.setattr(at_hand, "installations", lambda *_: {})
    deepspeed.callers_dispatched.cache_clear()
    for compute in (deepspeed.dispatch, deepspeed.tests, deepspeed.fallback):
        with pytest.raises(Unavailable, match="python -m ropelab.study peers|not installed"):
            compute()
    deepspeed.callers_dispatched.cache_clear()
    assert list(deepspeed.contenders("cpu")[0]) == [deepspeed.OURS]


def test_generated_code_is_counted():
    code = """
    def call(args):
        buf0 = empty_strided_cuda((1, 32, 4096, 64), (1, 1, 1, 1), torch.bfloat16)
        triton_poi_fused_neg_0.run(arg0_1, buf0, 8388608, stream=stream0)
        buf1 = empty_strided_cuda((1, 32, 4096, 128), (1, 1, 1, 1), torch.bfloat16)
        extern_kernels.mm(buf0, arg1_1, out=buf1)
        triton_poi_fused_add_mul_1.run(arg0_1, buf0, buf1, 16777216, stream=stream0)
    """
    assert deepspeed.generated(code) == {
        "kernels": 3,
        "buffers": 2,
        "names": "triton_poi_fused_neg_0, triton_poi_fused_add_mul_1, extern_kernels.mm",
    }


# --------------------------------------------------------------------------------------------- the callers

TINY = deepspeed.Caller("tiny", (6, 2, 3, 8), (6, 1, 1, 8), dtype=torch.float32, table_dtype=torch.float32)


def test_a_wrong_function_is_not_timed():
    t, g = torch.randn(2, *TINY.t)
    tables = deepspeed.caller_tables(TINY, "cpu")
    how = {"direction": "forward"}
    check = deepspeed.checked
    assert check(formula, TINY, t, g, tables, **how)["status"] == "ok"
    assert check(lambda t, c, s: formula(t, c, -s), TINY, t, g, tables, **how)["status"].startswith("wrong: rel")
    assert "float64, the formula's float32" in check(lambda t, *_: t.double(), TINY, t, g, tables, **how)["status"]
    assert check(lambda t, *_: 1 / 0, TINY, t, g, tables, **how)["status"].startswith("failed: ZeroDivisionError")
    detached = deepspeed.checked(lambda t, c, s: formula(t, c, s).detach(), TINY, t, g, tables, "backward")
    assert detached["status"].startswith("failed: RuntimeError")


# ---------------------------------------------------------------------------------------------- the chapter


def other(name, frame):
    """The record of a study with another table."""
    about = load(name, H200)
    return Record(name, frame, about.provenance)


def test_the_chapter_says_what_the_records_say(monkeypatch):
    correct = changed("deepspeed_correctness", gradient_error=4e-8)()
    assert states(run(monkeypatch, "14", "picture", "correctness-table").findings_shown[0], 1.42)
    monkeypatch.setattr(Shown, "record", lambda self, name: other(name, correct))
    assert not states(run(monkeypatch, "14", "picture", "correctness-table").findings_shown[0], 1.42)
    slow = record("deepspeed_launches").query("path in ('raw kernel', 'DeepSpeed API')").head(2)
    slow = slow.assign(median_us=[20.0, 60.0], copy_us=10.0)
    monkeypatch.setattr(Shown, "record", lambda self, name: other(name, slow))
    assert states(run(monkeypatch, "14", "launches-table").findings_shown[0], 3.0, 4, 3)


def test_the_table_of_what_runs_says_so(monkeypatch):
    rows = [
        {"caller": caller, "in_tree": in_tree, "version": version, "gate_open": version == "ropelab",
         "expected": expected, "outcome": "different" if (caller, version) == ("b", "first") else "equal"}
        for caller, in_tree, expected in (("b", True, "a result"), ("a", False, "an error"))
        for version in ("first", "merged", "ropelab")
    ]  # fmt: skip
    given = Evidence("deepspeed_dispatch", pd.DataFrame(rows), "given")
    monkeypatch.setattr(Shown, "evidence", lambda self, name: given)
    assert run(monkeypatch, "14", "dispatch").runs.values.tolist() == [
        ["b", "wrong: different", "formula", "kernel"],
        ["a", *["as the formula: an error"] * 3],
    ]


@pytest.mark.peers
def test_the_gate_of_the_chapter_is_that_of_the_merged_source(monkeypatch, published):
    names = run(monkeypatch, "14", "gate-of", "dispatch")
    ran = dispatched().pivot(index="caller", columns="version", values=["gate_open", "outcome"])
    calls = names.calls.set_index("caller").loc[ran.index]
    assert (calls.gate == ran.gate_open.merged).all() and (calls.launch == ran.gate_open.ropelab).all()
    assert ((ran.outcome.merged == "equal") == (~calls.gate | calls.agrees)).all()
    assert names.incorrect.to_dict() == {"first": 11, "merged": 3, "ropelab": 0}
    assert (names.own.gate.sum(), names.own.launch.sum(), len(names.own)) == (0, 3, 3)


@pytest.mark.process
@pytest.mark.gpu
@pytest.mark.peers
def test_the_gpu_evidence_runs():
    frames = {
        "deepspeed_correctness": deepspeed.correctness(),
        "deepspeed_launches": deepspeed.launch_evidence(),
        "deepspeed_inductor": deepspeed.inductor_evidence(),
    }
    rows = deepspeed.callers(smoke=True)
    assert (rows[rows.contender == deepspeed.OURS].status == "ok").all()
    found = ledger(frames, only=["DS-01", "DS-09", "DS-10", "DS-12"])
    assert not (found.outcome == UNTOLD).any()
