"""A fifth document is one package and its data: no other file of the study changes for it."""

import shutil
import sys
from textwrap import dedent

import pandas as pd
import pytest

pytest.importorskip("seaborn")
from ropelab.bench import records  # noqa: E402
from ropelab.study.engine import claims as documents  # noqa: E402
from ropelab.study.engine import ledger, registered  # noqa: E402
from ropelab.study.engine.verdict import Outcome  # noqa: E402
from ropelab.study.plots import registry as figures  # noqa: E402
from ropelab.study.plots.panels import said  # noqa: E402
from ropelab.study.site import report, summary  # noqa: E402

PACKAGE = {
    "__init__": '"""A document made up for a test."""',
    "rules": '''
        """The rule of MU-02."""
        from ropelab.study.engine.ledger import rule

        @rule("MU-02", "made_up_memory")
        def less_memory(claim, memory):
            raise AssertionError("there is no such record")
    ''',
    "studies": '''
        """The record of the document."""
        import pandas as pd
        from ropelab.bench.study import Study

        def times(smoke=False):
            return pd.DataFrame({"tokens": [8, 8, 64, 64], "contender": ["slow", "fast"] * 2,
                                 "median_us": [2.0, 1.0, 2.0, 4.0]})

        STUDIES = {"made_up_times": Study(times, gpu_gib=0)}
    ''',
    "figures": '''
        """The figure of the document."""
        from ropelab.study.plots.panels import grid

        def draw(frame, footer=""):
            panels = grid(1, 1, (4, 3), "slow against fast", footer)
            for name, rows in frame.groupby("contender"):
                panels.axes[0, 0].plot(rows.tokens, rows.median_us, label=name)
            return panels.finish("tokens", "µs", legend=2)

        FIGURES = {"made_up": (("made_up_times",), draw)}
    ''',
}  # fmt: skip
CLAIMS = """
document = "Made up#1"
package = "made_up_document"
[[claim]]
id = "MU-01"
by = "author"
statement = "The fast one is always faster."
quote = "always"
quantifier = "all"
basis = "package"
needs = "times"

[[claim.test]]
record = "made_up_times"
over = "slow"
under = "fast"
cell = ["tokens"]
protocol = "document"
above = 1.0

[[claim]]
id = "MU-02"
by = "reviewer"
statement = "It takes less memory."
quote = "less"
quantifier = "one"
basis = "package"
needs = "a machine that counts bytes"
"""


@pytest.fixture
def fifth(tmp_path, monkeypatch):
    """The folder of the claims of the others and of this document, and the folder of their records."""
    documents.load_claims()  # the four register their rules when they are first imported, and these are to stay
    package = tmp_path / "packages" / "made_up_document"
    package.mkdir(parents=True)
    for name, code in PACKAGE.items():
        (package / f"{name}.py").write_text(dedent(code))
    claims = tmp_path / "claims"
    shutil.copytree(documents.CLAIMS, claims)
    (claims / "sglang.toml").unlink()  # its evidence runs kernels, which takes most of the time of a ledger
    (claims / "made_up.toml").write_text(CLAIMS)
    measurements = tmp_path / "measurements"
    shutil.copytree(records.MEASUREMENTS, measurements)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setattr(documents, "CLAIMS", claims)
    monkeypatch.setattr(ledger, "_RULES", dict(ledger._RULES))
    gpu = records.load("dense", gpu="nvidia-h100-80gb-hbm3").provenance["gpu"]
    monkeypatch.setattr(records, "_gpu", lambda: gpu)
    frame = documents.documents()[2].module("studies").STUDIES["made_up_times"]()
    records.write("made_up_times", frame, measurements)
    yield claims, measurements
    for name in [name for name in sys.modules if name.startswith("made_up_document")]:
        del sys.modules[name]


def test_it_is_everywhere(fifth, tmp_path, monkeypatch):
    _, measurements = fifth
    assert "made_up_times" in registered.all_studies() and "made_up" in figures.all_figures()
    rows = ledger.ledger(document="made_up", records=measurements).set_index("id")
    assert rows.outcome.to_dict() == {"MU-01": Outcome.FAILS, "MU-02": Outcome.UNTOLD}
    assert "a machine that counts bytes" in rows.needs["MU-02"]
    assert said(figures.draw("made_up", measurements)) == "slow against fast"
    block = summary.claims(ledger.ledger(records=measurements))
    assert "| Made up#1 |" in block and "| MU-01 | The fast one is always faster. | does not hold |" in block
    pages = {}
    monkeypatch.setattr(report, "_build", lambda files, out, smoke: pages.update(files) or [])
    report.write(tmp_path / "report" / "index.html", [], where=measurements)
    assert ":::{claim} MU-02" in pages["ledger.md"]
    assert ":::{record} made_up_times" in pages["records.md"]


def test_a_document_less_changes_no_other(fifth):
    claims, measurements = fifth
    before = ledger.ledger(records=measurements)
    (claims / "deepspeed.toml").unlink()
    after = ledger.ledger(records=measurements)
    kept = before[before.document != "DeepSpeed#8052"].reset_index(drop=True)
    assert len(kept) < len(before)
    pd.testing.assert_frame_equal(after, kept)
