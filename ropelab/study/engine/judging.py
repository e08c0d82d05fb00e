"""The rules that lead from measured numbers to an outcome: one for every claim of every document.

A cell is one configuration of a claim: a shape, a dtype, a version. First each cell is judged: by `size`, `above`,
`below` or `near`, or as a fact. Then `counted` makes one outcome of all cells.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence, Sized
from dataclasses import replace
from typing import TypeVar

from ropelab.study.engine.noise import Interval
from ropelab.study.engine.verdict import FAILS, HOLDS, Outcome, Quantifier, Untold, Verdict, fact, untold

Found = TypeVar("Found", bound=Sized)

SMALLEST, LARGEST = 1 / 2, 2
"""The limits beyond which an effect of another size is another effect, in stated effects."""
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


def printed(number: float, digits: int) -> Interval:
    """A printed number, which may be off by half of its last decimal."""
    half = 0.5 * 10.0**-digits
    return Interval(number - half, number, number + half)


def size(effect: Interval, stated: Interval, *, no_effect: float = 1.0, own_gpu: bool = False) -> Verdict:
    """The verdict on a claim that states the size of an effect.

    The size of a ratio is its logarithm, so that the verdict on a ratio is that on its reciprocal. A time or a share is
    a size as it is. Sizes are counted in stated sizes: 1 is the stated one, 0 is no effect, and below 0 the effect is
    the opposite.

    - The interval contains the stated size: the claim holds if the interval is `NARROW`, else it is undecided.
    - The interval contains no effect or lies below it: the claim does not hold if the interval also lies below
      `SMALLEST`, else it is undecided.
    - Otherwise the effect is larger or smaller than stated, which refutes nothing. On the GPU that the document names,
      the stated number is missed beyond `SMALLEST` and `LARGEST`: the claim does not hold, and an interval across
      these limits is undecided.

    Args:
        effect: the measured size, such as a ratio of times.
        stated: the size that the document prints.
        no_effect: the size that means that there is no effect: 1 for a ratio, 0 for a time or a share.
        own_gpu: whether the document names a GPU for the claim, and the size was measured on one.
    """
    found = _in_stated(effect, stated, no_effect)
    if effect.low <= stated.high and effect.high >= stated.low:
        return HOLDS if found.high - found.low <= NARROW else untold(NARROWER)
    if found.low <= 0:
        return FAILS if found.high < SMALLEST else untold(NARROWER)
    if own_gpu and (found.high < SMALLEST or found.low > LARGEST):
        return FAILS
    if own_gpu and any(limit in found for limit in (SMALLEST, LARGEST)):
        return untold(NARROWER)
    larger = found.value > 1
    return Verdict(
        Outcome.LARGER if larger else Outcome.SMALLER, sizes=(found.value, found.value), ratio=bool(no_effect)
    )


def _in_stated(effect: Interval, stated: Interval, no_effect: float) -> Interval:
    """The size of an effect in stated sizes."""
    of = math.log if no_effect else float
    ends = [of(x) / of(stated.value) for x in (effect.low, effect.value, effect.high)]
    return Interval(*sorted(ends))


def within(
    effect: Interval, low: Interval, high: Interval, *, no_effect: float = 1.0, own_gpu: bool = False
) -> Verdict:
    """The verdict on a claim that states a range of sizes, whose ends are printed.

    An interval within the range holds, and one across an end is undecided. Else `size` compares with the nearer end.
    """
    if low.low <= effect.low and effect.high <= high.high:
        return HOLDS
    if effect.low <= high.high and effect.high >= low.low:
        return untold(NARROWER)
    nearer = low if effect.value < low.value else high
    return size(effect, nearer, no_effect=no_effect, own_gpu=own_gpu)


def near(effect: Interval, value: float = 1.0) -> bool | None:
    """Whether a number is ``value`` but for a factor of `NEGLIGIBLE`; None where the interval has such a limit."""
    least, most = value / (1 + NEGLIGIBLE), value * (1 + NEGLIGIBLE)
    if least <= effect.low and effect.high <= most:
        return True
    return False if effect.high < least or effect.low > most else None


def above(effect: Interval, threshold: float) -> bool | None:
    """Whether the number is above the threshold; None where the threshold lies within the number's interval."""
    return None if threshold in effect else effect.value > threshold


def below(effect: Interval, threshold: float) -> bool | None:
    """Whether the number is below the threshold; None where the threshold lies within the number's interval."""
    return None if threshold in effect else effect.value < threshold


def of_build(one: Verdict | bool | None, other: Verdict | bool | None) -> Verdict | bool | None:
    """The verdict on a cell that a build of this project timed, by its interval and by one wider by what it is off.

    The wider one decides between outcomes that refute nothing, as it does where it alone has the stated size. Between
    others that differ the cell is undecided.
    """
    outcomes = {of_cell(found).outcome for found in (one, other)}
    if len(outcomes) == 1:
        return one
    return other if outcomes <= {Outcome.HOLDS, Outcome.LARGER, Outcome.SMALLER} else None


def of_cell(found: Verdict | bool | None, needs: str = NARROWER) -> Verdict:
    """The verdict on a cell: True, False and None (undecided) are verdicts too."""
    return found if isinstance(found, Verdict) else untold(needs) if found is None else fact(bool(found))


def counted(found: Sequence[Verdict | bool | None], quantifier: Quantifier, needs: str = NARROWER) -> Verdict:
    """The verdict on a claim about cells, from the verdict on each cell: True, False, None (undecided) or a `Verdict`.

    A counterexample ends a claim of all, only or never. Otherwise most cells must be decided, or nothing is. A claim of
    most holds if more than half of all cells hold. A cell with an effect of another size refutes nothing: if no cell
    fails, the verdict has the least and the largest of these sizes, and is larger or smaller by their geometric mean.
    Else the verdict counts the cells that hold as stated, are larger and are smaller.

    Args:
        needs: the missing evidence, where too few cells can be told.
    """
    each = [of_cell(x, needs) for x in found]
    told = [x for x in each if x.outcome is not Outcome.UNTOLD]
    failing = sum(x.outcome is Outcome.FAILS for x in told)
    holding, undecided = len(told) - failing, len(each) - len(told)
    sizes = [size for x in told if x.sizes for size in x.sizes]
    if quantifier.strict and failing:
        verdict = FAILS
    elif 2 * len(told) <= len(each):
        return untold(needs)
    elif quantifier is Quantifier.MOST:
        if 2 * holding <= len(each) and 2 * failing < len(each):
            return untold(needs)
        verdict = fact(holding > failing)
    elif not holding:
        verdict = FAILS
    elif failing:
        outcomes = Counter(x.outcome for x in told)
        verdict = Verdict(Outcome.SOME_CELLS, cells={each: outcomes[each] for each in Outcome if outcomes[each]})
    elif sizes:
        larger, ratio = math.prod(sizes) > 1, all(x.ratio for x in told)
        verdict = Verdict(Outcome.LARGER if larger else Outcome.SMALLER, sizes=(min(sizes), max(sizes)), ratio=ratio)
    else:
        verdict = HOLDS
    return replace(verdict, undecided=undecided)
