"""The direct launch hands the C function of Triton's launcher what Triton itself hands to it."""

from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")

from ropelab.kernels import direct_launch, launch  # noqa: E402  # need Triton
from ropelab.kernels.direct_launch import direct_start  # noqa: E402

GRID, STREAM, FIXED = (5, 3, 2), 77, (7, -8, "constant", 2.5)
INSTALLED = ".".join(triton.__version__.split(".")[:2])


class Compiled:
    """A compiled kernel with Triton's own launcher, whose C function keeps its arguments in ``calls``."""

    def __init__(self, calls: list, **changed):
        from triton.backends.nvidia.driver import CudaLauncher

        self.run = CudaLauncher.__new__(CudaLauncher)
        attributes = {
            "launch": lambda *arguments: calls.append(arguments), "num_ctas": 1, "global_scratch_size": 0,
            "global_scratch_align": 1, "profile_scratch_size": 0, "profile_scratch_align": 1,
            "launch_cooperative_grid": False, "launch_pdl": True, "arg_annotations": ["a"], "kernel_signature": b"s",
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


def started(version: str, monkeypatch, **changed) -> tuple[tuple, tuple]:
    """The C function's arguments from Triton's launcher and from the direct launch, for three tensors and a number."""
    tensors = [torch.empty(4) for _ in range(3)]
    calls: list[tuple] = []
    compiled = Compiled(calls, **changed)
    monkeypatch.setattr(triton, "__version__", version)
    start = direct_start(compiled, GRID, FIXED, 0, through_triton=pytest.fail)
    addresses = [x.data_ptr() for x in tensors]
    compiled[GRID](*addresses, 9, *FIXED)
    start((*tensors, 9), addresses)
    by_triton, direct = calls
    return by_triton, direct


@pytest.mark.skipif(INSTALLED not in ("3.6", "3.7"), reason=f"Triton {INSTALLED} launches through Triton")
def test_the_c_function_gets_what_triton_hands_to_it(monkeypatch, one_stream):
    by_triton, direct = started(triton.__version__, monkeypatch)
    assert direct == by_triton and STREAM in direct and GRID == direct[:3]


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1"])
def test_another_release_of_a_known_version(version, monkeypatch, one_stream):
    """Both known orders of arguments are tested, whatever version is installed."""
    _, direct = started(version, monkeypatch)
    arguments = direct[-1] if version == "3.7.1" else direct[-8:]
    assert arguments[3:] == (9, *FIXED) and direct[:5] == (*GRID, STREAM, 4321)


@pytest.mark.parametrize("version", ["3.5.1", "3.8.0", "4.0.0+git1234", "unknown"])
def test_other_versions_launch_through_triton(version, monkeypatch):
    monkeypatch.setattr(triton, "__version__", version)
    assert direct_start(Compiled([]), GRID, FIXED, 0, print) is None
    calls: list[tuple] = []
    check_launches(monkeypatch, calls, Compiled(calls))


@pytest.mark.parametrize("scratch", ["global_scratch_size", "profile_scratch_size"])
def test_a_kernel_with_scratch_memory_launches_through_triton(scratch, monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.7.1")
    assert direct_start(Compiled([], **{scratch: 128}), GRID, FIXED, 0, print) is None


def test_a_known_version_launches_directly(monkeypatch, one_stream):
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    calls: list[tuple] = []
    check_launches(monkeypatch, calls, Compiled(calls, launch_cooperative_grid=True))


def check_launches(monkeypatch, calls: list, compiled: Compiled) -> None:
    """Launch three times: the JIT compiles for each alignment once, and no other call passes the JIT."""
    compiled_for = []

    class Kernel:
        arg_names = ("x", "n", "A", "B")

        def __getitem__(self, grid):
            return lambda *arguments, **options: compiled_for.append(arguments) or compiled

    monkeypatch.setattr(torch.version, "hip", None)
    launcher = launch.Launch(Kernel(), GRID, (), {"A": 1, "B": 2}, {}, torch.device("cpu"))
    launcher.device_index, launcher._compiled = None, {}
    monkeypatch.setattr(direct_launch, "_current_stream", {None: STREAM}.get)
    x = torch.empty(64)
    for tensor in (x, x, x[1:], x[1:], x):
        launcher(tensor, 6)
    assert [arguments[0].data_ptr() for arguments in compiled_for] == [x.data_ptr(), x[1:].data_ptr()]
    assert len(calls) == 3


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1"])
def test_a_profiler_sees_every_launch(version, monkeypatch, one_stream):
    """Hooks get an object that only Triton's launch path makes, so the launch then takes this path."""
    monkeypatch.setattr(triton, "__version__", version)
    calls, through = [], []
    start = direct_start(Compiled(calls), GRID, FIXED, 0, lambda *given: through.append(given))
    runtime, hook = triton.knobs.runtime, lambda metadata: None
    x = torch.empty(4)
    for hooks in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        hooks.add(hook)
        start((x, 1), [x.data_ptr()])
        hooks.remove(hook)
    monkeypatch.setattr(direct_launch, "_runtime", SimpleNamespace(launch_enter_hook=hook, launch_exit_hook=None))
    start((x, 1), [x.data_ptr()])
    assert len(through) == 3 and not calls


@pytest.mark.gpu
def test_both_ways_give_the_same_bits(monkeypatch):
    import ropelab
    from ropelab.call import rotation
    from ropelab.call.launch_cache import LaunchCache

    q, k = (torch.randn(2, 5, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (8, 2))
    cos, sin = ropelab.rotary_table(8, 64, device="cuda")
    results = []
    for version in (triton.__version__, "0.0.0"):
        monkeypatch.setattr(triton, "__version__", version)
        monkeypatch.setattr(rotation, "prepared_calls", LaunchCache())
        for _ in range(3):
            results.append(ropelab.apply_rope(q, k, cos=cos, sin=sin, offsets=3))
    for ys in results[1:]:
        assert all(map(torch.equal, ys, results[0]))
