"""Call a function of NumPy with tensors of torch, which share their memory with its arrays."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import torch

from ropelab.conformance.convention import Convention


def of_numpy(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` as a function of tensors of torch on the CPU.

    Returns:
        A function with the signature of ``function``. It raises NotImplementedError for bfloat16, which NumPy lacks.
    """

    @wraps(function)
    @torch.compiler.disable
    def of_tensors(*arguments: Any, **options: Any) -> Any:
        found = function(*map(_array, arguments), **{name: _array(value) for name, value in options.items()})
        return tuple(map(_tensor, found)) if isinstance(found, (tuple, list)) else _tensor(found)

    return of_tensors


def without_gradients(convention: Convention) -> Convention:
    """Return the convention for functions of which autograd has no record."""
    changed = copy.copy(convention)
    changed.differentiable = False
    return changed


def _array(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
        raise NotImplementedError("NumPy has no bfloat16")
    return value.detach().cpu().numpy() if isinstance(value, torch.Tensor) else value


def _tensor(value: Any) -> Any:
    return torch.from_numpy(np.array(value)) if isinstance(value, (np.ndarray, np.generic)) else value
