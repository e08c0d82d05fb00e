"""Figures of the measurements: each takes a record's table and returns a figure. Nothing is measured here.

Titles state the finding and are computed from the table. ``footer`` is ``Record.footer``: machine, date, versions.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ropelab.bench import records, whole_file
from ropelab.bench.names import NO_GRAD, PLAIN, RECORDED
from ropelab.study.engine.claims import documents
from ropelab.study.engine.record_links import show_records
from ropelab.study.plots import drawing, gpus, marks, ticks
from ropelab.study.plots.looks import COLORBLIND, CONTENDERS
from ropelab.study.plots.panels import BETWEEN_RECORDS, CELLS, facet
from ropelab.study.topics.conformance import figures as conformance_figures
from ropelab.study.topics.one_pass import figures as one_pass_figures
from ropelab.study.topics.performance import dense, roofs
from ropelab.study.topics.performance import figures as family_figures
from ropelab.study.topics.performance.comparison import named_cells
from ropelab.study.topics.precision import figures as precision_figures
from ropelab.study.topics.projection import figures as projection_figures


def host_time(frame: pd.DataFrame, footer: str = "") -> Figure:
    """The host time of an eager call with a few tokens, over both layouts, with and without autograd."""
    times = drawing.noisy("host", frame)
    place = marks.places(times.groupby("contender").median_us.median().sort_values().index)
    words = {NO_GRAD: "without autograd", PLAIN: "in grad mode, no gradient needed", RECORDED: "with autograd"}
    title, size = drawing.title(dense.host_sentence, frame), (4.6, 0.36 * len(place) + 1.0)
    panels = facet(times, size, title, footer, column="call", wrap=2, words=words, sharex=True, sharey=True)
    for ax, panel, _ in panels:
        middle = (panel.gpu.nunique() - 1) / 2
        for i, (_, rows, look) in enumerate(gpus.parts(panel)):
            found = drawing.spans(rows, "contender", "median_us")
            marks.spans(ax, place[found.index] + 0.3 * (middle - i), found, look, upright=False, markersize=6)
        marks.rows(ax, place, place.index.map(CONTENDERS.label), left=0.5 * times.median_us.min())
        ax.set_xscale("log")
        ax.set_xlim(right=2 * times.median_us.max())
        ticks.at(ax.xaxis, (10, 30, 100, 300, 1000, 3000))
    return panels.finish("host time of one call (µs)", legend=4)


def tile_sweep(frame: pd.DataFrame, footer: str = "") -> Figure:
    """The speed of the kernel with other tiles, beside the choice of ``kernels/tiles.py``."""
    frame = frame if "accesses" in frame else frame.assign(accesses=0)  # the record has no flat tiles
    times = frame.assign(cell=named_cells(frame))[frame.status == "ok"]
    times = times.assign(thread=_threads(times))
    # The labels name the axis that programs in a row share if the record tries more than one order.
    several = times.innermost.nunique() > 1
    fractions = times.groupby(["cell", "layout"]).fraction_of_copy
    best, worst = fractions.max(), fractions.min()
    chosen = times[times.chosen].set_index(["cell", "layout"]).fraction_of_copy
    loss = (1 - chosen / best).max()
    title = (
        f"In every cell the chosen tile is within {100 * loss:.1f} % of the best of "
        f"{drawing.value_range(fractions.size(), 'd')}. The worst tile loses up to "
        f"{100 * (1 - worst / best).max():.0f} %. At the right: the chosen tokens x heads or accesses, and warps"
    )
    place = marks.places(times.cell)
    panels = facet(times, (6.0, 0.5 * len(place) + 1.2), title, footer, column="layout", sharex=True, sharey=True)
    threads = sorted(times.thread.unique(), key=lambda name: (len(name), name))
    shades = dict(zip(threads, COLORBLIND, strict=False))
    offsets = dict(zip(threads, np.linspace(-0.2, 0.2, len(threads)), strict=True))
    shapes = {"heads": "o", "tokens": "^", "batches": "s"}
    named = [(thread, {"marker": "o", "color": shades[thread]}) for thread in threads]
    tried = [name for name in shapes if several and (times.innermost == name).any()]
    named += [(f"{inner} innermost", {"marker": shapes[inner], "color": "grey"}) for inner in tried]
    if times.heads_first.any():
        named.append(("heads before positions", {"marker": "o", "color": "grey", "mfc": "none"}))
    for text, look in named:
        panels.axes[0, 0].plot([], [], label=text, linestyle="none", **look)
    for ax, panel, _ in panels:
        for (thread, inner, heads_first), points in panel.groupby(["thread", "innermost", "heads_first"]):
            height, face = place[points.cell] + offsets[thread], "none" if heads_first else None
            ax.plot(points.fraction_of_copy, height, shapes[inner], color=shades[thread], mfc=face, markersize=4)
        for row in panel[panel.chosen].itertuples():
            at = (row.fraction_of_copy, place[row.cell] + offsets[row.thread])
            ax.plot(*at, "o", markerfacecolor="none", markeredgecolor="black", markersize=9, label="chosen")
            share = f"{row.accesses} accesses" if row.accesses else f"{row.block_tokens} x {row.block_heads}"
            text = f"{share}, {row.num_warps}w" + f", {row.innermost}" * several
            marks.beside(ax, [1.0], [place[row.cell]], [text], gap=6, xycoords=marks.ACROSS)
        ax.set_yticks(place, place.index)
        marks.one(ax)
    return panels.finish("fraction of the best copy", CELLS, legend=4)


def _threads(tiles: pd.DataFrame) -> pd.Series:
    """The pairs that a thread takes at a time, and the registers that it may use, in words."""
    limit = tiles.max_registers.map(lambda most: f", at most {most:.0f} registers" if most > 0 else "")
    flat = tiles.accesses.map(lambda accesses: ", flat" if accesses else "")
    return tiles.pairs_per_access.astype(str) + " pairs a thread" + flat + limit


FIGURES: dict[str, tuple[tuple[str, ...], Callable[..., Figure]]] = {
    **roofs.FIGURES,
    "host_time": (("host",), host_time),
    "tile_sweep": (("tiles",), tile_sweep),
    **family_figures.FIGURES,
    **one_pass_figures.FIGURES,
    **projection_figures.FIGURES,
    "conformance": (("conformance",), conformance_figures.peers),
    "precision_on_gpu": (("precision",), precision_figures.on_gpu),
}
"""The name of a figure -> the studies, and the function that draws their tables with a footer.

