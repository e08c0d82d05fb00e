"""The study of servers: engines take turns, each part of a model is recorded, kernels are counted by their order."""

import sys
from dataclasses import replace

import pytest

from ropelab.bench import records, server_logits, servers
from ropelab.bench.server_engine import EXACT, FUSED, OURS, STOCK
from ropelab.bench.studies import STUDIES
from ropelab.bench.unavailable import Unavailable
from ropelab.study.engine.results import growing, run
from tests.study.sentences import states

STUB = """
import json, sys
spec, broken = json.loads(sys.argv[1]), sys.argv[2:]
layers, ours = spec["config"]["num_hidden_layers"], spec["engine"] == "ropelab"
print(json.dumps({"error": "no memory"} if spec["engine"] in broken else {"vllm": "0"}), flush=True)
parts = [["_paged_cache_kernel", 2.0]] if ours else [["rotate", 1.5], ["reshape_and_cache_flash", 2.5]]
for line in sys.stdin:
    command = json.loads(line)
    what = command.pop("do")
    if what == "kernels":
        layer = [["nvjet", 9.0], *parts, ["kernel_unified_attention", 5.0]]
        answer = [["embed", 1.0], *(layer * layers), ["_gumbel_sample_kernel", 3.0]] * command["new"]
    elif what == "tokens":
        answer = [[[3, 2.0, 1.0], [4 + (ours and i == 5), 2.0, 2.0 - 2**-7]] for i in range(command["count"])]
    elif what == "memory":
        answer = {"allocated": 7, "peak": 8, "reserved": 9}
    else:
        answer = {"call": 100.0, "step": 9.0 if ours else 10.0}
    print(json.dumps(answer), flush=True)
"""


@pytest.fixture
def stub(monkeypatch):
    """Engines that answer as vLLM's would; the names in the list do not start."""
    broken: list[str] = []
    popen = servers.Engine.__init__

    def started(self, command, log):
        popen(self, [sys.executable, "-c", STUB, command[-1], *broken], log)

    monkeypatch.setattr(servers.Engine, "__init__", started)
    monkeypatch.setattr(servers.importlib.util, "find_spec", lambda name: name)
    repeats = dict.fromkeys(servers.STEPS, 4) | {"decode 16": 8}
    monkeypatch.setattr(servers, "TINY", replace(servers.TINY, repeats=repeats))
    return broken


def test_the_table_grows_by_the_parts_of_a_model(stub):
    tables = list(servers.servers(smoke=True))
    assert [len(table) for table in tables] == sorted(len(table) for table in tables) and len(tables) == 5
    table = tables[-1]
    assert table.status.eq("ok").all() and table.attrs["gpu_bytes"] == 27
    values = table[table.quantity != "time"].set_index(["quantity", "step", "engine"]).value
    assert values["launches", "decode 16", STOCK] == 2 and values["launches", "prefill 8192", OURS] == 1
    assert values["launch time", "decode 16", STOCK] == 4 and values["launch time", "decode 16", OURS] == 2
    assert values["all kernels", "decode 16", OURS] == 1 + 2 * 16 + 3  # two layers, and what is outside of them
    times = table[table.quantity == "time"].groupby(["step", "engine"]).repeat.apply(list)
    assert times["decode 1", OURS] == [0, 1, 2, 3] and times["decode 16", STOCK] == list(range(8))
    assert servers.ratio(table, "tiny Qwen3", "decode 16", STOCK) == pytest.approx((10 / 9,) * 3)


def test_tokens_that_differ_are_counted_with_their_distance(stub):
    table = list(servers.servers(smoke=True))[-1]
    table = table[table.quantity.isin(["equal prompts", "gap"])].set_index(["quantity", "engine"]).value
    assert table["equal prompts", FUSED] == 32 and table["equal prompts", OURS] == 31
    assert table["gap", OURS] == 0.5  # bf16 has 8 digits: at 2 the unit is 2^-6


def test_an_engine_that_does_not_start_leaves_a_row_and_the_others(stub):
    stub.append(FUSED)
    table = list(servers.servers(smoke=True))[-1]
    wrong = table[table.status != "ok"]
    assert wrong[["engine", "quantity"]].to_numpy().tolist() == [[FUSED, "start"]]
    assert wrong.status.item() == "failed: RuntimeError: no memory"
    assert set(table[table.quantity == "time"].engine) == {STOCK, OURS}


