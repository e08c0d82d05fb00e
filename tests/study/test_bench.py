"""Measuring, as far as it goes without a GPU: bytes, statistics, the peers' check, records, figures."""

import itertools
import json
import sys
import sysconfig
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
import torch

import ropelab
from ropelab.bench import copies, fetch_peers, launches, packages, peers, protocols, reached, records, timing
from ropelab.bench.compare import bind, checked, compare, tidy
from ropelab.bench.copies import PREFIX
from ropelab.bench.host import NO_GRAD, RECORDED
from ropelab.bench.tile_sweep import candidate_tiles
from ropelab.bench.unavailable import Unavailable
from ropelab.bench.workloads import DEEPSPEED_CELLS, DENSE_CELLS, DIRECTIONS, Workload
from ropelab.layout import pairing
from ropelab.layout.pairing import LAYOUTS
from ropelab.study.documents.deepspeed import table_figures
from ropelab.study.faults import correct
from ropelab.study.plots import registry as figures
from ropelab.study.plots.panels import said
from ropelab.study.topics.performance import roofs

SMALL = Workload("small", 2, 5, 4, 2, 16, 16, torch.float32, first_position=3)
PEERS = {peer.name: peer for peer in peers.PEERS}


def needs_gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")(test))


# -------------------------------------------------------------------------------------------------- workloads


def test_bytes_are_one_read_and_one_write_of_q_and_k():
    for cell in DENSE_CELLS:
        small = replace(cell.workload, batch=1, seq_len=2)
        (b,) = small.buffers(device="cpu")
        assert small.bytes == 2 * sum(x.numel() * x.element_size() for x in b.inputs)
    assert DENSE_CELLS[0].workload.bytes == 2 * 4 * 4096 * 40 * 128 * 2
    assert {cell.bytes for cell in DEEPSPEED_CELLS if cell.dtype == torch.float32 and cell.seq_len == 2048} == {
        2 * 32 * 2048 * 128 * 4
    }


def test_buffers_differ_from_each_other_and_exceed_the_cache():
    cache = 10_000
    count = SMALL.cold_count(cache)
    sets = SMALL.buffers(count, "cpu")
    assert sum(x.numel() * x.element_size() for b in sets for x in b.inputs) >= 2 * cache
    assert not torch.equal(sets[0].q, sets[1].q)
    assert not torch.equal(sets[0].q, sets[0].dq)
    assert sets[0].cos is sets[1].cos


def test_no_workload_is_blind_to_the_rotation():
    """At position 0 the rotation is the identity, so some token of every workload must be elsewhere."""
    for workload in [*(cell.workload for cell in DENSE_CELLS), *DEEPSPEED_CELLS]:
        assert workload.first_position + workload.seq_len > 1


def test_cells_cover_both_layouts_and_directions():
    variants = [v for cell in DENSE_CELLS for v in cell.variants()]
    assert len(variants) == len({tuple(v.columns.items()) for v in variants}) == 32


# ----------------------------------------------------------------------------------------------------- timing


def test_quantiles():
    summary = timing.summarize([5, 1, 2, 4, 3, 6])
    assert summary == {"median_us": 3.5, "q20_us": 2.0, "q80_us": 5.0, "samples": 6}


def test_host_times_tell_slow_from_fast_and_keep_what_fails():
    def broken():
        raise RuntimeError("no such kernel\nmore")

    x = torch.randn(200_000)
    contenders = {"fast": lambda: x.dim, "slow": lambda: lambda: x.sin(), "broken": broken}
    frame = timing.host_times(contenders, rounds=5, batch=3).set_index("contender")
    assert frame.median_us["fast"] < frame.median_us["slow"]
    assert (frame.q20_us["slow"], frame.samples["slow"]) <= (frame.median_us["slow"], 5)
    assert frame.status.to_dict() == {
        "fast": "ok",
        "slow": "ok",
        "broken": "failed: RuntimeError: no such kernel",
    }
    assert np.isnan(frame.median_us["broken"])


def test_after_a_capture_that_failed_graphs_get_another_pool(monkeypatch):
    """The allocator refuses the pool of a capture that did not end, so later contenders would fail, too."""
    pools = iter(range(10))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(timing, "_replay", lambda graphs, *_: {name: [pool] for name, pool in graphs.items()})

    def capture(prepare, stream, memory, graph_ms):
        prepare()
        return memory

    def broken():
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(timing, "_graph", capture)
    contenders = {"first": list, "second": list, "broken": broken, "after it": list}
    found = timing.gpu_times(contenders).set_index("contender").median_us
    assert found["first"] == found["second"] != found["after it"]


