"""Every calling convention is listed, and is described with an example of its call."""

import re

import pytest

pytest.importorskip("typer")
from typer.testing import CliRunner  # noqa: E402

from ropelab.command.cli import app  # noqa: E402
from ropelab.conformance import CACHE_CONVENTIONS, CONVENTIONS  # noqa: E402


@pytest.mark.parametrize("name", [*CONVENTIONS, *CACHE_CONVENTIONS])
def test_every_convention_is_described_with_an_example(name):
    done = CliRunner().invoke(app, ["conventions", name])
    assert done.exit_code == 0 and done.stdout.startswith("fn(")
    assert re.search(r"\n\n[A-Z].*\n\nFor example:\n.*(float32|bfloat16)\[\d+, ", done.stdout, re.DOTALL), done.stdout


def test_all_conventions_are_listed():
    done = CliRunner().invoke(app, ["conventions"])
    assert all(f"{name}\n    fn(" in done.stdout for name in (*CONVENTIONS, *CACHE_CONVENTIONS))
    assert CliRunner().invoke(app, ["conventions", "flash"]).exit_code == 2
