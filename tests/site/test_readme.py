"""README.md and the guide say what the records say, and what is derived; their code runs."""

import math
import re
import shlex
import sys
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pandas as pd
import pytest
import torch
import typer

import ropelab
from ropelab.angles.frequencies import inverse_frequencies
from ropelab.bench import records, rows
from ropelab.conformance import CACHE_CONVENTIONS, CACHE_LAWS
from ropelab.conformance.laws import LAWS
from ropelab.study.__main__ import app as study
from ropelab.study.engine.claims import load_claims
from ropelab.study.faults import FAULTS
from ropelab.study.site import summary
from ropelab.study.topics.performance import shortfalls, speed_figure
from ropelab.study.topics.precision import errors as precision_errors
from ropelab.study.topics.precision.methods import BF16, METHODS
from tests.environments import ROOT, run
from tests.laws.cache_faults import CACHE_FAULTS
from tests.study.sentences import states
from tests.support import replaced_since_the_commit

TEXT = "\n".join(file.read_text() for file in summary.texts())


def blocks(text: str) -> dict[str, str]:
    """Name -> what stands between ``<!-- name -->`` and ``<!-- end -->``."""
    return dict(re.findall(r"<!-- (\w+) -->\n(.*?)<!-- end -->", text, re.DOTALL))


def stamps(block: str) -> list[str]:
    """When the records behind a table were measured."""
    return re.findall(r"records? of ([^)]+)\)", block)


def outdated(written: dict[str, str], computed: dict[str, str], *, replaced: bool) -> list[str]:
    """The names of the tables that differ from the records.

    Args:
        written, computed: name -> table, of the texts and from the records.
        replaced: whether records were measured anew since the last commit. A table of other records may then stay
            behind, and the time of its records says that it is of other records.
    """
    found = []
    for name, block in written.items():
        # The claims rest on several records and name none, and the figure rests on the record of the table of speeds:
        # they stay behind where that table does.
        dated = "speed" if name in ("claims", "documents", "unclaimed", "figure") else name
        behind = replaced and stamps(written[dated]) != stamps(computed[dated])
        if block != computed[name] and not behind:
            found.append(name)
    return found


def test_tables_are_those_of_the_records():
    computed = summary.tables()
    tables = [(file, name, table) for file in summary.texts() for name, table in blocks(file.read_text()).items()]
    assert {"speed", "claims", "documents"} <= {name for _, name, _ in tables} <= computed.keys()
    assert all(table for _, _, table in tables)
    replaced = replaced_since_the_commit()
    speed = blocks((summary.GUIDE / "5_speed.md").read_text())["speed"]
    different = [
        f"{name} of {file.name}"
        for file, name, table in tables if name in outdated({"speed": speed, name: table}, computed, replaced=replaced)
    ]  # fmt: skip
    assert not different, f"{', '.join(different)} differ: run python -m ropelab.study.site.summary"


def test_the_version_and_the_clone_are_those_that_the_package_declares():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pythons = [name.rpartition(" ")[2] for name in project["classifiers"] if ":: 3." in name]
    (cloned,) = re.findall(r"^git clone (\S+)", summary.README.read_text(), re.MULTILINE)
    assert cloned == project["urls"]["Repository"]
    (torch_from,) = re.findall(r"torch>=([\d.]+)", " ".join(project["dependencies"]))
    facts = (f"Version {ropelab.__version__}", f"Python {pythons[0]} to {pythons[-1]}", f"torch {torch_from} or newer")
    assert " · ".join((*facts, project["license"])) in summary.README.read_text().splitlines()


