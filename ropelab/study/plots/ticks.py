"""Write the numbers along an axis."""

from collections.abc import Iterable

from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator


def at(axis: Axis, values: Iterable[float], write="{:,.0f}".format) -> None:
    """Put ticks at ``values`` only, with texts by ``write``."""
    axis.set_major_locator(FixedLocator(list(values)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: write(value)))
    axis.set_minor_locator(NullLocator())


def plain_log(axis: Axis) -> None:
    """Put ticks at powers of ten, their doubles and halves, as plain numbers: 20, 50, 100, 200."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_locator(NullLocator())