@needs_gpu
def test_gpu_times_see_bytes_and_keep_what_fails():
    x = torch.randn(1 << 25, device="cuda")  # 128 MiB, beyond any L2

    def synchronizes():
        return [lambda: x[0].item()]  # not allowed during capture

    contenders = {
        "whole": lambda: [lambda: x.clone()],
        "half": lambda: [lambda: x[: 1 << 24].clone()],
        "broken": synchronizes,
        "after it": lambda: [lambda: x.clone()],
    }
    frame = timing.gpu_times(contenders, rounds=5).set_index("contender")
    assert frame.median_us["whole"] > frame.median_us["half"] > 0
    assert frame.status["broken"].startswith("failed: ")
    assert (frame.status.drop("broken") == "ok").all()


@needs_gpu
def test_a_contender_with_long_replays_takes_part_in_three_rounds():
    cycles = int(60e-3 * 1.98e9)  # at least 60 ms at the highest clock of an H100
    contenders = {
        "long": lambda: [partial(torch.cuda._sleep, cycles)],
        "short": lambda: [partial(torch.cuda._sleep, cycles // 10_000)],
    }
    frame = timing.gpu_times(contenders, rounds=5).set_index("contender")
    assert frame.samples.to_dict() == {"long": 3, "short": 5}
    assert frame.median_us["long"] > 100 * frame.median_us["short"]


def test_with_the_clock_stopped_no_result_is_checked():
    """Checks take memory and time, and the pass that compiles needs neither their results nor their kernels."""
    cell = replace(DENSE_CELLS[0].workload, batch=1, seq_len=2, q_heads=1, k_heads=1, head_dim=4, rotary_dim=4)
    (buffers,) = cell.buffers(device="cpu")
    wrong = peers.Peer("wrong", None, "returns its inputs")
    bound, outcome = {wrong: lambda q, k: (q, k)}, {}
    assert checked(bound, cell, buffers, outcome) == {} and outcome["wrong"].startswith("wrong: ")
    with timing.stopped():
        assert checked(bound, cell, buffers, {}) == bound


@needs_gpu
def test_every_peer_at_hand_is_timed_or_says_why():
    cell = replace(DENSE_CELLS[3].workload, seq_len=64)
    frame = compare(cell, peers.PEERS, rounds=3)
    expected = {peer.name for peer in peers.PEERS if peer.offers(cell)}
    forward = frame[frame.direction == "forward"]
    assert expected | set(copies.copies()) == set(forward.contender)
    timed = frame[frame.status == "ok"]
    assert timed.median_us.notna().all() and {"ropelab", "hf_eager", "hf_compiled"} <= set(timed.contender)
    wrong = frame[frame.status.str.startswith("wrong")]
    assert set(zip(wrong.contender, wrong.direction, strict=True)) <= {("torchembed 0.3.0", "backward")}
    assert not frame.status.str.startswith("failed").any()


@needs_gpu
def test_launches_and_memory_of_a_call():
    x = torch.randn(1 << 20, device="cuda")
    assert len(launches.kernel_names(lambda: x * 2 + 1)) == 2
    assert launches.peak_bytes(lambda: x * 2 + 1) == 2 * (4 << 20)


def test_fraction_of_copy_takes_the_fastest_copy():
    frame = pd.DataFrame({"contender": ["a", PREFIX + "1", PREFIX + "2"], "median_us": [4.0, 2.0, 3.0]})
    assert copies.with_fraction(frame).fraction_of_copy.tolist() == [0.5, 1.0, 2 / 3]


def test_torch_copies_copy():
    tensors = [torch.randn(3, 4), torch.randn(5)]
    for name, copy in copies.copies().items():
        if "Triton" not in name:
            assert all(torch.equal(a, b) and a is not b for a, b in zip(tensors, copy(tensors), strict=True))


# ------------------------------------------------------------------------------------------------------ peers


def run_check(peer: peers.Peer, workload: Workload) -> peers.Check:
    (buffers,) = workload.buffers(device="cpu")
    rotate = peer.bind(workload, buffers.cos, buffers.sin)
    return peers.check(peer, rotate, workload, buffers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", ["ropelab", "hf_eager", "complex"])
def test_right_peers_pass_in_every_format(name, direction, dtype):
    if dtype == torch.bfloat16 and name == "ropelab" and ropelab.kernels.INTERPRETED:
        pytest.skip("needs a GPU: the interpreter truncates bfloat16 instead of rounding")
    peer = PEERS[name]
    for layout, seq_format, k_heads in itertools.product(peer.layouts, ("bshd", "sbhd", "bhsd"), (0, 2)):
        case = replace(SMALL, layout=layout, seq_format=seq_format, k_heads=k_heads, direction=direction, dtype=dtype)
        outcome = run_check(peer, case)
        assert outcome.status == "ok", (case, outcome)


@pytest.mark.parametrize("name", ["hf_eager", "complex"])
def test_peers_leave_the_features_beyond_rotary_dim_alone(name):
    assert run_check(PEERS[name], replace(SMALL, rotary_dim=8, layout="interleaved")).status == "ok"


def at_hand(name: str) -> peers.Peer:
    (found, missing) = peers.available((PEERS[name],))
    if missing:
        raise Unavailable(missing[name])
    return found[0]


@pytest.mark.peers
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_transformers_own_functions_are_right(layout, direction):
    for seq_format in ("bshd", "sbhd", "bhsd"):
        case = replace(SMALL, layout=layout, seq_format=seq_format, direction=direction)
        assert run_check(at_hand("transformers"), case).status == "ok"


@pytest.mark.peers
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_rotary_embedding_torch_counts_in_the_dtype_of_q(direction):
    """The package is right in float32; in bfloat16 its positions are bfloat16 too, which has no 257."""
    peer = at_hand("rotary-embedding-torch")
    case = replace(SMALL, layout="interleaved", direction=direction)
    for fine in (case, replace(case, rotary_dim=8), replace(case, seq_format="bhsd", k_heads=0)):
        assert run_check(peer, fine).status == "ok"
    assert run_check(peer, replace(case, dtype=torch.bfloat16, first_position=0)).status == "ok"
    far = replace(case, dtype=torch.bfloat16, first_position=253)
    assert run_check(peer, far).status.startswith("wrong: ")


class FakeOperators:
    """The operators as the packages promise them, in torch, to see that the adapters call them as documented."""

    @staticmethod
    def apply_rope_with_cos_sin_cache(positions, query, key, head_size, cos_sin_cache, is_neox=True):
        assert cos_sin_cache.dtype == torch.float32 and positions.max() + 1 < len(cos_sin_cache)
        query, key = query.clone(), key.clone()
        FakeOperators.rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox)
        return query, key

    @staticmethod
    def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox):
        cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, -1)
        for x in (query, key):
            x0, x1 = pairing.pairs(x.view(len(x), -1, head_size)[..., : 2 * cos.shape[-1]], layout_of(is_neox))
            x0_before = x0.clone()
            x0.copy_(x0 * cos - x1 * sin)
            x1.copy_(x1 * cos + x0_before * sin)


