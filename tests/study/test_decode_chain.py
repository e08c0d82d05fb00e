"""The study of a decoding chain times right rotations only, on small chains without a GPU."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

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


COMPILED = """
import torch
from ropelab.bench.decode_chain import dependent_launch
from ropelab.kernels import rotate_triton
from ropelab.kernels.rotation import Rotation
from ropelab.kernels.tensors import RotateTensors
from tests.compile.compile_kernel import compiled

for heads in ((32, 8), (28, 4)):
    q, k = (torch.empty(64, 1, h, 128, dtype=torch.bfloat16) for h in heads)
    table, positions = torch.empty(2048, 64), torch.empty(64, dtype=torch.int64)
    tensors = RotateTensors.of([q, k], [q, k], table, table, positions)
    launch = rotate_triton.plan_rotate(tensors, Rotation(128, offsets=True))
    plain, dependent = (compiled(one, (tensors, 0, 2048), 90) for one in (launch, dependent_launch(launch)))
    assert not plain.metadata.launch_pdl and "griddepcontrol" not in plain.asm["ptx"]
    assert dependent.metadata.launch_pdl
    ptx = dependent.asm["ptx"]
    wait = ptx.index("griddepcontrol.wait")
    assert 0 < wait < min(ptx.index("ld.global"), ptx.index("st.global"))
print("right")
"""


def test_a_dependent_launch_waits_before_it_reads():
    """A process without the interpreter compiles the kernels for sm_90."""
    root = Path(__file__).parents[2]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join((str(root), *sys.path))
    done = subprocess.run([sys.executable, "-c", COMPILED], env=environment, cwd=root, capture_output=True, text=True)
    assert done.stdout == "right\n", done.stderr
