"""A verdict follows from comparisons; nothing that the function does to the process or to its arguments reaches it."""

import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

from ropelab.conformance import Sizes, Subject, conventions, pytest_laws, verify
from ropelab.conformance.declared import check_device, declare
from ropelab.conformance.law import Comparison
from ropelab.conformance.report import text
from ropelab.conformance.surroundings import SETTINGS, Surroundings
from ropelab.study.faults import correct

FEW = ("definition", "isometry", "adjoint", "rounding")


def not_here(x, positions):
    raise NotImplementedError("CUDA alone")


# ------------------------------------------------------------------------------------------------ what is a pass


def test_nothing_passes_without_a_comparison_with_the_definition():
    report = verify(not_here, "plain", skip=("compile",))
    assert report.verdict == "not judged" and not report.passed and not report.failed
    assert report["bad_input"].status == "pass"  # it raises, whatever it is given
    assert "CUDA alone" in text(report) and '"passed": false' in report.to_json()
    with pytest.raises(AssertionError, match="nothing was compared with the definition"):
        report.raise_if_failed()


def test_the_laws_of_consistency_alone_are_no_pass():
    """The identity keeps the laws of consistency."""
    laws = ("isometry", "identity", "composition", "adjoint", "strides")
    report = verify(lambda x, positions: x * 1, "plain", laws=laws)
    assert not report.failed and report.verdict == "not judged"
    assert "isometry" in text(report)
    assert verify(correct.plain, "plain", laws=laws).verdict == "not judged"


@pytest.mark.parametrize("law", ["definition", "rounding", "large_positions", "huge"])
def test_what_compares_with_the_definition_can_pass(law):
    report = verify(correct.huggingface, "huggingface", laws=[law, "isometry"])
    if law == "large_positions":  # the caller looks up the tables
        report = verify(correct.plain, "plain", laws=[law, "isometry"])
    assert report.passed and report[law].compared > 0 and report["isometry"].compared == 0


def test_pytest_fails_where_nothing_can_be_compared():
    test = pytest_laws(not_here, "plain")
    with pytest.raises(pytest.fail.Exception, match="CUDA alone"):
        test("definition")
    with pytest.raises(pytest.skip.Exception, match="CUDA alone"):
        test("isometry")
    pytest_laws(correct.plain, "plain")("isometry")  # holds: neither skipped nor failed


@pytest.mark.parametrize("bound", [np.nan, np.inf])
def test_a_bound_that_is_no_number_allows_nothing(bound):
    comparison = Comparison("x", np.array([1.0, 2.0]), np.array([1.0, 3.0]), np.array([bound, bound]), None)
    assert (comparison.excess == np.inf).all()


# ---------------------------------------------------------------------------------------------- what is declared


REFUSED = [
    # an argument, a value, and the name to blame where it is another
    ("convention", "jax"), ("layout", "neox"), ("laws", ["definitoin"], "law"), ("skip", ["nothing"], "law"),
    ("sign", "minus"), ("maths", "fast"), ("seq_format", "sbhd"), ("rotary_dim", 3), ("rotary_dim", 32),
    ("rotary_dim", 0), ("inplace", True), ("q_heads", 0), ("k_heads", -1), ("k_heads", 2.0), ("head_dim", True),
    ("head_dim", 1), ("head_dim", 15, "rotary_dim"), ("head_dim", 2**40), ("base", 0), ("base", float("nan")),
    ("base", float("inf")), ("base", 1e-300), ("base", "10000"), ("dtype", torch.int8), ("device", "gpu"), ("laws", []),
]  # fmt: skip


@pytest.mark.parametrize("row", REFUSED, ids=str)
def test_what_cannot_be_meant_is_refused_by_name(row):
    with pytest.raises((TypeError, ValueError), match=f"^{row[-1] if len(row) == 3 else row[0]}: expected"):
        verify(correct.plain, **{"convention": "plain", row[0]: row[1]})


def test_skipping_all_laws_is_refused():
    with pytest.raises(ValueError, match="laws: expected at least one"):
        declare("plain", laws=["tail"], skip=["tail"])


def test_sizes_and_devices_as_other_libraries_have_them():
    declaration = declare("plain", q_heads=np.int64(3), device=torch.device("cpu"))
    assert declaration.sizes == Sizes(q_heads=3, rotary_dim=16) and declaration.about["device"] == "cpu"


@pytest.mark.parametrize("device", ["meta", "cuda:99"])
def test_a_device_is_tried_before_any_law(device):
    with pytest.raises(ValueError, match=f"device: expected a device that works here, got '{device}'"):
        check_device(device)
    with pytest.raises(ValueError, match="device: expected a device that works here"):
        verify(lambda x, positions: pytest.fail("it was called"), "plain", device=device)


def test_something_that_cannot_be_called():
    with pytest.raises(TypeError, match="function: expected something that can be called, got int"):
        verify(1, "plain")


# ---------------------------------------------------------------------------- what the function does to its arguments


def test_a_function_that_overwrites_its_inputs_is_held_to_what_it_was_given():
    def zeros(x, positions):
        return x.detach().zero_() * 1

    assert verify(zeros, "plain", laws=["definition"]).failed == ("definition",)


