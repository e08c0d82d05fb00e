"""Every known fault breaks the laws that it has to break, and nothing right is flagged."""

import re

import pytest
import torch

from ropelab.bench import packages
from ropelab.conformance.laws import LAWS
from ropelab.conformance.verify import verify
from ropelab.kernels import INTERPRETED
from ropelab.study.faults import AGREEMENT, CONTROLS, FAULTS, NOT_EXPRESSED, THEMES, Fault, correct, runs_on
from ropelab.study.topics.conformance import hold_to_laws, kill_matrix, kills, only_by_agreement
from tests.conftest import HAS_GPU

ALL = [pytest.param(fault, id=name) for name, fault in FAULTS.items()]
SLOW = ("compile", "large_positions")
CONSISTENCY = [name for name, law in LAWS.items() if law.by_default and name not in (*AGREEMENT, *SLOW)]


def device_of(fault) -> str:
    return "cuda" if fault.triton and HAS_GPU else "cpu"


@pytest.fixture(scope="module")
def reports():
    """Fault -> the report of `verify` under the laws that the fault must fail, made once."""
    made = {}

    def report(fault):
        if fault.race and HAS_GPU:
            pytest.skip("needs a machine without a GPU: interpreted, the race always turns out ill")
        if fault.name not in made:
            device = device_of(fault)
            if not runs_on(fault, device):
                pytest.skip("a Triton kernel needs a GPU or TRITON_INTERPRET=1")
            made[fault.name] = hold_to_laws(fault, fault.must_fail, device=device, shrink=False)
        return made[fault.name]

    return report


# -------------------------------------------------------------------------------------------------- the catalogue


def test_each_is_expressed_once():
    assert len(FAULTS) == sum(isinstance(v, Fault) for theme in THEMES.values() for v in vars(theme).values())
    assert not set(FAULTS) & {left.name for left in NOT_EXPRESSED}


@pytest.mark.parametrize("fault", ALL)
def test_an_entry_says_what_is_wrong_where_it_was_seen_and_what_must_notice(fault):
    assert re.fullmatch(r"[a-z][a-z0-9_]*", fault.name)
    assert fault.sentence.endswith(".") and fault.symptom
    assert fault.seen_in is None or re.search(r"\w#\d+|read in its source|found here", fault.seen_in)
    assert fault.must_fail and set(fault.must_fail) <= set(LAWS)
    # A law without the definition must notice the fault, or the entry says why no such law can.
    assert bool(fault.only_definition) == (set(fault.must_fail) <= set(AGREEMENT))


def test_what_is_not_expressed_has_a_reason():
    assert all(left.reason and "#" in left.seen_in for left in NOT_EXPRESSED)


# ------------------------------------------------------------------------------------------------------ the laws


@pytest.mark.parametrize("fault", ALL)
def test_it_fails_the_laws_that_it_must_fail(fault, reports):
    assert set(reports(fault).failed) == set(fault.must_fail)


def test_only_those_that_say_so_hide_from_every_law_of_consistency():
    hidden = [name for name, fault in FAULTS.items() if fault.only_definition]
    matrix = kill_matrix(hidden, ("definition", *CONSISTENCY), here=True)
    assert not kills(matrix)[CONSISTENCY].any(axis=None)
    far = {name for name in hidden if "definition" not in FAULTS[name].must_fail}
    assert only_by_agreement(matrix) == set(matrix.index) - far


def test_group_laws_are_blind_to_sign_and_adjoint_to_the_forward():
    laws = ("definition", "isometry", "relative_position", "composition", "inverse", "adjoint")
    seen = kills(kill_matrix(["sign_reversed_undeclared", "backward_applies_forward"], laws, here=True))
    assert list(seen.columns[seen.loc["sign_reversed_undeclared"]]) == ["definition"]
    assert list(seen.columns[seen.loc["backward_applies_forward"]]) == ["adjoint"]


def test_the_matrix_tells_a_law_that_does_not_apply_from_one_that_holds():
    row = kill_matrix(["layout_flag_inverted"], ("definition", "layout", "isometry", "adjoint"), here=True).iloc[0]
    expected = {"definition": "fail", "layout": "fail", "isometry": "pass", "adjoint": "not applicable"}
    assert row.to_dict() == expected


# ------------------------------------------------------------------------------------------- what is not a fault


@pytest.mark.parametrize("control", [pytest.param(c, id=c.name) for c in CONTROLS])
def test_a_right_implementation_is_not_flagged(control):
    report = hold_to_laws(control, skip=("compile",))
    report.raise_if_failed()


# ------------------------------------------------------------------------------- one fault, another convention


def backward_forward_of_modules(head_dim):
    class Wrong(correct.Module):
        def forward(self, q, k):
            angles = self.angles(q.shape[1], q.device)

            def rotate(x):
                return correct.turn_by(x, angles)

            return tuple(correct.with_backward(x, rotate, rotate) for x in (q, k))

    return Wrong(head_dim)


def bfloat16_positions_of_queries_and_keys(positions, query, key, head_size, cos_sin_cache, is_neox):
    return correct.vllm(positions.bfloat16().long(), query, key, head_size, cos_sin_cache, is_neox)


def sign_of_complex_numbers(xq, xk, freqs_cis):
    return correct.complex_numbers(xq, xk, freqs_cis.conj())


def tail_left_by_deepspeed(t, freqs_cos, freqs_sin):
    y = correct.deepspeed(t, freqs_cos, freqs_sin)
    return torch.cat((y[..., : freqs_cos.shape[-1]], torch.empty_like(y[..., freqs_cos.shape[-1] :])), dim=-1)


@pytest.mark.parametrize(
    ("function", "convention", "law"),
    [
        (backward_forward_of_modules, "module", "adjoint"),
        (bfloat16_positions_of_queries_and_keys, "vllm", "large_positions"),
        (sign_of_complex_numbers, "complex", "definition"),
        (tail_left_by_deepspeed, "deepspeed", "tail"),
    ],
)
def test_a_fault_breaks_a_law_in_another_convention(function, convention, law):
    assert verify(function, convention, laws=[law], shrink=False).failed == (law,)


@pytest.mark.skipif(not (INTERPRETED or HAS_GPU), reason="its kernel needs a GPU or TRITON_INTERPRET=1")
@pytest.mark.peers
def test_torchembed_0_3_0_applies_the_forward_in_the_backward():
    module = packages.load_file("torchembed", "0.3.0", "torchembed/_triton.py")

    def torchembed(t, freqs_cos, freqs_sin):
        """torchembed's step for one tensor ``[B, H, S, D]``, batch by batch where the tables differ."""
        tables = (table.expand(len(t), -1, -1, -1)[:, 0] for table in (freqs_cos, freqs_sin))
        return torch.cat([module._FusedRoPE.apply(x[None], c, s) for x, c, s in zip(t, *tables, strict=True)])

    options = {
        "columns": "repeated",
        "seq_format": "bhsd",
        "rotary_dim": 16,
        "q_heads": 1,
        "device": "cuda" if HAS_GPU else "cpu",
    }
    report = verify(torchembed, "deepspeed", laws=["definition", "isometry", "adjoint"], shrink=False, **options)
    assert report.failed == ("adjoint",)
