"""Fetch the published code that the study compares with: from ``data/peers.toml`` into ``build/peers``.

``python -m ropelab.study peers`` is the command. Packages come from the index that pip is configured for. Files of
repositories come from GitHub. The list has the checksum of every download. A download goes to ``build/peers/.partial``
and moves to its place when the download is complete. After an interruption, the next run fetches the rest.
"""

import fcntl
import hashlib
import http.client
import importlib.util
import itertools
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from ropelab.bench import whole_file

ROOT = Path(__file__).resolve().parents[2]
LIST = ROOT / "data" / "peers.toml"
PEERS = ROOT / "build" / "peers"
RAW_FILES = "https://raw.githubusercontent.com"
TIMEOUT_S = 20

_UNREACHABLE = re.compile(r"Could not fetch URL \S+: (connection error|timed out|There was a problem confirming)")
_OTHER_HASH = re.compile(r"Got\s+([0-9a-f]{64})")


class Unreachable(Exception):
    """There is no network, or the server does not answer."""


class Refused(Exception):
    """The download differs from the list, or it cannot be had. The message says why."""


@dataclass(frozen=True)
class Package:
    """A release of a package.

    Attributes:
        name, version: the distribution and its version.
        download: the name of the wheel or of the source distribution.
        bytes, sha256: the size and the checksum of the download.
        files: the files that the project loads, as paths in the installed package.
        only_files: whether nothing but ``files`` is kept; only of a wheel.
        large: whether the download is large and of use with an NVIDIA GPU only.
        environment: environment variables for the build of a source distribution.
        unpacked: the checksum of the unpacked files that may run, as `checksum` computes it; "" if it is not compared.
        headers: each header that a published source needs -> its checksum, where ``unpacked`` does not count it.
    """

    name: str
    version: str
    download: str
    bytes: int
    sha256: str
    files: Sequence[str]
    only_files: bool = False
    large: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    unpacked: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    def missing(self, peers: Path) -> list[str]:
        """The files that neither ``peers`` nor the environment has; ``["."]`` for a whole package."""
        kept = self.files if self.only_files else (".",)
        folders = [peers / self.folder]
        try:
            distribution = metadata.distribution(self.name)
            if distribution.version == self.version:
                folders.append(Path(str(distribution.locate_file(""))))
        except metadata.PackageNotFoundError:
            pass
        return [file for file in kept if not any((folder / file).exists() for folder in folders)]

    def checksum(self, peers: Path) -> str:
        """SHA-256 of a line ``<sha256>  <path>`` for each file that may run, in the order of the paths.

        These are all files of a wheel, without the bytecode that Python adds, and `files` alone where nothing else is
        kept or where a build writes files that name the machine.
        """
        folder = peers / self.folder
        paths: Sequence[str] = self.files
        if self.is_wheel and not self.only_files:
            every = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
            paths = [path.as_posix() for path in every if "__pycache__" not in path.parts]
        lines = hashlib.sha256()
        for path in sorted(paths):
            with (folder / path).open("rb") as file:
                lines.update(f"{hashlib.file_digest(file, 'sha256').hexdigest()}  {path}\n".encode())
        return lines.hexdigest()

    @property
    def folder(self) -> str:
        """The folder under ``build/peers``: see `ropelab.bench.packages.locate`."""
        return f"{self.name}-{self.version}"

    @property
    def runs_here(self) -> bool:
        """Whether this machine can load the files. Python files are for every machine."""
        if not any(file.endswith(".so") for file in self.files):
            return True
        return any(sys.platform in tag and tag.endswith(platform.machine()) for tag in self.tags[2])

    @property
    def is_wheel(self) -> bool:
        return self.download.endswith(".whl")

    @property
    def tags(self) -> tuple[str, str, list[str]]:
        """(Python, ABI, platforms) in the name of the wheel, for example ``("py3", "none", ["any"])``."""
        python, abi, platforms = self.download.removesuffix(".whl").split("-")[-3:]
        return python, abi, platforms.split(".")


@dataclass(frozen=True)
class Commit:
    """Files of a public repository on GitHub at a commit.

    Attributes:
        repository: owner and name.
        commit: the full hash.
        under: the folder of the files in the repository.
        files: the path of each file in this folder -> its checksum (SHA-256). The first file needs the others.
        read: the same for files that do not run, by their paths in the repository.
    """

    repository: str
    commit: str
    under: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    read: Mapping[str, str] = field(default_factory=dict)
    large = False
    runs_here = True

    def __str__(self) -> str:
        return f"{self.repository} at {self.commit[:9]}"

    @property
    def name(self) -> str:
        return self.repository

    @property
    def sha256(self) -> dict[str, str]:
        """The path of each file in the repository -> its checksum."""
        return {f"{self.under}/{file}": sha256 for file, sha256 in self.files.items()} | dict(self.read)

    def missing(self, peers: Path) -> list[str]:
        """The paths of the files that ``peers`` does not have."""
        return [path for path in self.sha256 if not (peers / self.folder / path).is_file()]

    @property
    def folder(self) -> str:
        """The folder under ``build/peers``: see `ropelab.bench.packages.file_at`."""
        return f"commits/{self.repository}/{self.commit}"


