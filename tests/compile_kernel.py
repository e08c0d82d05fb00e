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
from ropelab.layout import LAYOUTS

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.int32: "*i32", int: "i32"}

# head_dim, rotary_dim, q heads, k heads, dtype
SHAPES = [
    (128, 128, 32, 8, torch.bfloat16),
    (64, 64, 32, 8, torch.bfloat16),
    (256, 256, 16, 1, torch.bfloat16),
    (80, 80, 32, 32, torch.bfloat16),
    (96, 96, 32, 32, torch.bfloat16),
    (72, 72, 16, 16, torch.bfloat16),
    (128, 64, 32, 8, torch.bfloat16),
    (128, 128, 32, 8, torch.float32),
]
# What changes the code beyond the shape: how q and k lie in memory, and how a token's row is found.
VARIANTS = {
    "contiguous": {},
    "bhsd": {"storage": "bhsd"},
    "qkv": {"storage": "qkv"},
    "positions": {"positions": torch.empty(1, 64, dtype=torch.int32)},
    "offsets": {"positions": torch.empty(1, dtype=torch.int32), "rotation": {"offsets": True}},
    "full width": {"rotation": {"full_width": True}},
    "backward": {"rotation": {"transpose": True}},
}


def width_of(head_dim, dtype, layout, storage="contiguous") -> int:
    """Bytes of q that a thread moves at once: halves of narrow heads in bfloat16 8, as measured (kernels/tiles.py)."""
    narrow = layout == "split_half" and dtype == torch.bfloat16 and head_dim <= 128 and storage != "bhsd"
    return 8 if narrow else 16


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


def rotation(shape, layout, capability, storage="contiguous", positions=None, rotation=None):
    """The kernel that `apply_rope` launches for q and k of this shape."""
    head_dim, rotary_dim, q_heads, k_heads, dtype = shape
    if storage == "qkv":
        qkv = torch.empty(1, 64, q_heads + 2 * k_heads, head_dim, dtype=dtype)
        q, k = qkv[:, :, :q_heads], qkv[:, :, q_heads : q_heads + k_heads]
    else:
        q, k = (torch.empty(1, 64, heads, head_dim, dtype=dtype) for heads in (q_heads, k_heads))
    if storage == "bhsd":
        q, k = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k))
    outs = [torch.empty_like(q), torch.empty_like(k)]
    interleaved = layout == "interleaved"
    options = Rotation(rotary_dim, interleaved=interleaved, out_interleaved=interleaved, **(rotation or {}))
    table = torch.empty(64, rotary_dim if options.full_width else rotary_dim // 2)
    launch = rotate_triton.plan([q, k], outs, table, table, positions, options)
    return compiled(launch, (q, k, *outs, table, table, table if positions is None else positions, 0, 64), capability)


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


def check(name: str, kernel, width: int) -> None:
    ptx = kernel.asm["ptx"]
    assert widest(ptx, "ld") >= width, f"{name}: loads of {widest(ptx, 'ld')} bytes, expected {width}"
    assert widest(ptx, "st") >= width, f"{name}: stores of {widest(ptx, 'st')} bytes, expected {width}"
    assert re.search(r"evict_last\S*\.v4\.b32", ptx), f"{name}: tables are not read 16 bytes at a time"
    assert local_memory(kernel.asm["cubin"]) == 0, f"{name}: registers were spilled"
    print(f"{name}: {width} bytes, nothing spilled")


def main(capability: int) -> None:
    for layout in LAYOUTS:
        for shape in SHAPES:
            kernel = rotation(shape, layout, capability)
            check(f"sm_{capability} {layout} {shape}", kernel, width_of(shape[0], shape[-1], layout))
        for name, variant in VARIANTS.items():
            kernel = rotation(SHAPES[0], layout, capability, **variant)
            width = width_of(128, torch.bfloat16, layout, variant.get("storage"))
            check(f"sm_{capability} {layout} {name}", kernel, width)


if __name__ == "__main__":
    main(int(sys.argv[1]))
