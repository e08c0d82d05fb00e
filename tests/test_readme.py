"""README.md says what the records say."""

from ropelab.study import summary


def test_tables_are_those_of_the_records(tmp_path):
    copy = tmp_path / "README.md"
    copy.write_text(summary.README.read_text())
    summary.update(copy)
    assert copy.read_text() == summary.README.read_text(), "run python -m ropelab.study.summary"


def test_commands_exist():
    makefile = (summary.README.parent / "Makefile").read_text()
    named = {line.split("`")[1].split()[1] for line in summary.README.read_text().splitlines() if line.startswith("| `make")}
    assert named and all(f"\n{name}: " in makefile for name in named)
