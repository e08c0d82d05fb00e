"""Precision: the reference, the bounds (they hold, are not slack, and can fail), and the cells that tell of them."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
import torch

import ropelab
from ropelab import reference
from ropelab.angles import frequencies as variants
from ropelab.bench import exact_waves
from ropelab.bench.unavailable import Unavailable
from ropelab.kernels import use_backend
from ropelab.layout.pairing import pairs
from ropelab.study.engine import registered
from ropelab.study.topics.precision import errors as of_methods
from ropelab.study.topics.precision import gpu as precision_gpu
from ropelab.study.topics.precision import methods as precision
from ropelab.study.topics.precision.methods import METHODS, REFERENCE, Bound, Method, ufp
from ropelab.study.topics.precision.models import MODELS

pytest.importorskip("seaborn")
mpmath = pytest.importorskip("mpmath")
from ropelab.bench.records import Record  # noqa: E402
from ropelab.study.shown import Shown  # noqa: E402
from tests.site.cells import run  # noqa: E402
from tests.study.sentences import numbers, states  # noqa: E402

ROOT = Path(__file__).parents[2]
LLAMA3 = variants.inverse_frequencies(128, 5e5)
LAST = of_methods.TOPS[-1]
MOST_SLACK = 2
"""The limit of an octave's largest bound over its largest error, for the octave with the tightest bound."""


def random_positions(count: int, last: int = exact_waves.LAST) -> torch.Tensor:
    """Random positions, spread over all sizes."""
    return (2 ** (torch.rand(count) * math.log2(last))).long().clamp(max=last)


def any_frequencies(count: int) -> torch.Tensor:
    """Frequencies from 2e-6 to 1, with all 53 digits, and powers of two among them."""
    drawn = torch.exp(-13 * torch.rand(count, dtype=torch.float64))
    return torch.cat([drawn, torch.tensor([1.0, 0.5, 2.0**-9]).double()])


# --------------------------------------------------------------------------------------------------------- reference


FIRST_CALLS = """
import torch
from torch.utils._python_dispatch import TorchDispatchMode

class Calls(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if arguments and isinstance(arguments[0], torch.Tensor) and arguments[0].is_floating_point():
            print(function, arguments[0].dtype, arguments[0].numel())
        return function(*arguments, **options or {})

with Calls():
    import ropelab
"""


