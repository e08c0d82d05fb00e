"""One way from a call to a launch, for every operation of the kernels.

A call with few tokens lasts a few microseconds on a GPU, so the host must not spend a hundred on the call. Nearly all
of the host's work depends on properties of the arguments that repeat from layer to layer and from step to step. These
properties form a key. The checks and the launch of a call are prepared once for a key.

A public function looks up what its caller passed (`Operation.look_up`) before it makes anything of it. A call that
finds nothing there is checked, becomes a `Where` and the tensors of an `Operation`, and is looked up once more as such:
calls that are written in several ways share a launch, and so do those of autograd and of the dispatcher.

Plain tensors in eager mode bypass PyTorch's dispatcher, because the dispatcher takes longer than the rest of the call.
All others take an operator of the dispatcher, for torch.compile, torch.export and fake tensors.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch.autograd.graph import increment_version

from ropelab.call.checks import check_no_grad, check_places, check_writable
from ropelab.call.dispatcher import PLAIN, is_subclass, must_dispatch, operator, watched
from ropelab.call.memory import DisjointCheck, check_disjoint, is_plain, is_same_view
from ropelab.call.remembered import Remembered
from ropelab.call.where import SCHEMA, Options, Where, along_axes
from ropelab.kernels import backend, backends
from ropelab.kernels.backends import why_torch
from ropelab.kernels.rotation import MAX_BATCH, MOST_ROWS
from ropelab.kernels.run import run
from ropelab.kernels.tensors import OF_ANY_STRIDE, addresses_of
from ropelab.layout.seq_format import SEQ_AXIS, rank, to_bshd
from ropelab.log import first_call

Tensors: TypeAlias = Sequence[Any]
"""Tensors in the order of an operation; None for a tensor that a call lacks."""


@dataclass(slots=True, eq=False)
class Prepared:
    """What calls with the same key share.

    Attributes:
        launch: ``launch(tensors, first_position, table_rows)``; it may make the results itself.
        check_memory: the `DisjointCheck` of a call that writes, else None.
        seq_len: the tokens of a sequence.
        operation, options, numbers: what is called.
        on_host: the host sees the contents of tensors, and checks them in every call.
        recorded: autograd records the calls.
    """

    launch: Callable[[Tensors, int, int], Any]
    check_memory: Any
    seq_len: int
    operation: Any
    options: Options
    numbers: tuple
    on_host: bool
    recorded: bool = False
    at: Any = field(init=False)
    """``at(addresses, tensors, first_position, table_rows)``, the launch where the addresses are known; or None."""

    def __post_init__(self):
        self.at = getattr(self.launch, "at", None)

    def __call__(self, given: Tensors, cos: Any, sin: Any, positions: Any, offsets: Any) -> Any:
        """Make a call, and return what it makes.

        Args:
            cos, sin: `Angles`.
            positions, offsets: as for `apply_rope`; an int is at least 0.
        """
        operation, options = self.operation, self.options
        if type(offsets) is not int:
            positions, offsets = offsets, 0
        rows = MOST_ROWS if sin is None else cos.shape[-2]
        if rows > MOST_ROWS:
            rows = MOST_ROWS
        if self.on_host or (positions is None and offsets + self.seq_len > rows):
            where = Where.of(cos, sin, positions, offsets, options)
            if operation.check_contents is None:
                check_places(given[operation.heads[0]], where)
            else:
                operation.check_contents(given, where, *self.numbers)
        written = [x for x in given[: operation.writes] if x is not None] if operation.writes else ()
        for x in written:
            if x.is_inference():
                check_writable(operation.names, given[: operation.writes], operation.condition)
        made = operation.make(given, options, *self.numbers)
        tensors, at = (*given, *made, cos, cos if sin is None else sin, positions), self.at
        addresses = addresses_of(tensors) if written or at is not None else ()
        if written:
            self.check_memory(addresses, *given, cos, sin, positions)
            increment_version(written)  # autograd does not see a kernel write; a function that saved a tensor must fail
        done = self.launch(tensors, offsets, rows) if at is None else at(addresses, tensors, offsets, rows)
        return made or done


PreparedCalls: TypeAlias = Remembered[Hashable, Prepared]

prepared_calls = PreparedCalls()
"""The prepared calls by their keys: those of `Operation.look_up`, and those of operations."""

_EXACT = frozenset((str, bool, int, float, *map(type, (None, int, torch.Tensor, torch.nn.Parameter, torch.float32))))
"""The types of words and numbers of which equal ones of one type are the same: also those of classes and of dtypes."""
_WITHOUT_KEY = AttributeError, IndexError, RuntimeError, TypeError
"""What the properties of a wrong argument raise. Its call has no key, and the checks name the argument."""


@dataclass(eq=False)
class Operation:
    """An operation: what its calls are given, check, make and launch.

    Attributes:
        module, step: the operation of `backends.backend`, and the function of its modules.
        tensors: the tuple that the function takes: given and made tensors, the tables, and the positions; or a function
            that makes it of them.
        names: the names of the given tensors in messages.
        check: ``check(given, where, *numbers)`` raises TypeError or ValueError for arguments that the kernels cannot
            serve. It looks at everything but the contents of tensors.
        make: ``make(given, options, *numbers)`` allocates the results; an operation in place makes nothing.
        numbers: ``numbers(*numbers)`` are the further arguments of the function.
        check_contents: ``check_contents(given, where, *numbers)`` raises ValueError for contents that the host sees
            without waiting for a GPU. By default it is `check_places` of the tokens.
        writes: so many given tensors, the first ones, are written.
        same: a written tensor -> the tensor that may be the same view.
        condition: the words of a message for a call in place.
        heads: the given tensors whose class and device decide for all; the first has the tokens. By default those are
            the first two that are only read.
        records: its caller lets autograd record a call that `look_up` finds.
        checks_addresses: ``check_contents`` looks at addresses as well, so calls on a GPU make it, too.
        multiplies: the first two tensors that are only read are factors: `torch.autocast` may convert them, and a
            kernel can move blocks of both where they begin at multiples of 16 bytes.
    """

    module: str
    step: str
    tensors: Any
    names: tuple[str, ...]
    check: Callable[..., Any]
    make: Callable[..., Sequence[Any]] = lambda given, options, *numbers: ()
    numbers: Callable[..., tuple] = lambda *numbers: numbers
    check_contents: Callable[..., None] | None = None
    writes: int = 0
    same: Mapping[str, str] = field(default_factory=dict)
    condition: str = ""
    heads: tuple[int, ...] = ()
    records: bool = False
    checks_addresses: bool = False
    multiplies: bool = False
    dispatched: Callable[..., Any] = field(init=False, repr=False)
    """The operator of PyTorch's dispatcher that `operator` made."""

    def __post_init__(self):
        self.heads = self.heads or (self.writes, self.writes + 1)

    def look_up(
        self,
        words: tuple,
        numbers: tuple,
        given: Tensors,
        cos: Any,
        sin: Any,
        positions: Any,
        offsets: Any,
        axes: Any = None,
        rotary_slice: Any = None,
    ) -> tuple[tuple | None, Prepared | None]:
        """The key of a call as its caller wrote it, and what earlier calls with this key prepared.

        There is no key where a compiler, a transform or a mode sees the call, or autograd without `records`, where the
        host makes a tensor for the call, and where a word or a number is an object that may change or equal others.

        Args:
            words, numbers: the arguments that are strings, and the numbers and flags, of which equal ones may be wrong.
        """
        if watched() or (self.multiplies and torch._C._is_any_autocast_enabled()):
            return None, None
        if type(offsets) is not int:
            if positions is not None:
                return None, None
            positions = offsets
        elif offsets < 0 or (offsets and positions is not None):
            return None, None
        tensors = *given, cos, sin, positions
        try:
            several = *(() if axes is None else axes), *(() if rotary_slice is None else rotary_slice)
            if not _EXACT.issuperset(map(type, (*words, *numbers, *several))):
                return None, None
            recorded = False
            if torch.is_grad_enabled():
                for x in tensors:
                    if x is not None and x.requires_grad:
                        if not self.records:
                            return None, None
                        recorded = True
                        break
            key = (
                self, recorded, backends.forced, words, axes, rotary_slice,
                numbers, *map(type, numbers), type(offsets), *map(type, several), *self._properties(tensors),
            )  # fmt: skip
            return key, prepared_calls.get(key)
        except _WITHOUT_KEY:
            return None, None

    def remember(self, key: tuple | None, given: Tensors, where: Where, *numbers: Hashable) -> None:
        """Let calls with ``key``, a key of `look_up`, share what the call with these arguments has prepared.

        A call with a tensor of a subclass goes through the dispatcher every time.
        """
        if any(type(x) not in PLAIN for x in (*given, *where.read.values())):
            return
        if key is not None and (prepared := prepared_calls.get(self._key(given, where, numbers))) is not None:
            _, recorded, *_ = key
            prepared_calls.keep(key, replace(prepared, recorded=recorded))

    def _key(self, given: Tensors, where: Where, numbers: tuple) -> Hashable | None:
        angles, positions, _, options = where
        try:
            rows = angles.position_count if self.writes else 0
            key = self, options, numbers, backends.forced, rows, angles.key(), *self._properties((*given, positions))
            hash(key)  # a layout that is a list has none
            return key
        except _WITHOUT_KEY:
            return None

    def _properties(self, tensors: Tensors) -> list:
        """What the checks and the launch of a call depend on, beside the contents and addresses of tensors."""
        found: list = [
            None if x is None else (type(x), x.shape, x.stride(), x.dtype, x.device, x.layout) for x in tensors
        ]
        if self.multiplies:
            i = self.writes
            found.append((tensors[i].data_ptr() | tensors[i + 1].data_ptr()) % 16 == 0)
        return found

    def __call__(self, given: Tensors, where: Where, *numbers: Hashable) -> Any:
        """Execute the operation on plain tensors, and return what it makes."""
        angles, positions, first_position, _ = where
        key = self._key(given, where, numbers)
        try:
            prepared = prepared_calls.get(key)
            if prepared is None:
                prepared = self._prepared(given, where, numbers)
                prepared_calls.keep(key, prepared)
            return prepared(given, *angles, positions, first_position)
        except RuntimeError:  # a tensor without memory, where others had prepared the call
            self.check_plain(given, where)
            raise

    def run(
        self, given: Tensors, where: Where, *numbers: Hashable, flat: tuple | None = None, key: tuple | None = None
    ) -> Any:
        """Make a call, through the dispatcher if `must_dispatch`, else directly, and return the tensors that it makes.

        Args:
            flat: the numbers of the operator, where they are others than those of the operation.
            key: of `look_up`, to `remember` the call.
        """
        if self.writes:
            check_no_grad(self.names, given, where)
        i, j = self.heads[0], self.heads[-1]
        if not must_dispatch(given[i], given[j], (self.names[i], self.names[j])):
            found = self(given, where, *numbers) or ()
            self.remember(key, given, where, *numbers)
            return tuple([x for x in found if x is not None])
        self.check(given, where, *numbers)
        named, new = dict(zip(self.names, given, strict=True)), {}
        if self.writes and not torch.compiler.is_compiling():  # compilers cannot follow this check
            check_disjoint(*self._written_and_read(given, where), self.same)
        # Compilers follow no operator that writes over its own input, so the operator gets new tensors there.
        for name, source in self.same.items():
            out, x = named[name], named[source]
            if out is not None and x is not None and is_same_view(out, x):
                new[name] = torch.empty_like(out)
        made = self.dispatched(*(named | new).values(), *where.for_operators, *(numbers if flat is None else flat))
        for name, x in new.items():
            named[name].copy_(x)
        return made

    def operator(
        self, name: str, numbers: str = "", result: str = "()", read: Callable[..., tuple] = lambda given, *flat: flat
    ) -> None:
        """Make the operation an operator of PyTorch's dispatcher.

        Args:
            name: ``"ropelab::..."``.
            numbers, result: the schema of the numbers, and of the result.
            read: ``read(given, *flat)`` are the numbers of the operation, where those of the operator are others.
        """
        count, end = len(self.names), len(self.names) + SCHEMA.count(",") + 1
        given = ", ".join(
            f"Tensor{f'({chr(97 + i)}!)' if i < self.writes else ''}{'' if kind is torch.Tensor else '?'} {argument}"
            for i, (argument, kind) in enumerate(zip(self.names, self.tensors.__annotations__.values(), strict=False))
        )

        def called(function: Callable, arguments: tuple) -> Any:
            given = arguments[:count]
            made = function(given, Where.of_operator(*arguments[count:end]), *read(given, *arguments[end:]))
            return None if result == "()" else [x for x in made if x is not None]

        def run(*arguments):
            return called(self, arguments)

        def fake(*arguments):
            return called(lambda given, where, *numbers: self.make(given, where.options, *numbers), arguments)

        self.dispatched = operator(name, given, numbers, result, run, fake, self.names[: self.writes])

    def check_plain(self, given: Tensors, where: Where) -> None:
        """Raise TypeError for a tensor whose class takes PyTorch's operations over, and so has no memory of its own."""
        named = [*zip(self.names, given, strict=True)]  # a result may have been made of an input that is wrong
        for name, x in (*named[self.writes :], *where.read.items(), *named[: self.writes]):
            if type(x) not in PLAIN and is_subclass(name, x) and not is_plain(x):
                raise TypeError(f"{name}: expected a plain tensor, got {type(x).__name__}")

    def _written_and_read(self, given: Tensors, where: Where) -> tuple[dict, dict]:
        """The tensors by their names, in the order of ``given``, of the tables and of the positions."""
        named = [*zip(self.names, given, strict=True)]
        return dict(named[: self.writes]), {**dict(named[self.writes :]), **where.read}

    def _prepared(self, given: Tensors, where: Where, numbers: tuple) -> Prepared:
        """Check a call, all but the contents of its tensors, and choose how it runs."""
        self.check_plain(given, where)
        self.check(given, where, *numbers)
        check_memory = None
        if self.writes:
            check_memory = DisjointCheck(*self._written_and_read(given, where), self.same, self.condition)
        made, options, x = self.make(given, where.options, *numbers), where.options, given[self.heads[0]]
        launch = self.prepare((*given, *made, *where.angles.for_kernels, where.positions), where, *numbers)
        seq_len = x.shape[SEQ_AXIS[options.seq_format]]
        on_host = not x.is_cuda and (where.positions is not None or self.check_contents is not None)
        return Prepared(launch, check_memory, seq_len, self, options, numbers, self.checks_addresses or on_host)

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
        serves = not hasattr(module, "serves") or module.serves(viewed, rotation)
        instead, plain = why_torch(first), _is_plain(viewed)
        path = f"torch operations, because {instead}" if instead else "one launch" if plain else "a launch over copies"
        kernel = f"{module.__name__.rpartition('.')[2]}.{self.step}"
        first_call(kernel, viewed._asdict(), options, path if serves else "not served, so others run in its place")
        if not serves:
            return None
        if instead:
            step = getattr(module, self.step)
            return lambda tensors, first_position, rows: step(views(tensors), rotation, *arguments, first_position)
        plan = getattr(module, f"plan_{self.step}")
        if plain:
            launch = plan(viewed, rotation, *arguments)
            if isinstance(self.tensors, type):  # a launch takes addresses only, so it takes the tensors as they are
                return launch
            return lambda tensors, *numbers: launch(self.tensors(*tensors), *numbers)
        return lambda tensors, first_position, rows: run(
            plan, views(tensors), rotation, *arguments, first_position=first_position
        )