def layout_of(is_neox: bool) -> str:
    return "split_half" if is_neox else "interleaved"


@pytest.mark.parametrize("name", ["flashinfer", "vllm", "sglang"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_adapters_call_as_documented(name, layout, monkeypatch):
    """These packages need a GPU; what is tested is the adapter."""
    monkeypatch.setattr(peers.flashinfer, "module", lambda version: FakeOperators)
    for module in (peers.vllm, peers.sglang_kernel):
        monkeypatch.setattr(module, "operators", lambda version: FakeOperators)
    peer = replace(PEERS[name], bind=partial(PEERS[name].bind, version="0"))
    whole = replace(SMALL, head_dim=64, rotary_dim=64)
    packed = replace(whole, batch=1, seq_len=7, seq_format="thd", lengths=(4, 3), first_position=0)
    for case in (whole, replace(whole, rotary_dim=32), packed):
        for direction in peer.directions:
            assert run_check(peer, replace(case, layout=layout, direction=direction)).status == "ok"
    with pytest.raises(NotImplementedError, match="takes tokens one after another"):
        run_check(peer, replace(whole, seq_format="bhsd"))


class FakeQuack:
    """``quack.rotary`` as the package promises it, in torch. All forms but the first work in place."""

    @staticmethod
    def apply_rotary_emb(
        x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=None, cu_seqlens=None, max_seqlen=None
    ):
        packed = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}

        def rotate(x, inverse):
            y = correct.flash_attn(x, cos, -sin if inverse else sin, interleaved, **packed)
            return x.copy_(y) if inplace else y

        return peers.differentiable(rotate)(x, None)[0]

    @staticmethod
    def apply_rotary_emb_qkv_(qkv, cos, sin, interleaved=False, *, num_heads_q):
        heads = (qkv.shape[2] + num_heads_q) // 2
        FakeQuack.apply_rotary_emb(qkv[:, :, :heads], cos, sin, interleaved, inplace=True)
        return qkv

    @staticmethod
    def apply_rotary_emb_kv_(kv, cos, sin, interleaved=False):
        FakeQuack.apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, inplace=True)
        return kv


