"""Write the report: the story on the first page, then the guide, the book, the court and the reference."""

import shutil
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import jinja2
import nbformat
import pandas as pd
from markupsafe import Markup
from pygments.formatters import HtmlFormatter

from ropelab.bench import records, whole_file
from ropelab.study.engine import claims as documents
from ropelab.study.engine.findings import WAYS, counted
from ropelab.study.engine.ledger import disagreements, short, tally
from ropelab.study.engine.measure import Measured
from ropelab.study.engine.runner import Run
from ropelab.study.engine.verdict import Basis, Outcome
from ropelab.study.site import guide, reference, search
from ropelab.study.site.chapters import FIGURES, RECORDS_PAGE, Chapter, chapter
from ropelab.study.site.ledgers import Ledger, ledger
from ropelab.study.site.measured import beside_committed
from ropelab.study.site.provenance import origin, provenance

HERE = Path(__file__).parent
LARGEST_PAGE, LARGEST_SITE = 2_000_000, 8_000_000
"""The most bytes of a page with its figures, and of the whole site."""
PARTS = ("Use it", "Book", "Court", "Reference")
"""The parts of the site, in the order in which every page lists them."""


def write(
    page: Path, runs: list[Run], ledgers: Sequence[Ledger] | None = None, *, smoke: bool = False,
    where: records.Where = records.MEASUREMENTS, measured: Measured | None = None,
) -> list[str]:  # fmt: skip
    """Write the report of these runs to ``page``, the first page, and to pages and a folder ``assets`` beside it.

    Args:
        ledgers: the ledger of each document; by default they are computed here.
        where: the records that the notebooks read; by default those of the GPU of reference. Records of other GPUs,
            and their verdicts, have a page of their own.
        measured: the measurements of this run; they get a page of their own.

    Returns:
        A line for each thing that a reader of the report will miss: formulas left as text, a ledger that failed, or a
        record that cannot be believed. There is also a line for each page that is larger than `LARGEST_PAGE`, and for a
        site that is larger than `LARGEST_SITE`.
    """
    where = records.of_one_gpu(where)
    chapters = [chapter(run) for run in runs]
    problems = [f"{one.name}: a formula is shown as text: {formula}" for one in chapters for formula in one.unconverted]
    if ledgers is None:
        ledgers = [ledger(document, where) for document in documents.documents()]
    problems += [one.trouble for one in ledgers if one.trouble]
    sources, damaged = provenance(where)
    problems += damaged
    overviews = [
        guide.Page("ledger.html", "Ledger of claims", "Court", [(one.key, one.document) for one in ledgers]),
        guide.Page("findings.html", "All findings", "Book"),
        guide.Page(RECORDS_PAGE, "Records", "Court"),
        guide.Page("gpus.html", "Other GPUs", "Court"),
    ]
    if measured:
        overviews.append(guide.Page("measured.html", "Measured in this run", "Court"))
    judged, axes = _by_gpu(ledgers), {"outcome": list(Outcome), "basis": list(Basis)}
    own = {gpu: rows for gpu, rows in judged.items() if gpu == where.gpu}
    listed = [overviews[0], *chapters, *overviews[1:], *guide.guides(), *reference.references()]

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.globals.update(
        parts={part: [one for one in listed if one.part == part] for part in PARTS},
        chapters=chapters,
        origin=origin(),
        smoke=smoke,
        first=page.name,
        ledgers=ledgers,
        sources=[row for row in sources if row["gpu"] == where.gpu],
        elsewhere=[row for row in sources if row["gpu"] != where.gpu],
        measured=measured,
        times=beside_committed(measured).to_dict("records") if measured else [],
        troubles=[f"{run.name} stopped in {run.failure}; no later cell ran" for run in runs if run.failure] + problems,
        axes=axes,
        tallies=[tally(own, axis, names) for axis, names in axes.items() if own],
        compared=[tally(judged, axis, names) for axis, names in axes.items() if judged],
        differing=disagreements(judged).rename(columns=short),
        known=_known(chapters),
        studies={row["study"] for row in sources},
        sections=partial(_sections, chapters),
    )
    pages = {page.name: environment.get_template("index.html.j2").render()}
    for one in listed:
        template = one.page if one in overviews else "page.html"
        pages[one.page] = environment.get_template(f"{template}.j2").render(one=one)

    assets = page.parent / FIGURES
    shutil.rmtree(assets, ignore_errors=True)  # removes the figures of notebooks that are gone
    shutil.copytree(HERE / "assets", assets, copy_function=lambda a, b: whole_file.write(Path(b), Path(a).read_bytes()))
    for file, text in pages.items():
        whole_file.write(page.parent / file, text)
    whole_file.write(assets / "code.css", _code_style())
    found_in_order = sorted(listed, key=lambda one: PARTS.index(one.part))  # the guide first, among equal finds
    entries = (e for one in found_in_order for e in search.entries(one.page, pages[one.page]))
    whole_file.write(assets / "search-index.js", search.script(entries))
    for figure in (figure for one in chapters for figure in one.figures):
        whole_file.write(page.parent / figure.file, figure.data)
    figures = {one.page: sum(len(figure.data) for figure in one.figures) for one in chapters}
    sizes = {file: len(text.encode()) + figures.get(file, 0) for file, text in pages.items()}
    return problems + _too_large(sizes, sum(file.stat().st_size for file in page.parent.rglob("*") if file.is_file()))


def _sections(chapters: Sequence[Chapter], document: str, names: Iterable[str]) -> list[tuple[str, Markup]]:
    """The addresses and titles of the sections that show the evidence of a claim.

    A section is in the chapter of the document, whose key is given, or in another one if that does not show the
    evidence. If no section shows any of it, the section with the claims of the document takes its place.
    """
    known: dict[str, tuple[str, Markup]] = {}
    for one in sorted(chapters, key=lambda one: one.name[3:] == document):
        known |= {name: (f"{one.page}#{place}", title) for name, (place, title) in one.places.items()}
    found = [known[name] for name in names if name in known] or [known[key] for key in (document,) if key in known]
    return list(dict.fromkeys(found))


def _known(chapters: Sequence[Chapter]) -> pd.DataFrame:
    """The statements of each chapter by the way in which they are known, with their sum."""
    found = counted({str(one.title): nbformat.read(one.run.path, as_version=4) for one in chapters})
    table = pd.DataFrame.from_dict(found, orient="index", columns=list(WAYS)).rename_axis(index="chapter")
    if len(table):
        table.loc["all chapters"] = table.sum()
    return table


def _by_gpu(ledgers: Sequence[Ledger]) -> dict[str, pd.DataFrame]:
    """GPU -> the ledger of all documents; nothing where no ledger could be computed."""
    gpus = dict.fromkeys(gpu for one in ledgers for gpu in one.each)
    return {gpu: pd.concat([one.each[gpu] for one in ledgers if one.each], ignore_index=True) for gpu in gpus}


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
