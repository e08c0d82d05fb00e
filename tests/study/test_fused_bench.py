"""The studies of fused operators: the faults that checks catch, and the records' tables."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch

import ropelab
from ropelab.bench import (
    agreement,
    cache_operations,
    cached_keys,
    fetch_peers,
    latent_attention,
    operation,
    packages,
    paged_cache,
    row_scales,
)
from ropelab.bench.cache_operations import LatentCache, NormAndCache, WholeLatentCache
from ropelab.bench.names import SAME_PLACES
from ropelab.bench.peers import megatron, torch_library
from ropelab.bench.records import Record
from ropelab.bench.workloads import DIRECTIONS
from ropelab.kernels import INTERPRETED
from ropelab.study.shown import Shown
from ropelab.study.topics.one_pass import findings as one_pass
from tests.site.cells import run
from tests.study.sentences import states

TIMES = ("contender", "status", "median_us", "q20_us", "q80_us", "samples", "fraction_of_copy", "version", "sha256")


@pytest.fixture
def on_cpu(monkeypatch, called_once):
    """Without the packages whose operators need a GPU."""
    if not INTERPRETED:
        pytest.skip("needs Triton's interpreter; the study runs the kernels on a GPU")

    def absent(*_):
        raise packages.NotInstalled("vllm not installed")

    monkeypatch.setattr(torch_library, "operators", absent)


# --------------------------------------------------------------------------------------------------- paged caches


OPERATIONS = (NormAndCache, LatentCache)
PROMPT, DECODED = 32, 3
"""Tokens of a prompt in these tests, and tokens of sequences of their own."""


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    """The torch path of ropelab, because the interpreter takes long for heads of these sizes; and short prompts."""
    monkeypatch.setattr(cache_operations, "MOST_DECODED", PROMPT - 1)
    with ropelab.use_backend("torch"):
        yield


def test_the_table_of_paged_caches(on_cpu):
    frame = paged_cache.paged_cache(smoke=True, device="cpu")
    sizes = ("operation", "tokens", "cache", "q_out", "q_heads", "k_heads", "head_dim", "dtype", "layout", "bytes")
    assert set(frame.columns) == {*sizes, *TIMES}
    assert set(frame.operation) == {kind.name for kind in OPERATIONS} and set(frame.tokens) == {1}
    assert set(frame[frame.contender == cache_operations.VLLM].status) == {"not run: vllm not installed"}
    names = [cache_operations.OURS, cache_operations.SEPARATE, one_pass.COPY, one_pass.PLACES]
    times = one_pass.times(frame)
    absent = [cache_operations.VLLM, one_pass.FLASHINFER]
    assert times[names].notna().any().all() and times[absent].isna().all(axis=None)


@pytest.mark.parametrize("kind", OPERATIONS)
@pytest.mark.parametrize("tokens", [DECODED, PROMPT])
def test_calls_write_to_slots_of_their_own(kind, tokens):
    case = kind(tokens)
    calls = case.sets("cpu", 3)
    slots = torch.cat([call["slots"] for call in calls])
    assert len(set(slots.tolist())) == 3 * tokens and len({call[case.cached[0]].data_ptr() for call in calls}) == 1
    assert slots.max() < calls[0][case.cached[0]].flatten(0, 1).shape[0]
    copied = sum(x.numel() * x.element_size() for x in case.to_copy(calls[0]))
    assert case.work.bytes == 2 * copied


FLOAT8 = {"float8": True, "float8_q": True}


@pytest.mark.parametrize("tokens", [DECODED, PROMPT])
@pytest.mark.parametrize("kind", [partial(NormAndCache, **FLOAT8), WholeLatentCache])
def test_passes_that_make_their_scales(kind, tokens):
    case = row_scales.RowScales(kind(tokens))
    (call,) = case.case.sets("cpu", 1)
    call |= case.scales(call)
    run = case.made("cpu")

    def elsewhere(call):
        found = run(call)
        call["q scales"] *= 1.1
        return found

    assert case.check(run, call) == "ok"
    assert case.check(elsewhere, call).startswith("wrong: a head of q has relative error")


@pytest.mark.parametrize("case", [case for case in cached_keys.every_case() if case.slots == 16], ids=str)
def test_cached_keys(on_cpu, case):
    call, ours, separate = case.sets("cpu")[0], case.ours("cpu"), case.separate("cpu")
    assert case.check(ours, call) == "ok"
    assert separate is None or case.check(separate, call) == "ok"
    told = case.check(lambda fresh: ours(fresh | {"deltas": -fresh["deltas"]}), call)
    assert told.startswith("wrong: a head of keys has relative error")


@pytest.mark.parametrize("study", [row_scales.row_scales, cached_keys.cached_keys])
def test_the_tables_of_caches(on_cpu, study):
    frame = study(smoke=True, device="cpu")
    assert (frame.status == "ok").all() and (frame.fraction_of_copy > 0).any()


VARIANTS = {
    "prompt": NormAndCache(PROMPT),
    "latent prompt": LatentCache(PROMPT),
    "interleaved": NormAndCache(DECODED, "interleaved"),
    "28 heads": NormAndCache(DECODED, q_heads=28, k_heads=4),
    "64 heads": NormAndCache(DECODED, q_heads=64),
    "no norm": NormAndCache(DECODED, "interleaved", norm=False),
    "8-bit cache": NormAndCache(DECODED, float8=True),
    "8-bit cache and q": NormAndCache(DECODED, norm=False, float8=True, float8_q=True),
    "latent halves": LatentCache(DECODED, "split_half"),
    "8-bit latent cache": LatentCache(DECODED, float8=True),
    "whole latent": WholeLatentCache(DECODED),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_pass_and_their_bytes_are_counted(variant):
    case = VARIANTS[variant]
    (call,) = case.sets("cpu", 1)
    for launch in (case.ours("cpu"), case.separate("cpu")):
        assert launch is None or case.check(launch, call) == "ok"
    found = case.ours("cpu")({name: x.clone() for name, x in call.items()})
    results = sum(found[name].numel() * found[name].itemsize for name in found if name in ("q", "other q"))
    rows = sum(call[name][0, 0].numel() * call[name].itemsize for name in case.cached)
    read = sum(x.numel() * x.itemsize for x in case.to_copy(call))
    assert case.bytes == read + results + len(call["slots"]) * rows


@pytest.mark.parametrize("variant", ["8-bit cache", "8-bit cache and q", "whole latent"])
def test_wrong_8_bit_floats_are_caught(variant):
    case = VARIANTS[variant]
    (call,) = case.sets("cpu", 1)

    def spoil(call, found):
        rows = call[case.cached[-1]].flatten(0, 1)
        rows[call["slots"][1]] = (rows[call["slots"][1]].float() * 1.25).to(rows.dtype)

    told = case.check(spoiled(case.ours("cpu"), spoil), call)
    assert told.startswith("wrong: a head of stored")


def spoiled(run, spoil):
    """A run whose results ``spoil`` changes; it gets the tensors of the call and what the run returns."""

    def wrong(call):
        found = run(call)
        spoil(call, found)
        return found

    return wrong


@pytest.mark.parametrize("kind", OPERATIONS)
@pytest.mark.parametrize("what", ["another slot", "own slot", "q", "k", "one element"])
def test_wrong_runs_are_caught(kind, what):
    case = kind(PROMPT)
    (call,) = case.sets("cpu", 1)
    cache, slots = case.cached[-1], call["slots"]
    other = next(slot for slot in range(len(slots) + 1) if slot not in slots)

    def spoil(call, found):
        if "slot" in what:
            rows = call[cache].flatten(0, 1)
            rows[other if what == "another slot" else slots[7]] += 0.125
        elif what == "one element":
            found["q"][-1, -1, -1] += 1.0
        else:
            found[what] *= 1.25

    told = case.check(spoiled(case.separate("cpu"), spoil), call)
    names = {"another slot": "other slots", "own slot": "stored", "one element": "q"}
    assert told.startswith("wrong: ") and names.get(what, what) in told


@pytest.mark.parametrize("kind", OPERATIONS)
def test_a_run_that_raises_or_gives_nan_is_caught(kind):
    case = kind(2)
    (call,) = case.sets("cpu", 1)

    def raises(call):
        raise RuntimeError("no kernel image")

    told = operation.checked(case, [call], {"it": operation.Contender(raises)}, "cpu")
    assert told == {"it": "failed: RuntimeError: no kernel image"}
    nan = spoiled(case.ours("cpu"), lambda call, found: found["q"].fill_(float("nan")))
    assert case.check(nan, call) == "wrong: a head of q has relative error inf"


def test_disagreement_tells_bits_and_shapes():
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    assert agreement.disagreement({"x": x}, {"x": x.double()}, 1) == "ok"
    assert agreement.disagreement({"x": x}, {"x": x}, 1) == "ok"
    assert agreement.disagreement({"x": x.float()}, {"x": x}, 1) == "wrong: x has other bits"
    assert "has the shape (2, 8)" in agreement.disagreement({"x": x[:2]}, {"x": x}, 1)
    other = x.clone()
    other[0, 0] = torch.nextafter(other[0, 0], torch.tensor(9.0, dtype=x.dtype))
    assert agreement.disagreement({"x": other}, {"x": x}, 1) == "wrong: x has other bits"


# ---------------------------------------------------------------------------------------------------- Megatron-LM


SMALL = latent_attention.Latent("sbhd", tokens=6, heads=4, length=3, nope_dim=16, rotary_dim=8, value_dim=16)


@pytest.fixture(scope="module")
def megatron_kernels():
    """Megatron-LM's file, whose kernels run in the interpreter without tuning."""
    module = megatron.kernels()
    if INTERPRETED:
        for name in ("rotary_fwd_q_kernel", "rotary_bwd_q_kernel", "rotary_fwd_kv_kernel", "rotary_bwd_kv_kernel"):
            kernel = getattr(module, name)
            kernel.configs = kernel.configs[:1]
    return module


