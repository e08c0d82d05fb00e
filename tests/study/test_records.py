"""Records are believed only as they were written, those of any GPU can be read, and a bad one stops no other."""

import ast
import json
import re
import shutil
import subprocess
from pathlib import Path

import pandas as pd
import pytest
import torch

from ropelab.bench import code_hash, projection, record_checks, records
from ropelab.bench.rows import are_copies
from ropelab.study.engine import ledger as engine
from ropelab.study.engine import registered
from ropelab.study.engine.verdict import Outcome
from ropelab.study.topics.performance import findings as family_findings

COMMITTED = records.MEASUREMENTS / "nvidia-h200"
without_a_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the records of the GPU at hand come first")


@pytest.fixture
def copy(tmp_path):
    """A folder of the committed records, to be damaged."""
    shutil.copytree(COMMITTED, tmp_path / "nvidia-h200")
    return tmp_path / "nvidia-h200"


def rewrite(folder, study, change, *, signed):
    """Change a record's table; with its checksum made anew if ``signed``."""
    csv, about = folder / f"{study}.csv", folder / f"{study}.json"
    frame = pd.read_csv(csv)
    frame = frame if (changed := change(frame)) is None else changed
    frame.to_csv(csv, index=False)
    if signed:
        about.write_text(json.dumps(json.loads(about.read_text()) | {"csv_sha256": record_checks.sha256(csv)}))


def first_time(value):
    def change(frame):
        frame["median_us"] = frame.median_us.astype(object)
        frame.loc[frame.index[frame.status == "ok"][0], "median_us"] = value

    return change


# ------------------------------------------------------------------------------------------- damaged records


@pytest.mark.parametrize("signed", [False, True], ids=["as it was", "signed anew"])
@pytest.mark.parametrize(
    "change, said",
    [
        (first_time(-3.0), "column median_us: expected times above 0, got -3 in row 2"),
        (first_time(0.0), "column median_us: expected times above 0, got 0 in row 2"),
        (first_time(float("inf")), "column median_us: expected times above 0, got inf in row 2"),
        (first_time(None), "column median_us: expected a time in every row with the status ok, got no time in row 2"),
        (first_time(1e9), "expected q20_us <= median_us <= q80_us, got another order in row 2"),
    ],
    ids=["negative", "zero", "infinite", "missing", "beyond its quantiles"],
)
def test_times_that_nothing_can_take(change, said, signed, copy):
    rewrite(copy, "te_kernels", change, signed=signed)
    with pytest.raises(records.Damaged, match=re.escape("nvidia-h200/te_kernels.csv: ") + ".*" + re.escape(said)):
        records.load("te_kernels", copy.parent)


@pytest.mark.parametrize(
    "change",
    [
        lambda frame: frame.iloc[: len(frame) // 2], lambda frame: frame.drop(columns="n_seqs"),
        lambda frame: frame.assign(more=1), first_time("fast"), lambda frame: frame.assign(n_seqs=frame.n_seqs + 1),
    ],
    ids=["half", "without a column", "with another column", "a word", "other numbers"],
)  # fmt: skip
def test_a_table_that_was_not_written_with_its_provenance(change, copy):
    rewrite(copy, "te_kernels", change, signed=False)
    with pytest.raises(records.Damaged, match=r"nvidia-h200/te_kernels.csv: its provenance describes another table"):
        records.load("te_kernels", copy.parent)


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda frame: frame.drop(columns="median_us"), "the table has no column median_us"),
        (lambda frame: frame.assign(**{name: 1000 * frame[name] for name in record_checks.TIMES}),
         r"expected times that fit into the \d+\.\d s of the run, got samples of at least \d+\.\d s"),
    ],
    ids=["no median", "times x 1,000"],
)  # fmt: skip
def test_tables_that_no_run_of_the_study_writes(change, said, copy):
    rewrite(copy, "te_kernels", change, signed=True)
    with pytest.raises(records.Damaged, match=f"nvidia-h200/te_kernels.csv: .*{said}"):
        records.load("te_kernels", copy.parent)


_LACKING = {"te_kernels": "expected 71 rows of each contender, got 68"}
"""What records of the reference lack: three cells are younger than its te_kernels. TE-19 says so there."""


