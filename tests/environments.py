"""Make Python environments from the packages of this environment, without a network."""

import os
import subprocess
import sys
import venv
from collections.abc import Iterable
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]


def environment(folder: Path, *, without: tuple[str, ...] = (), only: Iterable[str] | None = None) -> Path:
    """A new environment in ``folder`` with links to the packages of this environment.

    Lines that packages add to ``sys.path`` (``*.pth``) stay behind, so that no checkout is found through them.

    Args:
        without: patterns of names in site-packages, in lower case, that get no link.
        only: requirements as in pyproject.toml. Packages that no requirement needs, directly or not, get no link.

    Returns:
        The Python of the new environment.
    """
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    needed = None if only is None else entries(only)
    for source in (Path(entry) for entry in sys.path if entry.endswith("-packages")):
        for package in source.iterdir():
            link = packages / package.name
            left_out = any(fnmatch(package.name.lower(), name) for name in (*without, "*.pth"))
            if not left_out and not link.exists() and (needed is None or package.name in needed):
                link.symlink_to(package)
    return python


def entries(requirements: Iterable[str]) -> set[str]:
    """The names in site-packages of everything that the requirements need and that is installed here."""
    found: dict[str, metadata.Distribution] = {}
    open_ones = [Requirement(text) for text in requirements]
    while open_ones:
        requirement = open_ones.pop()
        if requirement.name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        try:
            found[requirement.name] = metadata.distribution(requirement.name)
        except metadata.PackageNotFoundError:
            continue
        open_ones += map(Requirement, found[requirement.name].requires or ())
    return {file.parts[0] for distribution in found.values() for file in distribution.files or ()}


def run(python: Path, *arguments, expect: int = 0, cwd: Path | None = None, **variables: str) -> str:
    """The output of a command of an environment, both streams; no setting of this process reaches the command."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TRITON", "PIP_"))}
    command = [str(python), *map(str, arguments)]
    found = subprocess.run(command, cwd=cwd, env=kept | variables, text=True, capture_output=True, timeout=300)
    assert found.returncode == expect, f"{command}: exit code {found.returncode}\n{found.stdout}{found.stderr}"
    return found.stdout + found.stderr
