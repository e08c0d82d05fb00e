"""Allocate results, and tell from shapes, strides and addresses whether two elements share an address."""

from collections.abc import Mapping

import torch

from ropelab.call.remembered import Remembered


def is_plain(x: torch.Tensor) -> bool:
    """Whether a tensor has memory itself; a class that takes PyTorch's operations over may hold it elsewhere."""
    return type(x).__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl


def empty_heads(x: torch.Tensor) -> torch.Tensor:
    """An empty tensor: in the memory order of ``x`` if features lie side by side in that order, else contiguous."""
    y = torch.empty_like(x)
    return y if y.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


def is_same_view(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors have the same elements at the same addresses; for compilers, whether both are one object."""
    if x is y or torch.compiler.is_compiling():
        return x is y
    same = x.dtype == y.dtype and x.shape == y.shape and x.stride() == y.stride()
    return same and addresses_between(x, y) == 0


Named = Mapping[str, torch.Tensor | None]
"""The name of the argument -> the tensor, or None where there is no tensor."""


def check_disjoint(written: Named, read: Named, same: Mapping[str, str] | None = None, where: str = "") -> None:
    """Raise ValueError where an element that a call writes has the address of another element of the call.

    Args:
        written, read: the arguments that the call writes, and the other arguments.
        same: a written argument -> the argument that may be the same view.
        where: the end of the expectation in the message.
    """
    for name, x in written.items():
        if x is not None and overlaps_itself(x):
            raise ValueError(
                f"{name}: expected elements at distinct addresses{where}, "
                f"got strides {tuple(x.stride())} for shape {tuple(x.shape)}"
            )
    for i, (name, x) in enumerate(written.items()):
        for other, y in (*list(written.items())[:i], *read.items()):
            may_be_same = same is not None and same.get(name) == other
            if x is None or y is None or (may_be_same and is_same_view(x, y)):
                continue
            if may_share_elements(x, y):
                exception = f", or {other} itself" if may_be_same else ""
                raise ValueError(
                    f"{name}: expected memory disjoint from {other}'s{exception}{where}, got overlapping tensors"
                )


def check_apart(written: Named, read: Named, where: str = "") -> None:
    """`check_disjoint` for calls that other checks follow: only where the memory of a written tensor meets another's.

    Compilers cannot follow this check.
    """
    if torch.compiler.is_compiling():
        return
    try:
        others = [_bytes(x) for x in read.values() if x is not None]
        ranges = [_bytes(x) for x in written.values() if x is not None]
        meet = any(first < end and start < last for first, last in ranges for start, end in others)
    except RuntimeError:  # tensors without memory
        meet = True
    if meet:
        check_disjoint(written, read, where=where)


def _bytes(x: torch.Tensor) -> tuple[int, int]:
    """The first byte of the memory of a tensor, and the byte behind the last."""
    storage = x.untyped_storage()
    start = storage.data_ptr()
    return start, start + storage.nbytes()


class DisjointCheck:
    """`check_disjoint` for calls whose tensors agree in everything but contents and addresses.

    A call with addresses that an earlier call had passes. Others compare the ranges of their addresses. Only where two
    ranges meet, as for views of one buffer, and only for distances that no earlier call had, the strides decide.

    Args:
        written, read, same, where: as for `check_disjoint`, for one of these calls.
    """

    def __init__(self, written: Named, read: Named, same: Mapping[str, str] | None = None, where: str = ""):
        self.written, self.read, self.same, self.where = tuple(written), tuple(read), same, where
        tensors = [x for x in (*written.values(), *read.values()) if x is not None]
        count = sum(x is not None for x in written.values())
        sizes = [_span(_axes(x)) * x.itemsize if _has_elements(x) else 0 for x in tensors]
        self._pairs = [
            (i, j, -sizes[j], sizes[i])
            for i in range(count)
            for j in (*range(i), *range(count, len(tensors)))
            if sizes[i] and sizes[j]
        ]
        self._found_disjoint: Remembered[tuple, bool] = Remembered(64)
        self._addresses: Remembered[tuple, bool] = Remembered(64)

    def __call__(self, addresses: tuple[int, ...], *tensors: torch.Tensor | None) -> None:
        """Check the tensors, in the order of ``written`` and ``read``; ``addresses`` has those of all, in any order."""
        if addresses in self._addresses:  # a loop has the same tensors again and again
            return
        at = [x.data_ptr() for x in tensors if x is not None]
        meeting = tuple([(i, j, at[j] - at[i]) for i, j, low, high in self._pairs if low < at[j] - at[i] < high])
        if not self._found_disjoint or (meeting and meeting not in self._found_disjoint):
            count = len(self.written)
            written = dict(zip(self.written, tensors[:count], strict=True))
            check_disjoint(written, dict(zip(self.read, tensors[count:], strict=True)), self.same, self.where)
            self._found_disjoint.keep(meeting, True)
        self._addresses.keep(addresses, True)


def overlaps_itself(x: torch.Tensor) -> bool:
    """True unless the strides of ``x`` nest, which proves that its elements lie at distinct addresses.

    Strides nest if, from the smallest stride up, every axis steps past the span of all axes with smaller strides.
    The strides of expanded tensors (stride 0) and of sliding windows do not nest. A tensor without elements never
    overlaps.
    """
    if not _has_elements(x):
        return False
    span = 1
    for stride, size in sorted(_axes(x)):
        if stride < span:
            return True
        span += stride * (size - 1)
    return False


def may_share_elements(x: torch.Tensor, y: torch.Tensor) -> bool:
    """False if ``x`` and ``y`` provably have no element at a common address.

    Views of one buffer, for example q and k of a packed qkv tensor, interleave in memory without a common element. The
    function proves this by a period: a stride ``w`` that divides all larger strides of both tensors. If the two tensors
    occupy separate parts of one period, they have no element in common.
    """
    if not (_has_elements(x) and _has_elements(y)):
        return False
    between = addresses_between(x, y)
    if between is None:
        return False
    x_axes, y_axes = _axes_of_bytes(x), _axes_of_bytes(y)
    whole = max(_span(x_axes), _span(y_axes)) + abs(between)
    periods = {stride for stride, _ in x_axes + y_axes} | {whole}
    return not any(_apart_within(period, x_axes, y_axes, between) for period in periods if period > 0)


def addresses_between(x: torch.Tensor, y: torch.Tensor) -> int | None:
    """Bytes from the first element of ``x`` to the first element of ``y``; None for storages without a common byte.

    Two storages may have the same memory: ``torch.from_numpy`` makes a new storage of the same array at every call. A
    tensor that a compiler traces, or that a class of its own holds, has no address, so the identity of its storage
    decides.
    """
    if not (is_plain(x) and is_plain(y)) or x.is_meta or y.is_meta:
        if not torch._C._is_alias_of(x, y):  # type: ignore[attr-defined]  # torch's stubs lack it
            return None
        return _known(y.storage_offset()) * y.itemsize - _known(x.storage_offset()) * x.itemsize
    if x.layout is not torch.strided or y.layout is not torch.strided:
        return None
    (x_start, x_end), (y_start, y_end) = _bytes(x), _bytes(y)
    if x_end <= y_start or y_end <= x_start:
        return None
    return y.data_ptr() - x.data_ptr()


def _apart_within(period: int, x_axes, y_axes, shift: int) -> bool:
    if any(stride % period for stride, _ in x_axes + y_axes if stride >= period):
        return False
    x_span = _span([axis for axis in x_axes if axis[0] < period])
    y_span = _span([axis for axis in y_axes if axis[0] < period])
    start = shift % period
    return x_span <= start and start + y_span <= period


def _has_elements(x: torch.Tensor) -> bool:
    return _known(x.numel()) > 0


def _axes(x: torch.Tensor) -> list[tuple[int, int]]:
    """(stride, size) of the axes with more than one element."""
    axes = zip(map(_known, x.stride()), map(_known, x.shape), strict=True)
    return [(stride, size) for stride, size in axes if size > 1]


def _axes_of_bytes(x: torch.Tensor) -> list[tuple[int, int]]:
    """The axes of the bytes of ``x``, which the bytes of an element end."""
    return [*((stride * x.itemsize, size) for stride, size in _axes(x)), (1, x.itemsize)]


def _span(axes: list[tuple[int, int]]) -> int:
    """The number of places from the first to the last, both included."""
    return 1 + sum(stride * (size - 1) for stride, size in axes)


def _known(size: int | torch.SymInt) -> int:
    """A size as a number. For a symbol of a compiler, the size in the traced call, or 2 where the size is unknown.

    The function sets no guard: the same code lays out the memory of later calls with other sizes.
    """
    if isinstance(size, int):
        return size
    return 2 if size.node.hint is None else int(size.node.hint)
