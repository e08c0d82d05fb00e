"""The random inputs of several test files, and the comparison with the definition."""

import contextlib
import itertools
import os
import re
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.version import Version

from ropelab import reference
from ropelab.angles.rope_parameters import Rope
from ropelab.bench import records
from ropelab.call import operation
from ropelab.kernels import INTERPRETED
from ropelab.layout.pairing import join, pairs
from ropelab.layout.seq_format import from_bshd


def older(package: str) -> str:
    """The reason to skip a test that needs the version of constraints.txt; "" if the installed version is no older."""
    constraints = (Path(__file__).parents[1] / "constraints.txt").read_text()
    wanted = re.search(rf"^{package}==(\S+)", constraints, re.MULTILINE)[1]
    try:
        found = metadata.version(package)
    except metadata.PackageNotFoundError:
        return f"needs {package}"
    return "" if Version(found) >= Version(wanted) else f"needs {package} {wanted} of constraints.txt, got {found}"


def compile_for(target: str, module: str, *path: str) -> None:
    """Compile kernels for a GPU that need not be there, by a module of `tests.compile`, where they are not interpreted.

    Args:
        path: folders whose packages come before those of this environment.
    """
    root = Path(__file__).parents[1]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join((*path, str(root)))
    command = [sys.executable, "-m", f"tests.compile.{module}", target]
    result = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def not_interpreted(test):
    """The test, in torch operations where its kernels would be interpreted; tests/ops holds these to the same bits."""
    return pytest.mark.usefixtures("torch_backend")(test) if INTERPRETED else test


def all_but_one(*axes) -> list[tuple]:
    """Half of the product of axes of two values or more: each combination of values of all axes but any one."""
    numbered = itertools.product(*(tuple(enumerate(axis)) for axis in axes))
    return [tuple(value for _, value in case) for case in numbered if sum(number for number, _ in case) % 2 == 0]


def forget(monkeypatch) -> None:
    """Let the calls of a test prepare their launches anew, and keep those launches from other tests."""
    monkeypatch.setattr(operation, "prepared_calls", operation.PreparedCalls())


def draw(batch, seq_len, heads, head_dim, *, seq_format="bshd", dtype=torch.float32, device="cpu") -> torch.Tensor:
    """Standard normal numbers, contiguous in ``seq_format``."""
    like = torch.empty(batch, seq_len, heads, head_dim, device="meta")
    return torch.randn(from_bshd(like, seq_format).shape, dtype=torch.float64).to(device, dtype)


def assert_rotated(actual, x, cos, sin, *, layout, out_layout=None, rotary_slice=None, seq_format="bshd", **where):
    """``actual`` is the rotation of ``x`` up to the roundings that the arithmetic cannot avoid.

    y0 = x0 c - x1 s in a compute type of unit roundoff u rounds two products and a difference. The error is at most
    ((1 + u)^2 - 1)(|x0 c| + |x1 s|). Storing rounds once more, by u_out |y| (2 u_out where the interpreter truncates
    bfloat16). Features that are not rotated must be the same bits.

    Args:
        where: positions, offsets and inverse, as for `ropelab.apply_rope`.
    """
    assert actual.shape == x.shape and actual.dtype == x.dtype
    options = {"layout": layout, "out_layout": out_layout, "rotary_slice": rotary_slice, "seq_format": seq_format}
    expected = reference.rotate(x, cos, sin, **options, **where)
    first, end = rotary_slice or (0, 2 * cos.shape[-1])

    unit = torch.finfo(torch.promote_types(torch.promote_types(x.dtype, cos.dtype), torch.float32)).eps / 2
    x0, x1 = pairs(x[..., first:end].double().abs(), layout)
    magnitude = join(x0 + x1, x0 + x1, out_layout or layout) * max(cos.abs().max().item(), sin.abs().max().item())
    # The reference computes in float64, and adds the same bound for float64.
    bound = ((1 + unit) ** 2 - 1 + 2 * torch.finfo(torch.float64).eps) * magnitude
    out = torch.finfo(x.dtype)
    unit_out = out.eps if x.dtype == torch.bfloat16 and INTERPRETED else out.eps / 2
    bound = bound + unit_out * (expected[..., first:end].abs() + bound) + out.tiny * out.eps

    error = (actual[..., first:end].double() - expected[..., first:end]).abs()
    assert (error <= bound).all(), f"error {error.max():.3g} over bound by a factor of {(error / bound).max():.3g}"
    for passed in (slice(None, first), slice(end, None)):
        assert torch.equal(actual[..., passed].double(), expected[..., passed])


def assert_rotated_like(ours, theirs, x, rope: Rope, angles, inverse_frequencies=None):
    """A model's float32 rotation of ``x`` agrees with ours, as far as its float32 angles allow.

    Frequencies that are off by df move an angle p f by ``p df``, and the rounding of the angle moves it by ``u p f``.
    The sine and cosine are then right to 2u, and so is each product with the attention factor A; both rotations round
    three times, and their tables once. The sum is ``A (|x0| + |x1|) (p df + u p f + 12 u)``. Other features are the
    same bits.

    Args:
        ours, theirs, x: ``[B, H, S, D]``.
        angles: float64 ``[..., S, R/2]``, the angle of each token and plane.
        inverse_frequencies: the model's inverse frequencies, or None where it makes its angles in another way.
    """
    unit = torch.finfo(torch.float32).eps / 2
    theta = rope.inverse_frequencies
    off = 0.0 if inverse_frequencies is None else (inverse_frequencies.double() - theta).abs()
    relative = torch.where(theta > 0, off / theta, 0) + unit
    x0, x1 = pairs(x[..., : rope.rotary_dim].double().abs(), rope.layout)
    bound = rope.attention_factor * (x0 + x1) * (angles.abs() * relative + 12 * unit)
    bound = join(bound, bound, rope.out_layout or rope.layout)
    error = (ours - theirs).double().abs()[..., : rope.rotary_dim]
    assert (error <= bound).all(), f"error {error.max():.3g} over bound by a factor of {(error / bound).max():.3g}"
    assert torch.equal(ours[..., rope.rotary_dim :], theirs[..., rope.rotary_dim :])


def change(frame, where=None, **changes):
    """A copy of the frame with new values in the rows that the query selects."""
    frame = frame.copy()
    rows = frame.index if where is None else frame.query(where).index
    for column, value in changes.items():
        frame[column] = frame[column].astype(object)
        frame.loc[rows, column] = value
    return frame.infer_objects()


def replaced_since_the_commit() -> bool:
    """Whether records were measured anew; without git nobody can tell, and the texts have to follow."""
    return bool(records._run("git", "-C", str(records.ROOT), "status", "--porcelain", "--", "data/measurements"))


def wait_for_the_end(pids, seconds=120):
    """Wait until all these processes have ended. Nobody may have asked for their exit codes yet."""
    import psutil

    def alive(pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE

    ends = time.monotonic() + seconds
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < ends, left
        time.sleep(0.05)
