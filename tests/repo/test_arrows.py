"""The imports of ropelab have no cycle, and go only in the allowed directions."""

import ast
import graphlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import ropelab

Graph = dict[str, set[str]]

LIBRARY_NEEDS_NO = ("ropelab.bench", "ropelab.hub", "ropelab.study")
"""Only modules of these packages may import these packages."""
NEEDS_NO = {
    "ropelab.reference": ("ropelab.kernels", "ropelab.call", "ropelab.autograd"),
    "ropelab.call": ("ropelab.autograd",),
    "ropelab.study.engine": ("ropelab.study.documents", "ropelab.study.topics", "ropelab.study.site"),
}
"""Package or module -> the packages that it needs neither directly nor through other modules."""


# ------------------------------------------------------------------------------------------------- the import graph


def modules(folder: Path, name: str) -> dict[str, Path]:
    """Return module -> file for the package ``name`` in ``folder``; a symlink to a folder is a package, too."""
    found = {}
    for parent, _, files in os.walk(folder, followlinks=True):
        package = ".".join((name, *Path(parent).relative_to(folder).parts))
        for file in map(Path, files):
            if file.suffix == ".py":
                found[package if file.stem == "__init__" else f"{package}.{file.stem}"] = Path(parent, file)
    return found


def import_graph(folder: Path, name: str) -> Graph:
    """Return module -> the modules of the package that the text of its file imports.

    Imports in functions, in classes and under TYPE_CHECKING count. ``from package import name`` is an import of the
    module ``package.name`` if there is one, and of ``package`` otherwise.
    """
    files = modules(folder, name)
    return {module: set(imported(module, file, files)) - {module} for module, file in files.items()}


def imported(module: str, file: Path, files: dict[str, Path]) -> Iterator[str]:
    """Yield the modules among ``files`` that one of them imports."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in files)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                package = module if file.stem == "__init__" else module.rpartition(".")[0]
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                source = ".".join((*above, *filter(None, (source,))))
            for name in (f"{source}.{alias.name}" for alias in node.names):
                if name in files or source in files:
                    yield name if name in files else source


# ---------------------------------------------------------------------------------------------------------- the rules


def within(module: str, *packages: str) -> bool:
    """Return whether a module is one of the packages or lies in one of them."""
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def needed(graph: Graph, package: str) -> set[str]:
    """Return all modules that the modules of a package import, directly or through other modules."""
    found: set[str] = set()
    new = {module for module in graph if within(module, package)}
    while new := {other for module in new for other in graph[module]} - found:
        found |= new
    return found


def violations(graph: Graph) -> list[str]:
    """Return a line for each broken rule: ``module -> module``, or the modules of a cycle."""
    found = []
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        found.append(" -> ".join(reversed(error.args[1])))
    for module, others in sorted(graph.items()):
        for other in sorted(others):
            upwards = within(other, *LIBRARY_NEEDS_NO) and not within(module, *LIBRARY_NEEDS_NO)
            leaves_kernels = within(module, "ropelab.kernels") and not within(other, "ropelab.kernels")
            if upwards or leaves_kernels:
                found.append(f"{module} -> {other}")
    for package, forbidden in NEEDS_NO.items():
        found += [f"{package} -> {other}" for other in sorted(needed(graph, package)) if within(other, *forbidden)]
    return found


def test_imports_have_no_cycle_and_go_one_way():
    graph = import_graph(Path(ropelab.__file__).parent, "ropelab")
    for package in ("ropelab.kernels", "ropelab.reference", "ropelab.call", "ropelab.autograd", *LIBRARY_NEEDS_NO):
        assert package in graph, f"expected the module {package}, found {sorted(graph)}"
    assert "ropelab.conformance.case" in graph["ropelab.conformance.subject"]
    assert violations(graph) == []


def test_import_loads_no_adapter_and_no_other_room():
    code = "import sys, ropelab; print(*sorted({'.'.join(name.split('.')[:2]) for name in sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    rooms = ("bench", "command", "conformance", "interop", "study")
    assert not {f"ropelab.{room}" for room in rooms} & {*done.stdout.split()}
