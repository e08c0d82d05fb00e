"""Call a function of JAX with tensors of torch, which share their memory with JAX's arrays by DLPack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch


def of_jax(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function`` as a function of tensors of torch, differentiable to any order by ``jax.vjp``.

    Every tensor among the arguments becomes an array, and every array among the results becomes a tensor. Integers of
    64 bits become integers of 32 bits, as JAX has them by default.

    Args:
        function: takes arrays of JAX, and returns an array or a tuple of arrays.

    Returns:
        A function with the signature of ``function``. It raises NotImplementedError for float64, which JAX lacks unless
        it is switched on.

    Raises:
        ImportError: JAX is not installed.
    """
    import jax  # noqa: F401  a missing package is an error here, and not in the first call

    @wraps(function)
    @torch.compiler.disable
    def of_tensors(*arguments: Any, **options: Any) -> Any:
        given = [*arguments, *options.values()]
        moving = [i for i, x in enumerate(given) if isinstance(x, torch.Tensor) and _differentiable(x)]
        single: list[bool] = []

        def of_arrays(*arrays: Any) -> tuple[Any, ...]:
            values = [_array(x) if isinstance(x, torch.Tensor) and i not in moving else x for i, x in enumerate(given)]
            for i, array in zip(moving, arrays, strict=True):
                values[i] = array
            found = function(*values[: len(arguments)], **dict(zip(options, values[len(arguments) :], strict=True)))
            single.append(not isinstance(found, (tuple, list)))
            return (found,) if single[-1] else tuple(found)

        found = _Call.apply(of_arrays, *(given[i] for i in moving))
        return found[0] if single[0] else found

    return of_tensors


class _Call(torch.autograd.Function):
    """A function of floating arrays that returns a tuple of arrays; its backward is such a call, too."""

    @staticmethod
    def forward(ctx, function, *tensors):
        ctx.function = function
        ctx.save_for_backward(*tensors)
        return tuple(_tensor(y) for y in function(*map(_array, tensors)))

    @staticmethod
    def backward(ctx, *grads):
        import jax

        function, tensors = ctx.function, ctx.saved_tensors

        def pulled_back(*values: Any) -> Sequence[Any]:
            return jax.vjp(function, *values[: len(tensors)])[1](tuple(values[len(tensors) :]))

        return None, *_Call.apply(pulled_back, *tensors, *grads)


def _differentiable(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _array(x: torch.Tensor) -> Any:
    import jax

    if x.dtype in (torch.float64, torch.complex128):
        raise NotImplementedError(f"JAX has no {x.dtype} by default")
    x = x.detach().int() if x.dtype == torch.int64 else x.detach()
    if not x.numel():
        return jax.numpy.zeros(tuple(x.shape), str(x.dtype).removeprefix("torch."))
    return jax.dlpack.from_dlpack(x.resolve_conj().contiguous())


def _tensor(array: Any) -> torch.Tensor:
    if not array.size:
        return torch.empty(array.shape, dtype=getattr(torch, str(array.dtype)))
    return torch.from_dlpack(array).clone()
