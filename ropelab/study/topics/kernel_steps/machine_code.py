"""Compile the steps for a GPU that need not be there, and count what the machine code has.

Run as a module, it prints the facts as JSON: compiling needs a process in which kernels are not interpreted.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton

from ropelab.bench.compiled import compiled
from ropelab.kernels.rotate_triton import _rotate_kernel
from ropelab.study.topics.kernel_steps.plans import STEPS, Inputs, Plan, Planned, from_stages, tile_of


def _in_library(given: Inputs, y: torch.Tensor, interleaved: bool) -> Planned:
    """The launch of the last step, with the library's kernel in it."""
    return replace(from_stages(given, y, tile_of(1, 8, 2), interleaved), kernel=_rotate_kernel)


IN_LIBRARY: dict[str, Plan] = {
    "library's kernel, 1 x 8 heads, 2 warps": partial(_in_library, interleaved=False),
    "library's kernel, adjacent pairs": partial(_in_library, interleaved=True),
}
"""The library's kernel for two tiles of step 8."""
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
CAPABILITY = 90
"""The compute capability of an H100 and an H200."""
REGISTERS, THREADS, PROGRAMS = 65536, 2048, 32
"""The registers of a multiprocessor of that capability, and the most threads and programs that it holds.

Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"."""
_WIDTHS = {"U8": 1, "U16": 2, "64": 8, "128": 16}
"""The suffix of an access -> its bytes; without such a suffix an access moves four bytes."""
_ACCESS = re.compile(r"\b(LDG|STG)\.E((?:\.\w+)*)")
_STORED = re.compile(r"tt\.store .*!tt\.ptr<bf16>, (#\w+)>")
_LINE = re.compile(r"^\s*/\*[0-9a-f]+\*/(.*)$", re.M)
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(@\S+\s+)?([A-Z]\w*)", re.M)


def facts(plan: Plan, tokens: int, heads: int, head_dim: int) -> dict[str, Any]:
    """Compile a step for tensors of a shape in bfloat16.

    Returns:
        instructions: of a warp, from the start to the end of the program.
        loads, stores: those instructions that access global memory. early_loads: the loads before the first
        instruction on floating-point numbers. store_bytes: the most bytes that a thread writes
        with one of them. asked_bytes: the bytes that a thread accesses, if it takes part in every access. registers: of
        a thread. local: bytes of local memory of a thread, for registers
        that do not fit. shared: bytes of shared memory of a program. warps: of a program; programs: of the grid. code:
        the hash of the disassembled machine code without the name of the kernel. mapping: Triton's words for how the
        tile that is stored lies in threads and warps.
    """
    planned = plan(*_tensors(tokens, heads, head_dim))
    launch: Any = SimpleNamespace(kernel=planned.kernel, fixed=(), options=planned.options)
    kernel = compiled(launch, planned.arguments, CAPABILITY)
    code = _disassembled(kernel.asm["cubin"], "nvdisasm", "-c")
    usage = _disassembled(kernel.asm["cubin"], "cuobjdump", "-res-usage")
    found = _ACCESS.findall(code)
    layout = re.escape(_STORED.findall(kernel.asm["ttgir"])[-1])
    widths = {name: [_width(suffix) for access, suffix in found if access == name] for name in ("LDG", "STG")}
    return {
        "instructions": _until_the_end(code),
        "loads": len(widths["LDG"]),
        "early_loads": len(re.findall(r"\bLDG\b", re.split(r"\bF(?:ADD|MUL|FMA)\b", code)[0])),
        "stores": len(widths["STG"]), "store_bytes": max(widths["STG"]),
        "asked_bytes": sum(widths["LDG"]) + sum(widths["STG"]),
        "registers": int(re.findall(r"REG:(\d+)", usage)[0]),
        "local": sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", usage))),
        "shared": kernel.metadata.shared, "warps": planned.options["num_warps"], "programs": prod(planned.grid),
        "mapping": re.findall(rf"^{layout} = #ttg\.blocked<{{(.*), order", kernel.asm["ttgir"], re.M)[0],
        "code": hashlib.sha256("".join(_LINE.findall(code)).encode()).hexdigest(),
    }  # fmt: skip


def occupancy(registers: int, warps: int) -> float:
    """The warps that a multiprocessor holds at once, over the most that it can hold.

    Registers are given to a warp in units of 256.
    """
    of_program = warps * 256 * -(-32 * registers // 256)
    programs = min(REGISTERS // of_program, THREADS // (32 * warps), PROGRAMS)
    return programs * warps * 32 / THREADS


def compiled_facts(names: Sequence[str], tokens: int, heads: int, head_dim: int) -> dict[str, dict[str, Any]]:
    """The `facts` of steps and of `IN_LIBRARY` by name, compiled in a process of their own.

    Raises:
        RuntimeError: the compiler failed; the error has its last line.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", __name__, json.dumps([list(names), tokens, heads, head_dim])]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"the compiler failed: {result.stderr.strip().splitlines()[-1:]}")
    return json.loads(result.stdout)


def _tensors(tokens: int, heads: int, head_dim: int) -> tuple[Inputs, torch.Tensor]:
    x = torch.empty(tokens, heads, head_dim, dtype=torch.bfloat16, device="meta")
    table = torch.empty(tokens, head_dim // 2, device="meta")
    numbers = torch.empty(17, dtype=torch.int32, device="meta")
    return Inputs(x, table, table, numbers, torch.empty(tokens, dtype=torch.int32, device="meta")), torch.empty_like(x)


def _until_the_end(code: str) -> int:
    """The instructions up to the first EXIT that every thread takes; the steps have no loops and no long branches."""
    for number, (guard, name) in enumerate(_INSTRUCTION.findall(code), 1):
        if name == "EXIT" and not guard:
            return number
    raise ValueError("code: expected an EXIT, got none")


def _width(suffixes: str) -> int:
    return next((_WIDTHS[part] for part in suffixes.split(".") if part in _WIDTHS), 4)


def _disassembled(cubin: bytes, tool: str, option: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([TOOLS / tool, option, file.name], capture_output=True, text=True, check=True).stdout


def _main(request: str) -> Mapping[str, Mapping[str, Any]]:
    names, *shape = json.loads(request)
    plans = {name: step.plan for name, step in STEPS.items() if step.plan} | IN_LIBRARY
    return {name: facts(plans[name], *shape) for name in names}


if __name__ == "__main__":
    print(json.dumps(_main(sys.argv[1])))