@pytest.mark.process
def test_the_first_call_of_cos_and_sin_is_made_on_one_thread():
    """Else MKL may run code of low accuracy once (pytorch#188792); an import calls each function with one element."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    printed = subprocess.run(
        [sys.executable, "-c", FIRST_CALLS], env=environment, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    calls = [f"aten.{name}.default torch.{dtype} 1" for dtype in ("float32", "float64") for name in ("cos", "sin")]
    assert not set(calls) - set(printed)
    assert all(line.endswith(" 1") for line in printed)


def test_reference_is_right():
    positions, frequencies = random_positions(200), any_frequencies(20)
    positions[:2] = torch.tensor([0, exact_waves.LAST])
    cos, sin = exact_waves.exact_waves(positions, frequencies)
    high, low = exact_waves.exact_product(positions, frequencies)
    with mpmath.workprec(200):
        for row, p in enumerate(positions.tolist()):
            for plane, f in enumerate(frequencies.tolist()):
                angle = p * mpmath.mpf(f)
                assert angle == mpmath.mpf(high[row, plane].item()) + mpmath.mpf(low[row, plane].item())
                c, s = (mpmath.mpf(wave[row, plane].item()) for wave in (cos, sin))
                assert mpmath.hypot(c - mpmath.cos(angle), s - mpmath.sin(angle)) <= REFERENCE / 2


def test_reference_refuses_positions_that_it_cannot_multiply():
    with pytest.raises(ValueError, match="positions: expected at most 16777216, got 16777217"):
        exact_waves.exact_product(torch.tensor([exact_waves.LAST + 1]), LLAMA3)


def test_float64_is_enough_and_the_check_can_fail(monkeypatch):
    check = run(monkeypatch, "02", "reference-table").check
    assert (check.error <= check.bound).all() and check["share of half an ulp"].max() < 0.05
    narrow = {"float64_tables": lambda p, f, dtype: METHODS["fp32 angles"].waves(p, f)}
    with pytest.raises(AssertionError):
        run(monkeypatch, "02", "reference-table", instead=narrow)


def test_unit_in_the_first_place():
    x = torch.tensor([0.0, 1.0, -1.5, 2 - 2**-52, 3e-300, -4.0], dtype=torch.float64)
    assert ufp(x).tolist() == [0, 1, 1, 1, 2.0 ** math.floor(math.log2(3e-300)), 4]


# ------------------------------------------------------------------------------------------------------------ bounds


@pytest.mark.parametrize("name", METHODS)
def test_errors_stay_within_their_bounds(name):
    """The bounds hold for frequencies and positions of any kind, and for every plane by itself."""
    for frequencies in (LLAMA3, any_frequencies(40), variants.inverse_frequencies(64, 1e4)):
        positions = random_positions(3000)
        truth, method = exact_waves.exact_waves(positions, frequencies), METHODS[name]
        waves = method.waves(positions, frequencies)
        angles = precision.angle_error(method, positions, frequencies) if method.angles else None
        row = of_methods.compare(waves, truth, method, positions, frequencies, angles)
        assert 0 < row["fraction"] <= 1


@pytest.fixture(scope="module")
def errors():
    return of_methods.errors(LLAMA3, of_methods.TOPS, samples=512)


def test_bounds_are_not_slack(errors):
    for kind in ("angle", "output"):
        share = (errors[f"{kind}_error"] / errors[f"{kind}_bound"]).groupby(errors.method).max()
        assert len(share) == len(METHODS) and (share >= 1 / MOST_SLACK).all() and (share <= 1).all(), share
    for kind in ("angle", "output"):  # and from 64 tokens on, where cosines' own errors do not matter, everywhere
        far = errors[errors.position >= 64]
        assert (far[f"{kind}_error"] >= far[f"{kind}_bound"] / MOST_SLACK).all()


COARSER = {
    "bf16 frequencies": "bf16 positions",
    "TF32, emulated": "bf16 frequencies",
    "fp32 angles": "TF32, emulated",
    "bf16 tables": "fp32 angles",
    "float64-built tables": "bf16 tables",
}


@pytest.mark.parametrize(("name", "other"), COARSER.items())
def test_the_bound_of_a_method_refuses_a_coarser_one(name, other):
    wrong = replace(METHODS[other], bound=METHODS[name].bound)
    assert of_methods.errors(LLAMA3, [2**20], 256, {other: wrong}).fraction.item() > 1


def test_one_more_rounding_breaks_a_bound():
    """Angles that are off by a single float32 ulp more."""
    usual = METHODS["fp32 angles"]

    def angles(positions, frequencies):
        return torch.nextafter(usual.angles(positions, frequencies), torch.tensor(math.inf))

    wrong = precision.from_angles(angles, usual.bound)
    assert of_methods.errors(LLAMA3, [2**20], 512, {"off by an ulp": wrong}).fraction.item() > 1


def test_integers_and_powers_of_two_stay():
    bound = Bound(positions=(8,), frequencies=(8,))
    f = torch.tensor([1.0, 0.25, 0.3]).double()
    assert bound.drift(f).tolist() == [0, 0, 2.0**-8 * 0.25]
    noise = bound.noise(torch.tensor([256, 257, 512, 1000]), f)
    assert (noise[[0, 2]] == 0).all() and noise[1, 0] == 1 and noise[3, 1] == 0.5


# ----------------------------------------------------------------------------------------------------------- methods


def test_table_method_has_the_rows_of_the_library():
    positions = torch.tensor([0, 1, 17, 4095])
    for dtype, name in ((torch.float32, "float64-built tables"), (torch.bfloat16, "bf16 tables")):
        table = ropelab.rotary_table(4096, 128, 5e5, dtype=dtype)
        for wave, rows in zip(METHODS[name].waves(positions, LLAMA3), table, strict=True):
            assert torch.equal(wave, rows[positions])


def test_output_error_is_that_of_rotated_features():
    """Through `apply_rope`, at the far end, pair by pair: the same number whatever the features are."""
    positions = torch.arange(LAST - 64, LAST)
    q = torch.randn(1, 64, 2, 128, dtype=torch.float64)
    truth = exact_waves.exact_waves(positions, LLAMA3)
    right = reference.rotate(q, *truth)
    for name in ("fp32 angles", "bf16 positions", "bf16 tables"):
        waves = METHODS[name].waves(positions, LLAMA3)
        y = ropelab.apply_rope(q, cos=waves[0].double(), sin=waves[1].double())
        off, length = (torch.hypot(*pairs(x, "split_half")) for x in (y - right, q))
        expected = precision.output_error(waves, truth)[None, :, None].expand_as(off)
        torch.testing.assert_close(off / length, expected, rtol=1e-6, atol=1e-12)


def test_octaves_have_both_ends_and_where_formats_round():
    assert of_methods.octave(1, 5).tolist() == [1] and of_methods.octave(8, 5).tolist() == [5, 6, 7, 8]
    for top in (2**12, 2**22):
        chosen = of_methods.octave(top, 64)
        assert chosen[0] == top // 2 + 1 and chosen[-1] == top and (chosen.diff() > 0).all()
        middle = top // 2 + top // 2**9  # half-way between two numbers of 8 digits
        assert {middle - 1, middle, middle + 1} <= set(chosen.tolist())


@pytest.mark.parametrize("name", ["bf16 positions", "bf16 frequencies", "TF32, emulated"])
def test_first_loss_is_the_first(name):
    method, positions = METHODS[name], torch.arange(1, 5000)
    off = precision.angle_error(method, positions, LLAMA3).amax(dim=1)
    for radians in (0.5, 1.0, math.pi, 2 * math.pi):
        found = of_methods.first_loss(method, LLAMA3, radians, longest=4999)
        lost = positions[off >= radians]
        assert found == (int(lost[0]) if len(lost) else None)
        safe = of_methods.safe_up_to(method, LLAMA3, radians)
        assert safe > 0 and (off[:safe] < radians).all()


def test_the_first_losses(monkeypatch):
    names = run(monkeypatch, "02", "picture", "losses-table", smoke=True)
    table = pd.DataFrame.from_dict(names.rows_of_loss, orient="index")[["1 rad", "a full turn"]]
    assert table.loc["bf16 positions"].tolist() == ["257", "2,055"]  # 256 and 258 are neighbours in bfloat16
    assert table.loc["bf16 frequencies"].tolist() == ["559", "3,513"]
    assert table.loc["TF32, emulated"].tolist() == ["2,049", "16,389"]
    assert table.loc[of_methods.USUAL].tolist() == [f"not up to {2**k:,}" for k in (23, 26)]
    assert (table.loc[[of_methods.OURS, of_methods.TABLE_FREE]] == "never").all(axis=None)


# ------------------------------------------------------------------------------------------------- scores, attention


def test_law_of_relative_positions():
    found = of_methods.law(LLAMA3, tops=of_methods.TOPS[::3], samples=64)
    assert (found.moved <= found.moved_bound).all() and (found.off <= found.off_bound).all()
    far = found[(found.position == 2**15) & (found.distance == 500)].set_index("method")
    # Other frequencies are another rotation, which keeps the law; positions that collide break it.
    assert far.moved["bf16 frequencies"] < 1e-6 < 1e-2 < far.off["bf16 frequencies"]
    assert far.moved["bf16 positions"] > 0.1 and far.off["bf16 positions"] > 0.1
    assert far.moved[of_methods.OURS] < 1e-7
    worst = (found.moved / found.moved_bound).groupby(found.method).max()
    assert (worst > 1 / 16).all(), worst  # means over planes that do not all reach their bounds at once


def test_some_query_and_key_attain_the_error_of_a_score():
    positions = torch.tensor([LAST - 700]), torch.tensor([LAST - 1000])
    truth = [of_methods._as_complex(exact_waves.exact_waves(p, LLAMA3)) for p in positions]
    moved = of_methods._relative(METHODS["fp32 angles"], *positions, LLAMA3) - truth[0] * truth[1].conj()
    q = torch.randn(64, dtype=torch.complex128)
    q = q / q.abs()
    k = (q * moved[0]) / moved[0].abs()  # the error of every plane with the same sign
    error = (q * k.conj() * moved[0]).real.sum() / 64
    assert error.item() == pytest.approx(moved.abs().mean().item(), rel=1e-12)


def test_attention_stays_within_its_bounds():
    found = of_methods.attention(LLAMA3, of_methods.TOPS[::3], window=64, queries=3)
    assert (found.score_error <= found.score_bound).all() and (found.weights_error <= found.weights_bound).all()
    worst = (found.score_error / found.score_bound).groupby(found.method).max()
    assert (worst > 1 / 16).all(), worst  # random signs: 64 planes cancel


def test_no_shift_of_scores_moves_more_attention_than_the_bound():
    scores = 3 * torch.randn(200, 7).double()
    for e in (0.01, 0.5, 3.0):
        shifted = scores + e * torch.where(torch.rand(200, 7) < 0.5, 1.0, -1.0)
        moved = (shifted.softmax(1) - scores.softmax(1)).abs().sum(1) / 2
        assert moved.max() <= math.tanh(e / 2)
        half = torch.tensor([-e / 2, e / 2]).double()  # two keys that change places
        moved = (half.flip(0).softmax(0) - half.softmax(0)).abs().sum() / 2
        assert moved.item() == pytest.approx(math.tanh(e / 2))


# ------------------------------------------------------------------------------------------------------------ models


def test_every_family_is_shown_and_within_its_bounds():
    found = of_methods.models(samples=64)
    assert set(found.model) == set(MODELS) and (found.output_error <= found.output_bound).all()
    bits = found.pivot(index="model", columns="method", values="bits")
    assert (bits[of_methods.OURS] > 24).all()
    assert bits.loc["Llama-3.1-8B", [of_methods.USUAL, "bf16 tables"]].round(1).tolist() == [7.3, 8.5]  # README.md
    assert (bits[of_methods.TABLE_FREE] > 24).all()
    # A bit less for twice the length: 2048 and 10 million tokens are twelve and a third doublings apart.
    assert 11 < bits[of_methods.USUAL]["gpt-neox-20b"] - bits[of_methods.USUAL]["Llama-4-Scout"] < 15
    lengths = found.drop_duplicates("model").set_index("model").length
    assert lengths["Llama-3.1-8B"] == 131072 and lengths["MiniMax-M1"] == 10240000


def test_long_context_of_longrope_uses_its_long_factors():
    found = of_methods.models({"Phi": MODELS["Phi-4-mini (LongRoPE)"]}, samples=8)
    rope = ropelab.rope_from_config(MODELS["Phi-4-mini (LongRoPE)"].config).at_length(131072)
    positions = torch.arange(131071 - 7, 131072)
    truth = exact_waves.exact_waves(positions, rope.inverse_frequencies)
    error = precision.output_error(METHODS["fp32 angles"].waves(positions, rope.inverse_frequencies), truth).max()
    assert found.set_index("method").output_error["fp32 angles"] == error.item()


# --------------------------------------------------------------------------------------------------------------- GPU


def cut_off_turns(positions, frequencies):
    """The machine code of ``sin.approx`` with an exact cosine: turns are cut off to 24 digits."""
    turns = METHODS["fp32 angles"].angles(positions, frequencies).double() * precision_gpu.INVERSE_TURN
    ulp = 2.0**-23 * ufp(turns)
    turns = torch.where(ulp > 0, (turns / ulp).floor() * ulp, turns)
    return (2 * math.pi * turns).cos(), (2 * math.pi * turns).sin()


def broken(positions, frequencies):
    raise RuntimeError("no kernel image\nis available")


@pytest.fixture(scope="module")
def gpu_frame():
    """A record as a GPU would write it, with stand-ins for the steps that need a GPU."""
    fast = precision_gpu.GPU_METHODS["fast-math sincos"]
    methods = {
        of_methods.USUAL: METHODS[of_methods.USUAL],
        "TF32 matmul": replace(METHODS[precision_gpu.EMULATED], bound=precision_gpu.TF32_BOUND),
        "TF32 batched matmul": replace(precision_gpu.GPU_METHODS["TF32 batched matmul"], waves=broken),
        "fast-math sincos": replace(fast, waves=cut_off_turns),
    }
    return precision_gpu.held(methods, of_methods.SMOKE_TOPS, 256)


def test_what_fails_is_recorded(gpu_frame):
    assert list(gpu_frame.columns) == precision_gpu.COLUMNS
    failed = gpu_frame[gpu_frame.method == "TF32 batched matmul"]
    assert (failed.status == "failed: RuntimeError: no kernel image").all() and failed.output_error.isna().all()
    ran = gpu_frame[gpu_frame.status == "ok"]
    assert (ran.fraction <= 1).all() and set(ran[ran.emulated.notna()].method) == {"TF32 matmul"}


def test_fast_maths_are_off_by_what_their_reduction_explains(gpu_frame):
    """With exact cosines the derived bound is nearly attained, and it equals the bound that the manual promises."""
    fast = gpu_frame[gpu_frame.method == "fast-math sincos"].set_index("position")
    assert fast.fraction[LAST] > 0.8
    angles = torch.tensor([2 * math.pi - 1e-9, 100 * math.pi]).double()
    promised = torch.tensor([-20.5, -14.7])
    assert (precision_gpu.fast_reduction(angles).log2().float() - promised).abs().max() < 0.15
    assert precision_gpu.INVERSE_TURN == torch.tensor(1 / (2 * math.pi)).item()


COMPILE = """
import subprocess, sys, tempfile
from pathlib import Path
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from ropelab.study.topics.precision.gpu import fast_sincos
types = {"angles": "*fp32", "cos": "*fp32", "sin": "*fp32", "count": "i32", "BLOCK": "constexpr"}
source = ASTSource(fast_sincos, types, {"BLOCK": 1024}, {})
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32))
with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "kernel.cubin"
    path.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    print(subprocess.run([tool, "-sass", path], capture_output=True, text=True, check=True).stdout)
