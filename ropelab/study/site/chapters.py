"""Turn an executed notebook into a page: its text, its code, its figures and its findings."""

import base64
import html
import io
import re
from dataclasses import dataclass, replace

import nbformat
from markupsafe import Markup
from nbconvert.filters import ansi2html
from nbconvert.filters.highlight import Highlight2HTML
from PIL import Image

from ropelab.study.engine.claims import documents
from ropelab.study.engine.findings import FINDING, HEADLINE
from ropelab.study.engine.record_links import RECORDS
from ropelab.study.engine.runner import Run
from ropelab.study.site.mathml import Writer

FIGURES = "assets"
"""The folder with the figures, beside the pages."""
RECORDS_PAGE = "records.html"
LARGEST_SVG = 200_000
"""The most bytes of an SVG. A larger figure is shown as pixels, which a browser draws at once."""
COLORS = 256
"""The most colours of a figure of pixels. A plot has few colours, and so a third of the bytes are enough."""
# The forms of an output, the best first. The report shows the first form that an output has.
PREFERRED = ("text/html", "text/markdown", "text/latex", "image/svg+xml", "image/png", "text/plain")
CLOSED = "</details>"
# The label of a folded cell that papermill gives a tag.
CELL_LABELS = {"parameters": "parameters", "injected-parameters": "parameters of this run", "answer": "answer"}


@dataclass(frozen=True)
class Figure:
    """A figure as a file of the site.

    Attributes:
        file: its path from the page.
        data: the bytes of the file.
        alt: the finding that the figure shows, or the heading above it, as plain text.
    """

    file: str
    data: bytes
    alt: str = ""

    @property
    def markup(self) -> Markup:
        return Markup('<figure><img src="{}" alt="{}" loading="lazy"></figure>').format(self.file, self.alt)


@dataclass(frozen=True)
class Finding:
    """A sentence that a notebook found, and the figure before it in the same section."""

    text: Markup
    headline: bool
    figure: Figure | None


@dataclass(frozen=True)
class Chapter:
    """A notebook as a page.

    Attributes:
        sections: (id, title) of its second-level headings.
        places: the name of a record, or of other evidence -> (id, title) of the first section that shows it.
    """

    name: str
    title: Markup
    run: Run
    body: Markup
    findings: list[Finding]
    figures: list[Figure]
    sections: list[tuple[str, Markup]]
    places: dict[str, tuple[str, Markup]]
    unconverted: list[str]

    @property
    def page(self) -> str:
        return f"{self.name}.html"

    @property
    def part(self) -> str:
        """The part of the site: a chapter that is named after a document belongs to the court."""
        return "Court" if self.name[3:] in {document.key for document in documents()} else "Book"


def chapter(run: Run) -> Chapter:
    """Render one executed notebook."""
    notebook = nbformat.read(run.path, as_version=4)
    writer = Writer(prefix=run.name)
    parts: list[str | Figure | Finding] = []
    places: dict[str, tuple[str, Markup]] = {}
    for cell in notebook.cells:
        if "papermill-error-cell-tag" in cell.metadata.get("tags", []):
            continue  # papermill's note of the failure; the page has its own note
        if cell.cell_type == "markdown":
            parts.append(writer.markdown(cell.source))
        elif cell.cell_type == "code":
            if "answer" in cell.metadata.get("tags", []):
                parts.append(_answer(cell, writer, run.name))
                continue
            parts.append(_code(cell))
            if writer.headings and writer.headings[-1][0] > 1:
                _, identifier, text = writer.headings[-1]
                shown = [name for output in cell.outputs for name in output.get("metadata", {}).get(RECORDS, ())]
                for name in (*re.findall(r'"(\w+)"', cell.source), *shown):
                    places.setdefault(name, (identifier, Markup(text)))
            for output in cell.outputs:
                metadata = output.get("metadata", {})
                if text := metadata.get(FINDING):
                    parts.append(Finding(Markup(writer.inline(text)), bool(metadata.get(HEADLINE)), None))
                elif studies := metadata.get(RECORDS):
                    links = ", ".join(f'<a href="{RECORDS_PAGE}#{study}">{study}</a>' for study in studies)
                    parts.append(f'<p class="small">Records: {links}</p>')
                else:
                    parts.append(_output(output, writer, f"{run.name}-{len(parts)}"))
    parts = _described(parts)
    titles = [text for level, _, text in writer.headings if level == 1]
    return Chapter(
        name=run.name,
        title=Markup(titles[0]) if titles else Markup.escape(run.name),
        run=run,
        body=Markup("\n".join(map(_shown, parts))),
        findings=[part for part in parts if isinstance(part, Finding)],
        figures=[part for part in parts if isinstance(part, Figure)],
        sections=[(identifier, Markup(text)) for level, identifier, text in writer.headings if level == 2],
        places=places,
        unconverted=writer.unconverted,
    )


