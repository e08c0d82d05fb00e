"""How much of the suite runs: ``pytest --size=smoke``, ``core`` (the default) or ``full``.

Each ``parametrize`` mark is a factor, however many names it has, and so is each fixture with params. Of each function,
core keeps cases that have every pair of values of two factors. A row of a table is a value, so that none is ever left
out; a product is written as stacked marks, one for each factor. What has the mark ``full`` runs at that size alone.
"""

import itertools

import hypothesis
import pytest

SIZES = ("smoke", "core", "full")

hypothesis.settings.register_profile("core", derandomize=True, database=None, deadline=None, print_blob=False)
hypothesis.settings.register_profile(  # Hypothesis' own profile where CI is set has fixed seeds and no database
    "full", hypothesis.settings.get_profile("default"), derandomize=False, deadline=None, print_blob=True
)


def pytest_addoption(parser):
    parser.addoption(
        "--size",
        choices=SIZES,
        default="core",
        help="smoke: the first case of each test function, and of each operator; "
        "core: every pair of values of stacked parametrize marks; "
        "full: every case, also those marked so, and random examples for the property tests",
    )


def pytest_configure(config):
    hypothesis.settings.load_profile("full" if config.getoption("size") == "full" else "core")


def factors(item: pytest.Item) -> list[tuple]:
    """The value of each factor of a case; the names of one mark are one factor."""
    first = {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].replace(",", " ").split() if isinstance(mark.args[0], str) else mark.args[0]
        first |= dict.fromkeys(names, names[0])
    values: dict[str, tuple] = {}
    for name, value in item.callspec.params.items():  # cases of one value hold the same object, which need not have ==
        values[first.get(name, name)] = (*values.get(first.get(name, name), ()), id(value))
    return list(values.items())


def covering(cases: list[list]) -> list[int]:
    """The places of the cases that cover every pair, the one with most new pairs first."""
    pairs = [frozenset(itertools.combinations(case, 2)) for case in cases]
    missing = set().union(*pairs)
    if not missing:
        return list(range(len(cases)))
    kept = []
    while missing:
        kept.append(max(range(len(cases)), key=lambda case: len(pairs[case] & missing)))
        missing -= pairs[kept[-1]]
    return sorted(kept)


@pytest.hookimpl(trylast=True)  # -k and -m choose first
def pytest_collection_modifyitems(config, items):
    size = config.getoption("size")
    if size == "full":
        return
    left_out = {item for item in items if item.get_closest_marker("full")}
    functions: dict[tuple, list[pytest.Item]] = {}
    for item in items:
        if hasattr(item, "callspec") and item not in left_out:
            operator = item.callspec.params.get("operator") if size == "smoke" else None
            functions.setdefault((item.nodeid.partition("[")[0], operator), []).append(item)
    for cases in functions.values():
        kept = [0] if size == "smoke" else covering([factors(case) for case in cases])
        left_out |= set(cases) - {cases[place] for place in kept}
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
