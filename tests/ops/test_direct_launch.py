"""The direct launch hands the C function of Triton's launcher what Triton itself hands to it."""

import re
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

triton = pytest.importorskip("triton")

from ropelab.kernels import direct_launch, launch  # noqa: E402  # need Triton
from ropelab.kernels.choices import Choices  # noqa: E402
from ropelab.kernels.direct_launch import direct_start  # noqa: E402
from tests.support import forget  # noqa: E402

GRID, STREAM, FIXED = (5, 3, 2), 77, (7, -8, (16, None), "constant")
INSTALLED = direct_launch.VERSION


def supported() -> list[str]:
    """The versions from the oldest that the package allows to the newest that the README says it was tested with."""
    root = Path(__file__).parents[2]
    (oldest,) = re.findall(r"triton>=3\.(\d+)", (root / "pyproject.toml").read_text())
    tested = re.findall(r"triton 3\.(\d+)", (root / "README.md").read_text())
    return [f"3.{minor}" for minor in range(int(oldest), max(map(int, tested)) + 1)]


SUPPORTED = supported()


class At(NamedTuple):
    """The tensors of a kernel, of which the second is not given."""

    x: torch.Tensor | int
    y: torch.Tensor | int | None
    z: torch.Tensor | int


class Compiled:
    """A compiled kernel with Triton's own launcher, whose C function keeps its arguments in ``calls``."""

    def __init__(self, calls: list, **changed):
        from triton.backends.nvidia.driver import CudaLauncher

        self.run = CudaLauncher.__new__(CudaLauncher)
        attributes = {
            "launch": lambda *arguments: calls.append(arguments), "num_ctas": 1, "global_scratch_size": 0,
            "global_scratch_align": 1, "profile_scratch_size": 0, "profile_scratch_align": 1,
            "launch_cooperative_grid": False, "launch_pdl": True, "arg_annotations": ["a"], "kernel_signature": b"s",
            "gsan_enabled": False,
        }  # fmt: skip
        for name, value in (attributes | changed).items():
            setattr(self.run, name, value)
        self.function, self.packed_metadata = 4321, (4, 1, 0)

    def __getitem__(self, grid):
        """Launch as ``CompiledKernel`` does without a profiler."""
        return lambda *arguments: self.run(
            *grid, STREAM, self.function, self.packed_metadata, None, None, None, *arguments
        )


@pytest.fixture
def one_stream(monkeypatch):
    monkeypatch.setattr(direct_launch, "_current_stream", {0: STREAM}.__getitem__)
    monkeypatch.setattr(triton.runtime, "driver", SimpleNamespace(active=None))  # which needs a GPU


@pytest.fixture
def version(request, monkeypatch) -> str:
    """The version of Triton that the launch is prepared for."""
    monkeypatch.setattr(direct_launch, "VERSION", request.param)
    direct_launch._warn_once.cache_clear()
    return request.param


versions = pytest.mark.parametrize("version", SUPPORTED, indirect=True)
unknown = pytest.mark.parametrize("version", ["3.5", "3.99", "4.0", "unknown"], indirect=True)


def started(**changed) -> tuple[tuple, tuple]:
    """The C function's arguments from Triton's launcher and from the direct launch, for two tensors and a number."""
    calls: list[tuple] = []
    compiled = Compiled(calls, **changed)
    start = direct_start(compiled, GRID, FIXED, 0, through_triton=pytest.fail)
    assert start is not None, f"no direct launch for Triton {direct_launch.VERSION}"
    tensors = At(torch.empty(4), None, torch.empty(4))
    addresses = (tensors.x.data_ptr(), 0, tensors.z.data_ptr())
    compiled[GRID](At(*addresses), 9, *FIXED)
    start(tensors, addresses, (9,))
    by_triton, direct = calls
    return by_triton, direct


@pytest.mark.skipif(INSTALLED not in SUPPORTED, reason=f"Triton {INSTALLED} launches through Triton")
def test_the_c_function_gets_what_triton_hands_to_it(one_stream):
    by_triton, direct = started()
    assert direct == by_triton and STREAM in direct and GRID == direct[:3]