@pytest.mark.parametrize("seq_format", latent_attention.FORMATS)
@pytest.mark.parametrize("part", latent_attention.PARTS)
def test_ours_is_right(seq_format, part):
    case = replace(SMALL, seq_format=seq_format, part=part)
    for function in (case.ours("cpu"), case.separate("cpu")):
        assert case.check(function, case.sets("cpu")[0]) == "ok"


def test_the_view_moves_what_it_must():
    """By token and head the forward reads N and writes N + R features, and the V of a copy come on top twice."""
    for part, copied in ((latent_attention.VIEW, 0), ("k and v", 16)):
        case = replace(SMALL, part=part)
        kv, k_pe = case.inputs(case.normal("cpu"))
        key, value = case.ours("cpu")(kv, k_pe)
        assert (value._base is kv) == (not copied)
        moved = case.must_move("forward", case.normal("cpu"))
        assert 2 * moved.numel() == 6 * 4 * (16 + copied) + k_pe.numel() + key.numel() + 6 * 4 * copied
        backward = case.must_move("backward", case.normal("cpu"))
        assert 2 * backward.numel() == kv.numel() + k_pe.numel() + key.numel() + value.numel()


@pytest.mark.peers
@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter; on a GPU test_gpu_real_ops runs the kernels")
@pytest.mark.parametrize("seq_format", latent_attention.FORMATS)
@pytest.mark.parametrize("part", latent_attention.PARTS[:2])
def test_megatrons_kernels_are_right(seq_format, part, megatron_kernels):
    # The interpreter negates the bits of bfloat16 as an integer, which Megatron-LM's backward meets.
    case = replace(SMALL, seq_format=seq_format, dtype=torch.float16, part=part)
    sets = case.sets("cpu")
    theirs = case.contenders(sets, "cpu")[latent_attention.MEGATRON]
    assert re.fullmatch("[0-9a-f]{64}", theirs.columns["sha256"]) and case.check(theirs.run, sets[0]) == "ok"