_IN_ANY_FORMAT = {"k_cache", "v_cache", "cos", "sin", *OF_ANY_STRIDE}


def views_of(t: Any, options: Options) -> Any:
    """The tensors as the backends take them: heads as ``[B, S, H, D]``, positions as in `kernels.tensors`.

    A result that is its own input stays the same object.
    """
    viewed: dict[int, torch.Tensor] = {}
    seq_format, axes = options.seq_format, options.axes
    for name, x in t._asdict().items():
        if x is not None and x.ndim == rank(seq_format) and name not in _IN_ANY_FORMAT:
            viewed[id(x)] = to_bshd(x, seq_format)
    if t.positions is not None and not options.offsets:
        positions = t.positions if axes is None else along_axes(t.positions, axes)
        if viewed:  # the keys of a cache have a position for each slot already
            positions = positions.expand(*positions.shape[:-2], *next(iter(viewed.values())).shape[:2])
        viewed[id(t.positions)] = positions if axes is None else positions.movedim(0, -1)
    return type(t)(*(viewed.get(id(x), x) for x in t))


def _is_plain(t: Any) -> bool:
    """Whether a launch can serve the tensors as they are."""
    fields = [(name, x) for name, x in t._asdict().items() if x is not None and name not in OF_ANY_STRIDE]
    batch = max((len(x) for name, x in fields if x.ndim == 4 and name not in _IN_ANY_FORMAT), default=1)
    return batch <= MAX_BATCH and all(x.stride(-1) == 1 for _, x in fields)
