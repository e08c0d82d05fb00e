"""Compile a step for a GPU that need not be there, and count what the machine code has.

Run as a module, it is the compiler: a process in which kernels are not interpreted.
"""

import ast
import atexit
import hashlib
import importlib
import inspect
import linecache
import os
import pickle
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from math import prod
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton

from ropelab.bench.compiled import compiled
from ropelab.study.topics.kernel_steps.layout import Layout, Move
from ropelab.study.topics.kernel_steps.step import Inputs, LibraryStep, Planned, Step

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
CAPABILITY = 90
"""The compute capability of an H100 and an H200."""
MULTIPROCESSORS, REGISTERS, THREADS, PROGRAMS = 132, 65536, 2048, 32
"""The multiprocessors of an H100 or H200; the registers of one, and the most threads and programs that it holds.

Source: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"."""
_WIDTHS = {"U8": 1, "U16": 2, "64": 8, "128": 16}
"""The suffix of an access -> its bytes; without such a suffix an access moves four bytes."""
_ACCESS = re.compile(r"\b(LDG|STG)\.E((?:\.\w+)*)")
_LAYOUT = re.compile(r"^(#\w+) = #ttg\.blocked<\{(.*)\}>", re.M)
_MOVED = re.compile(r"tt\.(load|store) .*?: (?:tensor<([\dx]+)x)?!tt\.ptr<[a-z]+(\d+)>(?:, (#\w+)>)?")
_MOVES = re.compile(r"\b(?:ld|st)\.global(?:\.[\w:]+?)*?(?:\.v(\d))?\.b(\d+)")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(@\S+\s+)?([A-Z]\w*)", re.M)


def facts(planned: Planned) -> dict[str, Any]:
    """Compile a launch, and count.

    Returns:
        instructions: of a warp, from the start to the end of the program.
        loads, stores: those instructions that access global memory. early_loads: the loads before the first
        instruction on floating-point numbers. load_bytes, store_bytes: the most bytes that a thread moves with one of
        them. registers: of a thread. local: bytes of local memory of a thread, for registers that do not fit. shared:
        bytes of shared memory of a program. warps: of a program. programs: of the grid. moves: the `Move` of
        each load and store of a tile, in the order of the kernel.
    """
    launch: Any = SimpleNamespace(kernel=planned.kernel, fixed=(), options=planned.options)
    kernel = compiled(launch, planned.arguments, CAPABILITY)
    code = _disassembled(kernel.asm["cubin"], "nvdisasm", "-c")
    usage = _disassembled(kernel.asm["cubin"], "cuobjdump", "-res-usage")
    found = [(name, _width(suffix)) for name, suffix in _ACCESS.findall(code)]
    loads, stores = ([width for name, width in found if name == wanted] for wanted in ("LDG", "STG"))
    return {
        "instructions": _until_the_end(code),
        "loads": len(loads), "stores": len(stores),
        "early_loads": len(re.findall(r"\bLDG\b", re.split(r"\bF(?:ADD|MUL|FMA)\b", code)[0])),
        "load_bytes": max(loads), "store_bytes": max(stores),
        "registers": int(re.findall(r"REG:(\d+)", usage)[0]),
        "local": sum(map(int, re.findall(r"(?:STACK|LOCAL):(\d+)", usage))),
        "shared": kernel.metadata.shared, "warps": planned.options["num_warps"], "programs": prod(planned.grid),
        "moves": _moves(kernel.asm["ttgir"], kernel.asm["ptx"]),
    }  # fmt: skip


