"""Figures of the measurements: each takes a record's table and returns a figure. Nothing is measured here.

Titles state the finding and are computed from the table. ``footer`` is ``Record.footer``: machine, date, versions.
"""

from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from ropelab.bench import records, whole_file
from ropelab.study.engine.claims import documents
from ropelab.study.engine.record_links import show_records
from ropelab.study.plots.panels import BETWEEN_RECORDS

FIGURES: dict[str, tuple[tuple[str, ...], Callable[..., Figure]]] = {}
"""The name of a figure -> the studies, and the function that draws their tables with a footer.

A document may add figures of its own.
"""


def all_figures() -> dict[str, tuple[tuple[str, ...], Callable[..., Figure]]]:
    """`FIGURES`, and the ``FIGURES`` of each document that has any.

    Raises:
        ValueError: two figures have one name.
    """
    found = dict(FIGURES)
    for module in (module for document in documents() for module in document.modules("figures")):
        own = getattr(module, "FIGURES", {})
        if taken := found.keys() & own.keys():
            raise ValueError(f"{module.__name__}: expected names of its own, got {sorted(taken)}")
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
