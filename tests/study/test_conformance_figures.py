"""The cells of notebook 09_conformance, on a kill matrix and a table of peers that are made up here."""

import os
import re

import pandas as pd
import pytest
import torch

pytest.importorskip("seaborn")

from ropelab.bench import (  # noqa: E402
    conformance,
    packages,
    processes,
    records,
    studies,
    subjects,
    workers,
)
from ropelab.conformance import LAWS  # noqa: E402
from ropelab.study.faults import AGREEMENT, FAULTS, NOT_EXPRESSED  # noqa: E402
from ropelab.study.topics.conformance import implementations, kill_matrix, kills, law_markdown  # noqa: E402
from tests.site.cells import run  # noqa: E402
from tests.study import dying_contender  # noqa: E402
from tests.study.sentences import states  # noqa: E402

# Fault -> the laws that kill it; every other law holds.
KILLERS = {
    "backward_applies_forward": ("adjoint", "second_order", "rounding"),
    "layout_flag_ignored": ("definition", "layout", "rounding"),
    "sign_reversed_undeclared": ("definition", "rounding"),
    "positions_from_one": ("definition", "identity", "composition", "inverse"),
    "single_head_lost": ("single_head",),
    "tokens_on_the_y_axis": (),
}
ASKED = [law.name for law in LAWS.values() if law.by_default]


@pytest.fixture
def found():
    rows = {name: {law: "fail" if law in killers else "pass" for law in ASKED} for name, killers in KILLERS.items()}
    rows["single_head_lost"]["packed"] = "not applicable"
    rows["layout_flag_ignored"]["layout"] = "error"
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis(index="fault", columns="law")


@pytest.fixture
def table():
    rows = [
        {"subject": name, "convention": "huggingface", "layout": "split_half", "dtype": "float32", "device": "cuda",
         "law": law, "status": status, "violation": 1e-7, "bound": 2e-7, "message": f"{law}: words of {name}"}
        for name, broken in {"ropelab, split-half": (), "Liger": ("decode", "second_order")}.items()
        for law in ASKED
        for status in ["fail" if law in broken else "pass"]
    ]  # fmt: skip
    contender = next(c for c in subjects.CONTENDERS if c.name == "torchembed 0.3.2")
    missing = conformance.left_out(contender, "not installed", device="cuda", dtype=torch.float32)
    return pd.concat([pd.DataFrame(rows), missing], ignore_index=True)


# --------------------------------------------------------------------------------------------------- the kill matrix


@pytest.fixture
def judged(monkeypatch, found):
    """The names of the chapter after the cells that judge the catalogue, for the matrix ``found``."""

    def names(*cells):
        made_up = {"kill_matrix": lambda *_, **__: found}
        return run(monkeypatch, "09", "picture", "matrix-figure", *cells, instead=made_up)

    return names


def test_the_score_counts_faults(judged):
    (said,) = judged().findings_shown
    assert states(said, 6, len(FAULTS) + len(NOT_EXPRESSED), 5, 5, 4)  # 4 need no reference


def test_shortcomings_are_told_one_by_one(judged):
    told = {name for name in KILLERS if any(f"`{name}`" in line for line in judged("matrix-score").limits)}
    assert {"tokens_on_the_y_axis", "sign_reversed_undeclared"} <= told
    assert not {"layout_flag_ignored", "backward_applies_forward"} & told


def test_an_opt_in_law_that_was_not_asked_kills_nothing(found, judged):
    found["huge"] = pd.Series({"tokens_on_the_y_axis": "fail"})
    names = judged("blind-figure", "few-figure")
    assert names.alone["huge"] == kills(found).huge.sum() == 1
    assert names.of_all.kills.sum() == kills(found).any(axis=1).sum()


def test_each_law_of_the_cover_kills_what_none_before_did(judged):
    names = judged("few-figure")
    cover = names.of_all
    assert cover.law.tolist() == ["definition", "adjoint", "single_head"]  # of adjoint and rounding, the first
    assert cover.kills.tolist() == [3, 1, 1] and cover.left.tolist() == [2, 1, 0]
    assert not set(names.of_consistent.law) & {*AGREEMENT, "huge"}
    assert names.of_consistent.kills.sum() == 4  # all but the reversed sign


def test_self_consistency_cannot_see_layout_and_sign(judged):
    assert [*judged("consistency-figure").blind] == ["layout_flag_ignored", "sign_reversed_undeclared"]


def test_a_law_counts_the_faults_that_it_alone_kills(judged):
    names = judged("blind-figure")
    alone, killed = names.alone, names.killed
    assert alone["single_head"] == 1 and alone.is_monotonic_decreasing and (alone > 0).all()
    assert all(killed.loc[killed.sum(axis=1) == 1, law].sum() == n for law, n in alone.items())