def test_a_table_has_the_times_of_the_records():
    frames = {study: summary.record(study).frame for study in ("paged_cache", "projection")}
    cells = [line.split("|")[1:-1] for line in TEXT.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line] for line in cells]

    def expected(study: str, spec: str, column: str, **where) -> str:
        frame = frames[study]
        for name, value in where.items():
            frame = frame[frame[name] == value]
        return format(frame[column].item(), spec)

    (row,) = (line for line in cells if line[:4] == ["rotation, cache", "4,096", "32 + 16 x 128", "float8_e4m3fn"])
    assert row[5] == "" and row[6] == expected(
        "paged_cache", ".1f", "median_us", operation="rotation, cache", cache="float8_e4m3fn", contender="FlashInfer"
    )
    (row,) = (line for line in cells if line[0] == "8,192")
    assert row[3] == expected(
        "projection", ".2f", "over_product", tokens=8192, inputs=4096, q_heads=32, contender="quack with the rotation"
    )


def test_the_gains_of_whole_models_are_those_of_the_record():
    frame = records.load("whole_models", gpu=summary.GPU).frame
    times = frame[frame.quantity == "time"].groupby(["model", "mode", "step", "way"]).value.median().unstack()
    gains = 100 * (1 - times.div(times["Transformers"], axis=0))
    (qwen,) = (name for name in times.index.unique("model") if name.startswith("Qwen3"))
    eager = gains.loc[(qwen, "eager", "training step")]
    compiled = gains.xs("compiled", level="mode")[["ropelab", "ropelab with norms"]].max(axis=None)
    said, gained = (summary.GUIDE / "3_drop_ins.md").read_text(), (*eager[["ropelab with norms", "ropelab"]], compiled)
    assert not [f"{gain:.1f}%" for gain in gained if f"{gain:.1f}%" not in said]


def test_the_figure_is_that_of_the_record():
    computed = {path.name: svg for path, svg in summary.figures().items()}
    written = {path.name: path.read_text() for path in summary.FIGURES.glob("*")}
    assert written.keys() == computed.keys() == {"speed-light.svg", "speed-dark.svg"}
    different = outdated(written, computed, replaced=replaced_since_the_commit())
    assert not different, f"{', '.join(different)} differ: run python -m ropelab.study.site.summary"


def test_the_figure_shows_every_contender_at_its_fraction():
    for path, svg in summary.figures().items():
        figure = ElementTree.fromstring(svg)
        texts = [text.text for text in figure.findall("{*}text")]
        frame = rows.timed(summary.record().frame)
        for label, contender in summary.COLUMNS.items():
            values = frame[frame.contender == contender].fraction_of_copy
            assert texts[texts.index(label) + 1] == f"{values.median():.2f}", (path.name, label)
        paths = [path.get("d") for path in figure.findall("{*}path") if path.get("stroke-linecap")]
        drawn = [int(x) for x in re.findall(r"M(\d+)", paths[0])]
        ours = frame[frame.contender == "ropelab"].fraction_of_copy
        ends = [speed_figure.LEFT + f * (speed_figure.RIGHT - speed_figure.LEFT) for f in (ours.min(), ours.max())]
        assert [min(drawn), max(drawn)] == pytest.approx(ends, abs=0.5)
        assert path.name in summary.README.read_text()


@pytest.mark.parametrize(
    "pattern, counted",
    [
        (r"against (\d+) laws", lambda: [sum(law.by_default for law in laws.values()) for laws in (LAWS, CACHE_LAWS)]),
        (r"has (\d+) faults", lambda: [len(FAULTS)]),
        (r"catalogue of (\d+) more", lambda: [len(CACHE_FAULTS)]),
        (r"make (\d+) claims", lambda: [len(load_claims())]),
    ],
    ids=["laws", "faults", "faults of caches", "claims"],
)
def test_counts_in_sentences_are_those_of_the_code(pattern, counted):
    assert re.findall(pattern, TEXT) == [str(number) for number in counted()]


