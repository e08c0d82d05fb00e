"""The convention of a function is guessed from its parameters, and never wrongly."""

import pytest
import torch

from ropelab import RotaryEmbedding, apply_rope
from ropelab.command.vocabulary import CHOICES
from ropelab.conformance import CACHE_CONVENTIONS, CONVENTIONS, declare
from ropelab.conformance.meant import conventions_of
from ropelab.foreign import FOREIGN, did_you_mean
from ropelab.study.faults import CONTROLS, FAULTS
from ropelab.study.faults.correct_operators import CORRECT
from ropelab.study.faults.operators import CACHE_FAULTS
from tests.laws.test_right_functions import RIGHT, Rotary
from tests.laws.wrong_functions import WRONG

Q = torch.ones(1, 2, 1, 16)
KNOWN = CONVENTIONS | CACHE_CONVENTIONS
FUNCTIONS = [
    *((function, convention) for function, convention, _ in (RIGHT | WRONG).values()),
    *((entry.function, entry.convention) for entry in (*FAULTS.values(), *CACHE_FAULTS.values(), *CONTROLS)),
    *((operator, name) for name, operator in CORRECT.items()),
]


def test_the_convention_of_a_function_fits_and_another_seldom_does():
    """Operators of one name with other scales, and tables without further arguments, fit two conventions or more."""
    alone = 0
    for function, convention in FUNCTIONS:
        fitting, near = conventions_of(function, KNOWN)
        if isinstance(function, torch.jit.ScriptFunction):
            assert not fitting and not near  # its parameters are unknown
            continue
        assert convention in fitting, (function, fitting)
        alone += len(fitting) == 1
    assert alone > len(FUNCTIONS) * 3 / 4


def head_first(query, key, cos_of_rows):
    return query, key


def test_functions_that_fit_no_convention():
    fitting, near = conventions_of(head_first, KNOWN)
    assert not fitting and "vllm" in near
    assert conventions_of(lambda q, k, cos, sin, position_ids=None: q, KNOWN)[0] == ["huggingface"]
    assert set(conventions_of(lambda x, cos, sin: x, KNOWN)[0]) >= {"huggingface", "flash_attn"}
    assert conventions_of(Rotary(), KNOWN)[0] == ["huggingface"]
    assert conventions_of(Rotary, KNOWN)[0] == ["module"]


@pytest.mark.parametrize("word, meant", [(word, one) for word, meant in FOREIGN.items() for one in meant.split()])
def test_a_foreign_word_means_a_choice(word, meant):
    options = (KNOWN, *(values for option, values in CHOICES.items() if option != "out_layout"))
    choices = next(choices for choices in options if meant in choices)
    assert did_you_mean(word, choices) == f"; did you mean {meant!r}?"


@pytest.mark.parametrize(
    "call",
    [lambda: apply_rope(Q, cos=Q[0, :, 0, :8], sin=Q[0, :, 0, :8], layout="neox"),
     lambda: RotaryEmbedding(16, layout="gpt-neox"),
     lambda: declare("plain", layout="rotate_half")],
)  # fmt: skip
def test_the_library_knows_the_words_of_the_command(call):
    with pytest.raises(ValueError, match="layout: expected one of .* did you mean 'split_half'"):
        call()
