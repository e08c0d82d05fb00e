"""Load vLLM's Triton operators of DeepSeek-V4 without the rest of vLLM."""

import hashlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType, SimpleNamespace

import torch
import triton
import triton.language as tl

from ropelab.bench import packages, replaced

PACKAGE = "vllm"
_OPERATORS = "vllm/models/deepseek_v4/common/ops"
FILES = f"{_OPERATORS}/fused_inv_rope_fp8_quant.py", f"{_OPERATORS}/fused_indexer_q.py"


@dataclass(frozen=True)
class Operators:
    """The operators that the files define, the version, and the hash of both files in hexadecimal.

    The operators work on CUDA tensors; positions are int64 ``[T]``, and a cache of cosines and sines is float32
    ``[P, R]``.

    - ``inv_rope_fp8_quant(o, positions, cache, groups, heads_per_group, nope_dim, rope_dim, 128, packed)`` takes
      ``[T, H, D]`` in bfloat16 and returns float8_e4m3fn ``[T, groups, H / groups D]`` and scales.
    - ``indexer_q_rope_quant(positions, q, cache, weights, softmax_scale, head_scale)`` takes ``[T, H, D]`` and
      ``[T, H]`` in bfloat16 and returns float8_e4m3fn and weights in float32.

    ``platform`` is the substitute of vLLM's ``current_platform``; ``platform.is_arch_support_pdl()`` says whether an
    operator is launched before the kernel in front of it has ended.

    (Facts from the files of vLLM 0.33.0.)
    """

    about: Mapping[str, str]
    inv_rope_fp8_quant: Callable
    indexer_q_rope_quant: Callable
    platform: SimpleNamespace


@cache
def operators(version: str | None = None) -> Operators:
    """The operators of a version of vLLM, by default of the newest version that is installed.

    Raises:
        NotInstalled: the version, its files, or a package that a file imports, is not installed.
    """
    version, directory = packages.locate(PACKAGE, version)
    substitutes = _substitutes()
    try:
        with replaced.entries(sys.modules, substitutes):
            found = [packages.load_file(PACKAGE, version, file) for file in FILES]
    except ModuleNotFoundError as error:
        raise packages.NotInstalled(f"{PACKAGE} {version} needs {error.name}") from error
    sys.modules.update({module.__name__: module for module in found})  # Triton finds a module by its name
    digest = hashlib.sha256(b"".join((directory / file).read_bytes() for file in FILES)).hexdigest()
    functions = found[0].fused_inv_rope_fp8_quant, found[1].fused_indexer_q_rope_quant
    called = (partial(_called, function, substitutes) for function in functions)
    return Operators({"version": version, "sha256": digest}, *called, substitutes["vllm.platforms"].current_platform)


def _called(function: Callable, substitutes: dict[str, ModuleType], *arguments):
    with replaced.entries(sys.modules, substitutes):  # a function imports names when it is called
        return function(*arguments)


def _substitutes() -> dict[str, ModuleType]:
    """The modules of vLLM from which the files import, with the few names that they need."""
    supports_pdl = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
    platform = SimpleNamespace(
        fp8_dtype=lambda: torch.float8_e4m3fn, is_arch_support_pdl=lambda: supports_pdl, is_rocm=lambda: False,
        is_xpu=lambda: False, is_cpu=lambda: False,
    )  # fmt: skip
    names = {
        "vllm.platforms": {"current_platform": platform},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.utils.deep_gemm": {"get_tma_aligned_size": _aligned},
        "vllm.utils.import_utils": {"has_cutedsl": lambda: False},
        "vllm.utils.torch_utils": {"direct_register_custom_op": _register},
        "vllm.model_executor.warmup.jit_warmup": {"kernel_launcher": _launcher},
        "vllm.model_executor.warmup.jit_warmup_triton_helper": {
            "LaunchSpec": tuple, "TritonWarmupTensor": object, "VllmTritonJitKernel": _JitKernel,
        },
    }  # fmt: skip
    modules = {name: ModuleType(name) for name in names}
    for name, values in names.items():
        vars(modules[name]).update(values)
        parent = name.rpartition(".")[0]
        while parent:
            modules.setdefault(parent, ModuleType(parent))
            parent = parent.rpartition(".")[0]
    return modules


def _aligned(count: int, itemsize: int) -> int:
    """``count`` elements, rounded up to a multiple of 16 bytes."""
    return -(-count * itemsize // 16) * 16 // itemsize


def _register(op_name: str, op_func: Callable, mutates_args=(), **options) -> None:
    """Register an operator ``torch.ops.vllm.<op_name>``, once in a process."""
    if not hasattr(torch.ops.vllm, op_name):
        schema = torch.library.infer_schema(op_func, mutates_args=list(mutates_args))
        _LIBRARY.define(op_name + schema)
        _LIBRARY.impl(op_name, op_func, "CompositeExplicitAutograd")


_LIBRARY = torch.library.Library("vllm", "FRAGMENT")


class _JitKernel:
    """The base of vLLM's classes with a Triton kernel ``kernel``."""

    def __class_getitem__(cls, key):
        return cls


def _launcher(call: Callable) -> Callable:
    """Launch ``self.kernel`` as a method says that returns a grid and named arguments.

    A parameter of the kernel that is not among these arguments is the argument of the method with the same name, or
    with the name without ``_ptr``.
    """
    signature = inspect.signature(call)

    def launch(self, *arguments, **named):
        grid, given = call(self, *arguments, **named)
        bound = signature.bind(self, *arguments, **named).arguments
        for name in self.kernel.arg_names:
            if name not in given:
                given[name] = bound[name] if name in bound else bound[name.removesuffix("_ptr")]
        self.kernel[grid](**given)

    return launch
