"""Whether strided tensors put two elements at one address, told from shapes and strides alone."""

import torch


def overlaps_itself(x: torch.Tensor) -> bool:
    """True unless the strides of ``x`` nest, which proves that its elements lie at distinct addresses.

    Nested: taken from the smallest stride up, each axis steps past all that the smaller ones span.
    Expanded tensors (stride 0) and sliding windows do not nest.
    """
    span = 1
    for stride, size in sorted(_axes(x)):
        if stride < span:
            return True
        span += stride * (size - 1)
    return False


def may_share_elements(x: torch.Tensor, y: torch.Tensor) -> bool:
    """False if ``x`` and ``y`` provably have no element at a common address.

    Views of one buffer, such as q and k cut out of a packed qkv tensor, interleave in memory without
    sharing anything. To see that, look for a period: a stride ``w`` of which all larger strides of both
    tensors are multiples, such that what both occupy within one period lies apart.
    """
    if x.numel() == 0 or y.numel() == 0 or x.untyped_storage().data_ptr() != y.untyped_storage().data_ptr():
        return False
    if x.dtype != y.dtype:
        return True
    shift = y.storage_offset() - x.storage_offset()
    whole = max(_span(_axes(x)), _span(_axes(y))) + abs(shift)
    periods = {stride for stride, _ in _axes(x) + _axes(y)} | {whole}
    return not any(_apart_within(period, _axes(x), _axes(y), shift) for period in periods if period > 0)


def _apart_within(period: int, x_axes, y_axes, shift: int) -> bool:
    if any(stride % period for stride, _ in x_axes + y_axes if stride >= period):
        return False
    x_span = _span([axis for axis in x_axes if axis[0] < period])
    y_span = _span([axis for axis in y_axes if axis[0] < period])
    start = shift % period
    return x_span <= start and start + y_span <= period


def _axes(x: torch.Tensor) -> list[tuple[int, int]]:
    """(stride, size) of the axes along which ``x`` moves at all."""
    return [(stride, size) for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def _span(axes: list[tuple[int, int]]) -> int:
    """Elements from the first to the last address, both included."""
    return 1 + sum(stride * (size - 1) for stride, size in axes)
