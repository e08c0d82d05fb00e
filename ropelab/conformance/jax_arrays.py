"""Call a function of JAX with tensors of torch, which share their memory with JAX's arrays by DLPack."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, wraps
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

    programs: dict[str, _Program] = {}

    @wraps(function)
    @torch.compiler.disable
    def of_tensors(*arguments: Any, **options: Any) -> Any:
        given = [*arguments, *options.values()]
        count, first = len(given), len(arguments)
        tensors = [i for i, x in enumerate(given) if isinstance(x, torch.Tensor)]
        moving = [i for i in tensors if _differentiable(given[i])]
        fixed = [i for i in tensors if i not in moving]
        others = {i: x for i, x in enumerate(given) if i not in tensors}

        def of_arrays(kept: Sequence[Any], *arrays: Any) -> tuple[Any, ...]:
            values = others | dict(zip(fixed, kept, strict=True)) | dict(zip(moving, arrays, strict=True))
            ordered = [values[i] for i in range(count)]
            found = function(*ordered[:first], **dict(zip(options, ordered[first:], strict=True)))
            program.single = not isinstance(found, (tuple, list))
            return (found,) if program.single else tuple(found)

        key = repr((first, tuple(options), moving, fixed, others))
        program = programs.setdefault(key, _Program(of_arrays, len(moving)))
        found = _Call.apply(program, [_array(given[i]) for i in fixed], *(given[i] for i in moving))
        return found[0] if program.single else found

    return of_tensors


class _Program:
    """A function of arrays that ``jax.jit`` compiles once for each shape, as users of JAX do.

    Compiling every operation of a call for itself takes several times as long.

    Attributes:
        function: takes a list of arrays that get no gradient, and ``count`` arrays that may get one; returns a tuple.
        results: the number of arrays that it returned.
        single: whether the user's function returned one array.
    """

    def __init__(self, function: Callable[..., tuple[Any, ...]], count: int):
        self.function, self.count, self.single = function, count, False
        self.results = 0
        self.traced: Any = None

    def __call__(self, kept: Sequence[Any], *arrays: Any) -> tuple[Any, ...]:
        import jax

        if self.traced is None:
            self.traced = jax.jit(self.function)
        try:
            found = self.traced(kept, *arrays)
        except Exception:  # the function raises, or it cannot be traced and runs as it is
            found = self.function(kept, *arrays)
            self.traced = self.function
        self.results = len(found)
        return found

    @cached_property
    def back(self) -> _Program:
        """The gradients of the arrays, from these and the gradients of the results."""

        def pulled_back(kept: Sequence[Any], *values: Any) -> tuple[Any, ...]:
            import jax

            moved, grads = values[: self.count], values[self.count :]
            return jax.vjp(lambda *arrays: self.function(kept, *arrays), *moved)[1](grads)

        return _Program(pulled_back, self.count + self.results)


class _Call(torch.autograd.Function):
    """A program whose backward is a program, too."""

    @staticmethod
    def forward(ctx, program, kept, *tensors):
        ctx.program, ctx.kept = program, kept
        ctx.save_for_backward(*tensors)
        return tuple(_tensor(y) for y in program(kept, *map(_array, tensors)))

    @staticmethod
    def backward(ctx, *grads):
        return None, None, *_Call.apply(ctx.program.back, ctx.kept, *ctx.saved_tensors, *grads)


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