@pytest.mark.parametrize("part", latent_attention.PARTS)
@pytest.mark.parametrize("wrong", ["result", "gradient", "moved"])
def test_a_wrong_rotation_of_latent_attention_is_caught(part, wrong):
    case = replace(SMALL, part=part)
    right = case.ours("cpu")

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            return 2 * grad

    def function(*inputs):
        results = list(right(*inputs))
        first = results[0]
        if wrong == "gradient":
            results[0] = Doubled.apply(first)
        else:
            at = 0 if wrong == "moved" else -1
            change = torch.zeros_like(first)
            change[..., at] = 0.5
            results[0] = first + change
        return results

    told = case.check(function, case.sets("cpu")[0])
    assert told.startswith("wrong: ") and ("kept" if wrong == "moved" else "") in told


def test_the_table_of_latent_attention(on_cpu, monkeypatch):
    def absent(version=None):
        raise packages.NotInstalled("megatron-core not installed")

    monkeypatch.setattr(megatron, "kernels", absent)
    monkeypatch.setattr(latent_attention, "Latent", lambda fmt, part, **_: replace(SMALL, seq_format=fmt, part=part))
    frame = latent_attention.latent_attention(device="cpu")
    sizes = ("seq_format", "tokens", "heads", "nope_dim", "rotary_dim", "value_dim", "sequences", "dtype")
    assert set(frame.columns) == {*sizes, "part", "direction", *TIMES}
    absent_rows = frame[frame.contender == latent_attention.MEGATRON]
    cells = sum(map(len, latent_attention.SIZES.values()))
    assert len(absent_rows) == 4 * cells and set(absent_rows.status) == {"not run: megatron-core not installed"}
    assert (frame[frame.contender == latent_attention.OURS].status == "ok").all()
    apart = frame[frame.contender == SAME_PLACES]
    assert set(apart.part) == {"q"} and len(apart) == cells * len(DIRECTIONS)
    shown = Shown(None)
    shown.record = lambda study: Record(study, frame, {})
    names = run(monkeypatch, "07", "latent-times", instead={"shown": shown})
    of_the_view, apart = names.first, *names.others
    assert states(of_the_view, 1.00, 1.00) and states(apart, 1.00)


