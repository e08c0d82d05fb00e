"""The study of a decoding chain times right rotations only, on small chains without a GPU."""

from functools import partial

import pytest
import torch

import ropelab
from ropelab.bench import decode_chain, timing
from ropelab.bench.decode_chain import DEPENDENT, NONE, OURS, Chain, Decoding

SMALL = {"context": 16, "layers": 3, "width": 64, "q_heads": 4, "k_heads": 2, "head_dim": 16}


@pytest.fixture(autouse=True)
def in_torch_operations():
    with ropelab.use_backend("torch"):
        yield


@pytest.fixture
def chain() -> Chain:
    return Chain(Decoding(2, **SMALL), "cpu")


def test_only_a_right_rotation_passes(chain):
    rotations, _ = decode_chain.contenders(chain)
    assert chain.check(rotations[OURS]) == "ok"
    assert chain.check(rotations[NONE]).startswith("wrong: a head of q")

    def q_alone(projected):
        q, _ = chain.case.heads(projected)
        ropelab.apply_rope(q, cos=chain.cos, sin=chain.sin, offsets=chain.positions, inplace=True)

    assert chain.check(q_alone).startswith("wrong: a head of k")


def test_attention_reads_the_rotated_q(chain):
    rotations, _ = decode_chain.contenders(chain)
    with_rotation, without = (chain.step(rotations[name], 1) for name in (OURS, NONE))
    assert with_rotation.shape == (2, 4, 1, 16) and not torch.equal(with_rotation, without)


def test_the_table_of_the_study(monkeypatch):
    monkeypatch.setattr(decode_chain, "Decoding", partial(Decoding, **SMALL))
    with timing.stopped():
        frame = decode_chain.decode_chain(device="cpu")
    right = frame[frame.status == "ok"]
    assert set(right.contender) == {NONE, OURS} and set(right.batch) == set(decode_chain.BATCHES)
    assert set(frame.contender) == {NONE, OURS, DEPENDENT, "vllm", "sglang"}
    assert (right.groupby(["batch", "contender"]).captured.nunique() == 2).all() and right.median_us.notna().all()
    assert not frame.duplicated(["batch", "captured", "contender"]).any()
