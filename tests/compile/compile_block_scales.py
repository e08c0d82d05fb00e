"""Compile the kernels with block scales for a GPU that need not be there, and look at the code.

Run as a script by test_ptx.py: compiling needs a process in which kernels are not interpreted.
"""

import sys
from unittest import mock

import torch

from ropelab.kernels import Rotation, block_scales_triton
from ropelab.kernels.block_scales import Blocks
from ropelab.kernels.tensors import BlockScaledCacheTensors, QuantizeTensors
from tests.compile import compile_kernel, compile_paged_cache

BLOCK_SIZE, PAGE_BYTES = 64, 64 * 584 + 64


def empty(*sizes, dtype=torch.bfloat16):
    return torch.empty(sizes, dtype=dtype, device="meta")


def angles(tokens: int, rotary_dim: int):
    """Tables as the halves of one cache, and positions."""
    cos, sin = empty(tokens, rotary_dim, dtype=torch.float32).chunk(2, -1)
    return cos, sin, empty(1, tokens, dtype=torch.int64)


def launched(plan, tensors, capability, *arguments, **options):
    conversion = "instruction" if capability >= 89 else "e4m3"
    with mock.patch.object(block_scales_triton, "conversion", lambda dtype, device: conversion):
        launch = plan(tensors, *arguments, **options)
    return compile_kernel.compiled(*compile_kernel.with_bytes(launch, (tensors, 0, 4096)), capability)


def quantize(capability, *, heads=64, head_dim=512, groups=8, scales=torch.float32, fold=False, tokens=4096, **options):
    """The kernel of `rope_and_quantize`, or of the indexer with ``fold``."""
    out = empty(1, groups, tokens, heads // groups * head_dim, dtype=torch.float8_e4m3fn).transpose(1, 2)
    numbers = heads // groups * head_dim // 128 // (4 if scales == torch.int32 else 1)
    kept = None if fold else torch.empty_strided(
        (tokens, groups, numbers), (1, numbers * tokens, tokens), dtype=scales, device="meta"
    )  # fmt: skip
    weights, weights_out = (
        empty(tokens, heads, dtype=dtype) if fold else None for dtype in (torch.bfloat16, torch.float32)
    )
    tensors = QuantizeTensors(out, kept, weights_out, empty(1, tokens, heads, head_dim), weights, *angles(tokens, 64))
    rotation = Rotation(64, head_dim - 64, interleaved=True, out_interleaved=True, transpose=not fold)
    blocks = Blocks(128, 1e-4, round_first=fold)
    return launched(block_scales_triton.plan_quantize, tensors, capability, rotation, blocks, 1.0, **options)


def write(capability, *, heads=64, tokens=4096, **options):
    """The kernel of `rope_and_block_scaled_cache`."""
    q, cache = empty(1, tokens, heads, 512), empty(100, PAGE_BYTES, dtype=torch.uint8)
    slots = empty(tokens, dtype=torch.int64)
    tensors = BlockScaledCacheTensors(cache, q, q, empty(tokens, 512), slots, *angles(tokens, 64))
    rotation = Rotation(64, 448, interleaved=True, out_interleaved=True)
    return launched(block_scales_triton.plan_write, tensors, capability, rotation, 1e-6, BLOCK_SIZE, 64, **options)


def main(capability: int) -> None:
    """Accesses of 16 bytes, no spills, heads before positions and tables, and few instructions for a feature."""
    kernels = {
        "output": quantize(capability), "output, one token": quantize(capability, tokens=1),
        "output, int32": quantize(capability, scales=torch.int32),
        "indexer": quantize(capability, head_dim=128, groups=64, fold=True), "cache": write(capability),
    }  # fmt: skip
    for name, found in kernels.items():
        width = 16 if name == "cache" else 8 if capability >= 89 else 4
        ptx, about = found.asm["ptx"], f"sm_{capability} {name}"
        assert compile_kernel.widest(ptx, "ld") >= 16, f"{about}: loads of {compile_kernel.widest(ptx, 'ld')} bytes"
        assert compile_kernel.widest(ptx, "st") >= width, f"{about}: stores of {compile_kernel.widest(ptx, 'st')} bytes"
        assert compile_kernel.local_memory(found.asm["cubin"]) == 0, f"{about}: registers were spilled"
        print(f"{about}: nothing spilled")
    if capability == 90:
        for name in ("output", "output, one token", "output, int32"):
            compile_kernel.check_heads_first(name, kernels[name])
        instructions = compile_kernel.paths(kernels["output"].asm["cubin"])[-1] / 32
        assert instructions < compile_paged_cache.SLOTS, f"output: {instructions:.1f} instructions for a feature"
        print(f"output: {instructions:.1f} instructions for a feature")


if __name__ == "__main__":
    main(int(sys.argv[1]))
