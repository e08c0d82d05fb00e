"""No verdict of the table changes, and every wrong and every right function is in it."""

import pytest

from tests.laws import verdicts

TABLE = verdicts.read()
COMPUTED = list(verdicts.judged())
EVERY = 9
"""At core every ninth row is computed again."""


def test_the_wrong_are_wrong_and_the_right_are_right():
    wrong = {"fault", "fault of an operator", "wrong function", "misread configuration"}
    for (kind, name), (verdict, broken, _) in TABLE.items():
        if kind != "peer":
            assert verdict == ("wrong" if kind in wrong else "right"), name
        assert bool(broken) == (verdict == "wrong"), name


def test_every_function_is_in_the_table():
    assert {key for key in TABLE if key[0] != "peer"} == {(kind, name) for kind, name, _ in COMPUTED if kind != "peer"}


def _marks(place, kind):
    return [pytest.mark.full] * (place % EVERY > 0) + [pytest.mark.peers] * (kind == "peer")


@pytest.mark.parametrize(
    "kind, name, compute",
    [
        pytest.param(*row, id=row[1], marks=_marks(place, row[0]))
        for place, row in enumerate(COMPUTED)
        if row[:2] in TABLE
    ],
)
def test_a_verdict_is_computed_again(kind, name, compute):
    assert compute() == TABLE[kind, name]
