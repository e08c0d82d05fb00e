"""README.md says what the records say."""

from ropelab.study import summary

TEXT = summary.README.read_text()


def test_tables_are_those_of_the_records(tmp_path):
    """Or of older ones: measuring on a GPU of the same name replaces the records, and README.md may stay behind."""
    measured = f"record of {summary.record().provenance['utc']}"
    copy = tmp_path / "README.md"
    copy.write_text(TEXT)
    summary.update(copy)
    assert measured in copy.read_text()
    assert measured not in TEXT or copy.read_text() == TEXT, "run python -m ropelab.study.summary"


def test_commands_exist():
    makefile = (summary.README.parent / "Makefile").read_text()
    named = {line.split("`")[1].split()[1] for line in TEXT.splitlines() if line.startswith("| `make")}
    assert named and all(f"\n{name}: " in makefile for name in named)
