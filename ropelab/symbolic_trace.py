"""Let torch.fx record a call of ropelab as one node of its graph."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def one_node(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make `torch.fx.symbolic_trace` record a call of ``function`` as one node, as it records torch's own functions.

    The functions of ropelab look at shapes, dtypes and memory, which a `torch.fx.Proxy` does not have.
    """

    @wraps(function)
    def call(*arguments: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        if not torch.compiler.is_compiling():
            given: tuple[Any, ...] = (*arguments, *keywords.values())
            for x in given:
                if isinstance(x, torch.fx.Proxy):
                    node: Any = x.tracer.create_proxy("call_function", call, arguments, keywords)
                    return node
        return function(*arguments, **keywords)

    return call
