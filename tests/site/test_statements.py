"""Statements of notebooks say how they are known, and the report counts them."""

import ast
from pathlib import Path

import nbformat
import pytest

from ropelab.study.engine import findings


def test_statements_are_counted_by_the_way_in_which_they_are_known(monkeypatch):
    said = []

    def display(data, raw, metadata):
        said.append({"data": data, "metadata": metadata})

    monkeypatch.setattr("IPython.display.display", display)
    findings.finding("a holds", by=findings.PROVED)
    findings.statements(["b", "c"], findings.EXHAUSTED)
    findings.finding("no word")
    assert findings.PROVED in said[0]["data"]["text/markdown"] and findings.EXHAUSTED in str(said[1])
    notebook = {"cells": [{"outputs": said}, {"source": "no outputs"}]}
    counts = findings.counted({"chapter": notebook, "silent": {"cells": []}})
    assert counts == {"chapter": {"proved": 1, "checked exhaustively": 2, "tested": 0, "measured": 0}}


def test_another_word_is_refused():
    for call in (lambda: findings.finding("x", by="believed"), lambda: findings.statements(["x"], "")):
        with pytest.raises(ValueError, match="by: expected one of proved, checked exhaustively, tested, measured"):
            call()


def test_a_notebook_keeps_the_words():
    output = nbformat.v4.new_output("display_data", {"text/plain": "x"}, metadata={findings.KNOWN_BY: ["tested"]})
    cell = nbformat.v4.new_code_cell("x", outputs=[output])
    assert findings.counted({"a": nbformat.v4.new_notebook(cells=[cell])})["a"]["tested"] == 1


PART_ONE = sorted((Path(__file__).parents[2] / "notebooks").glob("[01][0-9]_*.ipynb"))[:11]


@pytest.mark.parametrize("path", PART_ONE, ids=lambda path: path.stem)
def test_every_finding_of_part_one_says_how_it_is_known(path):
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "code":
            calls = [node for node in ast.walk(ast.parse(cell.source)) if isinstance(node, ast.Call)]
            for call in calls:
                if isinstance(call.func, ast.Name) and call.func.id == "finding":
                    words = [keyword.value.value for keyword in call.keywords if keyword.arg == "by"]
                    assert words and words[0] in findings.WAYS, f"{cell.id}: {ast.unparse(call)}"
