"""Name the code that has changed since a record was measured: the kernels that it launched, and other modules."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ropelab.bench.code_hash import DIGITS, code_hash
from ropelab.bench.imports import file_of, imported

LIBRARY = "ropelab"
KERNELS = f"{LIBRARY}.kernels"
"""The package of the kernels. A record without hashes of modules names it as a whole."""

NAMED = 2
"""The number of modules that the foot of a figure names."""


def module_hashes(modules: Iterable[str], root: Path) -> dict[str, str]:
    """The hash of each of these modules and of every module under ``root`` that they import.

    Returns:
        The name of each module -> the first 16 hexadecimal digits of the `code_hash` of its file.
    """
    return {name: _hash(path, root) for name, path in imported(modules, root).items()}


def hash_of(modules: Iterable[str], root: Path) -> str:
    """One hash of the code of these modules."""
    files = (file_of(name, root) for name in modules)
    return code_hash([path for path in files if path], root)[:DIGITS]


def stale(provenance: Mapping[str, Any], kernels_sha256: str, root: Path) -> tuple[str, ...]:
    """The kernels and modules whose code is not the code that was measured, by name; what is gone is among them.

    A record that notes its launches names the kernels of `stale_launches`, and modules outside the kernels. An older
    record names every module. A record that was measured before modules were hashed knows its kernels only: it gives
    ``("ropelab.kernels",)`` if any kernel has changed, else ``()``.

    Args:
        kernels_sha256: the hash of today's kernels.
        root: the folder of today's ``ropelab``.
    """
    same_kernels = provenance["kernels_sha256"] == kernels_sha256
    launches = provenance.get("triton_launches")
    if hashes := provenance.get("modules"):
        judged = {name: hashes[name] for name in hashes if launches is None or not is_of_kernels(name)}
        changed = changed_modules(judged, root)
        kernels = [] if launches is None or same_kernels else stale_launches(provenance).values()
        return (*dict.fromkeys(kernels), *changed)
    return () if same_kernels else (KERNELS,)


def changed_modules(hashes: Mapping[str, str], root: Path) -> list[str]:
    """The modules that have another hash under ``root``, or are not there."""
    return [name for name, digest in hashes.items() if _hash_of_module(name, root) != digest]


def stale_launches(provenance: Mapping[str, Any]) -> dict[str, str]:
    """The noted launches that today's code makes otherwise: the name of each note -> the name of its kernel.

    A launch is the same if the source of its kernel and its constants are. Otherwise the kernel is compiled with the
    version of Triton that the record names, and the code must be the same. Where this version is not at hand, the
    launch counts as another one. Kernels of other packages do not count; `peer_files` has the hashes of their files.
    """
    launches = {name: note for name, note in provenance.get("triton_launches", {}).items() if "source" in note}
    if not launches:
        return {}
    try:
        from ropelab.bench import launched, other_triton
    except ImportError:  # without Triton nothing can be planned
        return {name: _full_name(note) for name, note in launches.items()}
    gpu, differing = provenance["gpu"], {}
    for name, note in launches.items():
        try:
            same = launched.of_today(note, gpu).items() <= note.items()
        except Exception:  # today's code cannot plan this call
            same = False
        if not same:
            differing[name] = note
    codes = other_triton.code_hashes(list(differing.values()), gpu, provenance["triton"]) if differing else []
    return {
        name: _full_name(note)
        for (name, note), code in zip(differing.items(), codes, strict=True)
        if not code or code != note["code"]
    }


def is_of_kernels(name: str) -> bool:
    """Whether a module or a kernel is one of `KERNELS`."""
    return (name + ".").startswith(f"{KERNELS}.")


def _full_name(note: Mapping[str, str]) -> str:
    return f"{KERNELS}.{note['kernel']}"


def words(changed: tuple[str, ...], launches: bool = False) -> str:
    """One line for the foot of a figure; "" if nothing has changed. Kernels come before all other code.

    Args:
        launches: whether the names of kernels are those of launches; the line then has them.
    """
    if kernels := [name for name in changed if is_of_kernels(name)]:
        return "kernels changed since: measure again" + (f" ({_named(kernels)})" if launches else "")
    return f"recorded with other code: {_named(changed)}" if changed else ""


def _named(modules: Sequence[str]) -> str:
    more = f" and {len(modules) - NAMED} more" if len(modules) > NAMED else ""
    return ", ".join(name.removeprefix(f"{LIBRARY}.") for name in modules[:NAMED]) + more


def _hash_of_module(name: str, root: Path) -> str | None:
    path = file_of(name, root)
    return path and _hash(path, root)


def _hash(path: Path, root: Path) -> str:
    return code_hash([path], root)[:DIGITS]