@pytest.mark.parametrize(
    "pattern, counted",
    [
        (r"candidate tiles in (\w+) calls", lambda table: table("tile_times").number.nunique()),
        (r"in (\w+) cells, and two ratios", lambda table: len(table("documents/fairseq2_1213_log"))),
    ],
    ids=["tile_times", "the log"],
)
def test_counts_in_the_readme_of_the_data_are_those_of_the_tables(pattern, counted):
    text = " ".join((ROOT / "data" / "README.md").read_text().split())
    assert re.findall(pattern, text) == [str(counted(lambda name: pd.read_csv(ROOT / "data" / f"{name}.csv")))]


def test_the_head_sizes_that_flashinfer_gets_wrong_are_those_of_the_record():
    frame = summary.record("sglang_head_sizes").frame
    rows = (
        frame[(frame.contender == "FlashInfer, newest") & (frame.layout == "split_half")].set_index("head_dim").status
    )
    sentence = re.search(
        r"FlashInfer [\w.]+ has a second kernel for heads of other sizes than (.*?)\. .* heads of (.*?) features come "
        r"out wrong, +and heads of (.*?) features are read past the end of q", TEXT.replace("\n", " "),
    )  # fmt: skip
    right, wrong, past = ([int(size) for size in re.findall(r"\d+", group)] for group in sentence.groups())
    assert set(rows.index[rows == "ok"]) <= set(right)
    assert list(rows.index[rows.str.startswith("wrong")]) == wrong
    assert list(rows.index[rows.str.startswith("failed")]) == past


def test_shortfalls_follow_the_records():
    frames = {study: summary.record(study).frame for study in shortfalls.STUDIES}
    now = shortfalls.sentences(frames)
    slow = frames["deepspeed_table"].copy()
    slow.loc[slow.contender == "compile", "median_us"] *= 3
    slow.loc[slow.contender == "compile", "fraction_of_copy"] /= 3
    then = shortfalls.sentences(frames | {"deepspeed_table": slow})
    assert then[:-1] == now[:-1] and then[-1] != now[-1] and states(then[-1], 12)

    fast = frames["sglang_protocols"].copy()
    fast.loc[fast.contender == "ropelab, positions", "median_us"] /= 2
    then = shortfalls.sentences(frames | {"sglang_protocols": fast})
    changed = [sentence for sentence, before in zip(then, now, strict=True) if sentence != before]
    assert len(changed) == 1 and "FlashInfer" in changed[0]


def test_the_table_of_precision_is_derived():
    names = {
        "positions in bf16": "bf16 positions", "frequencies in bf16": "bf16 frequencies",
        "TF32 product": "TF32, emulated", "fp32 angles, the common way": "fp32 angles", "bf16 tables": "bf16 tables",
        "tables built in float64": precision_errors.OURS,
    }  # fmt: skip
    frequencies = inverse_frequencies(128, 5e5)  # Llama 3's
    errors = precision_errors.errors(frequencies, (131_072,), precision_errors.SAMPLES).set_index("method")
    in_bytes = {"bf16 tables": 2, precision_errors.OURS: 4}  # of a cosine or sine

    def lost_at(method, radians):
        position = precision_errors.first_loss(METHODS[method], frequencies, radians)
        safe = precision_errors.safe_up_to(METHODS[method], frequencies, radians)
        return f"{position:,}" if position else "–" if safe >= 2**31 - 1 else f"beyond {safe / 1e6:.0f} million"

    derived = {}
    for name, method in names.items():
        error, size = errors.output_error[method], 4_194_304 * 2 * 64 * in_bytes.get(method, 0)
        derived[name] = [
            lost_at(method, 1.0), lost_at(method, 2 * math.pi), "none" if error >= 1 else f"{-math.log2(error):.1f}",
            f"{size / 2**30:g} GiB" if size >= 2**30 else "",
        ]  # fmt: skip
    lines = TEXT.partition("| cos and sin of |")[2].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert {name: cells for name, *cells in rows} == derived
    bits = precision_errors.models().query("method == 'fp32 angles'").bits
    (written,) = re.findall(r"At their longest context (\d+ of \d+)", TEXT)
    found = f"{(bits < BF16).sum()} of {len(bits)}"
    assert written == found


