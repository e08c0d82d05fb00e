"""Compile kernels of the study for a GPU that need not be there, and see that they access memory as they say.

Run as a program by test_compiled.py: compiling needs a process in which kernels are not interpreted.
"""

import re
from types import SimpleNamespace

import torch

from ropelab.bench import varlen_models
from ropelab.bench.compiled import compiled
from ropelab.study.documents.sglang import models

WIDTH = {"b16": 2, "b32": 4, "b64": 8, "v2.b32": 8, "v4.b32": 16}


def ptx_of(kernel, constants: dict, arguments: tuple, warps: int) -> str:
    fixed = [constants[name] for name in kernel.arg_names[-len(constants) :]]
    launch = SimpleNamespace(kernel=kernel, fixed=fixed, options={"num_warps": warps})
    return compiled(launch, arguments, 90).asm["ptx"]


def other_grids_read_every_element_twice(heads: int, threads: int) -> None:
    x, angles = torch.empty(64, heads, 128, dtype=torch.bfloat16), torch.empty(64, 128)
    cu_seqlens = torch.empty(9, dtype=torch.int32)
    for kernel, numbers in ((varlen_models._legacy_grid_kernel, ()), (varlen_models._token_linear_kernel, (8,))):
        for interleaved in (False, True):
            constants = varlen_models._constants(x, interleaved, inverse=False)
            warps = constants.pop("num_warps")
            constants = {"GUARD": True} | constants if numbers else constants
            arguments = (*varlen_models._arguments(x, x, angles, cu_seqlens, None, 2, 1), *numbers)
            ptx = ptx_of(kernel, constants, arguments, warps)
            elements = heads * 128 // threads  # of each thread, two bytes at a time
            loads, stores = (len(re.findall(rf"{name}\.global\.b16", ptx)) for name in ("ld", "st"))
            assert (loads, stores) == (2 * elements, elements), (kernel.__name__, interleaved, loads, stores)
            assert "bar.sync" not in ptx, f"{kernel.__name__}: threads exchange what they read"


def a_persistent_kernel_writes_as_wide_as_it_says() -> None:
    q, k = (torch.empty(64, heads, 128, dtype=torch.bfloat16) for heads in (32, 8))
    table = torch.empty(64, 64, dtype=torch.bfloat16)
    for interleaved in (False, True):
        sizes = {"HEAD_DIM": 128, "PAIRS": 64, "BLOCK_PAIRS": 64, "HEADS_AT_ONCE": models._WARPS}
        constants = {name: sizes.get(name, interleaved) for name in models._rotate_heads_kernel.arg_names[-5:]}
        ptx = ptx_of(models._rotate_heads_kernel, constants, (q, k, table, table, 64, 32, 8), models._WARPS)
        stores = {WIDTH[kind] for kind in re.findall(r"st\.global\.(\S+)", ptx)}
        assert stores == {8 if interleaved else 4}, (interleaved, stores)


if __name__ == "__main__":
    for heads, threads in ((32, 256), (12, 128)):  # below 16 heads 4 warps
        other_grids_read_every_element_twice(heads, threads)
    a_persistent_kernel_writes_as_wide_as_it_says()
