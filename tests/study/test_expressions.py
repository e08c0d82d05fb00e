"""The expressions of claims select rows as pandas does, and run nothing."""

import pandas as pd
import pytest

from ropelab.study.engine.comparisons import Comparison
from ropelab.study.engine.expressions import evaluated, selected

FRAME = pd.DataFrame({
    "mode": ["eager", "compiled", "compiled"], "time": [4.0, 2.0, 3.0], "read": ["the file", "all", None],
})  # fmt: skip


@pytest.mark.parametrize(
    "expression, rows",
    [
        ("", [0, 1, 2]),
        ("mode == 'compiled'", [1, 2]),
        ("mode == 'compiled' and not (time > 2.5 or time < 1)", [1]),
        ("1 < time <= 3", [1, 2]),
        ("time in (2, 4) and mode != 'eager'", [1]),
        ("read.notna() and read.str.contains('file')", [0]),
        ("mode.str.startswith('comp') and abs(time - 2.5) < 1", [1, 2]),
    ],
)
def test_rows_are_selected(expression, rows):
    assert list(selected(FRAME, expression).index) == rows


def test_a_quantity_is_arithmetic():
    assert list(evaluated(FRAME, "2 * time - 1")) == [7.0, 3.0, 5.0]


@pytest.mark.parametrize(
    "expression",
    [
        "@pd.io.common.os.system('touch {file}') == 0",
        "__pd_eval_local_pd.io.common.os.system('touch {file}') == 0",
        "__import__('os').system('touch {file}') == 0",
        "time.to_csv('{file}') == 0",
        "time.apply(print) == 0",
        "mode.str.contains('x').to_csv('{file}') == 0",
        "time.__class__ == 0",
        "abs.__self__ == 0",
        "[x for x in time] == 0",
        "(lambda: 0)() == 0",
        "time[0] == 0",
        "time == absent",
        "time ==",
    ],
)
def test_nothing_else_is_evaluated(expression, tmp_path):
    file = tmp_path / "ran"
    expression = expression.format(file=file)
    with pytest.raises(ValueError, match="expected"):
        selected(FRAME, expression)
    test = Comparison("AA-01", "times", ("mode",), where=expression, quantity="time", above=1.0)
    with pytest.raises(ValueError, match="AA-01: times: .*expected"):
        test.judge({"times": FRAME}, "")
    with pytest.raises(ValueError, match="AA-01: times: .*expected"):
        Comparison("AA-01", "times", ("mode",), quantity=expression, above=1.0).judge({"times": FRAME}, "")
    assert not file.exists()


@pytest.mark.parametrize(
    "expression",
    ["1 + " * 5000 + "time", "not " * 3000 + "time", "mode.str.contains('(')", "time + mode", "time < mode"],
)
def test_what_cannot_be_evaluated_is_named(expression):
    with pytest.raises(ValueError) as error:
        evaluated(FRAME, expression)
    assert str(error.value).startswith(expression[:9]) and len(str(error.value)) < 500
