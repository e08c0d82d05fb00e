"""The elements compute what the library computes: their JavaScript runs here in an embedded engine."""

import itertools
import json
import math
import re
import shutil
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from bs4 import BeautifulSoup

from ropelab.angles.frequencies import inverse_frequencies
from ropelab.bench.exact_waves import exact_waves
from ropelab.bench.model_shapes import MODELS
from ropelab.bench.records import load
from ropelab.bench.rows import are_copies, timed
from ropelab.bench.workloads import Workload
from ropelab.layout.pairing import LAYOUTS, pairs, permutation
from ropelab.reference import rotate
from ropelab.study.documents import transformer_engine
from ropelab.study.knobs import data, modules, notebook
from ropelab.study.knobs.page import html
from ropelab.study.plots.looks import CONTENDERS
from ropelab.study.topics.one_pass.traffic import LAUNCHES
from ropelab.study.topics.precision import methods
from ropelab.study.topics.precision.methods import METHODS
from tests.site.cells import run

quickjs = pytest.importorskip("quickjs")

CLOSE = {"rel": 1e-13, "abs": 1e-15}
"""The cosines and powers of two libraries differ in the last digits of float64."""


class Element:
    """The exported functions of an element: arguments and results are plain Python values."""

    def __init__(self, name, data=None):
        self.context = quickjs.Context()
        text = modules.module(name)
        exported = re.findall(r"^export (?:const|function) (\w+)", text, re.MULTILINE)
        self.context.module(f"{text}\nObject.assign(globalThis, {{ {', '.join(exported)} }});")
        self.data = data or {}

    def evaluate(self, source, *arguments):
        passed = ", ".join(json.dumps(argument, allow_nan=False) for argument in arguments)
        return json.loads(self.context.eval(f"JSON.stringify(({source})({passed}))"))

    def compute(self, **state):
        """The numbers, and the sentence about them, for knobs that stand at ``state`` or at their own values."""
        return self.evaluate(
            """(state, data) => {
              const all = checked(knobs(data), state), found = compute(all, data);
              return { ...found, says: say(found, all, data) };
            }""",
            state,
            self.data,
        )


# ----------------------------------------------------------------------------------------------------- turn the pairs


@pytest.fixture(scope="module")
def turn():
    return Element("turn")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dim, base, position, pair", [(16, 10000, 3, 1), (128, 500000, 512, 63), (4, 100, 0, 63)])
