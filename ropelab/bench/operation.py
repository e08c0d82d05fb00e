"""An operation that a study times: its inputs, its contenders, the bytes that must move, and the check of results.

`table` goes through the operations of a study. Contenders that pass the check are timed in the same rounds as copies,
which move the bytes that the operation must move: for each step of the operation, such as the forward and the backward.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar, Self

import pandas as pd
import torch

from ropelab.bench import cells, copies, in_parts, same_places, timing
from ropelab.bench.rows import are_copies

PUBLISHED = MappingProxyType({"version": "", "sha256": ""})
"""What records say of a package that a contender comes from, and of its library or files in hexadecimal."""
COPY = "copy"
"""The fastest copy, in records that have no other."""


@dataclass(frozen=True)
class Contender:
    """A function of the inputs of a call, and what is known of a package that it comes from.

    Attributes:
        run: the function, of which `Operation.calls` makes calls; or why it cannot run: ``"not run: ..."``.
        columns: what records have of it, see `Operation.of_contenders`.
        steps: the steps that the contender offers; None for all.
        check, calls: in place of `Operation.check`, and of `Operation.calls` without the run.
    """

    run: Callable | str
    columns: Mapping[str, object] = field(default_factory=dict)
    steps: Sequence[str] | None = None
    check: Callable[..., str] | None = None
    calls: Callable[[Sequence[Any], str], Sequence[timing.Call]] | None = None

    def offers(self, step: str) -> bool:
        return self.steps is None or step in self.steps


class Operation(ABC):
    """What one call computes. A call takes one of the sets of inputs, which take turns.

    Attributes:
        steps: what is timed, one after the other.
        step_column: the column of the step in a record; "" where there is one step without a name.
        of_contenders: the columns of a record that say something of contenders -> what they have for copies.
        checks_each_step: whether a result may be right in one step alone. Otherwise `check` looks at all of them.
        scaled: whether the time of a copy counts by the share of the bytes that must move: `bytes` over those of the
            copy. Otherwise the copy moves the bytes that must move.
        one_copy: whether a record has the fastest copy alone, as `COPY`.
        differentiates: whether calls need gradients.
    """

    steps: ClassVar[Sequence[str]] = ("",)
    step_column: ClassVar[str] = ""
    of_contenders: Mapping[str, object] = MappingProxyType({})
    checks_each_step: ClassVar[bool] = False
    scaled: ClassVar[bool] = False
    one_copy: ClassVar[bool] = False
    differentiates: ClassVar[bool] = False
    bytes: int

    @property
    @abstractmethod
    def columns(self) -> Mapping[str, object]:
        """The columns that identify the operation in a record."""

    @property
    @abstractmethod
    def description(self) -> str:
        """The operation in a few words, for lines of progress."""

    @property
    def checked(self) -> Self:
        """The operation whose results are compared with the definition: this one, or a smaller one."""
        return self

    @abstractmethod
    def sets(self, device: torch.device | str) -> Sequence[Any]:
        """As many sets of inputs as keep every access out of the L2 cache."""

    @abstractmethod
    def contenders(self, sets: Sequence[Any], device: torch.device | str) -> Mapping[str, Contender]:
        """The name of each contender -> the contender."""

    @abstractmethod
    def check(self, run: Callable, call: Any, step: str = "") -> str:
        """``"ok"`` if a run on one set of inputs, which stay as they are, is right; else what is wrong."""

    @abstractmethod
    def to_copy(self, call: Any, step: str = "") -> Sequence[torch.Tensor]:
        """One or two tensors to copy: as many bytes as the operation must read."""

    def places(self, call: Any, step: str = "") -> Sequence[same_places.Part]:
        """The parts that a copy to the same places moves; none where it would move what `to_copy` moves."""
        return ()

    def share(self, copied: Sequence[torch.Tensor]) -> float:
        """The bytes that must move over those that a copy of these tensors moves; 1 where it moves what must move."""
        return self.bytes / (2 * sum(x.nbytes for x in copied)) if self.scaled else 1.0

    def calls(self, run: Callable, sets: Sequence[Any], step: str = "") -> Sequence[timing.Call]:
        """One call for each set."""
        return [partial(run, call) for call in sets]

    def prepared(self, contender: Contender, sets: Sequence[Any], step: str) -> Callable[[], Sequence[timing.Call]]:
        """The calls of a contender, as `timing.gpu_times` takes them."""
        return partial(contender.calls or partial(self.calls, contender.run), sets, step)

    def finished(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The rows with the further columns of the operation."""
        return frame


class Sweep(Operation):
    """A kernel with the tile that the library takes, and with other tiles. No result is checked.

    Columns: those of the operation, status, median_us, q20_us, q80_us, samples, fraction_of_copy; the fields of tiles,
        and chosen.

    Attributes:
        fields: the attributes of tiles to record.
    """

    fields: ClassVar[Sequence[str]]

    @property
    def of_contenders(self):
        return dict.fromkeys((*self.fields, "chosen"), False)

    @abstractmethod
    def tiles(self, call: Any) -> Sequence[Any]:
        """The tiles to try, the chosen one first."""

    @abstractmethod
    def run(self, tile: Any, call: Any) -> object:
        """Launch the kernel."""

    def contenders(self, sets, device):
        tiles, found = self.tiles(sets[0]), {}
        for tile in tiles:
            about = {name: getattr(tile, name) for name in self.fields} | {"chosen": tile == tiles[0]}
            found[str(tile)] = Contender(partial(self.run, tile), about)
        return found

    def check(self, run, call, step=""):
        return "ok"

    def finished(self, frame):
        return frame[~are_copies(frame)].drop(columns="contender").reset_index(drop=True)


