"""A report as JSON keeps its schema, a report as Markdown is complete, and the examples of the tests run."""

import json
import os
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner  # noqa: E402

from ropelab.command.cli import app  # noqa: E402
from ropelab.command.markdown import markdown  # noqa: E402
from ropelab.conformance import CACHE_CONVENTIONS, CONVENTIONS, verify  # noqa: E402
from ropelab.conformance.models.attention_laws import ModelResult  # noqa: E402
from ropelab.conformance.models.verify_model import FunctionReport, ModelReport  # noqa: E402
from ropelab.study.faults import FAULTS, correct  # noqa: E402

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads(files("ropelab.conformance").joinpath("report.schema.json").read_text())
SCHEMA_OF_MODELS = json.loads(files("ropelab.conformance.models").joinpath("report.schema.json").read_text())
WRONG = """
from ropelab.study.faults import correct

def wrong(x, positions):
    return correct.plain(x, positions + 1)

def leaves(x, positions):
    import os
    os._exit(3)
"""
RIGHT = """
from ropelab.study.faults.correct import *
from ropelab.study.faults.correct import complex_numbers as complex
from ropelab.study.faults.correct import ropelab as apply_rope
from tests.laws.cache_correct import CORRECT

globals().update(CORRECT)
quantize_append = CORRECT["rope_quantize_fp8_append_paged_kv_cache"]
block_scaled_cache = CORRECT["rope_and_block_scaled_cache"]
"""
BROKEN = """

def wrong(x, positions):
    return my_rope.plain(x, positions + 1)


test_wrong = pytest_laws(wrong, "plain")
"""


def test_the_schema_accepts_reports_and_refuses_others():
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    check = jsonschema.Draft202012Validator(SCHEMA)
    reports = [
        verify(correct.plain, "plain", laws=["definition", "packed"]),
        verify(lambda x, p: x * float("nan"), "plain", laws=["definition"]),
        verify(FAULTS["sign_reversed_undeclared"].function, "huggingface", laws=["definition"], shrink=False),
    ]
    for report in reports:
        check.validate(json.loads(report.to_json()))
    found = json.loads(reports[-1].to_json())
    for key in found:
        assert not check.is_valid({k: v for k, v in found.items() if k != key}), key
    assert not check.is_valid(found | {"verdict": "perhaps"})
    assert not check.is_valid(found | {"results": [found["results"][0] | {"status": "maybe"}]})


def test_every_key_of_a_report_is_described():
    found = verify(FAULTS["positions_from_one"].function, "plain", laws=["definition"]).as_dict()
    described = SCHEMA["$defs"]
    assert found.keys() == SCHEMA["properties"].keys()
    assert found["results"][0].keys() == described["result"]["properties"].keys()
    assert found["results"][0]["counterexample"].keys() == described["counterexample"]["properties"].keys()


def model_report(**about):
    rotation = FunctionReport("module.rope", "(q, k, cos, sin)", "split_half", "split_half", "", 16, 16, 1.0, "right")
    laws = (ModelResult("one", "It holds.", "fail", float("inf"), 1e-6), ModelResult("two", "", "not applicable"))
    return json.loads(ModelReport("llama", "Llama", **{"functions": (rotation,), "laws": laws} | about).to_json())


def test_the_schema_of_models():
    found = model_report()
    assert found.keys() == SCHEMA_OF_MODELS["properties"].keys()
    for part, key in (("function", "functions"), ("law", "laws")):
        assert found[key][0].keys() == SCHEMA_OF_MODELS["$defs"][part]["properties"].keys()
    assert found["laws"][0]["difference"] == "inf" and found["verdict"] == "wrong"
    jsonschema = pytest.importorskip("jsonschema")
    check = jsonschema.Draft202012Validator(SCHEMA_OF_MODELS)
    check.check_schema(SCHEMA_OF_MODELS)
    for report in (
        found,
        model_report(laws=()),
        model_report(functions=(), laws=(), message="none", stopped="at once"),
    ):
        check.validate(report)
    for key in found:
        assert not check.is_valid({k: v for k, v in found.items() if k != key}), key
    assert not check.is_valid(found | {"verdict": "perhaps"})


@pytest.mark.process
def test_the_command_writes_both_formats(tmp_path):
    (tmp_path / "somebodys.py").write_text(WRONG)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = (
        sys.executable,
        "-m",
        "ropelab",
        "verify",
        "somebodys:wrong",
        "--convention",
        "plain",
        "--law",
        "definition",
    )
    done = subprocess.run(
        [*command, "--json", "a.json", "--markdown", "a.md"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1, done.stderr
    found = json.loads((tmp_path / "a.json").read_text())
    if validate := getattr(sys.modules.get("jsonschema"), "validate", None):
        validate(found, SCHEMA)
    said = (tmp_path / "a.md").read_text()
    assert said == markdown(found) + "\n"
    for part in (
        "### `somebodys:wrong` breaks 1 of 1 laws",
        "| `definition` |",
        "ropelab verify somebodys:wrong --convention plain\n",
    ):
        assert part in said, said
    refused = CliRunner().invoke(app, [*command[3:], "--markdown", "."])
    assert refused.exit_code == 2 and "markdown: expected a file that can be written" in refused.output


def test_markdown_of_a_right_function_and_of_one_that_is_not_judged():
    right = verify(correct.plain, "plain", laws=["definition"]).to_markdown()
    assert right.startswith("### `plain` keeps all 1 laws of rotary position embedding that apply")
    call = "ropelab.conformance.verify(plain, convention='plain', layout='split_half'"
    assert call in right and "dtype=" not in right
    unjudged = verify(correct.plain, "plain", laws=["isometry"]).to_markdown()
    assert unjudged.startswith("### `plain` was not judged")


def test_markdown_keeps_tables_whole():
    def raises(x, positions):
        if x.shape[1] == 4:
            raise ValueError("a | b\n<c>")
        return correct.plain(x, positions)

    said = verify(raises, "plain", laws=["extents"]).to_markdown()
    (row,) = (line for line in said.splitlines() if line.startswith("| `extents`"))
    assert len(re.findall(r"(?<!\\)\|", row)) == 7 and "<" not in row


@pytest.mark.process
def test_the_examples_of_the_page_run_in_a_project(tmp_path):
    page = (ROOT / "docs" / "verify.md").read_text()
    example = re.search(r"```python\n(import my_rope.*?)```", page, re.S).group(1)
    assert set(re.findall(r'pytest_laws\(my_rope\.\w+, "(\w+)"', example)) == {*CONVENTIONS, *CACHE_CONVENTIONS}
    (tmp_path / "my_rope.py").write_text(RIGHT)
    (tmp_path / "test_mine.py").write_text(example + BROKEN)
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "definition or packed"],
        cwd=tmp_path, env=environment, capture_output=True, text=True,
    )  # fmt: skip
    assert re.search(r"1 failed, \d+ passed, \d+ skipped", done.stdout), done.stdout
    assert "test_wrong[definition]" in done.stdout and "x at batch 0, token 0" in done.stdout
