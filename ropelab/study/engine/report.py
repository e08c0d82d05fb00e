"""One self-contained HTML page from the executed notebooks: ledger of claims, findings, then everything."""

import base64
import html
import os
import platform
from collections.abc import Collection
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import jinja2
import nbformat
import pandas as pd
import torch
from markupsafe import Markup
from nbconvert.filters import ansi2html
from nbconvert.filters.highlight import Highlight2HTML
from pygments.formatters import HtmlFormatter

from ropelab.bench import checksums, records, staleness
from ropelab.study.engine import claims as documents
from ropelab.study.engine import ledger as judged
from ropelab.study.engine.findings import FINDING
from ropelab.study.engine.mathml import Writer
from ropelab.study.engine.runner import Run
from ropelab.study.engine.verdict import Basis, Outcome
from ropelab.study.plots import registry as figures

HERE = Path(__file__).parent
# The form of an output that is shown, best first.
PREFERRED = ("text/html", "text/markdown", "text/latex", "image/svg+xml", "image/png", "text/plain")
# What stands on a folded cell that papermill gives a tag.
CELL_LABELS = {"parameters": "parameters", "injected-parameters": "parameters of this run"}


@dataclass(frozen=True)
class Chapter:
    """A notebook as the page shows it; ``sections`` are (id, title) of its second-level headings."""

    name: str
    title: Markup
    run: Run
    body: Markup
    findings: list[Markup]
    sections: list[tuple[str, Markup]]
    unconverted: list[str]


@dataclass(frozen=True)
class Ledger:
    """A document's claims and their verdicts, a row each; ``trouble`` says why there are no rows.

    ``differing`` are the claims whose outcomes differ between GPUs: see `engine.ledger.disagreements`.
    """

    key: str
    document: str
    rows: list[dict]
    trouble: str = ""
    differing: pd.DataFrame = field(default_factory=pd.DataFrame)

    def count(self, axis: str, name: str) -> int:
        """The number of claims of that outcome or basis; ``axis`` is ``"outcome"`` or ``"basis"``."""
        return sum(row[axis] == name for row in self.rows)


def write(
    page: Path, runs: list[Run], *, smoke: bool = False, where: records.Where = records.MEASUREMENTS,
    measured: Collection[str] = (),
) -> list[str]:  # fmt: skip
    """Write the report of these runs to ``page``.

    Args:
        where: the records that the notebooks read.
        measured: the studies that were measured in this run.

    Returns:
        What a reader of the report will miss, a line each: formulas left as text, a ledger that failed, a record that
        cannot be believed, a file of evidence that its checksum does not fit.
    """
    where = records.selection(where)
    chapters = [chapter(run) for run in runs]
    problems = [f"{one.name}: a formula is shown as text: {formula}" for one in chapters for formula in one.unconverted]
    ledgers = [ledger(document, where) for document in documents.documents()]
    problems += [one.trouble for one in ledgers if one.trouble]
    sources, damaged = provenance(where, measured)
    damaged += [f"data/{line}" for line in checksums.differences(checksums.DATA)]
    problems += damaged
    differing = pd.concat([one.differing for one in ledgers], ignore_index=True)

    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(HERE), autoescape=True, trim_blocks=True)
    html_page = environment.get_template("report.html.j2").render(
        chapters=chapters,
        ledgers=ledgers,
        gpus=[name for name in differing if name not in ("id", "document", "statement")],
        differing=differing.fillna("").to_dict("records"),
        compared=records.gpus(where.directory),
        sources=sources,
        damaged=damaged,
        by_hand=records.hand_written(where),
        axes={"outcome": list(Outcome), "basis": list(Basis)},
        smoke=smoke,
        origin=origin(),
        style=style(),
    )
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(html_page)
    return problems


def style() -> Markup:
    """The style sheet, with the font for formulas inside: not every machine has one whose brackets grow."""
    font = base64.b64encode((HERE / "fonts" / "latin-modern-math-subset.woff2").read_bytes()).decode()
    face = f'@font-face {{ font-family: "Study Math"; src: url("data:font/woff2;base64,{font}"); }}'
    code = HtmlFormatter().get_style_defs(".highlight")
    return Markup("\n".join([face, code, (HERE / "report.css").read_text()]))


def chapter(run: Run) -> Chapter:
    """Render one executed notebook."""
    notebook = nbformat.read(run.path, as_version=4)
    writer = Writer(prefix=run.name)
    findings = []
    parts = []
    for cell in notebook.cells:
        if "papermill-error-cell-tag" in cell.metadata.get("tags", []):
            continue  # papermill's own note of the failure; the page has its own
        if cell.cell_type == "markdown":
            parts.append(writer.markdown(cell.source))
        elif cell.cell_type == "code":
            parts.append(_code(cell))
            for output in cell.outputs:
                if text := output.get("metadata", {}).get(FINDING):
                    findings.append(Markup(writer.inline(text)))
                    parts.append(f'<div class="finding">{findings[-1]}</div>')
                else:
                    parts.append(_output(output, writer))
    titles = [text for level, _, text in writer.headings if level == 1]
    return Chapter(
        name=run.name,
        title=Markup(titles[0]) if titles else Markup.escape(run.name),
        run=run,
        body=Markup("\n".join(parts)),
        findings=findings,
        sections=[(identifier, Markup(text)) for level, identifier, text in writer.headings if level == 2],
        unconverted=writer.unconverted,
    )


