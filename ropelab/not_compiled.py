"""Keep torch.compile away from a function without importing the compiler, which takes a second."""

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def not_compiled(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Make torch.compile run ``function`` as it is, like `torch.compiler.disable` but without an import.

    A call in code that is compiled breaks the graph, or raises under ``fullgraph=True``. `torch.compiler.disable`
    imports torch._dynamo at once. Before somebody else imports torch._dynamo there is no compiler, and ``function``
    runs directly.
    """
    disabled: Callable[Arguments, Result] | None = None

    @wraps(function)
    def call(*arguments: Arguments.args, **keywords: Arguments.kwargs) -> Result:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return function(*arguments, **keywords)
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*arguments, **keywords)

    return call
