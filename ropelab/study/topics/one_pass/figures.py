"""This file draws the figures of the one pass: its ceilings, and what the record ``paged_cache`` has under its roof."""

from collections.abc import Callable

import pandas as pd
from matplotlib.figure import Figure

from ropelab.bench.copies import PREFIX
from ropelab.study.plots import drawing, marks
from ropelab.study.plots.looks import COLORBLIND, CONTENDERS
from ropelab.study.plots.panels import LAYOUT, facet
from ropelab.study.topics.one_pass import findings
from ropelab.study.topics.one_pass.findings import CELL, ONE, RECORD, SEPARATE, VLLM

LOOKS = CONTENDERS.extended({ONE: ("", 0, "o"), SEPARATE: ("", 9, "P"), VLLM: ("vLLM, one launch", 1, "D")})


def ceilings(frame: pd.DataFrame, footer: str = "") -> Figure:
    """The most that one pass can be faster, against the heads of q for each head of k.

    Args:
        frame: `traffic.ceilings`.
        footer: as for the other figures.
    """
    title = findings.ceiling_sentence(frame).rstrip(".")
    words = {bits: f"cache in {bits} bits" for bits in frame.cache.unique()}
    panels = facet(frame, (5.4, 3.2), title, footer, column="cache", words=words, sharex=True, sharey=True)
    looks = (("o", 0), ("s", 1))
    for ax, panel, _ in panels:
        ratios = list(dict.fromkeys(panel.ratio))
        for (marker, place), (name, rows) in zip(looks, panel.groupby("launches", sort=False), strict=True):
            look = {"marker": marker, "color": COLORBLIND[place], "label": f"against {name}"}
            at = [ratios.index(ratio) for ratio in rows.ratio]
            marks.line(ax, at, rows.ceiling, look, markersize=7)
            marks.above(ax, at, rows.ceiling, map("{:.2f}".format, rows.ceiling))
        ax.set_xticks(range(len(ratios)), ratios)
        ax.set_ylim(0.9, frame.ceiling.max() + 0.25)
        marks.one(ax, upright=False)
    return panels.finish("heads of q for each head of k", "times as fast, at most", legend=2)


def roof(frame: pd.DataFrame, footer: str = "") -> Figure:
    """The speed of every contender as a fraction of the best copy of the bytes that must move.

    The title of a panel has the heads of q and the heads that the operation reads beside q.
    """
    rows = drawing.timed(frame)
    title = findings.roof_sentence(frame).replace("`", "").rstrip(".")
    if faster := findings.faster_sentence(frame):
        title += "\n" + faster.rstrip(".")
    rows = rows.assign(cell=[_cell(row) for row in rows[CELL].itertuples(index=False)])
    panels = facet(rows, (4.6, 3.4), title, footer, column="cell", wrap=3, words={}, sharey=True)
    for ax, panel, _ in panels:
        tokens = sorted(panel.tokens.unique())
        names = dict.fromkeys(panel[~panel.contender.str.startswith(PREFIX)].contender)
        for name in LOOKS.ordered(names):
            points = panel[panel.contender == name].sort_values("tokens")
            at = [tokens.index(count) for count in points.tokens]
            marks.line(ax, at, points.fraction_of_copy, LOOKS(name), markersize=7)
            numbered = points if name == ONE else points.tail(1)  # the numbers of few tokens would overlap
            marks.above(ax, at[-len(numbered) :], numbered.fraction_of_copy,
                        map("{:.2f}".format, numbered.fraction_of_copy))  # fmt: skip
        ax.set_xticks(range(len(tokens)), map("{:,}".format, tokens))
        ax.set_ylim(0, 1.12)
        marks.one(ax, upright=False)
    return panels.finish("tokens", "fraction of the best copy", legend=3, untimed=frame)


def _cell(cell) -> str:
    operation, q_heads, k_heads, head_dim, layout = cell
    return f"{operation}\n{q_heads} + {k_heads} heads of {head_dim}, {LAYOUT[layout]}"


FIGURES: dict[str, tuple[tuple[str, ...], Callable[..., Figure]]] = {"one_pass_roof": ((RECORD,), roof)}
"""Figure -> the studies it draws, and how: see ``plots.registry``."""
