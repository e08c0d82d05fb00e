"""A name that a docstring of the library quotes as code is one that a reader finds."""

import ast
import re
from pathlib import Path

import ropelab

PACKAGE = Path(ropelab.__file__).parent
ROOMS = "angles", "autograd", "call", "interop", "kernels", "layout"
QUOTED = re.compile(r"(?<!`)`([A-Za-z_]\w*(?:\.\w+)*)`(?!`)")


def names_in(node: ast.AST) -> set[str]:
    """The names of definitions, parameters, fields, attributes and imported modules within a syntax tree."""
    parts = (getattr(x, word, "") for x in ast.walk(node) for word in ("name", "arg", "attr", "id", "asname"))
    return {last for name in parts if isinstance(name, str) for last in (name, name.rpartition(".")[2])}


def test_every_quoted_name_exists():
    files = {*PACKAGE.rglob("*.py"), *(PACKAGE / "kernels").glob("*.py")}
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
    within: dict[str, set[str]] = {}
    for path, tree in trees.items():
        module = path.parent if path.stem == "__init__" else path
        within.setdefault(module.parent.name, set()).add(module.stem)
        for name, node in (
            (module.stem, tree),
            *((node.name, node) for node in ast.walk(tree) if isinstance(node, ast.ClassDef)),
        ):
            within[name] = within.get(name, set()) | names_in(node)
    known = {
        "torch",
        *(path.stem for pattern in ("*", "data/**/*.csv") for path in PACKAGE.parent.glob(pattern)),
    }.union(*within.values())
    missing = []
    for path in (path for path in files if path.parent == PACKAGE or path.relative_to(PACKAGE).parts[0] in ROOMS):
        for node in ast.walk(trees[path]):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            for quoted in QUOTED.findall(text):
                *owners, name = quoted.split(".")
                found = name in (within.get(owners[-1], set()) if owners else known)
                if not found and owners[:1] != ["torch"]:
                    missing.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {quoted}")
    assert not missing, "\n".join(missing)
