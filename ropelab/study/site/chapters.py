"""Prepare an executed notebook for Sphinx: folded code, figures with a text, and the findings for other pages."""

import re
from dataclasses import dataclass, field

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_markdown_cell

from ropelab.study.engine.findings import FINDING, FURTHER, HEADLINE
from ropelab.study.engine.record_links import RECORDS
from ropelab.study.engine.runner import Run
from ropelab.study.site import small

# The text of an output brings no markup into a page but for a fold.
_FOLD = re.compile(r"^(<details><summary>[^<]*</summary>|</details>)$", re.MULTILINE)
# The label of a folded cell that papermill gives a tag.
LABELS = {"parameters": "parameters", "injected-parameters": "parameters of this run", "answer": "answer"}


@dataclass(frozen=True)
class Finding:
    """A sentence in markdown that a notebook found, and the file of the figure before it in its section."""

    text: str
    headline: bool
    figure: str | None


@dataclass
class Chapter:
    """A notebook as a page.

    Attributes:
        notebook: what Sphinx gets.
        figures: file -> SVG.
        places: the name of a record, or of other evidence -> (label, title) of the first section that shows it.
    """

    run: Run
    title: str
    notebook: NotebookNode
    figures: dict[str, str] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    places: dict[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.run.name


def chapter(run: Run) -> Chapter:
    """Prepare one executed notebook."""
    notebook = nbformat.read(run.path, as_version=4)
    tagged = [(cell, cell.metadata.get("tags", [])) for cell in notebook.cells if cell.source.strip()]
    cells = [(cell, tags) for cell, tags in tagged if "papermill-error-cell-tag" not in tags]  # papermill's own note
    notebook.cells = [cell for cell, _ in cells]
    found = Chapter(run, run.name, notebook)
    notebook.metadata.pop("widgets", None)  # their output has HTML, too
    section: tuple[str, str] | None = None  # label and title
    last: NotebookNode | None = None  # the output of the last figure of the section
    figure: str | None = None
    for cell, tags in cells:
        if cell.cell_type == "markdown":
            cell.source, headings = _labelled(cell.source, f"{run.name}-{cell.id}")
            for level, label, title in headings:
                if level > 1:
                    section, last, figure = (label, title), None, None
                elif found.title == run.name:  # any other is a comment in a block of code
                    found.title = title
        elif cell.cell_type == "code":
            _fold(cell, tags)
            heading = section[1] if section else found.title
            shown = [name for output in cell.outputs for name in output.get("metadata", {}).get(RECORDS, ())]
            if section and "answer" not in tags:
                for name in (*re.findall(r'"(\w+)"', cell.source), *shown):
                    found.places.setdefault(name, section)
            for output in cell.outputs:
                metadata, data = output.get("metadata", {}), output.get("data", {})
                if studies := metadata.get(RECORDS):
                    data["text/markdown"] = "Records: " + ", ".join(f"{{record}}`{study}`" for study in studies)
                elif text := metadata.get(FINDING):
                    found.findings.append(Finding(text, bool(metadata.get(HEADLINE)), figure))
                    if last and last["text/markdown"] == _image(figure, heading):
                        last["text/markdown"] = _image(figure, re.sub("[`$]", "", text))  # for who cannot see it
                elif texts := metadata.get(FURTHER):
                    found.findings += [Finding(text, False, None) for text in texts]
                    data["text/markdown"] = _FOLD.sub(r"```{raw} html\n\1\n```", data["text/markdown"])
                elif svg := data.pop("image/svg+xml", None):
                    last, figure = data, f"{run.name}-{len(found.figures) + 1}.svg"
                    found.figures[figure] = small.svg(svg)
                    data["text/markdown"] = _image(figure, heading)
    if found.title == run.name:
        notebook.cells.insert(0, new_markdown_cell(f"# {run.name}"))
    if run.failure:
        said = f"This notebook stopped in {run.failure}. No cell after that one was run."
        notebook.cells.insert(1, new_markdown_cell(f":::{{error}}\n{said}\n:::"))
    notebook.cells.append(new_markdown_cell(f"*notebooks/{run.name}.ipynb, {run.seconds:.1f} s*"))
    return found


def _image(file: str, alt: str) -> str:
    return f"```{{image}} {file}\n:alt: {' '.join(alt.split())}\n```"


def _labelled(source: str, prefix: str) -> tuple[str, list[tuple[int, str, str]]]:
    """The markdown with a label before each heading below the title, and (level, label, title) of all headings."""
    headings: list[tuple[int, str, str]] = []

    def labelled(heading: re.Match[str]) -> str:
        label = f"{prefix}-{len(headings)}"
        headings.append((len(heading[1]), label, heading[2]))
        return heading[0] if len(heading[1]) == 1 else f"({label})=\n{heading[0]}"

    return re.sub(r"^(#+) (.+)$", labelled, source, flags=re.MULTILINE), headings


def _fold(cell: NotebookNode, tags: list[str]) -> None:
    """Fold the code, or all of an answer, unless the notebook says that the code is shown."""
    label = next((label for tag, label in LABELS.items() if tag in tags), "code")
    lines = cell.source.count("\n") + 1
    cell.metadata.mystnb = {"code_prompt_show": f"{label}, {lines} line{'s' if lines > 1 else ''}"}
    if "shown" not in tags:
        cell.metadata.tags = [*tags, "hide-cell" if "answer" in tags else "hide-input"]