@pytest.mark.parametrize("name", ["quack", "quack in place", "quack qkv", "quack kv"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_form_of_quack_is_called_as_documented(name, layout, monkeypatch):
    monkeypatch.setattr(peers.quack, "module", lambda version: FakeQuack)
    peer = replace(PEERS[name], bind=partial(PEERS[name].bind, version="0"))
    packed = replace(SMALL, batch=1, seq_len=7, seq_format="thd", lengths=(4, 3), first_position=0)
    views = replace(SMALL, storage="qkv")
    for case in (SMALL, replace(SMALL, seq_format="bhsd", k_heads=0), packed, views, replace(views, rotary_dim=8)):
        for direction in peer.directions:
            case = replace(case, layout=layout, direction=direction)
            assert not peer.offers(case) or run_check(peer, case).status == "ok"


def test_quack_needs_the_python_of_its_libraries(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 11, 0))
    with pytest.raises(packages.NotInstalled, match="need Python 3.12"):
        peers.quack.module("no such version")


@pytest.fixture
def flashinfer_package(tmp_path, monkeypatch):
    """A function of (version, source) that puts a package under ``build/peers``, and a GPU to be seen."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)

    def install(version: str, source: str) -> None:
        folder = tmp_path / f"flashinfer-python-{version}"
        (folder / "flashinfer").mkdir(parents=True)
        (folder / "flashinfer" / "__init__.py").write_text(f"__version__ = {version!r}")
        (folder / "flashinfer" / "rope.py").write_text(source)

    listed = [fetch_peers.Package("flashinfer-python", version, "", 0, "", []) for version in ("1.0", "2.0")]
    monkeypatch.setattr(packages, "_entries", lambda: listed)
    find = packages.locate
    monkeypatch.setattr(packages, "locate", lambda package, version=None: find(package, version, tmp_path))
    caches = (peers.flashinfer.compile_kernel, packages.modules_of)
    for cached in caches:
        cached.cache_clear()
    yield install
    for cached in caches:
        cached.cache_clear()


def test_each_flashinfer_compiles_its_own_kernel_once(flashinfer_package):
    source = """
import os
import flashinfer
compiled = []
def get_rope_module():
    compiled.append((flashinfer.__version__, os.environ["PATH"].split(os.pathsep)[0]))
"""
    for version in ("1.0", "2.0"):
        flashinfer_package(version, source)
    found = [peers.flashinfer.module(version) for version in ("1.0", "2.0", "1.0")]
    scripts = sysconfig.get_path("scripts")  # where pip puts ninja
    assert [rope.compiled for rope in found] == [[(version, scripts)] for version in ("1.0", "2.0", "1.0")]
    assert "flashinfer" not in sys.modules


def test_flashinfer_names_what_is_missing(flashinfer_package, monkeypatch):
    flashinfer_package("1.0", "import no_such_package_ropelab")
    with pytest.raises(packages.NotInstalled, match="flashinfer-python 1.0 needs no_such_package_ropelab"):
        peers.flashinfer.module("1.0")
    status = bind(SMALL, [PEERS["flashinfer"]], SMALL.buffers(device="cpu")[0])[1]
    assert status == {"flashinfer": "not run: flashinfer-python 1.0 needs no_such_package_ropelab"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(packages.NotInstalled, match="needs a GPU"):
        peers.flashinfer.module("1.0")


@pytest.mark.parametrize(
    "head_dim, layout, taken",
    [(64, "split_half", True), (80, "split_half", False), (96, "split_half", True), (80, "interleaved", True),
     (72, "interleaved", False), (320, "split_half", True), (100, "split_half", False)],
)  # fmt: skip
def test_flashinfer_is_not_given_heads_that_it_reads_past(head_dim, layout, taken, monkeypatch):
    monkeypatch.setattr(peers.flashinfer, "module", lambda version: FakeOperators)
    peer = replace(PEERS["flashinfer"], bind=partial(PEERS["flashinfer"].bind, version="0"))
    case = replace(SMALL, head_dim=head_dim, rotary_dim=head_dim, layout=layout, dtype=torch.float16)
    if taken:
        assert run_check(peer, case).status == "ok"
    else:
        with pytest.raises(NotImplementedError, match="reads past q's end"):
            run_check(peer, case)


def test_ropelab_in_place_overwrites():
    peer = PEERS["ropelab in place"]
    assert run_check(peer, SMALL).status == "ok"
    (buffers,) = SMALL.buffers(device="cpu")
    before = buffers.q.detach().clone()
    with torch.no_grad():
        (q, _) = peer.bind(SMALL, buffers.cos, buffers.sin)(buffers.q, buffers.k)
    assert q.data_ptr() == buffers.q.data_ptr() and not torch.equal(buffers.q, before)


class _ForwardAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rotate):
        ctx.rotate = rotate
        return rotate(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.rotate(grad), None


def bind_wrong_backward(workload, cos, sin):
    right = PEERS["ropelab"].bind(workload, cos, sin)
    return lambda q, k: tuple(_ForwardAgain.apply(x, lambda y: right(y, None)[0]) for x in (q, k))


def bind_other_layout(workload, cos, sin):
    (other,) = set(LAYOUTS) - {workload.layout}
    return PEERS["ropelab"].bind(replace(workload, layout=other), cos, sin)


def bind_nan(workload, cos, sin):
    return lambda q, k: (q * float("nan"), k)


def bind_shifted(workload, cos, sin):
    right = PEERS["ropelab"].bind(workload, cos.roll(1, 0), sin.roll(1, 0))
    return right


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("bind", [bind_other_layout, bind_nan, bind_shifted])
def test_wrong_results_are_caught(bind, dtype):
    mutant = peers.Peer("mutant", bind, "float32", narrow=True)
    status = run_check(mutant, replace(SMALL, dtype=dtype)).status
    assert status.startswith("wrong: result has relative error")


def test_a_wrong_backward_is_caught_although_its_forward_is_right():
    mutant = peers.Peer("mutant", bind_wrong_backward, "float32")
    assert run_check(mutant, SMALL).status == "ok"
    status = run_check(mutant, replace(SMALL, direction="backward")).status
    assert status.startswith("wrong: gradient has relative error")


def test_another_result_dtype_is_no_result():
    mutant = peers.Peer("mutant", lambda *_: lambda q, k: (q.double(), k.double()), "float32")
    with pytest.raises(
        TypeError, match=r"mutant: expected a result of torch.float32 \(2, 5, 4, 16\), got torch.float64"
    ):
        run_check(mutant, SMALL)


def test_bound_is_tight_enough_to_catch_one_wrong_ulp_of_the_table():
    """The tables' last bits wrong by 4 units must show in float32 somewhere."""
    bind = lambda w, c, s: PEERS["ropelab"].bind(w, c * (1 + 2**-20), s * (1 + 2**-20))  # noqa: E731
    assert run_check(peers.Peer("mutant", bind, "float32"), replace(SMALL, seq_len=64)).status.startswith("wrong")


def test_calls_run_once_per_set():
    peer = PEERS["hf_eager"]
    for direction in DIRECTIONS:
        workload = replace(SMALL, direction=direction)
        sets = workload.buffers(3, "cpu")
        rotate = peer.bind(workload, sets[0].cos, sets[0].sin)
        prepared = peers.calls(rotate, workload, sets)
        assert len(prepared) == 3
        for call, b in zip(prepared, sets, strict=True):
            for _ in range(2):  # a backward can be repeated on one forward
                for y, x in zip(call(), b.inputs, strict=True):
                    assert y.shape == x.shape


def test_missing_packages_are_listed_as_not_run(monkeypatch, tmp_path):
    monkeypatch.setattr(packages.locate, "__defaults__", (None, tmp_path))
    absent = peers.Peer("absent", lambda *_: None, "", package="no-such-package-ropelab")
    old = peers.Peer("old", lambda *_: None, "", package="torchembed", version="0.0.1")
    found, missing = peers.available((PEERS["hf_eager"], absent, old))
    assert [peer.name for peer in found] == ["hf_eager"]
    assert missing == {
        "absent": "not run: no-such-package-ropelab not installed",
        "old": "not run: torchembed 0.0.1 not installed",
    }


def test_untimed_contenders_stay_in_the_table():
    timed = pd.DataFrame({"contender": ["a"], "status": ["ok"], "median_us": [1.0]})
    frame = tidy(timed, SMALL.columns, {"b": "not run: not installed"})
    assert frame.status.tolist() == ["ok", "not run: not installed"]
    assert (frame.cell == "small").all() and (frame["bytes"] == SMALL.bytes).all()


# --------------------------------------------------------------------------------------------------- packages


def fake_package(root, version: str):
    folder = root / f"fakepeer-{version}" / "fakepeer"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise_if_imported = False\nfrom fakepeer.inner import VERSION\n")
    (folder / "inner.py").write_text(f"VERSION = {version!r}\n")


def test_two_versions_side_by_side(monkeypatch, tmp_path):
    for version in ("0.10.0", "0.9.1", "1.0.0"):
        fake_package(tmp_path, version)
    listed = [fetch_peers.Package("fakepeer", version, "", 0, "", []) for version in ("0.10.0", "0.9.1")]
    monkeypatch.setattr(packages, "_entries", lambda: listed)  # 1.0.0 is in no list
    assert list(packages.installations("fakepeer", tmp_path)) == ["0.9.1", "0.10.0"]
    monkeypatch.setattr(packages.locate, "__defaults__", (None, tmp_path))
    assert packages.locate("fakepeer")[0] == "0.10.0"
    for version in ("0.9.1", "0.10.0", "0.9.1"):
        with packages.imported("fakepeer", version, "fakepeer", ".inner") as module:
            import fakepeer

            assert fakepeer is module and fakepeer.VERSION == version
        assert "fakepeer" not in sys.modules and "fakepeer.inner" not in sys.modules
        assert packages.load_file("fakepeer", version, "fakepeer/inner.py").VERSION == version
    with pytest.raises(packages.NotInstalled, match="fakepeer 0.9.1 has no fakepeer/_triton.py"):
        packages.load_file("fakepeer", "0.9.1", "fakepeer/_triton.py")


# ---------------------------------------------------------------------------------------------------- records


@pytest.fixture
def frame():
    return pd.DataFrame({"contender": ["a", "b"], "median_us": [1.25, float("nan")], "status": ["ok", "failed: x"]})


def test_record_round_trip(tmp_path, frame):
    notes = {
        "parameters": {"rounds": 3}, "peers": {"liger-kernel 0.8.5": "3a1bb8c0"}, "not_run": {"liger": "not run"},
        "kernels": reached.reached(["rotate_triton._rotate_kernel"]), "protocol": protocols.numbers("dense"),
    }  # fmt: skip
    written = records.write("dense", frame, tmp_path, **notes)
    read = records.load("dense", tmp_path)
    pd.testing.assert_frame_equal(read.frame, frame)
    assert read.provenance == json.loads(json.dumps(written.provenance, default=str))
    expected = {
        "utc",
        "command",
        "commit",
        "dirty",
        "gpu",
        "torch",
        "cuda",
        "triton",
        "python",
    }
    assert expected | {"study"} <= read.provenance.keys() and notes.items() <= read.provenance.items()
    assert not read.stale and read.footer.endswith(f"triton {records._short(read.provenance['triton'])}")


def test_load_chooses_the_gpu(tmp_path, frame, monkeypatch):
    for name, utc in (("NVIDIA H200", "2026-01-02"), ("NVIDIA L4", "2026-01-01")):
        monkeypatch.setattr(records, "_gpu", lambda name=name: {"name": name})
        record = records.write("dense", frame, tmp_path)
        path = tmp_path / records.slug(name) / "dense.json"
        path.write_text(json.dumps(record.provenance | {"utc": utc}))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert records.load("dense", tmp_path).provenance["gpu"]["name"] == "NVIDIA H200"  # the latest
    assert records.load("dense", tmp_path, gpu="nvidia-l4").provenance["gpu"]["name"] == "NVIDIA L4"


def test_a_missing_record_says_how_to_make_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="no record of 'dense' .*make measure"):
        records.load("dense", tmp_path)


