"""The reports for other projects: with reproductions that run, and with the figures of the records."""

import csv
import json
import math
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest

from ropelab.bench import packages, records
from ropelab.bench.peers import te_source
from ropelab.study.documents import deepspeed
from ropelab.study.documents.sglang import kernels
from ropelab.study.engine import kept
from ropelab.study.engine.claims import documents
from ropelab.study.site.summary import COLUMNS
from tests.environments import ROOT, run
from tests.interop.deepspeed_package import deepspeed_sequence
from tests.support import replaced_since_the_commit

UPSTREAM = ROOT / "upstream"
README = (UPSTREAM / "README.md").read_text()
REPORTS = sorted(path for path in UPSTREAM.glob("*.md") if path.name != "README.md")
GPUS = ("nvidia-h200", "nvidia-h100-80gb-hbm3")
PUBLISHED = {
    "transformer_engine_3057": (te_source.REPOSITORY, te_source.FIRST, te_source.SOURCE),
    "sglang_14302": (kernels.REPOSITORY, kernels.STATES["first"].commit, kernels.STATES["first"].path),
}
"""Reproductions that compile a published file -> repository, commit and path of the file."""
PLAIN = [path for path in sorted(UPSTREAM.glob("*.py")) if path.stem not in {"deepspeed_8052", *PUBLISHED}]
NEEDS = {
    path.stem: "triton" if path.stem.startswith("ptxas") else "transformers"
    for path in PLAIN
    if path.stem.startswith(("ptxas", "transformers", "float32"))
}
NUMBER = r"(?<![\d.])\d+\.\d+(?![\d.]*\d)"
"""A number with decimals, and no version."""
by_name = pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)


