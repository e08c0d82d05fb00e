"""Hash definitions by their syntax trees, and find all that they reach.

A function reaches the functions, classes and constants that it names, and what those name in turn. Sources are read and
not imported, so that the code of any commit can be hashed.
"""

import ast
import hashlib
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

DIGITS = 16
"""The hexadecimal digits of a hash."""
Read = Callable[[str], bytes | None]
"""The source of a module of a package; None for a module that is not there, or does not count."""


def of_folder(folder: Path) -> Read:
    """The sources of the modules of a folder."""

    def read(module: str) -> bytes | None:
        path = folder / f"{module.replace('.', '/')}.py"
        return path.read_bytes() if path.is_file() else None

    return read


def reached(names: Iterable[str], read: Read, package: str) -> dict[str, str]:
    """The hash of each definition that these reach, themselves among them: ``"module.name"`` -> hexadecimal digits.

    Args:
        names: as ``"module.name"``. Names without a definition are left out.
        package: the package of the modules, which their names leave out.
    """
    found: dict[str, str] = {}
    waiting, read = [*names], cache(read)
    while waiting:
        name = waiting.pop()
        if name not in found and (definition := _defined(name, read, package)):
            found[name], used = definition
            waiting += used
    return dict(sorted(found.items()))


def _defined(place: str, read: Read, package: str) -> tuple[str, list[str]] | None:
    """The hash of a definition, and the places of all that it names; None where there is no such definition."""
    module, _, name = place.rpartition(".")
    if (source := read(module)) is None:
        return None
    definitions, imports = _module(source, package)
    if name not in definitions:  # a name of another module, which the name of this module stands for
        return _defined(imports[name], read, package) if imports.get(name, place) != place else None
    digest, used = definitions[name]
    places = [imports.get(first, f"{module}.{first}") + dot + rest for first, dot, rest in used]
    return digest, places


@cache
def _module(source: bytes, package: str) -> tuple[dict[str, tuple[str, list[tuple[str, str, str]]]], dict[str, str]]:
    """Each name that a module defines -> its hash and the names in it; each name from the package -> its place."""
    definitions, imports, tree = {}, {}, ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith(f"{package}."):
            module = f"{node.module}.".removeprefix(f"{package}.")
            imports |= {alias.asname or alias.name: f"{module}{alias.name}" for alias in node.names}
    for node in tree.body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                names = {name}
            case ast.Assign(targets=[*targets]) | ast.AnnAssign(target=targets, value=ast.expr()):
                names = _names(*targets) if isinstance(targets, list) else _names(targets)
            case _:
                continue
        used = sorted(name.partition(".") for name in _names(node) - names)
        definitions |= dict.fromkeys(names, (digest(node), used))
    return definitions, imports


def _names(*nodes: ast.AST) -> set[str]:
    """The names in syntax trees, and the attributes of names: ``"name"`` and ``"name.attribute"``."""
    found = set()
    for node in (part for whole in nodes for part in ast.walk(whole)):
        match node:
            case ast.Name(id=name):
                found.add(name)
            case ast.Attribute(value=ast.Name(id=name), attr=attribute):
                found.add(f"{name}.{attribute}")
    return found


def digest(value: object) -> str:
    """The hash of a syntax tree, which comments, docstrings and layout do not change, on every version of Python."""
    return hashlib.sha256(_text(value).encode()).hexdigest()[:DIGITS]


def _text(value: object) -> str:
    """A node, a list of nodes or a constant of a syntax tree as text, without statements that consist of a string.

    The output of `ast.dump` differs between versions: Python 3.12 added the field ``type_params``, and Python 3.13
    leaves out empty fields. Here fields that are None or empty are left out. Constants are written in ASCII, because
    the Unicode characters that `repr` escapes depend on the version. Empty parts of f-strings are left out, because
    Python 3.12.1 adds them after a field within a format specification.
    """
    match value:
        case ast.JoinedStr(values=parts):
            fields = [("values", [part for part in parts if not (isinstance(part, ast.Constant) and part.value == "")])]
        case ast.AST():
            fields = [*ast.iter_fields(value)]
        case list():
            return f"[{', '.join(_text(item) for item in value if not _is_docstring(item))}]"
        case _:
            return ascii(value)
    said = [f"{name}={_text(field)}" for name, field in fields if field is not None and field != []]
    return f"{type(value).__name__}({', '.join(said)})"


def _is_docstring(node: object) -> bool:
    """Whether a node is a statement that consists of a string: the statement has no effect."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
