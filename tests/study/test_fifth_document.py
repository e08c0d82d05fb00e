"""A fifth document is one file of claims and one module: no other file of the study changes for it."""

import shutil
import sys

import pandas as pd
import pytest

pytest.importorskip("seaborn")
from ropelab.bench import records  # noqa: E402
from ropelab.study.engine import claims as documents  # noqa: E402
from ropelab.study.engine import ledger, registered  # noqa: E402
from ropelab.study.engine.verdict import Outcome  # noqa: E402
from ropelab.study.site import report, summary  # noqa: E402

MODULE = '''
"""A document made up for a test: the rule of MU-02, and the record."""
import pandas as pd

from ropelab.bench.study import Study
from ropelab.study.engine.ledger import rule


@rule("MU-02", "made_up_memory")
def less_memory(claim, memory):
    raise AssertionError("there is no such record")


def times(smoke=False):
    us = {"median_us": [2.0, 1.0, 2.0, 4.0]}
    return pd.DataFrame({"tokens": [8, 8, 64, 64], "contender": ["slow", "fast"] * 2} | us)


STUDIES = {"made_up_times": Study(times, gpu_gib=0)}
'''
CLAIMS = """
document = "Made up#1"
package = "made_up_document"

[[table]]
name = "made_up_table"
source = "read and typed"
rows = [{ tokens = 8, us = 1.5 }, { tokens = 64, us = 3.0 }]

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
    (tmp_path / "made_up_document.py").write_text(MODULE)
    claims = tmp_path / "claims"
    shutil.copytree(documents.CLAIMS, claims)
    (claims / "sglang.toml").unlink()  # its evidence runs kernels, which takes most of the time of a ledger
    (claims / "made_up.toml").write_text(CLAIMS)
    measurements = tmp_path / "measurements"
    shutil.copytree(records.MEASUREMENTS, measurements)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(documents, "CLAIMS", claims)
    monkeypatch.setattr(ledger, "_RULES", dict(ledger._RULES))
    gpu = records.load("dense", gpu="nvidia-h100-80gb-hbm3").provenance["gpu"]
    monkeypatch.setattr(records, "_gpu", lambda: gpu)
    documents._tables.cache_clear()
    records.write("made_up_times", registered.all_studies()["made_up_times"](), measurements)
    yield claims, measurements
    del sys.modules["made_up_document"]
    documents._tables.cache_clear()


def test_it_is_everywhere(fifth, tmp_path, monkeypatch):
    _, measurements = fifth
    assert documents.typed("made_up_table").frame.us.tolist() == [1.5, 3.0]
    rows = ledger.ledger(document="made_up", records=measurements).set_index("id")
    assert rows.outcome.to_dict() == {"MU-01": Outcome.FAILS, "MU-02": Outcome.UNTOLD}
    assert "a machine that counts bytes" in rows.needs["MU-02"]
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
