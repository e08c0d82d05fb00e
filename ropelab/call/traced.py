"""Calls that `torch.fx.symbolic_trace` records: a call with a proxy for a tensor becomes one node of the graph."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import Proxy


def recorded(function: Callable, arguments: Mapping[str, Any]) -> Any:
    """The proxy for the result of ``function(**arguments)``; one of the arguments is a proxy.

    Args:
        function: a public function, or the ``forward`` of a module, which the graph calls as a module if it is part of
            the traced one.
    """
    arguments = {name: value for name, value in arguments.items() if name != "self"}
    tracer: Any = next(value for value in arguments.values() if isinstance(value, Proxy)).tracer
    module = getattr(function, "__self__", None)
    if isinstance(module, torch.nn.Module) and module is not tracer.root:
        return tracer.create_proxy("call_module", tracer.path_of_module(module), (), arguments)
    return tracer.create_proxy("call_function", function, (), arguments)
