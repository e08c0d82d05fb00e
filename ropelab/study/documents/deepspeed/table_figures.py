"""Draw the table of DeepSpeed#8052: speed-ups at the document's shapes beside the document's."""

from itertools import product

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ropelab.bench import records
from ropelab.study.plots import drawing, marks
from ropelab.study.plots.looks import CONTENDERS
from ropelab.study.plots.panels import grid
from ropelab.study.topics.performance.comparison import OURS

PUBLISHED = records.ROOT / "data" / "documents" / "deepspeed_8052_table.csv"

_BASELINES = {"eager": "the eager formula", "compile": "torch.compile"}
_PUBLISHED_LABEL = "published (GB10)"


def published_speedups(frame: pd.DataFrame, published: pd.DataFrame, footer: str = "") -> Figure:
    """The document's speed-ups of torchembed's kernel beside the speed-ups measured here, forward."""
    series = _speedups(frame, published)
    baselines = list(series)
    title = speedups_sentence(frame, published).partition(" and ")[0]
    panels = grid(1, max(1, len(baselines)), (5.2, 3.8), title, footer, sharey=True)
    for ax, baseline in zip(panels.axes[0], baselines, strict=True):
        table = series[baseline].sort_index()
        place = np.arange(len(table))
        marks.published(ax, place, table.pop(_PUBLISHED_LABEL), _PUBLISHED_LABEL, width=60)
        for name in sorted(table):
            bf16 = "bfloat16" in name
            look = CONTENDERS(name.split()[0]) | {"label": name, "marker": "o" if bf16 else "s"}
            marks.dots(ax, place + (-0.1 if bf16 else 0.1), table[name], look, markersize=8)
        ax.axhline(1, color="grey", linewidth=0.8)
        ax.set_xticks(place, [f"{s:,}" for s in table.index])
        ax.set(title=f"over {_BASELINES[baseline]}", xlim=(-0.5, len(place) - 0.5))
        ax.set_ylim(bottom=0)
    return panels.finish("sequence length (tokens)", "speed-up (times)", legend=3, size=7)


def _speedups(frame: pd.DataFrame, published: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The speed-ups over each baseline of the record, by sequence length: published, and here by kernel and dtype."""
    times = drawing.timed(frame)
    times = times[times.direction == "forward"]
    wide = times.pivot_table(index=["seq_len", "dtype"], columns="contender", values="median_us").reset_index()
    stated = published.set_index("seq_len")
    measured = [name for name in ("torchembed", OURS) if name in wide]
    series = {}
    for baseline in (name for name in _BASELINES if name in wide):
        rows = {_PUBLISHED_LABEL: stated[f"{baseline}_ms"] / stated.triton_ms}
        for (dtype, cells), name in product(wide.set_index("seq_len").groupby("dtype"), measured):
            rows[f"{name} here, {dtype}"] = cells[baseline] / cells[name]
        series[baseline] = pd.DataFrame(rows)
    return series


def speedups_sentence(frame: pd.DataFrame, published: pd.DataFrame | None = None) -> str:
    """The speed of torchembed's kernel over each baseline, forward, here and as published."""
    each = []
    for baseline, table in _speedups(frame, pd.read_csv(PUBLISHED) if published is None else published).items():
        here = table.filter(like="torchembed here").stack()
        times = f"{drawing.value_range(here, '.1f')} times as fast as" if len(here) else "not measured over"
        stated = drawing.value_range(table[_PUBLISHED_LABEL], ".1f")
        each.append(f"{times} {_BASELINES[baseline]} (published {stated} times)")
    return f"The forward of torchembed's kernel is {' and '.join(each)}."


FIGURES = {
    "published_speedups": (
        ("deepspeed_table",),
        lambda frame, footer: published_speedups(frame, pd.read_csv(PUBLISHED), footer),
    ),
}
"""The name of a figure -> the studies, and the function that draws their tables with a footer."""
