"""The rotation under ``torch.func.vmap``: vmap's axis joins the batch axis of the tensors.

The rotation of a token depends on its position alone, so the examples of vmap are batches of one ``bshd`` call.
"""

from collections.abc import Callable, Sequence

import torch

from ropelab.call.angles import Angles
from ropelab.call.checks import checked_axes
from ropelab.call.where import Where
from ropelab.layout.seq_format import from_bshd, to_bshd


def rotate_batched(rotate: Callable, size: int, in_dims: tuple, q, k, where: Where):
    """The rotated q, or q and k, of ``size`` examples, which are along axis 0 of the results.

    Args:
        rotate: rotates the tensors of one call, as `ropelab.autograd.rotation.rotate_recorded`.
        in_dims: the axis of the examples in q, k and `Where.tensors`; None where all examples share the tensor.

    Raises:
        NotImplementedError: the frequencies differ between examples.
    """
    angles, positions, _, options = where
    q_dim, k_dim, cos_dim, sin_dim, positions_dim = in_dims
    xs = [to_bshd(_examples(x, dim, size), options.seq_format) for x, dim in ((q, q_dim), (k, k_dim)) if x is not None]
    batch = xs[0].shape[1]
    if angles.table_free:
        if cos_dim is not None:
            raise NotImplementedError(
                "frequencies: expected the same frequencies for all examples of vmap, "
                "got frequencies with an axis of vmap"
            )
    elif cos_dim is not None or sin_dim is not None or angles.cos.ndim == 3:
        tables = zip(angles.for_kernels, (cos_dim, sin_dim), strict=True)
        angles = Angles(*(_fold(_examples(t, dim, size), 4, batch) for t, dim in tables))
    if positions is not None and options.axes is not None:
        along = _examples(positions, positions_dim, size)[:, : max(checked_axes(options)) + 1]
        positions = _fold(along.movedim(1, -1), 4, batch).movedim(-1, 0)
    elif positions is not None and (positions_dim is not None or positions.ndim == 2 or options.offsets):
        positions = _fold(_examples(positions, positions_dim, size), 2 if options.offsets else 3, batch)
    folded = [x.flatten(0, 1) for x in xs] if k is not None else [xs[0].flatten(0, 1), None]
    options_of_batches = options._replace(seq_format="bshd")
    ys = rotate(*folded, where._replace(angles=angles, positions=positions, options=options_of_batches))
    ys = [from_bshd(y.unflatten(0, (size, batch)), options.seq_format) for y in ((ys,) if k is None else ys)]
    return ys[0] if k is None else tuple(ys)


def is_batched_gradient(x: torch.Tensor | None) -> bool:
    """Whether ``x`` is a batch that ``torch.autograd.grad(..., is_grads_batched=True)`` hides.

    ``torch.autograd.grad`` and ``torch.autograd.functional.jacobian(..., vectorize=True)`` use PyTorch's older vmap. An
    autograd function cannot define a rule for the older vmap.
    """
    return isinstance(x, torch.Tensor) and torch._C._functorch.is_legacy_batchedtensor(x)


def rotate_batched_gradients(rotate: Callable, q, k, where: Where):
    """`rotate_batched` for batches that autograd hides: see `is_batched_gradient`."""
    (q, k, *tensors), in_dims, size, level = _shown((q, k, *where.tensors))
    ys = rotate_batched(rotate, size, in_dims, q, k, Where.of(*tensors, *where[2:]))
    return _hidden(ys, level) if isinstance(ys, torch.Tensor) else tuple(_hidden(y, level) for y in ys)


def for_each_batched_gradient(function: Callable, *gradients: torch.Tensor) -> Sequence[torch.Tensor]:
    """The tensors of ``function(*gradients)``, called once for each member where autograd hides batches."""
    if torch.compiler.is_compiling() or not any(map(is_batched_gradient, gradients)):
        return function(*gradients)
    tensors, in_dims, size, level = _shown(gradients)
    members = [
        function(*(x if dim is None else x[i] for x, dim in zip(tensors, in_dims, strict=True))) for i in range(size)
    ]
    return tuple(_hidden(torch.stack(results), level) for results in zip(*members, strict=True))


def _shown(tensors: Sequence) -> tuple[list, tuple[int | None, ...], int, int]:
    """Make the axis visible that autograd hides in batches.

    Returns:
        The tensors with the hidden axis in front; for each tensor 0, or None where the tensor has no hidden axis; the
        size of the hidden axis; and the level of the vmap that the axis belongs to.

    Raises:
        NotImplementedError: a tensor is a batch of batches.
    """
    # The threads of the backward do not know the depth of nested vmaps and report 0. The level is then 1.
    level = max(1, torch._C._vmapmode_increment_nesting() - 1)
    torch._C._vmapmode_decrement_nesting()
    in_dims = tuple(0 if is_batched_gradient(x) else None for x in tensors)
    shown = [
        x if dim is None else torch._remove_batch_dim(x, level, 1, 0) for x, dim in zip(tensors, in_dims, strict=True)
    ]
    if any(map(is_batched_gradient, shown)):
        raise NotImplementedError("is_grads_batched: expected a batch of gradients, got a batch of batches")
    return shown, in_dims, next(len(x) for x, dim in zip(shown, in_dims, strict=True) if dim == 0), level


def _hidden(x: torch.Tensor, level: int) -> torch.Tensor:
    return torch._add_batch_dim(x, 0, level)


def _examples(x: torch.Tensor, dim: int | None, size: int) -> torch.Tensor:
    """``x`` with the axis of the examples in front."""
    return x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)


def _fold(x: torch.Tensor, rank: int, batch: int) -> torch.Tensor:
    """``[examples, batch or 1, ...]`` of ``rank``, or ``[examples, ...]`` -> ``[examples * batch, ...]``."""
    x = x if x.ndim == rank else x.unsqueeze(1)
    return x.expand(-1, batch, *x.shape[2:]).flatten(0, 1)
