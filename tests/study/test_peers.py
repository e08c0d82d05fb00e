"""Peers without a network: wheels, a source distribution and files made up here, and the errors."""

import hashlib
import http.server
import importlib.util
import os
import py_compile
import re
import socket
import subprocess
import sys
import tarfile
import threading
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ropelab.bench import compile_peers, fetch_peers, packages
from ropelab.bench.fetch_peers import Commit, Package
from ropelab.bench.peers import flashinfer, quack
from ropelab.study.__main__ import app
from tests.study.sentences import states

needs_pip = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="needs pip")
COMMIT = "0123456789abcdef0123456789abcdef01234567"
WRONG = "0" * 64


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder in the place of pip's index."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def peers(tmp_path):
    return tmp_path / "build" / "peers"


def wheel(index: Path, name: str, version: str, files: dict[str, str], tags: str = "py3-none-any", **more) -> Package:
    """A wheel in the index, and its entry."""
    stem = f"{name.replace('-', '_')}-{version}"
    about = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nRequires-Python: >=3.9\n",
        "WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
        + "".join(f"Tag: {tags.rpartition('-')[0]}-{platform}\n" for platform in tags.split("-")[-1].split(".")),
        "RECORD": "",
    }
    path = index / f"{stem}-{tags}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in (files | {f"{stem}.dist-info/{file}": text for file, text in about.items()}).items():
            archive.writestr(file, text)
    content = path.read_bytes()
    return Package(name, version, path.name, len(content), sha256(content), tuple(files), **more)


def source_distribution(index: Path, built: Path) -> Package:
    """A source distribution in the index that notes its environment when it is built, and its entry."""
    folder = index / "peer_source-1.0"
    (folder / "peer_source").mkdir(parents=True)
    (folder / "peer_source" / "__init__.py").touch()
    (folder / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: peer-source\nVersion: 1.0\n")
    (folder / "setup.py").write_text(
        "import os\nfrom pathlib import Path\nfrom setuptools import setup\n"
        f"Path({str(built)!r}).write_text(os.environ.get('PEER_BUILD', ''))\n"
        "setup(name='peer-source', version='1.0', packages=['peer_source'])\n"
    )
    path = index / "peer_source-1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        archive.add(folder, folder.name)
    content = path.read_bytes()
    files, environment = ("peer_source/__init__.py",), {"PEER_BUILD": "kernels left out"}
    return Package("peer-source", "1.0", path.name, len(content), sha256(content), files, environment=environment)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A server in GitHub's place; the address of each request; and files at a commit that the server has."""
    asked = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            asked.append(self.path)

    files = {"kernels/rope.cu": b"// rotates\n", "kernels/util.h": b"// helps\n"}
    folder = tmp_path / "github" / "owner" / "repo" / COMMIT
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(tmp_path / "github")))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(fetch_peers, "RAW_FILES", f"http://127.0.0.1:{server.server_port}")
    yield (
        Commit("owner/repo", COMMIT, "kernels", {Path(path).name: sha256(content) for path, content in files.items()}),
        asked,
    )
    server.shutdown()
    server.server_close()


