"""The context of a call makes no difference: capture, threads, streams, devices, fork, hooks, determinism."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import ropelab
from tests.support import draw

pytestmark = pytest.mark.gpu


def inputs(device="cuda", seq_len=64, head_dim=64, dtype=torch.float32):
    q, k = (draw(2, seq_len, heads, head_dim, device=device, dtype=dtype) for heads in (8, 2))
    return q, k, *ropelab.rotary_table(256, head_dim, device=device)


FIRST_CALL = """
import torch, ropelab
q, k, g = (torch.randn(2, 64, heads, 64, device="cuda") for heads in (8, 2, 8))
weight = torch.ones(64, device="cuda")
cos, sin = ropelab.rotary_table(64, 64, device="cuda")
cu_seqlens = torch.tensor([0, 40, 128], device="cuda")
frequencies = ropelab.rotary_frequencies(64, device="cuda")
torch.empty(1, device="cuda").normal_()
torch.cuda.synchronize()

def calls():
    packed = ropelab.PackedSequences(cu_seqlens, 128)
    leaf = q.detach().requires_grad_()
    y = ropelab.apply_rope(leaf, cos=cos, sin=sin)
    return [
        *ropelab.apply_rope(q, k, cos=cos, sin=sin),
        *ropelab.apply_rope(q, k, frequencies=frequencies, offsets=3),
        ropelab.apply_rope(q.flatten(0, 1), cos=cos, sin=sin, seq_format="thd", positions=packed.positions % 64),
        *ropelab.apply_qk_norm_rope(q, k, weight, weight, cos=cos, sin=sin),
        *torch.autograd.grad(y, leaf, g),
    ]

graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = calls()
q.normal_(), k.normal_()
graph.replay()
for actual, expected in zip(captured, calls(), strict=True):
    assert torch.equal(actual, expected)
