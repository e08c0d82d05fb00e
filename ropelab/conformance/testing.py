"""Make a pytest test of the laws."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from ropelab.conformance.declared import laws_of, select
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
    """Return a test of ``function`` that runs once for each law. A test file needs one line::

        test_rope = ropelab.conformance.pytest_laws(my_rope, "huggingface", layout="split_half")

    The test of a law that does not apply is skipped, with the reason. The law ``definition`` is an exception: its test
    fails, because nothing shows that the function is right.

    Args:
        function, convention: as for `verify`.
        laws, skip: as for `declare`.
        declared: the other arguments of `verify`.

    Returns:
        A test function with a parameter ``law``, the name of the law.

    Raises:
        ValueError: as for `declare`, of unknown names; the test itself raises for the other arguments.
    """
    import pytest

    names = [law.name for law in select(laws, skip, laws_of(convention))]

    @pytest.mark.parametrize("law", names)
    def test(law):
        check_law(function, convention, law, **declared)

    return test


def check_law(function: Callable[..., Any], convention: str, law: str, **declared) -> None:
    """Fail the test that runs unless a function keeps a law, or skip it; `pytest_laws` describes the arguments."""
    import pytest

    report = verify(function, convention, laws=[law], **declared)
    result = report[law]
    inapplicable = result.status == "not applicable"
    if result.failed or (inapplicable and law == "definition"):
        pytest.fail(text(report), pytrace=False)
    if inapplicable:
        pytest.skip(result.message)
