"""The runner hides no failure, the report loses no formula and needs no network."""

import base64
import importlib
import io
import json
import pkgutil
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import urlencode

import numpy as np
import pandas as pd
import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("papermill")
pytest.importorskip("latex2mathml")

from bs4 import BeautifulSoup  # noqa: E402
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook  # noqa: E402
from PIL import Image  # noqa: E402

import ropelab.interop  # noqa: E402
from ropelab.study import doctor  # noqa: E402
from ropelab.study.engine import ledger as engine  # noqa: E402
from ropelab.study.engine import runner  # noqa: E402
from ropelab.study.engine.claims import Document, documents, load_claims  # noqa: E402
from ropelab.study.site import chapters, guide, ledgers, reference, report  # noqa: E402
from ropelab.study.site.mathml import Writer  # noqa: E402

PIXEL = (
    "import base64; from IPython.display import display, Image, SVG, Latex\n"
    'display(SVG(\'<svg xmlns="http://www.w3.org/2000/svg" width="4" height="4"></svg>\'))\n'
    "display(Latex(r'$\\displaystyle \\sqrt{2}$'))\n"
)


KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A study of two notebooks, the second of which breaks: (folder, runs, problems, page)."""
    folder = tmp_path_factory.mktemp("study")

    def write(name, *cells):
        cells = [new_code_cell("size: int = 3\nsmoke: bool = False", metadata={"tags": ["parameters"]}), *cells]
        nbformat.write(new_notebook(cells=cells, metadata=KERNEL), folder / name)

    write(
        "01_good.ipynb",
        new_markdown_cell("# Good with $R^\\top R = I$\n\n## A section\n\n`$code$` and $\\nonsense{x}$"),
        new_code_cell(
            "import sys, torch, ropelab; print(sys.executable, size, ropelab.__file__, torch.get_num_threads())"
        ),
        new_code_cell(PIXEL),
        new_code_cell(
            "from ropelab.study.engine.findings import finding\nfinding(f'the size $n$ is {size}', headline=True)"
        ),
        new_code_cell("finding('a smaller finding')"),
    )
    write("02_bad.ipynb", new_code_cell("print('so far')"), new_code_cell("1 / 0"), new_code_cell("print('never')"))
    build = folder / "build"
    runs = [
        runner.run_notebook(source, build, {"size": 7} if source.stem == "01_good" else {}, threads=1)
        for source in runner.sources(folder)
    ]
    page = build / "report" / "index.html"
    problems = report.write(page, runs)
    return folder, runs, problems, page.read_text()


def test_notebooks_run_in_order_under_this_interpreter(study):
    folder, runs, _, page = study
    assert [run.name for run in runs] == ["01_good", "02_bad"]
    assert runs[0].failure is None
    log = (folder / "build" / "logs" / "01_good.log").read_text()
    assert log.startswith(f"{sys.executable} 7 ") and str(runner.ROOT) in log
    assert log.split("\n")[0].split()[-1] == "1"  # the threads that the cell may use


def test_a_failing_cell_is_named_and_the_rest_is_kept(study):
    _, runs, _, page = study
    assert runs[1].failure == runner.Failure(cell=3, error="ZeroDivisionError: division by zero")
    executed = nbformat.read(runs[1].path, as_version=4)
    assert any("so far" in str(cell.get("outputs")) for cell in executed.cells)
    head = page[: page.index('id="story"')]
    assert "ZeroDivisionError: division by zero" in head


@pytest.mark.process
def test_a_dead_kernel_is_a_failure_of_its_cell(tmp_path):
    cells = [new_code_cell("size: int = 3", metadata={"tags": ["parameters"]}), new_code_cell("import os; os._exit(3)")]
    nbformat.write(new_notebook(cells=cells, metadata=KERNEL), tmp_path / "01_dead.ipynb")
    run = runner.run_notebook(tmp_path / "01_dead.ipynb", tmp_path / "build")
    assert run.failure.cell == 2 and "died" in run.failure.error.lower()


def test_an_unknown_parameter_is_refused(study):
    with pytest.raises(ValueError, match="01_good.ipynb has no parameter sise; it declares size, smoke"):
        runner.run_notebook(study[0] / "01_good.ipynb", study[0] / "other", {"sise": 4})


def test_the_first_page_leads_to_the_guide_then_tells_the_headlines_with_their_figures(study):
    folder, _, _, page = study
    soup = BeautifulSoup(page, "html.parser")
    heads = [head["id"] for head in soup.select("main h2")]
    assert heads == ["use-it", "findings", "book", "court", "reference"]
    assert heads[:1] + heads[2:] == [link["href"].partition("#")[2] for link in soup.select(".bar a:not(.home)")]
    rows = [[link["href"] for link in row.select("a")] for row in soup.select("main .cards")]
    assert rows == [[link["href"] for link in part.select("li > a")] for part in soup.select("nav > ul")]
    assert rows[0][:5] == ["1_library.html", "2_models.html", "3_drop_ins.html", "serve.html", "4_verify.html"]
    assert rows[1][:2] == ["01_good.html", "02_bad.html"] and rows[2][0] == "ledger.html"
    assert sum(rows, []) == list(dict.fromkeys(sum(rows, []))) and "ropelab.html" in rows[3]
    assert not soup.select("details, main section section > ul")  # nothing that makes the page long
    story = page[page.index('id="story"') : page.index('id="book"')]
    assert "1 main finding<" in story and re.search(r"the size <math.*</math> is 7", story)
    figure = re.search(r'<img src="(assets/01_good-\d+\.svg)" alt="the size n is 7"', story)
    assert (folder / "build" / "report" / figure[1]).read_text().startswith("<svg")
    assert "a smaller finding" not in page
    assert "a smaller finding" in (folder / "build" / "report" / "findings.html").read_text()


def test_a_claim_is_one_line_that_opens_with_links_to_its_quote_its_records_and_its_section(study):
    soup = BeautifulSoup((study[0] / "build" / "report" / "ledger.html").read_text(), "html.parser")
    found, claims = soup.select("details.claim"), load_claims()
    assert [one.dl["id"] for one in found] == [one.select_one("summary .id").text for one in found]
    assert [one.dl["id"] for one in found] == [claim.id for claim in claims]
    assert [one["data-document"] for one in found] == [claim.document for claim in claims]
    assert str(len(claims)) in soup.h1.text
    recorded, urls, said = set(), {document.name: document.url for document in documents()}, 0
    for one, claim in zip(found, claims, strict=True):
        links = [link["href"] for link in one.select("dl a")]
        assert one.dd.text == claim.statement and one.select_one("summary .says").text.strip()
        said += one.select_one("summary .says").text != claim.statement
        assert one.select(".badge") and not one.select("summary a, [open]")
        assert links[0].startswith(f"{urls[claim.document]}#:~:text=") and links[-1] == f"#{claim.id}"
        recorded |= {link for link in links if link.startswith("records.html#")}
    assert {"records.html#te_kernels", "records.html#sglang_grids"} & recorded
    assert said > len(claims) / 2  # the others lack published code here


def test_a_ledger_that_fails_hides_no_other(monkeypatch):
    def judged(*, document, records, compute=None):
        if document == "bad":
            raise KeyError("no such column")
        row = dict.fromkeys(engine.COLUMNS, "") | {
            "id": "AA-01", "statement": "It is $x$.", "outcome": "does not hold", "words": "does not hold",
            "remarks": None, "quote": 2.0, "on_gpu": False, "document": document,
        }  # fmt: skip
        return pd.DataFrame([row])

    monkeypatch.setattr(engine, "ledger", judged)
    good, bad = (ledgers.ledger(Document(key, key, "", ())) for key in ("good", "bad"))
    assert [row["outcome"] for row in good.rows] == ["does not hold"] and not good.trouble
    assert "<math" in good.rows[0]["statement"] and good.rows[0]["remarks"] == ""
    assert bad.rows == [] and "KeyError" in bad.trouble


def test_formulas_become_mathml_or_stay_visible(study):
    folder, _, problems, _ = study
    page = (folder / "build" / "report" / "01_good.html").read_text()
    assert "<msqrt>" in page
    assert "<code>$code$</code>" in page
    assert r'<span class="formula-source">\nonsense{x}</span>' in page
    assert any("01_good" in line and r"\nonsense{x}" in line for line in problems)


class Links(HTMLParser):
    """The names in a page: (tag, address) in ``links``, and the ids that others may name."""

    def __init__(self, page):
        super().__init__()
        self.links, self.ids, self.images = [], set(), []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.ids |= {values["id"]} if "id" in values else set()
        self.images += [values] if tag == "img" else []
        self.links += [(tag, values[name]) for name in ("src", "srcset", "href", "data", "poster") if name in values]


def test_every_link_of_the_site_leads_somewhere_and_none_needs_a_network(study):
    site = study[0] / "build" / "report"
    pages = {path.name: Links(path.read_text()) for path in site.glob("*.html")}
    assert {"index.html", "ledger.html", "records.html", "01_good.html", "02_bad.html", "ropelab.html"} <= pages.keys()
    for name, page in pages.items():
        for tag, address in page.links:
            if address.startswith(("https://", "http://")):
                assert tag == "a", f"{name} loads {address}"
                continue
            file, _, anchor = address.partition("#")
            if file not in pages and (runner.NOTEBOOKS / file).with_suffix(".ipynb").is_file():
                continue  # a chapter that this study leaves out
            target = pages.get(file or name)
            assert (site / (file or name)).is_file(), f"{name} names {address}"
            assert not anchor or anchor in target.ids, f"{name} names {address}"
        assert all(image["alt"] for image in page.images)
    for path in site.glob("assets/*.css"):
        assert not re.findall(r"@import|url\(\"?https?:", path.read_text())


def test_the_search_knows_sections_claims_and_names(study):
    index = (study[0] / "build" / "report" / "assets" / "search-index.js").read_text()
    rows = json.loads(index.removeprefix("window.studyIndex = ").rstrip(";\n"))
    by_url = {url: (page, title, text) for url, page, title, text in rows}
    assert len(by_url) == len(rows)
    assert by_url["01_good.html#01_good-a-section"][1] == "A section"
    assert all(by_url[f"ledger.html#{claim.id}"][1] == claim.id for claim in load_claims())
    assert by_url["records.html#dense"][1] == "dense"
    assert (
        by_url["1_library.html#1_library-install"][1] == "Install"
        and "gpt_oss" in by_url["2_models.html#2_models-which-models"][2]
    )
    assert "Rotary position embedding" in by_url["ropelab.html#apply_rope"][2]
    pages = list(dict.fromkeys(url.partition("#")[0] for url in by_url))
    uses = [one.page for one in guide.guides() if one.part == "Use it"]
    assert pages[: len(uses)] == uses


def test_a_large_figure_is_shown_as_few_bytes():
    """A plot as pixels keeps its size and colours, and an SVG with too many bytes is shown as pixels."""
    drawn = io.BytesIO()
    dots = np.arange(400 * 600).reshape(400, 600) % 7
    Image.fromarray((dots[..., None] * [30, 20, 10]).astype("uint8")).save(drawn, "PNG", compress_level=0)
    pixels = base64.b64encode(drawn.getvalue()).decode()
    for svg, kind in ((f"<svg>{'x' * chapters.LARGEST_SVG}</svg>", "png"), ("<svg></svg>", "svg")):
        output = nbformat.v4.new_output("display_data", {"image/svg+xml": svg, "image/png": pixels})
        figure = chapters._output(output, Writer(), "name")
        assert figure.file == f"assets/name.{kind}"
        if kind == "png":
            shown = Image.open(io.BytesIO(figure.data))
            assert shown.size == (600, 400) and len(figure.data) < len(drawn.getvalue()) / 3
            assert (np.asarray(shown.convert("RGB")) == np.asarray(Image.open(drawn))).all()


def test_every_public_module_has_a_page_of_the_reference():
    """CONTRIBUTING.md says what is public: a module of `ropelab.interop` is that, or is named as internal."""
    found = {module.name for module in pkgutil.iter_modules(ropelab.interop.__path__)}
    assert found == {*reference.ADAPTERS, *reference.INTERNAL}
    assert not set(reference.ADAPTERS) & set(reference.INTERNAL)
    public = re.findall(r"`(ropelab[\w.]*)\.__all__`", (runner.ROOT / "CONTRIBUTING.md").read_text())
    assert {"ropelab", "ropelab.conformance"} <= set(public) <= set(reference.MODULES)
    pages = reference.references()
    assert [page.title for page in pages] == list(reference.MODULES)
    for page in pages:
        soup = BeautifulSoup(page.body, "html.parser")
        assert page.sections and [name for name, _ in page.sections] == [head["id"] for head in soup.select("h2")]
        first = [soup.h1.find_next_sibling(), *(head.find_next_siblings()[1] for head in soup("h2"))]
        assert {text.name for text in first} == {"p"}


def test_a_module_that_cannot_be_imported_is_read_as_source():
    page, imported = (make(name) for make, name in (
        (reference.from_source, "ropelab.interop.deepspeed"),
        (reference.reference, importlib.import_module("ropelab.interop.deepspeed")),
    ))  # fmt: skip
    signatures = r"<pre>(\w+ \w+).*?</pre>"
    read, ran = (re.sub(signatures, r"\1", one.body, flags=re.DOTALL) for one in (page, imported))
    assert (page.page, page.sections, read) == (imported.page, imported.sections, ran)


def test_names_have_their_docstrings():
    text = reference.docstring(
        "Do it.\n\nArgs:\n    a, b: two\n        numbers\n    c: one\n\nRaises:\n    ValueError: no.", "x"
    )
    assert "<dt>a, b</dt><dd>two numbers</dd><dt>c</dt><dd>one</dd>" in text and "<h3>Raises</h3>" in text
    page = reference.reference(ropelab)
    assert [name for name, _ in page.sections] == [n for n in ropelab.__all__ if callable(getattr(ropelab, n))]


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.process
@pytest.mark.skipif(BROWSER is None, reason="needs a Chromium")
def test_a_browser_filters_claims_and_finds_words(study, tmp_path):
    page = study[0] / "build" / "report" / "ledger.html"
    document = documents()[0]
    inside = [claim.id for claim in load_claims() if claim.document == document.name]
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--dump-dom"]

    def opened(width=1280, **query):
        address = [f"--window-size={width},900", f"{page.as_uri()}?{urlencode(query)}"]
        dom = subprocess.run([*command, *address], capture_output=True, text=True, timeout=300).stdout
        return BeautifulSoup(dom, "html.parser")

    assert not opened().select(".more")  # the hint at what scrolls
    assert opened(width=400).select(".scroll.more > .overview")
    soup = opened(document=document.name)
    assert [one.dl["id"] for one in soup.select("details.claim:not([hidden])")] == inside
    assert f"{len(inside)} of {len(load_claims())} claims" in soup.select_one(".filters output").text
    for words, first in {
        "rope_and_cache": "ropelab.html#rope_and_cache",  # its exact name, before names that contain it
        "RotaryEmbedding": "ropelab.html#RotaryEmbedding",
        "interop.vllm": "ropelab.interop.vllm.html",
        "install": "1_library.html#1_library-install",
        "gpt-oss": "2_models.html#2_models-which-models",
        "TE-03": "ledger.html#TE-03",
    }.items():
        assert opened(q=words).select_one("#found a")["href"] == first, words


@pytest.mark.parametrize(
    "source",
    [
        "$x_0$",
        "$$R(\\theta)^{\\top} R(\\theta) = I$$",
        "\\begin{align}\na &= b \\\\\nc &= d\n\\end{align}",
        "Text with $a < b$ and $$\n\\begin{pmatrix} 1 & 0 \\\\ 0 & 1 \\end{pmatrix}\n$$ inside.",
        "| a | b |\n|---|---|\n| $x$ | $\\lVert y \\rVert_2$ |",
    ],
)
def test_markdown_formulas(source):
    writer = Writer()
    page = writer.markdown(source)
    assert "<math" in page and "$" not in page and "\\" not in page
    assert writer.unconverted == []


@pytest.mark.parametrize("source", ["`$x$`", "```\n$x$ and \\begin{align}a\\end{align}\n```", "costs \\$5 and \\$6"])
def test_what_is_not_a_formula_is_left_alone(source):
    assert "<math" not in Writer().markdown(source)


@pytest.mark.parametrize("broken", [r"\nonsense{x}", r"\left( x", "{"])
def test_broken_formulas_are_shown_and_reported(broken):
    writer = Writer()
    assert broken in writer.latex(f"$\\displaystyle {broken}$")
    assert writer.unconverted == [f"\\displaystyle {broken}"]


def test_headings_have_distinct_ids():
    writer = Writer(prefix="01_x")
    writer.markdown("# Same\n\n## Same\n\n## Same")
    assert [identifier for _, identifier, _ in writer.headings] == ["01_x-same", "01_x-same-2", "01_x-same-3"]


def test_doctor_names_what_is_missing():
    assert doctor.missing(["pytest>=1"]) == []
    lacking = doctor.missing(["pytest>=999", "surely-not-installed>=1"])
    assert lacking[0].startswith("pytest>=999 (found ") and lacking[1] == "surely-not-installed>=1"


def test_doctor_reads_markers():
    """Triton is required where it has wheels."""
    there, elsewhere = f"sys_platform == {sys.platform!r}", "sys_platform == 'elsewhere'"
    assert doctor.missing([f"surely-not-installed>=1; {there}"]) == ["surely-not-installed>=1"]
    assert doctor.missing([f"surely-not-installed>=1; {elsewhere}"]) == []


@pytest.mark.parametrize(
    "text",
    [
        "<script>alert(1)</script>", "a <img src=x onerror=alert(1)> b", "<div>\n<script>1</script>\n</div>",
        "[x](javascript:alert(1))", "[x](JaVaScript:alert(1))", "<javascript:alert(1)>", "![x](javascript:1)",
        "[x](java&#115;cript:alert(1))", "[x](vbscript:x)", "[x](data:text/html;base64,eA==)",
        "[x][1]\n\n[1]: javascript:1", r"$\href{javascript:alert(1)}{x}$", "<!-- a --><script>1</script><!-- b -->",
    ],
)  # fmt: skip
def test_text_brings_no_markup_and_no_script_into_a_page(text):
    for write in (Writer().inline, Writer().markdown):
        for element in BeautifulSoup(write(text), "html.parser").find_all(True):
            assert element.name not in ("script", "div") and "onerror" not in element.attrs
            assert {element.get("href"), element.get("src")} <= {None, "#harmful-link"}


def test_comments_and_plain_links_are_as_they_were():
    assert Writer().markdown("<!-- begin -->\n\n[a](https://x.y) [b](../data/x.csv)\n") == (
        '<p><a href="https://x.y">a</a> <a href="../data/x.csv">b</a></p>\n'
    )
