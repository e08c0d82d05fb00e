"""Judge a claim that is a comparison: a quantity, in the cells of a grid, against a limit; or a fact in each row.

A test of ``data/claims/<document>.toml`` says which rows of a record are compared, and with what:

    [[claim.test]]
    record = "fairseq2_grid"                   # the record, or computed evidence
    where = "mode == 'compiled'"               # the rows (`ropelab.study.engine.expressions`)
    over = "RRE reference"                     # the time of this contender ...
    under = "RE reference"                     # ... over the time of this one; without it the time itself
    cell = ["batch", "seq_len"]                # the columns that name a cell
    cells = 27                                 # the number of cells that there must be
    protocol = "document"                      # timed as the document does it
    stated = 0.66                              # the limit: the printed size

``over`` and ``under`` may be tables of columns and values in place of a contender. The limit is one of

- ``stated``: the size that the document prints, or ``"evidence.column"`` with a printed size for each cell
- ``within``: the range that the document prints
- ``above``, ``below``: a threshold
- ``near``: the value from which the quantity hardly differs

A test of facts has ``expect`` in place of a limit: columns and the value that each row must have there. A value with
``*`` is a pattern. Every row is a cell.

A test by the document's protocol may decide the claim. A test by a ``corrected`` one stands beyond the document.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatch
from functools import partial
from typing import Any

import pandas as pd

from ropelab.bench.rows import is_right
from ropelab.study.engine import judging, noise
from ropelab.study.engine.expressions import evaluated, selected
from ropelab.study.engine.noise import Interval
from ropelab.study.engine.verdict import HOLDS, Quantifier, Untold, Verdict
from ropelab.study.engine.words import value_range

PROTOCOLS = DOCUMENT, CORRECTED = "document", "corrected"
LIMITS = ("stated", "within", "above", "below", "near", "expect")
FEW = 8
"""The most cells whose values a sentence lists."""

Frames = Mapping[str, pd.DataFrame]


@dataclass(frozen=True)
class Comparison:
    """A test of a claim.

    Attributes:
        claim: the id of the claim.
        record, where, over, under, cell, cells, expect: see the head of the module. ``cells = 0`` takes any number of
            cells.
        only: a second query of rows, for all tests of a document.
        quantity: an expression of columns, such as ``"buffers - result_buffers"``, in place of the time.
        scale: the unit of the quantity in units of the record: 1000 for milliseconds.
        take: ``"each"`` cell, the geometric ``"mean"`` of cells, or the ``"largest"`` of them.
        of: the columns whose cells a mean or a largest value keeps apart.
        protocol: one of `PROTOCOLS`.
        fails: whether contenders may fail in some cells, which then do not count.
        stated, within, above, below, near: the limit.
        step: the multiples to which the ends of a range are rounded.
        digits: the decimals of printed sizes; by default as many as they show.
        no_effect: the size that means that there is no effect; by default 1 for a ratio, else 0.
        what: the test in words.
    """

    claim: str
    record: str
    cell: tuple[str, ...]
    over: Mapping[str, Any] = field(default_factory=dict)
    under: Mapping[str, Any] | None = None
    where: str = ""
    cells: int = 0
    quantity: str = ""
    scale: float = 1.0
    take: str = "each"
    of: tuple[str, ...] = ()
    protocol: str = DOCUMENT
    fails: bool = False
    stated: float | str | None = None
    within: tuple[float, float] | None = None
    step: float = 0.01
    above: float | None = None
    below: float | None = None
    near: float | None = None
    expect: Mapping[str, Any] | None = None
    only: str = ""
    digits: int | None = None
    no_effect: float | None = None
    what: str = ""

    @classmethod
    def read(cls, claim: str, table: Mapping[str, Any]) -> Comparison:
        """The test that a table of the file states.

        Raises:
            ValueError: the table has an unknown key, lacks one, or has not exactly one limit.
        """
        known = {each.name for each in fields(cls)} - {"claim"}
        if unknown := table.keys() - known:
            raise ValueError(f"{claim}: expected the keys {sorted(known)} of a test, got {sorted(unknown)}")
        if missing := {"record", "cell", "protocol"} - table.keys():
            raise ValueError(f"{claim}: a test lacks {sorted(missing)}")
        if len(limits := table.keys() & {*LIMITS}) != 1:
            raise ValueError(f"{claim}: expected one of {LIMITS} in a test, got {sorted(limits)}")
        if table.get("take", "each") not in ("each", "mean", "largest"):
            raise ValueError(f"{claim}: take: expected each, mean or largest, got {table['take']!r}")
        if table["protocol"] not in PROTOCOLS:
            raise ValueError(f"{claim}: protocol: expected one of {PROTOCOLS}, got {table['protocol']!r}")
        rows = {key: _columns(table[key]) for key in ("over", "under") if table.get(key)}
        lists = {key: tuple(table[key]) for key in ("cell", "of", "within") if key in table}
        return cls(claim, **{**table, "under": None, **rows, **lists})

    @property
    def evidence(self) -> list[str]:
        """The names of the evidence that the test needs."""
        return [self.record, *([self.stated.split(".")[0]] if isinstance(self.stated, str) else [])]

    def judge(
        self, frames: Frames, needs: str, *, own_gpu: bool = False, off: float = 0.0
    ) -> tuple[list[Verdict | bool | None], str]:
        """The verdict on each cell, and the measured values in words.

        Args:
            own_gpu: as `judging.size` takes it.
            off: the relative distance of a library of this project from the published one (`judging.of_build`).

        Raises:
            Untold: the record lacks a cell; the message begins with ``needs``.
            ValueError: a frame lacks a column that the test names.
        """
        if self.expect is not None:
            return self._facts(frames, needs)
        found, values, turned = [], self.values(frames, needs), 0
        for cell, value in values.items():
            one, other = (self._verdict(cell, x, frames, own_gpu) for x in (value, value.off_by(off)))
            verdict = judging.of_build(one, other)
            turned += verdict is HOLDS and one is not HOLDS
            found.append(verdict)
        within = f"; {turned} of {len(found)} cells hold within the {off:.1%} that our build is off" if turned else ""
        return found, self._words(values) + within

    def _facts(self, frames: Frames, needs: str) -> tuple[list[Verdict | bool | None], str]:
        assert self.expect is not None
        rows = self._rows(frames[self.record], {*self.cell, *self.expect})
        if not len(rows) or (self.cells and len(rows) != self.cells):
            raise Untold(f"{needs} ({len(rows)} of {self.cells or 'any'} cells in {self.record})")
        found = pd.DataFrame({name: rows[name].map(partial(_is, value)) for name, value in self.expect.items()})
        right = found.all(axis=1)
        words = self.what or ", ".join(f"{name} {value}" for name, value in self.expect.items())
        said = f"{words}: {right.sum()} of {len(right)} cells"
        if len(rows) <= FEW or 0 < (~right).sum() <= FEW:
            shown = (rows if len(rows) <= FEW else rows[~right]).astype(object).fillna("")
            said += " (" + "; ".join(
                " ".join(map(str, row)) for row in shown[list(dict.fromkeys([*self.cell, *self.expect]))].values
            ) + ")"  # fmt: skip
        return list(right), said

    def values(self, frames: Frames, needs: str = "") -> dict[tuple, Interval]:
        """The quantity in each cell: a cell's values -> interval."""
        rows = self._rows(frames[self.record], {*self.cell, *self.of, *self.over, *(self.under or ())})
        sides = [_select(rows, side) for side in (self.over, self.under) if side is not None]
        found = [self._by_cell(side[is_right(side)]) for side in sides]
        if self.under is None:
            values = {cell: (noise.exact if self.quantity else noise.time)(value) for cell, value in found[0].items()}
        elif self.quantity:
            values = {cell: noise.exact(over / found[1][cell]) for cell, over in found[0].items() if cell in found[1]}
        else:
            values = {cell: noise.ratio(over, found[1][cell]) for cell, over in found[0].items() if cell in found[1]}
        expected = self.cells or max(len(self._by_cell(side, values=False)) for side in sides)
        if not values or (len(values) != expected and not self.fails):
            raise Untold(f"{needs} ({len(values)} of {expected or 'any'} cells in {self.record})")
        values = {cell: value / noise.exact(self.scale) for cell, value in values.items()}
        return values if self.take == "each" else self._taken(values)

    def _rows(self, frame: pd.DataFrame, used: set[str]) -> pd.DataFrame:
        if missing := sorted(used - {*frame}):
            raise ValueError(f"{self.claim}: {self.record}: expected the columns {missing}, got {sorted(frame)}")
        for expression in (self.only, self.where):
            try:
                frame = selected(frame, expression)
            except ValueError as error:
                raise ValueError(f"{self.claim}: {self.record}: {error}") from error
        return frame

    def _by_cell(self, rows: pd.DataFrame, *, values: bool = True) -> dict[tuple, Any]:
        """Cell -> the number of the quantity or the timed row; an error where two rows are one cell.

        Without ``values`` every cell counts, even one without a number.
        """
        try:
            numbers = evaluated(rows, self.quantity or "median_us")
        except ValueError as error:
            raise ValueError(f"{self.claim}: {self.record}: {error}") from error
        found: dict[tuple, Any] = {}
        cells = zip(*(rows[name] for name in self.cell), strict=True)
        for cell, number, (_, row) in zip(cells, numbers, rows.iterrows(), strict=True):
            if cell in found:
                raise ValueError(f"{self.claim}: {self.record}: expected one row of a cell, got several of {cell}")
            if not values or not pd.isna(number):
                found[cell] = float(number) if self.quantity else row
        return found

    def _taken(self, values: dict[tuple, Interval]) -> dict[tuple, Interval]:
        groups: dict[tuple, list[Interval]] = {}
        for cell, value in values.items():
            groups.setdefault(tuple(cell[self.cell.index(name)] for name in self.of), []).append(value)
        take = noise.mean if self.take == "mean" else lambda found: max(found, key=lambda x: x.value)
        return {cell: take(found) for cell, found in groups.items()}

    def _verdict(self, cell: tuple, value: Interval, frames: Frames, own_gpu: bool) -> Verdict | bool | None:
        if self.above is not None:
            return judging.above(value, self.above)
        if self.below is not None:
            return judging.below(value, self.below)
        if self.near is not None:
            return judging.near(value, self.near)
        no_effect = self.no_effect if self.no_effect is not None else float(self.under is not None)
        how = {"no_effect": no_effect, "own_gpu": own_gpu}
        if self.within is not None:
            half = self.step / 2
            return judging.within(value, *(Interval(end - half, end, end + half) for end in self.within), **how)
        stated = self.printed(cell, frames)
        if no_effect and no_effect in stated.widened(noise.FLOOR):
            return judging.near(value, no_effect)  # the document prints that there is no effect
        return judging.size(value, stated, **how)

    def printed(self, cell: tuple, frames: Frames) -> Interval:
        """The size that the document prints for a cell."""
        if not isinstance(self.stated, str):
            assert self.stated is not None
            number, digits = float(self.stated), _decimals(self.stated)
        else:
            name, column = self.stated.split(".")
            rows = frames[name]
            for key, value in zip(self.of if self.take != "each" else self.cell, cell, strict=True):
                if key in rows:
                    rows = rows[rows[key] == value]
            if column not in rows or len(rows) != 1:
                raise ValueError(f"{self.claim}: expected one {self.stated} for {cell}, got {len(rows)}")
            number, digits = float(rows[column].iloc[0]), max(map(_decimals, frames[name][column]))
        return judging.printed(number, digits if self.digits is None else self.digits)

    def _words(self, values: dict[tuple, Interval]) -> str:
        words = self.what or " over ".join(
            " ".join(map(str, side.values())) for side in (self.over, self.under) if side is not None
        )
        names = self.cell if self.take == "each" else self.of
        varied = [i for i in range(len(names)) if len({cell[i] for cell in values}) > 1]
        if len(values) > FEW:
            median = pd.Series([x.value for x in values.values()]).median()
            return f"{words}: {value_range(values.values(), '.3g')} in {len(values)} cells, median {median:.3g}"
        each = [
            f"{value}" + (f" at {' '.join(f'{names[i]} {cell[i]}' for i in varied)}" if varied else "")
            for cell, value in values.items()
        ]
        return f"{words}: {', '.join(each)}"


