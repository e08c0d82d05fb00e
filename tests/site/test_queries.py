"""Queries of pandas take plain names: pandas before 3.1, and numexpr, fail on attributes and items."""

import re
from pathlib import Path

import ropelab
from ropelab.bench.records import ROOT

PLACES = (Path(ropelab.__file__).parent, ROOT / "notebooks", ROOT / "tests")
BEYOND_A_NAME = re.compile(r"""(?:query|eval)\([^)\n]*@\w+[.\[]""")


def test_queries_take_plain_names():
    files = [p for place in PLACES for p in place.rglob("*") if p.suffix in (".py", ".ipynb")]
    assert len(files) > 100
    assert BEYOND_A_NAME.search('rows.query("id == @row[0]")') and BEYOND_A_NAME.search('query("a != @Outcome.UNTOLD")')
    found = [
        f"{p.name}: {line.strip()}"
        for p in files
        if p.name != Path(__file__).name
        for line in p.read_text().splitlines()
        if BEYOND_A_NAME.search(line)
    ]
    assert found == []
