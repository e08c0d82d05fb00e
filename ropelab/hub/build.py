"""Write ropelab as a package for the Hugging Face hub.

The package holds the modules of ropelab that its functions need, and the few files of ``source``. The step from a
module of ropelab to a file of the package changes three kinds of lines and nothing else:

- ``from ropelab.a.b import c`` becomes a relative import, because processes load packages under other names.
- The name of an operator, ``"ropelab::name"``, becomes ``add_op_namespace_prefix("name")``, because a process may load
  several versions.
- The module name in ``importlib.import_module(f"ropelab...")`` begins with the name of the package.

The result fails the build unless its imports are relative or of Python's standard library, torch and triton.

The folders follow the documents "kernel requirements" and "writing kernels" of https://github.com/huggingface/kernels:
``torch-ext/ropelab`` holds the sources for its builder, and ``build/torch-<backend>`` the files that ``kernels`` loads.
"""

import ast
import base64
import hashlib
import json
import re
import shutil
import sys
import tomllib
from pathlib import Path

from ropelab.command.destination import Destination

HUB = Path(__file__).resolve().parent
ROOT = HUB.parents[1]
LOADED_BY_NAME = tuple(f"ropelab.kernels.{name}_{how}" for name in ("rotate", "qk_norm") for how in ("torch", "triton"))
"""The modules that the functions of the package load by `importlib.import_module`."""
ALLOWED = {*sys.stdlib_module_names, "torch", "triton"}

_IMPORT = re.compile(r"^(\s*)from ropelab(\.[\w.]+)? import ")
_OPERATOR = re.compile(r'(\boperator\(\s*)"ropelab::(\w+)"')
_BY_NAME = re.compile(r'import_module\(f"ropelab\.')


def build(folder: Path) -> None:
    """Write the package into ``folder``. An earlier package there is removed first.

    Raises:
        ValueError: the folder has other files, or a file of the package would import something that a kernel of the
            hub must not import.
    """
    build_toml = (HUB / "build.toml").read_text(encoding="utf-8")
    general = tomllib.loads(build_toml)["general"]
    files = package()
    violations = [f"{path}: {line}" for path, text in files.items() for line in forbidden_imports(text)]
    if violations:
        raise ValueError(f"imports: expected relative ones, the standard library, torch and triton, got {violations}")
    if folder.exists() and any(folder.iterdir()) and not (folder / "torch-ext" / general["name"]).is_dir():
        raise ValueError(f"folder: expected an empty folder or an earlier package, got {folder} with other files")
    shutil.rmtree(folder, ignore_errors=True)
    write(folder, {"build.toml": build_toml, "README.md": (HUB / "CARD.md").read_text(encoding="utf-8")})
    write(folder / "torch-ext" / general["name"], files)
    revision = hashlib.sha256("\0".join(f"{path}\0{text}" for path, text in files.items()).encode()).hexdigest()[:7]
    for backend in general["backends"]:
        unique = f"_{general['name']}_{backend}_{revision}"
        built = files | {"_ops.py": _ops(unique)}
        metadata = {
            "name": general["name"],
            "id": unique,
            "version": general["version"],
            "license": general["license"],
            "python-depends": [],
            "backend": {"type": backend},
            "digest": {"algorithm": "sha256", "files": {path: _digest(built[path]) for path in sorted(built)}},
        }
        write(folder / "build" / f"torch-{backend}", built | {"metadata.json": json.dumps(metadata, indent=2) + "\n"})


def package() -> dict[str, str]:
    """The files of the package without ``_ops.py``: path -> text, in the order of the paths."""
    own = {f"ropelab.{path.stem}": path for path in (HUB / "source").glob("*.py")}
    found: dict[str, Path] = {}
    waiting = [*own, *LOADED_BY_NAME]
    while waiting:
        name = waiting.pop()
        if name in found or (path := own.get(name) or _file(name)) is None:
            continue
        found[name] = path
        for module, imported in _imported(path):
            waiting.append(module if _file(f"{module}.{imported}") is None else f"{module}.{imported}")
    files: dict[str, str] = {}
    for name, path in found.items():
        parts = name.split(".")[1:]
        for end in range(1, len(parts)):  # a package whose names nobody imports needs its docstring alone
            init = (ROOT.joinpath("ropelab", *parts[:end]) / "__init__.py").read_text(encoding="utf-8")
            files.setdefault("/".join([*parts[:end], "__init__.py"]), f'"""{ast.get_docstring(ast.parse(init))}"""\n')
        is_package = path.name == "__init__.py" and path not in own.values()
        target = "/".join([*parts, "__init__"] if is_package else parts) + ".py"
        files[target] = rewritten(path.read_text(encoding="utf-8"), target.count("/") + 1)
    return dict(sorted(files.items()))


def rewritten(text: str, dots: int) -> str:
    """The text of a module of the package.

    Args:
        text: the module in ropelab.
        dots: the number of dots by which the module's relative imports name the package.
    """
    lines = [_IMPORT.sub(lambda match: f"{match[1]}from {_relative(match[2], dots)} import ", line)
             for line in text.splitlines(keepends=True)]  # fmt: skip
    text = _BY_NAME.sub("""import_module(f"{__package__.partition('.')[0]}.""", "".join(lines))
    text, operators = _OPERATOR.subn(r'\1add_op_namespace_prefix("\2")', text)
    if operators:
        imports = (node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom))
        last = max(node.end_lineno or 0 for node in imports)
        before, after = text.splitlines(keepends=True)[:last], text.splitlines(keepends=True)[last:]
        text = "".join([*before, f"from {'.' * dots}_ops import add_op_namespace_prefix\n", *after])
    return text


def forbidden_imports(text: str) -> list[str]:
    """The absolute imports in a module that are neither of the standard library nor of torch or triton.

    Imports under ``if TYPE_CHECKING:`` never run and do not count.
    """
    found = []
    waiting: list[ast.AST] = [ast.parse(text)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            continue
        waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [node.module or ""]
        else:
            continue
        found += [f"line {node.lineno} imports {name}" for name in names if name.partition(".")[0] not in ALLOWED]
    return found


def write(folder: Path, files: dict[str, str]) -> None:
    """Write the files below ``folder``; ``files`` is path -> text."""
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        with Destination(folder / path) as new:
            new.write(text)


def _file(name: str) -> Path | None:
    base = ROOT.joinpath(*name.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def _imported(path: Path) -> list[tuple[str, str]]:
    """(module, name) of all imports from ropelab in a file; a name may be a module, too."""
    nodes = [node for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.ImportFrom)]
    imported = [(node.module or "", alias.name) for node in nodes for alias in node.names]
    return [(module, name) for module, name in imported if module.partition(".")[0] == "ropelab"]


def _relative(below: str | None, dots: int) -> str:
    return "." * dots + (below or "").removeprefix(".")


def _ops(unique: str) -> str:
    """The file that names the operators of one build, as the builder of ``kernels`` would write it."""
    return f'''"""The namespace of the operators of this build."""


def add_op_namespace_prefix(name: str) -> str:
    """``name`` in the namespace of this build."""
    return f"{unique}::{{name}}"
'''


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
