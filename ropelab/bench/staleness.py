"""Name the modules whose code has changed since a record was measured."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ropelab.bench.code_hash import code_hash
from ropelab.bench.imports import file_of, imported

LIBRARY = "ropelab"
KERNELS = f"{LIBRARY}.kernels"
"""The package of the kernels. A record without hashes of modules names it as a whole."""

DIGITS = 16
NAMED = 2
"""The number of modules that the foot of a figure names."""


def module_hashes(modules: Iterable[str], root: Path) -> dict[str, str]:
    """The hash of each of these modules and of every module under ``root`` that they import.

    Returns:
        The name of each module -> the first 16 hexadecimal digits of the `code_hash` of its file.
    """
    return {name: _hash(path, root) for name, path in imported(modules, root).items()}


def stale(provenance: Mapping[str, Any], kernels_sha256: str, root: Path) -> tuple[str, ...]:
    """The modules whose code is not the code that was measured, by name; a module that is gone is among them.

    A record that was measured before modules were hashed knows its kernels only: it gives ``("ropelab.kernels",)`` if
    any kernel has changed, else ``()``.

    Args:
        kernels_sha256: the hash of today's kernels.
        root: the folder of today's ``ropelab``.
    """
    if hashes := provenance.get("modules"):
        return tuple(name for name, digest in hashes.items() if _hash_of_module(name, root) != digest)
    return () if provenance["kernels_sha256"] == kernels_sha256 else (KERNELS,)


def words(changed: tuple[str, ...]) -> str:
    """One line for the foot of a figure; "" if nothing has changed. Kernels come before all other code."""
    if any(name == KERNELS or name.startswith(f"{KERNELS}.") for name in changed):
        return "kernels changed since: measure again"
    return f"recorded with other code: {_named(changed)}" if changed else ""


def _named(modules: Sequence[str]) -> str:
    more = f" and {len(modules) - NAMED} more" if len(modules) > NAMED else ""
    return ", ".join(name.removeprefix(f"{LIBRARY}.") for name in modules[:NAMED]) + more


def _hash_of_module(name: str, root: Path) -> str | None:
    path = file_of(name, root)
    return path and _hash(path, root)


def _hash(path: Path, root: Path) -> str:
    return code_hash([path], root)[:DIGITS]
