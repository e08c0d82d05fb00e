"""The notebooks are sources: no outputs, thin, parameterized in one annotated cell."""

import ast
import importlib
import re
import symtable
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("papermill")

from ropelab.bench import records  # noqa: E402
from ropelab.study.engine import parameters, record_links, runner  # noqa: E402
from ropelab.study.site import bibliography, chapters, report  # noqa: E402

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
TIMERS = {"time", "timeit", "do_bench", "do_bench_cudagraph", "perf_counter", "Event"}


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    content = nbformat.read(request.param, as_version=nbformat.NO_CONVERT)
    nbformat.validate(content)
    return content


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_every_notebook_has_a_number_of_its_own():
    numbers = [re.match(r"(\d\d)_", path.stem).group(1) for path in NOTEBOOKS]
    assert numbers and len(set(numbers)) == len(numbers)


def test_nothing_executed_is_stored(notebook):
    for cell in code_cells(notebook):
        assert cell.outputs == [] and cell.execution_count is None, f"cell {cell.id} has outputs"
        assert not {"execution", "papermill", "collapsed"} & set(cell.metadata), f"cell {cell.id}: {cell.metadata}"


def test_cell_ids_are_stable(notebook):
    """Format 4.5 stores the ids; below it every tool that opens the file invents new ones."""
    assert (notebook.nbformat, notebook.nbformat_minor) >= (4, 5)
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)


def test_kernel_is_plain_python(notebook):
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.metadata.kernelspec.language == "python"


def test_parameters_are_one_annotated_cell(notebook):
    tagged = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1
    statements = ast.parse(tagged[0].source).body
    assert statements, "the parameters cell declares nothing"
    for statement in statements:
        assert isinstance(statement, ast.AnnAssign) and statement.value is not None, ast.unparse(statement)


def test_records_are_the_committed_ones_unless_told_otherwise(notebook):
    """A notebook says nowhere else where the records are."""
    parameters = next(cell for cell in code_cells(notebook) if "parameters" in cell.metadata.get("tags", []))
    declared = {statement.target.id: statement.value for statement in ast.parse(parameters.source).body}
    if "records" in declared:
        assert ast.literal_eval(declared["records"]) == "data/measurements"
    others = [cell.source for cell in code_cells(notebook) if cell is not parameters]
    assert not any("data/measurements" in source for source in others)


def test_every_parameter_is_checked_before_anything_runs(notebook):
    first, second = code_cells(notebook)[:2]
    declared = {statement.target.id for statement in ast.parse(first.source).body}
    calls = [node for node in ast.walk(ast.parse(second.source)) if isinstance(node, ast.Call)]
    calls = [call for call in calls if ast.unparse(call.func).startswith("parameters.")]
    checked = {word.arg for call in calls for word in call.keywords}
    for call in calls:
        if ast.unparse(call.func) == "parameters.chosen_records":
            checked |= {argument.id for argument in call.args}
    assert checked == declared
    uses = [node.lineno for node in ast.walk(ast.parse(second.source))
            if isinstance(node, ast.Name) and node.id in declared and isinstance(node.ctx, ast.Load)]  # fmt: skip
    assert min(uses) >= min(call.lineno for call in calls), "a parameter is used before any is checked"


