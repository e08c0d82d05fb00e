"""Draw the figures of the laws: faults that a law kills, blind laws, small covers, and laws of the peers.

Each function takes a result of `conformance_findings` and returns a figure. The title states the finding.
"""

import textwrap

import pandas as pd
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure

from ropelab.bench.conformance import NOT_RUN
from ropelab.conformance import LAWS
from ropelab.conformance.laws import THEMES as LAW_THEMES
from ropelab.study.faults import FAULTS
from ropelab.study.plots import marks
from ropelab.study.plots.looks import COLORBLIND
from ropelab.study.plots.panels import grid
from ropelab.study.topics.conformance import findings
from ropelab.study.topics.conformance.kill_matrix import kills

# Dark against light, so that the map is readable in grey print and for every kind of colour vision.
_BROKEN, _HOLDS, _NOT_ASKED, _NOTED = COLORBLIND[3], "#cfe0ee", "#f7f7f7", "#e9b872"
_SHADES = {"broken": _BROKEN, "holds": _HOLDS, "not applicable, or not asked": _NOT_ASKED, "to note": _NOTED}
_CODES = {"fail": 0, "error": 0, "pass": 1, "not applicable": 2, "note": 3}


def kill_matrix(matrix: pd.DataFrame, footer: str = "") -> Figure:
    """Every fault (rows, by theme) against every law (columns, by theme); right: the number of laws."""
    killed = kills(matrix)
    title = f"Every one of {len(matrix)} faults breaks a law" if killed.any(axis=1).all() else findings.sentence(matrix)
    fig, ax = _map(matrix, title, footer, left=4.3, names=[_citation(name) for name in matrix.index])
    themes = pd.Series([findings.theme_of(name) for name in matrix.index])
    _separate(ax, list(themes), horizontal=True)
    for theme, rows in themes.groupby(themes, sort=False):
        if len(rows) < 4:
            continue  # no room for the name
        middle, text = rows.index.values.mean(), theme.replace(" and ", "\nand ")
        marks.beside(ax, [1], [middle], [text], gap=106, xycoords=marks.ACROSS, ha="center", rotation=270)
    others = killed.drop(columns=findings.DEFINITION, errors="ignore").sum(axis=1)
    for row, name in enumerate(matrix.index):
        text = f"{killed.loc[name].sum()} laws" if killed.loc[name].sum() != 1 else "1 law"
        weight = "normal" if others[name] else "bold"
        marks.beside(ax, [1], [row], [text], xycoords=marks.ACROSS, size=7, fontweight=weight,
                     color="0.3" if weight == "normal" else _BROKEN)  # fmt: skip
    counts = killed.sum()
    ax.set_xlabel("faults that each law kills")
    for column, law in enumerate(matrix.columns):
        ax.annotate(str(counts[law]), (column, 0), (0, -4), xycoords=("data", "axes fraction"), va="top", ha="center",
                    textcoords="offset points", size=7)  # fmt: skip
    ax.xaxis.labelpad = 14
    return fig


def peers(frame: pd.DataFrame, footer: str = "") -> Figure:
    """Every implementation (rows) against every law (columns). The foot names the implementations not at hand."""
    rows = frame[frame.status != NOT_RUN]
    dtypes = rows.dtype.nunique() > 1
    names = rows.subject + (", " + rows.dtype if dtypes else "")
    matrix = rows.assign(name=names).pivot(index="name", columns="law", values="status")
    matrix = matrix.reindex(index=list(dict.fromkeys(names)), columns=[law for law in LAWS if law in set(rows.law)])
    broken = findings.violations(rows)
    right = rows.subject.nunique() - broken.subject.nunique()
    title = f"{right} of {rows.subject.nunique()} configurations keep every law that applies to them. " + (
        f"Most often broken is {broken.law.value_counts().idxmax()}" if len(broken) else "None is broken"
    )
    fig, ax = _map(matrix, title, footer, left=2.6)
    left_out = frame[frame.status == NOT_RUN].drop_duplicates("subject").groupby("message").subject.agg(" | ".join)
    if len(left_out):
        said = "; ".join(f"{names} ({reason})" for reason, names in left_out.items())
        ax.set_xlabel(textwrap.fill(f"not shown: {said}", 150), size=8, color="0.35", loc="left")
    return fig


# ---------------------------------------------------------------------------------------------------------- helpers


def _map(matrix: pd.DataFrame, title: str, footer: str, *, left: float, names=None):
    """A map of statuses with the laws in columns."""
    rows, columns = matrix.shape
    size = (left + 0.21 * columns + 1.6, 0.165 * rows + 2.0)
    panels = grid(1, 1, size, title, footer)
    ax = panels.axes[0, 0]
    codes = matrix.apply(lambda column: column.map(_CODES))
    colors = ListedColormap(list(_SHADES.values()))
    norm = BoundaryNorm([i - 0.5 for i in range(len(_SHADES) + 1)], colors.N)
    ax.pcolormesh(range(columns), range(rows), codes, cmap=colors, norm=norm, edgecolor="white", linewidth=0.8)
    ax.set_yticks(range(rows), matrix.index if names is None else names, size=7.5)
    ax.set_xticks(range(columns), matrix.columns, rotation=90, size=8)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5))
    ax.grid(False)
    _separate(ax, [_theme_of_law(law) for law in matrix.columns], horizontal=False)
    for text, color in _SHADES.items():
        ax.plot([], [], "s", color=color, markeredgecolor="0.7", label=text)
    return panels.finish(legend=len(_SHADES)), ax


def _separate(ax, groups: list[str], *, horizontal: bool) -> None:
    """Draw a line where the group changes."""
    for i, (one, other) in enumerate(zip(groups, groups[1:], strict=False)):
        if one != other:
            (ax.axhline if horizontal else ax.axvline)(i + 0.5, color="0.25", linewidth=0.9)


def _theme_of_law(law: str) -> str:
    return next(theme for theme, module in LAW_THEMES.items() if LAWS[law] in vars(module).values())


def _citation(name: str) -> str:
    """The name of the fault and the project that had it, without remarks."""
    seen_in = (FAULTS[name].seen_in or "").partition(" (")[0]
    return name.replace("_", " ") + (f"  ({seen_in})" if seen_in else "")
