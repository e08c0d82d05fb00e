"""Compare the machine code of every recorded launch before and after a change of the kernels' source.

    python -m tests.compile.same_code COMMIT

plans each launch that a record of an H100 noted with the code of the commit and with that of today, and compiles both
for sm_90. Two launches with the same Triton code and options have the same machine code, so only the others go through
the whole compiler, first one of each kernel. Where all launches of a kernel make the same machine code, the hashes of
its functions go to ``same_code`` of ``data/protocols.toml``, and records that launched it stay as they are. The command
names each kernel whose machine code differs.

Records do not list their launches any more. The history does, at `NOTED`, and a checkout without it cannot compare.
The launches of the product are not among them: they are those of ``compile_projection``.
"""

import hashlib
import importlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, redirect_stdout
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

NOTED = "55bdef9e6218af01fc0952cb54db3a2776a3089c"
"""The last commit whose records list their launches, as plans: calls of the kernels' ``plan_*`` functions."""
RECORDS = "data/measurements/nvidia-h100-80gb-hbm3"
SWEEPS = ("tiles", "tile_regret", "latent_tiles", "one_pass_tiles")
"""Records of tiles that no call chooses; every 16th of their launches is compared."""
PRODUCT = "projection_triton._project_kernel"
CAPABILITY = 90

_DEBUG_SECTION = re.compile(r"^\s*\.section\s+\.debug\w*\s*\{.*?^\s*\}\s*$|^\s*\.section\s+\.debug.*$", re.M | re.S)
_DEBUG_LINE = re.compile(r"^\s*(\.loc|\.file)\b.*$|^\$L__(tmp|func_begin|func_end)\d+:\s*$", re.M)
_COMMENT = re.compile(r"//.*$", re.M)

Note = dict[str, Any]