@versions
def test_every_supported_version_has_a_direct_launch(version, one_stream):
    """All known orders of arguments are tested, whatever version is installed."""
    _, direct = started()
    arguments = direct[-2 - len(FIXED) :] if version == "3.6" else direct[-1]
    assert arguments[1:] == (9, *FIXED) and len(arguments[0]) == len(At._fields)
    assert direct[:7] == (*GRID, STREAM, 4321, False, True)


@unknown
def test_other_versions_launch_through_triton_and_warn_once(version, monkeypatch, one_stream):
    with pytest.warns(UserWarning, match=f"Triton {version}: ropelab knows the launch paths of 3.6, .* only"):
        assert direct_start(Compiled([]), GRID, FIXED, 0, pytest.fail) is None
    calls: list[tuple] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_launches(monkeypatch, calls, Compiled(calls))


@versions
@pytest.mark.parametrize("need", ["global_scratch_size", "profile_scratch_size", "gsan_enabled"])
def test_a_kernel_that_needs_more_arguments_launches_through_triton(need, version):
    assert direct_start(Compiled([], **{need: 128}), GRID, FIXED, 0, pytest.fail) is None


@versions
def test_a_known_version_launches_directly(version, monkeypatch, one_stream):
    calls: list[tuple] = []
    check_launches(monkeypatch, calls, Compiled(calls, launch_cooperative_grid=True))


def check_launches(monkeypatch, calls: list, compiled: Compiled) -> None:
    """Launch five times: the JIT compiles for each alignment once, and no other call passes the JIT."""
    compiled_for = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **options: compiled_for.append(arguments) or compiled

    monkeypatch.setattr(torch.version, "hip", None)
    launcher = launch.Launch(Kernel(), GRID, (7,), At(1, None, 1), Choices(), {}, torch.device("cpu"))
    monkeypatch.setattr(direct_launch, "_current_stream", {None: STREAM}.get)
    x = torch.empty(64)
    for tensor in (x, x, x[1:], x[1:], x):
        launcher((tensor, None, x), 6)
    assert [arguments[0].x.data_ptr() for arguments in compiled_for] == [x.data_ptr(), x[1:].data_ptr()]
    choices = [launcher.fixed[-1], replace(launcher.fixed[-1], ALIGNED=False)]
    expected = [[6, *launcher.fixed[:-1], each] for each in choices]
    assert [rest for at, *rest in compiled_for if type(at) is At] == expected
    assert len(calls) == 3


@versions
def test_a_profiler_sees_every_launch(version, monkeypatch, one_stream):
    """Hooks get an object that only Triton's launch path makes, so the launch then takes this path."""
    calls, through = [], []
    start = direct_start(Compiled(calls), GRID, FIXED, 0, lambda *given: through.append(given))
    runtime, hook = triton.knobs.runtime, lambda metadata: None
    given = At(torch.empty(4), None, torch.empty(4)), (16, 0, 32), (1,)
    for hooks in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        hooks.add(hook)
        start(*given)
        hooks.remove(hook)
    monkeypatch.setattr(direct_launch, "_runtime", SimpleNamespace(launch_enter_hook=hook, launch_exit_hook=None))
    start(*given)
    assert through == [given] * 3 and not calls


@pytest.mark.gpu
def test_both_ways_give_the_same_bits(monkeypatch):
    import ropelab

    q, k = (torch.randn(2, 5, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2))
    cos, sin = ropelab.rotary_table(8, 64, device="cuda")
    results = []
    for version in (INSTALLED, "0.0"):
        monkeypatch.setattr(direct_launch, "VERSION", version)
        forget(monkeypatch)
        for _ in range(3):
            results.append(ropelab.apply_rope(q, k, cos=cos, sin=sin, offsets=3))
    for ys in results[1:]:
        assert all(map(torch.equal, ys, results[0]))
