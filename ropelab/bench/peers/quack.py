"""Call quack's rotary and its products: kernels in CuTe DSL, which the DSL compiles at the first call for a dtype.

The wheels of the DSL divide one package among them, so this module links their files into one folder. The DSL imports
further modules at its first call, so the folder stays on the path of the process, behind everything else.
"""

import importlib
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

import torch

from ropelab.angles.frequencies import inverse_frequencies
from ropelab.bench import packages
from ropelab.bench.peers import flashinfer
from ropelab.bench.peers.peer import Rotate
from ropelab.bench.workloads import Workload
from ropelab.layout.seq_format import from_bshd, to_bshd

PACKAGE = "quack-kernels"
_DSL = {f"nvidia-cutlass-dsl-libs-{part}": "4.8.1" for part in ("core", "base", "cu13")}
_PYTHON = (3, 12)
"""The Python for which the libraries of the wheels are built."""


@cache
def module(version: str, name: str = "quack.rotary") -> ModuleType:
    """A module of a version.

    Raises:
        NotInstalled: a package is missing, or it is for another Python.
    """
    if sys.version_info[:2] != _PYTHON:
        raise packages.NotInstalled(f"{PACKAGE}: the libraries of its DSL need Python {_PYTHON[0]}.{_PYTHON[1]}")
    wanted = {PACKAGE: version, "apache-tvm-ffi": "0.1.15"} | _DSL
    flashinfer.import_tvm_ffi()
    folder = Path(_linked(tuple(packages.locate(*package)[1] for package in wanted.items())).name)
    paths = [str(folder), str(folder / "nvidia_cutlass_dsl" / "dsl_packages")]
    sys.path[:0] = paths
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise packages.NotInstalled(f"{PACKAGE} {version} needs {error.name}") from error
    except RuntimeError as error:  # the DSL finds no library for the version of CUDA
        raise packages.NotInstalled(f"{PACKAGE} {version}: {error}") from error
    finally:
        sys.path[:] = [*sys.path[len(paths) :], *paths]


@cache
def _linked(wheels: tuple[Path, ...]) -> tempfile.TemporaryDirectory:
    """A folder with a link to every file of the wheels; it lives as long as the process."""
    folder = tempfile.TemporaryDirectory(prefix="quack-")
    for wheel in wheels:
        for file in (path for path in wheel.rglob("*") if path.is_file()):
            link = Path(folder.name) / file.relative_to(wheel)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file)
    return folder


def bind(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, version: str, inplace: bool = False) -> Rotate:
    """A launch for q and a launch for k."""
    apply_rotary_emb, fmt = module(version).apply_rotary_emb, workload.seq_format
    options = {"interleaved": workload.layout == "interleaved", "inplace": inplace}
    if workload.lengths:
        options |= {"cu_seqlens": workload.cu_seqlens(cos.device), "max_seqlen": max(workload.lengths)}

    def rotate(x):
        if inplace:  # a leaf that requires grad cannot be overwritten
            x = x.detach()
        if workload.lengths:
            return apply_rotary_emb(x, cos, sin, **options)
        return from_bshd(apply_rotary_emb(to_bshd(x, fmt), cos, sin, **options), fmt)

    return lambda q, k: (rotate(q), None if k is None else rotate(k))


def bind_qkv(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, version: str) -> Rotate:
    """One launch for q and k, in place in their packed qkv."""
    rotate_qkv, interleaved = module(version).apply_rotary_emb_qkv_, workload.layout == "interleaved"
    heads = workload.q_heads + 2 * workload.k_heads

    def rotate(q, k):
        q, k = q.detach(), k.detach()
        qkv = q.as_strided((*q.shape[:2], heads, q.shape[3]), q.stride())
        rotate_qkv(qkv, cos, sin, interleaved, num_heads_q=workload.q_heads)
        return q, k

    return rotate


def bind_kv(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, version: str) -> Rotate:
    """A launch for q in place, and the form for a packed kv, which launches the kernel on the part of k in place."""
    rotary, interleaved = module(version), workload.layout == "interleaved"

    def rotate(q, k):
        q, k = q.detach(), k.detach()
        rotary.apply_rotary_emb(q, cos, sin, interleaved, inplace=True)
        batch, tokens, heads, dim = k.shape
        strides = *k.stride()[:2], heads * k.stride(2), *k.stride()[2:]
        rotary.apply_rotary_emb_kv_(k.as_strided((batch, tokens, 2, heads, dim), strides), cos, sin, interleaved)
        return q, k

    return rotate


def product() -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The product ``x W^T`` of x ``[T, K]`` and W ``[N, K]``, with the default configuration."""
    gemm = module(packages.locate(PACKAGE)[0], "quack.gemm_interface").gemm
    return lambda x, weight: gemm(x, weight.T, tuned=False)


def projection(
    positions: torch.Tensor, q_heads: int, k_heads: int, head_dim: int
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """`product`, whose epilogue rotates adjacent pairs of q and k by angles that it computes itself."""
    epilogue = module(packages.locate(PACKAGE)[0], "quack.epilogue.rotary")
    theta = inverse_frequencies(head_dim).to(positions.device)
    frequencies = epilogue.make_interleaved_inv_freq(theta, (q_heads + k_heads) * head_dim, k_heads * head_dim)
    operands = {"pos": positions.float()[None], "freq": frequencies.float()[None]}
    return lambda x, weight: epilogue.rope_posfreq_epi(x, weight.T, tuned=False, **operands)["D"]
