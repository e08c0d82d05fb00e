"""Compile noted launches with the version of Triton that a record names, in an environment of its own.

``python -m ropelab.bench.other_triton 3.6.0`` fetches this version of Triton to ``build/triton-3.6.0``, where a package
index can be reached. Without a version it fetches the versions of the committed records, and the newest.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from ropelab.bench import whole_file
from ropelab.bench.code_hash import code_hash

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "build" / "compiled"
"""The folder of the answers of `code_hashes`; a change of kernels, benchmarks or versions gives them other names."""
NEWEST = "3.9.0"
"""The newest version for which a test compiles the kernels; a plain ``pip install`` brings it."""
SECONDS = 240
"""The longest compilation of the kernels of one record; CI has five minutes for all."""


def at_hand(version: str) -> bool:
    """Whether this version of Triton can compile here."""
    import triton

    return version == triton.__version__ or (folder(version) / "triton").is_dir()


def code_hashes(notes: Sequence[Mapping[str, Any]], gpu: Mapping[str, Any], version: str) -> list[str]:
    """The hash of the code that a version of Triton makes of each noted launch as today's code plans it.

    "" stands for a launch that today's code cannot plan or compile, or plans with another grid. It stands for all
    launches if the version is not at hand, or takes longer than `SECONDS`.

    Args:
        notes: as `ropelab.bench.launched.noted` gives them.
        gpu: the facts of the GPU that a record has.
    """
    if not at_hand(version):
        return [""] * len(notes)
    return list(_compiled(json.dumps([list(notes), dict(gpu)]), version))


@cache
def _compiled(question: str, version: str) -> tuple[str, ...]:
    """As `code_hashes`; an answer is kept in a file, because every notebook and every page asks for the same ones."""
    import torch

    code = code_hash([*(ROOT / "kernels").glob("*.py"), *Path(__file__).parent.glob("*.py")], ROOT)
    asked = json.dumps([question, version, code, torch.__version__, sys.version])
    kept = KEPT / f"{hashlib.sha256(asked.encode()).hexdigest()}.json"
    if kept.exists():
        return tuple(json.loads(kept.read_text()))
    folders = os.pathsep.join(map(str, (folder(version), ROOT)))
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__, "compile"], input=question, env=variables | {"PYTHONPATH": folders},
            capture_output=True, text=True, check=True, timeout=SECONDS,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return ("",) * len(json.loads(question)[0])
    answer = done.stdout.splitlines()[-1]
    with suppress(OSError):  # a checkout that cannot be written keeps nothing
        whole_file.write(kept, answer)
    return tuple(json.loads(answer))


def compile_all(notes: Sequence[Mapping[str, Any]], gpu: Mapping[str, Any]) -> list[str]:
    """As `code_hashes`, with the Triton of this process."""
    import torch

    from ropelab.bench import compiled, launched

    capability = int(gpu.get("capability", "9.0").replace(".", ""))
    found = []
    for note in notes:
        try:
            launch = launched.planned(note, gpu)
            if list(launch.grid) != note["grid"]:
                raise ValueError(f"grid: expected {note['grid']}, got {launch.grid}")
            dtypes = [None if name == "-" else getattr(torch, name) for name in note["dtypes"].split()]
            tensors = launch.named(*[None if x is None else torch.empty(0, dtype=x, device="meta") for x in dtypes])
            numbers = [2] * (len(launch.kernel.params) - 1 - len(launch.fixed))
            found.append(compiled.code_hash_of(compiled.compiled(launch, (tensors, *numbers), capability)))
        except Exception:  # such a launch is none of today's code
            found.append("")
    return found


def fetch(version: str) -> bool:
    """Fetch a version of Triton from the package index, and say whether it is at hand now."""
    if not at_hand(version):
        target = ["--target", str(folder(version)), f"triton=={version}"]
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", *target])
    return at_hand(version)


def named_by_records() -> set[str]:
    """The versions of Triton that the committed records name."""
    paths = (ROOT / "data" / "measurements").glob("*/*.json")
    return {json.loads(path.read_text(encoding="utf-8")).get("triton", "") for path in paths} - {""}


def folder(version: str) -> Path:
    """Where a version of Triton lies that `fetch` has fetched."""
    return ROOT / "build" / f"triton-{version}"


if __name__ == "__main__":
    if sys.argv[1:] == ["compile"]:
        print(json.dumps(compile_all(*json.load(sys.stdin))))
    else:
        for wanted in sorted(sys.argv[1:] or named_by_records() | {NEWEST}):
            print(f"triton {wanted}: {'at hand' if fetch(wanted) else 'not at hand'}")
