"""Plant an error in a function, to see that a proof of it fails."""

import inspect
import textwrap
from types import FunctionType
from typing import Any


def altered(function: Any, old: str, new: str) -> FunctionType:
    """A function, of Python or Triton, with one passage of its text replaced, in a copy of its module's names.

    Raises:
        ValueError: the text has the passage not once.
    """
    body = getattr(function, "fn", function)
    source = textwrap.dedent(inspect.getsource(body))
    source = source[source.index("def ") :]
    if source.count(old) != 1:
        raise ValueError(
            f"old: expected a passage that {body.__name__} has once, got {old!r}, {source.count(old)} times"
        )
    names = dict(body.__globals__)
    exec(compile(source.replace(old, new), body.__name__, "exec"), names)
    return names[body.__name__]
