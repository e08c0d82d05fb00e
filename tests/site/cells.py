"""Run cells of a chapter in this process, with other parameters or with an edit that a reader makes."""

import linecache
from pathlib import Path
from types import SimpleNamespace

import nbformat

from ropelab.study.engine import findings, notebook

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def cells_of(chapter: str) -> list[str]:
    """The ids of the cells of code behind the imports, without the answers, which run by themselves."""
    (path,) = NOTEBOOKS.glob(f"{chapter}_*.ipynb")
    code = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    return [cell.id for cell in code[2:] if "answer" not in cell.metadata.get("tags", [])]


def run(
    monkeypatch, chapter: str, *cells: str, edit: tuple[str, str, str] | None = None, instead=None, **given
) -> SimpleNamespace:
    """The names that a chapter has after the cell of its parameters, its imports and ``cells``.

    Args:
        chapter: the number of the chapter, ``"01"``.
        edit: the id of a cell, the text in it that a reader replaces, and the new text.
        instead: names that have other values after the imports, as a record.
        given: values of parameters.

    Returns:
        The names of the cells; ``findings_shown``, the texts of the findings; ``told``, all texts of statements.
    """
    (path,) = NOTEBOOKS.glob(f"{chapter}_*.ipynb")
    chapter_cells = nbformat.read(path, as_version=4).cells
    sources = {cell.id: cell.source for cell in chapter_cells}
    parameters = next(cell.id for cell in chapter_cells if "parameters" in cell.metadata.get("tags", []))
    if edit:
        cell, old, new = edit
        assert old in sources[cell], f"{cell}: the text that a reader is to replace is gone"
        sources[cell] = sources[cell].replace(old, new)
    shown: list[str] = []
    told: list[str] = []

    def display(*data, metadata=None, **_):
        shown.extend(text for key, text in (metadata or {}).items() if key == findings.FINDING)
        if findings.KNOWN_BY in (metadata or {}):
            told.append(data[0]["text/plain"].strip())

    monkeypatch.chdir(NOTEBOOKS)
    monkeypatch.setattr("IPython.display.display", display)
    monkeypatch.setattr(notebook, "begin", lambda: None)
    names: dict = {"__name__": path.stem, "findings_shown": shown}
    first = next(name for name in sources if "parameters." in sources[name])
    for cell in (parameters, first, *cells):
        source = sources[cell]
        linecache.cache[cell] = (len(source), None, source.splitlines(keepends=True), cell)  # for a kernel's source
        exec(compile(source, cell, "exec"), names)
        if cell == parameters:
            assert given.keys() <= names.keys(), f"{path.stem} has no parameter {given.keys() - names.keys()}"
            names |= given
        elif cell == first:
            names |= instead or {}
    return SimpleNamespace(**(names | {"told": "\n".join(told)}))
