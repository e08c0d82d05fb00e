"""The habits of the book: references, and exercises whose answers run."""

import ast
import linecache
from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat")

from ropelab.study.engine.runner import kernel_environment  # noqa: E402
from ropelab.study.plots.looks import COLORBLIND  # noqa: E402

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
INTERPRETED = """import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before the first import of a kernel
"""
"""The first lines of every chapter."""


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return nbformat.read(request.param, as_version=nbformat.NO_CONVERT)


def tagged(notebook, tag):
    return [cell for cell in notebook.cells if tag in cell.metadata.get("tags", [])]


def test_every_exercise_has_a_folded_answer_that_asserts(notebook):
    exercises, answers = tagged(notebook, "exercise"), tagged(notebook, "answer")
    cells = notebook.cells
    assert [cells[cells.index(one) + 1].id for one in exercises] == [one.id for one in answers]
    for answer in answers:
        assert answer.cell_type == "code"
        assert answer.metadata.get("jupyter") == {"source_hidden": True, "outputs_hidden": True}
        assert any(isinstance(node, ast.Assert) for node in ast.walk(ast.parse(answer.source))), answer.id


def test_answers_run_by_themselves(notebook):
    for answer in tagged(notebook, "answer"):
        lines = answer.source.splitlines(keepends=True)
        linecache.cache[answer.id] = (len(answer.source), None, lines, answer.id)  # Triton reads a kernel's source
        exec(compile(answer.source, answer.id, "exec"), {"__name__": answer.id})


def test_every_way_to_run_a_chapter_interprets_kernels_where_there_is_no_gpu(notebook):
    """papermill, JupyterLab and the report start processes with other variables: the first imports decide."""
    first = next(cell for cell in notebook.cells if cell.cell_type == "code" and "import" in cell.source)
    assert first.source.startswith(INTERPRETED), first.id
    assert first.metadata.get("jupyter") == {"source_hidden": True}
    assert "TRITON_INTERPRET" not in kernel_environment()


def luminance(rgb):
    """The relative luminance of sRGB numbers from 0 to 1 (WCAG 2.2)."""
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def on_a_dark_page(rgb):
    """A colour of a figure under the filter of study.css: invert(.91), then hue-rotate(180deg) (Filter Effects 1)."""
    inverted = [0.91 * (1 - x) + 0.09 * x for x in rgb]
    rotated = [2 * (0.213 * inverted[0] + 0.715 * inverted[1] + 0.072 * inverted[2]) - x for x in inverted]
    return [min(1.0, max(0.0, x)) for x in rotated]


@pytest.mark.parametrize("seen", [list, on_a_dark_page], ids=["light", "dark"])
def test_colours_of_figures_stand_out_from_the_page(seen):
    style = (ROOT / "docs" / "_static" / "study.css").read_text()
    assert "filter: invert(.91) hue-rotate(180deg)" in style
    paper = luminance(seen([1.0, 1.0, 1.0]))
    for color in COLORBLIND:
        ink = luminance(seen([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]))
        assert (max(paper, ink) + 0.05) / (min(paper, ink) + 0.05) >= 3, color


def test_a_chapter_opens_with_a_question_a_picture_and_a_guess(notebook, request):
    """Before the first derivation; the tour has a picture in each section."""
    if request.node.callspec.id[:2] == "00":
        pytest.skip("has a shape of its own")
    cells = notebook.cells
    opening = cells[: next(i for i, cell in enumerate(cells) if cell.source.startswith("## "))]
    ids = [cell.id for cell in opening]
    assert "?" in opening[0].source and ids.index("picture") < ids.index("guess")
    assert "guess" in opening[ids.index("guess")].metadata.tags
