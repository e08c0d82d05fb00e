"""Which thread of a program touches which memory, from Triton's layouts and the addresses of the kernel."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import InterpretedFunction, interpreter_builder

from ropelab.study.topics.kernel_steps.layout import WARP, Layout, Move
from ropelab.study.topics.kernel_steps.step import Inputs, Step

_ENDS = torch.tensor([0] * 16 + [1], dtype=torch.int32)
SECTOR = 32
"""The bytes of a sector, the least that moves between a multiprocessor and the L2 cache."""


@dataclass(frozen=True)
class Access:
    """A load or a store of a tile by the first program.

    Attributes:
        kind: "load" or "store".
        of: the name of the tensor.
        place: the offset of each element in its tensor, in elements; -1 where the mask leaves it out.
        thread: the thread that moves it.
        instruction: the number of the instruction, of its warp, that moves it.
        width: the bytes that a thread moves with one instruction.
        itemsize: the bytes of an element.
    """

    kind: str
    of: str
    place: np.ndarray
    thread: np.ndarray
    instruction: np.ndarray
    width: int
    itemsize: int

    @property
    def first(self) -> np.ndarray:
        """Which elements the first instruction of the first warp moves."""
        return (self.place >= 0) & (self.thread < WARP) & (self.instruction == self.instruction.min())

    def requests(self) -> list[set[int]]:
        """The sectors of each request: an instruction of a warp makes one."""
        found: dict[tuple[int, int], set[int]] = {}
        moved = self.place >= 0
        sectors = self.place[moved] * self.itemsize // SECTOR
        for warp, instruction, sector in zip(self.thread[moved] // WARP, self.instruction[moved], sectors, strict=True):
            found.setdefault((warp, instruction), set()).add(int(sector))
        return list(found.values())


def accesses(step: Step, moves: Sequence[Move], heads: int, head_dim: int) -> list[Access]:
    """The loads and stores of tiles by the first program of a step, for heads in bfloat16.

    Args:
        moves: as in `machine_code.facts`.
    """
    x = torch.zeros(1, heads, head_dim, dtype=torch.bfloat16)
    table, zero = torch.zeros(1, head_dim // 2), torch.zeros(1, dtype=torch.int32)
    given, y = Inputs(x, table, table.clone(), _ENDS, zero), torch.zeros_like(x)
    tensors = {"x": x, "cos": given.cos, "sin": given.sin, "y": y}
    planned = step.plan(given, y)
    with _addresses() as found, suppress(InterpreterError):  # on a GPU no function inside of a kernel is interpreted
        InterpretedFunction(planned.kernel.fn)[(1,) * len(planned.grid)](*planned.arguments, **planned.options)
    if [(kind, where.shape) for kind, where, _ in found] != [(move.kind, move.shape) for move in moves]:
        return []  # the accesses cannot be told apart
    result = []
    for (kind, where, mask), move in zip(found, moves, strict=True):
        for name, tensor in tensors.items():
            begin, size = tensor.data_ptr(), tensor.itemsize
            if begin <= where.min() < begin + tensor.nbytes:
                place = np.where(mask, (where.astype(np.int64) - begin) // size, -1)
                thread, register = move.layout.owners(move.shape)
                instruction = register // max(1, move.width // size)
                result.append(Access(kind, name, place, thread, instruction, move.width, size))
    return result


DOWN_THE_HEADS = Layout(each=(1, 1), lanes=(16, 2), warps=(1, 4), order=(0, 1))


def strided_in_record(moves: Sequence[Move]) -> list[Move]:
    """The moves of step 4 by Triton 3.6, of the records: its strided tiles lie down the heads.

    A test compares them with the sectors that Nsight Compute counted there, and with Triton 3.6 where it is installed.
    """
    return [replace(move, layout=DOWN_THE_HEADS) if move.width == 2 else move for move in moves]


def sectors(found: Sequence[Access], kind: str) -> float:
    """The sectors of a request of all loads, or of all stores, on average."""
    return float(np.mean([len(request) for each in found if each.kind == kind for request in each.requests()]))


@contextmanager
def _addresses() -> Iterator[list[tuple[str, np.ndarray, np.ndarray]]]:
    """Note the kind, the addresses and the mask of each load and store of a tile that the interpreter runs."""
    found: list[tuple[str, np.ndarray, np.ndarray]] = []
    load, store = interpreter_builder.create_masked_load, interpreter_builder.create_masked_store

    def note(kind: str, pointers: Any, mask: Any) -> None:
        if pointers.data.size > 1:
            found.append((kind, pointers.data.copy(), np.broadcast_to(mask.data, pointers.data.shape)))

    def noted_load(pointers: Any, mask: Any, *rest: Any, **options: Any) -> Any:
        note("load", pointers, mask)
        return load(pointers, mask, *rest, **options)

    def noted_store(pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        note("store", pointers, mask)
        return store(pointers, value, mask, *rest)

    interpreter_builder.create_masked_load, interpreter_builder.create_masked_store = noted_load, noted_store
    try:
        yield found
    finally:
        interpreter_builder.create_masked_load, interpreter_builder.create_masked_store = load, store