Documents add their own figures.
"""
OF_EVERY_GPU = {
    *roofs.FIGURES, *family_figures.FIGURES, *one_pass_figures.FIGURES, *projection_figures.FIGURES, "host_time",
}  # fmt: skip
"""The figures whose functions take the tables of all GPUs in one, with a column ``gpu``; or of the chosen GPU."""


def all_figures() -> dict[str, tuple[tuple[str, ...], Callable[..., Figure]]]:
    """`FIGURES`, and the ``FIGURES`` of every document's package.

    Raises:
        ValueError: two figures have one name.
    """
    found = dict(FIGURES)
    for document in documents():
        own = document.module("figures").FIGURES
        if taken := found.keys() & own.keys():
            raise ValueError(f"{document.package}.figures: expected names of its own, got {sorted(taken)}")
        found |= own
    return found


def draw(name: str, where: records.Where = records.MEASUREMENTS) -> Figure:
    """Draw one figure of `all_figures` from the records that ``records.load_together`` finds.

    Raises:
        Missing: a record is missing; the message says how to make it.
        Damaged: a record cannot be believed; the message names the file and the fault.
    """
    known = all_figures()
    if name not in known:
        raise ValueError(f"name: expected one of {tuple(known)}, got {name!r}")
    studies, function = known[name]
    found = records.load_together(studies, where)
    if name in OF_EVERY_GPU:
        tables, footers = zip(*(gpus.together(study, where) for study in studies), strict=True)
        return function(*tables, BETWEEN_RECORDS.join(dict.fromkeys(footers)))
    footer = BETWEEN_RECORDS.join(dict.fromkeys(record.footer for record in found))
    return function(*(record.frame for record in found), footer)


def show(name: str, where: records.Where) -> None:
    """Show one figure in a notebook, and below it a link to each of its records.

    Raises:
        Missing, Damaged: as `draw`.
    """
    from IPython.display import display

    display(draw(name, where))
    show_records(all_figures()[name][0], where)


def draw_all(directory: Path, where: records.Where = records.MEASUREMENTS) -> tuple[list[Path], list[str]]:
    """Draw every figure whose records are at hand into ``directory``, as PNG and SVG.

    Returns:
        The files, and a reason for each figure that is not among them.
    """
    files, missing = [], []
    for name in all_figures():
        try:
            fig = draw(name, where)
        except records.Unusable as error:
            missing.append(f"{name}: {error}")
            continue
        for kind in ("png", "svg"):
            path = directory / f"{name}.{kind}"
            with whole_file.replacing(path) as new:
                fig.savefig(new, dpi=150)
            files.append(path)
    return files, missing
