"""Changes of the evidence that can mislead, each with its checksums written anew: something notices every one.

Two changes still pass: a record together with the verdicts that follow from it, and a sentence of a notebook that has
no number. The history of ``data/`` and of the notebooks shows both.
"""

import json
import re
import shutil
import subprocess
from dataclasses import replace
from functools import cache

import pandas as pd
import pytest

from ropelab.bench import fetch_peers, record_checks, records
from ropelab.bench.unavailable import Unavailable
from ropelab.study.engine import kept, ledger, provenance, quotations
from ropelab.study.engine.claims import documents, load_claims
from ropelab.study.engine.comparisons import Comparison
from ropelab.study.engine.computed import computed
from ropelab.study.site import summary
from tests.study.test_court import KNOWN_PROBLEMS
from tests.support import replaced_since_the_commit

DATA = records.ROOT / "data"
H200, H100 = "nvidia-h200", "nvidia-h100-80gb-hbm3"
US = ["median_us", "q20_us", "q80_us"]
OLD, NEW = "#3057 (6c46696), old grid", "#3057 (6c46696), new grid"

pytestmark = pytest.mark.skipif(replaced_since_the_commit(), reason="records were measured anew: run the summary")


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("changes") / "data"
    shutil.copytree(DATA, folder)
    return folder


@pytest.fixture
def data(copy):
    """A copy of ``data``, which a test may change: it is restored afterwards."""
    before = written(copy)
    yield copy
    for path in written(copy).items() ^ before.items():
        restored(path[0], DATA / path[0].relative_to(copy))


