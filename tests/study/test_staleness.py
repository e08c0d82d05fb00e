"""A record is old when a kernel that it launched, a peer that it timed or its protocol changed, else not."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from ropelab.bench import code_hash, fetch_peers, reached, records, staleness
from ropelab.bench.peer_table import ENTRIES
from ropelab.bench.side_by_side import Job, side_by_side
from ropelab.bench.study import Study
from ropelab.study.engine import measuring_code, registered
from tests.compile import same_code
from tests.gpu import test_tables

COMMITTED = {path: json.loads(path.read_text()) for path in records.MEASUREMENTS.glob("*/*.json")}
ROTATE, NORM = "rotate_triton._rotate_kernel", "qk_norm_triton._qk_norm_rope_kernel"


def edited(folder, *edits):
    """The sources of a folder after edits, each (module, old text, new text)."""
    read, sources = code_hash.of_folder(folder), {}
    for module, old, new in edits:
        text = sources.get(module, read(module)).decode()
        assert old in text, (module, old)
        sources[module] = text.replace(old, new, 1).encode()
    return lambda module: sources.get(module, read(module))


def kernels(*edits):
    return edited(reached.KERNELS, *edits)


def measuring(*edits):
    return edited(records.ROOT / "ropelab", *edits)


@pytest.mark.parametrize(
    "edit, expected",
    [
        (("rotate_triton", "def _rotate_kernel(", "# A comment.\ndef _rotate_kernel("), []),
        (("rotate_triton", "import triton\n", "import triton\n\n_MORE = 1\n"), []),
        (("qk_norm_triton", "eps", "epsilon"), []),
        (("rotate_triton", "def _rotate_kernel(", "def _rotate_kernel(more, "), [ROTATE]),
        (("stages_triton", "def turn(", "def turn(more, "), ["stages_triton.turn"]),
        (("stages_triton", "def turn(", "def turned("), ["stages_triton.turn"]),
    ],
    ids=["a comment", "a constant beside it", "another kernel", "the kernel", "a function that it calls", "it is gone"],
)
def test_a_kernel_has_changed_where_its_own_code_has(edit, expected):
    assert reached.changed(reached.reached([ROTATE]), {}, kernels(edit)) == expected


def test_a_kernel_reaches_what_it_calls_and_the_constants_that_it_names():
    found = reached.reached([ROTATE, NORM])
    assert found == reached.reached([ROTATE]) | reached.reached([NORM])
    assert {ROTATE, NORM, "stages_triton.turn", "place_triton.TableRows"} <= found.keys()
    assert {"angles_triton._C0", "angles_torch.COSINE"} <= found.keys()  # several constants of one statement
    assert "float8_triton._BEYOND" in reached.reached(["paged_cache_triton._paged_cache_kernel"])
    assert not any(name.startswith(("launch.", "tiles.")) for name in found)  # host code chooses, and is not launched
    assert reached.reached(["rotate_triton.nothing"]) == {"rotate_triton.nothing": ""}


def test_code_that_compiles_to_the_same_machine_code_is_no_change():
    noted = reached.reached([ROTATE])
    now, before = noted[ROTATE], noted | {ROTATE: "0" * 16}
    assert reached.changed(before, {}) == [ROTATE] and reached.changed(before, {ROTATE: ["0" * 16, now]}) == []
    since = {ROTATE: ["0" * 16, "1" * 16]}  # the machine code was the same, and the kernel has changed once more
    assert reached.changed(before, since) == [ROTATE]
    gone = noted | {"stages_triton.gone": "0" * 16}
    assert reached.changed(gone, {"stages_triton.gone": ["0" * 16]}) == ["stages_triton.gone"]
    assert reached.changed(gone, {"stages_triton.gone": ["0" * 16, ""]}) == []


def test_a_record_notices_code_that_its_kernels_reach_since():
    """A function that was moved into another one is not in the record; a later edit of it makes the record old."""
    name = "stages_triton.turn"
    noted = reached.reached([ROTATE])
    before = {each: digest for each, digest in noted.items() if each != name}
    assert reached.changed(before, {}) == [name] and reached.changed(before, {name: ["", noted[name]]}) == []
    assert reached.changed(before, {name: ["", "1" * 16]}) == [name]


def test_a_kernel_with_other_machine_code_makes_no_record_of_another_kernel_old():
    before = {"a.one": {"a.one": "1", "a.both": "2"}, "a.other": {"a.other": "3", "a.both": "2"}}
    today = {"a.one": {"a.one": "1", "a.both": "22"}, "a.other": {"a.other": "33", "a.both": "22"}}
    assert same_code.unchanged(before, today, []) == {"a.both": ("2", "22"), "a.other": ("3", "33")}
    assert same_code.unchanged(before, today, ["a.other"]) == {"a.both": ("2", "22")}
    assert same_code.unchanged(before, today, ["a.one"]) == {"a.other": ("3", "33")}
    moved = {"a.one": {"a.one": "11", "a.part": "4"}, "a.other": before["a.other"] | {"a.part": "4"}}
    assert same_code.unchanged(before, moved, []) == {"a.one": ("1", "11"), "a.part": ("", "4")}
    assert same_code.unchanged(before, moved, ["a.one"]) == {"a.part": ("", "4")}


def test_a_record_is_old_by_its_kernels_its_peers_and_its_protocol():
    (peer, *_) = [entry for entry in fetch_peers.read_list() if isinstance(entry, fetch_peers.Package)]
    about = {
        "study": "dense", "kernels": reached.reached([ROTATE]), "peers": {str(peer): "", "transformers 1.0": ""},
        "protocol": staleness.numbers("dense"),
    }  # fmt: skip
    assert staleness.stale(about) == ()
    assert staleness.stale(about | {"kernels": {ROTATE: "0" * 16}}) == (f"kernels.{ROTATE}",)
    assert staleness.stale(about | {"peers": {f"{peer.name} 0.0.1": ""}}) == (f"{peer.name} 0.0.1",)
    assert staleness.stale(about | {"protocol": {"timer": 0, "study": 1}}) == ("the timer (0, today 1)",)
    assert staleness.of_kernels(staleness.stale(about | {"kernels": {ROTATE: "0" * 16}})) == [f"kernels.{ROTATE}"]


def contenders(about: Path) -> set[str]:
    """The contenders of a record."""
    table = pd.read_csv(about.with_suffix(".csv"), dtype=str)
    return {*table["contender"]} if "contender" in table else set()


def test_the_measuring_code_is_that_of_the_protocols():
    """Whoever changes the timer or a study decides whether the records stay what they are."""
    known, today = staleness.protocols()["protocol"], measuring_code.hashes()
    assert known.keys() == today.keys()
    other = [name for name, digest in today.items() if known[name]["code"] != digest]
    called, adapters = staleness.protocols()["adapters"], measuring_code.adapters()
    other += [name for name in called if adapters.get(name) != called[name]]
    # An adapter needs a hash as soon as a record has its peer.
    timed = {name for about in COMMITTED for name in contenders(about)}
    modules = {entry.bind.partition(".")[0] for entry in ENTRIES if entry.name in timed}
    other += sorted(modules - called.keys())
    command = f"python -m {measuring_code.__name__} {' '.join(other)}"
    assert not other, (
        f"{', '.join(other)}: the measuring code has changed. Does it measure otherwise now? Raise the number in "
        f"data/protocols.toml, which makes the records old, and run the command. Do the numbers of the records stay? "
        f"Run the command alone: {command}"
    )


def test_hashes_are_written_and_numbers_stay(tmp_path, monkeypatch):
    file = tmp_path / "protocols.toml"
    file.write_text(
        '# Head\n\n[adapters]\n\n[protocol]\ntimer = { number = 3, code = "0" }\n\n[same_code]\n'
        '"a.b" = ["1", "2"]\n"e.f" = ["1", "2"]\n'
    )
    monkeypatch.setattr(staleness, "PROTOCOLS", file)
    staleness.protocols.cache_clear()
    measuring_code.write("timer", "dense", "liger")
    measuring_code.add_same_code({"a.b": ("2", "3"), "c.d": ("3", "4"), "e.f": ("3", "4")})
    found, today = staleness.protocols(), measuring_code.hashes()
    assert found["protocol"]["timer"] == {"number": 3, "code": today["timer"]}
    assert found["adapters"] == {"liger": measuring_code.adapters()["liger"]}
    assert found["protocol"]["dense"] == {"number": 1, "code": today["dense"]}
    assert found["same_code"] == {"a.b": ["1", "2", "3"], "c.d": ["3", "4"], "e.f": ["3", "4"]}
    assert file.read_text().startswith("# Head\n")
    monkeypatch.undo()
    staleness.protocols.cache_clear()


def test_the_committed_records_know_their_code():
    known = registered.all_studies()
    for path in sorted(records.MEASUREMENTS.glob("*/*.json")):
        about = json.loads(path.read_text())
        of_others = "ropelab" not in path.with_suffix(".csv").read_text()
        assert path.stat().st_size < 10_000, path
        if path.stem in known and not known[path.stem].timed:
            assert about["protocol"] == about["kernels"] == {} and staleness.stale(about) == (), path
            assert "median_us" not in path.with_suffix(".csv").read_text().partition("\n")[0], path
            continue
        assert about["protocol"], path
        said = known[path.stem].kernels_unknown if path.stem in known else ""
        converted = about["utc"] < "2026-11-28" and "kernels_unknown" in about
        assert about["kernels"] or said or converted or of_others, path


def test_an_added_peer_marks_no_record(monkeypatch):
    before = {path: staleness.stale(about) for path, about in COMMITTED.items()}
    peer = next(entry for entry in fetch_peers.read_list() if isinstance(entry, fetch_peers.Package))
    entries = [*fetch_peers.read_list(), replace(peer, name="another", version="1.0")]
    monkeypatch.setattr(fetch_peers, "read_list", lambda file=None: entries)
    assert before == {path: staleness.stale(about) for path, about in COMMITTED.items()}
    added = "bench.peer_table", "ENTRIES = (\n", 'ENTRIES = (\n    Entry("another", "x.bind", "", 1, "o"),\n'
    assert measuring_code.hashes(measuring(added)) == measuring_code.hashes()


@pytest.mark.parametrize(
    "edit",
    [
        ("conformance.laws.algebra", "def ", "def added():\n    return 1\n\n\ndef "),
        ("study.plots.marks", "def ", "def added():\n    return 1\n\n\ndef "),
        ("bench.peer_table", '"quack, in place"', '"quack, on the spot"'),
        ("bench.dense", '    """', '    """Other words. '),
        ("bench.timing", '    """', '    """Other words. '),
        ("bench.timing", "import", "# A comment.\nimport"),
    ],
    ids=["a law", "a plot", "a label", "a docstring", "a docstring of the timer", "a comment"],
)
def test_an_edit_of_what_does_not_measure_changes_no_hash(edit):
    assert measuring_code.hashes(measuring(edit)) == measuring_code.hashes()


@pytest.mark.parametrize(
    "edit, marked",
    [
        (("bench.timing", "def cache_bytes(", "def cache_bytes(more=0, "), {"timer"}),
        (("bench.peers.liger", "to_bhsd(k, fmt)", "to_bhsd(k.clone(), fmt)"), {"liger"}),
        (("bench.peers.formulas", "turns = torch.complex(", "turns = torch.polar("), {"formulas"}),
        (("bench.dense", "def dense(", "def dense(more=0, "), {"dense"}),
        (
            ("bench.varlen_models", "def _rotate_token(", "def _rotate_token(more, "),
            {"packed", "te_kernels", "te_layer"},
        ),
        (
            ("bench.cache_operations", "class NormAndCache(", "class NormAndCache(object, "),
            {"host_functions", "one_pass_cells", "one_pass_tiles", "paged_cache", "row_scales"},
        ),
    ],
    ids=[
        "the timer",
        "how a peer is called",
        "a formula of our own",
        "a study",
        "a kernel that several time",
        "an operation that several time",
    ],
)
def test_an_edit_of_what_measures_changes_the_hash_of_those_that_reach_it(edit, marked):
    read = measuring(edit)
    before = measuring_code.hashes() | measuring_code.adapters()
    after = measuring_code.hashes(read) | measuring_code.adapters(read)
    assert {name for name in before if before[name] != after[name]} == marked


@pytest.mark.parametrize(
    "edit, name",
    [
        (("rotate_triton", "def _rotate_kernel(", "# A comment.\ndef _rotate_kernel("), None),
        (("stages_triton", '"""The product of the matrix', '"""Other words: the product of the matrix'), None),
        (("qk_norm_triton", "def _qk_norm_rope_kernel(", "def _qk_norm_rope_kernel(more, "), NORM),
        (("stages_triton", "def turn(", "def turn(more, "), "stages_triton.turn"),
        (("angles_torch", "COSINE = ", "COSINE = 1 + "), "angles_torch.COSINE"),
    ],
    ids=["a comment", "a docstring", "a kernel", "a function that kernels call", "a constant"],
)
def test_an_edit_of_a_kernel_marks_the_records_that_launched_it(edit, name):
    read, launched = kernels(edit), 0
    for path, about in COMMITTED.items():
        old = reached.changed(about["kernels"], {})
        assert {*reached.changed(about["kernels"], {}, read)} - {*old} == {name} & about["kernels"].keys() - {*old}, (
            path
        )
        launched += name in about["kernels"]
    assert bool(launched) == bool(name)


def test_a_table_that_is_no_times_is_recorded_by_its_test_and_names_no_code(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "MEASUREMENTS", tmp_path)
    monkeypatch.setattr(records, "_gpu", lambda: {"name": "a GPU"})
    made = pd.DataFrame({"contender": ["ropelab", "ropelab"], "error": [0.0, 0.5]})
    monkeypatch.setitem(
        test_tables.TABLES, "made", Study(lambda *, smoke: made[: 1 if smoke else 2], 1, timed=False, rows=2)
    )
    for recording in (False, True):
        test_tables.test_the_table_is_made("made", SimpleNamespace(getoption=lambda name, value=recording: value))
        assert bool(records.gpus(tmp_path)) is recording
    found = records.load("made", tmp_path)
    assert found.frame.equals(made) and found.provenance["kernels"] == found.provenance["protocol"] == {}
    assert found.stale == () and not found.provenance["parameters"]["smoke"]
    monkeypatch.setitem(test_tables.TABLES, "made", Study(lambda *, smoke: made[:1], 1, timed=False, rows=2))
    with pytest.raises(AssertionError):
        test_tables.test_the_table_is_made("made", SimpleNamespace(getoption=lambda name: True))


@pytest.mark.process
def test_the_kernels_of_other_processes_are_noted():
    with reached.noted() as found:
        assert [job.name for job, _ in side_by_side([Job("one", reached.note, ([ROTATE],))], 2**40)] == ["one"]
    assert found == {ROTATE}


@pytest.mark.gpu
def test_the_kernels_of_a_process_are_noted():
    program = (
        "import torch; from ropelab.bench import reached\n"
        "from ropelab import apply_rope, rotary_table\n"
        "q = torch.randn(1, 64, 4, 64, device='cuda'); cos, sin = rotary_table(64, 64, base=1e4, device='cuda')\n"
        "with reached.noted() as kernels: apply_rope(q, q, cos=cos, sin=sin)\n"
        "print(sorted(kernels))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"['{ROTATE}']"
