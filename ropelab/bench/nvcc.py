"""This file compiles public CUDA sources into shared libraries with nvcc, and keeps the libraries in build/peers."""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from ropelab.bench import packages


def shared_library(
    name: str, sources: Sequence[Path], *, include: Iterable[Path] = (), flags: Sequence[str] = ()
) -> Path:
    """Compile CUDA sources for the GPU at hand into ``build/peers/compiled/<name>-<hash>.so``, unless it is there.

    The hash is of the sources, the headers beside them, the flags and the architecture, so a change of any compiles
    anew.

    Raises:
        NotInstalled: there is no GPU, or no nvcc on the PATH or in CUDA_HOME.
        RuntimeError: nvcc failed; the message holds the end of its output.
    """
    if not torch.cuda.is_available():
        raise packages.NotInstalled(f"{name} is CUDA code, which needs a GPU")
    compiler = _compiler()
    if compiler is None:
        raise packages.NotInstalled(f"{name} needs nvcc, to be compiled")
    major, minor = torch.cuda.get_device_capability()
    options = [f"-arch=sm_{major}{minor}", "-O3", "-std=c++17", "-shared", "-Xcompiler", "-fPIC", *flags]
    options += [f"-I{folder}" for folder in include]
    key = hashlib.sha256(repr(options).encode())
    for source in sources:
        key.update(source.read_bytes())
    for header in sorted(path for folder in include for path in folder.rglob("*") if path.suffix in (".h", ".cuh")):
        key.update(header.read_bytes())
    library = packages.PEERS / "compiled" / f"{name}-{key.hexdigest()[:16]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        partial = library.with_suffix(f".{os.getpid()}.partial")
        ran = subprocess.run(
            [compiler, *options, "-o", str(partial), *map(str, sources)], capture_output=True, text=True, check=False
        )
        if ran.returncode:
            raise RuntimeError(f"nvcc could not compile {name}: {(ran.stderr or ran.stdout)[-500:]}")
        partial.replace(library)
    return library


def _compiler() -> str | None:
    home = os.environ.get("CUDA_HOME")
    beside = Path(home) / "bin" / "nvcc" if home else Path("/usr/local/cuda/bin/nvcc")
    return shutil.which("nvcc") or (str(beside) if beside.is_file() else None)
