"""One way from a call to a launch, for every operation of the kernels.

A call with few tokens lasts a few microseconds on a GPU, so the host must not spend a hundred on the call. Nearly all
of the host's work depends on properties of the arguments that repeat from layer to layer and from step to step. These
properties form a key. The checks and the launch of a call are prepared once for a key.

Plain tensors in eager mode bypass PyTorch's dispatcher, because the dispatcher takes longer than the rest of the call.
All others take an operator of the dispatcher, for torch.compile, torch.export and fake tensors.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.autograd.graph import increment_version

from ropelab.call.checks import check_places, check_writable
from ropelab.call.memory import DisjointCheck, check_disjoint, is_plain, is_same_view
from ropelab.call.where import SCHEMA, Options, Where, along_axes
from ropelab.kernels import backend, uses_triton
from ropelab.kernels.backends import forced_backend
from ropelab.kernels.rotation import MAX_BATCH, MOST_ROWS
from ropelab.layout.seq_format import SEQ_AXIS, rank, to_bshd

Tensors: TypeAlias = tuple[Any, ...]
"""Tensors in the order of an operation; None for a tensor that a call lacks."""


class Prepared(NamedTuple):
    """What a key keeps: a launch, the check of the memory that it writes, and the tokens of a sequence."""

    launch: Callable[[Tensors, int, int], Any]
    """``launch(tensors, first_position, table_rows)``"""
    check_memory: DisjointCheck | None
    seq_len: int


REFUSED = Prepared(lambda tensors, first_position, table_rows: None, None, 0)
"""What the key of calls keeps that the kernel does not serve."""


class PreparedCalls(dict[Hashable, Prepared]):
    """The prepared calls by their keys. A full cache starts anew, so that shapes that never repeat do not fill memory.

    Args:
        most: the largest number of entries.
    """

    def __init__(self, most: int = 4096):
        super().__init__()
        self.most = most

    def keep(self, key: Hashable | None, prepared: Prepared) -> None:
        """Keep ``prepared`` for calls with ``key``; a key of None keeps nothing."""
        if key is None:
            return
        if len(self) >= self.most:
            self.clear()
        self[key] = prepared


prepared_calls = PreparedCalls()


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation: what its calls are given, check, make and launch.

    Attributes:
        module, step: the operation of `backends.backend`, and the function of its modules.
        tensors: the tuple that the function takes: given and made tensors, the tables, and the positions.
        names: the names of the given tensors in messages.
        check: ``check(given, where, *numbers)`` raises TypeError or ValueError for arguments that the kernels cannot
            serve. It looks at everything but the contents of tensors.
        make: ``make(given, where, *numbers)`` allocates the results; an operation in place makes nothing.
        numbers: ``numbers(*numbers)`` are the further arguments of the function.
        check_contents: ``check_contents(given, where, *numbers)`` raises ValueError for contents that the host can see;
            every call makes this check. By default it is `check_places` of the first tensor.
        writes: so many given tensors, the first ones, are written.
        same: a written tensor -> the tensor that may be the same view.
        condition: the words of a message for a call in place.
    """

    module: str
    step: str
    tensors: Any
    names: tuple[str, ...]
    check: Callable[..., None]
    make: Callable[..., Sequence[Any]] = lambda given, where, *numbers: ()
    numbers: Callable[..., tuple] = lambda *numbers: numbers
    check_contents: Callable[..., None] | None = None
    writes: int = 0
    same: Mapping[str, str] = field(default_factory=dict)
    condition: str = ""

    def __call__(self, given: Tensors, where: Where, *numbers: Hashable) -> Any:
        """Execute the operation on plain tensors, and return what it makes; or None where no kernel serves the call."""
        angles, positions, first_position, options = where
        rows, writes = 0, self.writes
        try:
            rows = angles.position_count
            key: Hashable | None = (
                self, options, numbers, forced_backend(), angles.key(), rows if writes else 0,
                *[
                    None if x is None else (type(x), x.shape, x.stride(), x.dtype, x.device, x.layout)
                    for x in (*given, positions)
                ],
            )  # fmt: skip
            prepared = prepared_calls.get(key)
        except (AttributeError, IndexError, RuntimeError, TypeError):  # the checks name the argument that is wrong
            key = prepared = None
        check_memory = None if prepared is None else prepared.check_memory
        if prepared is REFUSED:
            return None
        if prepared is None:
            self.check_plain(given, where)
            self.check(given, where, *numbers)
            if writes:
                check_memory = self._check_of_memory(given, where)
        try:
            if check_memory is not None:
                check_memory(*given, *(angles.tensors[:1] if angles.table_free else angles.tensors), positions)
            if self.check_contents is not None:
                self.check_contents(given, where, *numbers)
            elif prepared is None or positions is not None or first_position + prepared.seq_len > rows:
                check_places(given[0], where)
            written = [x for x in given[:writes] if x is not None] if writes else ()
            for x in written:
                if x.is_inference():
                    check_writable(self.names, given[:writes], self.condition)
            made = self.make(given, where, *numbers)
            tensors = *given, *made, *angles.for_kernels, positions
            if prepared is None:
                seq_len = given[0].shape[SEQ_AXIS[options.seq_format]]
                launch = self.prepare(tensors, where, *numbers)
                prepared = REFUSED if launch is None else Prepared(launch, check_memory, seq_len)
                prepared_calls.keep(key, prepared)
                if launch is None:
                    return None
            if writes:  # autograd does not see a kernel write, and a function that saved a tensor must fail
                increment_version(written)
            prepared.launch(tensors, first_position, rows if rows < MOST_ROWS else MOST_ROWS)
        except RuntimeError:  # a tensor without memory, where others had prepared the call
            self.check_plain(given, where)
            raise
        return made

    def check_plain(self, given: Tensors, where: Where) -> None:
        """Raise TypeError for a tensor whose class takes PyTorch's operations over, and so has no memory of its own."""
        named = [*zip(self.names, given, strict=True)]  # a result may have been made of an input that is wrong
        check_plain((*named[self.writes :], *where.read.items(), *named[: self.writes]))

    def _check_of_memory(self, given: Tensors, where: Where) -> DisjointCheck:
        named = dict(zip(self.names, given, strict=True))
        written = {name: named.pop(name) for name in self.names[: self.writes]}
        return DisjointCheck(written, {**named, **where.read}, self.same, self.condition)

    def prepare(self, tensors: Tensors, where: Where, *numbers: Hashable) -> Any:
        """Choose how calls with these properties run; None where the kernel does not serve them.

        Returns:
            ``launch(tensors, first_position, table_rows)``, which keeps no tensor of this call alive.
        """
        first = next(x for x in tensors if x is not None)
        module, rotation, arguments = backend(self.module, first), where.rotation, self.numbers(*numbers)
        options = where.options

        def views(tensors: Tensors):
            return views_of(self.tensors(*tensors), options)

        viewed = views(tensors)
        if hasattr(module, "serves") and not module.serves(viewed, rotation):
            return None
        if uses_triton(first) and _is_plain(viewed):
            # A launch takes addresses only, so it takes the tensors of a call as they are.
            return getattr(module, f"plan_{self.step}")(viewed, rotation, *arguments)
        run = getattr(module, self.step)
        return lambda tensors, first_position, rows: run(views(tensors), rotation, *arguments, first_position)