def written(folder):
    """Every file -> when it was written."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def restored(path, original):
    if original.exists():
        path.parent.mkdir(exist_ok=True)
        shutil.copy2(original, path)
    else:
        path.unlink(missing_ok=True)


def signed(path, frame=None, **about):
    """Write the table and the provenance of a record, with the checksum of the table."""
    csv = path.with_suffix(".csv")
    if frame is not None:
        frame.to_csv(csv, index=False)
    provenance_ = json.loads(path.read_text()) | about
    provenance_["csv_sha256"] = record_checks.sha256(csv)
    path.write_text(json.dumps(provenance_))


def using(study):
    """The claims that rest on a record."""
    rules = {name for name, rule in ledger._RULES.items() if study in rule.evidence}
    tests = {
        claim.id for claim in load_claims() if any(study in test.evidence for test in (*claim.test, *claim.beyond))
    }
    return sorted(rules | tests)


once = cache(computed)


def changed_verdicts(data, gpu, ids, given=None):
    where = records.Selection(data / "measurements", gpu)
    found = ledger.ledger(given, only=ids, records=where, compute=once)
    if found.remarks.str.contains(kept.ELSEWHERE).all():
        raise Unavailable(f"{', '.join(ids)}: the published code")
    return kept.changed({gpu: found})


RECORDS = [
    # GPU, study, rows, and their new values or a factor of their times
    (H100, "te_kernels", f"contender == '{OLD}'", 2.0),
    (H200, "te_kernels", f"contender == '{NEW}'", 1.3),
    (H100, "te_kernels", "contender.notna()", 2.0),
    (H100, "te_layer", f"contender == '{NEW}' and what == 'layer'", 0.9),
    (H100, "te_parity", "worst.notna()", {"worst": 0.01}),
    (H200, "te_parity", "cp_rank == 7", {"same_result": False}),
    (H200, "te_past_the_end", f"contender == '{NEW}'", {"outcome": "zeros"}),
    (H200, "fairseq2_grid", "contender == 'RE reference'", 1.5),
    (H100, "fairseq2_grid", "mode == 'eager' and contender == 'RRE llama'", 0.9),
    (H100, "fairseq2_inductor", "contender == 'RE reference'", {"kernels": 3}),
    (H200, "fairseq2_inductor", "contender == 'RE reference'", {"peak_bytes": 1}),
    (H200, "fairseq2_inductor", "contender == 'RE llama'", {"complex_warning": False}),
    (H200, "fairseq2_reorderings", "variant == 'unsqueeze, cat'", {"code": "another"}),
    (H200, "fairseq2_defaults", "case == 'padded'", {"equal": False}),
    (H200, "sglang_protocols", "contender == 'first version'", 0.8),
    (H100, "sglang_protocols", "contender == 'flash-attn, all heads'", 1.5),
    (H200, "sglang_second_grid", "contender == 'FlashInfer'", 1.4),
    (H200, "sglang_diffusion", "contender == 'second version'", 0.87),
    (H100, "sglang_low_tokens", "contender == 'second version, off'", 0.2),
    (H100, "sglang_vector_widths", "contender == 'third version, narrow'", 0.5),
    (H200, "sglang_head_sizes", "contender == 'FlashInfer'", {"status": "ok"}),
    (H200, "sglang_operator_calls", "claimed", {"outcome": "wrong"}),
    (H100, "sglang_synchronize", "exception.notna()", {"exception": "RuntimeError"}),
    (H200, "deepspeed_table", "contender == 'torchembed'", 0.5),
    (H200, "deepspeed_correctness", "version == '0.3.0'", {"gradient_error": 3e-8}),
    (H100, "deepspeed_inductor", "direction == 'forward'", {"buffers": 3}),
    (H100, "deepspeed_launches", "path == 'raw kernel'", {"launches": 2}),
]  # fmt: skip
NEED_PEERS = {"deepspeed_launches"}


@pytest.mark.parametrize(
    "gpu, study, where, new",
    [
        pytest.param(*row, id=f"{row[1]}-{n}", marks=[pytest.mark.peers] if row[1] in NEED_PEERS else [])
        for n, row in enumerate(RECORDS)
    ],
)
def test_another_number_of_a_record(gpu, study, where, new, data):
    path = data / "measurements" / gpu / f"{study}.json"
    frame = pd.read_csv(path.with_suffix(".csv"))
    rows = frame.query(where, engine="python").index
    if isinstance(new, float):
        frame.loc[rows, US] *= new
    else:
        for column, value in new.items():
            frame[column] = frame[column].astype(object)
            frame.loc[rows, column] = value
    signed(path, frame)
    try:
        records.load(study, records.Selection(data / "measurements", gpu))
    except records.Damaged:
        return  # the times and the run contradict each other
    assert changed_verdicts(data, gpu, using(study))


def contradictions(data):
    return [line for line in provenance.problems(data / "measurements") if line not in KNOWN_PROBLEMS]


def parent(commit):
    run = ["git", "rev-parse", f"{commit}^"]
    return subprocess.run(run, cwd=records.ROOT, capture_output=True, text=True, check=True).stdout.strip()


def copied(data, source, target, named):
    """A record copied over that of another GPU, or into a new folder, with the GPU's name edited or not."""
    folder = data / "measurements"
    (folder / target).mkdir(exist_ok=True)
    for suffix in (".csv", ".json"):
        shutil.copyfile(folder / source / f"te_kernels{suffix}", folder / target / f"te_kernels{suffix}")
    path = folder / target / "te_kernels.json"
    gpu = json.loads(path.read_text())["gpu"]
    signed(path, gpu=gpu | ({"name": named} if named else {}))


def about(**changes):
    def change(data):
        path = data / "measurements" / H100 / "te_kernels.json"
        signed(path, **{key: value(json.loads(path.read_text()).get(key)) for key, value in changes.items()})

    return change


