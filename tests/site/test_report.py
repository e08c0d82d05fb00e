"""The runner hides no failure, the report loses no formula and needs no network."""

import json
import pkgutil
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from urllib.parse import urlencode

import matplotlib.pyplot as plt
import pandas as pd
import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("papermill")
pytest.importorskip("sphinx")

from bs4 import BeautifulSoup  # noqa: E402
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook  # noqa: E402

import ropelab.interop  # noqa: E402
from ropelab.study import doctor  # noqa: E402
from ropelab.study.engine import ledger as engine  # noqa: E402
from ropelab.study.engine import runner  # noqa: E402
from ropelab.study.engine.claims import Document, documents, load_claims  # noqa: E402
from ropelab.study.site import ledgers, report, small  # noqa: E402
from ropelab.study.site.mathml import mathml  # noqa: E402

FIGURE = (
    "from IPython.display import display, SVG, Latex\n"
    'display(SVG(\'<svg xmlns="http://www.w3.org/2000/svg" width="4" height="4"></svg>\'))\n'
    "display(Latex(r'$\\displaystyle \\sqrt{2}$'))\n"
)
MARKUP = (
    "<script>alert(1)</script> a <img src=x onerror=alert(1)> [x](javascript:alert(1)) $\\href{javascript:alert(1)}{x}$"
)


pytestmark = pytest.mark.filterwarnings("ignore::PendingDeprecationWarning", "ignore::DeprecationWarning")
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
        new_markdown_cell("# Good with $R^\\top R = I$\n\n## A section\n\n`$code$` and $\\nonsense{x}$\n\n" + MARKUP),
        new_code_cell(
            "import sys, torch, ropelab; print(sys.executable, size, ropelab.__file__, torch.get_num_threads())"
        ),
        new_code_cell(FIGURE),
        new_code_cell(
            "from ropelab.study.engine.findings import finding\nfinding(f'the size $n$ is {size}', headline=True)"
        ),
        new_code_cell(
            "from ropelab.study.engine.findings import further\n"
            "finding('a smaller finding')\nfurther(['one that is folded'], 'tested')"
        ),
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
    assert "ZeroDivisionError: division by zero" in page[: page.index("main finding")]
    assert "ZeroDivisionError: division by zero" in opened(study, "02_bad").select_one("article .error").text


@pytest.mark.process
def test_a_dead_kernel_is_a_failure_of_its_cell(tmp_path):
    cells = [new_code_cell("size: int = 3", metadata={"tags": ["parameters"]}), new_code_cell("import os; os._exit(3)")]
    nbformat.write(new_notebook(cells=cells, metadata=KERNEL), tmp_path / "01_dead.ipynb")
    run = runner.run_notebook(tmp_path / "01_dead.ipynb", tmp_path / "build")
    assert run.failure.cell == 2 and "died" in run.failure.error.lower()


def test_an_unknown_parameter_is_refused(study):
    with pytest.raises(ValueError, match="01_good.ipynb has no parameter sise; it declares size, smoke"):
        runner.run_notebook(study[0] / "01_good.ipynb", study[0] / "other", {"sise": 4})


def opened(study, name):
    return BeautifulSoup((study[0] / "build" / "report" / f"{name}.html").read_text(), "html.parser")


