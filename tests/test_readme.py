"""README.md says what the records say."""

import re

from ropelab.study import shortfalls, summary

TEXT = summary.README.read_text()


def blocks(text: str) -> dict[str, str]:
    """Name -> what stands between ``<!-- name -->`` and ``<!-- end -->``."""
    return dict(re.findall(r"<!-- (\w+) -->\n(.*?)<!-- end -->", text, re.DOTALL))


def stamps(block: str) -> list[str]:
    """When the records behind a table were measured."""
    return re.findall(r"records? of ([^)]+)\)", block)


def test_tables_are_those_of_the_records(tmp_path):
    """Or of older ones: measuring on a GPU of the same name replaces the records, and README.md may stay behind."""
    copy = tmp_path / "README.md"
    copy.write_text(TEXT)
    summary.update(copy)
    written, computed = blocks(TEXT), blocks(copy.read_text())
    assert {"speed", "claims"} <= written.keys() and written.keys() == computed.keys() <= summary.tables().keys()
    for name, block in written.items():
        # The claims rest on several records and name none: they are held to those of the speeds.
        dated = "speed" if name == "claims" else name
        assert block and stamps(computed[dated]), f"{name} is empty: run python -m ropelab.study.summary"
        current = stamps(written[dated]) == stamps(computed[dated])
        assert not current or block == computed[name], f"{name} differs: run python -m ropelab.study.summary"


def test_shortfalls_follow_the_records():
    frames = {study: summary.record(study).frame for study in shortfalls.STUDIES}
    now = shortfalls.sentences(frames)
    slow = frames["deepspeed_table"].copy()
    slow.loc[slow.contender == "compile", "median_us"] *= 3
    slow.loc[slow.contender == "compile", "fraction_of_copy"] /= 3
    then = shortfalls.sentences(frames | {"deepspeed_table": slow})
    assert then[:-1] == now[:-1] and " % faster (in " in now[-1] and " % slower" in then[-1]
    assert "is out of reach" in now[-1] and "is within reach in 12 cases" in then[-1]

    fast = frames["sglang_protocols"].copy()
    fast.loc[fast.contender == "ropelab, positions", "median_us"] /= 2
    then = shortfalls.sentences(frames | {"sglang_protocols": fast})
    changed = [sentence for sentence, before in zip(then, now, strict=True) if sentence != before]
    assert len(changed) == 1 and "FlashInfer" in changed[0] and " % slower" in changed[0]


def test_commands_exist():
    makefile = (summary.README.parent / "Makefile").read_text()
    named = {line.split("`")[1].split()[1] for line in TEXT.splitlines() if line.startswith("| `make")}
    assert named and all(f"\n{name}: " in makefile for name in named)