@pytest.mark.parametrize(
    "check, said",
    [
        (lambda: parameters.truths(smoke="no"), "smoke: expected True or False, got 'no'"),
        (lambda: parameters.truths(smoke=0), "smoke: expected True or False, got 0"),
        (lambda: parameters.integers(1, seq_len=0), "seq_len: expected an integer of at least 1, got 0"),
        (lambda: parameters.integers(1, seq_len=2.0), "seq_len: expected an integer of at least 1, got 2.0"),
        (lambda: parameters.integers(1, seq_len=True), "seq_len: expected an integer of at least 1, got True"),
        (lambda: parameters.integers(2, 2, rotary_dim=7), "rotary_dim: .*at least 2, divisible by 2, got 7"),
        (lambda: parameters.positive_numbers(base=float("nan")), "base: expected a number above 0, got nan"),
        (lambda: parameters.positive_numbers(base="5e5"), "base: expected a number above 0, got '5e5'"),
        (lambda: parameters.lists(partial(parameters.integers, 0, 4), lengths=[8, 2]), r"lengths\[1\]: .*by 4, got 2"),
        (lambda: parameters.lists(partial(parameters.integers, 1), 2, heads=[8]), "heads: expected a list of 2 items"),
        (lambda: parameters.lists(partial(parameters.integers, 1), heads="82"), "heads: expected a list, got '82'"),
        (lambda: parameters.lists(partial(parameters.integers, 1), heads=[]), "heads: expected .* at least one item"),
        (lambda: parameters.chosen_records("nowhere", ""), "records: expected a directory .* got 'nowhere'"),
        (lambda: parameters.chosen_records(str(records.MEASUREMENTS), 7), "gpu: expected a word, got 7"),
        (lambda: parameters.chosen_records(str(records.MEASUREMENTS), "nvidia-l4"), r"gpu: expected one of \['nvidia-"),
    ],
)  # fmt: skip
def test_a_wrong_parameter_is_named(check, said):
    with pytest.raises((TypeError, ValueError), match=said):
        check()


@pytest.mark.parametrize(
    "name, given, said",
    [
        ("01", {"smoke": "no"}, "smoke: expected bool, got 'no'"),
        ("01", {"seq_len": True}, "seq_len: expected int, got True"),
        ("06", {"lengths": 8}, "lengths: expected list, got 8"),
        ("02", {"base": "5e5"}, "base: expected float, got '5e5'"),
        ("13", {"smoke": True}, "has no parameter smoke; it declares gpu, k_heads, q_heads, records, tokens"),
    ],
)
def test_wrong_parameters_are_refused_before_a_kernel_starts(name, given, said, tmp_path):
    source = next(path for path in NOTEBOOKS if path.name.startswith(name))
    with pytest.raises((TypeError, ValueError), match=said):
        runner.run_notebook(source, tmp_path, given)
    assert not list(tmp_path.iterdir())
    if name == "02":
        runner.check_parameters(source, {"base": 10000})


