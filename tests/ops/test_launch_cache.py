"""Calls that were prepared before give what they would give if nothing were remembered."""

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from ropelab.call import operation
from ropelab.kernels import INTERPRETED, launch
from ropelab.kernels.choices import Choices, plain
from tests.ops.specs import CASES, call_of, recorded, same, tensors
from tests.ops.test_table_bits import DEVICE, moved
from tests.support import forget


def drawn(seed: int, number: int) -> tuple[str, dict]:
    """An operator out of few, and a call of one shape, the same ones for the same numbers.

    Each tensor starts at a multiple of 16 bytes or not; some have gaps between rows.
    """
    cases, r = random.Random(seed).sample([case for case in CASES if case[1] != "each"], 4), random.Random(number)
    name, where = r.choice(cases)
    torch.manual_seed(number)
    call = call_of(name, where, device=DEVICE)
    others, share = moved(name, call, r.choice(("unaligned", "rows apart"))), r.choice((0, 0, 0.2, 0.5))
    return name, {key: others[key] if r.random() < share else x for key, x in call.items()}


def check_sequences(monkeypatch, seed: int, count: int) -> None:
    """Compare ``count`` calls bit for bit: on a cache that earlier calls filled, and on an empty cache."""
    forget(monkeypatch)
    for number in range(count):
        actual, kept = recorded(*drawn(seed, number)), operation.prepared_calls
        forget(monkeypatch)
        expected = recorded(*drawn(seed, number))
        monkeypatch.setattr(operation, "prepared_calls", kept)
        assert same(actual, expected), f"call {number} of seed {seed}"


def watch(monkeypatch) -> list[str]:
    """The launches that go wrong: a compiled kernel gets arguments for which Triton compiles another kernel.

    Nothing is launched: the interpreter compiles nothing, and is slow.
    """
    wrong: list[str] = []

    def compile_(self, tensors, numbers, aligned):
        compiled_for = specialization(tensors, numbers)

        def start(tensors, addresses, numbers):
            if (got := specialization(tensors, numbers)) != compiled_for:
                wrong.append(f"compiled for {compiled_for}, got {got}")

        return start

    monkeypatch.setattr(launch.Launch, "_compile", compile_)
    return wrong


def specialization(tensors, numbers) -> list:
    """All that Triton compiles a kernel for, tensor by tensor and number by number."""
    of_tensors = [None if x is None else (x.dtype, x.data_ptr() % 16 == 0) for x in tensors]
    return of_tensors + [-(2**31) <= x < 2**31 for x in numbers]


def one_alignment_for_all(addresses):
    """The key of the first version: all addresses as one number."""
    together = 0
    for address in addresses:
        together |= address
    return (together % 16 == 0,)


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter; on a GPU another test compares the bits")
@pytest.mark.parametrize("seed", range(5))
def test_launches_get_what_they_were_compiled_for(monkeypatch, seed):
    wrong = watch(monkeypatch)
    forget(monkeypatch)
    for number in range(150):
        recorded(*drawn(seed, number))
    assert not wrong
    monkeypatch.setattr(launch, "alignments", one_alignment_for_all)
    forget(monkeypatch)
    for number in range(150):
        recorded(*drawn(seed, number))
    assert wrong  # so this test sees a key that mixes the alignments


def test_a_kernel_knows_whether_all_addresses_are_multiples_of_16():
    seen = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **options: seen.append(plain(arguments[-1].ALIGNED))

    class Tensors(NamedTuple):
        x: torch.Tensor | None

    start = launch.Launch(Kernel(), (1, 1, 1), (), Tensors(None), Choices(), {}, torch.device("cpu"))
    x = torch.zeros(64, dtype=torch.bfloat16)
    for view in (x, x[8:], x[1:], x[8:], x[1:]):
        start((view,))
    assert seen == [True, True, False, True, False]


def test_caches_are_bounded():
    cache = operation.PreparedCalls(most=3)
    for number in range(10):
        cache.keep(number, str(number))
        assert [*cache] == [*range(10)][max(0, number - 2) : number + 1]
    cache.keep(None, "nothing")
    assert None not in cache


def test_no_tensor_is_kept_alive(monkeypatch):
    """The cache holds the common properties of calls and none of their tensors."""
    import gc
    import weakref

    forget(monkeypatch)
    alive = []
    for number in range(12):
        name, call = drawn(3, number)
        recorded(name, call)
        alive += [weakref.ref(x) for x in tensors(call).values()]
    del call
    gc.collect()
    assert not [x for x in alive if x() is not None]


def in_a_process_of_its_own(*arguments: str) -> subprocess.CompletedProcess:
    """Run the tests of launches as a program, since a fault of the GPU takes the process's context along."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "CUDA_LAUNCH_BLOCKING": "1"}
    command = [sys.executable, "-m", "tests.ops.test_launch_cache", *arguments]
    root = Path(__file__).parents[2]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment, cwd=root)


@pytest.mark.process
@pytest.mark.gpu
def test_random_sequences_of_calls_on_a_gpu():
    done = in_a_process_of_its_own("1", "100")
    assert done.returncode == 0, done.stdout + done.stderr


if __name__ == "__main__":
    first, number = sys.argv[1:]
    with pytest.MonkeyPatch.context() as patch:
        check_sequences(patch, int(first), int(number))
