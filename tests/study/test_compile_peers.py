"""Libraries of published CUDA sources: what is compiled from what, with a compiler that only writes its arguments."""

import hashlib
import json
import sys
from dataclasses import replace

import pytest

from ropelab.bench import compile_peers, fetch_peers, packages
from ropelab.study.documents.sglang import kernels

LIBRARIES = compile_peers.read_list()


@pytest.fixture
def peers(tmp_path, monkeypatch):
    """A folder with all that the libraries are compiled from, each file empty, and a list with their checksums."""
    entries, empty = [], hashlib.sha256().hexdigest()
    for entry in fetch_peers.read_list():
        if isinstance(entry, fetch_peers.Commit):
            entries.append(replace(entry, files=dict.fromkeys(entry.files, empty)))
        else:
            entries.append(replace(entry, unpacked="", headers=dict.fromkeys(entry.headers, empty)))
    monkeypatch.setattr(packages, "_entries", lambda: entries)
    packages._check.cache_clear()
    for entry in entries:
        for file in entry.sha256 if isinstance(entry, fetch_peers.Commit) else (*entry.files, *entry.headers):
            (tmp_path / entry.folder / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / entry.folder / file).touch()
    for library in LIBRARIES:
        for folder in library.include:
            (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    yield tmp_path
    packages._check.cache_clear()


@pytest.fixture
def nvcc(tmp_path):
    """A compiler whose library holds the arguments and the text of each header that stands for another."""
    program = tmp_path / "nvcc"
    program.write_text(
        f"#!{sys.executable}\nimport pathlib, sys\n"
        "folder = next(a[2:] for a in sys.argv if a.endswith('/inner'))\n"
        "headers = [path for path in pathlib.Path(folder).parent.rglob('*') if path.is_file()]\n"
        "text = sys.argv[1:] + [f'{path.name}: {path.read_text()}' for path in headers]\n"
        "pathlib.Path(sys.argv[sys.argv.index('-o') + 1]).write_text('\\n'.join(text))\n"
    )
    program.chmod(0o755)
    return str(program)


def test_every_state_of_the_operator_is_compiled_from_its_source():
    found = {library.name: library for library in LIBRARIES}
    for state in kernels.STATES.values():
        library = found[f"sglang-14302-{state.commit[:9]}"]
        assert library.source == f"commits/{kernels.REPOSITORY}/{state.commit}/{state.path}"


def test_the_list_fetches_what_is_compiled():
    commits = [entry for entry in fetch_peers.read_list() if isinstance(entry, fetch_peers.Commit)]
    fetched = {f"commits/{c.repository}/{c.commit}/{c.under}/{file}" for c in commits for file in c.files}
    packages = {entry.folder for entry in fetch_peers.read_list() if isinstance(entry, fetch_peers.Package)}
    for library in LIBRARIES:
        assert library.source in fetched
        assert (compile_peers.WRAPPERS / library.wrapper).is_file()
        assert not library.headers or (compile_peers.WRAPPERS / library.stand_in).is_file()
        for folder in library.include:
            assert folder.split("/")[0] in packages or any(file.startswith(f"{folder}/") for file in fetched), folder


def test_a_library_gets_its_name_when_it_is_whole(peers, nvcc, capsys):
    compile_peers.compile_all(LIBRARIES, peers, nvcc, "sm_90")
    assert capsys.readouterr().out.count(": compiled") == len(LIBRARIES)
    made = [library.path(peers, "sm_90").with_suffix(kind) for library in LIBRARIES for kind in (".json", ".so")]
    assert sorted((peers / "compiled").iterdir()) == sorted(made)
    for library in LIBRARIES:
        path = library.path(peers, "sm_90")
        assert json.loads(path.with_suffix(".json").read_text())["sha256"] == packages.sha256(path)
        (said,) = packages.built([path.stem, "torchembed 0.3.0"], peers).values()
        assert said.keys() >= {"sha256", "compiler", "options", "wrapper_sha256"}  # a record states them
        text = path.read_text()
        assert f'-DSOURCE="{peers / library.source}"' in text and "-arch=sm_90" in text
        assert text.count(f'#include "{compile_peers.WRAPPERS / library.stand_in}"') == len(library.headers)


def test_a_library_that_was_made_with_other_options_is_made_anew(peers, nvcc):
    (library,) = (one for one in LIBRARIES if "-DNDEBUG" in one.options and one.name.startswith("transformer"))
    compile_peers.compile_all([replace(library, options=["-std=c++17"])], peers, nvcc, "sm_90")
    assert not library.is_made(peers, "sm_90") and not library.is_made(peers, "sm_100")
    compile_peers.compile_all([library], peers, nvcc, "sm_90")
    assert library.is_made(peers, "sm_90") and "-DNDEBUG" in library.path(peers, "sm_90").read_text()


def test_what_is_not_there_is_told(peers, nvcc, capsys):
    library = LIBRARIES[0]
    (peers / library.source).unlink()
    compile_peers.compile_all([library], peers, nvcc, "sm_90")
    assert f"because build/peers/{library.source} is not there" in capsys.readouterr().out
    assert not library.path(peers, "sm_90").exists()


@pytest.mark.parametrize(
    "library, file",
    [
        ("transformer-engine-3057-6c46696f1", "fused_rope.cu"),
        ("transformer-engine-3057-6c46696f1", "fused_attn.h"),
        ("sglang-14302-02f22ef8f", "rotary_embedding.cu"),
        ("sglang-14302-09e71354d", "sgl_kernel/utils.h"),
    ],
)
def test_what_was_changed_since_it_was_fetched_is_not_compiled(library, file, peers, nvcc, capsys):
    (library,) = (one for one in LIBRARIES if one.name == library)
    (path,) = (path for path in peers.rglob(f"*/{file}") if library.commit in path.parts or "-2.18.0" in path.parts[-6])
    path.write_text("// another code\n")
    compile_peers.compile_all([library], peers, nvcc, "sm_90")
    assert f"{library.path(peers, 'sm_90').name}: not compiled" in (said := capsys.readouterr().out)
    assert "was changed: expected sha256" in said and not library.path(peers, "sm_90").exists()


def test_a_source_that_does_not_compile_leaves_nothing(peers, capsys):
    compile_peers.compile_all(LIBRARIES[:1], peers, "false", "sm_90")
    assert "nvcc could not compile it, and the study goes on" in capsys.readouterr().out
    assert list((peers / "compiled").iterdir()) == []


def test_the_compiler_is_looked_for(monkeypatch, tmp_path, nvcc):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compile_peers.compiler() == nvcc
    monkeypatch.setenv("PATH", "")
    assert compile_peers.compiler() is None