def git(*arguments: str) -> bytes:
    from ropelab.bench.records import ROOT

    return subprocess.run(["git", *arguments], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout


def recorded() -> list[Note]:
    """The notes of the launches, without those that differ in the number of programs or of tokens alone."""
    found: dict[tuple, Note] = {}
    for path in git("ls-tree", "--name-only", NOTED, f"{RECORDS}/").decode().split():
        if not path.endswith(".json"):
            continue
        notes = json.loads(git("show", f"{NOTED}:{path}")).get("triton_launches") or {}
        planned = [note for note in notes.values() if "plan" in note]
        for note in planned[:: 16 if Path(path).stem in SWEEPS else 1]:
            found.setdefault((note["kernel"], note["code"], note["dtypes"]), note)
    return list(found.values())


# ------------------------------------------------------------------------------- in a process with one of the two trees


def planned(note: Note) -> tuple[Any, tuple]:
    """The launch that this process's code makes for the call of a note, and its arguments."""
    import torch

    from ropelab.kernels.launch import Launch

    plan, made = json.loads(note["plan"]), []
    module, _, name = plan["function"].partition(".")
    make = Launch.__init__

    def making(launch, *arguments, **options):
        make(launch, *arguments, **options)
        made.append(launch)

    gpu = SimpleNamespace(multi_processor_count=132)
    with ExitStack() as opened:
        opened.enter_context(mock.patch.object(torch.cuda, "get_device_properties", lambda device: gpu))
        opened.enter_context(mock.patch.object(torch.cuda, "get_device_capability", lambda device: (9, 0)))
        arguments, options = decoded(plan["arguments"], [])
        opened.enter_context(mock.patch.object(Launch, "__init__", making))
        getattr(importlib.import_module(f"ropelab.kernels.{module}"), name)(*arguments, **options)
    launch = made[note["number"]]
    dtypes = [None if name == "-" else getattr(torch, name) for name in note["dtypes"].split()]
    tensors = launch.named(*(dtype and torch.empty(0, dtype=dtype, device="meta") for dtype in dtypes))
    return launch, (tensors, *[0] * (len(launch.kernel.params) - 1 - len(launch.fixed)))


@cache
def on_gpu() -> type:
    """The type of tensors without contents that say that they are on a GPU, where there may be none."""
    import torch

    return type("OnGpu", (torch.Tensor,), {"device": torch.device("cuda", 0), "is_cuda": True})


def decoded(value: Any, tensors: list) -> Any:
    """The arguments of a plan, which JSON has; a tensor that comes again is the same tensor."""
    import torch

    match value:
        case {"same": number}:
            return tensors[number]
        case {"tensor": [shape, stride, dtype]}:
            x = torch.empty_strided(shape, stride, dtype=getattr(torch, dtype), device="meta")
            tensors.append(x.as_subclass(on_gpu()))
            return tensors[-1]
        case {"dtype": name}:
            return getattr(torch, name)
        case {"options": options}:
            return {name: decoded(x, tensors) for name, x in options.items()}
        case {"of": name, "with": given}:
            module, _, kind = name.rpartition(".")
            made = getattr(importlib.import_module(f"ropelab.kernels.{module}"), kind)
            lacking = dict.fromkeys(getattr(made, "_fields", ()))
            return made(**(lacking | {name: decoded(x, tensors) for name, x in given.items()}))
        case list():
            return tuple(decoded(x, tensors) for x in value)
    return value


def triton_code(note: Note) -> str:
    """The hash of the Triton code of a launch, with all calls inlined, and of the compiler's options.

    The names of inlined functions and of constants are no part of it.
    """
    import triton
    from triton._C.libtriton import ir, passes
    from triton.compiler import make_backend

    from ropelab.bench.compiled import compiled

    with mock.patch.object(triton, "compile", lambda *source, **options: (*source, options)):
        source, about = compiled(*planned(note), CAPABILITY)
    backend, context = make_backend(about["target"]), ir.context()
    options = backend.parse_options(dict(about["options"]))
    for dialects in (ir, backend):
        dialects.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    module = source.make_ir(about["target"], options, functions, modules, context)
    inlining = ir.pass_manager(context)
    passes.common.add_inliner(inlining)
    inlining.run(module, "inlined")
    return hashlib.sha256(f"{module.str_nodebug()} {options.hash()}".encode()).hexdigest()


def machine_code(note: Note) -> str:
    """The hash of the machine code of a launch."""
    from ropelab.bench.compiled import compiled

    return code_hash_of(compiled(*planned(note), CAPABILITY))


def code_hash_of(kernel: Any) -> str:
    """The hash of a compiled kernel: of its PTX without debug lines and comments, or else of its binary."""
    ptx = kernel.asm.get("ptx")
    code = kernel.kernel if ptx is None else _without_debug_lines(ptx).encode()
    return hashlib.sha256(code).hexdigest()[:16]


def _without_debug_lines(ptx: str) -> str:
    """PTX without the lines that name places in the source, without comments, and without empty lines."""
    for pattern in (_DEBUG_SECTION, _COMMENT, _DEBUG_LINE):
        ptx = pattern.sub("", ptx)
    return "\n".join(line for line in ptx.splitlines() if line.strip())


def product_code(note: Note) -> str:
    """The hash of the machine code of each launch of the product that the tests compile."""
    from triton.compiler import CompiledKernel

    found, init = [], CompiledKernel.__init__

    def made(kernel, *arguments, **options):
        init(kernel, *arguments, **options)
        found.append(code_hash_of(kernel))

    folder = "tests.compile" if Path("tests/compile").is_dir() else "tests"
    with mock.patch.object(CompiledKernel, "__init__", made):
        importlib.import_module(f"{folder}.compile_projection").main(CAPABILITY)
    return " ".join(found)


def answer(what: str) -> None:
    """Print what a function of this module says of each note on standard input; null if it raises."""
    for note in json.load(sys.stdin):
        found = None
        try:
            with redirect_stdout(sys.stderr):
                found = globals()[what](note)
        except Exception as error:  # other code cannot plan or compile this launch
            print(f"{note['kernel']}: {type(error).__name__}: {error}", file=sys.stderr)
        print(json.dumps(found), flush=True)


# ---------------------------------------------------------------------------------------- in the process that compares


def answers(what: str, notes: list[Note], root: Path) -> list[str | None]:
    """What a function of this module says of each note in processes that import from ``root``."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command, number = [sys.executable, __file__, "answer", what], max(1, (os.cpu_count() or 1) // 2)

    def part(first: int) -> list[str | None]:
        done = subprocess.run(
            command, cwd=root, env=environment | {"PYTHONPATH": str(root)}, text=True, check=True,
            input=json.dumps(notes[first::number]), stdout=subprocess.PIPE,
        )  # fmt: skip
        return [json.loads(line) for line in done.stdout.splitlines()]

    found: list[str | None] = [None] * len(notes)
    with ThreadPoolExecutor(number) as pool:
        for first, part_found in enumerate(pool.map(part, range(min(number, len(notes))))):
            found[first::number] = part_found
    return found


def differing(what: str, notes: list[Note], roots: tuple[Path, Path]) -> list[Note]:
    """The notes of which a function of this module does not say the same in both trees."""
    with ThreadPoolExecutor(2) as pool:
        before, today = pool.map(partial(answers, what, notes), roots)
    return [note for note, old, new in zip(notes, before, today, strict=True) if old is None or old != new]


def main(commit: str) -> None:
    from ropelab.bench import code_hash, reached
    from ropelab.bench.records import ROOT
    from ropelab.study.engine import measuring_code

    notes = recorded()
    kernels = sorted({note["kernel"] for note in notes} | {PRODUCT})
    with tempfile.TemporaryDirectory() as name:
        then = Path(name)
        with tarfile.open(fileobj=io.BytesIO(git("archive", commit, "kernels", "ropelab", "tests"))) as archive:
            archive.extractall(then, filter="tar")
        before = {kernel: reached.reached([kernel], code_hash.of_folder(then / "kernels")) for kernel in kernels}
        today = {kernel: reached.reached([kernel]) for kernel in kernels}
        changed = [kernel for kernel in kernels if before[kernel] != today[kernel]]
        notes = [note for note in notes if note["kernel"] in changed]
        print(f"same_code: {len(notes)} launches of {', '.join(changed) or 'no kernel'} have other source", flush=True)
        others = differing("triton_code", notes, (then, ROOT))
        print(f"same_code: {len(others)} of them have other Triton code", flush=True)
        one = [*{note["kernel"]: note for note in others}.values()]  # most changes show in any launch of a kernel
        other = {note["kernel"] for note in differing("machine_code", one, (then, ROOT))}
        rest = [note for note in others if note["kernel"] not in other]
        other |= {note["kernel"] for note in differing("machine_code", rest, (then, ROOT))}
        if PRODUCT in changed:
            other |= {note["kernel"] for note in differing("product_code", [{"kernel": PRODUCT}], (then, ROOT))}
    print(f"same_code: other machine code of {', '.join(sorted(other)) or 'no kernel'}", flush=True)
    same = unchanged(before, today, other)
    measuring_code.add_same_code(same)
    print(f"same_code: written for {', '.join(same) or 'no function'}")


def unchanged(
    before: Mapping[str, Mapping[str, str]], today: Mapping[str, Mapping[str, str]], other: Iterable[str]
) -> dict[str, tuple[str, ...]]:
    """The functions whose source has changed and whose machine code has not -> their hashes before, and that of today.

    The hash of a function that a kernel does not reach is ``""``. A kernel with other machine code makes its records
    old by its own hash; where that is as before, by all that it reaches.

    Args:
        before, today: each kernel -> the hash of each function that it reaches.
        other: the kernels with other machine code.
    """
    not_same = {
        name
        for kernel in other
        for name in ([kernel] if before[kernel][kernel] != today[kernel].get(kernel) else before[kernel])
    }
    new = {name: digest for each in today.values() for name, digest in each.items()}
    found: dict[str, set[str]] = {}
    for kernel, old in before.items():
        for name in {*old, *today[kernel]} - not_same:
            if (digest := old.get(name, "")) != new.get(name, ""):
                found.setdefault(name, set()).add(digest)
    return {name: (*sorted(digests), new.get(name, "")) for name, digests in sorted(found.items())}


if __name__ == "__main__":
    answer(sys.argv[2]) if sys.argv[1] == "answer" else main(*sys.argv[1:])