def rows(path: Path) -> list[list[str]]:
    """The cells of every line of a table, heads and rules included."""
    lines = [line for line in path.read_text().splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def blocks(path: Path) -> list[list[str]]:
    """The lines of each output that a report shows."""
    return [block.splitlines() for block in re.findall(r"```text\n(.*?)```", path.read_text(), re.DOTALL)]


def agree(said: list[str], shown: list[str]) -> bool:
    """The same lines; rounding errors, which differ between processors, need the same magnitude alone."""
    fraction = re.compile(r"(\d+\.\d+|\d+e[+-]\d+)")
    for line, other in zip(said, shown, strict=True):
        found, expected = fraction.split(line), fraction.split(other)
        if found[::2] != expected[::2] or not all(
            math.isclose(float(x), float(y), rel_tol=0.75, abs_tol=1e-5)
            for x, y in zip(found[1::2], expected[1::2], strict=True)
        ):
            return False
    return True


def test_the_table_names_every_report_and_every_reproduction():
    assert re.findall(r"\]\((\w+\.md)\)", README) != []
    assert sorted(re.findall(r"\]\((\w+\.md)\)", README)) == [path.name for path in REPORTS]
    programs = sorted(path.name for path in UPSTREAM.glob("*.py"))
    assert sorted(re.findall(r"python upstream/(\w+\.py)", README)) == programs


@by_name
def test_a_report_names_a_reproduction(path):
    text = path.read_text()
    studies = [name for names in re.findall(r"make measure ONLY=\"?([\w ]+)", text) for name in names.split()]
    assert all(list(records.MEASUREMENTS.glob(f"*/{name}.csv")) for name in studies)
    assert studies or path.with_suffix(".py").name in text


@by_name
def test_verdicts_and_figures_are_those_of_the_court(path):
    with (ROOT / "data" / "verdicts.csv").open() as file:
        verdicts = {(row["gpu"], row["id"]): row for row in csv.DictReader(file)}
    known = {claim.id: claim for document in documents() for claim in document.claims}
    for claim, what, *cells in (row for row in rows(path) if re.fullmatch(r"[A-Z]{2}-\d\d", row[0])):
        for gpu, cell in zip(GPUS, cells[:-1], strict=True):
            verdict = verdicts[gpu, claim]
            assert cell in "\n".join(verdict.values()), f"{claim} on {gpu}: {cell}"
            if known[claim].is_of(gpu) and cell not in "\n".join(v for k, v in verdict.items() if k != "beyond"):
                assert what.startswith("beyond it: "), f"{claim}: {what}"
        assert cells[-1] == verdicts[GPUS[1], claim]["words"], claim


@pytest.mark.parametrize("document", documents(), ids=lambda document: document.key)
def test_the_sentences_of_a_letter_have_the_numbers_of_the_verdicts(document):
    (path,) = UPSTREAM.glob(f"{document.key}_*.md")
    verdicts = kept.read()
    verdicts = verdicts[verdicts.id.isin([claim.id for claim in document.claims])].drop(columns="commit")
    known = {*re.findall(NUMBER, " ".join(verdicts.to_numpy().ravel()))}
    known |= {number for claim in document.claims for number in claim.numbers}
    prose = re.sub(r"```.*?```|^[|].*?$|^Times in UTC.*", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    said = {*re.findall(NUMBER, prose)}
    assert said <= known, said - known


@by_name
def test_records_have_the_time_that_a_report_states(path):
    if replaced_since_the_commit():
        pytest.skip("records were measured anew: the reports follow before they are sent")
    stated = [row for row in rows(path) if re.fullmatch(r"`\w+`", row[0])]
    assert bool(stated) == ("H200" in path.read_text())
    for name, *times in stated:
        for gpu, time in zip(GPUS, times, strict=True):
            provenance = json.loads((records.MEASUREMENTS / gpu / f"{name.strip('`')}.json").read_text())
            assert provenance["utc"].startswith(time.replace(" ", "T")), f"{name} on {gpu}: {provenance['utc']}"
            assert {"torch": provenance["torch"][:6], "triton": provenance["triton"]} == {
                "torch": "2.11.0", "triton": "3.6.0"
            }  # fmt: skip


def test_the_times_beside_flashinfer_are_those_of_the_record():
    stated = {row[0]: row[1:] for row in rows(UPSTREAM / "flashinfer_5368.md")}
    for contender in ("ropelab, one launch", "FlashInfer"):
        for gpu, cell in zip(GPUS, stated[contender], strict=True):
            frame = records.load("paged_cache", gpu=gpu).frame
            (time,) = frame[
                (frame.operation == "QK norm, rotation, cache") & (frame.tokens == 4096) & (frame.cache == "bfloat16")
                & (frame.q_heads == 64) & (frame.contender == contender)
            ].median_us  # fmt: skip
            assert cell == f"{time:.1f}"


def test_the_fractions_of_a_copy_are_those_of_the_record():
    stated = {row[0]: row[1:] for row in rows(UPSTREAM / "pytorch_187286.md")}
    for label in ("eager", "torch.compile", "ropelab"):
        for gpu, cell in zip(GPUS, stated[label], strict=True):
            frame = records.load("dense", gpu=gpu).frame
            fractions = frame[frame.contender == COLUMNS[label]].fraction_of_copy
            assert len(fractions) == 32 and cell == f"{fractions.median():.2f}"


@pytest.mark.process
@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.stem)
def test_a_reproduction_says_what_the_report_says(path):
    """Versions other than those of a report may answer in another way; a program that has no version has one answer."""
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem])
    said = run(Path(sys.executable), path, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="")
    lines = [line for line in said.splitlines() if not line.startswith("[transformers]")]
    shown = blocks(path.with_suffix(".md"))
    if not re.match(r"(torch|transformers|ptxas) \d", lines[0]):
        assert [lines[-1]] in shown
    else:
        same_version = [block for block in shown if block[0] == lines[0]]
        assert all(agree(lines[-len(block) :], block) for block in same_version), said


@pytest.mark.peers
@pytest.mark.process
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
@pytest.mark.parametrize("name", PUBLISHED)
def test_a_reproduction_with_a_published_file_says_what_the_report_says(name):
    said = run(Path(sys.executable), UPSTREAM / f"{name}.py", packages.file_at(*PUBLISHED[name])).splitlines()
    assert [said] == blocks(UPSTREAM / f"{name}.md")


@pytest.mark.peers
def test_the_reproduction_of_the_gate_of_deepspeed(capsys):
    shown = blocks(UPSTREAM / "deepspeed_8052.md")[0]
    path = UPSTREAM / "deepspeed_8052.py"
    kernel = deepspeed.interpreted_kernel("0.3.2")
    with deepspeed_sequence() as (layer, _):
        runpy.run_path(str(path))
        without = capsys.readouterr().out.splitlines()
        layer._torchembed_available, layer._torchembed_rope_forward = True, kernel
        layer.get_accelerator().on_accelerator = lambda t: True
        runpy.run_path(str(path))
    assert capsys.readouterr().out.splitlines() == shown
    assert [line.split(": ")[1] for line in without] == ["equal", "equal", "equal", "both raise"]