PROVENANCES = {
    "an H200's record over the H100's": lambda data: copied(data, H200, H100, None),
    "and the GPU's name edited": lambda data: copied(data, H200, H100, "NVIDIA H100 80GB HBM3"),
    "a new folder of another GPU's record": lambda data: copied(data, H200, "nvidia-b200", "NVIDIA B200"),
    "a new folder without the name": lambda data: copied(data, H200, "nvidia-b200", None),
    "a nonsense commit": about(commit=lambda _: "0" * 40),
    "a commit with other code": about(commit=lambda _: "49820a05e0"),
    "the hash of a kernel": about(kernels=lambda old: old | {"rotate_triton._rotate_kernel": "0" * 16}),
    "a kernel less": about(kernels=lambda old: {k: v for k, v in old.items() if k != "stages_triton.turn"}),
    "a time before the commit": about(utc=lambda _: "2026-11-01T00:00:00+00:00"),
    "another Triton than in its run": about(triton=lambda _: "3.5.0"),
    "no kernel at its commit": about(kernels=lambda _: {}, kernels_unknown=lambda _: "its run did not note them"),
    "the parent of its commit": about(commit=lambda commit: parent(commit)),
    "a commit by another name": about(commit=lambda _: "HEAD"),
    "a protocol that its commit does not have": about(protocol=lambda old: old | {"timer": 2}),
    "a time after the commit of its table": about(utc=lambda _: "2026-11-30T00:00:00+00:00"),
    "no peer, where the table was committed with some": about(peers=lambda _: {}),
    "a peer's checksum": about(peers=lambda peers: dict.fromkeys(peers, "0" * 16)),
    "another memory of the GPU": about(gpu=lambda gpu: gpu | {"memory_bytes": 1}),
    "another name of the GPU": about(gpu=lambda gpu: gpu | {"name": "NVIDIA GB10"}),
}  # fmt: skip


def test_the_committed_provenances_contradict_nothing(data):
    assert contradictions(data) == []


@pytest.mark.parametrize("name", PROVENANCES)
def test_another_provenance(name, data):
    if any(word in name for word in ("commit", "hash", "kernel")) and not provenance.has_history():
        pytest.skip("needs a checkout with the whole history")
    PROVENANCES[name](data)
    assert contradictions(data)


@pytest.mark.skipif(not provenance.has_history(), reason="needs a checkout with the whole history")
@pytest.mark.parametrize(
    "edit, why",
    [
        ({}, ""),
        ({"commit": "HEAD"}, "is not in the history"),
        ({"kernels": {"rotate_triton._rotate_kernel": "0" * 16}}, "the hash is not that of commit"),
        ({"protocol": {"timer": 2, "study": 1}}, "the protocol is not that of commit"),
        ({"utc": "2026-11-01T00:00:00+00:00"}, "was measured before its commit"),
        ({"utc": "2999-01-01T00:00:00+00:00"}, "was measured after today"),
    ],
)
def test_the_provenance_of_a_new_table(edit, why, data):
    """A table that no commit has yet is compared with the commit that it names."""
    path = data / "measurements" / H100 / "te_layer.json"
    frame = pd.read_csv(path.with_suffix(".csv"))
    signed(path, frame.iloc[::-1], **edit)
    found = contradictions(data)
    assert len(found) == bool(why) and all(why in line for line in found), found


def test_another_version_of_a_peer_makes_records_old_and_takes_no_verdict(data, monkeypatch):
    """The list of peers has a later version: the records are as true as they were."""
    listed = [replace(e, version="9.9") if str(e) == "torchembed 0.3.2" else e for e in fetch_peers.read_list()]
    monkeypatch.setattr(fetch_peers, "read_list", lambda file=None: listed)
    where = records.Selection(data / "measurements", H100)
    assert records.load("deepspeed_table", where).stale == ("torchembed 0.3.2",)
    assert contradictions(data) == []


def test_no_verdict_rests_on_a_contradiction(data):
    PROVENANCES["a peer's checksum"](data)
    (row,) = ledger.ledger(only=["TE-16"], records=records.Selection(data / "measurements", H100)).itertuples()
    assert row.outcome == "cannot be told" and "checksum of" in row.needs