def test_missing_tools_leave_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    assert records.environment()["commit"] == records.UNKNOWN


# ---------------------------------------------------------------------------------------------------- figures


def synthetic(workloads, contenders, speed) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    rows = []
    for workload in workloads:
        copy_us = workload.bytes / 4.2e6 + 1
        for name in [*contenders, f"{PREFIX}a", f"{PREFIX}b"]:
            median = copy_us / speed.get(name, 1.0) * rng.uniform(1, 1.03)
            spread = {"median_us": median, "q20_us": 0.98 * median, "q80_us": 1.03 * median, "samples": 20}
            rows.append(workload.columns | {"contender": name, "status": "ok"} | spread)
    frame = pd.DataFrame(rows)
    copy = (
        frame[frame.contender.str.startswith(PREFIX)].groupby(["cell", "layout", "dtype", "direction"]).median_us.min()
    )
    keys = pd.MultiIndex.from_frame(frame[["cell", "layout", "dtype", "direction"]])
    return frame.assign(fraction_of_copy=copy.reindex(keys).to_numpy() / frame.median_us)


SPEED = {
    "ropelab": 0.98, "ropelab in place": 1.02, "hf_eager": 0.08, "hf_compiled": 0.63, "complex": 0.1,
    "torchembed 0.3.2": 0.2, "liger": 0.93, "flash_attn": 0.9, "eager": 0.1, "compile": 0.6,
    "torchembed": 0.5, "torchembed API": 0.3,
}  # fmt: skip