def judged(
    tests: Sequence[Comparison], frames: Frames, quantifier: Quantifier, needs: str,
    *, own_gpu: bool = False, off_by: Callable[[Comparison], float] = lambda test: 0.0,
) -> Verdict:  # fmt: skip
    """The verdict on a claim by its tests, whose cells count together.

    Args:
        off_by: what the builds that a test times are off by (`ropelab.study.engine.builds.Built.off_in`).
    """
    cells, words, off = [], [], 0.0
    for test in tests:
        off = off_by(test)
        found, said = test.judge(frames, needs, own_gpu=own_gpu, off=off)
        cells += found
        words.append(said)
    missing = f"{needs}, with narrower intervals than ours"
    if off:
        missing = f"{needs}, with a build of the code that takes the published library's time (ours is {off:.1%} off)"
    return replace(judging.counted(cells, quantifier, missing), measured="; ".join(words))


def _is(expected: Any, value: Any) -> bool:
    return fnmatch(str(value), expected) if isinstance(expected, str) else bool(value == expected)


def _columns(side: str | Mapping[str, Any]) -> Mapping[str, Any]:
    return {"contender": side} if isinstance(side, str) else side


def _select(rows: pd.DataFrame, side: Mapping[str, Any]) -> pd.DataFrame:
    for column, value in side.items():
        rows = rows[rows[column] == value]
    return rows


def _decimals(number: float) -> int:
    """The decimals that a printed number shows: 2 of 1.12."""
    return len(str(number).partition(".")[2]) if float(number) % 1 else 0