TABLES = [
    # evidence, a row, its new value
    ("te_published_a", "n_seqs == 128", {"old_share_percent": 39.12}),
    ("te_published_b", "n_seqs == 2401", {"stated_speedup": 147.296}),
    ("deepspeed_published", "seq_len == 4096", {"stated_speedup": 3.7}),
    ("fairseq2_summary", "mode == 'compiled' and ratio == 'llama'", {"printed": 1.31}),
    ("fairseq2_log", "mode == 'compiled'", {"re_llama_ms": 1.0}),
    ("sglang_published_e2e", "row == 'E2E Latency'", {"new": 24716.08}),
    ("sglang_vector_instructions", "form == 'AlignedVector'", {"load_bytes": 8}),
    ("sglang_rocm_parts", "missing_since == 15812", {"repaired": False}),
    ("te_source", "version == 'first'", {"guard": True}),
    ("te_parity_tests", "version == 'first'", {"float16": True}),
]  # fmt: skip


@pytest.mark.parametrize("name, where, new", TABLES, ids=[row[0] for row in TABLES])
def test_another_number_of_a_document(name, where, new, data):
    frame = ledger.find_evidence(name, compute=once).frame.copy()
    for column, value in new.items():
        frame[column] = frame[column].astype(object)
        frame.loc[frame.query(where).index, column] = value
        frame[column] = frame[column].infer_objects()
    remarked = [claim for claim, (_, evidence) in ledger._REMARKS.items() if name in evidence]
    assert changed_verdicts(data, H100, [*using(name), *remarked], {name: frame})


# ---------------------------------------------------------------------- claims and texts


def claim(document, **changes):
    (found,) = [one for one in documents() if one.key == document]
    entries = [entry | changes if entry["id"] == changes["id"] else entry for entry in found.entries]
    return replace(found, entries=tuple(entries))


QUOTES = [
    ("deepspeed", {"id": "DS-07", "quote": '"4.1x", "4.7x", "4.6x"  "on an NVIDIA"'}),
    ("transformer_engine", {"id": "TE-05", "quote": '"Microbenchmark on A100"'}),
    ("sglang", {"id": "SG-04", "quote": '"roughly 1.15–1.25× speedup over the baseline"'}),
    ("fairseq2", {"id": "FS-07", "quote": '"RE + "reference": 0.76x (degraded performance)"'}),
]  # fmt: skip


@pytest.mark.parametrize("document, new", QUOTES, ids=[document for document, _ in QUOTES])
def test_another_quotation(document, new):
    assert quotations.missing(claim(document, **new), pd.read_csv(quotations.QUOTATIONS))


def limits(name, **changes):
    (found,) = [one for one in load_claims() if one.id == name]
    return replace(found, test=tuple(replace(test, **changes) for test in found.test))


RULES = [
    ("another stated size", lambda: limits("FS-07", stated=0.55)),
    ("another threshold", lambda: limits("TE-22", below=0.8)),
    ("another range", lambda: limits("SG-04", within=(0.1, 9.0))),
    ("other rows", lambda: limits("TE-16", where="part == 'table B' and step == 'forward and backward'")),
    ("another contender", lambda: limits("TE-05", under={"contender": OLD})),
    ("another GPU", lambda: replace(limits("TE-16"), gpu="NVIDIA GB10")),
]  # fmt: skip


@pytest.mark.parametrize("name, make", RULES, ids=[name for name, _ in RULES])
def test_another_limit_of_a_claim(name, make, monkeypatch):
    new = make()
    monkeypatch.setattr(ledger, "load_claims", lambda document=None: [new])
    assert changed_verdicts(DATA, H100, [new.id])


@pytest.mark.parametrize("old, new", [("make 80 claims", "make 75 claims"), ("holds 51,", "holds 44,")])
def test_another_number_of_the_readme(old, new):
    """`test_readme` compares both: the count of claims, and that of each outcome."""

    def right(text):
        count = re.findall(r"make (\d+) claims", text) == [str(len(load_claims()))]
        return count and f"<!-- documents -->\n{summary.verdicts(kept.ledger(H100))}<!-- end -->" in text

    text = summary.README.read_text()
    assert old in text and right(text) and not right(text.replace(old, new))


def test_a_test_cannot_lose_its_limit():
    with pytest.raises(ValueError, match="expected one of"):
        Comparison.read("AA-01", {"record": "times", "cell": ["n"], "over": "a", "protocol": "document"})
