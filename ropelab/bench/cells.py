"""Go through the cells of a study and show the progress, or through the cells that a caller chooses."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pandas as pd

from ropelab.progress import ProgressLine

Choose = Callable[[list], Iterable]
_choosing: list[Choose] = []
"""What the contexts of `chosen` choose by, the innermost last."""


@contextmanager
def chosen(choose: Choose) -> Iterator[None]:
    """Within the context `progress` yields what ``choose`` returns for its items."""
    _choosing.append(choose)
    try:
        yield
    finally:
        _choosing.pop()


def are_chosen() -> bool:
    """Whether `chosen` is active."""
    return bool(_choosing)


def progress(items: Iterable, describe: Callable[[Any], str]) -> Iterator:
    """Yield the items, and show after each item how long it took and how long the rest will take."""
    items, line = list(items), ProgressLine(sys.stdout, every=0)
    for number, item in enumerate(_choosing[-1](items) if _choosing else items, 1):
        started = time.monotonic()
        yield item
        seconds = time.monotonic() - started
        line.show(f"    {number:2}/{len(items)} {describe(item):40} {seconds:6.1f} s; {line.left(number, len(items))}")
    line.end()


def table(items: Iterable, measure: Callable[[Any], pd.DataFrame], describe: Callable[[Any], str]) -> pd.DataFrame:
    """The rows of all items, one item after the other."""
    return pd.concat([measure(item) for item in progress(items, describe)], ignore_index=True)
