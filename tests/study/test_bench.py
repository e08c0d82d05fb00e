"""Measuring, as far as it goes without a GPU: bytes, statistics, the peers' check, records, figures."""

import contextlib
import itertools
import json
import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

import ropelab
from ropelab.bench import copies, fetch_peers, launches, packages, peers, reached, records, staleness, timing
from ropelab.bench.names import PREFIX
from ropelab.bench.operation import compare, tidy
from ropelab.bench.rotation import PeerRotation
from ropelab.bench.unavailable import Unavailable
from ropelab.bench.workloads import DEEPSPEED_CELLS, DENSE_CELLS, DIRECTIONS, Workload
from ropelab.layout.pairing import LAYOUTS

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


# ----------------------------------------------------------------------------------------------------- timing


def test_quantiles():
    summary = timing.summarize([5, 1, 2, 4, 3, 6])
    assert summary == {"median_us": 3.5, "q20_us": 2.0, "q80_us": 5.0, "samples": 6}


def test_host_times_keep_what_fails():
    def broken():
        raise RuntimeError("no such kernel\nmore")

    x = torch.randn(200_000)
    contenders = {"right": lambda: lambda: x.sin(), "broken": broken}
    frame = timing.host_times(contenders, rounds=5, batch=3).set_index("contender")
    assert 0 < frame.q20_us["right"] <= frame.median_us["right"] and frame.samples["right"] == 5
    assert frame.status.to_dict() == {"right": "ok", "broken": "failed: RuntimeError: no such kernel"}
    assert np.isnan(frame.median_us["broken"])


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


@needs_gpu
def test_every_peer_at_hand_is_timed_or_says_why():
    cell = replace(DENSE_CELLS[3].workload, seq_len=64)
    frame = compare(PeerRotation(cell, peers.PEERS), rounds=3)
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


@pytest.mark.parametrize(
    "head_dim, layout, taken",
    [(64, "split_half", True), (80, "split_half", False), (96, "split_half", True), (80, "interleaved", True),
     (72, "interleaved", False), (320, "split_half", True), (100, "split_half", False)],
)  # fmt: skip
def test_flashinfer_is_not_given_heads_that_it_reads_past(head_dim, layout, taken, monkeypatch):
    operators = SimpleNamespace(apply_rope_with_cos_sin_cache=lambda positions, q, k, *rest, **options: (q, k))
    monkeypatch.setattr(peers.flashinfer, "module", lambda version: operators)
    peer = replace(PEERS["flashinfer"], bind=partial(PEERS["flashinfer"].bind, version="0"))
    case = replace(SMALL, head_dim=head_dim, rotary_dim=head_dim, layout=layout, dtype=torch.float16)
    with contextlib.nullcontext() if taken else pytest.raises(NotImplementedError, match="reads past q's end"):
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
    mutant = peers.Peer("mutant", bind, narrow=True)
    status = run_check(mutant, replace(SMALL, dtype=dtype)).status
    assert status.startswith("wrong: result has relative error")


def test_a_wrong_backward_is_caught_although_its_forward_is_right():
    mutant = peers.Peer("mutant", bind_wrong_backward)
    assert run_check(mutant, SMALL).status == "ok"
    status = run_check(mutant, replace(SMALL, direction="backward")).status
    assert status.startswith("wrong: gradient has relative error")


def test_a_peer_is_timed_in_the_direction_in_which_it_is_right(called_once):
    frame = compare(PeerRotation(SMALL, [peers.Peer("mutant", bind_wrong_backward)]), rounds=1, device="cpu")
    rows = frame[frame.contender == "mutant"].set_index("direction")
    assert rows.status["forward"] == "ok" and rows.median_us.notna().to_dict() == {"forward": True, "backward": False}
    assert rows.status["backward"].startswith("wrong: gradient has relative error")


def test_another_result_dtype_is_no_result():
    mutant = peers.Peer("mutant", lambda *_: lambda q, k: (q.double(), k.double()))
    with pytest.raises(TypeError, match="mutant: expected .*float32.*, got torch.float64"):
        run_check(mutant, SMALL)


def test_bound_is_tight_enough_to_catch_one_wrong_ulp_of_the_table():
    """The tables' last bits wrong by 4 units must show in float32 somewhere."""
    bind = lambda w, c, s: PEERS["ropelab"].bind(w, c * (1 + 2**-20), s * (1 + 2**-20))  # noqa: E731
    assert run_check(peers.Peer("mutant", bind), replace(SMALL, seq_len=64)).status.startswith("wrong")


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
    absent = peers.Peer("absent", lambda *_: None, package="no-such-package-ropelab")
    old = peers.Peer("old", lambda *_: None, package="torchembed", version="0.0.1")
    found, missing = peers.available((PEERS["hf_eager"], absent, old))
    assert [peer.name for peer in found] == ["hf_eager"]
    assert "no-such-package-ropelab" in missing["absent"] and "torchembed 0.0.1" in missing["old"]


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
        "kernels": reached.reached(["rotate_triton._rotate_kernel"]), "protocol": staleness.numbers("dense"),
    }  # fmt: skip
    written = records.write("dense", frame, tmp_path, **notes)
    read = records.load("dense", tmp_path)
    pd.testing.assert_frame_equal(read.frame, frame)
    assert read.provenance == json.loads(json.dumps(written.provenance, default=str))
    expected = {"utc", "command", "commit", "dirty", "gpu", "torch", "cuda", "triton", "python"}
    assert expected | {"study"} <= read.provenance.keys() and notes.items() <= read.provenance.items()
    assert not read.stale and read.footer.endswith(f"triton {records._short(read.provenance['triton'])}")


def test_a_missing_record_says_how_to_make_it(tmp_path):
    with pytest.raises(FileNotFoundError, match="no record of 'dense' .*make measure"):
        records.load("dense", tmp_path)


def test_missing_tools_leave_unknown(monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    assert records.environment()["commit"] == records.UNKNOWN


# ---------------------------------------------------------------------------------------------------- figures


def test_nothing_is_timed_beside_others():
    with timing.refused():
        for timer in (timing.gpu_times, timing.host_times):
            with pytest.raises(RuntimeError, match="a, b: nothing can be timed here"):
                timer({"a": None, "b": None})
    assert timing.gpu_times.__name__ == "gpu_times"


def test_a_failure_names_no_folders():
    error = RuntimeError("at /home/me/build/a-1.0/csrc/pos_enc.cuh:1262: 1/2 of ./here/it, and/or\nmore")
    assert timing.failure(error) == "failed: RuntimeError: at pos_enc.cuh:1262: 1/2 of ./here/it, and/or"
