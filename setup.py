"""Builds nothing without the kernels, and gives the package a description whose links work away from the checkout.

Everything else about the package is in pyproject.toml.
"""

import re
import sys
import tomllib
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
KERNELS = HERE / "ropelab" / "kernels"

if not (KERNELS / "__init__.py").is_file():
    found = "a file" if KERNELS.is_file() else "nothing"
    sys.exit(
        f"ropelab/kernels: expected a symlink to the folder kernels, got {found}: check the repository out with "
        "symlinks (git config core.symlinks true; on Windows with developer mode on), or copy the folder there"
    )


def description() -> str:
    """README.md with links to the repository in place of links to files beside it."""
    project = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    repository, text = project["urls"]["Repository"], (HERE / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"\]\((?!\w+:|#)", f"]({repository}/blob/main/", text)
    return re.sub(r'(src|srcset)="(?!\w+:)', rf'\1="{repository}/raw/main/', text)


setup(long_description=description(), long_description_content_type="text/markdown")