Entry = Package | Commit


def read_list(file: Path = LIST) -> list[Entry]:
    """The entries of the list: packages, libraries (packages of which some files are kept), and files at a commit."""
    found = tomllib.loads(file.read_text(encoding="utf-8"))
    packages = [Package(**entry) for entry in found.get("package", ())]
    libraries = [Package(**entry, only_files=True) for entry in found.get("library", ())]
    commits = [Commit(**entry) for entry in found.get("commit", ())]
    return [*packages, *commits, *sorted(libraries, key=lambda library: library.large)]


def versions(file: Path = LIST) -> dict[str, set[str]]:
    """Package -> its entries, ``"name version"``, in the list; those that servers run come from the environment."""
    engines = tomllib.loads(file.read_text(encoding="utf-8"))["engines"]
    found = {name: {f"{name} {version}" for version in versions} for name, versions in engines.items()}
    for entry in read_list(file):
        found.setdefault(entry.name, set()).add(str(entry))
    return found


def has_gpu(devices: Path = Path("/dev")) -> bool:
    """Whether the machine has an NVIDIA GPU, without a CUDA context and without torch."""
    if any(devices.glob("nvidia[0-9]*")):
        return True
    smi = shutil.which("nvidia-smi")  # of the Windows Subsystem for Linux, which has no such devices
    try:
        asked = smi and subprocess.run([smi, "-L"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return bool(asked) and "GPU 0" in asked.stdout


def fetch(entries: Sequence[Entry], peers: Path, *, large: bool | None = None) -> None:
    """Fetch every entry that is missing, and print a line for each entry: that it is there, or why it is not.

    If nothing is missing, the function starts no process, opens no connection and prints nothing.

    Args:
        peers: the folder, such as ``build/peers``.
        large: whether to fetch the large packages; by default if the machine has an NVIDIA GPU.
    """
    if not any(entry.missing(peers) for entry in entries):
        return
    with _alone(peers):
        missing = [entry for entry in entries if entry.missing(peers)]
        foreign = [entry for entry in missing if not entry.runs_here]
        for_gpus = [entry for entry in missing if entry.large and entry.runs_here]
        if for_gpus and (has_gpu() if large is None else large):
            for_gpus = []
        for left_out, why in (
            (foreign, f"for other machines than {platform.machine()}"),
            (for_gpus, "for an NVIDIA GPU (`python -m ropelab.study peers --large` fetches them)"),
        ):
            if left_out:
                _say(f"not fetched: {_size(left_out)}: {', '.join(map(str, left_out))}, {why}")
        if wanted := [entry for entry in missing if entry not in foreign + for_gpus]:
            _say(f"to fetch: {_size(wanted)}")
            _fetch_all(wanted, peers)


def _fetch_all(wanted: Sequence[Entry], peers: Path) -> None:
    unreachable: dict[type, list[str]] = {}
    for number, entry in enumerate(wanted, 1):
        if type(entry) in unreachable:
            unreachable[type(entry)].append(entry.name)
            continue
        if entry.large:
            _say(f"[{number}/{len(wanted)}] {entry}, {_size([entry])}")
        try:
            if isinstance(entry, Commit):
                _fetch_files(entry, peers)
            else:
                with _partial(peers) as partial:
                    _fetch_package(entry, peers, partial)
        except Unreachable:
            unreachable[type(entry)] = [entry.name]
        except (Refused, OSError, zipfile.BadZipFile) as error:
            _say(f"{entry}: {error}")
        else:
            _say(f"[{number}/{len(wanted)}] {entry} is there")
    if names := dict.fromkeys(itertools.chain(*unreachable.values())):
        _say(f"no network, so these stay missing, and the study goes on: {', '.join(names)}")


# ------------------------------------------------------------------------------------------------------------ packages


def _fetch_package(package: Package, peers: Path, partial: Path) -> None:
    """Let pip download a wheel, and unpack it; or let pip build a source distribution."""
    folder, unpacked = peers / package.folder, partial / "unpacked"
    if not package.is_wheel:
        _pip(package, partial, "install", "--no-build-isolation", f"--no-binary={package.name}", f"--target={unpacked}")
        unpacked.replace(folder)
        return
    python, abi, platforms = package.tags
    version = ".".join(filter(None, (python[2:3], python[3:])))
    # The wheel of this name, whatever Python and machine fetch it.
    options = ["--only-binary=:all:", "--ignore-requires-python", f"--implementation={python[:2]}", f"--abi={abi}"]
    options += [f"--python-version={version}", *(f"--platform={platform}" for platform in platforms)]
    _pip(package, partial, "download", f"--dest={partial}", *options)
    missing = package.missing(peers) if package.only_files else None
    with zipfile.ZipFile(partial / package.download) as wheel:
        if lacking := set(package.files) - set(wheel.namelist()):
            raise Refused(f"expected {', '.join(sorted(lacking))} in {package.download}, got a wheel without")
        wheel.extractall(unpacked, missing)
    for file in missing or ():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (unpacked / file).replace(folder / file)
    if missing is None:
        unpacked.replace(folder)


def _pip(package: Package, partial: Path, command: str, *options: str) -> None:
    """Run pip for one package. Before pip unpacks or builds a download, pip compares its checksum.

    pip shows the progress of a large download.

    Raises:
        Unreachable: pip found no index to ask.
        Refused: there is no pip, the checksum differs, or pip failed.
    """
    if importlib.util.find_spec("pip") is None:
        raise Refused("this Python has no pip to fetch it with; without PYTHON= make uses its own environment")
    requirements, log = partial / "requirements.txt", partial / "pip.log"
    requirements.write_text(f"{package.name}=={package.version} --hash=sha256:{package.sha256}\n", encoding="utf-8")
    asked = [sys.executable, "-m", "pip", command, "--require-hashes", f"--requirement={requirements}", "--no-deps"]
    asked += ["--retries=0", f"--log={log}", *options, *([] if package.large else ["--quiet"])]
    # The constraints of a container name versions of their own, and --user contradicts --target.
    environment = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    environment |= {"PIP_USER": "0", "PIP_NO_INPUT": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **package.environment}
    done = subprocess.run(asked, stderr=subprocess.PIPE, text=True, env=environment, cwd=partial, check=False)
    if done.returncode == 0:
        return
    if other := _OTHER_HASH.search(done.stderr):
        raise Refused(f"expected sha256 {package.sha256}, got {other[1]}")
    if log.exists() and _UNREACHABLE.search(log.read_text(encoding="utf-8", errors="replace")):
        raise Unreachable
    lines = done.stderr.splitlines() or [f"pip ended with {done.returncode}"]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    raise Refused((errors or lines)[-1])


# ---------------------------------------------------------------------------------------------- files of repositories


def _fetch_files(commit: Commit, peers: Path) -> None:
    for path in commit.missing(peers):
        address = f"{RAW_FILES}/{commit.repository}/{commit.commit}/{path}"
        try:
            with urllib.request.urlopen(address, timeout=TIMEOUT_S) as answer:
                content = answer.read()
        except urllib.error.HTTPError as error:
            raise Refused(f"{address}: expected the file, got {error.code} {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            raise Unreachable from error
        if (found := hashlib.sha256(content).hexdigest()) != commit.sha256[path]:
            raise Refused(f"{path}: expected sha256 {commit.sha256[path]}, got {found}")
        whole_file.write(peers / commit.folder / path, content)


# ------------------------------------------------------------------------------------------------------------- helpers


@contextmanager
def _alone(peers: Path) -> Iterator[None]:
    """Wait until no other process fetches into the folder."""
    peers.mkdir(parents=True, exist_ok=True)
    folder = os.open(peers, os.O_RDONLY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("another process is fetching; waiting for its end")
            fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


@contextmanager
def _partial(peers: Path) -> Iterator[Path]:
    """An empty folder on the same file system, for downloads that are not complete."""
    folder = peers / ".partial"
    shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _size(entries: Sequence[Entry]) -> str:
    """The number of the entries, and the size of the packages among them."""
    size = sum(entry.bytes for entry in entries if isinstance(entry, Package))
    files = sum(len(entry.sha256) for entry in entries if isinstance(entry, Commit))
    return (
        f"{size / 1e6:.{0 if size >= 1e6 else 2}f} MB of packages"
        + f" and {files} files of public repositories" * bool(files)
    )


def _say(what: str) -> None:
    print(f"peers: {what}", flush=True)


def fetch_listed(large: bool | None = None) -> None:
    """`fetch` the whole list into ``build/peers``; what goes wrong is said, and ends nothing."""
    try:
        fetch(read_list(), PEERS, large=large)
    except OSError as error:  # a folder that cannot be written
        _say(f"{error}; the study goes on")