def check_plain(named: Iterable[tuple[str, Any]]) -> None:
    """Raise TypeError for a tensor by its name whose class takes PyTorch's operations over: it has no memory itself."""
    for name, x in named:
        if type(x) not in _PLAIN and _is_subclass(name, x) and not is_plain(x):
            raise TypeError(f"{name}: expected a plain tensor, got {type(x).__name__}")


_OF_ANY_STRIDE = {
    "positions", "slots", "q_scale", "k_scale", "v_scale", "k_scale_cache", "v_scale_cache", "scales", "weights",
    "weights_out",
}  # fmt: skip
_IN_ANY_FORMAT = {"k_cache", "v_cache", "cos", "sin", *_OF_ANY_STRIDE}


def views_of(t: Any, options: Options) -> Any:
    """The tensors as the backends take them: heads as ``[B, S, H, D]``, positions as in `kernels.tensors`.

    A result that is its own input stays the same object.
    """
    viewed: dict[int, torch.Tensor] = {}
    seq_format, axes = options.seq_format, options.axes
    for name, x in t._asdict().items():
        if x is not None and x.ndim == rank(seq_format) and name not in _IN_ANY_FORMAT:
            viewed[id(x)] = to_bshd(x, seq_format)
    if t.positions is not None and not options.offsets and viewed:
        heads = next(iter(viewed.values()))
        if axes is None:
            viewed[id(t.positions)] = t.positions.expand(heads.shape[:2])
        else:
            viewed[id(t.positions)] = along_axes(t.positions, axes).expand(-1, *heads.shape[:2]).movedim(0, -1)
    return type(t)(*(viewed.get(id(x), x) for x in t))


