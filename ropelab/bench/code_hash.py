"""Compute a hash of Python files that depends on their code and not on their comments and docstrings."""

import ast
import hashlib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

DIGITS = 16
"""The hexadecimal digits of a short hash."""


def code_hash(paths: Iterable[Path], root: Path) -> str:
    """SHA-256 over the names and the code of Python files, in the order of the names.

    The code of a file is its syntax tree without the statements that consist of a string, such as docstrings. Comments,
    blank lines and line breaks do not enter the tree.

    Every version of Python must give the same hash, so this file writes the tree itself. The output of `ast.dump`
    differs between versions: Python 3.12 added the field ``type_params``, and Python 3.13 leaves out empty fields. The
    tokens differ too: an f-string is one token in Python 3.11 and several tokens in Python 3.12.

    Args:
        paths: the files, in any order.
        root: the folder that contains all files; the names are relative to it.

    Returns:
        64 hexadecimal digits.

    Raises:
        SyntaxError: a file is not Python.
        ValueError: a file is not under ``root``.
    """
    return _hashed(tuple(sorted((path.relative_to(root).as_posix(), path.read_bytes()) for path in paths)))


@cache
def _hashed(files: tuple[tuple[str, bytes], ...]) -> str:
    """The hash of files by name and content, kept because every record and every figure asks for it."""
    digest = hashlib.sha256()
    for name, source in files:
        digest.update(f"{name}\0{_code(source)}\0".encode())
    return digest.hexdigest()


@cache
def _code(source: bytes) -> str:
    """The syntax tree of a file as text."""
    return syntax_tree(ast.parse(source))


def syntax_tree(value: object) -> str:
    """A node, a list of nodes or a constant of a syntax tree as text, without statements that consist of a string.

    Fields that are None or empty are left out, because a new version of Python may add further fields. Constants are
    written in ASCII, because the Unicode characters that `repr` escapes depend on the version. Empty parts of f-strings
    are left out, because Python 3.12.1 adds them after a field within a format specification.
    """
    if isinstance(value, ast.JoinedStr):
        value = ast.JoinedStr([part for part in value.values if not _is_empty(part)])
    if isinstance(value, ast.AST):
        fields = [(name, field) for name, field in ast.iter_fields(value) if field is not None and field != []]
        return f"{type(value).__name__}({', '.join(f'{name}={syntax_tree(field)}' for name, field in fields)})"
    if isinstance(value, list):
        return f"[{', '.join(syntax_tree(item) for item in value if not _is_docstring(item))}]"
    return ascii(value)


def _is_docstring(node: object) -> bool:
    """Whether a node is a statement that consists of a string: the statement has no effect."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_empty(node: ast.expr) -> bool:
    """Whether a node is an empty string."""
    return isinstance(node, ast.Constant) and node.value == ""