def _code(cell: nbformat.NotebookNode) -> str:
    if not cell.source.strip():
        return ""
    tags = cell.metadata.get("tags", [])
    what = next((label for tag, label in CELL_LABELS.items() if tag in tags), "code")
    lines = cell.source.count("\n") + 1
    summary = f"{what}, {lines} line{'s' if lines > 1 else ''}"
    return f"<details><summary>{summary}</summary>{Highlight2HTML()(cell.source)}</details>"


def _output(output: nbformat.NotebookNode, writer: Writer) -> str:
    if output.output_type == "stream":
        return f'<pre class="{output.name}">{ansi2html(output.text)}</pre>'
    if output.output_type == "error":
        return f'<pre class="error">{ansi2html(chr(10).join(output.traceback))}</pre>'
    kind = next((kind for kind in PREFERRED if kind in output.data), None)
    if kind is None:
        return f'<pre class="error">cannot show an output of type {", ".join(output.data)}</pre>'
    data = output.data[kind]
    match kind:
        case "text/html":
            shown = data
        case "text/markdown":
            shown = writer.markdown(data)
        case "text/latex":
            shown = writer.latex(data)
        case "image/svg+xml":
            shown = data[data.index("<svg") :]
        case "image/png":
            size = output.metadata.get("image/png", {})
            width = f' width="{size["width"]}"' if "width" in size else ""
            alt = html.escape(output.data.get("text/plain", "figure"))
            shown = f'<img src="data:image/png;base64,{data.strip()}"{width} alt="{alt}">'
        case _:
            shown = f"<pre>{ansi2html(data)}</pre>"
    return f'<div class="output">{shown}</div>'


def ledger(document: documents.Document, where: records.Where = records.MEASUREMENTS) -> Ledger:
    """The rows of a document's ledger, ready for the page; or why there are none."""
    where = records.selection(where)
    try:
        each = judged.by_gpu(where.directory, document=document.key)
        gpu = where.gpu or next(iter(each), None)
        table = each[gpu] if gpu else judged.ledger(document=document.key, records=where)
        rows = table.fillna("").to_dict("records")
        differing = judged.disagreements(each)
    except Exception as error:  # the report must appear all the same, and say so
        trouble = f"the ledger of {document.name} could not be computed: {type(error).__name__}: {error}"
        return Ledger(document.key, document.name, [], trouble)
    writer = Writer()
    for row in rows:
        row["badge"] = row["outcome"].replace(" ", "-")
        for column in ("statement", "quote", "measured", "needs", "remarks"):
            row[column] = Markup(writer.inline(str(row.get(column, ""))))
    return Ledger(document.key, document.name, rows, differing=differing)


def provenance(where: records.Selection, measured: Collection[str] = ()) -> tuple[list[dict], list[str]]:
    """The records of every figure, and the figures that cannot be drawn.

    Returns:
        A row for each figure and record: figure, study, source (when and where it was measured), now (whether this run
        measured it) and stale (the code that has changed since); then a line for each figure that cannot be drawn.
    """
    rows, damaged = [], []
    for figure, (studies, _) in figures.all_figures().items():
        try:
            found = records.load_together(studies, where)
        except records.Unusable as error:
            damaged.append(f"{figure} is not drawn: {error}")
            continue
        here = records.here()
        for record in found:
            about = record.provenance
            now = record.study in measured and records.slug(about["gpu"]["name"]) == here
            source = f"committed record of {about['utc'][:10]} on {about['gpu']['name']}"
            source = f"measured in this run on {about['gpu']['name']}" if now else source
            row = {"figure": figure, "study": record.study, "source": source, "now": now, "stale": changed_code(record)}
            rows.append(row)
    return rows, damaged


def changed_code(record: records.Record) -> str:
    """The modules whose code has changed since the record was measured, by name."""
    if record.hashes_modules:
        return ", ".join(record.stale) or "none"
    kernels = ", ".join(record.stale) or f"none of {staleness.KERNELS}"
    return f"{kernels}; recorded before the other modules were hashed"


def origin() -> list[str]:
    """Where and when this report was made: time, commit, machine, software."""
    here = records.environment()
    machine = here["gpu"]["name"]
    if not torch.cuda.is_available():
        machine = f"{platform.machine()} CPU, {os.cpu_count()} cores, no GPU"
    changed = " with local changes" if here["dirty"] is True else ""
    return [
        f"{datetime.fromisoformat(here['utc']):%Y-%m-%d %H:%M} UTC",
        f"commit {here['commit'][:12]}{changed}",
        machine,
        f"Python {here['python']}, torch {here['torch']}, triton {here['triton']}",
    ]
