"""What users can name stays, or CHANGELOG.md says how it changes."""

import difflib

import pytest

pytest.importorskip("typer")
from tests.surface import FILE, surface  # noqa: E402


def test_every_change_of_the_surface_is_meant():
    known = FILE.read_text(encoding="utf-8").splitlines()
    changed = [line for line in difflib.ndiff(known, surface().splitlines()) if line[0] in "+-"]
    assert not changed, "for each, add a line to CHANGELOG.md, then run `python -m tests.surface`:\n" + "\n".join(
        changed
    )