def test_the_first_page_says_what_it_is_then_leads_to_the_guide_and_tells_the_headlines_with_their_figures(study):
    soup = opened(study, "index")
    heads = [head.contents[0] for head in soup.select("article h2")]
    assert heads == ["Install", "Use", "The guide", "1 main finding", "Book", "Court", "Reference"]
    assert [image["class"][0] for image in soup.select("article > section > img")] == ["only-dark", "only-light"]
    assert "apply_rope(q, k" in soup.select_one("#use .highlight").text
    links = [link["href"] for link in soup.select(".sidebar-tree a")]
    assert links == list(dict.fromkeys(links)) and "ropelab.html" in links
    assert links[:3] == ["1_library.html", "2_models.html", "3_drop_ins.html"]
    assert links.index("02_bad.html") < links.index("findings.html") < links.index("ledger.html")
    story = soup.select_one("#main-finding")
    assert story.math and "is 7" in story.p.text and story.img["alt"] == "the size $n$ is 7"
    assert (study[0] / "build" / "report" / story.img["src"]).read_text().startswith("<svg")
    assert story.img["src"] in [image["src"] for image in opened(study, "01_good").select("article img")]
    for smaller in ("a smaller finding", "one that is folded (tested)"):
        assert smaller not in soup.text and smaller in opened(study, "findings").text
    assert opened(study, "01_good").select_one(".cell_output details li").text == "one that is folded (tested)"
    assert {image["alt"] for image in opened(study, "01_good").select("article img")} == {"the size n is 7"}


def test_a_claim_has_its_row_and_links_to_its_quote_its_records_and_its_section(study):
    soup = opened(study, "ledger")
    claims, urls = load_claims(), {document.name: document.url for document in documents()}
    rows = [[cell.text for cell in row.select("td")] for row in soup.select(".ledger tbody tr")]
    assert [(row[0], row[5]) for row in rows] == [(claim.id, claim.document) for claim in claims]
    assert str(len(claims)) in soup.article.p.text
    recorded = set()
    for claim, row in zip(claims, soup.select(".ledger tbody tr"), strict=True):
        found = soup.select_one(row.a["href"]).find_next("dd")
        recorded |= {link["href"] for link in found.select("a.internal")}
        assert found.p.text.partition(": ")[2].strip()
        assert found.select_one("a.external")["href"].startswith(f"{urls[claim.document]}#:~:text=")
    assert {"records.html#record-te_kernels", "records.html#record-sglang_grids"} & recorded
    said = [row[1] != claim.statement for row, claim in zip(rows, claims, strict=True)]
    assert sum(said) > len(claims) / 2  # the others lack published code here


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
    assert good.rows[0]["remarks"] == ""
    assert bad.rows == [] and "KeyError" in bad.trouble


def test_formulas_become_mathml_or_stay_visible(study):
    page, problems = opened(study, "01_good"), study[2]
    assert page.select("msqrt") and page.select("h1 math")
    assert "$code$" in [code.text for code in page.select("code")]
    assert page.select_one(".formula-source").text == r"\nonsense{x}"
    assert any("01_good" in line and r"\nonsense{x}" in line for line in problems)


def test_sphinx_finds_nothing_else_to_say(study):
    absent = {path.stem for path in runner.NOTEBOOKS.glob("*.ipynb")}
    said = [line for line in study[2] if not any(f"'{name}.ipynb'" in line for name in absent)]
    assert len(said) == 1 and r"\nonsense{x}" in said[0], said


def test_text_brings_no_markup_and_no_script_into_a_page(study):
    article = opened(study, "01_good").article
    assert "<script>alert(1)</script>" in article.text
    assert not article.select("script, [onerror]")
    assert not [link for link in article.select("[href]") if "javascript" in link["href"]]


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
            if address.startswith("data:"):
                continue
            file, _, anchor = re.sub(r"\?v=\w+$", "", address).partition("#")
            if anchor.endswith(".ipynb") and (runner.NOTEBOOKS / anchor).is_file():
                continue  # a chapter that this study leaves out
            target = pages.get(file or name)
            assert (site / (file or name)).is_file(), f"{name} names {address}"
            assert not anchor or anchor in target.ids, f"{name} names {address}"
        assert all(image["alt"] for image in page.images)
    for path in site.glob("_static/**/*.css"):
        assert not re.findall(r"@import|url\(\"?https?:", path.read_text()), path
    for path in site.glob("_static/**/*.js"):
        assert not re.findall(r"(?:src\s*=|fetch\(|import\(?)\s*[\"'`]https?:", path.read_text()), path


