"""The wheel holds the library alone, and the library works where nothing but its requirements is installed.

The environments have packages of this one (`tests.environments`): a network is not needed, and that the requirements
of the wheel can be had is not tested.
"""

import os
import re
import shutil
import tarfile
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import ropelab
from tests import surface
from tests.environments import ROOT, environment, run

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(
        any(find_spec(name) is None for name in ("pip", "setuptools")), reason="needs pip and setuptools"
    ),
]

PIP = ("-m", "pip", "--disable-pip-version-check")
BUILD = "import setuptools.build_meta as backend; print(backend.build_{}({!r}))"
"""What pip and build run in a checkout."""
INSTALL = (*PIP, "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IN_A_CHECKOUT_ALONE = r"ropelab[./](?:bench|study)\b|\bdata/measurements\b|\bnotebooks?\b|\bMakefile\b|\bpandas\b"
USE = """
import importlib, pathlib, sys
from importlib.util import find_spec
import torch
before = set(sys.modules)
import ropelab
brought = set(sys.modules) - before
assert not brought & {{"torch._dynamo", "torch._inductor", "triton", "sympy", "numpy.testing"}}, brought
home = pathlib.Path(ropelab.__file__).parent
assert home.is_relative_to({environment!r}), home
assert (home / "py.typed").is_file() and not (home / "kernels").is_symlink()
for name in ropelab.__all__:
    getattr(ropelab, name)
x = torch.randn(2, 5, 4, 16)
cos, sin = ropelab.rotary_table(5, 16)
turned = ropelab.apply_rope(x, cos=cos, sin=sin)
assert not torch.equal(turned, x)
assert torch.allclose(ropelab.apply_rope(turned, cos=cos, sin=sin, inverse=True), x, atol=1e-5)

for missing in ("pandas", "matplotlib", "seaborn", "papermill", "typer", "rich", "pytest", "ropelab.bench",
                "ropelab.study"):
    assert find_spec(missing) is None, missing
for module in {modules!r}:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        assert error.name == "triton" and find_spec("triton") is None, (module, error)
from ropelab.conformance import verify
report = verify(ropelab.apply_rope, "ropelab", laws=["definition"])
assert report.passed, report.failed
"""
MINE = """
import torch
def turned(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)
def right(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + turned(q) * sin, k * cos + turned(k) * sin
def wrong(q, k, cos, sin, unsqueeze_dim=1):
    return right(q, k, cos, -sin, unsqueeze_dim)
"""


def copy(folder: Path) -> Path:
    """A copy of the checkout in ``folder``, because setuptools leaves files behind where it builds."""
    folder.mkdir()
    files = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE",
             "pytest_ropelab.py", "ropelab_command.py", "ropelab_plugins.py")  # fmt: skip
    for name in (*files, "kernels", "ropelab", "tests", "notebooks"):
        origin = ROOT / name
        if origin.is_dir():
            shutil.copytree(origin, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(origin, folder)
    return folder


@pytest.fixture
def source(tmp_path) -> Path:
    return copy(tmp_path / "source")


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """The Python of an environment with all packages of this one, without ropelab."""
    # The package kernels hooks into setuptools by its name, which the folder kernels/ of a checkout hides.
    without = ("ropelab*", "__editable__*", "kernels", "kernels-*")
    return environment(tmp_path_factory.mktemp("environment"), without=without)


@pytest.fixture(scope="module")
def wheel(python, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return built(python, copy(folder / "source"), folder / "wheels")


@pytest.fixture
def installed(wheel, tmp_path):
    """Extras -> the Python of an environment with the wheel and the packages that it requires, and none else."""

    def install(*extras: str) -> Path:
        optional = [package for extra in extras for package in PROJECT["optional-dependencies"][extra]]
        python = environment(tmp_path / "environment", only=("pip", *PROJECT["dependencies"], *optional))
        run(python, *INSTALL, wheel, cwd=tmp_path)
        return python

    return install


def built(python: Path, source: Path, folder: Path) -> Path:
    folder.mkdir()
    run(python, "-c", BUILD.format("wheel", str(folder)), cwd=source)
    (wheel,) = folder.glob("*.whl")
    return wheel


def contents(wheel: Path) -> dict[str, bytes]:
    """Path -> bytes; but for the list of both, in which order may differ."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


def test_the_wheel_holds_the_library_alone(wheel):
    held = {name for name in contents(wheel) if ".dist-info/" not in name}
    assert held == surface.wheel()
    parts = {Path(name).parts[1] for name in held - {"pytest_ropelab.py", "ropelab_command.py", "ropelab_plugins.py"}}
    assert {"angles", "autograd", "call", "conformance", "interop", "kernels", "layout", "positions"} <= parts
    assert not [name for name in held if re.search(r"bench|ropelab/hub|study|notebook|data|tests", name)]
    assert wheel.name.startswith(f"ropelab-{ropelab.__version__}-")


def test_the_description_links_to_files_of_the_repository(wheel):
    (metadata,) = (text.decode() for name, text in contents(wheel).items() if name.endswith("/METADATA"))
    links = re.findall(r"\]\(([^)#]+)|(?:src|srcset)=\"([^\"]+)", metadata)
    repository = PROJECT["urls"]["Repository"]
    for link in (a or b for a, b in links):
        assert link.startswith("https://"), link
        if link.startswith(f"{repository}/"):
            kind, branch, path = link.removeprefix(f"{repository}/").split("/", 2)
            assert kind in ("blob", "raw") and branch == "main" and (ROOT / path).exists(), link
    assert sum(f"{repository}/blob/main/docs/" in a for a, _ in links) > 5


def test_the_library_names_nothing_that_only_a_checkout_has(wheel):
    lines = [
        f"{name}:{number}: {line.strip()}"
        for name, held in contents(wheel).items() if name.endswith(".py")
        for number, line in enumerate(held.decode().splitlines(), start=1) if re.search(IN_A_CHECKOUT_ALONE, line)
    ]  # fmt: skip
    assert not lines, "\n".join(lines)


def test_the_library_works_with_its_requirements_alone(installed, tmp_path):
    python = installed()
    needs_others = {"ropelab/command/cli.py", *(f"ropelab/interop/torchtitan{of}.py" for of in ("", "_mla"))}
    files = {name for name in surface.wheel() if name.startswith("ropelab/") and name.endswith(".py")} - needs_others
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for name in files}
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "my_project").mkdir(parents=True)
    code = USE.format(environment=str(python.parents[1]), modules=sorted(modules))
    run(python, "-c", code, cwd=elsewhere)
    said = run(python.with_name("ropelab"), "verify", "--help", cwd=elsewhere, expect=2)
    assert said.endswith("pip install rich typer, the extra 'ropelab[cli]'\n") and "Traceback" not in said
    said = run(python.with_name("ropelab"), "--version", cwd=elsewhere)
    assert said.startswith(f"ropelab {ropelab.__version__} (torch {torch.__version__.partition('+')[0]}")


def test_the_command_works_with_its_extra_alone(installed, tmp_path):
    python = installed("cli")
    (tmp_path / "mine.py").write_text(MINE)
    command = python.with_name("ropelab"), "verify", "--convention", "huggingface", "--law", "definition"
    run(*command, "mine:right", cwd=tmp_path)
    assert "smallest call" in run(*command, "mine:wrong", cwd=tmp_path, expect=1)
    assert "definition" in run(python.with_name("ropelab"), "laws", cwd=tmp_path)


def test_a_checkout_on_the_path_and_an_editable_install_have_the_benchmarks_and_the_study_too(source, tmp_path):
    python = environment(tmp_path / "environment", without=("ropelab*", "__editable__*"))
    names = "ropelab", "ropelab.kernels", "ropelab.bench.records", "ropelab.study.site.report"
    code = f"from importlib.util import find_spec\nfor name in {names}: print(find_spec(name).origin)"
    inside = "__init__.py", "kernels/__init__.py", "bench/records.py", "study/site/report.py"
    for path in (str(source), ""):
        if not path:
            run(python, *INSTALL, "--editable", source, cwd=tmp_path)
        found = run(python, "-c", code, cwd=tmp_path, PYTHONPATH=path)
        assert found.splitlines() == [str(source / "ropelab" / name) for name in inside]


def test_the_source_distribution_makes_the_same_wheel(python, wheel, source, tmp_path):
    run(python, "-c", BUILD.format("sdist", str(tmp_path)), cwd=source)
    (archive,) = tmp_path.glob("ropelab-*.tar.gz")
    with tarfile.open(archive) as held:
        safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # Python 3.11 has filters from 3.11.4 on
        held.extractall(tmp_path / "unpacked", **safe)
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    files = {path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()}
    about = {name for name in files if name.startswith("ropelab.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    build = {"pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE"}
    assert files - about == surface.wheel() | build
    assert not (unpacked / "ropelab" / "kernels").is_symlink()
    from_tree, from_archive = contents(wheel), contents(built(python, unpacked, tmp_path / "from_archive"))
    assert from_tree.keys() == from_archive.keys()
    assert [name for name, held in from_tree.items() if from_archive[name] != held] == []


@pytest.mark.parametrize("instead", ["a text file", "nothing"])
def test_without_symlinks_nothing_is_built_or_imported_in_silence(python, source, tmp_path, instead):
    """Git with ``core.symlinks=false``, and most programs that unpack a zip on Windows, make such files of symlinks."""
    link = source / "ropelab" / "kernels"
    target = os.readlink(link)
    link.unlink()
    if instead == "a text file":
        link.write_text(target)
    said = run(python, "-c", BUILD.format("wheel", str(tmp_path)), cwd=source, expect=1)
    assert "ropelab/kernels: expected a symlink to the folder kernels" in said
    assert not list(tmp_path.glob("*.whl"))
    said = run(python, "-c", "import ropelab", cwd=tmp_path, expect=1, PYTHONPATH=str(source))
    assert "ImportError: ropelab/kernels: expected a symlink to the folder kernels" in said
