"""This file defines a study: the function that measures it, and the facts that the scheduler needs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd

GIB = 2**30


@dataclass(frozen=True)
class Study:
    """Called with ``smoke`` it measures, and returns the table that is recorded.

    Attributes:
        table: function of ``smoke`` that returns the table; if there is an ``untimed`` part, of what that found and of
            ``smoke``. With nothing found (``{}``) it runs as well.
        gpu_gib: GiB that torch reserves on the GPU at most while others run beside it: of every workload there are then
            as few sets of buffers as can be, and the check against float64 takes the most. Records say what was seen
            (``parameters.gpu_bytes.beside``), and a test holds this number to them.
        untimed: function of ``smoke``: a part that looks at no clock and may run beside others; what it finds, by key.
        timed: whether times are in the table. Where there are none, all of it is measured beside others.
        wide: no claim and no table of README needs it: measured if it is named only.
    """

    table: Callable[..., pd.DataFrame]
    gpu_gib: float
    untimed: Callable[..., Mapping[Any, Any]] | None = None
    timed: bool = True
    wide: bool = False

    @property
    def gpu_bytes(self) -> int:
        return round(self.gpu_gib * GIB)

    @property
    def modules(self) -> set[str]:
        """The names of the modules whose functions measure."""
        return {_module(function) for function in (self.table, self.untimed) if function}

    def __call__(self, *, smoke: bool = False) -> pd.DataFrame:
        return self.table(smoke=smoke) if self.untimed is None else self.table(self.untimed(smoke=smoke), smoke=smoke)


def _module(function: Callable[..., Any]) -> str:
    while isinstance(function, partial):
        function = function.func
    return function.__module__