def closed_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def nothing_may_start(monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError(f"started: {arguments}")

    monkeypatch.setattr(fetch_peers.subprocess, "run", refuse)
    monkeypatch.setattr(fetch_peers.urllib.request, "urlopen", refuse)


def contents(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


# -------------------------------------------------------------------------------------------------- what is fetched


@needs_pip
def test_a_package_is_unpacked_whole_and_found(index, peers, capsys, monkeypatch):
    package = wheel(index, "peer-whole", "1.0", {"peer_whole/__init__.py": "", "peer_whole/rope.py": "X = 1\n"})
    monkeypatch.setattr(packages, "_entries", lambda: [package])
    fetch_peers.fetch([package], peers)
    assert packages.locate("peer-whole", "1.0", peers) == ("1.0", peers / "peer-whole-1.0")
    assert (peers / "peer-whole-1.0" / "peer_whole" / "rope.py").read_text() == "X = 1\n"
    assert "peer_whole-1.0.dist-info/METADATA" in contents(peers / "peer-whole-1.0")
    assert [path.name for path in peers.iterdir()] == ["peer-whole-1.0"]
    assert "peer-whole 1.0" in capsys.readouterr().out


@needs_pip
@pytest.mark.parametrize(
    "tags", ["cp38-abi3-manylinux_2_28_x86_64", "cp311-cp311-manylinux_2_24_aarch64.manylinux_2_28_aarch64",
             "py3-none-manylinux_2_28_x86_64"],
)  # fmt: skip
def test_of_a_library_only_the_files_stay_whatever_python_and_machine_fetch_it(tags, index, peers):
    whole = wheel(index, "peer-library", "1.0", {"lib/kept.py": "kept", "lib/other.so": "other"}, tags, only_files=True)
    library = replace(whole, files=("lib/kept.py",))
    fetch_peers.fetch([library], peers)
    assert contents(peers) == {"peer-library-1.0/lib/kept.py"}
    more = replace(library, files=("lib/kept.py", "lib/other.so"))
    assert more.missing(peers) == ["lib/other.so"]


@needs_pip
def test_a_source_distribution_is_built_with_its_environment(index, peers, tmp_path, monkeypatch):
    package = source_distribution(index, tmp_path / "built")
    monkeypatch.setattr(packages, "_entries", lambda: [package])
    fetch_peers.fetch([package], peers)
    assert "peer_source/__init__.py" in contents(packages.locate("peer-source", "1.0", peers)[1])
    assert (tmp_path / "built").read_text() == "kernels left out"


def test_files_of_a_commit(repository, peers):
    commit, asked = repository
    fetch_peers.fetch([commit], peers)
    for path, expected in commit.sha256.items():
        assert packages.sha256(packages.file_at("owner/repo", COMMIT, path, peers)) == expected
    (peers / commit.folder / "kernels" / "util.h").unlink()
    fetch_peers.fetch([commit], peers)
    assert asked == [f"/owner/repo/{COMMIT}/kernels/{name}" for name in ("rope.cu", "util.h", "util.h")]


def test_what_is_there_starts_nothing(peers, monkeypatch, capsys):
    whole, library = (Package(name, "1.0", "", 0, WRONG, ("a.py",), only_files=name == "b") for name in "ab")
    commit = Commit("owner/repo", COMMIT, "x", {"y": WRONG})
    (peers / "a-1.0").mkdir(parents=True)
    for file in (peers / "b-1.0" / "a.py", peers / commit.folder / "x" / "y"):
        file.parent.mkdir(parents=True)
        file.touch()
    nothing_may_start(monkeypatch)
    fetch_peers.fetch([whole, library, commit], peers)
    assert capsys.readouterr().out == ""


def test_what_the_environment_has_is_there(peers, monkeypatch, tmp_path):
    (tmp_path / "site" / "peer_there-2.0.dist-info").mkdir(parents=True)
    (tmp_path / "site" / "peer_there-2.0.dist-info" / "METADATA").write_text("Name: peer-there\nVersion: 2.0\n")
    monkeypatch.syspath_prepend(tmp_path / "site")
    package = Package("peer-there", "2.0", "", 0, WRONG, ("a.so",))
    library = replace(package, only_files=True)
    assert not package.missing(peers) and replace(package, version="2.1").missing(peers)
    assert library.missing(peers) == ["a.so"]


# ----------------------------------------------------------------------------------------------------- what is large


@pytest.mark.parametrize("gpu, large, fetched", [(False, None, False), (True, None, True), (False, True, True),
                                                 (True, False, False)])  # fmt: skip
def test_large_libraries_are_for_gpus_or_on_request(gpu, large, fetched, peers, monkeypatch, capsys):
    tried = []
    monkeypatch.setattr(fetch_peers, "has_gpu", lambda: gpu)
    monkeypatch.setattr(fetch_peers, "_fetch_package", lambda package, *_: tried.append(package))
    library = Package("peer-large", "1.0", "peer_large-1.0-py3-none-any.whl", 279_471_780, WRONG, ("a.py",), True, True)
    fetch_peers.fetch([library], peers, large=large)
    said = capsys.readouterr().out
    assert tried == [library] * fetched and "peer-large 1.0" in said and states(said, 279)
    assert ("python -m ropelab.study peers --large" in said) != fetched


def test_shared_libraries_for_other_machines_are_left_out(peers, monkeypatch, capsys):
    nothing_may_start(monkeypatch)
    library = Package(
        "peer-so", "1.0", "peer_so-1.0-py3-none-manylinux_2_28_x86_64.whl", 1, WRONG, ("a.so",), True, True
    )
    monkeypatch.setattr(fetch_peers.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(sys, "platform", "linux")
    assert library.runs_here
    monkeypatch.setattr(fetch_peers.platform, "machine", lambda: "aarch64")
    assert not library.runs_here and replace(library, files=("a.py",)).runs_here
    fetch_peers.fetch([library], peers, large=True)
    assert "aarch64" in capsys.readouterr().out


def test_a_gpu_is_seen_without_torch(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not fetch_peers.has_gpu(tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert not fetch_peers.has_gpu(tmp_path)
    (tmp_path / "nvidia3").touch()
    assert fetch_peers.has_gpu(tmp_path)
    (tmp_path / "nvidia3").unlink()
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'GPU 0: a GPU'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    assert fetch_peers.has_gpu(tmp_path)


# -------------------------------------------------------------------------------------------------- what goes wrong


@needs_pip
def test_a_wrong_checksum_is_refused_by_name(index, peers, repository, tmp_path, capsys):
    right = [wheel(index, "peer-wheel", "1.0", {"a.py": ""}), source_distribution(index, tmp_path / "built")]
    commit, _ = repository
    path = "kernels/rope.cu"
    wrong = [*(replace(package, sha256=WRONG) for package in right), replace(commit, files={"rope.cu": WRONG})]
    fetch_peers.fetch(wrong, peers)
    said = capsys.readouterr().out
    told = {f"{package}": package.sha256 for package in right} | {f"{commit}: {path}": commit.sha256[path]}
    assert all(f"{name}: expected sha256 {WRONG}, got {sum}\n" in said for name, sum in told.items())
    assert contents(peers) == set() and not (tmp_path / "built").exists()  # nothing was built either


def no_network(monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{closed_port()}/simple")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(fetch_peers, "RAW_FILES", f"http://127.0.0.1:{closed_port()}")


@pytest.mark.process
@needs_pip
def test_without_a_network_there_is_one_line_and_no_second_try(index, peers, monkeypatch, capsys):
    no_network(monkeypatch)
    started, run = [], subprocess.run
    monkeypatch.setattr(fetch_peers.subprocess, "run", lambda *a, **o: started.append(a) or run(*a, **o))
    entries = [
        Package(name, "1.0", f"{name}-1.0-py3-none-any.whl", 10, WRONG, ("a.py",)) for name in ("first", "second")
    ]
    entries += [Commit("owner/repo", COMMIT, "a", {"b": WRONG}), Commit("owner/repo", COMMIT, "a", {"c": WRONG})]
    fetch_peers.fetch(entries, peers)
    (line,) = capsys.readouterr().out.splitlines()[1:]
    assert "no network" in line and "first, second, owner/repo" in line
    assert len(started) == 1 and contents(peers) == set()


@pytest.mark.process
@needs_pip
def test_the_command_succeeds_without_a_network(index, peers, monkeypatch):
    no_network(monkeypatch)
    entry = Package("a", "1", "a-1-py3-none-any.whl", 1, WRONG, ("a.py",))
    monkeypatch.setattr(fetch_peers, "read_list", lambda: [entry])
    monkeypatch.setattr(fetch_peers, "PEERS", peers)
    monkeypatch.setattr(compile_peers, "architecture", lambda: None)
    done = CliRunner().invoke(app, ["peers"])
    assert done.exit_code == 0 and "no network" in done.output
    (peers / "a-1").mkdir()
    done = CliRunner().invoke(app, ["peers"])
    assert (done.exit_code, done.output) == (0, "")


@needs_pip
def test_what_the_index_lacks_does_not_stop_the_others(index, peers, capsys):
    there = wheel(index, "peer-there", "1.0", {"a.py": ""})
    fetch_peers.fetch([replace(there, name="peer-absent", download="peer_absent-1.0-py3-none-any.whl"), there], peers)
    said = capsys.readouterr().out
    assert "peer-absent 1.0: " in said
    assert [path.name for path in peers.iterdir()] == ["peer-there-1.0"]


def test_a_file_that_the_repository_lacks(repository, peers, capsys):
    commit, _ = repository
    fetch_peers.fetch([replace(commit, files={"absent.cu": WRONG}), commit], peers)
    assert "absent.cu: expected the file, got 404" in capsys.readouterr().out
    assert not commit.missing(peers)


@needs_pip
def test_a_wheel_without_the_file(index, peers, capsys):
    library = replace(wheel(index, "peer-library", "1.0", {"a.py": ""}, only_files=True), files=("b.py",))
    fetch_peers.fetch([library], peers)
    assert "expected b.py in peer_library-1.0-py3-none-any.whl" in capsys.readouterr().out
    assert contents(peers) == set()


def test_without_pip_the_line_says_so_and_files_still_come(repository, peers, monkeypatch, capsys):
    commit, _ = repository
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "pip" else find(name))
    fetch_peers.fetch([Package("a", "1.0", "a-1.0-py3-none-any.whl", 10, WRONG, ("a.py",)), commit], peers)
    assert "no pip" in capsys.readouterr().out
    assert not commit.missing(peers)


@pytest.mark.process
@needs_pip
@pytest.mark.parametrize("killed", [False, True])
def test_an_interrupted_run_goes_on_with_what_is_missing(killed, index, peers, monkeypatch):
    entries = [wheel(index, f"peer-{name}", "1.0", {"a.py": ""}) for name in ("one", "two")]
    asked, run = [], subprocess.run

    def interrupted(command, **options):
        asked.append(command)
        done = run(command, **options)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return done

    monkeypatch.setattr(fetch_peers.subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch_peers.fetch(entries, peers)
    assert [path.name for path in peers.iterdir()] == ["peer-one-1.0"]
    if killed:  # there was no time to remove anything
        (peers / ".partial" / "unpacked").mkdir(parents=True)
        (peers / ".partial" / "unpacked" / "half.py").touch()
    fetch_peers.fetch(entries, peers)
    monkeypatch.setattr(packages, "_entries", lambda: entries)
    assert len(asked) == 3 and list(packages.installations("peer-two", peers)) == ["1.0"]
    assert contents(peers / "peer-two-1.0") >= {"a.py"} and "half.py" not in contents(peers / "peer-two-1.0")


def test_two_runs_at_a_time_fetch_once(repository, peers, monkeypatch):
    commit, asked = repository
    waiting = threading.Event()
    monkeypatch.setattr(fetch_peers, "_say", lambda what: waiting.set() if "another process" in what else None)
    with fetch_peers._alone(peers):
        second = threading.Thread(target=fetch_peers.fetch, args=([commit], peers))
        second.start()
        assert waiting.wait(60) and not asked
        fetch_peers._fetch_all([commit], peers)
    second.join(60)
    assert not second.is_alive() and len(asked) == 2


# ---------------------------------------------------------------------------------------------------- the list itself

LIST = fetch_peers.read_list()


def test_every_entry_is_pinned():
    folders = [entry.folder for entry in LIST]
    assert len(folders) == len(set(folders))
    for entry in LIST:
        if isinstance(entry, Commit):
            assert re.fullmatch(r"[\w.-]+/[\w.-]+", entry.repository) and re.fullmatch("[0-9a-f]{40}", entry.commit)
            files = entry.files | entry.read
            assert files and all(re.fullmatch("[0-9a-f]{64}", sha256) for sha256 in files.values())
        else:
            assert re.fullmatch("[0-9a-f]{64}", entry.sha256) and entry.bytes > 0
            assert entry.download.startswith(f"{entry.name.replace('-', '_')}-{entry.version}")
            assert entry.files or not entry.only_files
            assert bool(re.fullmatch("[0-9a-f]{64}", entry.unpacked)) != entry.large, entry
            assert entry.is_wheel or not (entry.only_files or entry.large)
            assert entry.large == (entry.bytes > 80e6)


@pytest.mark.peers
@pytest.mark.parametrize("entry", LIST, ids=str)
def test_what_was_fetched_has_the_files_that_are_loaded(entry):
    if entry.missing(packages.PEERS):
        raise packages.NotInstalled(f"{entry} is not there")
    if isinstance(entry, Commit):
        for path, expected in entry.sha256.items():
            assert packages.sha256(packages.file_at(entry.repository, entry.commit, path)) == expected, path
    else:
        _, directory = packages.locate(entry.name, entry.version)
        assert [file for file in entry.files if not (directory / file).is_file()] == []


# -------------------------------------------------------------------------------------------- hashes for records


def test_what_was_asked_for_is_named_with_its_hash(tmp_path, monkeypatch):
    entry = Package("fakepeer", "1.0", "", 0, WRONG, ("rope.py", "absent.py"))
    monkeypatch.setattr(packages, "_entries", lambda: [entry])
    monkeypatch.setattr(packages, "_used", {})
    found = []
    for content in ("1", "2"):
        (tmp_path / entry.folder).mkdir(exist_ok=True)
        (tmp_path / entry.folder / "rope.py").write_text(content)
        assert packages.locate("fakepeer", "1.0", tmp_path)[0] == "1.0"
        found.append(packages.used()["fakepeer 1.0"])
    assert len(set(found)) == 2 and all(re.fullmatch("[0-9a-f]{16}", digest) for digest in found)


@pytest.mark.parametrize("change", ["a file", "a new file", "a lost file", "a file of the same size and time"])
@pytest.mark.parametrize("only_files", [False, True])
def test_code_that_was_changed_does_not_run(only_files, change, index, peers, monkeypatch):
    entry = wheel(index, "peer-code", "1.0", {"peer_code/__init__.py": "", "peer_code/rope.py": "x = 1"})
    fetch_peers.fetch([entry], peers)
    entry = replace(entry, only_files=only_files)
    listed = [replace(entry, unpacked=entry.checksum(peers))]
    monkeypatch.setattr(packages, "_entries", lambda: listed)
    folder = peers / entry.folder / "peer_code"
    assert packages.locate("peer-code", "1.0", peers)[0] == "1.0"
    packages._check.cache_clear()  # as in another process
    about = (folder / "rope.py").stat()
    match change:
        case "a file":
            (folder / "rope.py").write_text("x = 1\n")
        case "a new file":
            (folder / "more.py").touch()
        case "a lost file":
            (folder / "__init__.py").unlink()
        case _:
            (folder / "rope.py").write_text("x = 2")
            os.utime(folder / "rope.py", ns=(about.st_atime_ns, about.st_mtime_ns))
    if only_files and change == "a new file":  # that nothing loads
        assert packages.locate("peer-code", "1.0", peers)
    else:
        with pytest.raises(packages.NotInstalled, match=r"peer-code 1.0.* \(?python -m ropelab.study peers"):
            packages.locate("peer-code", "1.0", peers)


def test_bytecode_beside_the_sources_does_not_run(tmp_path, monkeypatch):
    folder = tmp_path / "peer-1.0" / "peer"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("x = 2")
    py_compile.compile(str(folder / "__init__.py"), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    (folder / "__init__.py").write_text("x = 1")
    monkeypatch.setattr(packages, "locate", lambda package, version: ("1.0", tmp_path / "peer-1.0"))
    assert packages.load_file("peer", "1.0", "peer/__init__.py").x == 1
    with packages.imported("peer", "1.0", "peer") as module:
        assert module.x == 1


def test_flashinfer_is_compiled_once_whatever_ran_before(tmp_path, monkeypatch):
    """FlashInfer compiles anew where tvm_ffi lies elsewhere: quack, which brings its own, takes the environment's."""
    places = {"tvm_ffi/__init__.py": "", "quack/__init__.py": "", "quack/rotary.py": "import tvm_ffi\n"}
    places |= {"flashinfer/__init__.py": "", "flashinfer/rope.py": "import tvm_ffi\ndef get_rope_module(): pass\n"}
    for folder in ("environment", "of-peers"):
        for file, text in places.items():
            if folder == "of-peers" or file.startswith("tvm_ffi"):
                (tmp_path / folder / file).parent.mkdir(parents=True, exist_ok=True)
                (tmp_path / folder / file).write_text(text)
    monkeypatch.syspath_prepend(tmp_path / "environment")
    monkeypatch.setattr(quack, "_PYTHON", sys.version_info[:2])
    ours = (quack.PACKAGE, flashinfer.PACKAGE)
    where = {name: tmp_path / "of-peers" for name in ours}
    monkeypatch.setattr(packages, "locate", lambda package, version: (version, where.get(package, tmp_path / "none")))
    for one in (quack.module, quack._linked, flashinfer.compile_kernel, packages.modules_of):
        one.cache_clear()
    before = set(sys.modules)
    try:
        found = [quack.module("1.0").tvm_ffi, flashinfer.compile_kernel("1.0").tvm_ffi]
        assert {Path(module.__file__).parents[1].name for module in found} == {"environment"}
    finally:
        for name in sys.modules.keys() - before:
            del sys.modules[name]
        for one in (quack.module, flashinfer.compile_kernel, packages.modules_of):
            one.cache_clear()


def test_a_changed_file_of_a_commit_does_not_run(tmp_path, monkeypatch):
    commit = Commit("owner/repo", COMMIT, "a", {"rope.py": sha256(b"1")})
    monkeypatch.setattr(packages, "_entries", lambda: [commit])
    file = tmp_path / commit.folder / "a" / "rope.py"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"1")
    assert packages.file_at("owner/repo", COMMIT, "a/rope.py", tmp_path) == file
    file.write_bytes(b"2")
    with pytest.raises(packages.NotInstalled, match="a/rope.py was changed: expected sha256 .*study peers"):
        packages.file_at("owner/repo", COMMIT, "a/rope.py", tmp_path)