def _described(parts: list[str | Figure | Finding]) -> list[str | Figure | Finding]:
    """The parts, in which each figure has its text and each finding has its figure.

    A finding belongs to the last figure before it in its section. A figure without a finding has the heading of its
    section as its text.
    """
    described = list(parts)
    heading, last = "", None
    for i, part in enumerate(parts):
        if isinstance(part, Figure):
            described[i] = replace(part, alt=heading)
            last = i
        elif isinstance(part, Finding) and last is not None:
            if described[last].alt == heading:
                described[last] = replace(described[last], alt=plain(part.text))
            described[i] = replace(part, figure=described[last])
        elif isinstance(part, str) and (titles := re.findall(r"<h\d[^>]*>(.*?)</h\d>", part)):
            heading, last = plain(titles[-1]), None
    return described


def plain(markup: str) -> str:
    """The text of some HTML, in one line."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", markup)).split())


def _shown(part: str | Figure | Finding) -> str:
    if isinstance(part, Figure):
        return part.markup
    if isinstance(part, Finding):
        return f'<div class="finding">{part.text}</div>'
    return part


def _code(cell: nbformat.NotebookNode) -> str:
    if not cell.source.strip():
        return ""
    tags = cell.metadata.get("tags", [])
    if "shown" in tags:
        return Highlight2HTML()(cell.source)
    label = next((label for tag, label in CELL_LABELS.items() if tag in tags), "code")
    lines = cell.source.count("\n") + 1
    summary = f"{label}, {lines} line{'s' if lines > 1 else ''}"
    return f"<details><summary>{summary}</summary>{Highlight2HTML()(cell.source)}{CLOSED}"


def _answer(cell: nbformat.NotebookNode, writer: Writer, chapter: str) -> str:
    """The answer of an exercise: its code and what it prints, folded together."""
    printed = [_output(output, writer, f"{chapter}-{cell.id}") for output in cell.outputs]
    return f"{_code(cell).removesuffix(CLOSED)}{''.join(map(_shown, printed))}{CLOSED}"


def _small(png: bytes) -> bytes:
    """The same picture in `COLORS` colours."""
    found = io.BytesIO()
    Image.open(io.BytesIO(png)).convert("RGB").quantize(COLORS).save(found, "PNG", optimize=True)
    return min(png, found.getvalue(), key=len)


def _output(output: nbformat.NotebookNode, writer: Writer, name: str) -> str | Figure:
    if output.output_type == "stream":
        return f'<pre class="{output.name}">{ansi2html(output.text)}</pre>'
    if output.output_type == "error":
        return f'<pre class="error">{ansi2html(chr(10).join(output.traceback))}</pre>'
    kinds = [kind for kind in PREFERRED if kind in output.data]
    if "image/png" in kinds and len(output.data.get("image/svg+xml", "")) > LARGEST_SVG:
        kinds.remove("image/svg+xml")
    if not kinds:
        return f'<pre class="error">cannot show an output of type {", ".join(output.data)}</pre>'
    data = output.data[kinds[0]]
    match kinds[0]:
        case "image/svg+xml":
            return Figure(f"{FIGURES}/{name}.svg", data.encode())
        case "image/png":
            return Figure(f"{FIGURES}/{name}.png", _small(base64.b64decode(data)))
        case "text/html":
            shown = data
        case "text/markdown":
            shown = writer.markdown(data)
        case "text/latex":
            shown = writer.latex(data)
        case _:
            shown = f"<pre>{ansi2html(data)}</pre>"
    return f'<div class="output">{shown}</div>'
