"""Compile the kernels for a GPU that need not be there, as they would be launched, and look at the code.

Run as a script by test_ptx.py: compiling needs a process in which kernels are not interpreted.
"""

import itertools
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
import triton

from ropelab.bench import compiled as for_gpu
from ropelab.kernels import Rotation, qk_norm_triton, rotate_triton, tile_of
from ropelab.kernels.launch import LaunchWithBytes
from ropelab.kernels.tensors import NormGradients, NormTensors, RotateTensors
from ropelab.layout.pairing import LAYOUTS
from ropelab.positions.axes import mrope_axes

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
# head_dim, rotary_dim, q heads, k heads, dtype
SHAPES = [
    (128, 128, 32, 8, torch.bfloat16),
    (64, 64, 32, 8, torch.bfloat16),
    (256, 256, 16, 1, torch.bfloat16),
    (80, 80, 32, 32, torch.bfloat16),
    (96, 96, 32, 32, torch.bfloat16),
    (72, 72, 16, 16, torch.bfloat16),
    (128, 64, 32, 8, torch.bfloat16),
    (128, 128, 28, 4, torch.bfloat16),
    (128, 128, 32, 8, torch.float32),
    (128, 128, 32, 0, torch.bfloat16),
]
# The properties besides the shape that change the code: how q and k lie in memory, and how a token finds its row.
VARIANTS = {
    "contiguous": {},
    "bhsd": {"storage": "bhsd"},
    "qkv": {"storage": "qkv"},
    "64 tokens": {"tokens": 64},
    "positions": {"positions": torch.empty(1, 64, dtype=torch.int32)},
    "positions of 8 x 1 tokens": {"positions": torch.empty(8, 1, dtype=torch.int32), "batch": 8, "tokens": 1},
    "positions of a view": {"storage": "qkv", "positions": torch.empty(1, 64, dtype=torch.int32)},
    "float64 tables": {"rotation": {"tables": torch.float64}},
    "positions, float64 tables": {
        "positions": torch.empty(1, 64, dtype=torch.int32),
        "rotation": {"tables": torch.float64},
    },
    "offsets": {"positions": torch.empty(1, dtype=torch.int32), "rotation": {"offsets": True}},
    "full width": {"rotation": {"full_width": True}},
    "backward": {"rotation": {"transpose": True}},
}


def width_of(shape, layout) -> int:
    """Bytes of q that a thread can move at once: 16, unless the second half of a head begins elsewhere (36 x 2)."""
    _, rotary_dim, _, _, dtype = shape
    half = rotary_dim // 2 * dtype.itemsize
    return 16 if layout == "interleaved" else min(16, half & -half)


def compiled(launch, arguments: tuple, capability: int | str):
    """The kernel of a launch; it converts no register twice in one instruction, which ptxas 12.8 miscompiles.

    ``{cvt.rn.satfinite.e4m3x2.f32 a, x, x; mov.b32 b, {a, a};}`` leaves bits of another register in b's upper half.
    """
    found = for_gpu.compiled(launch, arguments, capability)
    twice = re.search(r"cvt\.\S+x2\.f32\s+(%rs\d+), (%r\d+), \2;", found.asm.get("ptx", ""))
    assert twice is None, f"sm_{capability}: {twice[0]}"
    return found


def with_bytes(launch, arguments: tuple) -> tuple:
    """The launch of a kernel and its arguments, for a launch that may pass 8-bit floats as bytes."""
    if not isinstance(launch, LaunchWithBytes):
        return launch, arguments
    passed: list = []
    replace(launch, launch=lambda *given: passed.extend(given))(*arguments)
    tensors, *numbers = passed
    return launch.launch, (launch.launch.named(*tensors), *numbers)


def width_of_tile(shape, layout, **variant) -> int:
    """Bytes of q that a thread of the chosen tile means to move at once."""
    tile = tile_of.rotate(*call(shape, layout, **variant))
    return tile.pairs_per_access * shape[-1].itemsize * (2 if layout == "interleaved" else 1)


