"""State that kernels compile to the same machine code as at a commit, after a change of their source alone.

    python -m tests.compile.same_code COMMIT

compiles the launches of ``compile_*.py`` with the kernels of the commit and with those of today. Where each makes the
same machine code, the hashes of the commit's functions go to ``same_code`` of ``data/protocols.toml``, and records that
launched them stay as they are. Otherwise the command names the kernels that differ and writes nothing.
"""

import io
import json
import os
import runpy
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from unittest import mock

from ropelab.bench import reached
from ropelab.bench.records import ROOT
from ropelab.study.engine import measuring_code

MODULES = ("compile_kernel", "compile_latent", "compile_paged_cache", "compile_block_scales", "compile_projection")
CAPABILITY = "90"


def compiled() -> list[tuple[str, str]]:
    """The kernel and the hash of the machine code of each launch that the tests compile, in their order."""
    from triton.compiler import CompiledKernel

    from ropelab.bench.compiled import code_hash_of

    found: list[tuple[str, str]] = []
    init = CompiledKernel.__init__

    def made(kernel, source, *arguments, **options):
        init(kernel, source, *arguments, **options)
        module = source.fn.__module__.rpartition(".")[2]
        found.append((f"{module}.{source.fn.__name__}", code_hash_of(kernel)))

    with mock.patch.object(CompiledKernel, "__init__", made):
        for module in MODULES:
            with mock.patch.object(sys, "argv", [module, CAPABILITY]):
                runpy.run_module(f"tests.compile.{module}", run_name="__main__")
    return found


def compiled_in(root: Path) -> list[list[str]]:
    """As `compiled`, in a process that imports from ``root``."""
    variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = "import json; from tests.compile.same_code import compiled; print(json.dumps(compiled()))"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, env=variables | {"PYTHONPATH": str(root)}, text=True,
        stdout=subprocess.PIPE, check=True,
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1])


def main(commit: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        then = Path(name)
        for folder in ("ropelab", "tests"):
            shutil.copytree(ROOT / folder, then / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        kernels = subprocess.run(["git", "archive", commit, "kernels"], cwd=ROOT, stdout=subprocess.PIPE, check=True)
        with tarfile.open(fileobj=io.BytesIO(kernels.stdout)) as archive:
            archive.extractall(then, filter="tar")
        before, today = compiled_in(then), compiled_in(ROOT)
        if before != today:
            differing = {old[0] for old, new in zip(before, today, strict=False) if old != new}
            sys.exit(
                f"same_code: other machine code than at {commit}: {', '.join(sorted(differing)) or 'more launches'}"
            )
        names = {kernel for kernel, _ in today}
        old, new = reached.reached(names, then / "kernels"), reached.reached(names)
    same = {name: digest for name, digest in old.items() if name in new and new[name] != digest}
    measuring_code.add_same_code(same)
    print(f"same_code: {len(today)} launches as at {commit}; {', '.join(same) or 'no function has changed'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