def _is_plain(t: Any) -> bool:
    """Whether a launch can serve the tensors as they are."""
    fields = [(name, x) for name, x in t._asdict().items() if x is not None and name not in _OF_ANY_STRIDE]
    batch = max((len(x) for name, x in fields if x.ndim == 4 and name not in _IN_ANY_FORMAT), default=1)
    return batch <= MAX_BATCH and all(x.stride(-1) == 1 for _, x in fields)


# -------------------------------------------------------------------------------------------------------- dispatcher


def operator(name: str, given: str, numbers: str, result: str, run: Callable, fake: Callable, mutates=()) -> Callable:
    """Make ``run`` an operator of PyTorch's dispatcher.

    Args:
        name: ``"ropelab::..."``.
        given, numbers, result: the schema of the arguments before and after those of `Where`, and of the result.
        run, fake: called with the arguments; ``fake`` makes the results without data.
        mutates: the names of the arguments that the operator writes.
    """
    arguments = ", ".join(part for part in (given, SCHEMA, numbers) if part)
    made = torch.library.custom_op(name, run, mutates_args=mutates, schema=f"({arguments}) -> {result}")
    made.register_fake(fake)
    return made


def write_through(
    operation: Operation,
    dispatched: Callable,
    given: Tensors,
    where: Where,
    numbers: tuple,
    flat: tuple,
    *heads: torch.Tensor | None,
) -> None:
    """Make a call that writes given tensors: through the dispatcher if `must_dispatch`, else directly.

    Args:
        dispatched: the operator of the dispatcher for the operation.
        numbers, flat: the numbers of the operation, and those of the operator.
        heads: the two tensors that `must_dispatch` looks at.
    """
    q, k = heads
    try:
        through = must_dispatch(q, k)
    except TypeError:
        operation.check_plain(given, where)  # by the name of the argument
        raise
    if not through:
        operation(given, where, *numbers)
        return
    operation.check(given, where, *numbers)
    named = dict(zip(operation.names, given, strict=True))
    if not torch.compiler.is_compiling():  # compilers cannot follow this check
        written = {name: named[name] for name in operation.names[: operation.writes]}
        read = {**dict(list(named.items())[operation.writes :]), **where.read}
        check_disjoint(written, read, operation.same)
    # Compilers follow no operator that writes over its own input, so the operator gets new tensors there.
    new = {}
    for name, source in operation.same.items():
        out, x = named[name], named[source]
        if out is not None and x is not None and is_same_view(out, x):
            new[name] = torch.empty_like(out)
    dispatched(*{**named, **new}.values(), *where.for_operators, *flat)
    for name, made in new.items():
        named[name].copy_(made)


def must_dispatch(q: torch.Tensor | None, k: torch.Tensor | None, names: tuple[str, str] = ("q", "k")) -> bool:
    """Whether a call with these tensors must go through the dispatcher.

    A call must go through the dispatcher where a compiler traces, where a dispatch mode is active, where q or k is of a
    subclass of tensor, such as a fake tensor, and for tensors on the device meta. Parameters count as plain tensors.

    Raises:
        TypeError: q or k is a DTensor, whose sharding the operators do not know.
    """
    return (
        torch.compiler.is_compiling()
        or (type(q) not in _PLAIN and _is_subclass(names[0], q))
        or (type(k) not in _PLAIN and _is_subclass(names[1], k))
        or torch._C._len_torch_dispatch_stack() > 0
        or (isinstance(q, torch.Tensor) and q.is_meta)
    )


_PLAIN = (torch.Tensor, torch.nn.Parameter, type(None))


def _is_subclass(name: str, x) -> bool:
    if type(x).__name__ == "DTensor":
        raise TypeError(f"{name}: expected a plain tensor (to_local(), or ropelab.interop.dtensor), got a DTensor")
    return isinstance(x, torch.Tensor)


def copy_over(xs: Sequence[torch.Tensor], ys: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Copy each of ``ys`` to its counterpart in ``xs``, and return ``xs``."""
    for x, y in zip(xs, ys, strict=True):
        x.copy_(y)  # if y is of a subclass, copy_ may return another object than x
    return tuple(xs)
