"""All of ropelab that a user can name, one thing a line: ``python -m tests.surface`` writes ``unit/surface.txt``.

Public are the names of `ropelab`, `ropelab.conformance` and the adapters of `ropelab.interop`, with their signatures as
the source has them. A line that goes or changes breaks somebody's code, so it needs a line in CHANGELOG.md.
"""

import ast
import json
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import typer
import yaml

import pytest_ropelab
import ropelab
from ropelab.command.cli import EXIT_CODES
from ropelab.command.cli import app as command
from ropelab.command.main import INTERRUPTED
from ropelab.conformance import CACHE_CONVENTIONS, CACHE_LAWS, CONVENTIONS, LAWS
from ropelab.conformance.configuration import verify_config
from ropelab.interop import vllm_writes
from ropelab.study.__main__ import app as study

ROOT = Path(ropelab.__file__).parents[1]
FILE = Path(__file__).with_name("unit") / "surface.txt"
MACHINERY = ("broadcast", "calls", "log", "patch", "probe", "vllm_layers", "vllm_writes")
"""Modules of `ropelab.interop` that the adapters stand on, and that nobody else calls."""


def file_of(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@cache
def statements(module: str) -> dict[str, ast.stmt]:
    """The statement of a module that gives it each of its names."""
    found: dict[str, ast.stmt] = {}
    for statement in ast.parse(file_of(module).read_text(encoding="utf-8")).body:
        match statement:
            case ast.ImportFrom(names=names):
                found |= {name.asname or name.name: statement for name in names}
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                found[name] = statement
            case ast.Assign(targets=[ast.Name(id=name)]):
                found[name] = statement
    return found


def public(module: str) -> Iterator[tuple[str, ast.stmt]]:
    """The names of ``__all__``, or those that the module defines itself, with the statements that define them."""
    names = statements(module)
    own = [name for name, at in names.items() if not name.startswith("_") and not isinstance(at, ast.ImportFrom)]
    for name in sorted(ast.literal_eval(names["__all__"].value) if "__all__" in names else own):
        statement = names[name]
        while isinstance(statement, ast.ImportFrom):
            statement = statements(statement.module)[name]
        yield name, statement


def described(name: str, statement: ast.stmt) -> Iterator[str]:
    """A function with its signature; a class with its bases, its fields and its methods; a constant with its value."""
    match statement:
        case ast.FunctionDef(args=arguments, decorator_list=decorators):
            with_names = {ast.unparse(decorator) for decorator in decorators}
            yield name if "property" in with_names else f"{name}({ast.unparse(arguments)})"
        case ast.ClassDef(bases=bases, body=body):
            yield f"class {name}({', '.join(map(ast.unparse, bases))})"
            for member in body:
                called = getattr(member, "name", None) or ast.unparse(getattr(member, "target", ast.Name("_")))
                if not called.startswith("_") or called in ("__init__", "__call__", "__new__"):
                    yield from described(f"{name}.{called}", member)
        case ast.AnnAssign(annotation=annotation, value=value):
            computed = value is None or isinstance(value, ast.DictComp | ast.Dict)
            yield f"{name}: {ast.unparse(annotation)}" + ("" if computed else f" = {ast.unparse(value)}")
        case ast.Assign(value=ast.Constant() | ast.BinOp() | ast.UnaryOp() | ast.Tuple() as value):
            yield f"{name} = {ast.unparse(value)}"
        case ast.Assign():
            yield name


def names() -> Iterator[str]:
    adapters = sorted(path.stem for path in (ROOT / "ropelab/interop").iterdir() if not path.name.startswith("_"))
    modules = [f"ropelab.interop.{name}" for name in adapters if name not in MACHINERY]
    for module in ("ropelab", "ropelab.conformance", *modules):
        for name, statement in public(module):
            yield from described(f"{module}.{name}", statement)
    for kind, known in {"law": LAWS | CACHE_LAWS, "convention": CONVENTIONS | CACHE_CONVENTIONS}.items():
        yield from (f"{kind} {name}" for name in known)


def commands() -> Iterator[str]:
    for program, app in {"ropelab": command, "python -m ropelab.study": study}.items():
        group = typer.main.get_command(app)
        for name, one in {"": group, **group.commands}.items():
            words = f"{program} {name}".strip()
            yield words
            for parameter in one.params:
                default = parameter.default if isinstance(parameter.default, (str, int, float, bool, Path)) else None
                yield " ".join(
                    (words, "/".join(parameter.opts), "flag" if getattr(parameter, "is_flag", False) else "value",
                     "required" if parameter.required else f"default {default}", "repeated" * parameter.multiple)
                    if parameter.param_type_name == "option"
                    else (words, parameter.name.upper(), "" if parameter.required else "optional")
                ).strip()  # fmt: skip
    for outcome, code in {**EXIT_CODES, "interrupted": INTERRUPTED}.items():
        yield f"ropelab exits with {code}: {outcome}"


def operators() -> Iterator[str]:
    vllm_writes.define()  # what a server defines when it starts
    schemas = map(str, torch._C._jit_get_all_schemas())
    yield from sorted(f"torch.ops.{schema.replace('::', '.', 1)}" for schema in schemas if "ropelab::" in schema)


def distribution() -> Iterator[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for group, points in {"scripts": project["project"]["scripts"], **project["project"]["entry-points"]}.items():
        yield from (f"entry point {group}: {name} = {target}" for name, target in points.items())
    for extra in project["project"]["optional-dependencies"]:
        yield f"extra {extra}"
    yield f"setting of pytest: {pytest_ropelab.SETTING}"
    for name, given in yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))["inputs"].items():
        yield f"input of the action: {name}" + (" required" if given.get("required") else "")
    for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8")):
        yield f"hook of pre-commit: {hook['id']}"
    yield from (f"wheel: {path}" for path in sorted(wheel()) if path.count("/") < 2 or not path.endswith(".py"))
    yield from sorted({f"wheel: {path.rpartition('/')[0]}/" for path in wheel() if "/" in path})