def call(shape, layout, storage="contiguous", positions=None, rotation=None, **size) -> tuple:
    """The arguments of `rotate_triton.plan_rotate` for q and k of this shape, or for q alone."""
    xs = inputs(shape, storage, **size)[: 2 if shape[3] else 1]
    options, table = rotation_of(shape, layout, **(rotation or {}))
    return RotateTensors.of(xs, [torch.empty_like(x) for x in xs], table, table, positions), options


def rotation(shape, layout, capability, **variant):
    """The kernel that `apply_rope` launches for q and k of this shape, or for q alone."""
    tensors, options = call(shape, layout, **variant)
    return compiled(rotate_triton.plan_rotate(tensors, options), (tensors, 0, 64), capability)


def table_free(shape, layout, capability, storage="contiguous"):
    """The kernel that `apply_rope` launches for q and k and frequencies."""
    pair, interleaved = inputs(shape, storage), layout == "interleaved"
    frequencies = torch.empty(shape[1] // 2, 3, dtype=torch.int64)
    options = Rotation(shape[1], interleaved=interleaved, out_interleaved=interleaved, table_free=True)
    tensors = RotateTensors.of(pair, pair, frequencies, frequencies)
    return compiled(rotate_triton.plan_rotate(tensors, options), (tensors, 0, 64), capability)


def qk_norm(shape, layout, capability, backward, tokens=4096):
    """The kernel that `apply_qk_norm_rope` launches for q and k of this shape."""
    pair = inputs(shape, tokens=tokens)
    weights = [torch.empty(shape[0], dtype=shape[-1]) for _ in pair]
    options, table = rotation_of(shape, layout)
    if not backward:
        tensors = NormTensors(*pair, *weights, *pair, table, table, None)
        return compiled(qk_norm_triton.plan_forward(tensors, options, 1e-6), (tensors, 0, 64), capability)
    gradients = NormGradients(*pair, *pair, *weights, *pair, *weights, table, table, None)
    launch = qk_norm_triton.plan_backward(gradients, options, 1e-6)
    gradients = gradients._replace(rows=torch.empty(launch.rows_shape, dtype=launch.rows_dtype))
    return compiled(launch.gradients, (gradients, 0, 64), capability)


def inputs(shape, storage="contiguous", batch=1, tokens=4096):
    head_dim, _, q_heads, k_heads, dtype = shape

    def empty(heads: int) -> torch.Tensor:
        return torch.empty(batch, tokens, heads, head_dim, dtype=dtype, device="meta")

    if storage == "qkv":
        qkv = empty(q_heads + 2 * max(k_heads, 1))
        return qkv[:, :, :q_heads], qkv[:, :, q_heads : q_heads + k_heads]
    pair = [empty(heads) for heads in (q_heads, k_heads)]
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in pair] if storage == "bhsd" else pair


def rotation_of(shape, layout, tables=torch.float32, **options):
    interleaved = layout == "interleaved"
    rotation = Rotation(shape[1], interleaved=interleaved, out_interleaved=interleaved, **options)
    columns = rotation.rotary_dim if rotation.full_width else rotation.rotary_dim // 2
    return rotation, torch.empty(64, columns, dtype=tables)


