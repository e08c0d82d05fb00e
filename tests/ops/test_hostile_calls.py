"""Invalid calls are refused by name, and valid calls are served, however their values are written."""

import re
from functools import cache

import pytest

from tests.ops.hostile_adapters import CONTEXTS
from tests.ops.hostile_calls import TARGETS, calls, equal, names, run

CALLS = [*calls()]
VALID = [name for name in TARGETS if name != "huggingface.patch"]  # whose valid model is in test_interop_huggingface


@pytest.mark.parametrize("target", TARGETS)
def test_what_cannot_be_meant_is_refused_by_name(target):
    wrong = []
    for call in (call for call in CALLS if call.target == target and not call.equivalent):
        try:
            run(call)
        except (TypeError, ValueError) as error:
            begins = re.match(r"(\w+)(\[\d+\])?: expected", str(error))
            if not begins or begins[1] not in names(call):
                wrong.append(f"{call}: {type(error).__name__}: {error}")
        except (RuntimeError, IndexError, KeyError, AttributeError, ArithmeticError, AssertionError) as error:
            wrong.append(f"{call}: {type(error).__name__}: {error}")
        else:
            wrong.append(f"{call}: accepted")
    assert not wrong, f"{len(wrong)} calls:\n" + "\n".join(wrong)


@cache
def expected(target: str):
    """The result of the valid call in torch operations, where nothing around it was changed."""
    return TARGETS[target].function(**TARGETS[target].arguments)


@pytest.mark.parametrize("target", VALID)
def test_a_value_written_in_another_way_is_the_same(torch_backend, target):
    for call in (call for call in CALLS if call.target == target and call.equivalent):
        assert equal(run(call), expected(target)), str(call)


@pytest.mark.parametrize("target", VALID)
def test_defaults_of_torch_change_nothing(torch_backend, target):
    """The first call in a context builds objects that must be right inside and outside of the context."""
    function, arguments, *_ = TARGETS[target]
    for context, entered in CONTEXTS.items():
        with entered():
            found = [function(**arguments) for _ in range(2)]
        assert all(equal(y, expected(target)) for y in (*found, function(**arguments))), context
