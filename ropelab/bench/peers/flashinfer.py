"""Call FlashInfer's kernel, which FlashInfer compiles at the first call."""

import contextlib
import importlib
import os
import sysconfig
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType

import torch

from ropelab.bench import packages, replaced, timing
from ropelab.bench.peers.cos_sin_cache import flat, positions
from ropelab.bench.peers.peer import Rotate
from ropelab.bench.workloads import Workload

PACKAGE = "flashinfer-python"
_IMPORTS = ("flashinfer", ".rope")

APPEND = "rope_quantize_fp8_append_paged_kv_cache"
"""The function that writes rotated heads in 8-bit floats to a paged cache, from version 0.6 on."""
NORM_APPEND = "cake_fused_qk_rmsnorm_rope_append_paged_kv_cache"
"""The function that normalizes, rotates, and writes to a paged cache in bfloat16, from version 0.7 on."""
NORM_APPEND_HEADS = (64, 8)
"""The numbers of heads of q and k for which `NORM_APPEND` is compiled here. FlashInfer has (8, 1) besides."""

OWN_KERNELS = (64, 128, 256, 512)
"""The head sizes for which FlashInfer compiles a kernel."""


def module(version: str) -> ModuleType:
    """``flashinfer.rope`` of a version, with its kernel compiled. nvcc takes a minute or two, once for each GPU.

    Raises:
        NotInstalled: the version, a package that it imports, or a GPU is missing, or `timing.stopped` is active. Under
            `timing.stopped`, a separate job compiles the kernel (`compile_kernel`).
        RuntimeError: the compilation failed.
    """
    if not torch.cuda.is_available():
        raise packages.NotInstalled("FlashInfer's CUDA kernel needs a GPU")
    if timing.is_stopped():
        raise packages.NotInstalled("FlashInfer's kernel is compiled by a separate job")
    return compile_kernel(version)


def import_tvm_ffi() -> None:
    """Import tvm_ffi from the environment, if it has the package.

    FlashInfer compiles its kernels anew where tvm_ffi lies in another folder, and `ropelab.bench.peers.quack` would
    import it from a new folder in each process.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("tvm_ffi")


@cache
def compile_kernel(version: str) -> ModuleType:
    """`module` without the checks. FlashInfer keeps the compiled kernel in the cache folder of the user."""
    try:
        with _compiling(version):
            rope = importlib.import_module("flashinfer.rope")
            rope.get_rope_module()
    except ModuleNotFoundError as error:
        raise packages.NotInstalled(f"{PACKAGE} {version} needs {error.name}") from error
    return rope


@contextlib.contextmanager
def _compiling(version: str) -> Iterator[None]:
    """FlashInfer of a version, with ninja of this environment on the search path for programs."""
    import_tvm_ffi()
    path = os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)))
    with replaced.entries(os.environ, {"PATH": path}), packages.imported(PACKAGE, version, *_IMPORTS):
        yield


@cache
def compile_norm_append(version: str) -> None:
    """Compile the kernels of `NORM_APPEND` for `NORM_APPEND_HEADS`, as `compile_kernel` compiles the others.

    Raises:
        ValueError: FlashInfer has no such kernel for the GPU at hand.
    """
    stem = "hq{}_hkv{}".format(*NORM_APPEND_HEADS)
    with _compiling(version):
        kernels = importlib.import_module("flashinfer.jit.cake_fused_qk_rope_append")
        architecture = kernels.arch_for(torch.cuda.get_device_capability())
        for stage in kernels.stages_for(architecture):
            if stage == stem or stage.startswith(f"{stem}_"):
                kernels.load_cake_fused_qk_rope_append_module(stage, architecture)


def function(version: str, name: str) -> Callable:
    """A function of ``flashinfer.rope`` of a version, `APPEND` or `NORM_APPEND`, with its kernels compiled.

    Raises:
        NotInstalled: as `module`; or the version lacks the function.
        ValueError: FlashInfer has no such kernel for the GPU at hand.
    """
    function = getattr(module(version), name, None)
    if function is None:
        raise packages.NotInstalled(f"{PACKAGE} {version} has no {name}")
    if name == NORM_APPEND:
        compile_norm_append(version)

    def call(*arguments, **options):
        with packages.imported(PACKAGE, version, *_IMPORTS):  # the function imports at every call
            return function(*arguments, **options)

    return call


def imports(version: str) -> dict[str, ModuleType]:
    """The name -> the module, for every module of that version of the package."""
    return packages.modules_of(PACKAGE, version, _IMPORTS[0], _IMPORTS[1:])


def require_whole_vectors(head_dim: int, rotary_dim: int, layout: str, itemsize: int) -> None:
    """Refuse heads for which FlashInfer launches a kernel that reads wrong addresses.

    A thread rotates 16 bytes or, if this is more, a 32nd of a head. In the kernel for any head size a thread rotates 32
    bytes. FlashInfer has this kernel since 0.6; earlier versions raise for head sizes outside of ``OWN_KERNELS``. The
    features of a thread must divide the features that rotate, for split-half their half. Otherwise results are wrong,
    and addresses are misaligned or past the end of q. After such an access, no kernel of the process runs.

    Raises:
        NotImplementedError: FlashInfer has no kernel for this head.
    """
    features = max(16 // itemsize, head_dim // 32) if head_dim in OWN_KERNELS else 32 // itemsize
    part = rotary_dim // 2 if layout == "split_half" else rotary_dim
    if part % features or head_dim * itemsize % 16:
        raise NotImplementedError(f"FlashInfer: a thread turns {features} features of {part} and reads past q's end")


def cos_sin_cache(cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """float32 ``[P + 1, R]`` from tables ``[P, R/2]``, with one row more than there are positions.

    For adjacent pairs a thread reads twice as many sines as it needs. The last thread reads past the end of its row.
    """
    table = torch.cat((cos, sin), dim=-1)
    return torch.cat((table, table[-1:]))


def bind(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, version: str) -> Rotate:
    """Rotate into new tensors, with a cache in float32."""
    require_whole_vectors(workload.head_dim, workload.rotary_dim, workload.layout, workload.dtype.itemsize)
    apply = module(version).apply_rope_with_cos_sin_cache
    rows, table = positions(workload, cos.device, torch.int32), cos_sin_cache(cos, sin)
    is_neox = workload.layout == "split_half"

    def rotate(q, k):
        q, k = (None if x is None else x.detach() for x in (q, k))
        flat_q, flat_k = flat(q, workload, "flashinfer"), flat(k, workload, "flashinfer")
        new_q, new_k = apply(rows, flat_q, flat_k, workload.head_dim, table, is_neox)
        return new_q.view(q.shape), new_k.view(k.shape)

    return rotate
