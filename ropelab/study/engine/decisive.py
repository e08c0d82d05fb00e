"""Fill in the sentence that names the decisive numbers of a claim.

The field ``says`` of a claim is a format string. Its placeholders are computed from the evidence, so no number of a
verdict is typed:

- ``{test[0].least}``, ``{beyond[1].most}``: a number of a test, see `Numbers`
- ``{test[0][128]}``: the value of one cell, named by the columns in which the cells differ, as ``split_half 4``
- ``{longest}``: a number that the rule of the claim gave its verdict (`engine.verdict.Verdict.numbers`)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import pandas as pd

from ropelab.study.engine import judging
from ropelab.study.engine.claims import Claim
from ropelab.study.engine.comparisons import Comparison
from ropelab.study.engine.verdict import Outcome, Untold, Verdict


class Numbers:
    """The numbers of a test of a claim.

    Attributes:
        least, most, median: of the compared values, in the unit of the test.
        cells, right, wrong, undecided: the number of cells; of those in which the claim holds as stated, and in which
            it does not hold; and of those that the noise leaves open.
    """

    def __init__(self, test: Comparison, frames: Mapping[str, pd.DataFrame]):
        self._test, self._frames = test, frames

    def __getitem__(self, cell: str | int) -> float:
        return self._each[str(cell)]

    @cached_property
    def _each(self) -> dict[str, float]:
        found = {cell: value.value for cell, value in self._test.values(self._frames).items()}
        varied = [i for i, column in enumerate(zip(*found, strict=True)) if len({*column}) > 1]
        return {" ".join(str(cell[i]) for i in varied): value for cell, value in found.items()}

    @cached_property
    def _judged(self) -> list[Outcome]:
        found, _ = self._test.judge(self._frames, "")
        return [judging.of_cell(one).outcome for one in found]

    @property
    def least(self) -> float:
        return min(self._each.values())

    @property
    def most(self) -> float:
        return max(self._each.values())

    @property
    def median(self) -> float:
        return float(pd.Series(self._each).median())

    @property
    def cells(self) -> int:
        return len(self._judged)

    @property
    def undecided(self) -> int:
        return self._judged.count(Outcome.UNTOLD)

    @property
    def wrong(self) -> int:
        return self._judged.count(Outcome.FAILS)

    @property
    def right(self) -> int:
        return self._judged.count(Outcome.HOLDS)


def sentence(claim: Claim, frames: Mapping[str, pd.DataFrame], verdict: Verdict) -> str:
    """The sentence of the claim with its placeholders filled; "" where the evidence lacks a cell.

    Raises:
        KeyError, IndexError, AttributeError: a placeholder that neither the tests nor the rule of the claim have.
    """
    tests = {kind: [Numbers(one, frames) for one in getattr(claim, kind)] for kind in ("test", "beyond")}
    further = verdict.beyond.numbers if verdict.beyond else {}
    try:
        return claim.says.format(**tests, **{**further, **verdict.numbers})
    except Untold:
        return ""
    except KeyError:
        if verdict.outcome is Outcome.UNTOLD:  # the rule lacked evidence
            return ""
        raise
