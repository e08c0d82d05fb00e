"""Every calling convention is listed, is described with an example of its call, and has a line on the page about CI."""

import re
from pathlib import Path
from unittest.mock import MagicMock

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner  # noqa: E402

import ropelab  # noqa: E402
from ropelab.conformance import CACHE_CONVENTIONS, CONVENTIONS  # noqa: E402
from ropelab.conformance.cli import app  # noqa: E402


@pytest.mark.parametrize("name", [*CONVENTIONS, *CACHE_CONVENTIONS])
def test_every_convention_is_described_with_an_example(name):
    done = CliRunner().invoke(app, ["conventions", name])
    assert done.exit_code == 0 and done.stdout.startswith("fn(")
    assert re.search(r"\n\n[A-Z].*\n\nFor example:\n.*(float32|bfloat16)\[\d+, ", done.stdout, re.DOTALL), done.stdout


def test_all_conventions_are_listed():
    done = CliRunner().invoke(app, ["conventions"])
    assert all(f"{name}\n    fn(" in done.stdout for name in (*CONVENTIONS, *CACHE_CONVENTIONS))
    assert CliRunner().invoke(app, ["conventions", "flash"]).exit_code == 2


def test_the_page_about_ci_has_an_example_for_each_convention():
    page = (Path(ropelab.__file__).parent / "study/site/guide/verify.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "my_rope" in block)
    assert set(re.findall(r'pytest_laws\(my_rope\.\w+, "(\w+)"', code)) == {*CONVENTIONS, *CACHE_CONVENTIONS}
    exec(code.replace("import my_rope", ""), {"my_rope": MagicMock()})