# ------------------------------------------------------------------------------------------- loading of libraries


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A package with a library that registers nothing, where ``python -m ropelab.study peers`` would put it."""
    file = tmp_path / "vllm-1.0" / torch_library.LIBRARIES["vllm"].files[0]
    file.parent.mkdir(parents=True)
    file.write_bytes(b"library")
    listed = [fetch_peers.Package("vllm", "1.0", "", 0, "", [])]
    monkeypatch.setattr(packages, "_entries", lambda: listed)
    find = packages.locate
    monkeypatch.setattr(packages, "locate", lambda package, version=None: find(package, version, tmp_path))
    torch_library._loaded.cache_clear()
    yield file
    torch_library._loaded.cache_clear()


def test_what_cannot_be_loaded_is_not_installed(library):
    with pytest.raises(packages.NotInstalled, match=r"vllm 1\.0 cannot be loaded: [^/]*$"):
        torch_library.operators("vllm")
    library.unlink()
    with pytest.raises(packages.NotInstalled, match="vllm 1.0 has no vllm/_C_stable_libtorch.abi3.so or "):
        torch_library.operators("vllm")
    with pytest.raises(packages.NotInstalled, match="vllm 2.0 not installed"):
        torch_library.operators("vllm", "2.0")
    with pytest.raises(packages.NotInstalled, match="sglang-kernel not installed"):
        torch_library.operators("sglang")