def widest(ptx: str, instruction: str) -> int:
    """Bytes of the widest access by ``instruction`` without a cache hint; accesses to the tables have a hint."""
    found = re.findall(rf"{instruction}\.global(?:\.v(\d))?\.b(\d+)", ptx)
    return max(int(count or 1) * int(bits) // 8 for count, bits in found)


def local_memory(cubin: bytes) -> int:
    """Bytes of stack and local memory that a thread needs; more than 0 means that registers were spilled."""
    usage = disassembled(cubin, "cuobjdump", "-res-usage")
    sizes = re.findall(r"(?:STACK|LOCAL):(\d+)", usage)
    assert sizes, f"no resource usage in {usage!r}"
    return sum(map(int, sizes))


def disassembled(cubin: bytes, tool: str, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([TOOLS / tool, option, file.name], capture_output=True, text=True, check=True).stdout


def paths(cubin: bytes) -> list[int]:
    """The instructions from the start of the code, or from an EXIT, to the next EXIT that every thread takes.

    A kernel whose branches each end in an EXIT, and jump over no long part, has a number for each branch.
    """
    found, count = [], 0
    for guard, name in re.findall(
        r"^\s*/\*[0-9a-f]+\*/\s+(@\S+\s+)?([A-Z]\w*)", disassembled(cubin, "nvdisasm", "-c"), re.M
    ):
        count += 1
        if name == "EXIT" and not guard:
            found.append(count)
            count = 0
    return found


def check(name: str, kernel, width: int) -> None:
    check_accesses(name, kernel, width)
    table = r"evict_last\S*\.(v4\.b32|v2\.b64)"
    assert re.search(table, kernel.asm["ptx"]), f"{name}: tables are not read 16 bytes at a time"


def check_accesses(name: str, kernel, width: int) -> None:
    ptx = kernel.asm["ptx"]
    assert widest(ptx, "ld") >= width, f"{name}: loads of {widest(ptx, 'ld')} bytes, expected {width}"
    assert widest(ptx, "st") >= width, f"{name}: stores of {widest(ptx, 'st')} bytes, expected {width}"
    assert local_memory(kernel.asm["cubin"]) == 0, f"{name}: registers were spilled"
    print(f"{name}: {width} bytes, nothing spilled")


def check_heads_first(name: str, kernel) -> None:
    """All loads of heads precede the loads of positions and tables, which have an eviction hint ("EL").

    This holds where all features rotate, because features that do not rotate are loaded last.
    """
    loads = re.findall(r"\bLDG\.\S+", disassembled(kernel.asm["cubin"], "nvdisasm", "-c"))
    kept = [".EL" in load for load in loads]
    assert any(kept) and kept == sorted(kept), f"{name}: expected heads before positions and tables, got {loads}"
    print(f"{name}: heads first")


def check_sums(layout: str, capability: int) -> None:
    """Every sum of the forward adds two neighbours, so its order depends on no tile; and no sum needs shared memory.

    In the backward, a thread has the same number of pairs, and a head the same number of threads, for any number of
    tokens and heads. The order follows from the layout of the first operand of the reduction: threads and their
    elements along axis 2. Some versions of Triton write this layout with a basis for each bit of the number of an
    element and of a thread.
    """
    sizes = (1, 1), (1, 4096), (3, 3), (32, 1), (32, 4096)
    for head_dim, (heads, tokens) in itertools.product((64, 72, 128), sizes):
        kernel = qk_norm((head_dim, head_dim, heads, 1, torch.bfloat16), layout, capability, False, tokens)
        sums = re.findall(r'"tt.reduce".*?axis = (\d).*?: \(tensor<([\dx]+)xf32', kernel.asm["ttgir"], re.S)
        assert sums and all(shape.split("x")[int(axis)] == "2" for axis, shape in sums), f"{layout} {head_dim}: {sums}"
        assert kernel.metadata.shared == 0, f"{layout} {head_dim} {heads} {tokens}: {kernel.metadata.shared} bytes"
    for head_dim in (64, 128):
        orders = {}
        for heads, tokens in sizes:
            shape = (head_dim, head_dim, heads, 1, torch.bfloat16)
            code = qk_norm(shape, layout, capability, True, tokens).asm["ttgir"]
            layouts = dict(re.findall(r"^(#\w+) = #ttg\.(?:blocked|linear)<\{(.*)\}>$", code, re.M))
            operand = re.search(r"axis = 2 : i32.*?: \(tensor<[\dx]+xf32, (#\w+)>", code, re.S)[1]
            extents = re.findall(r"\w+ = \[\d+, \d+, (\d+)\]", layouts[operand])[:3]
            bases = re.findall(r"\[0, 0, (\d+)\]", layouts[operand].partition("warp")[0])
            orders[heads, tokens] = extents or [basis for basis in bases if basis != "0"]
        assert len(set(map(tuple, orders.values()))) == 1, f"{layout} {head_dim}: {orders}"
    print(f"sm_{capability} {layout} QK norm: one order of the sum")


def check_axes(layout: str, capability: int) -> None:
    """Aligned sections are read as wide as one axis. With other sections threads exchange nothing in a small call.

    In a large call each thread reads the positions along three axes, one of them again, and one value.
    """
    for shape in (SHAPES[0], (128, 128, 64, 4, torch.bfloat16)):
        for tokens in (64, 4096):
            positions = torch.empty(3, 1, tokens, dtype=torch.int32).movedim(0, -1)
            variant = {"positions": positions, "tokens": tokens}
            blocks = rotation(shape, layout, capability, **variant, rotation={"axes": mrope_axes((16, 24, 24))})
            check(f"{layout} {shape} {tokens} tokens, sections in blocks", blocks, 8)
            axes = mrope_axes((24, 20, 20), mrope_interleaved=True)
            turns = rotation(shape, layout, capability, **variant, rotation={"axes": axes})
            check_accesses(f"{layout} {shape} {tokens} tokens, axes in turns", turns, 8)
            loads = re.findall(r"\bLDG\S*\.EL\S*", disassembled(turns.asm["cubin"], "nvdisasm", "-c"))
            is_few = len(loads) <= 5 if tokens == 4096 else turns.metadata.shared == 0
            assert is_few, f"{layout} {shape} {tokens}: {loads}, {turns.metadata.shared} bytes exchanged"


def check_table_free(name: str, kernel, width: int) -> None:
    """The checks of `check`; and every thread computes one angle, with two conversions of 64-bit integers to floats."""
    check_accesses(name, kernel, width)
    conversions = kernel.asm["ptx"].count("cvt.rn.f32.s64")
    assert conversions == 2, f"{name}: {conversions} conversions for one angle a thread, expected 2"


def main(capability: int) -> None:
    """Check all shapes and variants for Hopper, whose records are committed, and every third shape for other GPUs."""
    shapes = SHAPES if capability == 90 else SHAPES[::3]
    for layout in LAYOUTS:
        for shape in shapes:
            name, width = f"sm_{capability} {layout} {shape}", width_of(shape, layout)
            check(name, rotation(shape, layout, capability), min(width, width_of_tile(shape, layout)))
            if not shape[3]:
                continue  # a norm of q alone is not offered
            for storage in ("contiguous", "bhsd"):
                kernel = table_free(shape, layout, capability, storage)
                check_table_free(f"{name} {storage}, table-free", kernel, width)
            # A thread of the backward takes four pairs: 8 bytes of each half of a head whose features have two bytes.
            check(f"{name} QK norm", qk_norm(shape, layout, capability, backward=False), width)
            narrow = layout == "split_half" and shape[-1].itemsize == 2
            backward = qk_norm(shape, layout, capability, backward=True)
            check(f"{name} QK norm backward", backward, 8 if narrow else width)
        # With 16 heads of 64 features, a program takes two tokens.
        few_heads = (64, 64, 16, 0, torch.bfloat16)
        varied = (SHAPES[0], SHAPES[-1], few_heads) if capability == 90 else (SHAPES[0],)
        for (name, variant), shape in itertools.product(VARIANTS.items(), varied):
            if tile_of.rotate(*call(shape, layout, **variant)).num_warps == 1:
                continue  # one warp for each head, so a thread has one or two pairs
            width = min(16, width_of_tile(shape, layout, **variant))
            kernel, about = rotation(shape, layout, capability, **variant), f"sm_{capability} {layout} {name} {shape}"
            check(about, kernel, width)
            if name == "positions" and (layout == "split_half" or not shape[3]):
                check_heads_first(about, kernel)

        if capability == 90:
            check_sums(layout, capability)
            check_axes(layout, capability)


def compile_for_amd(architecture: str) -> None:
    """Every kernel compiles as it would be launched where torch is built for AMD's GPUs."""
    with mock.patch.object(torch.version, "hip", "7.0"):
        for layout, shape in zip(LAYOUTS, (SHAPES[0], SHAPES[3]), strict=True):
            rotation(shape, layout, architecture)
            rotation(shape, layout, architecture, positions=torch.empty(1, 64, dtype=torch.int32))
            table_free(shape, layout, architecture)
            for backward in (False, True):
                qk_norm(shape, layout, architecture, backward)


if __name__ == "__main__":
    if sys.argv[1].isdigit():
        main(int(sys.argv[1]))
    else:
        compile_for_amd(sys.argv[1])
