"""A study: the function that measures it, and the facts that the scheduler needs."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

GIB = 2**30
CONTENDERS = ("contender", "operator", "version", "grids", "method")
"""The columns that name a contender; a table has the first of them that it has."""


@dataclass(frozen=True)
class Study:
    """A measurement. A call of the study measures, and returns the table to record.

    Attributes:
        table: a function of ``smoke`` that returns the table. If the study has an ``untimed`` part, the first argument
            of ``table`` is the result of this part; an empty result, ``{}``, is allowed. A study of minutes may yield
            its table as it grows. Each such table replaces the one before in the record.
        gpu_gib: the most GiB that torch reserves on the GPU for what measures no time, and for compiling. Workloads
            then have the fewest sets of buffers, and a timed study compares no large result with float64. A test
            compares this number with the records (``parameters.gpu_bytes.beside``).
        untimed: a function of ``smoke`` for the part of the study that measures no time. The part may run beside other
            studies, and returns its findings by key.
        timed: whether the table contains times. Such a study has the machine to itself while it is timed. A study
            without times is a test on a GPU, which writes its record (``pytest -m gpu --record``).
        wide: whether a timed study is measured only if the user names it. No claim and no table of README needs it.
        short: a function as ``table`` that measures a part of a wide study in at most a minute. ``make reproduce``
            measures this part, so that the book shows times of the GPU at hand.
        sources: gives the text of further code that the study measures, by name, which lies in no module.
        rows: the rows of the table of a whole run, those of one contender where contenders may be missing; 0 where they
            depend on the laws, models or packages at hand.
        kernels_unknown: why a record cannot name the kernels that the study launched; "" if it can.
    """

    table: Callable[..., pd.DataFrame | Iterator[pd.DataFrame]]
    gpu_gib: float
    untimed: Callable[..., Mapping[Any, Any]] | None = None
    timed: bool = True
    wide: bool = False
    short: Callable[..., pd.DataFrame] | None = None
    sources: Callable[[], Mapping[str, str]] | None = None
    rows: int = 0
    kernels_unknown: str = ""

    @property
    def gpu_bytes(self) -> int:
        return round(self.gpu_gib * GIB)

    @property
    def in_short(self) -> "Study":
        """The study that measures the short part, if there is one."""
        return replace(self, table=self.short, rows=0) if self.short else self

    @property
    def is_short(self) -> bool:
        """Whether this measures the short part of a wide study."""
        return self.short is not None and self.table is self.short

    @property
    def functions(self) -> list[str]:
        """The functions that measure, as ``"bench.dense.dense"``."""
        return [f"{f.__module__.partition('.')[2]}.{f.__qualname__}" for f in (self.table, self.untimed) if f]

    def other_rows(self, table: pd.DataFrame) -> str:
        """Why this is no table of a whole run; "" if the contender with most rows has as many as are stated."""
        column = next((name for name in CONTENDERS if name in table), None)
        found = len(table) if column is None else table[column].value_counts().max()
        if not self.rows or found == self.rows:
            return ""
        return f"expected {self.rows} rows{f' of each {column}' if column else ''}, got {found}"

    def __call__(self, *, smoke: bool = False) -> pd.DataFrame | Iterator[pd.DataFrame]:
        return self.table(smoke=smoke) if self.untimed is None else self.table(self.untimed(smoke=smoke), smoke=smoke)
