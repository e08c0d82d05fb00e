"""The rules that lead from measured numbers to an outcome: one for every claim of every document.

A cell is one configuration of a claim: a shape, a dtype, a version. First each cell is judged: by `size`, `above`,
`below` or `near`, or as a fact. Then `counted` makes one outcome of all cells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Sized
from dataclasses import replace
from typing import TypeVar

from ropelab.study.engine.noise import Interval
from ropelab.study.engine.verdict import FAILS, HOLDS, Outcome, Quantifier, Untold, Verdict, fact, untold

Found = TypeVar("Found", bound=Sized)

SMALLEST, LARGEST = 1 / 2, 2
"""The limits of an effect of another size, in stated effects. An effect is the distance from "no effect"."""
NARROW = 1 / 2
"""The width of the widest interval that can tell that a stated effect holds, in stated effects."""
NEGLIGIBLE = 0.05
"""The largest relative difference that counts as no effect, where a claim states that there is none."""

NARROWER = "times with narrower intervals"


def needed(found: Found, needs: str) -> Found:
    """The evidence itself, if it is not empty.

    Raises:
        Untold: the evidence is empty; ``needs`` names the evidence that would tell.
    """
    if not len(found):
        raise Untold(needs)
    return found


def size(effect: Interval, stated: float, *, digits: int = 2, no_effect: float = 1.0) -> Verdict:
    """The verdict on a claim that states the size of an effect.

    - The interval contains the stated size, as it was rounded for print: the claim holds if the interval is `NARROW`,
      else it is undecided.
    - All of the interval lies beyond `SMALLEST` and `LARGEST` times the stated effect: the claim does not hold.
    - The interval contains "no effect": it is undecided.
    - Otherwise the claim holds with another size.

    Args:
        effect: the measured size, such as a ratio of times.
        stated: the size that the document prints.
        digits: the decimals of the printed size, which may be off by half of its last decimal.
        no_effect: the size that means that there is no effect: 1 for a ratio, 0 for a time or a share.
    """
    half, whole = 0.5 * 10.0**-digits, stated - no_effect
    if effect.low <= stated + half and effect.high >= stated - half:
        return HOLDS if effect.high - effect.low <= NARROW * abs(whole) else untold(NARROWER)
    least, most = sorted(no_effect + limit * whole for limit in (SMALLEST, LARGEST))
    if effect.high < least or effect.low > most:
        return FAILS
    if no_effect in effect:
        return untold(NARROWER)
    return Verdict(Outcome.OTHER_SIZE, size=effect.value / stated)


def within(effect: Interval, low: float, high: float, *, step: float = 0.01, no_effect: float = 1.0) -> Verdict:
    """The verdict on a claim that states a range of sizes, of which the ends are rounded to multiples of ``step``.

    An interval within the range holds, and one across an end is undecided. Else `size` compares with the nearer end.
    """
    half = step / 2
    if low - half <= effect.low and effect.high <= high + half:
        return HOLDS
    if effect.low <= high + half and effect.high >= low - half:
        return untold(NARROWER)
    return size(effect, low if effect.value < low else high, no_effect=no_effect)


def near(effect: Interval, value: float = 1.0) -> bool | None:
    """Whether a number differs from ``value`` by at most `NEGLIGIBLE`; None where the interval has such a limit."""
    least, most = value * (1 - NEGLIGIBLE), value * (1 + NEGLIGIBLE)
    if least <= effect.low and effect.high <= most:
        return True
    return False if effect.high < least or effect.low > most else None


def above(effect: Interval, threshold: float) -> bool | None:
    """Whether the number is above the threshold; None where the threshold lies within the number's interval."""
    return None if threshold in effect else effect.value > threshold


def below(effect: Interval, threshold: float) -> bool | None:
    """Whether the number is below the threshold; None where the threshold lies within the number's interval."""
    return None if threshold in effect else effect.value < threshold


def counted(found: Sequence[Verdict | bool | None], quantifier: Quantifier, needs: str = NARROWER) -> Verdict:
    """The verdict on a claim about cells, from the verdict on each cell: True, False, None (undecided) or a `Verdict`.

    Undecided cells count nowhere; the verdict has their number. A cell that holds with another size holds: if no cell
    fails, the size of the verdict is the geometric mean of all cells. A counterexample ends a claim of all, only or
    never. A claim of most holds if more than half of the cells hold. Else the verdict counts the cells that hold.

    Args:
        needs: the missing evidence, where no cell can be told.
    """
    each = [x if isinstance(x, Verdict) else untold(needs) if x is None else fact(bool(x)) for x in found]
    told = [x for x in each if x.outcome is not Outcome.UNTOLD]
    failing = sum(x.outcome is Outcome.FAILS for x in told)
    holding = len(told) - failing
    if not told:
        return untold(needs)
    if quantifier is Quantifier.MOST:
        verdict = fact(holding > failing)
    elif not failing:
        mean = math.prod(x.size or 1.0 for x in told) ** (1 / len(told))
        other = any(x.outcome is Outcome.OTHER_SIZE for x in told)
        verdict = Verdict(Outcome.OTHER_SIZE, size=mean) if other else HOLDS
    elif not holding or quantifier.strict:
        verdict = FAILS
    else:
        verdict = Verdict(Outcome.SOME_CELLS, cells=(holding, len(told)))
    return replace(verdict, undecided=len(each) - len(told))
