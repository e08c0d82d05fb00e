"""Every test runs with poisoned memory; kernels are interpreted where there is no GPU."""

import os

import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined, so before ropelab is imported

import pytest  # noqa: E402

import ropelab.prepared  # noqa: E402
from ropelab.kernels import rotate_torch  # noqa: E402

torch.set_num_threads(1)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Of ``--numprocesses auto``: a process for each core, but a GPU and its memory belong to one alone."""
    return 0 if HAS_GPU else os.cpu_count()


def pytest_terminal_summary(terminalreporter):
    """Skips are quiet; those of packages that ``make peers`` could not fetch, or was not asked to, are not."""
    skipped = {(report.nodeid, report.longrepr[-1]) for report in terminalreporter.stats.get("skipped", [])}
    lines = [f"{test}: {reason}" for test, reason in sorted(skipped) if "make peers" in reason]
    if lines:
        terminalreporter.section(f"NOT TESTED, for want of packages under build/peers: {len(lines)}", red=True)
        terminalreporter.write_line("\n".join(lines))


def pytest_collection_modifyitems(items):
    for item in items:
        if not HAS_GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU: run `make test` on a machine that has one"))


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill what torch.empty returns with NaN, so that an output element nobody wrote is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["torch", "triton"])
def device(request, monkeypatch) -> str:
    """Where to put tensors so that `apply_rope` takes one path or the other."""
    if request.param == "triton":
        return "cuda" if HAS_GPU else "cpu"
    monkeypatch.setattr(ropelab.prepared, "backend_for", lambda x: rotate_torch)
    return "cpu"
