"""What ``--size`` leaves out."""

import itertools

import hypothesis
import pytest

pytest_plugins = ["pytester"]

SUITE = """
import pytest

@pytest.fixture(params=["torch", "triton"])
def device(request):
    return request.param

@pytest.mark.parametrize("shape", [(1, 2), (3, 4), (5, 6)], ids=str)
@pytest.mark.parametrize("dtype", ["half", "float"])
@pytest.mark.parametrize(("first", "last"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_product(device, shape, dtype, first, last):
    pass

@pytest.mark.parametrize("row, is_wrong", [(row, bool(row % 2)) for row in range(20)])
def test_table(row, is_wrong):
    pass

@pytest.mark.parametrize("where", ["rows", "offsets"])
@pytest.mark.parametrize("operator", ["rotate", "norm"])
def test_operators(operator, where):
    pass

def test_alone():
    pass

@pytest.mark.parametrize("target", [pytest.param("80", marks=pytest.mark.full), "90"])
def test_targets(target):
    pass
"""


@pytest.fixture
def collected(pytester):
    pytester.makepyfile(SUITE)

    def collect(*options):
        result = pytester.runpytest("-p", "tests.sizes", "-p", "no:ropelab", "--collect-only", "-q", *options)
        return [line.partition("::")[2] for line in result.outlines if "::" in line]

    profile = hypothesis.settings.get_current_profile_name()
    yield collect
    hypothesis.settings.load_profile(profile)


def test_smoke_is_the_first_case_of_each_function(collected):
    assert [name.partition("[")[0] for name in collected("--size=smoke")] == [
        "test_product",
        "test_table",
        "test_operators",
        "test_operators",
        "test_alone",
        "test_targets",
    ]


def test_core_has_every_row_and_every_pair_of_values(collected):
    cases = collected()
    assert cases == collected("--size=core")
    assert sum(name.startswith("test_table") for name in cases) == 20
    assert "test_targets[90]" in cases and "test_targets[80]" not in cases
    assert "test_targets[80]" in collected("--size=full")

    product, whole = (
        [name.partition("[")[2] for name in names if name.startswith("test_product")]
        for names in (cases, collected("--size=full"))
    )
    assert len(whole) == 48 and 12 <= len(product) <= 16  # 4 rows by 3 shapes at least
    factors = ["torch", "triton"], ["1-1", "1-2", "2-1", "2-2"], ["half", "float"], ["(1, 2)", "(3, 4)", "(5, 6)"]
    for one, other in itertools.combinations(factors, 2):
        for pair in itertools.product(one, other):
            assert any(all(f"-{value}-" in f"-{case[:-1]}-" for value in pair) for case in product), pair


@pytest.mark.parametrize("choice", ["triton and 2-1", "triton and 2-2 and float"])
def test_dash_k_chooses_first(collected, choice):
    """A word of -k finds its cases, although others cover their pairs."""
    assert collected("-k", choice)
