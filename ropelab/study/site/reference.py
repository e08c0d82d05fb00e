"""Make a page for each public module of the library, from signatures and docstrings."""

import ast
import html
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from markupsafe import Markup

from ropelab.study.site.guide import Page
from ropelab.study.site.mathml import Writer

ADAPTERS = (
    "broadcast", "deepspeed", "diffusers", "dtensor", "fairseq2", "flashinfer", "huggingface", "megatron", "sglang",
    "sglang_plugin", "torchtitan", "torchtitan_mla", "transformer_engine", "vllm", "vllm_plugin",
)  # fmt: skip
"""The public modules of `ropelab.interop`."""
INTERNAL = ("calls", "kinds", "over_kernel", "patch", "refusals", "serving", "shapes")
"""The modules of `ropelab.interop` that the adapters share, and that users do not import from."""
MODULES = (
    "ropelab",
    "ropelab.conformance",
    "ropelab.conformance.configuration",
    "ropelab.conformance.models",
    *(f"ropelab.interop.{name}" for name in ADAPTERS),
)
"""The modules that users import from."""
_SECTION = re.compile(r"^(Args|Attributes|Columns|Raises|Returns|Yields):\s*$", re.MULTILINE)
_ENTRY = re.compile(r"^    (?P<name>[^\s:][^:]*): ", re.MULTILINE)


Name = tuple[str, str, str, str]
"""A public function or class: its name, its kind, its signature and its docstring."""


def references() -> list[Page]:
    """The pages of `MODULES`. A module that needs a package that is not here is read as source."""
    pages = []
    for name in MODULES:
        try:
            pages.append(reference(importlib.import_module(name)))
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("ropelab"):
                raise
            pages.append(from_source(name))
    return pages


def from_source(module: str) -> Page:
    """The page of a module that cannot be imported: the public functions and classes in its file."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"module: expected a module with a file, got {module!r}", name=module)
    tree = ast.parse(Path(spec.origin).read_text())
    names = [
        (node.name, _kind(isinstance(node, ast.ClassDef)), _written_signature(node), ast.get_docstring(node) or "")
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    ]
    return _page(module, ast.get_docstring(tree) or "", names)


def _kind(is_class: bool) -> str:
    return "class" if is_class else "function"


def _page(module: str, text: str, names: Sequence[Name]) -> Page:
    links = [f'<li><a href="#{name}"><code>{name}</code></a></li>' for name, *_ in names]
    parts = [f"<h1><code>{module}</code></h1>", docstring(text, module), f'<ul class="names">{"".join(links)}</ul>']
    for name, kind, signature, own in names:
        parts.append(f'<h2 id="{name}"><code>{name}</code></h2><pre>{kind} {html.escape(signature)}</pre>')
        parts.append(docstring(own, f"{module}.{name}"))
    body = Markup(f'<div class="reference">{"".join(parts)}</div>')
    sections = [(name, Markup(name.replace("_", "_<wbr>"))) for name, *_ in names]
    return Page(f"{module}.html", module, "Reference", sections, body)


def _written_signature(node: ast.FunctionDef | ast.ClassDef) -> str:
    if isinstance(node, ast.ClassDef):
        return f"{node.name}({', '.join(map(ast.unparse, node.bases))})"
    returned = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{node.name}({ast.unparse(node.args)}){returned}"


def reference(module: ModuleType) -> Page:
    """The page of a module: the names in its ``__all__``, or the public functions and classes that it defines."""
    names = [
        (name, _kind(inspect.isclass(value)), _signature(name, value), inspect.getdoc(value) or "")
        for name, value in _public(module)
    ]
    return _page(module.__name__, module.__doc__ or "", names)


def _public(module: ModuleType) -> Iterator[tuple[str, object]]:
    listed = getattr(module, "__all__", None)
    for name in listed or [name for name in vars(module) if not name.startswith("_")]:
        value = getattr(module, name)
        if not (inspect.isclass(value) or inspect.isroutine(value)):
            continue
        if listed or getattr(value, "__module__", "").startswith(module.__name__):
            yield name, value


def _signature(name: str, value: object) -> str:
    try:
        signature = str(inspect.signature(value)).replace("collections.abc.", "")  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return name
    return f"{name}{signature}"


def docstring(text: str, prefix: str) -> str:
    """A docstring as HTML: markdown, and a list for each of the sections Args, Returns, Raises and the like."""
    writer = Writer(prefix=prefix)
    text = inspect.cleandoc(text).replace("::\n", ":\n")  # "::" marks a block of code in reStructuredText
    before, *sections = _SECTION.split(text)
    parts = [writer.markdown(before)]
    for title, section in zip(sections[::2], sections[1::2], strict=True):
        indented, after = _indented(section)
        parts.append(f"<h3>{title}</h3>")
        parts.append(_entries(indented, writer))
        parts.append(writer.markdown(after))
    return "".join(parts)


def _indented(section: str) -> tuple[str, str]:
    """The indented lines at the start of a section, and the lines after them."""
    lines = section.strip("\n").split("\n")
    end = next((i for i, line in enumerate(lines) if line and not line.startswith("    ")), len(lines))
    return "\n".join(lines[:end]), "\n".join(lines[end:])


def _entries(indented: str, writer: Writer) -> str:
    """A list of the entries ``name: text``; a paragraph if there is none."""
    starts = list(_ENTRY.finditer(indented))
    if not starts or starts[0].start():
        return writer.markdown(inspect.cleandoc(f"\n{indented}"))
    ends = [match.start() for match in starts[1:]] + [len(indented)]
    items = []
    for match, end in zip(starts, ends, strict=True):
        text = " ".join(line.strip() for line in indented[match.end() : end].split("\n"))
        items.append(f"<dt>{writer.inline(match['name'])}</dt><dd>{writer.inline(text)}</dd>")
    return f"<dl>{''.join(items)}</dl>"
