"""Calls that `torch.fx.symbolic_trace` records: a call with a proxy for a tensor becomes one node of the graph.

The functions of ropelab look at shapes, dtypes and memory, which a `torch.fx.Proxy` does not have.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.fx import Proxy

from ropelab.foreign import unexpected

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def recorded(function: Callable, keywords: Mapping[str, Any], arguments: tuple = ()) -> Any:
    """The proxy for the result of ``function(*arguments, **keywords)``; one of the values is a proxy.

    Args:
        function: a public function, or the ``forward`` of a module, which the graph calls as a module if it is part of
            the traced one.
    """
    if isinstance(foreign := keywords.get("foreign"), dict) and foreign:  # of a traced function it is a proxy
        raise unexpected(function, *foreign)
    keywords = {name: value for name, value in keywords.items() if name not in ("self", "foreign", "more")}
    tracer: Any = next(x for x in (*arguments, *keywords.values()) if isinstance(x, Proxy)).tracer
    module = getattr(function, "__self__", None)
    if isinstance(module, torch.nn.Module) and module is not tracer.root:
        return tracer.create_proxy("call_module", tracer.path_of_module(module), arguments, keywords)
    return tracer.create_proxy("call_function", function, arguments, keywords)


def one_node(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make `torch.fx.symbolic_trace` record a call of ``function`` as one node, whichever argument is a proxy."""

    @wraps(function)
    def call(*arguments: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        if not torch.compiler.is_compiling():
            for x in (*arguments, *keywords.values()):
                if isinstance(x, Proxy):
                    return recorded(call, keywords, arguments)
        return function(*arguments, **keywords)

    return call
