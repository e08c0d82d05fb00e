"""Every change of evidence, and of the code that measured it, is noticed by name; `test_readme` holds README.md."""

import json
import re
import shutil
from contextlib import ExitStack, contextmanager

import pandas as pd
import pytest

from ropelab.bench import checksums, records, staleness
from ropelab.study.plots import registry as figures
from ropelab.study.site import ledgers, provenance, report

EVIDENCE = [
    path.relative_to(checksums.DATA).as_posix() for name in checksums.EVIDENCE for path in checksums.DATA.glob(name)
]
TABLES = [name for name in EVIDENCE if re.fullmatch(r"measurements/.*\.csv", name)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A copy of ``data``; each test leaves it as it was."""
    folder = tmp_path_factory.mktemp("evidence") / "data"
    shutil.copytree(checksums.DATA, folder)
    checksums.write(folder)
    return folder


@contextmanager
def tampered(path, text):
    """The file with another text."""
    before = path.read_bytes()
    path.write_text(text)
    try:
        yield
    finally:
        path.write_bytes(before)


def with_another_number(text):
    """The text with its last number doubled; a text without a number gets another word."""
    if not re.search(r"[1-9]", text):
        return with_another_word(text)
    return with_another_last(r"[1-9]\d*", lambda number: str(2 * int(number)), text)


def with_another_word(text):
    """The text with a letter more in its last word."""
    return with_another_last(r"[A-Za-z]{2,}", lambda word: f"{word}x", text)


def without_modules(path):
    """The record's JSON as it would be from before the other modules were hashed."""
    return {name: value for name, value in json.loads(path.read_text()).items() if name != "modules"}


def with_another_last(pattern, change, text):
    *_, last = re.finditer(pattern, text)
    return f"{text[: last.start()]}{change(last[0])}{text[last.end() :]}"


# ------------------------------------------------------------------------------------------- every file of evidence


def test_the_committed_checksums_are_those_of_the_files():
    assert checksums.differences(checksums.DATA) == [], "run python -m ropelab.bench.checksums and read the difference"
    folders = {name.rpartition("/")[0] for name in EVIDENCE}
    assert folders >= {"claims", "documents", "measurements/nvidia-h200"} and "sources.toml" in EVIDENCE


def test_a_change_of_any_file_is_noticed_and_keeps_a_record_from_being_read(data):
    with ExitStack() as changes:
        for name in EVIDENCE:
            text = (data / name).read_text()
            assert with_another_number(text) != text
            changes.enter_context(tampered(data / name, with_another_number(text)))
        assert checksums.differences(data) == [
            f"{name}: changed, SHA256SUMS has another checksum" for name in sorted(EVIDENCE)
        ]
        for path in (data / name for name in TABLES):
            with pytest.raises(records.Damaged, match=path.stem):
                records.load(path.stem, records.Selection(data / "measurements", path.parent.name))
    assert checksums.differences(data) == []


def test_missing_and_new_files_are_named(data):
    gone, new = data / "claims" / "sglang.toml", data / "documents" / "invented.csv"
    text = gone.read_text()
    gone.unlink()
    new.write_text("n_seqs,old_ms\n1,2\n")
    assert checksums.differences(data) == [
        "claims/sglang.toml: missing, SHA256SUMS has its checksum",
        "documents/invented.csv: new, SHA256SUMS has no checksum of it",
    ]
    gone.write_text(text)
    new.unlink()
    assert checksums.differences(data) == []
    with tampered(data / checksums.NAME, ""):
        assert checksums.differences(data) == ["SHA256SUMS: expected the checksum of every file of evidence, got none"]


def test_measuring_signs_its_own_files_only(data):
    path = data / "measurements" / "nvidia-h200" / "dense.json"
    other = data / "sources.toml"
    sums = (data / checksums.NAME).read_text()
    with tampered(data / checksums.NAME, sums), tampered(path, "{}"), tampered(other, "# Nothing"):
        checksums.update([path, data.parent / "elsewhere.csv"], data)
        assert checksums.differences(data) == ["sources.toml: changed, SHA256SUMS has another checksum"]
    assert checksums.differences(data) == []


# ------------------------------------------------------------------------------------------- records


@pytest.mark.parametrize(
    "study, contender, factor",
    [
        ("sglang_diffusion", "second version (model)", 2.0),
        ("fairseq2_grid", "RE reference", 1.5),
        ("deepspeed_table", "torchembed", 1.5),
    ],
)
def test_times_of_one_contender(study, contender, factor, data):
    path = data / "measurements" / "nvidia-h200" / f"{study}.csv"
    frame = pd.read_csv(path)
    rows = frame.contender == contender
    assert rows.any()
    frame.loc[rows, ["median_us", "q20_us", "q80_us"]] *= factor
    with tampered(path, frame.to_csv(index=False)):
        with pytest.raises(records.Damaged, match=f"{study}.csv: .*describes another table"):
            records.load(study, records.Selection(data / "measurements", "nvidia-h200"))
        assert checksums.differences(data) == [
            f"measurements/nvidia-h200/{study}.csv: changed, SHA256SUMS has another checksum"
        ]


def test_the_hash_of_the_kernels(data):
    """A record from before the other modules were hashed has this hash alone."""
    path = data / "measurements" / "nvidia-h100-80gb-hbm3" / "memory.json"
    with tampered(path, json.dumps(without_modules(path) | {"kernels_sha256": "0" * 64})):
        record = records.load("memory", records.Selection(data / "measurements", "nvidia-h100-80gb-hbm3"))
        assert record.stale == ("ropelab.kernels",) and record.footer.endswith("kernels changed since: measure again")
        assert len(checksums.differences(data)) == 1


def test_the_hash_of_one_kernel(data):
    path, where = data / "measurements" / "nvidia-h200" / "te_kernels.json", data / "measurements"
    provenance, name = json.loads(path.read_text()), "ropelab.kernels.rotate_triton"
    before = records.load("te_kernels", records.Selection(where, "nvidia-h200")).stale
    with tampered(path, json.dumps(provenance | {"modules": provenance["modules"] | {name: "0" * 16}})):
        record = records.load("te_kernels", records.Selection(where, "nvidia-h200"))
        assert set(record.stale) == {*before, name} and "kernels changed since" in record.footer
        assert checksums.differences(data) == [
            "measurements/nvidia-h200/te_kernels.json: changed, SHA256SUMS has another checksum"
        ]


@pytest.mark.parametrize(
    "name, old, new",
    [
        ("documents/transformer_engine_3057_a.csv", ",49.12,", ",39.12,"),
        ("documents/deepspeed_8052_table.csv", "1.40,0.61,", "1.40,0.91,"),
        ("documents/sglang_14302_e2e.csv", "13393.81", "23393.81"),
        ("claims/transformer_engine.toml", "binary search", "linear search"),
        ("sources.toml", "cp_rank = [0]", "cp_rank = [0, 1]"),
    ],
    ids=["published shares", "compile_ms", "stage times", "the text of a claim", "a fact about a file"],
)
def test_what_documents_say(name, old, new, data):
    text = (data / name).read_text()
    assert old in text
    with tampered(data / name, text.replace(old, new)):
        assert checksums.differences(data) == [f"{name}: changed, SHA256SUMS has another checksum"]


# ------------------------------------------------------------------------------------------- the code that measured


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """A copy of the package."""
    root = tmp_path_factory.mktemp("code")
    shutil.copytree(records.ROOT / "ropelab", root / "ropelab", ignore=shutil.ignore_patterns("__pycache__"))
    return root


@pytest.mark.parametrize(
    "measuring, module, old, new",
    [
        ("study.documents.transformer_engine.measure", "bench.varlen_models", "_FEW_HEADS = 8, 4", "_FEW_HEADS = 4, 4"),
        ("study.documents.sglang.measure", "study.documents.sglang.models", "_WARPS = 4", "_WARPS = 8"),
        (
            "study.documents.fairseq2.measure",
            "study.documents.fairseq2.peers",
            "facebookresearch/fairseq2",
            "facebookresearch/fairseq3",
        ),
        ("bench.studies", "bench.timing", "_WARM_UP = 3", "_WARM_UP = 2"),
        ("bench.studies", "kernels.rotate_triton", "import triton\n", "import triton\n\nWARPS = 2\n"),
    ],
    ids=["TransformerEngine's model", "SGLang's model", "fairseq2's code", "the timer", "the kernel"],
)
def test_a_change_of_code_makes_records_stale(measuring, module, old, new, code, tmp_path, monkeypatch):
    monkeypatch.setattr(records, "ROOT", code)
    hashes = staleness.module_hashes([f"ropelab.{measuring}"], code)
    records.write("made_up", pd.DataFrame({"median_us": [1.0]}), tmp_path, modules=hashes)
    path = code / "ropelab" / f"{module.replace('.', '/')}.py"
    text = path.read_text()
    assert text.count(old) == 1
    with tampered(path, f"# A comment.\n{text}"):
        assert records.load("made_up", tmp_path).stale == ()
    with tampered(path, text.replace(old, new)):
        record = records.load("made_up", tmp_path)
        assert record.stale == (f"ropelab.{module}",)
        assert f"ropelab.{module}" in provenance.changed_code(record)
        said = "kernels changed since: measure again" if "kernels" in module else f"recorded with other code: {module}"
        assert record.footer.endswith(said)


# ------------------------------------------------------------------------------------------- the report


def test_the_report_names_what_was_changed_and_shows_the_ledger(data, tmp_path, monkeypatch):
    row = dict.fromkeys(("statement", "quote", "outcome", "verdicts", "beyond", "basis", "needs", "by", "names"), "")
    monkeypatch.setattr(checksums, "DATA", data)
    monkeypatch.setattr(figures, "all_figures", lambda: {"host_time": figures.FIGURES["host_time"]})
    monkeypatch.setattr(
        report, "ledger", lambda document, where: ledgers.Ledger(document.key, "", [row | {"id": "AA-01"}])
    )
    page = tmp_path / "index.html"
    where = records.Selection(data / "measurements", "nvidia-h200")
    with tampered(
        data / "claims" / "deepspeed.toml", with_another_word((data / "claims" / "deepspeed.toml").read_text())
    ):
        problems = report.write(page, [], where=where)
    line = "data/claims/deepspeed.toml: changed, SHA256SUMS has another checksum"
    assert problems == [line]
    assert f'<p class="failed">{line}</p>' in page.read_text()
    assert '<dl id="AA-01">' in (tmp_path / "ledger.html").read_text()
    assert re.search("nvidia-h200/kernel_variants.json: written by hand", (tmp_path / "records.html").read_text())
    assert report.write(page, [], where=where) == []
    path = data / "measurements" / "nvidia-h100-80gb-hbm3" / "host.json"
    with tampered(path, json.dumps(without_modules(path))):
        report.write(page, [], where=records.Selection(data / "measurements", "nvidia-h100-80gb-hbm3"))
    text = (tmp_path / "records.html").read_text()
    assert "recorded before the other modules were hashed" in text
    assert re.search(r'<tbody id="host">.*<td>host_time</td>', text, re.DOTALL)
