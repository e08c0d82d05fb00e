"""The cells of chapter 04 on a GPU: bits, machine code, threads on memory and times."""

import pytest

pytest.importorskip("triton")

from ropelab.bench import records  # noqa: E402
from ropelab.study.topics.kernel_steps import chapter, step, timed  # noqa: E402

pytestmark = pytest.mark.gpu


def test_a_gpu_judges_each_cell(monkeypatch):
    shown: list = []
    monkeypatch.setattr(chapter, "display", shown.append)
    judge, cells = chapter.Judge(records.Selection(), timed.CASES[1]), step.cells()
    for each in cells:
        judge(each.kernel, each.grid, step=each.name, layout=each.layout, inverse=each.inverse, **each.constants)
    said = [text for each in shown if isinstance(text := getattr(each, "data", None), str)]
    assert sum("every bit is that of the library" in text for text in said) == len(cells)
    assert judge.here.keys() == {each.name for each in cells}
    assert judge.here["3 wide accesses"] > judge.here["1 one head"]
    assert any(hasattr(each, "savefig") and "of a warp" in each.get_suptitle() for each in shown)