def dense_frame() -> pd.DataFrame:
    names = [name for name in SPEED if name in PEERS]
    frame = synthetic([v for cell in DENSE_CELLS for v in cell.variants()], names, SPEED)
    bars = {cell.workload.name: cell.bar for cell in DENSE_CELLS}
    failed = frame[frame.contender == "liger"].index[:2]
    frame.loc[failed, ["status", "median_us", "fraction_of_copy"]] = [
        "wrong: gradient has relative error 0.6",
        np.nan,
        np.nan,
    ]
    in_place = frame.contender.map(lambda name: name in PEERS and PEERS[name].in_place)
    return frame.assign(bar=frame.cell.map(bars), in_place=in_place)


def deepspeed_frame() -> pd.DataFrame:
    return synthetic(DEEPSPEED_CELLS, ["ropelab", "eager", "compile", "torchembed", "torchembed API"], SPEED)


def host_frame() -> pd.DataFrame:
    rows = []
    for name, layout, autograd in itertools.product(SPEED, LAYOUTS, (True, False)):
        if name not in PEERS or ("in place" in name and autograd):
            continue
        median = 20 / SPEED[name] + 13 * autograd
        rows.append({
            "contender": name, "layout": layout, "autograd": autograd, "status": "ok",
            "call": RECORDED if autograd else NO_GRAD,
            "median_us": median, "q20_us": 0.97 * median, "q80_us": 1.1 * median, "samples": 25,
        })  # fmt: skip
    return pd.DataFrame(rows)