def wheel() -> set[str]:
    """The paths of the wheel's files but those about the wheel."""
    code = {path.relative_to(ROOT) for path in (ROOT / "ropelab").rglob("*.py")}
    code = {path for path in code if path.parts[1] not in ("bench", "hub", "study", "kernels")}
    code |= {Path("ropelab", path.relative_to(ROOT)) for path in (ROOT / "kernels").glob("*.py")}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    data = {f"{package}/{name}" for package, found in settings["package-data"].items() for name in found}
    return {path.as_posix() for path in code} | data | {f"{name}.py" for name in settings["py-modules"]}


def keys(value: Any, where: str = "") -> Iterator[str]:
    """The keys of a value of JSON, ``a.b[].c``."""
    match value:
        case dict():
            for key, inner in value.items():
                yield f"{where}.{key}".removeprefix(".")
                yield from keys(inner, f"{where}.{key}")
        case [first, *_]:
            yield from keys(first, f"{where}[]")


def schema_keys(schema: dict, whole: dict, where: str = "") -> Iterator[str]:
    """The keys that a JSON schema describes, with a mark behind those that may be absent."""
    if "$ref" in schema:
        schema = whole["$defs"][schema["$ref"].rpartition("/")[2]]
    for inner in schema.get("anyOf", ()):
        yield from schema_keys(inner, whole, where)
    for key, inner in schema.get("properties", {}).items():
        path = f"{where}.{key}".removeprefix(".")
        yield path + ("" if key in schema.get("required", ()) else " (optional)")
        yield from schema_keys(inner, whole, path)
    if "items" in schema:
        yield from schema_keys(schema["items"], whole, f"{where}[]")


def reports() -> Iterator[str]:
    for name, folder in {"verify": "", "verify-model": "models/"}.items():
        schema = json.loads((ROOT / f"ropelab/conformance/{folder}report.schema.json").read_text(encoding="utf-8"))
        yield f"{name} --json: format {schema['properties']['format']['const']}"
        yield from (f"{name} --json: {key}" for key in schema_keys(schema, schema))
    config = {"head_dim": 8, "rope_theta": 1e4, "max_position_embeddings": 64}
    report = verify_config(config, torch.tensor([1.0, 0.1, 0.01, 0.001]) / 2).as_dict()
    report["versions"] = "packages"
    yield f"verify-config --json: format {report['format']}"
    yield from (f"verify-config --json: {key}" for key in keys(report))


def surface() -> str:
    """All lines, each part in an order of its own."""
    lines = [*names(), *commands(), *operators(), *distribution(), *reports()]
    return "".join(re.sub(r"\s+", " ", line) + "\n" for line in lines)


if __name__ == "__main__":
    FILE.write_text(surface(), encoding="utf-8")