def test_the_search_knows_sections_claims_and_names(study):
    index = (study[0] / "build" / "report" / "searchindex.js").read_text()
    found = json.loads(index.removeprefix("Search.setIndex(").rstrip(")"))
    assert {"A section", "Install", "Which models"} <= {title for title in found["alltitles"]}
    names = {entry[-1] for entries in found["objects"].values() for entry in entries}
    names |= {f"{prefix}.{entry[-1]}" for prefix, entries in found["objects"].items() for entry in entries}
    assert {claim.id for claim in load_claims()} | {"dense", "ropelab.apply_rope"} <= names
    models = found["docnames"].index("2_models")
    assert models in list(
        found["terms"]["gpt_oss"] if isinstance(found["terms"]["gpt_oss"], list) else [found["terms"]["gpt_oss"]]
    )


def test_every_public_module_has_a_page_of_the_reference(study):
    """CONTRIBUTING.md says what is public: a module of `ropelab.interop` is that, or is named as internal."""
    found = {module.name for module in pkgutil.iter_modules(ropelab.interop.__path__)}
    assert set(report.INTERNAL) < found
    public = re.findall(r"`(ropelab[\w.]*)\.__all__`", (runner.ROOT / "CONTRIBUTING.md").read_text())
    assert {"ropelab", "ropelab.conformance"} <= set(public) <= set(report.MODULES)
    for name in report.MODULES:
        page = opened(study, name)
        assert page.h1.text.startswith(name) and page.article.p and page.select("dl.py dd p")
    names = {name for name in ropelab.__all__ if callable(getattr(ropelab, name))}
    assert names <= {one["id"].removeprefix("ropelab.") for one in opened(study, "ropelab").select("dl.py > dt[id]")}
    assert not opened(study, "ropelab").select('dt[id*="._"]')
    for name in report.MODULES:  # torch's words on every module, and a sentence "D." that is no list
        page = opened(study, name)
        assert "Initialize internal Module state" not in page.text and not page.select("ol.upperalpha"), name
        assert "*args, **kwargs" not in "".join(sig.text for sig in page.select("dl.class > dt")), name
        assert "Alias for field number" not in page.text, name
        assert not [dt for dt in page.select("dl:is(.property, .attribute, .data) dt") if dt.text == "Type:"], name
        assert all(len(sig.text) < 200 for sig in page.select("dl.data > dt")), name


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.mark.process
@pytest.mark.skipif(BROWSER is None, reason="needs a Chromium")
def test_a_browser_filters_claims_and_finds_words(study, tmp_path):
    site = study[0] / "build" / "report"
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}", "--dump-dom"]

    def browsed(page, **query):
        address = f"{(site / page).as_uri()}?{urlencode(query)}"
        ran = [*command, "--virtual-time-budget=20000", address]
        return BeautifulSoup(subprocess.run(ran, capture_output=True, text=True, timeout=300).stdout, "html.parser")

    document = documents()[0].name
    inside = [claim.id for claim in load_claims() if claim.document == document]
    soup = browsed("ledger.html", document=document)
    assert [row.td.text for row in soup.select(".ledger tbody tr:not([hidden])")] == inside
    assert f"{len(inside)} of {len(load_claims())} claims" in soup.select_one(".filters output").text
    for words, first in {
        "rope_and_cache": "ropelab.html#ropelab.rope_and_cache",
        "RotaryEmbedding": "ropelab.html#ropelab.RotaryEmbedding",
        "install": "1_library.html#install",
        "gpt_oss": "2_models.html",
        "TE-03": "ledger.html#claim-TE-03",
    }.items():
        links = [link["href"].partition("?")[0] for link in browsed("search.html", q=words).select("ul.search a")]
        assert first in links[:5], (words, links[:9])


