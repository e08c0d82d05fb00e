"""Write the report: prepare a page for each notebook, text of the guide, list and public module, and let Sphinx build.

``docs/conf.py`` has Sphinx's settings, and ``docs/_static`` the style and the filter of the ledger.
"""

import io
import pkgutil
import re
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from sphinx.application import Sphinx
from sphinx.util.console import strip_colors
from sphinx.util.docutils import docutils_namespace, patch_docutils

import ropelab.interop
from ropelab.bench import records
from ropelab.bench.records import ROOT
from ropelab.study.engine import claims as documents
from ropelab.study.engine.measure import Measured
from ropelab.study.engine.runner import Run
from ropelab.study.site import pages, small
from ropelab.study.site.chapters import chapter
from ropelab.study.site.ledgers import Ledger, ledger
from ropelab.study.site.provenance import origin, provenance

DOCS, README, FIGURES = ROOT / "docs", ROOT / "README.md", ROOT / "data" / "figures"
REPOSITORY = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"]["Repository"]
INTERNAL = ("calls", "log", "patch", "probe", "vllm_layers", "vllm_writes")
"""The modules of `ropelab.interop` that the adapters share, and that users do not import from."""
MODULES = (
    "ropelab",
    "ropelab.conformance",
    "ropelab.conformance.configuration",
    "ropelab.conformance.models",
    *(one.name for one in pkgutil.iter_modules(ropelab.interop.__path__, "ropelab.interop.")
      if one.name.rpartition(".")[2] not in INTERNAL),
)  # fmt: skip
"""The modules that users import from."""


def write(
    page: Path, runs: list[Run], ledgers: Sequence[Ledger] | None = None, *, smoke: bool = False,
    where: records.Where = records.MEASUREMENTS, measured: Measured | None = None,
) -> list[str]:  # fmt: skip
    """Write the report of these runs to ``page``, the first page, and to its folder.

    Args:
        ledgers: the ledger of each document; by default they are computed here.
        where: the records that the notebooks read; by default those of the GPU of reference. Records of other GPUs,
            and their verdicts, have a page of their own.
        measured: the measurements of this run; they get a page of their own.

    Returns:
        A line for each thing that a reader of the report will miss: a link that leads nowhere, a formula left as text,
        a ledger that failed, or a record that cannot be believed.
    """
    where = records.of_one_gpu(where)
    if ledgers is None:
        ledgers = [ledger(document, where) for document in documents.documents()]
    sources, damaged = provenance(where)
    problems = [one.trouble for one in ledgers if one.trouble] + damaged
    troubles = [f"{run.name} stopped in {run.failure}; no later cell ran" for run in runs if run.failure] + problems
    chapters = [chapter(run) for run in runs]
    for one in chapters:
        for cell in one.notebook.cells:
            cell.source = linked(cell.source) if cell.cell_type == "markdown" else cell.source
    texts = {path.stem: linked(path.read_text(encoding="utf-8")) for path in DOCS.glob("*.md")}
    index = texts.pop("README").partition("\n")[2]
    guide = dict.fromkeys(re.findall(r"\]\((\w+)\.md\)", index))  # in the order in which the index names them
    judged = pages.by_gpu(ledgers)
    own = {gpu: rows for gpu, rows in judged.items() if gpu == where.gpu}
    texts |= {
        "ledger": pages.ledger(ledgers, own, chapters, {row["study"] for row in sources if row["gpu"] == where.gpu}),
        "findings": pages.findings(chapters),
        "records": pages.records([row for row in sources if row["gpu"] == where.gpu]),
        "gpus": pages.gpus(judged, [row for row in sources if row["gpu"] != where.gpu]),
        **({"measured": pages.measured(measured)} if measured else {}),
        **{name: f"# {name}\n\n```{{eval-rst}}\n.. automodule:: {name}\n   :members:\n```\n" for name in MODULES},
    }
    keys = {document.key for document in documents.documents()}
    court = [one.name for one in chapters if one.name[3:] in keys]
    parts = {
        "Use it": [name for name in guide if name not in ("6_claims", "8_notation", "9_references")],
        "Book": [*(one.name for one in chapters if one.name not in court), "findings", "8_notation", "9_references"],
        "Court": ["ledger", *court, "6_claims", "records", "gpus", *["measured"] * bool(measured)],
        "Reference": MODULES,
    }
    start = re.match(r".*?^```python\n.*?^```\n", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    start = linked(start[0] if start else "# ropelab\n")
    texts["index"] = pages.first(start, index, troubles, parts, texts, chapters, own)
    files = {f"{name}.md": text for name, text in texts.items()}
    files |= {f"{one.name}.ipynb": nbformat.writes(one.notebook) for one in chapters}
    files |= {name: svg for one in chapters for name, svg in one.figures.items()}
    files |= {path.name: path.read_text(encoding="utf-8") for path in FIGURES.glob("*.svg")}
    return problems + _build(files, page.parent, smoke)


def linked(text: str) -> str:
    """Markdown without comments, whose links lead to pages of the report, or else to files of the repository."""
    text = re.sub(r"^<!-- .*? -->\n", "", text, flags=re.MULTILINE)
    text = re.sub(r"\]\((?:\.\./)?(?:docs|notebooks)/(?=\w)", "](", text)
    return re.sub(r"\]\(\.\./", f"]({REPOSITORY}/blob/main/", text)


def _build(files: Mapping[str, str], out: Path, smoke: bool) -> list[str]:
    """Let Sphinx make the pages of these files; its warnings."""
    settings = {"html_last_updated_fmt": " · ".join(origin()).replace("%", "%%")}
    if smoke:
        settings["html_theme_options.announcement"] = "A smoke run: tiny parameters. Its numbers mean nothing."
    shutil.rmtree(out / "_images", ignore_errors=True)  # their names come from their content, so they would pile up
    warnings = io.StringIO()
    with TemporaryDirectory() as folder, patch_docutils(str(DOCS)), docutils_namespace():
        for name, text in files.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        Sphinx(folder, DOCS, out, f"{folder}/.doctrees", "html", settings, status=None, warning=warnings).build()
    for path in out.glob("*.html"):
        path.write_text(small.page(path.read_text(encoding="utf-8")), encoding="utf-8")
    for path in out.rglob("*.map"):  # for who debugs the style of the theme
        path.unlink()
    return [line.replace(f"{folder}/", "") for line in strip_colors(warnings.getvalue()).splitlines()]
