"""The wrong backward errs as its closed form says, and the checks that should see it see it."""

import numpy as np
import pytest
import torch

from ropelab.study.topics.gradients import wrong_backward

FOUND, MISSING = wrong_backward.implementations()
RIGHT = [name for name in FOUND if name in wrong_backward.RIGHT]
WRONG = [name for name in FOUND if name not in wrong_backward.RIGHT]


@pytest.mark.parametrize("name", WRONG)
def test_its_error_is_twice_the_sine(name):
    errors = wrong_backward.gradient_errors(FOUND[name], 16)
    assert (abs(errors.error - errors.closed_form) <= errors.bound).all()
    assert (errors[errors.position == 0].error == 0).all()
    assert errors.error.max() > 1.9


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_backward_has_none(name):
    errors = wrong_backward.gradient_errors(FOUND[name], 16)
    assert (errors.error <= errors.bound).all()


def test_the_whole_gradient_has_the_predicted_error_and_the_right_norm():
    overall = wrong_backward.overall_errors({name: FOUND[name] for name in WRONG}, seq_lens=(1, 8))
    np.testing.assert_allclose(overall.error, overall.expected_error, atol=1e-6)
    np.testing.assert_allclose(overall.norm_ratio, 1, atol=1e-6)
    assert (overall[overall.seq_len == 1].error == 0).all()
    assert (overall[overall.seq_len == 8].error > 0.3).all()


def test_closed_form_of_a_rotation_by_hand():
    """A quarter turn instead of its inverse: the opposite vector, off by twice its length."""
    assert wrong_backward.closed_form(np.pi / 2) == 2
    grad = torch.tensor([[[[3.0, 4.0]]]])
    assert wrong_backward.expected_error(grad, torch.tensor([[1.0]])) == pytest.approx(2)
    assert wrong_backward.expected_error(grad, torch.tensor([[0.5]])) == pytest.approx(1)


def test_the_checks_that_see_it_and_those_that_cannot():
    outcomes = wrong_backward.check_outcomes({"right": FOUND["ropelab"], "wrong": FOUND[wrong_backward.MUTANT]})
    assert outcomes.right.all()
    several_tokens = ~outcomes.index.str.endswith("S = 1")
    looks_at_direction = ~outcomes.index.str.contains("forward|not None|‖gradient‖")
    assert (outcomes.wrong == ~(several_tokens & looks_at_direction)).all(), outcomes