def scopes(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for inner in table.get_children():
        yield from scopes(inner)


def test_a_cell_runs_again_after_those_below_it(notebook):
    """No cell binds a name again that a cell above reads and does not bind: that one would run with another value."""
    read: dict[str, str] = {}
    for cell in code_cells(notebook):
        top = symtable.symtable(cell.source, cell.id, "exec")
        bound = {x.get_name() for x in top.get_symbols() if x.is_assigned() and not x.is_imported()}
        assert not (again := bound & read.keys()), [f"{cell.id} binds {x}, {read[x]} reads it" for x in sorted(again)]
        names = {
            x.get_name() for table in scopes(top) for x in table.get_symbols()
            if x.is_referenced() and (table is top or x.is_global())
        }  # fmt: skip
        read |= dict.fromkeys(names - bound, cell.id)


def test_records_are_linked_from_the_figures_drawn_from_them(notebook):
    """`shown.drawn` links to the records of a figure."""
    for cell in code_cells(notebook):
        drawn = re.search(r"\b(?:sns|plt)\.\w+plot|\.plot\(", cell.source)
        assert not drawn or ".drawn(" in cell.source, f"cell {cell.id} shows a figure without its records"
        if re.search(r"display\(\w*figures\.\w+\(record\.frame", cell.source):
            assert "show_records(" in cell.source, f"cell {cell.id} has no link to the record"


def test_a_link_leads_to_the_table_of_a_record(monkeypatch):
    shown = []
    monkeypatch.chdir(runner.NOTEBOOKS)
    monkeypatch.setattr("IPython.display.display", lambda data, raw, metadata: shown.append((data, metadata)))
    record_links.show_records(["dense", "no_such_study"], records.Selection(gpu="nvidia-h200"))
    record_links.show_records(["no_such_study"], records.MEASUREMENTS)
    [(data, metadata)] = shown
    assert data["text/markdown"] == "Records: [dense](../data/measurements/nvidia-h200/dense.csv)"
    assert metadata == {record_links.RECORDS: ["dense"]}


def test_the_report_links_to_its_own_list_of_records_and_folds_code(tmp_path):
    output = nbformat.v4.new_output(
        "display_data",
        {"text/markdown": "Records: [dense](x.csv)"},
        metadata={record_links.RECORDS: ["dense", "tiles"]},
    )
    markdown, code = nbformat.v4.new_markdown_cell, nbformat.v4.new_code_cell
    cells = [markdown("# X"), code('f("early")'), markdown("```\n# no title\n```\n\n## A")]
    cells += [code('f("host")', outputs=[output]), markdown("## B"), code("1\n2", outputs=[output])]
    cells += [code("shown", metadata={"tags": ["shown"]}), code("7", metadata={"tags": ["answer"]}), code("")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "01_x.ipynb")
    found = chapters.chapter(runner.Run("01_x", tmp_path / "01_x.ipynb", 0.0))
    assert found.title == "X"
    assert found.notebook.cells[3].outputs[0].data["text/markdown"] == "Records: {record}`dense`, {record}`tiles`"
    label, title = found.places["dense"]
    assert title == "A" and f"({label})=\n## A" in found.notebook.cells[2].source
    assert found.places == dict.fromkeys(("host", "dense", "tiles"), (label, "A"))  # the first section of each
    folded = [(one.metadata.get("tags"), one.metadata.mystnb.code_prompt_show) for one in code_cells(found.notebook)]
    assert folded[2:] == [(["hide-input"], "code, 2 lines"), (["shown"], "code, 1 line"),
                          (["answer", "hide-cell"], "answer, 1 line")]  # fmt: skip


def test_links_to_chapters_lead_to_notebooks():
    root = runner.ROOT
    texts = [*NOTEBOOKS, root / "README.md", *(root / "docs").glob("*.md")]
    links = [(path, link) for path in texts for link in re.findall(r"\]\(([^)#:\s]*\.\w+)[)#]", path.read_text())]
    assert links and not [(path.name, link) for path, link in links if not (path.parent / link).resolve().is_file()]
    assert report.linked("[x](../notebooks/01_x.ipynb#a) [y](docs/1_y.md)") == "[x](01_x.ipynb#a) [y](1_y.md)"


def test_every_citation_has_its_entry_and_every_entry_is_cited():
    cited = {key for path in NOTEBOOKS for key in re.findall(r"9_references\.md#([\w-]+)", path.read_text())}
    assert cited - {"code"} == set(bibliography.papers())  # a section of the page lists code


def test_what_a_notebook_takes_from_the_repository_is_there(notebook):
    """Names that it imports, and those that it reads from a module."""
    for cell in code_cells(notebook):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ropelab"):
                module = importlib.import_module(node.module)
                for alias in node.names:
                    if not hasattr(module, alias.name):
                        importlib.import_module(f"{node.module}.{alias.name}")
    modules = {}
    first = next(cell for cell in code_cells(notebook) if "begin()" in cell.source)
    exec(compile(first.source.partition("begin()\n")[0], first.id, "exec"), modules)
    for cell in code_cells(notebook):
        for node in ast.walk(ast.parse(cell.source)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                owner = modules.get(node.value.id)
                if isinstance(owner, ModuleType) and owner.__name__.startswith("ropelab"):
                    assert hasattr(owner, node.attr), f"{cell.id}: {owner.__name__} has no {node.attr}"


def test_the_library_does_the_work(notebook):
    """No timing and no kernel is written in a notebook, but for the steps of 04 and for answers."""
    for cell in code_cells(notebook):
        tree = ast.parse(cell.source)
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        names |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        assert not names & TIMERS, f"cell {cell.id} times something: {names & TIMERS}"
        own = "step" in cell.metadata.get("tags", []) or cell.id.startswith("answer-")
        assert "jit" not in names or own, f"cell {cell.id} defines a kernel"