def table(
    operations: Sequence[Operation], *, rounds: int, device: torch.device | str = "cuda", parts: int = 1
) -> pd.DataFrame:
    """The rows of every operation, see `compare`, one operation after the other.

    Args:
        parts: the processes that compile the kernels, with the clock stopped, unless there are as few operations.
    """
    if timing.is_stopped() and len(operations) > parts > 1:
        part = partial(table, rounds=1, device=device)
        return in_parts.compiled(part, [(operations[first::parts],) for first in range(parts)])
    measure = partial(compare, rounds=rounds, device=device)
    return cells.table(operations, measure, lambda operation: operation.description)


def compare(operation: Operation, *, rounds: int, device: torch.device | str = "cuda") -> pd.DataFrame:
    """Time the contenders of an operation that are right, and copies.

    Columns: those of the operation, and of the step; contender, status (``"ok"``, ``"wrong: ..."``, ``"failed: ..."``
        or ``"not run: ..."``), median_us, q20_us, q80_us, samples; fraction_of_copy, the fastest copy's time of the
        bytes that must move over the time of the contender; and `Operation.of_contenders`. `names.SAME_PLACES` is the
        fastest copy to the same places.
    """
    sets = operation.sets(device)
    found = operation.contenders(sets, device)
    statuses: dict[str, str] = {}
    frames = []
    for step in operation.steps:
        if operation.checks_each_step or not statuses:
            statuses = checked(operation, sets, found, device, step)
        right, wrong = divided(found, statuses, step)
        timed = {name: operation.prepared(one, sets, step) for name, one in right.items()}
        copied = [operation.to_copy(call, step) for call in sets]
        places = [parts for call in sets if (parts := operation.places(call, step))]
        with torch.set_grad_enabled(operation.differentiates):
            frame = beside_copies(timed, copied, places, rounds=rounds, share=operation.share(copied[0]))
        if operation.one_copy:
            frame = fastest_copy_alone(frame)
        identity = {**operation.columns, **({operation.step_column: step} if operation.step_column else {})}
        frames.append(tidy(frame, identity, wrong))
    frame = pd.concat(frames, ignore_index=True)
    of = [{**operation.of_contenders, **(found[name].columns if name in found else {})} for name in frame.contender]
    about = {column: [one[column] for one in of] for column in operation.of_contenders}
    return operation.finished(frame.assign(**about))


def checked(
    operation: Operation,
    sets: Sequence[Any],
    found: Mapping[str, Contender],
    device: torch.device | str,
    step: str = "",
) -> dict[str, str]:
    """The status of each contender; where each step is checked, of those that offer the step.

    With the clock stopped, no result of the same size as is timed is compared.
    """
    small = operation.checked
    statuses = {name: one.run for name, one in found.items() if isinstance(one.run, str)}
    if small is not operation:
        sets = small.sets(device)
        found = small.contenders(sets, device)
    for name, one in found.items():
        if isinstance(one.run, str) or (operation.checks_each_step and not one.offers(step)):
            continue
        try:
            skipped = small is operation and timing.is_stopped()
            statuses[name] = "ok" if skipped else (one.check or small.check)(one.run, sets[0], step)
        except Exception as error:  # the status records the error
            statuses[name] = timing.failure(error)
    return statuses


def divided(
    found: Mapping[str, Contender], statuses: Mapping[str, str], step: str = ""
) -> tuple[dict[str, Contender], dict[str, str]]:
    """The contenders that offer a step and are right, and the status of each that offers it and is not."""
    right = {name: one for name, one in found.items() if one.offers(step) and statuses.get(name, "ok") == "ok"}
    return right, {name: why for name, why in statuses.items() if why != "ok" and found[name].offers(step)}


def beside_copies(
    timed: Mapping[str, Callable[[], Sequence[timing.Call]]],
    copied: Sequence[Sequence[torch.Tensor]],
    places: Sequence[Sequence[same_places.Part]] = (),
    *,
    rounds: int,
    share: float = 1.0,
) -> pd.DataFrame:
    """The rows of `timing.gpu_times` for contenders, copies, and the fastest copy to the same places.

    Args:
        copied: the tensors that the copies of each call copy.
        places: the parts that the copies to the same places copy.
        share: the bytes that contenders must move over those of a copy. The column fraction_of_copy is the time of the
            fastest copy, times this share, over the time of each contender.
    """
    everything = {**timed, **copies.contenders(copied), **(same_places.contenders(places) if places else {})}
    frame = copies.with_fraction(same_places.fastest_alone(timing.gpu_times(everything, rounds=rounds)))
    torch.cuda.empty_cache()  # the graphs have memory of their own
    return frame.assign(
        fraction_of_copy=frame.fraction_of_copy.where(are_copies(frame), frame.fraction_of_copy * share)
    )


def fastest_copy_alone(frame: pd.DataFrame) -> pd.DataFrame:
    """``frame`` with one row instead of the rows of the copies, at the end: the row of the fastest, as `COPY`."""
    copied = are_copies(frame)
    fastest = frame[copied].nsmallest(1, "median_us").assign(contender=COPY)
    return pd.concat([frame[~copied], fastest], ignore_index=True)


def tidy(frame: pd.DataFrame, identity: Mapping[str, object], status: Mapping[str, str] | None = None) -> pd.DataFrame:
    """``frame`` with the columns of ``identity`` in front, and a row for each contender of ``status`` at the end."""
    untimed = pd.DataFrame({"contender": list(status or {}), "status": list((status or {}).values())})
    frame = pd.concat([frame, untimed], ignore_index=True) if len(untimed) else frame.reset_index(drop=True)
    return pd.concat([pd.DataFrame([identity] * len(frame)), frame], axis=1)