def test_every_record_of_the_reference_is_of_a_whole_run():
    studies = registered.all_studies()
    for path in sorted((records.MEASUREMENTS / records.REFERENCE).glob("*.csv")):
        if path.stem in studies:
            assert studies[path.stem].other_rows(pd.read_csv(path)) == _LACKING.get(path.stem, ""), path
    table = pd.read_csv(COMMITTED / "te_kernels.csv")
    assert studies["te_kernels"].other_rows(pd.concat([table, table])) == "expected 71 rows of each contender, got 142"
    assert studies["te_kernels"].other_rows(table.iloc[: len(table) // 2]).startswith("expected 71 rows")
    assert studies["te_kernels"].other_rows(table[table.contender != table.contender.iloc[0]]) == ""


MEASURED = {
    "contender", "status", "median_us", "q20_us", "q80_us", "samples", "fraction_of_copy", "in_place", "bar",
    "same_bits",
}  # fmt: skip
"""The columns in which a copy differs from a contender of its cell."""


def test_fractions_of_a_copy_follow_from_the_times():
    """The columns that are computed from others, computed again; times and fractions have six digits."""
    compared = 0
    for path in sorted(records.MEASUREMENTS.glob("*/*.csv")):
        frame = pd.read_csv(path)
        if "over_product" in frame:
            cell = [name for name in frame if name not in {*MEASURED, "over_product", "tflops", "pass_bytes"}]
            compared += again(frame, frame[frame.contender == projection.ALONE], cell, 1 / frame.over_product, path)
        if {"contender", "fraction_of_copy"} <= {*frame}:
            best = frame[are_copies(frame) & frame.median_us.notna()]
            cell = [name for name in frame if name not in MEASURED and best[name].notna().all()]
            compared += again(frame, best, cell, frame.fraction_of_copy, path)
    assert compared > 10_000


def again(frame, best, cell, fraction, path):
    """Hold fractions to the quotients with the best time of each cell; the number of quotients.

    Where a call moves a share of the bytes of its copy, this share is the same for all contenders of the cell.
    """
    if best.empty:
        return 0
    joined = frame.assign(fraction=fraction).merge(best.groupby(cell).median_us.min().rename("best"), on=cell)
    joined = joined[joined.median_us.notna() & joined.fraction.notna()]
    share = joined.fraction * joined.median_us / joined.best
    is_best = joined.contender.isin(best.contender)
    assert (share[is_best] - 1).abs().max() < 2e-5, path
    each = share[~is_best].groupby([joined[name] for name in cell])
    assert (each.max() / each.min() - 1).max() < 3e-5 or joined[~is_best].empty, path
    return len(joined)


@pytest.mark.parametrize(
    "about, said",
    [
        *[(text, "provenance: expected an object") for text in ("null", "[]", '"word"', "7", "[" * 100_000)],
        *[({"gpu": value}, "gpu: expected an object") for value in ("NVIDIA H200", ["NVIDIA H200"], 7)],
        ({"gpu": {"name": 7}}, "gpu name: expected a text, got 7"),
        ({"gpu": {"name": "../nvidia-h200"}, "study": "../x"}, "study: expected 'te_kernels'"),
        ({"gpu": {"name": "nvidia-h200/../x"}}, "gpu name: expected the GPU of the folder nvidia-h200"),
        ({"utc": 20261124}, "utc: expected a text, got 20261124"),
        ({"kernels": []}, "kernels: expected an object"),
        ({"csv_sha256": None}, "csv_sha256: expected a text, got None"),
        ({"torch": 2.11}, "torch: expected a text, got 2.11"),
        ({"study": "dense"}, "study: expected 'te_kernels', the name of the file, got 'dense'"),
        ({"study": "../te_kernels"}, "study: expected 'te_kernels', the name of the file, got '../te_kernels'"),
    ],
)  # fmt: skip
def test_a_provenance_of_other_types_or_of_another_record(about, said, copy):
    path = copy / "te_kernels.json"
    path.write_text(about if isinstance(about, str) else json.dumps(json.loads(path.read_text()) | about))
    said = "RecursionError" if about == "[" * 100_000 else said
    with pytest.raises(records.Damaged, match=r"nvidia-h200/te_kernels\..*" + re.escape(said)):
        records.load("te_kernels", copy.parent)


@pytest.mark.parametrize("name", ["../te_kernels", "/etc/passwd", "", ".", "a/b"])
def test_a_name_is_no_path(name, copy, monkeypatch):
    for call in (lambda: records.load(name, copy.parent), lambda: records.write(name, pd.DataFrame(), copy.parent)):
        with pytest.raises(ValueError, match="study: expected a name"):
            call()
    if name:
        with pytest.raises(ValueError, match="gpu: expected one of"):
            records.selection(copy.parent, name)


def cut(path: Path, share: float) -> None:
    path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


@pytest.mark.parametrize("share", [0.0, 0.3, 0.999])
@pytest.mark.parametrize("kind", ["csv", "json"])
def test_a_truncated_file_is_named(kind, share, copy):
    cut(copy / f"te_kernels.{kind}", share)
    with pytest.raises(records.Damaged, match=r"nvidia-h200/te_kernels\."):
        records.load("te_kernels", copy.parent)


def test_half_a_record_is_none(copy):
    (copy / "te_kernels.csv").unlink()
    with pytest.raises(records.Damaged, match=r"nvidia-h200/te_kernels.json: FileNotFoundError"):
        records.load("te_kernels", copy.parent)
    (copy / "dense.json").unlink()
    with pytest.raises(records.Missing, match="no record of 'dense'"):
        records.load("dense", copy.parent)


@pytest.mark.parametrize("written", [0, 1], ids=["before both", "between table and provenance"])
def test_an_interruption_while_writing_is_noticed(written, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "_gpu", lambda: {"name": "a GPU"})
    old, new = (pd.DataFrame({"median_us": [time]}) for time in (1.0, 2.0))
    records.write("dense", old, tmp_path)
    replace, replaced = Path.replace, []

    def interrupted(path, target):
        if len(replaced) == written:
            raise KeyboardInterrupt
        replaced.append(target)
        return replace(path, target)

    with monkeypatch.context() as during, pytest.raises(KeyboardInterrupt):
        during.setattr(Path, "replace", interrupted)
        records.write("dense", new, tmp_path)
    if written:
        with pytest.raises(records.Damaged, match="the two were not written together"):
            records.load("dense", tmp_path)
    else:
        assert records.load("dense", tmp_path).frame.median_us.tolist() == [1.0]
    records.write("dense", new, tmp_path)
    assert records.load("dense", tmp_path).frame.median_us.tolist() == [2.0]


@pytest.mark.process
def test_the_first_record_of_a_run_makes_no_later_record_dirty(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "ROOT", tmp_path)
    about = [tmp_path / name for name in ("data/measurements/a-gpu/dense.csv", "data/sources.toml")]
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
    for path in about:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("before")
    for command in (["init"], ["add", "."], ["commit", "-m", "all"]):
        subprocess.run([*git, *command], check=True, capture_output=True)
    for path, dirty in zip(about, (False, True), strict=True):
        path.write_text("after")
        assert records.environment()["dirty"] is dirty, path


def test_senseless_times_are_not_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "_gpu", lambda: {"name": "a GPU"})
    with pytest.raises(ValueError, match="dense: column median_us: expected times above 0, got -1"):
        records.write("dense", pd.DataFrame({"median_us": [-1.0]}), tmp_path)
    assert not list(tmp_path.glob("*/*"))


@without_a_gpu
def test_a_bad_record_stops_no_other(copy):
    rewrite(copy, "host", lambda frame: frame.iloc[:3], signed=False)
    board = family_findings.scoreboard(copy.parent).set_index("question")
    assert (
        board.verdict["Few tokens, host"] == "not measured"
        and "host.csv: its provenance describes another table" in (board.measured["Few tokens, host"])
    )
    assert "not measured" not in set(board.verdict["Packed sequences"])


@pytest.mark.parametrize(
    "claim, study, change, signed",
    [
        ("TE-01", "te_kernels", lambda frame: frame.assign(median_us=float("nan")), True),
        ("TE-01", "te_kernels", lambda frame: frame.assign(median_us=-frame.median_us), True),
        ("FS-06", "fairseq2_inductor", lambda frame: frame.iloc[:2], False),
        ("SG-08", "sglang_low_tokens", lambda frame: frame.drop(columns="blocks"), False),
    ],
    ids=["NaN", "negative", "half the rows", "without a column"],
)
def test_no_verdict_rests_on_a_bad_record(claim, study, change, signed, copy):
    document = {"TE": "transformer_engine", "FS": "fairseq2", "SG": "sglang"}[claim[:2]]
    (good,) = engine.ledger(document=document, only=[claim], records=copy.parent).itertuples()
    assert "missing" not in good.needs and good.measured
    rewrite(copy, study, change, signed=signed)
    (bad,) = engine.ledger(document=document, only=[claim], records=copy.parent).itertuples()
    assert bad.outcome == Outcome.UNTOLD and f"{study}.csv: " in bad.needs and not bad.measured


def test_a_trial_run_is_no_evidence(copy):
    about = copy / "te_kernels.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | {"parameters": {"smoke": True}}))
    (row,) = engine.ledger(document="transformer_engine", only=["TE-01"], records=copy.parent).itertuples()
    assert row.outcome == Outcome.UNTOLD and "got a trial run" in row.needs


def test_every_committed_record_can_be_believed():
    for path in sorted(records.MEASUREMENTS.glob("*/*.json")):
        provenance = json.loads(path.read_text())
        csv = path.with_suffix(".csv")
        assert list(record_checks.flaws(csv, pd.read_csv(csv), provenance)) == [], path


def test_no_record_says_whose_machine_it_was_made_on():
    private = re.compile(
        r"(?<![\w.])/(?:home|root|work|tmp|usr|opt|mnt|data|Users|workspace)/|\b\d+\.\d+\.\d+\.\d+\b/|@\w+:"
    )
    for path in sorted(records.MEASUREMENTS.glob("*/*")):
        assert not private.search(path.read_text()), path


def test_commands_are_recorded_without_folders():
    assert records.without_folders("python /home/me/venv/bin/tool --build /tmp/x/build measure a") == (
        "python tool --build build measure a"
    )
    assert records.without_folders("python3 -m ropelab.study --build build/smoke measure") == (
        "python3 -m ropelab.study --build build/smoke measure"
    )


# ------------------------------------------------------------------------------------------- written by no run


@pytest.mark.parametrize(
    "change, said",
    [
        ({"commit": None}, "commit: expected a text, got None"),
        ({"command": ""}, "command: expected a text, got ''"),
        ({"gpu": {"sm_count": 132}}, "gpu name: expected a text, got None"),
        ({"utc": "2026-11-21 to 2026-11-22"}, "utc: expected the time of a run, got '2026-11-21 to 2026-11-22'"),
    ],
    ids=["no commit", "no command", "no GPU", "several days"],
)
def test_a_record_that_no_run_wrote_is_no_evidence(change, said, copy):
    about = copy / "te_kernels.json"
    about.write_text(json.dumps(json.loads(about.read_text()) | change))
    expected = f"nvidia-h200/te_kernels.json: no run wrote it, so it supports no verdict: {said}"
    with pytest.raises(records.Damaged, match=re.escape(expected)):
        records.load("te_kernels", copy.parent)
    with pytest.raises(records.Damaged, match=re.escape(expected)):
        engine.find_evidence("te_kernels", records=copy.parent)


# ------------------------------------------------------------------------------------------- hash of the code

SOURCE = '''"""A module."""
from dataclasses import dataclass

LIMIT = -(2**31)
"""Documents the constant."""

@dataclass(frozen=True)
class Case:
    """A class."""

    name: str = "π"

async def measure(*cases: Case, scale=1.5, width, **rest) -> dict:
    """A function."""
    options = {"scale": scale, **rest}  # a comment
    for case in cases[1:]:
        print(f"{{{case.name!r:>{width}}}} {scale:.2f} " "and", options, sep=None)
    return lambda x, /: None if x is ... else (x, [], b"\\0", 2j)
'''


def hashed(source):
    return code_hash.digest(ast.parse(source))


def test_the_hash_of_code_is_the_same_on_every_python():
    assert hashed(SOURCE) == "9e0fef695a1e1193"


@pytest.mark.parametrize(
    "old, new",
    [
        ("# a comment", "# another comment\n    # of two lines"),
        ('    """A function."""\n', ""),
        ("A class.", "The class."),
        ("Documents the constant.", "The limit."),
        ("LIMIT = -(2**31)", "\n\nLIMIT = (\n    -(2**31)\n)"),
        ('" "and"', 'and"'),
    ],
    ids=["comment", "without a docstring", "docstring", "of a constant", "layout", "quotes"],
)
def test_the_hash_of_code_leaves_out_comments_docstrings_and_layout(old, new):
    assert old in SOURCE
    assert hashed(SOURCE.replace(old, new)) == hashed(SOURCE)


def test_the_hash_of_code_depends_on_code():
    changes = [("1.5", "1.25"), ("width, ", "width=None, "), ("name: str", "name: object"), ('"and"', '"or"')]
    assert all(old in SOURCE for old, _ in changes)
    assert len({hashed(SOURCE.replace(old, new)) for old, new in [("", ""), *changes]}) == 1 + len(changes)


# ------------------------------------------------------------------------------------------- records of several GPUs

OTHER, NAME = "nvidia-made-up", "NVIDIA Made Up"


@pytest.fixture(scope="module")
def two_gpus(tmp_path_factory):
    """The committed records, and those of a slower GPU on which one of fairseq2's classes is fast."""
    root = tmp_path_factory.mktemp("two")
    shutil.copytree(COMMITTED, root / "nvidia-h200")
    shutil.copytree(COMMITTED, root / OTHER)

    def slower(frame):
        times = [name for name in frame if name.endswith("_us")]
        frame[times] *= 4 / 3
        if "contender" in frame:
            frame.loc[frame.contender == "RRE reference", times] *= 0.5

    for path in (root / OTHER).glob("*.json"):
        rewrite(path.parent, path.stem, slower, signed=True)
        about = json.loads(path.read_text())
        about["gpu"]["name"] = NAME
        path.write_text(json.dumps(about))
    return root


@without_a_gpu
def test_without_a_gpu_that_of_reference_is_read_unless_another_is_chosen(two_gpus, monkeypatch):
    monkeypatch.setattr(records, "REFERENCE", "nvidia-h200")
    assert records.gpus(two_gpus) == ["nvidia-h200", OTHER]
    monkeypatch.setattr(records, "REFERENCE", OTHER)
    assert records.load("dense", two_gpus).provenance["gpu"]["name"] == NAME
    assert records.load("dense", records.selection(two_gpus, "NVIDIA H200")).provenance["gpu"]["name"] == "NVIDIA H200"
    with pytest.raises(
        ValueError, match=r"gpu: expected one of \['nvidia-made-up', 'nvidia-h200'\], .* got 'nvidia-l4'"
    ):
        records.selection(two_gpus, "nvidia-l4")


def test_records_of_one_figure_are_of_one_gpu(two_gpus, tmp_path):
    shutil.copytree(two_gpus, tmp_path / "some")
    (tmp_path / "some" / "nvidia-h200" / "formats.json").unlink()
    found = records.load_together(["dense", "formats"], tmp_path / "some")
    assert {record.provenance["gpu"]["name"] for record in found} == {NAME}
    with pytest.raises(records.Missing, match="no record of 'dense' and 'formats' .*ONLY=.dense formats."):
        records.load_together(["dense", "formats"], records.Selection(tmp_path / "some", "nvidia-h200"))


def test_every_claim_is_judged_on_either_and_disagreements_are_told(two_gpus):
    ledgers = engine.by_gpu(two_gpus)
    assert set(ledgers) == {"nvidia-h200", OTHER}
    other = ledgers[OTHER].set_index("id")
    assert other.on_gpu.sum() >= 20
    on_gpu = other.evidence[other.on_gpu]
    assert on_gpu.str.contains(NAME).all() and not on_gpu.str.contains("H200").any()
    found = engine.disagreements(ledgers)
    first = ledgers["nvidia-h200"].set_index("id").outcome
    changed = {claim for claim in other.index if len({other.outcome[claim], first[claim]} - {Outcome.UNTOLD}) > 1}
    assert set(found.id) == changed and "FS-05" in changed
    row = found.set_index("id").loc["FS-05"]
    assert row[OTHER].startswith(other.words["FS-05"]) and row["nvidia-h200"] != row[OTHER]
    assert engine.disagreements({"nvidia-h200": ledgers["nvidia-h200"]}).empty