def tile_frame() -> pd.DataFrame:
    rng = np.random.default_rng(1)
    rows = []
    for cell, layout in itertools.product(DENSE_CELLS, LAYOUTS):
        for i, tile in enumerate(candidate_tiles(cell.workload, "heads")):
            fraction = rng.uniform(0.6, 0.98)
            identity = {
                "cell": cell.workload.name,
                "seq_format": cell.workload.seq_format,
                "layout": layout,
                "chosen": i == 4,
                "status": "ok",
            }
            rows.append(identity | asdict(tile) | {"fraction_of_copy": fraction})
    return pd.DataFrame(rows)


PUBLISHED = pd.DataFrame(
    {
        "seq_len": [2048, 4096, 8192],
        "eager_ms": [4.0, 4, 4],
        "compile_ms": [2.0, 2, 2],
        "triton_ms": [1.0, 1, 1],
    }
)
DRAWINGS = {
    "published_speedups": lambda: table_figures.published_speedups(deepspeed_frame(), PUBLISHED, "footer"),
    "roofline": lambda: roofs.roofline(dense_frame().assign(gpu="a GPU"), "footer"),
    "speedups": lambda: roofs.speedups(dense_frame().assign(gpu="a GPU"), "footer"),
    "host_time": lambda: figures.host_time(host_frame(), "footer"),
    "tile_sweep": lambda: figures.tile_sweep(tile_frame(), "footer"),
}


