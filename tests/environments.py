"""Environments of their own, made of what this one has, without a network."""

import os
import subprocess
import sys
import venv
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]


def environment(folder: Path, *, without: tuple[str, ...]) -> Path:
    """A new environment in ``folder`` with links to all packages of this one but those ``without``.

    Lines that packages add to ``sys.path`` (``*.pth``) stay behind, so that no checkout is found through them.

    Args:
        without: patterns of names in site-packages, in lower case.

    Returns:
        Its Python.
    """
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    for source in (Path(entry) for entry in sys.path if entry.endswith("-packages")):
        for package in source.iterdir():
            link = packages / package.name
            if not link.exists() and not any(fnmatch(package.name.lower(), name) for name in (*without, "*.pth")):
                link.symlink_to(package)
    return python


def run(python: Path, *arguments, expect: int = 0, cwd: Path | None = None, **variables: str) -> str:
    """What a command of an environment prints, both streams; nothing of this process's settings reaches it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "TRITON", "PIP_"))}
    command = [str(python), *map(str, arguments)]
    found = subprocess.run(command, cwd=cwd, env=kept | variables, text=True, capture_output=True, timeout=300)
    assert found.returncode == expect, f"{command}: exit code {found.returncode}\n{found.stdout}{found.stderr}"
    return found.stdout + found.stderr
