"""The rules that lead from measured numbers to an outcome. A document's rules call them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Sized
from typing import TypeVar

from ropelab.study.engine.noise import Interval
from ropelab.study.engine.verdict import FAILS, HOLDS, Outcome, Quantifier, Untold, Verdict, untold

Found = TypeVar("Found", bound=Sized)
SMALLEST, LARGEST = 2 / 3, 3 / 2
"""The limits of the measured size over the stated size. Between them a claim can hold with another size."""


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

    - The interval contains the stated size, rounded as it was printed, and excludes "no effect": the claim holds.
    - The interval contains both: the measurement cannot tell.
    - The interval excludes the stated size, and the effect is there, on the stated side, within `SMALLEST` and
      `LARGEST` times the stated size: the claim holds with another size.
    - The interval contains "no effect", and at twice its width also the stated size: the measurement cannot tell.
    - Otherwise the claim does not hold.

    Args:
        effect: the measured size, such as a ratio of times.
        stated: the size that the document prints.
        digits: the decimals of the printed size, which may be off by half of its last decimal.
        no_effect: the size that means that there is no effect: 1 for a ratio, 0 for a difference.
    """
    half = 0.5 * 10.0**-digits
    agrees = effect.low <= stated + half and effect.high >= stated - half
    is_there = no_effect not in effect
    if agrees:
        return HOLDS if is_there else untold(f"times whose interval excludes no effect; it is {effect}")
    if is_there and (effect.value > no_effect) == (stated > no_effect):
        times = effect.value / stated
        return Verdict(Outcome.OTHER_SIZE, size=times) if SMALLEST <= times <= LARGEST else FAILS
    wide = effect.widened(2)
    if not is_there and wide.low <= stated + half and wide.high >= stated - half:
        return untold(f"times with a narrower interval than {effect}")
    return FAILS


def above(effect: Interval, threshold: float) -> bool | None:
    """Whether the number is above the threshold; None where the threshold lies within the number's interval."""
    return None if threshold in effect else effect.value > threshold


def longer(ratios: Iterable[Interval]) -> list[bool | None]:
    """For each ratio of two times, whether it is above 1; None where the noise leaves this open."""
    return [above(ratio, 1.0) for ratio in ratios]


def below(effect: Interval, threshold: float) -> bool | None:
    """Whether the number is below the threshold; None where the threshold lies within the number's interval."""
    return None if threshold in effect else effect.value < threshold


def counted(
    found: Sequence[bool | None], quantifier: Quantifier, needs: str = "times with narrower intervals"
) -> Verdict:
    """The verdict on a claim about cells, each of which holds, does not hold, or cannot be told (None).

    A counterexample ends a claim of all, only or never. Else the verdict counts the cells that hold. A cell that cannot
    be told counts as a cell that does not hold, unless no cell fails.

    Args:
        needs: the evidence that would tell, for cells that cannot be told.
    """
    if not found:
        return untold(needs)
    told = [bool(x) for x in found if x is not None]
    holding, failing = sum(told), len(told) - sum(told)
    if holding == len(found):
        return HOLDS
    if failing == len(found) or (failing and quantifier.strict):
        return FAILS
    if not failing and (quantifier.strict or not holding):
        return untold(needs)
    if not holding:
        return FAILS if failing > len(found) / 2 else untold(needs)
    return Verdict(Outcome.SOME_CELLS, cells=(holding, len(found)))


def sizes(verdicts: Sequence[Verdict], quantifier: Quantifier, needs: str = "times with narrower intervals") -> Verdict:
    """The verdict on a claim that states a size for each of several cells, from the verdicts of `size`.

    If all cells hold as stated, the claim holds. If all cells hold, some with another size, the claim holds with
    another size, the geometric mean of all. Otherwise the cells that hold as stated are counted.
    """
    if not verdicts:
        return untold(needs)
    outcomes = [verdict.outcome for verdict in verdicts]
    if all(outcome in (Outcome.HOLDS, Outcome.OTHER_SIZE) for outcome in outcomes):
        factors = [verdict.size or 1.0 for verdict in verdicts]
        if all(outcome is Outcome.HOLDS for outcome in outcomes):
            return HOLDS
        return Verdict(Outcome.OTHER_SIZE, size=math.prod(factors) ** (1 / len(factors)))
    told = {Outcome.HOLDS: True, Outcome.UNTOLD: None}
    return counted([told.get(outcome, False) for outcome in outcomes], quantifier, needs)
