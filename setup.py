"""Builds nothing without the kernels; everything else about the package is in pyproject.toml."""

import sys
from pathlib import Path

from setuptools import setup

KERNELS = Path(__file__).parent / "ropelab" / "kernels"

if not (KERNELS / "__init__.py").is_file():
    found = "a file" if KERNELS.is_file() else "nothing"
    sys.exit(
        f"ropelab/kernels: expected a symlink to the folder kernels, got {found}: check the repository out with "
        "symlinks (git config core.symlinks true; on Windows with developer mode on), or copy the folder there"
    )

setup()
