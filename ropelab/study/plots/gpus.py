"""Draw the records of several GPUs in one panel: a colour and a marker for each GPU, with intervals."""

import textwrap
from collections.abc import Iterator

import pandas as pd
from matplotlib.axes import Axes

from ropelab.bench import records
from ropelab.study.plots.looks import COLORBLIND
from ropelab.study.plots.panels import BETWEEN_RECORDS

_COLORS, _MARKERS = (0, 3, 2), "os^Dv"
"""The places of the colours in `COLORBLIND`, whose contrast to white is at least 3, and the markers of GPUs.

Their numbers have no common divisor, so that the looks of 15 GPUs differ.
"""

_LETTERS = 96
"""The letters of a line below a figure of 5.6 inches."""


def short(gpu: str) -> str:
    """``"NVIDIA H100 80GB HBM3"`` -> ``"H100"``; another name stays as it is."""
    name = gpu.removeprefix("NVIDIA ")
    return gpu if name == gpu else name.split()[0]


def together(study: str, where: records.Where) -> tuple[pd.DataFrame, str]:
    """The tables of a study from every GPU, with the column ``gpu``, and the footer of a figure of them.

    Raises:
        Unusable: as `records.of_each_gpu`.
    """
    found = records.of_each_gpu(study, where)
    frames = [record.frame.assign(gpu=short(record.provenance["gpu"]["name"])) for record in found]
    return pd.concat(frames, ignore_index=True), BETWEEN_RECORDS.join(map(_footer, found))


def _footer(record: records.Record) -> str:
    """The footer of a record, in lines that fit below a narrow figure."""
    name, *facts = record.footer.split(" · ")
    return BETWEEN_RECORDS.join(textwrap.wrap(" · ".join([short(name), *facts]), _LETTERS))


def parts(frame: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame, dict[str, object]]]:
    """The name, the rows and the look of each GPU."""
    for number, (gpu, rows) in enumerate(frame.groupby("gpu", sort=False)):
        color, marker = COLORBLIND[_COLORS[number % len(_COLORS)]], _MARKERS[number % len(_MARKERS)]
        yield str(gpu), rows, {"color": color, "marker": marker, "label": gpu}


def across(ax: Axes, x, y, low, high, look: dict, **style) -> None:
    """Draw points whose values lie along x, with intervals from ``low`` to ``high``."""
    ax.errorbar(x, y, xerr=[x - low, high - x], **({"linestyle": "none", "capsize": 2} | look | style))


def upright(ax: Axes, x, y, low, high, look: dict, **style) -> None:
    """Draw points whose values lie along y, joined by a line, with intervals from ``low`` to ``high``."""
    ax.errorbar(x, y, yerr=[y - low, high - y], **({"linewidth": 1.4, "capsize": 2} | look | style))
