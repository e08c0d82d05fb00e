"""Compile the published CUDA sources of ``data/peers.toml`` into ``build/peers/compiled``, where there is nvcc.

``python -m ropelab.study peers`` does so after it has fetched the sources. Each library is a published source in one of
the wrappers of ``peers/published``, which have no code of others. Headers that a source includes and nobody can fetch
are stood in for by a header of that folder.

Sources and headers are compared with the checksums of the list before they are compiled. The checksum of the library
lies beside it, with the compiler, its options and the checksum of the wrapper: `ropelab.bench.packages.compiled`
compares it before the library is loaded.
"""

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ropelab.bench import packages, whole_file

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "data" / "peers.toml"
PEERS = ROOT / "build" / "peers"
WRAPPERS = Path(__file__).resolve().parent / "peers" / "published"


@dataclass(frozen=True)
class Compiled:
    """A library of the first file of a commit.

    Attributes:
        name: the beginning of the name of the library.
        repository, commit: where the source is published.
        files: the source and the headers beside it, as paths in the repository.
        wrapper: the file that includes the source as ``SOURCE``.
        options: more options of nvcc.
        stand_in, headers: the header that stands for these headers. A header may lie beside the folder of the source.
        include: folders of headers, under ``build/peers``.
        library: a shared library that this library needs, under ``build/peers``.
    """

    name: str
    repository: str
    commit: str
    files: Sequence[str]
    wrapper: str
    options: Sequence[str]
    stand_in: str = ""
    headers: Sequence[str] = ()
    include: Sequence[str] = ()
    library: str = ""

    @property
    def source(self) -> str:
        """The published file, under ``build/peers``."""
        return f"commits/{self.repository}/{self.commit}/{self.files[0]}"

    def path(self, peers: Path, arch: str) -> Path:
        return peers / "compiled" / f"{self.name}-{arch}.so"

    def check(self, peers: Path) -> None:
        """Compare all that is compiled with the checksums of the list.

        Raises:
            NotInstalled: a file is missing, or was changed.
        """
        for file in self.files:
            packages.file_at(self.repository, self.commit, file, peers)
        for folder in filter(None, (*self.include, self.library)):
            if not folder.startswith("commits/"):
                name, _, version = folder.partition("/")[0].rpartition("-")
                packages.locate(name, version, peers)

    @property
    def made_with(self) -> dict[str, object]:
        """What the library is made with, besides the source and the compiler."""
        parts = [WRAPPERS / name for name in (self.wrapper, "view.h", self.stand_in) if name]
        wrapper = hashlib.sha256(b"".join(path.read_bytes() for path in parts))
        return {"options": ["-O3", *self.options], "wrapper_sha256": wrapper.hexdigest()}

    def about(self, nvcc: str, library: Path) -> dict[str, object]:
        """What the library was made with, and its checksum."""
        asked = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=False).stdout
        return {
            "sha256": hashlib.sha256(library.read_bytes()).hexdigest(),
            "compiler": (asked.strip().splitlines() or [Path(nvcc).name])[-1],
            **self.made_with,
        }

    def is_made(self, peers: Path, arch: str) -> bool:
        """Whether the library is there, made with what the list says today."""
        about = self.path(peers, arch).with_suffix(".json")
        return about.is_file() and self.made_with.items() <= json.loads(about.read_text(encoding="utf-8")).items()

    def command(self, nvcc: str, peers: Path, arch: str, folder: Path, target: Path) -> list[str]:
        """The command that compiles the library. ``folder`` gets the headers that are stood in for."""
        for header in self.headers:
            place = folder / "inner" / header
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(f'#include "{WRAPPERS / self.stand_in}"\n', encoding="utf-8")
        (folder / "inner").mkdir(exist_ok=True)
        needs = []
        if self.library:
            needs = [str(peers / self.library), "-Xlinker", f"-rpath=$ORIGIN/../{Path(self.library).parent}"]
        return [
            nvcc, f"-arch={arch}", "-O3", "-shared", "-cudart=shared", "-Xcompiler=-fPIC", "--expt-relaxed-constexpr",
            *self.options, f"-I{WRAPPERS}", f"-I{folder / 'inner'}", *(f"-I{peers / each}" for each in self.include),
            f'-DSOURCE="{peers / self.source}"', "-o", str(target), str(WRAPPERS / self.wrapper), *needs,
        ]  # fmt: skip


def read_list(file: Path = LIST) -> list[Compiled]:
    """The libraries of the list."""
    found = tomllib.loads(file.read_text(encoding="utf-8"))
    commits = {entry["commit"]: entry for entry in found.get("commit", ())}
    libraries = []
    for entry in found.get("compiled", ()):
        commit = commits[entry.pop("commit")]
        at = f"commits/{commit['repository']}/{commit['commit']}/"
        entry["include"] = [
            at + each if each.startswith(commit["under"]) else each for each in entry.get("include", ())
        ]
        files = [f"{commit['under']}/{file}" for file in commit["files"]]
        libraries.append(Compiled(repository=commit["repository"], commit=commit["commit"], files=files, **entry))
    return libraries


def compile_all(libraries: Sequence[Compiled], peers: Path, nvcc: str, arch: str) -> None:
    """Compile the libraries side by side, and print a line for each."""
    with ThreadPoolExecutor() as threads:
        said = threads.map(lambda library: _compile(library, peers, nvcc, arch), libraries)
        for library, outcome in zip(libraries, said, strict=True):
            _say(f"{library.path(peers, arch).name}: {outcome}")


def _compile(library: Compiled, peers: Path, nvcc: str, arch: str) -> str:
    """Compile a library, and say so, or why it is not compiled."""
    for needed in filter(None, (library.source, *library.include, library.library)):
        if not (peers / needed).exists():
            return f"not compiled, because build/peers/{needed} is not there"
    try:
        library.check(peers)
    except packages.NotInstalled as error:
        return f"not compiled: {error}"
    target = library.path(peers, arch)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=target.parent) as folder:
        new = Path(folder) / target.name
        command = library.command(nvcc, peers, arch, Path(folder), new)
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        if done.returncode:
            return f"nvcc could not compile it, and the study goes on: {done.stdout.strip()[-300:]}"
        whole_file.write(target.with_suffix(".json"), json.dumps(library.about(nvcc, new), indent=2) + "\n")
        new.replace(target)
    return "compiled"


def architecture() -> str | None:
    """The architecture of the first GPU, as ``sm_90``; None without a GPU."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return None
    asked = [smi, "--query-gpu=compute_cap", "--format=csv,noheader", "--id=0"]
    found = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)
    return f"sm_{found.stdout.strip().replace('.', '')}" if found.returncode == 0 else None


def compiler() -> str | None:
    """nvcc of CUDA_HOME, of the usual folder, or of the PATH; None where there is none."""
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("nvcc", path=os.pathsep.join((f"{home}/bin", os.environ.get("PATH", ""))))


def _say(text: str) -> None:
    print(f"peers: {text}", flush=True)


def compile_listed() -> None:
    """Compile what is missing or was made otherwise of the whole list, for the first GPU; without a GPU nothing."""
    arch = architecture()
    if arch is None:
        return
    missing = [library for library in read_list() if not library.is_made(PEERS, arch)]
    nvcc = compiler()
    if missing and nvcc is None:
        _say(f"there is no nvcc, so {len(missing)} published sources are not compiled, and the study goes on")
    elif missing:
        compile_all(missing, PEERS, nvcc, arch)
