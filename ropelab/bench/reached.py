"""Name the code that the launches of kernels reach: each function, class and constant, with its hash.

A kernel reaches the jitted functions that it calls, what those call, and the constants and types that they name. The
code is read from the files of `ropelab.kernels` and not imported, so that the code of any commit can be named.
"""

import ast
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from ropelab.bench.code_hash import DIGITS, syntax_tree
from ropelab.kernels import HAS_TRITON

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
_PACKAGE = "ropelab.kernels"
Place = tuple[str, str]
"""A module of the package, and a name in it."""


_NOTING: list[set[str]] = []
"""What the contexts of `noted` have found so far, the innermost last."""


@contextmanager
def noted() -> Iterator[set[str]]:
    """Note the kernels of this project that Triton compiles, or loads, within the context, as ``"module.function"``.

    A process loads a kernel once, so the context belongs around all that a process launches. Another process notes its
    own kernels, and `note` adds them here.
    """
    found: set[str] = set()
    if not HAS_TRITON:
        yield found
        return
    from triton.compiler import CompiledKernel

    init = CompiledKernel.__init__

    def made(kernel: Any, source: Any, *arguments: Any, **options: Any) -> None:
        init(kernel, source, *arguments, **options)
        module = getattr(getattr(source, "fn", None), "__module__", "")
        if module.startswith(f"{_PACKAGE}."):
            found.add(f"{module.removeprefix(f'{_PACKAGE}.')}.{source.fn.__name__}")

    _NOTING.append(found)
    try:
        with mock.patch.object(CompiledKernel, "__init__", made):
            yield found
    finally:
        _NOTING[:] = [each for each in _NOTING if each is not found]


def note(kernels: Iterable[str]) -> None:
    """Add kernels that another process has noted to those of the innermost context of `noted`, if there is one."""
    if _NOTING:
        _NOTING[-1].update(kernels)


def reached(kernels: Iterable[str], folder: Path = KERNELS) -> dict[str, str]:
    """The hash of each definition that the kernels reach, the kernels among them.

    Args:
        kernels: as ``"rotate_triton._rotate_kernel"``.
        folder: the files of the kernels.

    Returns:
        ``"module.name"`` -> 16 hexadecimal digits, which depend on the code and not on comments and docstrings. A
        kernel that is not there has ``""``.
    """
    found: dict[Place, str] = {}
    waiting = [(module, name) for module, _, name in (kernel.partition(".") for kernel in kernels)]
    missing = {place: "" for place in waiting}
    while waiting:
        place = waiting.pop()
        if place not in found and (definition := _defined(place, folder)):
            found[place], used = definition
            waiting += used
    return {f"{module}.{name}": digest for (module, name), digest in sorted((missing | found).items())}


def changed(kernels: Mapping[str, str], same_code: Mapping[str, Iterable[str]], folder: Path = KERNELS) -> list[str]:
    """The names whose code is another one under ``folder``, or is not there.

    Args:
        kernels: as `reached` returns them.
        same_code: name -> hashes of code from which the compiler makes one machine code. They say nothing of a name
            whose code of today is not among them.
    """
    today = {place: definition[0] for place in map(_place, kernels) if (definition := _defined(place, folder))}
    return [
        name
        for name, digest in kernels.items()
        if (now := today.get(_place(name))) != digest and not {now, digest} <= {*same_code.get(name, ())}
    ]


def _place(name: str) -> Place:
    module, _, name = name.partition(".")
    return module, name


def _defined(place: Place, folder: Path) -> tuple[str, list[Place]] | None:
    """The hash of a definition, and the places of all that it names; None where there is no such definition."""
    module, name = place
    path = folder / f"{module}.py"
    definitions, imports = _module(path.read_bytes()) if path.is_file() else ({}, {})
    if name in imports:  # a name of another module, which the name of this module stands for
        return _defined(imports[name], folder)
    if name not in definitions:
        return None
    digest, used = definitions[name]
    return digest, [imports.get(other, (module, other)) for other in used]


@cache
def _module(source: bytes) -> tuple[dict[str, tuple[str, frozenset[str]]], dict[str, Place]]:
    """Each name that a module defines -> its hash and the names in it; each name that it imports from the package."""
    definitions, imports = {}, {}
    for node in ast.parse(source).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names = [name]
            case ast.Assign(targets=targets):
                names = [target.id for target in targets if isinstance(target, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=name), value=value) if value:
                names = [name]
            case ast.ImportFrom(module=module) if module and module.startswith(f"{_PACKAGE}."):
                inner = module.removeprefix(f"{_PACKAGE}.")
                imports |= {alias.asname or alias.name: (inner, alias.name) for alias in node.names}
                continue
            case _:
                continue
        digest = hashlib.sha256(syntax_tree(node).encode()).hexdigest()[:DIGITS]
        used = frozenset(part.id for part in ast.walk(node) if isinstance(part, ast.Name)) - {*names}
        definitions |= dict.fromkeys(names, (digest, used))
    return definitions, imports
