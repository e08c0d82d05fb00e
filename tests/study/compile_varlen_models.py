"""Compile the models of other grids for an H200 that need not be there, and see that they read as they say.

Run as a script by test_packed_bench.py: compiling needs a process in which kernels are not interpreted.
"""

import re
from types import SimpleNamespace

import torch

from ropelab.bench import varlen_models
from tests.compile.compile_kernel import compiled

HEAD_DIM = 128


def main() -> None:
    for heads, threads in ((32, 256), (12, 128)):  # below 16 heads 4 warps
        check(heads, threads)


def check(heads: int, threads: int) -> None:
    x, angles = torch.empty(64, heads, HEAD_DIM, dtype=torch.bfloat16), torch.empty(64, HEAD_DIM)
    cu_seqlens = torch.empty(9, dtype=torch.int32)
    for kernel, numbers in ((varlen_models._legacy_grid_kernel, ()), (varlen_models._token_linear_kernel, (8,))):
        for interleaved in (False, True):
            constants = varlen_models._constants(x, interleaved, inverse=False)
            options = {"num_warps": constants.pop("num_warps")}
            if numbers:
                constants = {"GUARD": True} | constants
            fixed = [constants[name] for name in kernel.arg_names[-len(constants) :]]
            launch = SimpleNamespace(kernel=kernel, fixed=fixed, options=options)
            ptx = compiled(launch, (*varlen_models._arguments(x, x, angles, cu_seqlens, None, 2, 1), *numbers), 90).asm[
                "ptx"
            ]
            elements = heads * HEAD_DIM // threads  # of each thread, two bytes at a time
            loads, stores = (len(re.findall(rf"{name}\.global\.b16", ptx)) for name in ("ld", "st"))
            assert (loads, stores) == (2 * elements, elements), (kernel.__name__, interleaved, loads, stores)
            assert "bar.sync" not in ptx, f"{kernel.__name__}: threads exchange what they read"


if __name__ == "__main__":
    main()