"""


@pytest.mark.process
def test_the_first_call_of_a_process_is_within_a_capture(tmp_path):
    """Every kernel is compiled and loaded while a CUDA graph is captured; nothing is found on disk."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", FIRST_CALL], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_threads_that_all_call_first():
    q, k, cos, sin = inputs(head_dim=48)
    expected = ropelab.apply_rope(q.cpu(), k.cpu(), cos=cos.cpu(), sin=sin.cpu(), inverse=True)
    start, wrong = threading.Barrier(8), []

    def work(stream):
        start.wait()
        with torch.cuda.stream(stream):
            for _ in range(20):
                ys = ropelab.apply_rope(q, k, cos=cos, sin=sin, inverse=True)
            stream.synchronize()
        wrong.extend(y for y, e in zip(ys, expected, strict=True) if not torch.equal(y.cpu(), e))

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(torch.cuda.Stream(),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.process
def test_a_forked_process_computes_on_the_cpu_and_refuses_the_gpu():
    """CUDA itself does not survive a fork: torch says so, and nothing hangs."""
    q, k, cos, sin = inputs()
    ropelab.apply_rope(q, k, cos=cos, sin=sin)
    on_cpu = [x.cpu() for x in (q, cos, sin)]
    expected = ropelab.apply_rope(on_cpu[0], cos=on_cpu[1], sin=on_cpu[2])
    child = os.fork()
    if child == 0:  # nothing of pytest may run here
        right = torch.equal(ropelab.apply_rope(on_cpu[0], cos=on_cpu[1], sin=on_cpu[2]), expected)
        try:
            ropelab.apply_rope(q, k, cos=cos, sin=sin)
            torch.cuda.synchronize()
            refused = False
        except RuntimeError:
            refused = True
        os._exit(0 if right and refused else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs in one machine")
def test_two_gpus_in_one_process():
    """Each call runs where its tensors are, whatever the current device, also with launches of the other GPU."""
    per_device = [inputs(f"cuda:{i}") for i in range(2)]
    weight = [torch.ones(64, device=f"cuda:{i}") for i in range(2)]
    for _ in range(3):
        for current in range(2):
            with torch.cuda.device(current):
                for i, (q, k, cos, sin) in enumerate(per_device):
                    leaves = q.detach().requires_grad_(), k.detach().requires_grad_()
                    ys = ropelab.apply_rope(*leaves, cos=cos, sin=sin, offsets=torch.tensor([3, 5], device=q.device))
                    grads = torch.autograd.grad(ys, leaves, ys)
                    normed = ropelab.apply_qk_norm_rope(q, k, weight[i], weight[i], cos=cos, sin=sin)
                    packed = ropelab.PackedSequences(torch.tensor([0, 40, 128], device=q.device), 128)
                    assert {y.device.index for y in (*ys, *grads, *normed, packed.positions)} == {i}
                    assert torch.cuda.current_device() == current
                    on_cpu = ropelab.apply_rope(
                        q.cpu(), k.cpu(), cos=cos.cpu(), sin=sin.cpu(), offsets=torch.tensor([3, 5])
                    )
                    for y, e in zip(ys, on_cpu, strict=True):
                        assert torch.equal(y.cpu(), e)


def test_a_stream_of_its_own_orders_the_call():
    """The call waits for what its stream does before it, and for nothing else."""
    q, _, cos, sin = inputs(seq_len=256)
    new, stream = torch.randn_like(q), torch.cuda.Stream()
    expected = ropelab.apply_rope(new, cos=cos, sin=sin)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        q.copy_(new)
        y = ropelab.apply_rope(q, cos=cos, sin=sin)
    stream.synchronize()
    assert torch.equal(y, expected)


def test_saved_tensors_wait_on_the_cpu():
    q, k, cos, sin = inputs()
    leaves = q.requires_grad_(), k.requires_grad_()
    positions = torch.randint(-200, 200, (64,), device="cuda")
    ys = ropelab.apply_rope(*leaves, cos=cos, sin=sin, positions=positions)
    expected = torch.autograd.grad(ys, leaves, ys)
    with torch.autograd.graph.save_on_cpu():
        ys = ropelab.apply_rope(*leaves, cos=cos, sin=sin, positions=positions)
    for a, e in zip(torch.autograd.grad(ys, leaves, ys), expected, strict=True):
        assert torch.equal(a, e)


def test_deterministic_mode_raises_and_changes_nothing():
    q, k, cos, sin = inputs()
    leaves = [x.requires_grad_() for x in (q, k, cos, sin)]
    results = []
    for deterministic in (False, True, True):
        torch.use_deterministic_algorithms(deterministic)
        ys = ropelab.apply_rope(*leaves[:2], cos=cos, sin=sin, offsets=torch.tensor([3, 5], device="cuda"))
        results.append((*ys, *torch.autograd.grad(ys, leaves, [torch.ones_like(y) for y in ys])))
    for one, two in zip(*results[1:], strict=True):
        assert torch.equal(one, two)
    for one, two in zip(results[0][:4], results[1][:4], strict=True):  # sums over tokens may differ in their order
        assert torch.equal(one, two)


def test_compiled_in_place_on_views_by_inductor():
    """The shapes are dynamic: Inductor then hands an operator the wrong place of a view (pytorch#198068)."""

    def rope(qkv, cos, sin):
        q, k, _ = qkv.unbind(2)
        ropelab.apply_rope(q, k, cos=cos, sin=sin, inplace=True)
        ropelab.apply_rope(qkv[:, :, 2], cos=cos, sin=sin, inplace=True)
        return qkv * 1

    torch._dynamo.reset()
    compiled = torch.compile(rope, fullgraph=True, dynamic=True)
    for seq_len in (32, 47):
        cos, sin = ropelab.rotary_table(seq_len, 64, device="cuda")
        qkv = torch.randn(2, seq_len, 3, 4, 64, device="cuda")
        eager, traced = qkv.clone(), qkv.clone()
        expected, actual = rope(eager, cos, sin), compiled(traced, cos, sin)
        assert torch.equal(actual, expected) and torch.equal(traced, eager)


def test_offsets_near_the_end_of_int32():
    """No sum wraps around: beyond the tables is NaN, with int32 offsets too."""
    q, _, cos, sin = inputs(seq_len=8)
    for first in (2**31 - 4, -(2**31) + 1):
        offsets = torch.tensor([first, 0], dtype=torch.int32, device="cuda")
        y = ropelab.apply_rope(q, cos=cos, sin=sin, offsets=offsets)
        assert y[0].isnan().all() and not y[1].isnan().any()
    frequencies = ropelab.rotary_frequencies(64, device="cuda")
    offsets = torch.tensor([2**31 - 4, 0], dtype=torch.int32, device="cuda")
    y = ropelab.apply_rope(q, frequencies=frequencies, offsets=offsets)
    assert y[0, 4:].isnan().all() and not y[0, :3].isnan().any() and not y[1].isnan().any()