def _moves(ttgir: str, ptx: str) -> list[Move]:
    """The moves of tiles; none if a tile has another layout than a blocked one.

    Both texts have the loads and stores in the order of the kernel.
    """
    layouts = {name: Layout.of(text) for name, text in _LAYOUT.findall(ttgir)}
    widths = [int(number or 1) * int(bits) // 8 for number, bits in _MOVES.findall(ptx)]
    found: list[Move] = []
    for kind, dims, bits, name in _MOVED.findall(ttgir):
        if dims and name not in layouts:
            return []
        width, itemsize, elements = widths[0], int(bits) // 8, 1
        if name:
            shape = tuple(map(int, dims.split("x")))
            elements = layouts[name].elements(shape)
            found.append(Move(kind, shape, layouts[name], width))
        del widths[: max(1, elements * itemsize // width)]
    return found


def occupancy(registers: int, warps: int) -> float:
    """The warps that a multiprocessor holds at once, over the most that it can hold.

    Registers are given to a warp in units of 256.
    """
    of_program = warps * 256 * -(-32 * registers // 256)
    programs = min(REGISTERS // of_program, THREADS // (32 * warps), PROGRAMS)
    return programs * warps * 32 / THREADS


def compiled_facts(step: Step, tokens: int, heads: int, head_dim: int) -> dict[str, Any]:
    """The `facts` of a step for tensors of a shape in bfloat16.

    Raises:
        RuntimeError: the compiler failed; the error has what it said.
    """
    shape = tokens, heads, head_dim
    if isinstance(step, LibraryStep):
        return _ask(step, shape)
    planned = step.plan(*_tensors(*shape))
    return _ask(replace(planned, kernel=_described(planned.kernel)), shape)


def _tensors(tokens: int, heads: int, head_dim: int) -> tuple[Inputs, torch.Tensor]:
    x = torch.empty(tokens, heads, head_dim, dtype=torch.bfloat16, device="meta")
    table = torch.empty(tokens, head_dim // 2, device="meta")
    numbers = torch.empty(17, dtype=torch.int32, device="meta")
    return Inputs(x, table, table, numbers, torch.empty(tokens, dtype=torch.int32, device="meta")), torch.empty_like(x)


def _described(kernel: Any) -> tuple[str, str, dict[str, tuple[str, str]]]:
    """A kernel for another process: its name, its source with the constants that it reads, and what it imports."""
    name, module = kernel.fn.__name__, sys.modules.get(kernel.fn.__module__)
    if getattr(module, "__spec__", None):
        return name, "", {name: (kernel.fn.__module__, name)}
    source, imported = textwrap.dedent(inspect.getsource(kernel.fn)), {}
    for read in {node.id for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Name)}:
        value = kernel.fn.__globals__.get(read)
        if isinstance(value, ModuleType):
            imported[read] = value.__name__, ""
        elif hasattr(value, "fn") and value is not kernel:
            _, inner, more = _described(value)
            source, imported = f"{inner}\n\n{source}", imported | more
        elif isinstance(value, int | float | str | list):
            source = f"{read} = {value!r}\n{source}"
    return name, source, imported


def _rebuilt(name: str, source: str, imported: Mapping[str, tuple[str, str]]) -> Any:
    """The kernel that `_described` describes."""
    found: dict[str, Any] = {"__name__": "described"}
    for here, (module, inside) in imported.items():
        found[here] = getattr(importlib.import_module(module), inside) if inside else importlib.import_module(module)
    file = f"<kernel {hashlib.sha256(source.encode()).hexdigest()}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    exec(compile(source, file, "exec"), found)
    return found[name]


@cache
def _compiler() -> subprocess.Popen:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    command = [sys.executable, "-m", __name__]
    # A session of its own: an interrupt of the notebook is none of the compiler, which ends with its input.
    pipe = subprocess.PIPE
    found = subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, start_new_session=True)
    atexit.register(found.kill)
    return found


def _ask(what: Planned | LibraryStep, shape: tuple[int, int, int]) -> dict[str, Any]:
    process = _compiler()
    assert process.stdin and process.stdout
    pickle.dump((what, shape), process.stdin)
    process.stdin.flush()
    answer = pickle.load(process.stdout)
    if isinstance(answer, str):
        raise RuntimeError(f"the compiler failed: {answer}")
    return answer


def _serve() -> None:
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    while True:
        try:
            what, shape = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:  # the library plans where nothing is interpreted: its choices are other objects there
            is_planned = isinstance(what, Planned)
            planned = replace(what, kernel=_rebuilt(*what.kernel)) if is_planned else what.plan(*_tensors(*shape))
            answer: Any = facts(planned)
        except Exception as error:  # the reader of the chapter sees it
            answer = f"{type(error).__name__}: {error}"
        pickle.dump(answer, answers)
        answers.flush()


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


if __name__ == "__main__":
    _serve()
