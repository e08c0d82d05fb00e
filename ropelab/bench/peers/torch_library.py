"""Load the shared library of a package that registers operators with torch, without the package itself."""

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch

from ropelab.bench import packages


class Operators:
    """The operators that the library of a package registers.

    An operator is an attribute: ``operators.rotary_embedding``. An operator that the version does not have raises
    `NotInstalled`.

    Attributes:
        package, version: the package and its version.
        library: the file that was loaded.
    """

    def __init__(self, package: str, version: str, library: Path, namespaces: Sequence[str]):
        self.package, self.version, self.library = package, version, library
        self._namespaces = namespaces

    def __getattr__(self, name: str) -> Callable:
        for namespace in self._namespaces:
            if not name.startswith("_") and hasattr(getattr(torch.ops, namespace), name):
                return getattr(getattr(torch.ops, namespace), name)
        raise packages.NotInstalled(f"{self.package} {self.version} has no operator {name}")

    @property
    def sha256(self) -> str:
        """The hash of the library, in hexadecimal."""
        with self.library.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def load(package: str, version: str, candidates: Sequence[str], namespaces: Sequence[str]) -> Operators:
    """Load the first library that the version has. Torch then has its operators.

    The process can have the operators of one version of a package only. If the package was imported before, its
    library is loaded already, and nothing happens.

    Args:
        candidates: paths of the library in the package; a tuple.
        namespaces: the namespaces in ``torch.ops``; a tuple.

    Raises:
        NotInstalled: the version is not installed, has none of the libraries, or its library cannot be loaded here.
    """
    _, directory = packages.locate(package, version)
    for library in (directory / name for name in candidates):
        if library.is_file():
            try:
                torch.ops.load_library(library)
            except (OSError, RuntimeError) as error:
                reason = str(error.__cause__ or error).splitlines()[0].replace(f"{library.resolve().parent}/", "")
                raise packages.NotInstalled(f"{package} {version} cannot be loaded: {reason}") from error
            return Operators(package, version, library, namespaces)
    raise packages.NotInstalled(f"{package} {version} has no {' or '.join(candidates)}")
