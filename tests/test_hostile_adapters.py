"""Adapters refuse a wrong call in the words of the other package, before they write anything."""

import re
from inspect import signature

import pytest

from tests.hostile_adapters import ADAPTERS, OF_ANOTHER_TYPE, SOME_FIT, aliased, calls, changed, contents, copied


def outcome(function, call, *, argument=None):
    """ "right" for a call that returns; "refused" for one that an argument's name refuses; else what is wrong."""
    before = contents(call)
    try:
        function(**call)
    except (TypeError, ValueError) as error:
        begins = re.match(r"(\w+)\S*: expected", str(error))
        named = {argument} if argument else signature(function).parameters
        if not begins or begins[1] not in named:
            return f"{type(error).__name__}: {error}"
        wrote = changed(before, call)
        return f"wrote {wrote}, then {error}" if wrote else "refused"
    except (RuntimeError, IndexError, KeyError, AttributeError, ArithmeticError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    return "right"


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_hostile_value_is_refused_by_name_and_nothing_is_written(torch_backend, name):
    wrong, function = [], ADAPTERS[name].function
    assert outcome(function, ADAPTERS[name].arguments()) == "right"
    for argument, what, call in calls(name):
        kind = what.partition(" in place")[0]
        found = outcome(function, call, argument=argument if kind in OF_ANOTHER_TYPE else None)
        if found != "refused" and not (kind in SOME_FIT and found == "right"):
            wrong.append(f"{argument} = {what}: {found}")
    assert not wrong, f"{len(wrong)} calls:\n" + "\n".join(wrong)


@pytest.mark.parametrize("name", ADAPTERS)
def test_memory_of_an_output_is_refused_or_does_not_matter(name):
    wrong, function = [], ADAPTERS[name].function
    for output, other, call in aliased(name):
        apart = copied(call)
        function(**apart)
        found = outcome(function, call)
        if found == "right" and output in changed(contents(apart), call):
            found = "another result"
        if found not in ("right", "refused"):
            wrong.append(f"{other} in {output}: {found}")
    assert not wrong, "\n".join(wrong)
