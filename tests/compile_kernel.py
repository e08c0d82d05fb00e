"""Compile the kernel for a GPU that need not be there, as it would be launched, and look at the code.

Run as a script by test_ptx.py: compiling needs a process in which kernels are not interpreted.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ropelab.kernels import Rotation, rotate_triton

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", int: "i32"}

# head_dim, rotary_dim, q heads, k heads, dtype, and the bytes that a thread must move at once
CONFIGURATIONS = [
    (128, 128, 32, 8, torch.bfloat16, {"split_half": 8, "interleaved": 16}),
    (64, 64, 32, 8, torch.bfloat16, {"split_half": 8, "interleaved": 16}),
    (256, 256, 16, 1, torch.bfloat16, {"split_half": 8, "interleaved": 16}),
    (80, 80, 32, 32, torch.bfloat16, {"split_half": 8, "interleaved": 16}),
    (96, 96, 32, 32, torch.bfloat16, {"split_half": 8, "interleaved": 16}),
    (72, 72, 16, 16, torch.bfloat16, {"split_half": 8, "interleaved": 16}),
    (128, 64, 32, 8, torch.bfloat16, {"split_half": 8, "interleaved": 16}),
    (128, 128, 32, 8, torch.float32, {"split_half": 16, "interleaved": 16}),
]


def compiled(launch, arguments, capability: int):
    """``launch`` on ``arguments`` (tensors and ints, the kernel's first), compiled for a GPU of ``capability``."""
    kernel, values = launch.kernel, (*arguments, *launch.fixed)
    signature, constants, attributes = {}, {}, {}
    for i, (parameter, value) in enumerate(zip(kernel.params, values, strict=True)):
        if parameter.is_constexpr:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        signature[parameter.name] = TYPES[value.dtype if isinstance(value, torch.Tensor) else int]
        if isinstance(value, torch.Tensor) or (not parameter.do_not_specialize and value % 16 == 0):
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)


def rotation(head_dim, rotary_dim, q_heads, k_heads, dtype, layout, capability):
    """The kernel that `apply_rope` launches for contiguous q and k of these shapes."""
    q, k = (torch.empty(1, 64, heads, head_dim, dtype=dtype) for heads in (q_heads, k_heads))
    outs = [torch.empty_like(q), torch.empty_like(k)]
    table = torch.empty(64, rotary_dim // 2)
    interleaved = layout == "interleaved"
    launch = rotate_triton.plan(
        [q, k], outs, table, table, None, Rotation(rotary_dim, interleaved=interleaved, out_interleaved=interleaved)
    )
    return compiled(launch, (q, k, *outs, table, table, table, 0, 64), capability)


def widest(ptx: str, instruction: str) -> int:
    """Bytes of the widest access among those of ``instruction`` without a cache hint (which the tables have)."""
    found = re.findall(rf"{instruction}\.global(?:\.v(\d))?\.b(\d+)", ptx)
    return max(int(count or 1) * int(bits) // 8 for count, bits in found)


def local_memory(cubin: bytes) -> int:
    """Bytes of stack and local memory a thread needs: more than none means that registers were spilled."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage = subprocess.run([CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    sizes = re.findall(r"(?:STACK|LOCAL):(\d+)", usage)
    assert sizes, f"no resource usage in {usage!r}"
    return sum(map(int, sizes))


def main(capability: int) -> None:
    for *configuration, widths in CONFIGURATIONS:
        for layout, width in widths.items():
            kernel = rotation(*configuration, layout, capability)
            ptx = kernel.asm["ptx"]
            name = f"sm_{capability} {layout} {configuration}"
            assert widest(ptx, "ld") >= width, f"{name}: loads of {widest(ptx, 'ld')} bytes, expected {width}"
            assert widest(ptx, "st") >= width, f"{name}: stores of {widest(ptx, 'st')} bytes, expected {width}"
            assert re.search(r"evict_last\S*\.v4\.b32", ptx), f"{name}: tables are not read 16 bytes at a time"
            assert local_memory(kernel.asm["cubin"]) == 0, f"{name}: registers were spilled"
            print(f"{name}: {width} bytes, nothing spilled")


if __name__ == "__main__":
    main(int(sys.argv[1]))
