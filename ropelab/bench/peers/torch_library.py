"""This file loads the shared library of a package that registers operators with torch, without the package itself."""

from collections.abc import Sequence
from functools import cache

import torch

from ropelab.bench import packages


@cache
def load(package: str, version: str, candidates: Sequence[str]) -> str:
    """Load the first library that the version has, and return its path in the package.

    Torch registers the operators of a library when the library is loaded. The process therefore has the operators of
    one version of a package at most. If the package was imported before, its library is loaded already, and nothing
    happens.

    Args:
        candidates: paths of the library in the package; a tuple.

    Raises:
        NotInstalled: the version is not installed, has none of the libraries, or its library cannot be loaded here.
    """
    _, directory = packages.locate(package, version)
    for name in candidates:
        if (directory / name).is_file():
            try:
                torch.ops.load_library(directory / name)
            except (OSError, RuntimeError) as error:
                reason = str(error).splitlines()[0].replace(f"{directory}/", "")
                raise packages.NotInstalled(f"{package} {version} cannot be loaded: {reason}") from error
            return name
    raise packages.NotInstalled(f"{package} {version} has no {' or '.join(candidates)}")