def test_a_pair_turns_as_the_definition_says(turn, layout, dim, base, position, pair):
    found = turn.compute(layout=layout, dim=dim, base=base, position=position, pair=pair)
    inverse, pair = inverse_frequencies(dim, base), min(pair, dim // 2 - 1)
    first, second = (int(x[pair]) for x in pairs(torch.arange(dim), layout))
    assert found["features"] == [first, second]
    assert found["frequency"] == pytest.approx(float(inverse[pair]), **CLOSE)
    assert found["angle"] == pytest.approx(position * float(inverse[pair]), **CLOSE)
    x = torch.zeros(1, 1, 1, dim, dtype=torch.float64)
    pairs(x, layout)[0][:] = 1
    angles = position * inverse[None]
    turned = rotate(x, angles.cos(), angles.sin(), layout=layout)[0, 0, 0]
    assert found["turned"] == pytest.approx([float(turned[first]), float(turned[second])], rel=1e-12, abs=1e-12)


def test_scores_are_those_of_rotated_queries_and_keys(turn):
    dim, position, distance = 64, 300, 17
    found = turn.compute(dim=dim, position=position, distance=distance, base=10000)
    inverse = inverse_frequencies(dim, 10000)
    expected = torch.cos(torch.arange(257)[:, None] * inverse).mean(dim=1).tolist()
    assert found["scores"] == pytest.approx(expected, rel=1e-12, abs=1e-13)
    x = torch.zeros(1, 2, 1, dim, dtype=torch.float64)
    x[..., : dim // 2] = 1
    angles = torch.tensor([position, position - distance])[:, None] * inverse
    q, k = rotate(x, angles.cos(), angles.sin(), layout="split_half")[0, :, 0]
    assert found["rotated"] == pytest.approx(float(q @ k) / (dim // 2), rel=1e-12)
    assert found["score"] == found["scores"][distance] and f"{found['score']:.4f}" in found["says"]


@pytest.mark.parametrize("layout, other", [LAYOUTS, LAYOUTS[::-1]])
def test_the_two_layouts_are_one_permutation(turn, layout, other):
    for dim in (4, 16, 128):
        found = turn.compute(layout=layout, dim=dim)["permutation"]
        assert found == permutation(dim, layout, other).tolist()


# ---------------------------------------------------------------------------------------------------------- precision

WAYS = {
    "bf16 positions": {"positions": "bf16", "frequencies": "float32", "angles": "float32", "tables": "float32"},
    "bf16 frequencies": {"positions": "exact", "frequencies": "bf16", "angles": "float32", "tables": "float32"},
    "TF32, emulated": {"positions": "tf32", "frequencies": "tf32", "angles": "float32", "tables": "float32"},
    "fp32 angles": {"positions": "exact", "frequencies": "float32", "angles": "float32", "tables": "float32"},
    "bf16 tables": {"positions": "exact", "frequencies": "float64", "angles": "float64", "tables": "bf16"},
    "float64-built tables": {"positions": "exact", "frequencies": "float64", "angles": "float64", "tables": "float32"},
}
"""Methods of the notebook on precision -> the settings of the element's knobs."""


@pytest.fixture(scope="module")
def precision():
    return Element("precision", data.precision())


def octave(precision, top):
    return torch.tensor(precision.evaluate("(top) => octave(top)", top))


@pytest.mark.parametrize("model", ["", "DeepSeek-V3"])
@pytest.mark.parametrize("name", WAYS)
def test_each_way_to_round_loses_what_the_method_loses(precision, name, model):
    method, length, known = METHODS[name], 2**17, {one["name"]: one for one in precision.data["models"]}
    found = precision.compute(**WAYS[name], model=model, base=10000, length=length)
    inverse = torch.tensor(known[model]["frequencies"], dtype=torch.float64) if model else inverse_frequencies(128, 1e4)
    assert [row["position"] for row in found["octaves"]] == [2**k for k in range(18)]
    for row in found["octaves"]:
        positions = octave(precision, row["position"])
        assert row["bound"] == pytest.approx(float(method.bound.angle(positions, inverse).max()), rel=1e-12)
        if method.angles is not None:
            # The element's own frequencies of a base may differ from torch's in the last digit of float64.
            slack = 0.0 if model else row["position"] * 2.0**-50
            error = float(methods.angle_error(method, positions, inverse).max())
            assert row["error"] == pytest.approx(error, rel=0, abs=slack)
    waves = method.waves(positions, inverse)
    output = float(methods.output_error(waves, exact_waves(positions, inverse)).max())
    # Torch's float32 cosine may be off by an ulp, the element's by half an ulp.
    slack = methods.wave_error(methods.FP32, halves=3) if method.angles else 1e-12
    assert found["output"] == pytest.approx(output, rel=0, abs=slack + length * 2.0**-50)
    assert found["outputBound"] == pytest.approx(float(method.bound.output(positions, inverse).max()), rel=1e-12)
    assert found["bits"] == max(0.0, -math.log2(found["output"])) >= found["boundBits"]
    assert f"{found['bits']:.1f}" in found["says"]


ALL_WAYS = list(
    itertools.product(
        ("exact", "tf32", "bf16"), ("float64", "float32", "tf32", "bf16"), ("float64", "float32"), ("float32", "bf16")
    )
)


@pytest.mark.parametrize("way", ALL_WAYS, ids=" ".join)
def test_no_way_to_round_exceeds_its_bound(precision, way):
    found = precision.compute(**dict(zip(WAYS["fp32 angles"], way, strict=True)), model="gpt-neox-20b", length=2**13)
    assert all(row["error"] <= row["bound"] for row in found["octaves"] + found["planes"])
    assert found["output"] <= found["outputBound"]


@pytest.mark.parametrize("digits, dtype", [(8, torch.bfloat16), (24, torch.float32)])
def test_numbers_round_as_torch_rounds_them(precision, digits, dtype):
    x = torch.randn(500, generator=torch.Generator().manual_seed(1), dtype=torch.float64).exp()
    ties = torch.arange(1, 200, dtype=torch.float64) / 2 + 256
    x = torch.cat([x.float().double(), ties, -ties])
    rounded = precision.evaluate("(xs, digits) => xs.map((x) => round(x, digits))", x.tolist(), digits)
    assert rounded == x.to(dtype).double().tolist()


# ------------------------------------------------------------------------------------------------------------- packing


@pytest.fixture(scope="module")
def packing():
    return Element("packing", data.packing())


@pytest.fixture(scope="module")
def kernels():
    return load("te_kernels").frame


@pytest.mark.parametrize(
    "shares", ["0001121000050", "9000000000009", "0000000000001", "0000000000000", "1111111111111"]
)
@pytest.mark.parametrize("tokens", [65536, 8192])
def test_sequences_hold_all_tokens_and_blocks_are_counted(packing, shares, tokens):
    found = packing.compute(lengths=shares, tokens=tokens, rows=8192)
    lengths = [length for length, count in found["sequences"] for _ in range(count)]
    assert sum(lengths) == tokens == found["tokens"]
    n, longest, rows = len(lengths), max(lengths), max(8192, max(lengths))
    assert (found["n"], found["longest"], found["rows"]) == (n, longest, rows)
    blocks = {name: (one["blocks"], one["dead"]) for name, one in found["strategies"].items()}
    assert blocks["old"] == (n * rows, n * rows - tokens)
    assert blocks["linear"] == (tokens, 0)
    flash = [16 * math.ceil(length / 8) for length in lengths]  # 2 of 32 heads and 8 tokens in a block
    assert blocks["flash"] == (n * max(flash), n * max(flash) - sum(flash))
    taken = {name: heuristic(n, rows, tokens) for name, heuristic in transformer_engine.HEURISTICS.items()}
    assert found["conditions"] == taken


def test_estimates_are_those_of_the_fit_of_the_chapter(packing, monkeypatch):
    fit = run(monkeypatch, "11", "blocks-figure").fit
    packings = [
        {"n": row.n_seqs, "longest": row.longest, "tokens": row.tokens, "rows": row.freqs_len}
        for row in fit.itertuples()
    ]
    estimates = packing.evaluate("(all, data) => all.map((one) => estimate(one, data))", packings, packing.data)
    assert [one["old"] for one in estimates] == pytest.approx(fit.fitted_us.tolist(), rel=1e-9)
    medians = fit.groupby("n_seqs")[transformer_engine.NEW].median()
    for one, row in zip(estimates, fit.itertuples(), strict=True):
        assert one["linear"] == pytest.approx(medians[row.n_seqs])
        assert one["ropelab"] == pytest.approx(fit.ropelab.median())
        assert one["flash"] >= packing.data["fits"]["flash"]["live"]


def test_the_errors_of_the_estimates_are_those_beside_the_measured_times(packing, kernels):
    times = transformer_engine.times(kernels)
    found = packing.compute()["errors"]
    assert {name: one["cells"] for name, one in found.items()} == {
        name: int(times[contender].notna().sum()) for contender, name in data.STRATEGIES.items()
    }
    cells = packing.evaluate("(data) => data.cells.map((one) => estimate(one, data))", packing.data)
    for contender, name in data.STRATEGIES.items():
        off = (pd.Series([cell[name] for cell in cells]) / times[contender] - 1).abs().dropna().sort_values()
        assert found[name]["largest"] == pytest.approx(off.max())
        assert found[name]["median"] == pytest.approx(off.iloc[len(off) // 2])


# ------------------------------------------------------------------------------------------------------------ the roof


@pytest.fixture(scope="module")
def roof():
    return Element("roof", data.roof())


@pytest.mark.parametrize("model", MODELS[::9], ids=lambda model: model.name)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bytes_are_those_of_the_workload_and_of_the_launches(roof, model, dtype):
    tokens, size = 512, getattr(torch, dtype).itemsize
    shape = Workload(
        "", 1, tokens, model.q_heads, model.k_heads, model.head_dim, model.rotary_dim, getattr(torch, dtype)
    )
    heads = (model.q_heads * model.head_dim, model.k_heads * model.head_dim)

    def bytes_of(**state):
        return roof.compute(model=model.name, tokens=tokens, dtype=dtype, **state)["bytes"]

    assert bytes_of(operation="rotation") == shape.bytes == bytes_of(operation="norm and rotation")
    assert bytes_of(operation="norm and rotation", fusion="separate") == 2 * shape.bytes
    for cache, held in (("bfloat16", size), ("float8_e4m3fn", 1)):
        for fusion, launches in (("one", "norm, rotation and cache"), ("separate", "norm; rotation; cache")):
            found = bytes_of(operation="norm, rotation and cache", fusion=fusion, cache=cache)
            assert found == tokens * LAUNCHES[launches](*heads, size, held)
        found = bytes_of(operation="rotation and cache", fusion="separate", cache=cache)
        assert found == tokens * LAUNCHES["norm and rotation; cache"](*heads, size, held)


def test_the_roof_goes_through_the_fastest_copies(roof):
    copies = pd.concat(frame[are_copies(frame)] for frame in (load(study).frame for study in data.COPIES))
    fastest = copies.groupby("bytes").median_us.min()
    assert roof.data["copies"] == [[count, us] for count, us in fastest.items()]
    between = np.geomspace(fastest.index[0], fastest.index[-1], 60).tolist()
    found = roof.evaluate("(xs, copies) => xs.map((x) => copyTime(x, copies))", between, roof.data["copies"])
    assert found == pytest.approx(np.exp(np.interp(np.log(between), np.log(fastest.index), np.log(fastest))).tolist())
    ends = roof.evaluate("(xs, copies) => xs.map((x) => copyTime(x, copies))", [1, 2**32], roof.data["copies"])
    assert ends == pytest.approx([fastest.iloc[0], fastest.iloc[-1] * 2**32 / fastest.index[-1]])


def test_measured_times_are_those_of_the_record(roof):
    found = roof.compute(model="meta-llama/Llama-3.1-8B", tokens=4096)
    frame = timed(load("dense").frame)
    frame = frame[(frame.cell == "1x4096 32/8 128") & (frame.layout == "split_half")]
    frame = frame[~are_copies(frame)]
    expected = {(CONTENDERS.label(row.contender), row.direction): row.median_us for row in frame.itertuples()}
    assert {(row["contender"], row["direction"]): row["us"] for row in found["measured"]} == expected
    assert {row["study"] for row in found["measured"]} == {"dense"}
    fastest = min(us for (_, direction), us in expected.items() if direction == "forward")
    assert f"{fastest:.1f} µs" in found["says"]


def test_heads_and_formats_that_were_not_measured_have_no_times(roof):
    assert roof.compute(model="tiiuae/falcon-40b")["measured"] == roof.compute(dtype="float32")["measured"] == []
    cached = roof.compute(operation="norm, rotation and cache", model="meta-llama/Llama-3.1-8B")["measured"]
    frame = load("paged_cache").frame
    frame = frame[(frame.operation == "QK norm, rotation, cache") & (frame.tokens == 4096) & (frame.q_heads == 32)]
    frame = frame[(frame.cache == "bfloat16") & (frame.layout == "split_half")]
    frame = frame[~are_copies(frame)]
    assert sorted(row["us"] for row in cached) == sorted(frame.median_us)


# ------------------------------------------------------------------------------------------------------ in a browser

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
TURNS = {"turn": ("position", "40"), "precision": ("frequencies", "bf16"), "packing": ("tokens", "0"),
         "roof": ("tokens", "16")}  # fmt: skip
"""Element -> a knob, and a value that its input can have."""


def browse(folder, name, query="", script=""):
    """The page of an element after a script ran in it, as Chromium leaves it."""
    page = folder / f"{name}.html"
    page.write_text(
        f"<!doctype html><title>{name}</title>{html(name, data.DATA[name]())}<script type=module>{script}</script>"
    )
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--dump-dom"]
    command = [BROWSER, *options, f"--user-data-dir={folder / 'profile'}", f"{page.as_uri()}{query}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    return BeautifulSoup(done.stdout, "html.parser")


@pytest.mark.process
@pytest.mark.skipif(BROWSER is None, reason="needs a Chromium")
@pytest.mark.parametrize("name", data.DATA)
def test_a_turned_knob_changes_the_figure_and_the_address(name, tmp_path):
    knob, value = TURNS[name]
    turn = f"""
      const input = document.querySelector('[name="{knob}"]');
      input.value = "{value}";
      input.dispatchEvent(new Event("input", {{ bubbles: true }}));
      document.body.dataset.search = location.search;
    """
    before, after = browse(tmp_path, name), browse(tmp_path, name, script=turn)
    for page in (before, after):
        figures = page.select(".knob svg")
        assert figures and all(figure["role"] == "img" and figure["aria-label"] for figure in figures)
        assert all(
            control.find_parent("label") or control.get("aria-label") for control in page.select("input, select")
        )
    assert str(before.select_one(".figures")) != str(after.select_one(".figures"))
    sentence = after.select_one("output.says").text
    assert sentence != before.select_one("output.says").text
    search = after.body["data-search"]
    assert search.startswith(f"?{name}.{knob}=")
    again = browse(tmp_path, name, query=search)  # the address brings the same page
    assert again.select_one("output.says").text == sentence
    assert str(again.select_one(".figures")) == str(after.select_one(".figures"))


# ------------------------------------------------------------------------------------------------------- the knobs


def test_a_value_that_no_knob_allows_gives_way_to_the_knobs_own(turn):
    checked = "(state) => checked(knobs({}), state)"
    own = turn.evaluate(checked, {})
    assert turn.evaluate(checked, {"layout": "sideways", "base": "12", "position": "", "pair": "x", "more": 1}) == own
    given = {"layout": "interleaved", "base": "500000", "position": "9999", "pair": "2.4"}
    assert turn.evaluate(checked, given) == own | {"layout": "interleaved", "base": 500000, "position": 512, "pair": 2}
    changed = "(state) => changed(knobs({}), checked(knobs({}), state))"
    assert turn.evaluate(changed, {"position": 5, "layout": "split_half"}) == {"position": 5}


def test_a_page_holds_the_element_and_loads_nothing():
    page = str(html("turn", {"words": "</script><!--"}, {"position": 7}, without="without <scripts>"))
    assert page.count("</script>") == 1 and "without &lt;scripts&gt;" in page
    assert not re.findall(r"(?:src|href)=|https?://(?!www\.w3\.org/2000/svg)|@import", page)


def test_an_unknown_element_is_refused():
    with pytest.raises(ValueError, match="element: expected one of .*'turn'.*, got 'tune'"):
        notebook.show("tune")


@pytest.mark.parametrize("installed", [pytest.param(True, marks=pytest.mark.peers), False])
def test_a_notebook_shows_a_widget_and_the_html_of_the_report(monkeypatch, installed):
    if installed:
        pytest.importorskip("anywidget")
    else:
        monkeypatch.setitem(sys.modules, "anywidget", None)
    shown = []
    monkeypatch.setattr(notebook, "display", lambda output, raw: shown.append(output))
    widget = notebook.show("turn", position=7)
    [output] = shown
    assert 'data-knob="turn"' in output["text/html"] and '{"position": 7}' in output["text/html"]
    assert ("application/vnd.jupyter.widget-view+json" in output) == installed == (widget is not None)
    if installed:
        assert widget.state == {"position": 7} and "export default { render };" in widget._esm
