"""Draw the record ``paged_cache``: the one pass beside the roof."""

from collections.abc import Callable

import pandas as pd
from matplotlib.figure import Figure

from ropelab.bench.names import PREFIX
from ropelab.study.plots import drawing, marks
from ropelab.study.plots.looks import CONTENDERS
from ropelab.study.plots.panels import LAYOUT, facet
from ropelab.study.topics.one_pass import findings
from ropelab.study.topics.one_pass.findings import FLASHINFER, ONE, RECORD, SEPARATE, VLLM

LOOKS = CONTENDERS.extended({
    ONE: ("", 0, "o"), SEPARATE: ("", 9, "P"), VLLM: ("vLLM, one launch", 1, "D"),
    FLASHINFER: ("FlashInfer, one launch", 4, "X"), findings.PLACES: ("", 7, "d"),
})  # fmt: skip
_BAR = {"color": "black", "linewidth": 1.6, "label": f"bar, {findings.LEAST_OF_COPY}"}
LINE = 3
"""The fewest numbers of tokens that make a line."""


def roof(frame: pd.DataFrame, footer: str = "") -> Figure:
    """The speed of every contender as a fraction of the best copy, against the number of tokens.

    The title of a panel has the heads of q and the heads that the operation reads beside q.
    """
    rows = drawing.noisy(RECORD, frame)
    several = rows.groupby(findings.CELL).tokens.transform("nunique") >= LINE
    rows = _named(rows[several] if several.any() else rows)
    title = drawing.title(findings.roof_sentence, frame)
    panels = facet(rows, (4.6, 3.2), title, footer, column="cell", row="gpu", words={}, sharey=True)
    for ax, panel, _ in panels:
        tokens = sorted(panel.tokens.unique())
        for name in _contenders(panel):
            points = panel[panel.contender == name].sort_values("tokens")
            at = [tokens.index(count) for count in points.tokens]
            marks.line(ax, at, points.fraction_of_copy, LOOKS(name), markersize=7)
            ax.vlines(at, points.fraction_of_copy / points.high, points.fraction_of_copy / points.low,
                      color=LOOKS.color(name), linewidth=1.2)  # fmt: skip
        ax.set_xticks(range(len(tokens)), map("{:,}".format, tokens))
        ax.set_ylim(0, max(1.12, 1.1 * panel.fraction_of_copy.max()))
        ax.axhline(findings.LEAST_OF_COPY, **_BAR)
        marks.one(ax, upright=False)
    return panels.finish("tokens", "fraction of the best copy", legend=2, untimed=frame)


def cases(frame: pd.DataFrame, footer: str = "") -> Figure:
    """Every operation, format and number of heads of the record, for one number of tokens."""
    rows = _named(findings.many_tokens(drawing.noisy(RECORD, frame)))
    place = marks.places(rows.cell)

    first = rows[(rows.contender == ONE) & (rows.gpu == rows.gpu.iloc[0])]
    reached = drawing.value_range(first.fraction_of_copy)
    title = f"{rows.gpu.iloc[0]}, {rows.tokens.iloc[0]:,} tokens: one launch runs at {reached} of the best copy"
    panels = facet(rows, (4.4, 0.5 * len(place) + 1.0), title, footer, column="gpu", sharey=True)
    for ax, panel, _ in panels:
        for name in _contenders(panel):
            found = drawing.spans(panel[panel.contender == name], "cell", "fraction_of_copy", speed=True)
            marks.spans(ax, place[found.index], found, LOOKS(name), upright=False, markersize=8)
        ax.axvline(findings.LEAST_OF_COPY, **_BAR)
        marks.one(ax)
        marks.rows(ax, place)
        one = panel[panel.contender == ONE]
        marks.beside(ax, [1.0] * len(one), place[one.cell], map("{:.2f}".format, one.fraction_of_copy),
                     xycoords=marks.ACROSS)  # fmt: skip
    return panels.finish("fraction of the best copy", legend=4, untimed=frame)


def _contenders(rows: pd.DataFrame) -> list[str]:
    return LOOKS.ordered(name for name in rows.contender if not name.startswith(PREFIX))


def _named(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with a column ``cell``: operation; heads, layout and formats that the inputs do not have."""
    names = []
    for row in rows.to_dict("records"):
        heads = f"{row['q_heads']} + {row['k_heads']} heads of {row['head_dim']}, {LAYOUT[row['layout']]}"
        formats = [
            f"{words} in 8 bits"
            for name, words in (("cache", "cache"), ("q_out", "q"))
            if row[name].startswith("float8")
        ]
        names.append("\n".join((row["operation"], ", ".join((heads, *formats)))))
    return rows.assign(cell=names)


FIGURES: dict[str, tuple[tuple[str, ...], Callable[..., Figure]]] = {
    "one_pass_roof": ((RECORD,), roof),
    "one_pass_cases": ((RECORD,), cases),
}
"""The name of a figure -> the studies, and the function that draws their tables with a footer."""
