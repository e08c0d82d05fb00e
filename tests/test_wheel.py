"""The wheel, installed in an environment that knows no checkout, is the whole library; without kernels there is none.

The environment has the packages of this one (`tests.environments`): a network is not needed, and that the
requirements of the wheel can be had is not tested.
"""

import os
import shutil
import tarfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.environments import ROOT, environment, run

pytestmark = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("pip", "setuptools")), reason="needs pip and setuptools"
)

BUILD = (
    "-m",
    "pip",
    "--disable-pip-version-check",
    "wheel",
    "--quiet",
    "--no-deps",
    "--no-index",
    "--no-build-isolation",
)
USE = """
import importlib.util, pathlib, pkgutil
import torch, ropelab
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
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory) -> Path:
    """That of an environment without ropelab."""
    return environment(tmp_path_factory.mktemp("environment"), without=("ropelab*", "__editable__*"))


@pytest.fixture
def source(tmp_path) -> Path:
    """A copy of what the build reads: setuptools leaves files behind."""
    folder = tmp_path / "source"
    folder.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "kernels", "ropelab"):
        origin = ROOT / name
        if origin.is_dir():
            shutil.copytree(origin, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(origin, folder)
    return folder


def contents(wheel: Path) -> dict[str, bytes]:
    """Path -> bytes; but for the list of both, in which order may differ."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")}


def built(python: Path, source: Path, folder: Path) -> Path:
    run(python, *BUILD, "--wheel-dir", folder, source, cwd=folder.parent)
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_the_wheel_is_the_whole_library(python, source, tmp_path):
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "ropelab").rglob("*") if path.is_file()}
    files |= {f"ropelab/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / "kernels").glob("*.py")}
    files = {name for name in files if "__pycache__" not in name}
    wheel = built(python, source, tmp_path / "wheels")
    held = contents(wheel)
    assert {name for name in held if ".dist-info/" not in name} == files
    assert {"ropelab/py.typed", "ropelab/kernels/rotate_triton.py"} <= files

    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--force-reinstall", wheel, cwd=tmp_path)
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "my_project").mkdir(parents=True)
    run(python, "-c", USE.format(environment=str(python.parents[1])), cwd=elsewhere)
    assert "--convention" in run(python.with_name("ropelab"), "verify", "--help", cwd=elsewhere, COLUMNS="200")


def test_the_source_distribution_makes_the_same_wheel(python, source, tmp_path):
    hook = "import setuptools.build_meta as backend; print(backend.build_sdist({!r}))"
    run(python, "-c", hook.format(str(tmp_path)), cwd=source)
    (archive,) = tmp_path.glob("ropelab-*.tar.gz")
    with tarfile.open(archive) as held:
        held.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert not (unpacked / "ropelab" / "kernels").is_symlink()
    from_tree = contents(built(python, source, tmp_path / "from_tree"))
    from_archive = contents(built(python, unpacked, tmp_path / "from_archive"))
    assert from_tree.keys() == from_archive.keys()
    assert [name for name, held in from_tree.items() if from_archive[name] != held] == []


@pytest.mark.parametrize("instead", ["a text file", "nothing"])
def test_without_symlinks_nothing_is_built_or_imported_in_silence(python, source, tmp_path, instead):
    """What git makes of a symlink under ``core.symlinks=false``, and most programs that unpack a zip on Windows."""
    link = source / "ropelab" / "kernels"
    target = os.readlink(link)
    link.unlink()
    if instead == "a text file":
        link.write_text(target)
    said = run(python, *BUILD, "--wheel-dir", tmp_path / "wheels", source, cwd=tmp_path, expect=1)
    assert "ropelab/kernels: expected a symlink to the folder kernels" in said
    assert not list(tmp_path.glob("wheels/*.whl"))
    said = run(python, "-c", "import ropelab", cwd=tmp_path, expect=1, PYTHONPATH=str(source))
    assert "ImportError: ropelab/kernels: expected a symlink to the folder kernels" in said
