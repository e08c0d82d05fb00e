"""Scalar arguments: each function takes what it names, and refuses what Python would take for it."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from ropelab.arguments import choice, flag, integer, number
from ropelab.conformance import declare


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), np.int32(3)])
def test_an_integer_of_python_or_numpy_is_one(value):
    found = integer("n", value, at_least=3, below=4)
    assert found == 3 and type(found) is int


@pytest.mark.parametrize("value", [3.0, math.nan, True, np.bool_(True), "3", None, [3], torch.tensor(3), np.float64(3)])
def test_nothing_else_is_an_integer(value):
    with pytest.raises(TypeError, match="^n: expected an integer, got "):
        integer("n", value)


@pytest.mark.parametrize("value", [2, 5, np.int64(5)])
def test_integers_have_bounds(value):
    with pytest.raises(ValueError, match=f"^n: expected an integer >= 3 and < 5, got {value}$"):
        integer("n", value, at_least=3, below=5)


@pytest.mark.parametrize("value", [2.5, np.float32(2.5), np.float64(2.5), np.float16(2.5), Fraction(5, 2)])
def test_a_real_number_is_one(value):
    found = number("x", value)
    assert found == 2.5 and type(found) is float


@pytest.mark.parametrize("value", [True, np.bool_(False), "2.5", None, 1j, torch.tensor(2.5), Decimal("2.5"), [2.5]])
def test_nothing_else_is_a_number(value):
    with pytest.raises(TypeError, match="^x: expected a number, got "):
        number("x", value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 10**400, Fraction(10**400), np.float32("nan")])
def test_numbers_are_finite(value):
    with pytest.raises(ValueError, match="^x: expected a finite number"):
        number("x", value)


def test_numbers_have_bounds():
    assert number("x", 1, at_least=1, above=0, at_most=1) == 1.0
    for value, bounds in ((0.0, {"above": 0}), (0.5, {"at_least": 1}), (2, {"at_most": 1})):
        with pytest.raises(ValueError, match="^x: expected a finite number [<>=]+ [01], got"):
            number("x", value, **bounds)


def test_a_flag_is_a_bool():
    assert flag("f", True) is True and flag("f", np.bool_(False)) is False
    for value in ("no", 0, 1, None, torch.tensor(True), 1.0):
        with pytest.raises(TypeError, match="^f: expected a bool, got "):
            flag("f", value)


def test_a_choice_is_one_of_the_strings():
    assert choice("c", "a", ("a", "b")) == "a"
    with pytest.raises(ValueError, match=r"^c: expected one of \('a', 'b'\), got 'z'$"):
        choice("c", "z", ("a", "b"))
    for value in (None, 3, ["a"], np.array(["a"])):
        with pytest.raises(TypeError, match="^c: expected one of"):
            choice("c", value, ("a", "b"))


CHOICES = {
    "convention": "huggingface", "layout": "split_half", "out_layout": "split_half", "seq_format": "bhsd",
    "maths": "wide", "columns": "repeated", "sign": "standard", "arrays": "torch",
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_a_declaration_takes_words_alone(name):
    """An array of one word equals the word. The table of public functions has the like for all others."""
    word, options = CHOICES[name], {"convention": "huggingface"}
    declare(**options | {name: word})
    for value in (np.array([word]), [word], word.encode(), 3):
        with pytest.raises(TypeError, match=f"^{name}: expected one of"):
            declare(**options | {name: value})


def test_compiled_functions_trace_through_them():
    def double(x, n, scale, turned, layout):
        n = integer("n", n, at_least=0, below=2**31)
        scale = number("scale", scale, above=0)
        sign = -1 if flag("turned", turned) else 1
        return x * (n * sign * scale) if choice("layout", layout, ("a", "b")) == "a" else x

    torch._dynamo.reset()
    compiled = torch.compile(double, backend="eager", fullgraph=True, dynamic=True)
    x = torch.ones(3)
    for n in (2, 3, 7):
        torch.testing.assert_close(compiled(x, n, 0.5, True, "a"), double(x, n, 0.5, True, "a"))