@pytest.mark.parametrize("name", DRAWINGS)
def test_figures_draw(name, tmp_path):
    fig = DRAWINGS[name]()
    fig.savefig(tmp_path / "figure.png")
    assert any(text.get_text() == "footer" for text in fig.texts)


def test_figures_draw_from_the_records_of_a_smoke_run_without_packages():
    table = deepspeed_frame()
    table = table[(table.cell == table.cell[0]) & (table.dtype == "bfloat16")]
    table = table[~table.contender.str.startswith("torchembed")]
    table_figures.published_speedups(table, PUBLISHED)
    assert "not measured over the eager formula" in table_figures.speedups_sentence(table, PUBLISHED)
    dense = dense_frame()
    roofs.roofline(dense[(dense.cell == dense.cell[0]) & (dense.layout == "split_half")].assign(gpu="a GPU"))
    host = host_frame()
    figures.host_time(host[host.contender == "ropelab"])


def test_maps_and_roofs_of_every_gpu_follow_the_data():
    frame = pd.concat([dense_frame().assign(gpu=gpu) for gpu in ("A", "B")], ignore_index=True)
    frame.loc[frame.contender == "ropelab", "fraction_of_copy"] = 0.97
    assert said(roofs.roofline(frame)).startswith("A: ropelab runs at 0.97 of the best copy")
    peers = frame[frame.contender.isin(("ropelab", "hf_eager"))].assign(median_us=2.0)
    peers.loc[peers.contender == "ropelab", "median_us"] = 1.0
    drawn = roofs.speedups(peers)
    assert len(drawn.axes) == 2 and {text.get_text() for ax in drawn.axes for text in ax.texts} == {"2.00"}
    title = said(drawn)
    peers.loc[peers.index[0], "median_us"] = 3.0
    assert said(roofs.speedups(peers)) != title


def test_what_was_not_timed_is_named_in_the_figure():
    fig = roofs.roofline(dense_frame().assign(gpu="a GPU"))
    assert any("not shown: Liger, in place (wrong: gradient)" in text.get_text() for text in fig.texts)


def test_draw_all_reads_records(tmp_path):
    frames = {
        "dense": dense_frame(),
        "deepspeed_table": deepspeed_frame(),
        "host": host_frame(),
        "tiles": tile_frame(),
    }
    for study, table in frames.items():
        records.write(study, table, tmp_path / "records")
    files, missing = figures.draw_all(tmp_path / "figures", tmp_path / "records")
    drawn = [name for name, (needed, _) in figures.all_figures().items() if set(needed) <= frames.keys()]
    assert {file.stem for file in files} == set(drawn) and len(files) == 2 * len(drawn)
    assert all(file.stat().st_size > 0 for file in files)
    assert len(missing) == len(figures.all_figures()) - len(drawn) and all(
        "`make measure ONLY=" in line for line in missing
    )


def test_with_the_clock_stopped_each_contender_is_called_once():
    made = []
    prepared = {
        "sets": lambda: [partial(made.append, 1), partial(made.append, 2)],
        "host": lambda: partial(made.append, 3),
        "broken": lambda: 1 / 0,
    }
    with timing.stopped():
        frame = timing.gpu_times(prepared, rounds=7)
        assert timing.cache_bytes() == 1 and timing.gpu_us(partial(made.append, 4)) == 1.0
    assert made == [1, 3, 4]
    assert frame.status.tolist() == ["ok", "ok", "failed: ZeroDivisionError: division by zero"]
    assert timing.gpu_times.__name__ == "gpu_times"


def test_nothing_is_timed_beside_others():
    with timing.refused():
        for timer in (timing.gpu_times, timing.host_times):
            with pytest.raises(RuntimeError, match="a, b: nothing can be timed here"):
                timer({"a": None, "b": None})
    assert timing.gpu_times.__name__ == "gpu_times"


def test_a_failure_names_no_folders():
    error = RuntimeError("at /home/me/build/a-1.0/csrc/pos_enc.cuh:1262: 1/2 of ./here/it, and/or\nmore")
    assert timing.failure(error) == "failed: RuntimeError: at pos_enc.cuh:1262: 1/2 of ./here/it, and/or"
