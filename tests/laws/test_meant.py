"""The convention of a function is guessed from its parameters, and never wrongly."""

import pytest
import torch

from ropelab.conformance import CACHE_CONVENTIONS, CONVENTIONS
from ropelab.conformance.meant import conventions_of
from ropelab.foreign import FOREIGN, did_you_mean
from ropelab.layout.pairing import LAYOUTS
from ropelab.study.faults import CONTROLS, FAULTS
from ropelab.study.faults.correct_operators import CORRECT
from ropelab.study.faults.operators import CACHE_FAULTS
from tests.laws.test_right_functions import RIGHT, Rotary
from tests.laws.wrong_functions import WRONG

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


@pytest.mark.parametrize("word, meant", FOREIGN.items())
def test_a_foreign_word_means_a_choice(word, meant):
    choices = (*KNOWN, *LAYOUTS, "bfloat16", "float16", "float32", "float64", "standard", "reversed")
    assert did_you_mean(word, choices) == f"; did you mean {meant!r}?"
