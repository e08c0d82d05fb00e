"""A blocked layout of Triton: which thread of a program holds which element of a tile, in which register."""

import re
from dataclasses import dataclass

import numpy as np

WARP = 32
_NUMBERS = re.compile(r"(\w+) = \[([\d, ]*)\]")


@dataclass(frozen=True)
class Layout:
    """A blocked layout.

    Attributes:
        each: the elements of a thread along each axis.
        lanes: the threads of a warp along each axis.
        warps: the warps of a program along each axis.
        order: the axes; threads and registers count along the first of them first.
    """

    each: tuple[int, ...]
    lanes: tuple[int, ...]
    warps: tuple[int, ...]
    order: tuple[int, ...]

    @classmethod
    def of(cls, text: str) -> "Layout":
        """The layout in Triton's words, as ``"sizePerThread = [1, 8], threadsPerWarp = [4, 8], ..."``."""
        numbers = {name: tuple(map(int, found.split(","))) for name, found in _NUMBERS.findall(text)}
        return cls(*(numbers[name] for name in ("sizePerThread", "threadsPerWarp", "warpsPerCTA", "order")))

    def elements(self, shape: tuple[int, ...]) -> int:
        """The elements that a thread holds of a tile."""
        return int(self.owners(shape)[1].max()) + 1

    def owners(self, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """The thread and the register that hold each element. Of several threads with an element it is the first."""
        lane = warp = register = np.zeros(shape, dtype=int)
        lane_unit = warp_unit = register_unit = 1
        again = []
        for axis in self.order:
            index = np.arange(shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(shape))])
            each, lanes, warps = self.each[axis], self.lanes[axis], self.warps[axis]
            register = register + index % each * register_unit
            lane = lane + index // each % lanes * lane_unit
            warp = warp + index // (each * lanes) % warps * warp_unit
            register_unit *= min(each, shape[axis])
            lane_unit *= lanes
            warp_unit *= warps
            again.append((index // (each * lanes * warps), max(1, shape[axis] // (each * lanes * warps))))
        for index, times in again:  # a tile larger than the layout repeats it
            register = register + index * register_unit
            register_unit *= times
        return warp * WARP + lane, register


@dataclass(frozen=True)
class Move:
    """A load or a store of a tile, as it is compiled.

    Attributes:
        kind: "load" or "store".
        shape: of the tile.
        layout: how the tile lies in the threads.
        width: the bytes that a thread moves with one instruction.
    """

    kind: str
    shape: tuple[int, ...]
    layout: Layout
    width: int
