"""The laws as a test in somebody's pytest file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ropelab.conformance.declared import select
from ropelab.conformance.report import text
from ropelab.conformance.verify import verify


def pytest_laws(
    function: Callable[..., Any],
    convention: str,
    *,
    laws: Iterable[str] | None = None,
    skip: Iterable[str] = (),
    **declared,
) -> Callable[[str], None]:
    """One test for each law, in one line of a test file::

        test_rope = ropelab.conformance.pytest_laws(my_rope, "huggingface", layout="split_half")

    A law that does not apply is skipped with the reason, except for ``definition``: where nothing can be compared with
    the definition the test fails, as a function that was never asked is not right.

    Args:
        function, convention: as for `verify`.
        laws, skip: as for `declare`.
        declared: the other arguments of `verify`.

    Returns:
        A test function, parametrized by the name of the law.
    """
    import pytest

    names = [law.name for law in select(laws, skip)]

    @pytest.mark.parametrize("law", names)
    def test(law):
        report = verify(function, convention, laws=[law], **declared)
        result = report[law]
        inapplicable = result.status == "not applicable"
        if result.failed or (inapplicable and law == "definition"):
            pytest.fail(text(report), pytrace=False)
        if inapplicable:
            pytest.skip(result.message)

    return test
