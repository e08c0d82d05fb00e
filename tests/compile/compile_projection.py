"""Compile the product that rotates for a GPU that need not be there, and look at the code.

Run as a script by test_ptx.py: compiling needs a process in which kernels are not interpreted.
"""

import re
import sys
from unittest import mock

import torch

from ropelab.bench import compiled as compiling
from ropelab.kernels import Rotation, projection_triton
from ropelab.kernels.rotation import Norm
from ropelab.kernels.tensors import ProjectionTensors
from tests.compile import compile_kernel

_SECTIONS = (0,) * 16 + (1,) * 24 + (2,) * 24
"""The axis of each pair in Qwen2-VL."""
_INTERLEAVED_SECTIONS = tuple([0, 1, 2] * 20 + [0] * 4)
"""The axis of each pair in Qwen3-VL."""

MOST_SHARED = 227 * 1024
"""The bytes of shared memory that a program may have on sm_90."""


def compiled(
    head_dim=128, *, rotary_dim=None, interleaved=True, norm=False, bias=False, positions=True, free=False,
    cache=False, axes=None, sequences=1,
):  # fmt: skip
    """The kernel for sequences of 4,096 tokens of 4,096 inputs, 32 heads of q and 8 of k."""
    tokens, inputs, rotary_dim = 4096, 4096, rotary_dim or head_dim

    def empty(*sizes, dtype=torch.bfloat16):
        return torch.empty(sizes, dtype=dtype, device="meta")

    columns = (rotary_dim // 2, 3) if free else (tokens, rotary_dim // 2)
    tables = [empty(*columns, dtype=torch.int64 if free else torch.float32)] * 2
    weights = [empty(head_dim) if norm else None] * 2
    caches = [empty(tokens // 16, 16, 8, head_dim)] * 2 if cache else [None] * 2
    given = ProjectionTensors(
        *caches, empty(sequences, tokens, inputs), empty(48 * head_dim, inputs), empty(48 * head_dim) if bias else None,
        empty(tokens, dtype=torch.int64) if cache else None, *weights,
        empty(sequences, tokens, 32 if cache else 48, head_dim), *tables,
        empty(sequences, tokens, *([3] if axes else []), dtype=torch.int64) if positions else None,
    )  # fmt: skip
    rotation = Rotation(rotary_dim, interleaved=interleaved, out_interleaved=interleaved, table_free=free, axes=axes)
    with mock.patch.object(projection_triton, "_multiprocessors", lambda device: 132):
        planned = projection_triton.plan_project(given, rotation, 32, 8, Norm(1e-6) if norm else None)
    return compiling.compiled(planned.launch, (given, 0, tokens, *planned.descriptors(given)), 90)


def main(capability: int) -> None:
    """The instructions of the product follow one another, tables move without spills, and shared memory suffices."""
    assert capability == 90
    for options in (
        {}, {"interleaved": False}, {"rotary_dim": 64}, {"positions": False}, {"bias": True},
        {"positions": False, "sequences": 4}, {"norm": True},
        {"free": True}, {"free": True, "norm": True, "interleaved": False}, {"head_dim": 64}, {"head_dim": 256},
        {"cache": True}, {"cache": True, "norm": True, "interleaved": False},
        {"axes": _SECTIONS, "interleaved": False}, {"axes": _INTERLEAVED_SECTIONS, "norm": True},
    ):  # fmt: skip
        found = compiled(**options)
        code = compile_kernel.disassembled(found.asm["cubin"], "nvdisasm", "-c")
        products = re.findall(r"HGMMA.*", code)
        assert products and not all("gsb0" in one for one in products), f"{options}: the product waits at every step"
        stores = "UTMASTG" in code or options.get("cache")
        assert "UTMALDG" in code and stores, f"{options}: blocks move without descriptors"
        shared = found.metadata.shared
        assert shared <= MOST_SHARED, f"{options}: {shared} bytes of shared memory"
        if options.get("head_dim") != 256:
            assert compile_kernel.local_memory(found.asm["cubin"]) == 0, f"{options}: registers were spilled"
        print(f"{options}: {shared} bytes of shared memory")


if __name__ == "__main__":
    main(int(sys.argv[1]))