class Buffer:
    """A function whose calls all return the same memory."""

    def __init__(self):
        self.memory = {}

    def __call__(self, x, positions):
        y = correct.plain(x, positions)
        with torch.no_grad():
            return self.memory.setdefault((y.shape, y.dtype), torch.empty_like(y)).copy_(y)


def test_a_result_that_the_next_call_overwrites():
    report = verify(Buffer(), "plain", laws=["definition", "determinism", "batch_independent"])
    assert report.failed == ("determinism",)
    assert "earlier call" in report["determinism"].counterexample.what


def test_results_are_not_compared_with_themselves():
    """In one buffer both results of a repeated call would be the later result."""

    class Counting(Buffer):
        calls = 0

        def __call__(self, x, positions):
            self.calls += 1
            return super().__call__(x * (1 + 1e-3 * self.calls), positions)

    assert verify(Counting(), "plain", laws=["batch_independent"]).failed == ("batch_independent",)


# ------------------------------------------------------------------------------------------------- global state


def state():
    return [setting.get() for setting in SETTINGS], torch.is_inference_mode_enabled(), warnings.filters[:]


def replacing(x, positions):
    """A right function that leaves everything changed."""
    y = correct.plain(x, positions)
    torch.set_default_dtype(torch.bfloat16)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    torch.use_deterministic_algorithms(False)
    np.seterr(all="raise")
    torch.equal = torch.autograd.grad = None
    torch.Tensor.double = lambda x: x * 0
    Subject.expected = lambda *a, **k: []
    warnings.simplefilter("error")
    return y


def test_global_state_is_put_back_after_every_call():
    before = state(), torch.equal, torch.autograd.grad, torch.Tensor.double, Subject.expected
    with warnings.catch_warnings():
        report = verify(replacing, "plain", laws=(*FEW, "compile"))
    assert report.passed, text(report)
    names = "Subject.expected", "Tensor.double", "default device", "grad mode", "torch.autograd.grad", "torch.equal"
    assert all(name in report["compile"].message for name in names)
    assert (state(), torch.equal, torch.autograd.grad, torch.Tensor.double, Subject.expected) == before


def test_it_is_put_back_where_the_function_raises_too():
    def raising(x, positions):
        replacing(x, positions)
        raise SystemExit(0)

    before = state()
    with pytest.raises(SystemExit):
        verify(raising, "plain", laws=["definition"])
    assert state() == before and torch.equal is not None


def test_laws_do_not_depend_on_the_state_of_the_program():
    defaults = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with torch.inference_mode(), torch.device("meta"), np.errstate(all="raise"):
            assert verify(explicit, "plain", laws=FEW).passed
            assert torch.is_inference_mode_enabled() and torch.empty(1).is_meta
    finally:
        torch.set_default_dtype(defaults)


def explicit(x, positions):
    frequencies = torch.arange(0, x.shape[-1], 2, dtype=torch.float64, device=x.device) / x.shape[-1]
    return correct.turn_by(x, positions[..., None].double() * 10000.0**-frequencies)


def test_a_function_finds_what_its_import_left_and_nothing_that_a_call_left():
    surroundings = Surroundings()
    ours = torch.cos
    try:
        with surroundings.importing():
            torch.cos, theirs = lambda x: x, torch.cos
            torch.set_default_dtype(torch.float64)
            torch.set_grad_enabled(False)
            sys.path.append("theirs")
        assert torch.cos is ours is theirs and torch.get_default_dtype() == torch.float32
        for _ in range(2):
            with surroundings.ours(), surroundings.theirs():
                assert torch.cos(3) == 3 and torch.get_default_dtype() == torch.float64 and "theirs" in sys.path
                assert torch.is_grad_enabled()  # the caller's to choose
                torch.set_default_dtype(torch.bfloat16)
                torch.sin = None
            assert torch.cos is ours and torch.sin is not None and "theirs" not in sys.path
    finally:
        torch.cos = ours
    assert surroundings.changed == {"default dtype", "torch.sin"}


# ---------------------------------------------------------------------------------------------------- no Triton

WITHOUT_TRITON = """
import sys
import ropelab
for name in [name for name in sys.modules if name.split(".")[0] == "triton"]:
    del sys.modules[name]
sys.modules["triton"] = None
from ropelab.conformance import verify
from ropelab.study.faults import FAULTS, correct
from ropelab.conformance.laws.numerics import _interpreter_errors
report = verify(lambda x, p: correct.plain(x, -p), "plain", laws=["definition", "identity"])
assert report.failed == ("definition",) and _interpreter_errors() == ()
assert len(FAULTS) > 40 and not any(fault.triton for fault in FAULTS.values())
"""


@pytest.mark.process
def test_the_laws_and_the_catalogue_need_no_triton():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_every_convention_is_declared_with_its_own_defaults():
    for name, kind in conventions.CONVENTIONS.items():
        subject = declare(name).subject(correct.plain, Surroundings())
        assert (subject.layout, subject.seq_format) == (kind.layouts[0], kind.seq_formats[0])
        assert subject.in_place == bool(kind.in_place) and subject.narrow == kind.narrow
