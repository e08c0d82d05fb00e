"""What a file imports is declared in pyproject.toml, in the groups that make installs for it."""

import ast
import json
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LIBRARY = PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["cli"]
STUDY, TEST = (PROJECT["dependency-groups"][name] for name in ("study", "test"))
ADAPTED = {"deepspeed", "flash_attn_interface", "jax", "quack", "sglang", "torchtitan", "vllm"}
"""Packages that adapters and tests are for, where somebody has them; no group installs them."""


def sources(folders: list[str]) -> dict[Path, str]:
    """The code of the files and of the notebooks in the folders; that of the hub's package is not for this checkout."""
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py") if path.parent.name != "source"]
    found = {path: path.read_text(encoding="utf-8") for path in paths}
    for path in (path for folder in folders for path in (ROOT / folder).rglob("*.ipynb")):
        cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
        found[path] = "\n".join("".join(cell["source"]) for cell in cells)
    return found


def imported(code: str) -> set[str]:
    """The packages that the code imports, anywhere in it, or looks for with `pytest.importorskip`."""
    names = set(re.findall(r"importorskip\(\"([\w.]+)", code))
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(node.module)
    return (
        {name.partition(".")[0] for name in names}
        - sys.stdlib_module_names
        - {"ropelab", "pytest_ropelab", "ropelab_command", "ropelab_plugins", "tests"}
    )


def normal(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0].lower().replace("_", "-")


STUDIED, TESTED = ["ropelab/bench", "ropelab/study", "notebooks"], ["tests", "examples", "upstream"]
OF_THE_LIBRARY = [f"ropelab/{path.name}" for path in (ROOT / "ropelab").iterdir() if path.is_dir()]


@pytest.mark.parametrize(
    "folders, declared, optional",
    [
        (sorted({*OF_THE_LIBRARY} - {*STUDIED}), LIBRARY, {"diffusers", "pytest", "transformers"}),
        (STUDIED, LIBRARY + STUDY, {"anywidget", "diffusers"}),
        (TESTED, LIBRARY + STUDY + TEST, {"anywidget", "jupyterlab", "fakepeer"}),
    ], ids=["library", "study", "tests"],
)  # fmt: skip
def test_what_is_imported_is_declared(folders, declared, optional):
    names = {normal(requirement) for requirement in declared}
    packages = packages_distributions()
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path, code in sources(folders).items()
        for name in imported(code) - ADAPTED - optional
        if not {normal(package) for package in packages.get(name, [name])} & names
        and not path.with_name(f"{name}.py").is_file()
    }
    assert not missing