"""


@pytest.mark.process
def test_the_machine_code_multiplies_cut_off_by_an_inverse_turn():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(ROOT)
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    constant = f"{precision_gpu.INVERSE_TURN:.15f}"
    assert "MUFU.SIN" in done.stdout and "MUFU.COS" in done.stdout
    products = [line for line in done.stdout.splitlines() if "FMUL" in line]
    assert products and all("FMUL.RZ" in line and constant in line for line in products)


def test_the_study_needs_a_gpu_and_is_measured_with_the_others(monkeypatch):
    assert "precision" in registered.all_studies()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(Unavailable):
        precision_gpu.precision_study(smoke=True)


@pytest.mark.gpu
def test_on_a_gpu_every_method_stays_within_its_bound():
    found = precision_gpu.precision_study(smoke=True)
    assert (found.status == "ok").all(), found[found.status != "ok"]
    assert (found.fraction <= 1).all(), found[found.fraction > 1]


# ------------------------------------------------------------------------------------------------------ the chapter


def test_the_sentences_have_the_numbers_of_their_tables(monkeypatch, errors):
    cells = "picture", "rotations-figure", "bounds-table"

    def said(frame):
        made_up = {"of_methods": SimpleNamespace(errors=lambda *_: frame)}
        return run(monkeypatch, "02", *cells, instead=made_up).findings_shown[0]

    assert states(said(errors), 0.2) and 24.5 in numbers(said(errors))
    assert 20 in numbers(said(errors.assign(angle_error=errors.angle_error * 100)))
    with pytest.raises(AssertionError, match="exceeds its bound"):
        said(errors.assign(fraction=1.2))


def test_the_record_of_a_gpu_names_what_failed_and_what_is_beyond_its_bound(monkeypatch, gpu_frame):
    def said(frame):
        shown = Shown(None)
        shown.record = lambda study: Record(study, frame, {"gpu": {"name": "a GPU"}})
        shown.drawn = lambda *_: None
        names = run(monkeypatch, "02", "picture", "gpu-figure", instead={"shown": shown}, smoke=True)
        return [*names.failed.method], "".join(names.findings_shown)

    assert said(gpu_frame)[0] == ["TF32 batched matmul"]
    beyond = gpu_frame.assign(fraction=gpu_frame.fraction.where(gpu_frame.method != "fast-math sincos", 1.5))
    usual = gpu_frame[gpu_frame.method == of_methods.USUAL].assign(method="TF32 matmul")
    other = pd.concat([gpu_frame[gpu_frame.method != "TF32 matmul"], usual])  # no TF32 there
    told = [said(x)[1] for x in (gpu_frame, beyond, other, gpu_frame.assign(status="failed: no GPU"))]
    assert len(set(told)) == 4 and "fast-math sincos" in told[1].rpartition(":")[2] and "TF32 matmul" in told[2]
    assert not told[3]
    for name in gpu_frame.method.unique():  # a record lacks a method: a gap, or a note
        assert "nan" not in said(gpu_frame[gpu_frame.method != name])[1]


def test_another_method_is_held_to_what_it_promises():
    """A function of positions and frequencies that makes cos and sin, and its bound."""
    promised = Bound(wave=2 * precision.wave_error(precision.FP32))
    methods = METHODS | {
        "made as needed": Method(lambda p, f: tuple(x.float() for x in exact_waves.exact_waves(p, f)), promised)
    }
    found = of_methods.errors(LLAMA3, of_methods.SMOKE_TOPS, 64, methods)
    assert (found[found.method == "made as needed"].fraction <= 1).all()
    assert of_methods.first_loss(methods["made as needed"], LLAMA3, 1.0, 4096) is None
    assert "made as needed" in set(of_methods.models({"one": MODELS["Llama-2-7b"]}, 8, methods).method)


def test_ulps_of_every_value(monkeypatch):
    """Tables and 16-bit results are right to half a unit but near zeros; float32 angles are not."""
    with use_backend("torch"):  # the interpreter cuts bfloat16 off
        names = run(monkeypatch, "02", "picture", "near-zero-table", smoke=True, longest=2048)
    largest = names.ulps.groupby("what").ulps.max()
    within = names.ulps.groupby("what").ulps.apply(lambda errors: (errors <= 0.5).mean())
    assert largest[of_methods.TABLE_FREE] <= 1 and largest["bfloat16"] < 0.51 and within[of_methods.OURS] > 0.99
    assert largest[of_methods.USUAL] > 50 and within[of_methods.USUAL] < 0.5
    assert 100.0 in numbers(names.findings_shown[-1])
    exact = torch.tensor([1.0, 3.0, 2.0**-126 / 4], dtype=torch.float64)
    units = torch.tensor([2.0**-23, 2.0**-22, 2.0**-149], dtype=torch.float64)
    assert names.in_ulps(exact + 2 * units, exact, torch.float32).tolist() == [2.0, 2.0, 2.0]
