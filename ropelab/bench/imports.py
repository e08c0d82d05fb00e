"""Find the modules of this repository that a module imports, from syntax trees and without an import."""

import ast
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path


def imported(modules: Iterable[str], root: Path) -> dict[str, Path]:
    """The given modules and all modules under ``root`` that they import, directly or through other modules.

    Imports within functions count. An import of ``a.b.c`` also runs the files of ``a`` and ``a.b``, so these count too.
    A call of `importlib.import_module` counts if its argument is a string. If the argument is an f-string, every module
    counts whose name begins as the f-string does.

    Args:
        modules: names of modules, such as ``"ropelab.bench.studies"``.
        root: the folder from which Python imports them.

    Returns:
        The name of each module -> its file, in the order of the names. Modules outside ``root`` are left out.

    Raises:
        SyntaxError: a file is not Python.
    """
    found: dict[str, Path] = {}
    waiting = list(modules)
    while waiting:
        for name in _with_parents(waiting.pop()):
            if name not in found and (path := file_of(name, root)):
                found[name] = path
                waiting += _targets(name, path, root)
    return dict(sorted(found.items()))


def file_of(name: str, root: Path) -> Path | None:
    """The file of a module, or None if ``root`` does not hold the module."""
    base = root.joinpath(*name.split("."))
    return next((path for path in (base / "__init__.py", base.with_name(f"{base.name}.py")) if path.is_file()), None)


def _with_parents(name: str) -> Iterator[str]:
    """``"a.b.c"`` -> ``"a"``, ``"a.b"``, ``"a.b.c"``."""
    parts = name.split(".")
    return (".".join(parts[: count + 1]) for count in range(len(parts)))


def _targets(name: str, path: Path, root: Path) -> Iterator[str]:
    """The names that the module ``name`` imports; a name may also belong to an object within a module."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for level, target in _imports(path.read_bytes()):
        above = package[: len(package) - level + 1] if level else []
        absolute = ".".join([*above, *filter(None, [target])])
        yield from _beginning_with(absolute[:-1], root) if absolute.endswith("*") else [absolute]


def _beginning_with(beginning: str, root: Path) -> Iterator[str]:
    """The modules whose names begin with ``beginning``: ``"a.b_"`` -> ``"a.b_c"``, ``"a.b_d"``."""
    package, _, start = beginning.rpartition(".")
    for path in root.joinpath(*package.split(".")).glob(f"{start}*.py") if package else ():
        if path.stem != "__init__":
            yield f"{package}.{path.stem}"


@cache
def _imports(source: bytes) -> tuple[tuple[int, str], ...]:
    """(level, name) of everything that a file imports; a level above 0 counts the dots of a relative import.

    A name that ends with ``*`` stands for every module whose name begins with the text before the ``*``.
    """
    return tuple(target for node in ast.walk(ast.parse(source)) for target in _of_node(node))


def _of_node(node: ast.AST) -> Iterator[tuple[int, str]]:
    match node:
        case ast.Import(names=names):
            yield from ((0, alias.name) for alias in names)
        case ast.ImportFrom(module=module, names=names, level=level):
            yield level, module or ""
            for alias in names:
                if alias.name != "*":
                    yield level, ".".join(filter(None, [module, alias.name]))
        case ast.Call(func=ast.Attribute(attr="import_module") | ast.Name(id="import_module"), args=[argument, *_]):
            match argument:
                case ast.Constant(value=str(name)):
                    yield 0, name
                case ast.JoinedStr(values=[ast.Constant(value=str(beginning)), *_]):
                    yield 0, f"{beginning}*"
