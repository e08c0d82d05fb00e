"""Find the packages to compare with, in ``build/peers/<package>-<version>/`` or in the environment.

A single file of a package is loaded as a separate module. The ``__init__`` of the package may import CUDA extensions
that are not installed, and only one version of a package can be imported by name.

Files under ``build/peers`` are compared with the checksums of ``data/peers.toml`` before they run, once in a process:
the code that a process has loaded stays. Size and time of a file prove nothing: whoever changes a file can set both.
"""

import hashlib
import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from types import ModuleType

import torch

from ropelab.bench import fetch_peers, replaced
from ropelab.bench.unavailable import Unavailable

PEERS = Path(__file__).resolve().parents[2] / "build" / "peers"


_used: dict[str, dict[str, Path]] = {}
"""What this process has asked for, by name -> the path of each file that the project loads -> the file."""


class NotInstalled(Unavailable, ImportError):
    """The package, or the requested version of the package, is not installed."""


def installations(package: str, peers: Path = PEERS) -> dict[str, Path]:
    """Each version of a distribution at hand -> the directory that holds the version, oldest version first.

    Under ``peers`` the versions of ``data/peers.toml`` count: another folder there has no checksum to be compared with.
    """
    found: dict[str, Path] = {}
    try:
        distribution = metadata.distribution(package)
        found[distribution.version] = Path(str(distribution.locate_file("")))
    except metadata.PackageNotFoundError:
        pass
    listed = (entry for entry in _entries() if isinstance(entry, fetch_peers.Package) and entry.name == package)
    found |= {entry.version: peers / entry.folder for entry in listed if (peers / entry.folder).is_dir()}
    return dict(sorted(found.items(), key=lambda item: [int(p) if p.isdigit() else -1 for p in item[0].split(".")]))


def locate(package: str, version: str | None = None, peers: Path = PEERS) -> tuple[str, Path]:
    """(version, directory) of the package, by default of the newest installed version.

    Raises:
        NotInstalled: the package, or the version, is not installed, or its files under ``peers`` were changed.
    """
    found = installations(package, peers)
    if version is None and found:
        version = list(found)[-1]
    if version is None or version not in found:
        raise NotInstalled(f"{package} {version or ''}".strip() + " not installed")
    if found[version].is_relative_to(peers):
        _check(package, version, peers)
    files = [file for entry in _entries() if str(entry) == f"{package} {version}" for file in entry.files]
    _used[f"{package} {version}"] = {file: found[version] / file for file in files}
    return version, found[version]


def used() -> dict[str, str]:
    """The name of each package, commit and compiled library whose code this process has asked for -> its hash.

    The hash is of the files that the project loads, 16 hexadecimal digits; ``""`` for a package of the environment
    that ``data/peers.toml`` does not have.
    """
    return {name: _digest(files) for name, files in sorted(_used.items())}


def built(names: Iterable[str], peers: Path = PEERS) -> dict[str, dict[str, object]]:
    """Each of these names that is a library which was compiled here -> compiler, options and hash of its wrapper."""
    said = {name: peers / "compiled" / f"{name}.json" for name in names}
    return {name: json.loads(about.read_bytes()) for name, about in said.items() if about.is_file()}


def _digest(files: Mapping[str, Path]) -> str:
    lines = "".join(f"{sha256(file)}  {path}\n" for path, file in sorted(files.items()) if file.is_file())
    return hashlib.sha256(lines.encode()).hexdigest()[:16] if lines else ""


@cache
def _entries() -> list[fetch_peers.Entry]:
    return fetch_peers.read_list()


@cache
def _check(package: str, version: str, peers: Path) -> None:
    """Raise `NotInstalled` if files of a package of the list were changed. The files are read once in a process."""
    packages = (entry for entry in _entries() if isinstance(entry, fetch_peers.Package))
    for entry in (entry for entry in packages if (entry.name, entry.version) == (package, version)):
        expected = {"": entry.unpacked} if entry.unpacked else entry.headers
        for file, checksum in expected.items():
            try:
                found = sha256(peers / entry.folder / file) if file else entry.checksum(peers)
            except OSError as error:
                raise NotInstalled(f"{entry}: {error} (python -m ropelab.study peers)") from error
            if found != checksum:
                raise NotInstalled(_changed(f"{entry} {file}".strip(), checksum, found, f"build/peers/{entry.folder}"))


def _changed(what: str, expected: str, found: str, path: str) -> str:
    hashes = f"expected sha256 {expected[:12]}, got {found[:12]}"
    return f"{what} was changed: {hashes}; without {path}, python -m ropelab.study peers fetches it again"