def test_a_run_that_is_cut_leaves_a_record(stub, tmp_path):
    outcomes = growing(lambda: servers.servers(smoke=True))
    for _ in range(3):
        outcome = next(outcomes)
    outcomes.close()
    assert not outcome.whole
    record = records.write("servers", outcome.found, tmp_path, parameters={"smoke": True})
    assert set(records.load("servers", tmp_path, gpu=record.provenance["gpu"]["name"]).frame.quantity) >= {"launches"}
    assert run(lambda: servers.servers(smoke=True)).whole


def test_without_vllm_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(servers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match="vllm is not installed"):
        next(servers.servers())
    assert run(lambda: STUDIES["servers"](smoke=True)).reason == "vllm is not installed"


def test_errors_of_logits_decide_which_tokens_may_differ():
    exact = [{"5": 3.0, "7": 2.0, "8": 1.0}, {"5": 2.25, "7": 2.0}, {"5": 2.0, "7": 2.25}]
    stock = [{"5": 3.0, "7": 2.25}, {"5": 2.25, "7": 2.0, "9": 0.0}, {"5": 2.25, "7": 2.0}]
    ours = [{"7": 3.125, "5": 3.0}, {"5": 2.0, "7": 2.25}, {"5": 2.0, "7": 2.0625, "2": 1.0}]
    theirs, mine = server_logits.rows({STOCK: stock, EXACT: exact, OURS: ours})
    assert theirs["largest_error"] == 0.25 and theirs["other_tokens"] == 0 and theirs["places"] == 3
    assert mine["largest_error"] == 1.125 and mine["other_tokens"] == 3 and mine["largest_gap"] == 1
    assert mine["within_bound"] == 3 and mine["engine"] == OURS
    ours[0] = {"8": 3.25, "5": 3.0}  # another token, and no logit of it in float32 is as large
    exact[0] = {"5": 3.0, "7": 2.0}
    assert server_logits.rows({STOCK: stock, EXACT: exact, OURS: ours})[1]["within_bound"] == 2


# ------------------------------------------------------------------------------------------------- the guide's tables

PAGE = (records.ROOT / "docs/serve.md").read_text()
TIMES = {
    "decode 1": "per output token, batch 1", "decode 16": "per output token, batch 16",
    "decode 64": "per output token, batch 64", "prefill 8192": "prefill of 8,192 tokens",
}  # fmt: skip


@pytest.fixture(scope="module")
def measured():
    return records.load("servers", gpu="nvidia-h100-80gb-hbm3").frame


def test_every_row_of_the_record_is_right(measured):
    assert measured.status.eq("ok").all()


@pytest.mark.parametrize("step", TIMES)
def test_the_guides_times_are_those_of_the_record(measured, step):
    times = measured.query("model == 'Qwen3 4B' and step == @step and quantity == 'time'")
    medians = times.groupby("engine").value.median()
    shown = [f"{us / 1000:.1f} ms" if us > 1e5 else f"{us:,.0f} us" for us in medians[[STOCK, FUSED, OURS]]]
    for engine in (STOCK, FUSED):
        shown.append("{:.3f} [{:.3f}, {:.3f}]".format(*servers.ratio(measured, "Qwen3 4B", step, engine)))
    assert f"| {' | '.join([TIMES[step], *shown, str(times.repeat.nunique())])} |\n" in PAGE


def test_readmes_gain_is_that_of_the_record(measured):
    gains = [100 * (servers.ratio(measured, "Qwen3 4B", step, STOCK)[0] - 1) for step in servers.DECODE]
    assert f"{min(gains):.1f} to {max(gains):.1f}%" in " ".join((records.ROOT / "README.md").read_text().split())


def test_the_guides_kernels_are_those_of_the_record(measured):
    for (model, step), rows in measured[measured.quantity == "launches"].groupby(["model", "step"]):
        times = measured.query("model == @model and step == @step and quantity == 'launch time'")
        count, us = (each.set_index("engine").value for each in (rows, times))
        cells = [f"{count[e]:.0f}: {us[e]:.1f} us" if e in count else "" for e in (STOCK, FUSED, OURS)]
        assert f"| {' | '.join([model, step.split()[0], *cells])} |\n".replace("  ", " ") in PAGE
        assert count[OURS] == 1 and rows[rows.engine == OURS].kernels.item() == "_paged_cache_kernel"
    for _, rows in measured[measured.quantity.isin(["allocated", "peak"])].groupby(["model", "quantity"]):
        assert rows.value.nunique() == 1


