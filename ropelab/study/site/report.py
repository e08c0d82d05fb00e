"""Write the report: the story and the ledger first, then a page for each notebook, then the reference."""

import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import jinja2
import nbformat
import pandas as pd
from pygments.formatters import HtmlFormatter

from ropelab.bench import checksums, records
from ropelab.study.engine import claims as documents
from ropelab.study.engine.findings import WAYS, counted
from ropelab.study.engine.ledger import tally
from ropelab.study.engine.runner import Run
from ropelab.study.engine.verdict import Basis, Outcome
from ropelab.study.site import guide, reference, search
from ropelab.study.site.chapters import FIGURES, Chapter, chapter
from ropelab.study.site.ledgers import Ledger, ledger
from ropelab.study.site.provenance import origin, provenance

HERE = Path(__file__).parent
LARGEST_PAGE, LARGEST_SITE = 2_000_000, 8_000_000
"""The most bytes of a page with its figures, and of the whole site."""


def write(
    page: Path, runs: list[Run], ledgers: Sequence[Ledger] | None = None, *, smoke: bool = False,
    where: records.Where = records.MEASUREMENTS, measured: Collection[str] = (),
) -> list[str]:  # fmt: skip
    """Write the report of these runs to ``page``, the first page, and to pages and a folder ``assets`` beside it.

    Args:
        ledgers: the ledger of each document; by default they are computed here.
        where: the records that the notebooks read.
        measured: the studies that were measured in this run.

    Returns:
        A line for each thing that a reader of the report will miss: formulas left as text, a ledger that failed, a
        record that cannot be believed, or a file of evidence that does not match its checksum. There is also a line for
        each page that is larger than `LARGEST_PAGE`, and for a site that is larger than `LARGEST_SITE`.
    """
    where = records.selection(where)
    chapters = [chapter(run) for run in runs]
    problems = [f"{one.name}: a formula is shown as text: {formula}" for one in chapters for formula in one.unconverted]
    if ledgers is None:
        ledgers = [ledger(document, where) for document in documents.documents()]
    problems += [one.trouble for one in ledgers if one.trouble]
    sources, damaged = provenance(where, measured)
    damaged += [f"data/{line}" for line in checksums.differences(checksums.DATA)]
    problems += damaged
    differing = pd.concat([one.differing for one in ledgers], ignore_index=True)
    guides, references = guide.guides(), reference.references()

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals.update(
        chapters=chapters, guides=guides, references=references, origin=origin(), smoke=smoke, first=page.name
    )
    pages = {
        page.name: environment.get_template("index.html.j2").render(
            headlines=[(one, finding) for one in chapters for finding in one.findings if finding.headline],
            ledgers=ledgers,
            gpus=[name for name in differing if name not in ("id", "document", "statement")],
            differing=differing.fillna("").to_dict("records"),
            compared=records.gpus(where.directory),
            sources=sources,
            damaged=damaged,
            by_hand=records.hand_written(where),
            axes={"outcome": list(Outcome), "basis": list(Basis)},
            tallies=_tallies(ledgers),
            known=_known(chapters),
        )
    }
    for template, each in (("chapter", chapters), ("guide", guides), ("reference", references)):
        frame = environment.get_template(f"{template}.html.j2")
        pages |= {one.page: frame.render(one=one, page=one.page) for one in each}

    assets = page.parent / FIGURES
    shutil.rmtree(assets, ignore_errors=True)  # removes the figures of notebooks that are gone
    shutil.copytree(HERE / "assets", assets)
    for file, text in pages.items():
        (page.parent / file).write_text(text)
    (assets / "code.css").write_text(_code_style())
    (assets / "search-index.js").write_text(
        search.script(e for file, text in pages.items() for e in search.entries(file, text))
    )
    for figure in (figure for one in chapters for figure in one.figures):
        (page.parent / figure.file).write_bytes(figure.data)
    figures = {one.page: sum(len(figure.data) for figure in one.figures) for one in chapters}
    sizes = {file: len(text.encode()) + figures.get(file, 0) for file, text in pages.items()}
    return problems + _too_large(sizes, sum(file.stat().st_size for file in page.parent.rglob("*") if file.is_file()))


def _known(chapters: Sequence[Chapter]) -> pd.DataFrame:
    """The statements of each chapter by the way in which they are known, with their sum."""
    found = counted({str(one.title): nbformat.read(one.run.path, as_version=4) for one in chapters})
    table = pd.DataFrame.from_dict(found, orient="index", columns=list(WAYS)).rename_axis(index="chapter")
    if len(table):
        table.loc["all chapters"] = table.sum()
    return table


def _tallies(ledgers: Sequence[Ledger]) -> list[pd.DataFrame]:
    """The claims of all documents by outcome and by basis; nothing where no ledger could be computed."""
    gpus = dict.fromkeys(gpu for one in ledgers for gpu in one.each)
    each = {gpu: pd.concat([one.each[gpu] for one in ledgers if one.each], ignore_index=True) for gpu in gpus}
    return [tally(each, "outcome", list(Outcome)), tally(each, "basis", list(Basis))] if each else []


def _too_large(sizes: Mapping[str, int], site: int) -> list[str]:
    """A line for each page, and for the site, with more bytes than its limit; ``sizes`` are the bytes of the pages."""
    limits = [(file, size, LARGEST_PAGE) for file, size in sizes.items()] + [("the report", site, LARGEST_SITE)]
    return [
        f"{name}: expected at most {limit / 1e6:g} MB, got {size / 1e6:.1f}"
        for name, size, limit in limits
        if size > limit
    ]


def _code_style() -> str:
    light = HtmlFormatter(style="default").get_style_defs(".highlight")
    dark = HtmlFormatter(style="github-dark").get_style_defs(".highlight")
    return f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}\n"