@pytest.mark.parametrize(
    "source",
    [
        "x_0", "R(\\theta)^{\\top} R(\\theta) = I", "\\begin{align}\na &= b \\\\\nc &= d\n\\end{align}",
        "\\begin{pmatrix} 1 & 0 \\\\ 0 & 1 \\end{pmatrix}", "a < b", "\\lVert y \\rVert_2",
    ],
)  # fmt: skip
def test_a_formula_becomes_mathml(source):
    page = mathml(source, display=True)
    assert page.startswith("<math") and "\\" not in page


def test_a_figure_in_fewer_bytes_has_all_its_letters_and_marks(tmp_path):
    figure, axes = plt.subplots()
    axes.plot([0.123456, 2], [1, 3], "o-", label="0.123456 of  a copy")
    axes.legend()
    with plt.rc_context({"svg.fonttype": "none"}):  # as in notebooks
        figure.savefig(tmp_path / "x.svg")
    plt.close(figure)
    before = re.sub(r"<\?xml.*?\?>", "", (tmp_path / "x.svg").read_text())
    old, new = (BeautifulSoup(text, "html.parser") for text in (before, small.svg(before)))
    assert len(str(new)) < 0.7 * len(before)
    assert [tag.text.split() for tag in new.find_all("text")] == [tag.text.split() for tag in old.find_all("text")]
    for name in "path", "use":
        (ours, theirs) = (page.find_all(name) for page in (new, old))
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            numbers = [[float(x) for x in re.findall(r"-?\d+\.?\d*", tag.get("d") or tag["x"])] for tag in (one, other)]
            assert numbers[0] == pytest.approx(numbers[1], abs=0.1)
            assert f".{one['class'][0]}{{{other['style']}}}" in new.style.text if other.get("style") else True
    named = {tag["href"] for tag in new.find_all("use")}
    assert named and named <= {f"#{tag['id']}" for tag in new.find_all("path") if tag.get("id")}


def test_a_page_in_fewer_bytes_reads_the_same():
    rows = pd.DataFrame({"word": ["a", "b"], "number": [1, 2]})
    marked = rows.style.set_properties(subset=(0, "number"), color="red").set_table_styles(
        {"word": [{"selector": "", "props": "text-align: left"}]}
    )
    code = '<pre><span></span><span class="n">x</span>  <span class="o">=</span>  <span class="mi">1</span>\n  y</pre>'
    before = f"<p>two\n  words</p>{code}<textarea> a  b </textarea>{marked.to_html()}"
    after = small.page(before)
    old, new = (BeautifulSoup(text, "html.parser") for text in (before, after))
    assert new.pre.text == old.pre.text == "x  =  1\n  y" and new.textarea.text == " a  b "
    assert new.pre.decode_contents() == 'x  =  <span class="mi">1</span>\n  y'
    assert [cell.text.strip() for cell in new.select("td")] == [cell.text.strip() for cell in old.select("td")]
    for selector in re.findall(r"(#T_[\w .]+?) \{", before):
        assert [tag.text for tag in new.select(selector)] == [tag.text for tag in old.select(selector)] != []


@pytest.mark.parametrize("broken", [r"\nonsense{x}", r"\left( x", "{"])
def test_a_broken_formula_is_refused(broken):
    with pytest.raises(Exception):  # noqa: B017  the converter raises many types
        mathml(broken, display=False)


def test_doctor_names_what_is_missing():
    assert doctor.missing(["pytest>=1"]) == []
    lacking = doctor.missing(["pytest>=999", "surely-not-installed>=1"])
    assert lacking[0].startswith("pytest>=999 (found ") and lacking[1] == "surely-not-installed>=1"


def test_doctor_reads_markers():
    """Triton is required where it has wheels."""
    there, elsewhere = f"sys_platform == {sys.platform!r}", "sys_platform == 'elsewhere'"
    assert doctor.missing([f"surely-not-installed>=1; {there}"]) == ["surely-not-installed>=1"]
    assert doctor.missing([f"surely-not-installed>=1; {elsewhere}"]) == []
