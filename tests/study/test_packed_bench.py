"""The studies of the kernel family: their workloads, their models of other grids, and their tables."""

from dataclasses import replace

import pytest
import torch

import ropelab
from ropelab import reference
from ropelab.angles.frequencies import inverse_frequencies
from ropelab.bench import packages, packed, peers, studies, varlen_models
from ropelab.bench.operation import compare
from ropelab.bench.peers import liger
from ropelab.bench.qk_norm import QKNorm
from ropelab.bench.rotation import PeerRotation
from ropelab.bench.workloads import DIRECTIONS, Workload
from ropelab.kernels import INTERPRETED
from ropelab.layout import pairing
from ropelab.layout.pairing import LAYOUTS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = Workload("small", 2, 3, 4, 2, 16, 16, torch.float32, first_position=3)
PACKED = Workload("odd", 1, 11, 3, 0, 16, 16, torch.float32, seq_format="thd", lengths=(3, 0, 1, 5, 2, 0))


# -------------------------------------------------------------------------------------------------- workloads


def test_views_of_qkv_are_two_tensors_of_one_buffer():
    shape = replace(SMALL, storage="qkv")
    for b in shape.buffers(2, device="cpu"):
        assert b.q.shape == shape.shape(4) and b.k.shape == shape.shape(2)
        assert b.q.stride() == b.k.stride() == (3 * 8 * 16, 8 * 16, 16, 1)  # 4 + 2 heads, and 2 of v
        assert b.k.data_ptr() - b.q.data_ptr() == 4 * 16 * 4
        assert b.dq.is_contiguous() and b.dk.is_contiguous() and b.q.is_leaf and b.k.requires_grad
    assert shape.bytes == SMALL.bytes == 2 * 2 * 3 * 6 * 16 * 4
    assert (shape.columns["storage"], SMALL.columns["storage"]) == ("qkv", "contiguous")


def test_packed_workloads_know_where_their_sequences_are():
    assert PACKED.cu_seqlens("cpu").tolist() == [0, 3, 3, 4, 9, 11, 11]
    assert PACKED.cu_seqlens("cpu").dtype == torch.int32
    assert PACKED.positions("cpu").tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4, 0, 1]
    assert SMALL.positions("cpu") is None
    (b,) = PACKED.buffers(device="cpu")
    assert b.q.shape == (11, 3, 16) and b.k is None and PACKED.bytes == 2 * 11 * 3 * 16 * 4


@pytest.mark.parametrize(
    "change, message",
    [
        ({"storage": "kv"}, r"storage: expected one of \('contiguous', 'qkv'\), got 'kv'"),
        ({"storage": "qkv", "seq_format": "sbhd"}, "storage: expected bshd and a k for 'qkv', got sbhd, 2 k heads"),
        ({"storage": "qkv", "k_heads": 0}, "storage: expected bshd and a k for 'qkv', got bshd, 0 k heads"),
        ({"lengths": (3,)}, "lengths: expected no lengths without thd, got a sum of 3, batch 2"),
        ({"seq_format": "thd"}, "lengths: expected a sum of 3 and batch 1, got a sum of 0, batch 2"),
        ({"seq_format": "thd", "batch": 1, "lengths": (2, 2)}, "lengths: expected a sum of 3 .* got a sum of 4"),
    ],
)
def test_workloads_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        replace(SMALL, **change)


def test_packings_hold_all_tokens():
    found = {shape.name: shape.lengths for shape in packed.packings()}
    assert {name: len(lengths) for name, lengths in found.items()} == {
        "n=1": 1, "n=8": 8, "n=128": 128, "n=1024": 1024, "n=2401": 2401, "one of 34,336 and 2,400 of 13": 2401,
    }  # fmt: skip
    for name, lengths in found.items():
        assert sum(lengths) == 65536 and min(lengths) > 0
        assert max(lengths) - min(lengths) <= 1 or name.startswith("one of")
    assert found["one of 34,336 and 2,400 of 13"][:2] == (34336, 13)


# ------------------------------------------------------------------------------------------------------ models


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("heads, head_dim", [(3, 16), (9, 34)])
@pytest.mark.parametrize("model", [varlen_models.legacy_grid, varlen_models.token_linear])
def test_models_of_other_grids_are_right(model, heads, head_dim, layout, inverse):
    x = torch.randn(PACKED.seq_len, heads, head_dim, device=DEVICE)
    angles = torch.outer(torch.arange(7), inverse_frequencies(head_dim, 10000.0)).float().to(DEVICE)
    wide = pairing.join(angles, angles, layout)
    y = model(x, wide, PACKED.cu_seqlens(DEVICE), interleaved=layout == "interleaved", inverse=inverse)
    where = {"seq_format": "thd", "positions": PACKED.positions(DEVICE)}
    expected = reference.rotate(x, angles.cos(), angles.sin(), layout=layout, inverse=inverse, **where)
    # Roundings of the cosine (2 ulp on the GPU), of two products and their sum.
    bound = 8 * torch.finfo(torch.float32).eps * torch.cat(pairing.pairs(x.double().abs(), layout), -1).max()
    assert (y.double() - expected).abs().max() <= bound


ON_A_GPU = {"flash_attn", "TransformerEngine 2.18", "TransformerEngine 2.20"}