def test_the_map_has_every_fault_and_every_law(judged):
    names = judged()
    codes = names.ax.images[0].get_array()
    assert codes.shape == (len(KILLERS), len(ASKED))
    assert (codes == 0).sum() == sum(map(len, KILLERS.values()))
    assert [label.get_text() for label in names.right.get_yticklabels()] == [
        f"{len(killers)} law{'s' * (len(killers) != 1)}" for killers in KILLERS.values()
    ]


def test_a_catalogue_is_held_to_the_laws():
    found = kill_matrix(["layout_flag_ignored"], ["definition", "isometry", "packed"], here=True)
    assert found.loc["layout_flag_ignored"].to_dict() == {
        "definition": "fail", "isometry": "pass", "packed": "pass"
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------------- peers


def test_the_record_of_peers_is_drawn_counted_and_told(monkeypatch, table, tmp_path):
    records.write("conformance", table, tmp_path)
    read = records.load("conformance", tmp_path).frame
    assert list(read.columns) == conformance.COLUMNS and len(read) == len(table)
    assert "conformance" in studies.STUDIES
    cells = "picture", "laws-table", "peers-figure", "peers-gpu", "violations-text"
    nobody = {"implementations": lambda *_, **__: table[table.subject != "Liger"]}
    names = run(monkeypatch, "09", *cells, instead=nobody, records=str(tmp_path))
    here, there = names.findings_shown
    assert states(here, 1, 1) and states(there, 1, 2)
    assert "Liger" in there and "`second_order` (1), `decode` (1)" in there
    assert set(names.missing.index) == {"not installed"} and "torchembed 0.3.2" in names.missing["not installed"]
    assert [words.partition(":")[0] for words in names.first.message] == ["second_order", "decode"]


def test_live_peers_keep_the_laws_and_the_others_say_why_not():
    names = ["complex product (Llama)", "flash-attn, split-half"]
    frame = implementations(names, ["definition", "layout"], here=True)
    live = frame[frame.subject == names[0]]
    assert live.status.tolist() == ["pass", "pass"] and (live.violation <= live.bound).all()
    (reason,) = frame[frame.subject == names[1]].message
    assert reason and set(frame.status) == {"pass", conformance.NOT_RUN}


def test_a_message_names_no_folder_of_this_machine():
    frame = implementations(["complex product (Llama)"], ["empty"], here=True)
    (message,) = frame.message
    assert "RuntimeError" in message
    assert str(packages.PEERS.parents[1]) not in message


def test_a_package_that_is_not_there_is_not_run(monkeypatch):
    monkeypatch.setattr(packages, "installations", lambda package, peers: {})
    contender = next(c for c in subjects.CONTENDERS if c.name == "Liger")
    frame = conformance.held(contender, device="cpu", dtype=torch.float32)
    assert frame.status.tolist() == [conformance.NOT_RUN] and frame.message[0]


def test_a_contender_that_ends_its_process_loses_the_law_at_which_it_ends_it(monkeypatch):
    chosen = ("definition", "empty")
    dying = subjects.Contender("dying", dying_contender.rotate, "ropelab", {})
    monkeypatch.setattr(conformance, "CONTENDERS", (dying,))
    monkeypatch.setattr(conformance, "DTYPES", (torch.float32,))
    monkeypatch.setattr(conformance, "LAWS", {name: LAWS[name] for name in chosen})
    frame = conformance.conformance(device="cpu").set_index("law")
    assert frame.status.to_dict() == {"definition": "pass", "empty": "error"}
    assert frame.message["empty"].startswith("its process ended: BrokenProcessPool")


def test_torchembed_refuses_tables_of_each_sequence():
    table = torch.arange(4.0).reshape(2, 1, 2)
    with pytest.raises(NotImplementedError, match="one table"):
        subjects._shared(table)
    assert subjects._shared(table[:1].expand(3, 1, 2)).tolist() == [[0, 1]]


# -------------------------------------------------------------------------------------------------- laws and reports


def test_laws_fit_a_table_and_become_formulas(table):
    mathml = pytest.importorskip("ropelab.study.site.mathml").mathml
    laws = pd.DataFrame([{"law": law.name, "statement": law.statement, "latex": law.latex} for law in LAWS.values()])
    numbers = table[table.subject == "ropelab, split-half"].set_index("law")[["bound", "violation"]]
    markdown = law_markdown(laws.join(numbers, on="law"))
    assert len({line.count("|") for line in markdown.splitlines()}) == 1
    assert all(f"`{name}`" in markdown for name in LAWS) and "2.0e-07" in markdown
    formulas = re.findall(r"\$([^$]+)\$", markdown)
    assert formulas and all("<math" in mathml(formula, display=False) for formula in formulas)


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs a machine without a GPU: only there kernels are interpreted"
)
def test_only_kernels_are_interpreted():
    ask = [(os.getenv, (processes.INTERPRET, "no"))]
    before = os.environ.get(processes.INTERPRET)
    assert sorted(workers.spread(ask, ask)) == ["1", "no"]
    assert os.environ.get(processes.INTERPRET) == before