def compiled(name: str, code: str) -> Path:
    """The library of CUDA code for the GPU at hand, under ``build/peers/compiled/``.

    The checksum that the library had when it was compiled lies beside it.

    Args:
        name: the beginning of the library's name.
        code: the code in words, for messages.

    Raises:
        NotInstalled: there is no GPU, or no library for the GPU, or the library was changed.
    """
    if not torch.cuda.is_available():
        raise NotInstalled(f"{code} is CUDA code, which needs a GPU")
    major, minor = torch.cuda.get_device_capability()
    path = PEERS / "compiled" / f"{name}-sm_{major}{minor}.so"
    about = path.with_suffix(".json")
    if not (path.is_file() and about.is_file()):
        raise NotInstalled(f"{code} is not compiled for sm_{major}{minor}")
    expected, found = json.loads(about.read_text(encoding="utf-8"))["sha256"], sha256(path)
    if found != expected:
        raise NotInstalled(_changed(path.name, expected, found, "the file"))
    _used[path.stem] = {path.name: path}
    return path


def file_at(repository: str, commit: str, path: str, peers: Path = PEERS) -> Path:
    """The file of a public repository at a commit, under ``build/peers/commits/``.

    Args:
        repository: owner and name, for example ``"facebookresearch/fairseq2"``.
        commit: the full hash of the commit.
        path: the path of the file in the repository.

    Raises:
        NotInstalled: the file is not there, or it was changed.
    """
    file = peers / "commits" / repository / commit / path
    if not file.is_file():
        raise NotInstalled(f"{repository} at {commit[:9]}: {path} is not there (python -m ropelab.study peers)")
    for entry in _entries():
        if isinstance(entry, fetch_peers.Commit) and (entry.repository, entry.commit) == (repository, commit):
            expected, found = entry.sha256.get(path), hashlib.sha256(file.read_bytes()).hexdigest()
            if expected not in (None, found):
                raise NotInstalled(_changed(f"{entry}: {path}", expected, found, "the file"))
    _used.setdefault(f"{repository} at {commit[:9]}", {path: file})
    return file


def sha256(file: Path) -> str:
    """The checksum of a file, 64 hexadecimal digits. The checksum is computed once for each state of the file."""
    state = file.stat()
    return _sha256(file, state.st_size, state.st_mtime_ns)


@cache
def _sha256(file: Path, size: int, changed_ns: int) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


@contextmanager
def _sources_only() -> Iterator[None]:
    """Imports within the context read no bytecode that lies beside the sources, and write none."""
    with replaced.attributes(sys, pycache_prefix=os.devnull, dont_write_bytecode=True):
        yield


@cache
def load_file(package: str, version: str, file: str) -> ModuleType:
    """Execute one file of a package, for example ``"flash_attn/ops/triton/rotary.py"``, as a separate module.

    Raises:
        NotInstalled: the version is not installed, or does not have the file.
    """
    _, directory = locate(package, version)
    source = directory / file
    if not source.is_file():
        raise NotInstalled(f"{package} {version} has no {file}")
    name = f"_ropelab_peer_{package}_{version}_{file.removesuffix('.py')}".translate(str.maketrans("-./", "___"))
    spec = importlib.util.spec_from_file_location(name, source)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    with _sources_only():
        spec.loader.exec_module(module)
    return module


@cache
def modules_of(package: str, version: str, import_name: str, submodules: tuple[str, ...]) -> dict[str, ModuleType]:
    """The name -> the module, for every module of a package that the import of the package and its submodules loads."""
    _, directory = locate(package, version)
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if _belongs(name, import_name)}
    sys.path.insert(0, str(directory))
    try:
        with _sources_only():
            for submodule in ("", *submodules):
                importlib.import_module(import_name + submodule)
        return {name: module for name, module in sys.modules.items() if _belongs(name, import_name)}
    finally:
        sys.path.remove(str(directory))
        for name in [name for name in sys.modules if _belongs(name, import_name)]:
            del sys.modules[name]
        sys.modules.update(before)


@contextmanager
def imported(package: str, version: str, import_name: str, *submodules: str) -> Iterator[ModuleType]:
    """Within the context, ``import import_name`` imports the given version, also from the files of the package.

    Args:
        submodules: further modules to import at the start, as names that begin with a dot.
    """
    modules = modules_of(package, version, import_name, submodules)
    before = {name: sys.modules[name] for name in modules if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield modules[import_name]
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(before)


def _belongs(module: str, import_name: str) -> bool:
    return module == import_name or module.startswith(import_name + ".")