def small_checks(contenders, shape, direction):
    """Name -> outcome of the check every contender must pass."""
    shape = replace(shape, direction=direction)
    (buffers,) = shape.buffers(device=DEVICE)
    found, _ = peers.available(tuple(contenders))
    return {
        peer.name: peers.check(peer, peer.bind(shape, buffers.cos, buffers.sin), shape, buffers).status
        for peer in found
        if direction in peer.directions and not (peer.name in ON_A_GPU and DEVICE == "cpu")
    }


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_packed_contenders_pass_the_check(layout, direction):
    outcome = small_checks(packed.contenders(), replace(PACKED, layout=layout), direction)
    expected = {"ropelab", "token-linear, reads twice", "legacy grid"}
    assert set(outcome) - ON_A_GPU == expected | ({"ropelab with positions"} if direction == "forward" else set())
    assert set(outcome.values()) == {"ok"}


def test_the_check_looks_at_the_positions_of_packed_tokens():
    """Counting on across sequences, or reading one position too far, is wrong."""
    shifted = replace(PACKED, lengths=(4, 0, 0, 5, 2, 0))
    (peer,) = (peer for peer in packed.contenders() if peer.name == "ropelab")
    mutant = replace(peer, bind=lambda workload, cos, sin: peer.bind(shifted, cos, sin))
    assert small_checks([mutant], PACKED, "forward")["ropelab"].startswith("wrong: result has relative error")


def test_in_place_rotates_views_of_qkv():
    names = {"ropelab", "ropelab in place", "hf_eager"}
    contenders = [peer for peer in peers.PEERS if peer.name in names]
    assert small_checks(contenders, replace(SMALL, storage="qkv"), "forward") == dict.fromkeys(names, "ok")


# ------------------------------------------------------------------------------------------------------ tables


@pytest.mark.parametrize("wrong", ["weights", "layout", "gradient"])
def test_a_wrong_norm_or_rotation_is_caught(torch_backend, wrong):
    case = QKNorm(SMALL, count=1)
    ((buffers, learned),) = case.sets("cpu")
    options = {"cos": buffers.cos, "sin": buffers.sin, "layout": "interleaved" if wrong == "layout" else "split_half"}

    def rotate(q, k, q_weight, k_weight):
        if wrong == "weights":
            q_weight, k_weight = k_weight, q_weight
        q, k = ropelab.apply_qk_norm_rope(q, k, q_weight, k_weight, **options)
        return q, k * 2 - k.detach() if wrong == "gradient" else k

    what = "dk" if wrong == "gradient" else "q"
    assert case.check(rotate, (buffers, learned)).startswith(f"wrong: {what} has relative error")


def test_what_cannot_run_stays_in_the_table(called_once):
    def bind(workload, cos, sin):
        raise NotImplementedError("contiguous tensors only\nand more")

    frame = compare(PeerRotation(replace(SMALL, storage="qkv"), [peers.Peer("picky", bind)]), rounds=1, device="cpu")
    picky = frame[frame.contender == "picky"]
    assert picky.direction.tolist() == list(DIRECTIONS)
    assert set(picky.status) == {"failed: NotImplementedError: contiguous tensors only"}


def test_liger_is_not_called_where_it_would_write_beside_the_tensor():
    """One token of each sequence: bshd has the distance between rows at the axis of tokens, sbhd and bhsd do not."""
    q = torch.zeros(8, 1, 4, 16)
    liger.require_rows(q.transpose(1, 2))  # bshd
    for x in (q.view(1, 8, 4, 16).permute(1, 2, 0, 3), torch.zeros(8, 4, 1, 16)):  # sbhd, bhsd
        with pytest.raises(NotImplementedError, match="from an axis of one token"):
            liger.require_rows(x)
        liger.require_rows(x[:1])
    liger.require_rows(torch.zeros(2, 8, 4, 16).permute(1, 2, 0, 3))  # sbhd with two tokens is copied


@pytest.mark.peers
@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter, which checks the addresses of a launch")
def test_liger_itself_writes_beside_the_tensor():
    """The package's kernel, run: with one token in each of 8 sequences, bshd is right and sbhd leaves the tensors."""
    version, _ = packages.locate("liger-kernel")
    kernel = packages.load_file("liger-kernel", version, "liger_kernel/ops/rope.py").LigerRopeFunction
    cos, sin = torch.ones(1, 1, 16), torch.zeros(1, 1, 16)
    kernel.apply(*(torch.zeros(8, 1, heads, 16).transpose(1, 2) for heads in (4, 2)), cos, sin)
    with pytest.raises(Exception, match="expected addresses within the tensors of the launch"):
        kernel.apply(*(torch.zeros(1, 8, heads, 16).permute(1, 2, 0, 3) for heads in (4, 2)), cos, sin)


# --------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.process
@pytest.mark.gpu
@pytest.mark.parametrize("study", ["formats", "packed", "few_tokens", "qk_norm", "memory"])
def test_studies_run(study):
    torch.use_deterministic_algorithms(False)  # which would fill fresh memory, in launches of its own
    frame = studies.STUDIES[study](smoke=True)
    # Liger takes the distance between rows from the axis of tokens, which has one token in this cell: a finding.
    lost = frame[frame.status.str.startswith(("wrong", "failed")) & (frame.contender != "liger")]
    assert lost.empty, lost[["contender", "status"]].to_dict("records")
    ours = frame[frame.contender.str.startswith("ropelab")]
    assert len(ours) and (ours.status == "ok").all(), ours[["contender", "status"]]
    if study == "memory":
        assert (ours.peak_bytes >= ours.result_bytes).all()
    else:
        assert (ours.median_us > 0).all() and (ours.fraction_of_copy > 0).all()