# A name that no block before makes -> the code that a block with this name takes for granted.
GIVEN = {
    "model": """
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(
    hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, vocab_size=32,
))
""",
    "my_rope": "from ropelab.study.faults.correct import flash_attn as my_rope",
    "mesh": """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from ropelab import rotary_table
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh, rank = init_device_mesh("cpu", (1,)), 0
q, k = (distribute_tensor(torch.randn(1, 1024, heads, 128), mesh, [Shard(1)]) for heads in (8, 2))
cos, sin = rotary_table(4096, 128)
""",
}


def code_blocks(language: str) -> list[tuple[Path, int, str]]:
    """(file, first line, code) of every block of the language.

    A block of "py" needs a package: test_coming_from and test_hub run these.
    """
    found = []
    for file in summary.texts():
        if file.stem == "verify":  # test_verify_formats runs its code
            continue
        text = file.read_text()
        for block in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            found.append((file, text[: block.start(1)].count("\n"), block.group(1)))
    return found


@pytest.mark.process
def test_python_runs_from_top_to_bottom(tmp_path):
    """In one process, as somebody who types the blocks in; without a GPU on the CPU."""
    pytest.importorskip("transformers")
    blocks, given = code_blocks("python"), dict(GIVEN)
    assert len(blocks) >= 8
    script = ["here = {}"]
    for file, line, code in blocks:
        if not torch.cuda.is_available():
            code = code.replace('device="cuda"', 'device="cpu"')
        for name in [name for name in given if re.search(rf"\b{name}\b", code)]:
            script.append(f"exec({given.pop(name)!r}, here)")
        # A traceback names the file and its line.
        script.append(f"exec(compile({chr(10) * line + code!r}, {str(file)!r}, 'exec'), here)")
    assert not given, f"{list(given)}: expected in a block, found in none"
    script.append("assert here['report'].passed, here['report'].failed")
    (tmp_path / "readme.py").write_text("\n".join(script))
    run(sys.executable, tmp_path / "readme.py", cwd=tmp_path, PYTHONPATH=str(ROOT))


def test_commands_exist():
    makefile = (ROOT / "Makefile").read_text()
    named = {line.split("`")[1].split()[1] for line in TEXT.splitlines() if line.startswith("| `make")}
    commands = [shlex.split(line, comments=True) for _, _, block in code_blocks("sh") for line in block.splitlines()]
    named |= {command[1] for command in commands if command[0] == "make"}
    assert {"reproduce", "test", "check"} <= named
    assert not [name for name in named if f"\n{name}: " not in makefile]
    programs = {"git", "make", "pip", "ropelab", "papermill", "python3", ".venv/bin/python"}
    others = [command for command in commands if command[0] not in programs]
    assert all(re.fullmatch(r"(VLLM|SGLANG)_PLUGINS=ropelab", command[0]) for command in others)  # servers
    of_the_study = set(re.findall(r"[` ]ropelab\.study ([a-z]+)", TEXT))
    assert {"peers", "hub"} <= of_the_study <= typer.main.get_command(study).commands.keys()
    assert all((ROOT / command[1]).is_file() for command in commands if command[0] == "papermill")
    gates = (ROOT / ".ci" / "run").read_text()
    assert all(re.search(rf"\bmake {name}\b", gates) for name in ("test", "check", "smoke"))


def test_the_command_line_has_what_is_named():
    from ropelab.command.cli import app
    from ropelab.conformance.conventions import CONVENTIONS

    section = (summary.GUIDE / "4_verify.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == {*CONVENTIONS, *CACHE_CONVENTIONS}
    commands = typer.main.get_command(app).commands
    options = {name for command in commands.values() for option in command.params for name in option.opts}
    named = set(re.findall(r"--[a-z][a-z-]*", section))
    assert "--convention" in named and named <= options, named - options
