"""Evaluate the expressions of claims: names of columns, comparisons, arithmetic, and "and", "or", "not".

A claim is read as data, so an expression must not run code. `pandas.DataFrame.eval` alone would: it calls any method,
and finds names of the module that calls it.
"""

from __future__ import annotations

import ast
import re

import pandas as pd

_WORDS = {"contains", "startswith"}
"""The methods of ``column.str``, each of a pattern."""
_ALLOWED = (
    ast.Expression, ast.Load, ast.Constant, ast.Tuple, ast.BoolOp, ast.boolop, ast.UnaryOp, ast.unaryop, ast.BinOp,
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.BitAnd, ast.BitOr, ast.Compare, ast.cmpop,
)  # fmt: skip


def selected(frame: pd.DataFrame, expression: str) -> pd.DataFrame:
    """The rows for which the expression is true; all rows for ``""``.

    Raises:
        ValueError: the expression has something else than the head of this module names, or no column of a name.
    """
    return frame[evaluated(frame, expression)] if expression else frame


def evaluated(frame: pd.DataFrame, expression: str) -> pd.Series:
    """The value of the expression in each row.

    Beside operators an expression has ``abs(x)``, ``column.notna()``, ``column.str.contains("x")`` and
    ``column.str.startswith("x")``.

    Raises:
        ValueError: as `selected`.
    """
    try:
        _check(ast.parse(expression, mode="eval"), frame)
        return frame.eval(expression, engine="python", local_dict={}, global_dict={})
    except SyntaxError as error:
        raise ValueError(f"{expression:.200}: expected an expression, got {error.msg}") from error
    except (ArithmeticError, NotImplementedError, RecursionError, TypeError, ValueError, re.error) as error:
        raise ValueError(f"{expression:.200}: {error}") from error


def _check(node: ast.AST, frame: pd.DataFrame) -> None:
    match node:
        case ast.Name(id=name):
            if name not in frame:
                raise ValueError(f"expected a column out of {sorted(frame)}, got {name}")
            return
        case ast.Call(func=ast.Name(id="abs"), args=[inner], keywords=[]):
            node = inner
        case ast.Call(func=ast.Attribute(value=ast.Name() as column, attr="notna"), args=[], keywords=[]):
            node = column
        case ast.Call(
            func=ast.Attribute(value=ast.Attribute(value=ast.Name() as column, attr="str"), attr=method),
            args=[ast.Constant()], keywords=[],
        ) if method in _WORDS:  # fmt: skip
            node = column
        case _ if not isinstance(node, _ALLOWED):
            raise ValueError(f"expected names, comparisons and arithmetic, got {ast.unparse(node)}")
        case _:
            for part in ast.iter_child_nodes(node):
                _check(part, frame)
            return
    _check(node, frame)
