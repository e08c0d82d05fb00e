"""Every test is seeded; kernels are interpreted where there is no GPU."""

import os
import random
import zlib
from collections import Counter
from collections.abc import Iterator

import numpy as np
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before ropelab is imported

import pytest  # noqa: E402

from ropelab.bench.unavailable import Unavailable  # noqa: E402
from ropelab.kernels import INTERPRETED, use_backend  # noqa: E402

pytest_plugins = ["tests.sizes", "tests.poison", *(["tests.interpreter"] if INTERPRETED else [])]

torch.set_num_threads(1)


def pytest_addoption(parser):
    parser.addoption("--record", action="store_true", help="write the tables that tests on a GPU make into data/")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """The processes of ``--numprocesses auto``: one for each core, at most ten on a GPU, which they share."""
    return min(10, os.cpu_count()) if HAS_GPU else os.cpu_count()


def pytest_terminal_summary(terminalreporter):
    """Report skips for want of packages; all other skips are quiet."""
    skipped = [(report.nodeid, report.longrepr[-1]) for report in terminalreporter.stats.get("skipped", [])]
    missing = Counter(
        (test.partition("::")[0], reason.partition("not run: ")[2]) for test, reason in skipped if "not run: " in reason
    )
    if missing:
        number = missing.total()
        terminalreporter.section(f"NOT TESTED, for want of packages: {number} tests", red=True)
        for (file, reason), tests in sorted(missing.items()):
            terminalreporter.write_line(f"{file}, {tests}: {reason}")


def pytest_collection_modifyitems(items):
    for item in items:
        if not HAS_GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU: run `make test` on a machine that has one"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Skip a test marked `gpu` or `peers` that lacks a package or a library, by name; elsewhere that is a failure."""
    try:
        return (yield)
    except Unavailable as missing:
        if item.get_closest_marker("gpu") or item.get_closest_marker("peers"):
            pytest.skip(f"not run: {missing}")
        raise


pytest_runtest_setup = pytest_runtest_call  # fixtures load packages as well


def _seed(name: str) -> None:
    seed = zlib.crc32(name.encode())
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(autouse=True)
def seed(request):
    """The random numbers of a test follow from its function and parameters, not from its file or from earlier tests."""
    _seed(request.node.name)


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef, request):
    """Fixtures that several tests share come before `seed`."""
    if fixturedef.scope != "function":
        _seed(fixturedef.argname)


def pytest_collectstart(collector):
    """A module may draw when it is imported."""
    _seed(collector.path.name)


@pytest.fixture(params=["torch", "triton"])
def device(request) -> Iterator[str]:
    """The device that makes `apply_rope` take one path or the other."""
    if request.param == "triton":
        yield "cuda" if HAS_GPU else "cpu"
    else:
        with use_backend("torch"):
            yield "cpu"


@pytest.fixture
def torch_backend():
    """Compute in torch operations, where the interpreter would be slow and adds nothing."""
    with use_backend("torch"):
        yield


@pytest.fixture(scope="module")
def torch_operations():
    """`torch_backend` for all tests of a module, as Hypothesis asks for."""
    with use_backend("torch"):
        yield