def test_the_guides_shares_are_those_of_the_record(measured):
    rows = measured[(measured.model == "Qwen3 4B") & (measured.quantity != "time")]
    value = rows.set_index(["engine", "step", "quantity"]).value
    layer, step = (value[STOCK, "decode 16", each] for each in ("launch time", "all kernels"))
    said = [f"{layer:.2f} us", f"{step:,.0f} us", f"{100 * (step / (step - 36 * layer) - 1):.1f}%"]
    said += [f"{100 * (servers.ratio(measured, 'Qwen3 4B', 'decode 16', STOCK)[0] - 1):.1f}%"]
    layer, step = (value[OURS, "prefill 8192", each] for each in ("launch time", "all kernels"))
    said += [f"{layer:.1f} us", f"{100 * 36 * layer / step:.1f}%"]
    assert not [each for each in said if each not in PAGE]


def test_the_guides_tokens_are_those_of_the_record(measured):
    for model, rows in measured[measured.quantity == "equal prompts"].groupby("model"):
        equal = rows.set_index("engine").value
        gap = measured.query("model == @model and quantity == 'gap'").set_index("engine").value
        cells = [
            "" if e not in equal else f"{equal[e]:.0f}" + (f", gap {gap[e]:.0f}" if e in gap else "")
            for e in (FUSED, OURS)
        ]
        assert f"| {' | '.join([model, *cells])} |\n".replace("  ", " ") in PAGE
    gap = measured[measured.quantity == "gap"].set_index(["model", "engine"]).value
    equal = measured[measured.quantity == "equal prompts"].set_index(["model", "engine"]).value
    for model in measured[measured.engine == FUSED].model.unique():
        assert equal[model, FUSED] < 32 and gap[model, FUSED] >= gap[model, OURS]


def test_the_guides_prefills_are_those_of_the_record(measured):
    hosts = []
    for model in measured.model.unique():
        about = measured.query("model == @model and step == 'prefill 8192'")
        times = about[about.quantity == "time"]
        if times.repeat.nunique() != servers.FEW_LAYERS["prefill 8192"]:
            continue
        kernels = about[about.quantity == "all kernels"].set_index("engine").value / 1000
        ms = times.groupby("engine").value.median() / 1000
        cells = [f"{ms[e]:.1f} ms" for e in (STOCK, OURS)]
        cells.append("{:.3f} [{:.3f}, {:.3f}]".format(*servers.ratio(measured, model, "prefill 8192", STOCK)))
        cells += [f"{kernels[e]:.1f} ms" for e in (STOCK, OURS)] if len(kernels) else ["not profiled"] * 2
        assert f"| {' | '.join([model, *cells])} |\n" in PAGE
        if len(kernels):
            assert kernels[OURS] < kernels[STOCK]
            hosts.append([ms[e] - kernels[e] for e in (STOCK, OURS)])
    everything = [each for pair in hosts for each in pair]
    assert len(hosts) == 5 and f"{min(everything):.0f} to {max(everything):.0f} ms" in " ".join(PAGE.split())
    every = [servers.ratio(measured, model, "prefill 8192", STOCK)[0] for model in measured.model.unique()]
    assert f"{min(every):.3f} to {max(every):.3f} of stock's speed" in " ".join(PAGE.split()) and len(every) == 7
    apart = [ours - stock for stock, ours in hosts]
    assert min(apart) < 0 < max(apart) and f"{max(map(abs, apart)):.1f} ms" in PAGE


def test_the_guide_says_what_the_record_of_logits_says():
    stock, ours = (row for _, row in records.load("server_logits", gpu="nvidia-h100-80gb-hbm3").frame.iterrows())
    assert (stock.engine, ours.engine, ours.places) == (STOCK, OURS, 8192)
    errors = [f"{x.largest_error:.3f}" for x in (ours, stock)] + [f"{x.rms_error:.4f}" for x in (ours, stock)]
    assert states(PAGE, *map(float, errors), ours.other_tokens, ours.within_bound)
    assert ours.other_tokens == ours.within_bound
