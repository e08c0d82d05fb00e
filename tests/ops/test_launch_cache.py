"""Calls that were prepared before give what they would give if nothing were remembered."""

import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

import ropelab
from ropelab.call import operation
from ropelab.kernels import INTERPRETED, launch
from ropelab.kernels.choices import Choices, plain
from tests.conftest import HAS_GPU
from tests.support import forget

DTYPES = torch.bfloat16, torch.float16, torch.float32, torch.float64


def placed(numbers: torch.Tensor, offset: int, gap: int) -> torch.Tensor:
    """``numbers`` in memory that starts ``offset`` elements behind a multiple of 16 bytes, ``gap`` between rows."""
    *rows, width = numbers.shape
    count = numbers[..., 0].numel()
    buffer = numbers.new_zeros(offset + count * (width + gap) + 16)
    view = buffer[offset : offset + count * (width + gap)].view(*rows, width + gap)[..., :width]
    return view.copy_(numbers)


class Calls:
    """Random calls out of few shapes, so that many find a launch that others have prepared.

    Each tensor starts at an address of its own choice: a multiple of 16 bytes or not. In half of the calls all
    addresses are multiples of 16 bytes.
    """

    def __init__(self, seed: int, device: str):
        self.random, self.device = random.Random(seed), device
        self.generator = torch.Generator().manual_seed(seed)

        self.shapes = [self._shape() for _ in range(4)]

    def _shape(self) -> SimpleNamespace:
        r = self.random
        head_dim, table_width = r.choice([(16, 8), (16, 4), (20, 8)])
        options = {"layout": r.choice(["split_half", "interleaved"])}
        norm = r.random() < 0.4
        if not norm:
            options |= {"inverse": r.random() < 0.5, "inplace": r.random() < 0.3}
        return SimpleNamespace(
            norm=norm, dtype=r.choice(DTYPES), index_dtype=r.choice([torch.int32, torch.int64]), head_dim=head_dim,
            table_width=table_width, seq_format=r.choice(["bshd", "sbhd", "bhsd", "thd"]), seq_len=r.choice([1, 3]),
            where=r.choice(["rows", "positions", "offsets"]), options=options,
        )  # fmt: skip

    def draw(self) -> SimpleNamespace:
        """A call: tensors (freshly placed) and options. Calls of one shape differ in strides."""
        shape, gap = self.random.choice(self.shapes), self.random.choice([0, 0, 16])
        self.unaligned = self.random.choice([0, 0, 0.2, 0.5])
        sizes = {"b": 2, "s": shape.seq_len, "t": shape.seq_len, "d": shape.head_dim}
        tensors = [
            self._numbers([sizes.get(axis, heads) for axis in shape.seq_format], shape.dtype, gap) for heads in (2, 1)
        ]
        tables = [self._numbers([9, shape.table_width], torch.float32) for _ in range(2)]
        options = {"seq_format": shape.seq_format, **shape.options}
        if shape.where == "positions":
            options["positions"] = self._integers([shape.seq_len], shape.index_dtype)
        if shape.where == "offsets":
            options["offsets"] = self._integers([1 if shape.seq_format == "thd" else 2], shape.index_dtype)
        if shape.norm:
            tensors += [self._numbers([shape.head_dim], torch.float32) for _ in range(2)]
        return SimpleNamespace(tensors=tensors, tables=tables, options=options, norm=shape.norm)

    def _numbers(self, shape, dtype, gap=0) -> torch.Tensor:
        numbers = torch.randn(shape, generator=self.generator).to(self.device, dtype)
        return placed(numbers, self._offset(dtype), gap)

    def _integers(self, shape, dtype) -> torch.Tensor:
        numbers = torch.randint(0, 6, shape, generator=self.generator).to(self.device, dtype)
        return placed(numbers, self._offset(dtype), 0)

    def _offset(self, dtype) -> int:
        """Elements behind a multiple of 16 bytes."""
        return self.random.randrange(1, 16 // dtype.itemsize) if self.random.random() < self.unaligned else 0


def results(call: SimpleNamespace) -> list[torch.Tensor]:
    """Outputs, and the gradients where the call is not in place."""
    cos, sin = call.tables
    if call.options.get("inplace"):
        xs = [x.as_strided(x.shape, x.stride(), x.storage_offset()) for x in call.tensors]
        return list(ropelab.apply_rope(*xs, cos=cos, sin=sin, **call.options))
    leaves = [x.detach().requires_grad_() for x in call.tensors]
    function = ropelab.apply_qk_norm_rope if call.norm else ropelab.apply_rope
    ys = function(*leaves, cos=cos, sin=sin, **call.options)
    return [*ys, *torch.autograd.grad(ys, leaves, [torch.ones_like(y) for y in ys])]


def copied(call: SimpleNamespace) -> SimpleNamespace:
    """The same call on tensors of their own at addresses like those of ``call``."""

    def like(x):
        storage = torch.empty(x.untyped_storage().nbytes() // x.itemsize, dtype=x.dtype, device=x.device)
        return storage.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(x)

    options = {name: like(x) if isinstance(x, torch.Tensor) else x for name, x in call.options.items()}
    return SimpleNamespace(
        tensors=[like(x) for x in call.tensors], tables=[like(x) for x in call.tables], options=options, norm=call.norm
    )


def check_sequences(monkeypatch, device: str, seed: int, count: int) -> None:
    """Compare ``count`` calls bit for bit: on a cache that earlier calls filled, and on an empty cache."""
    calls = Calls(seed, device)
    forget(monkeypatch)
    for number in range(count):
        call = calls.draw()
        again = copied(call)
        kept = operation.prepared_calls
        actual = results(call)
        forget(monkeypatch)
        expected = results(again)
        monkeypatch.setattr(operation, "prepared_calls", kept)
        for a, e in zip(actual, expected, strict=True):
            assert torch.equal(a, e), f"call {number} of seed {seed}"


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


@pytest.mark.skipif(not INTERPRETED, reason="on a GPU the test runs in a process of its own")
def test_random_sequences_of_calls(monkeypatch):
    check_sequences(monkeypatch, "cpu", seed=1, count=20)


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter; on a GPU another test compares the bits")
@pytest.mark.parametrize("seed", range(5))
def test_launches_get_what_they_were_compiled_for(monkeypatch, seed):
    wrong = watch(monkeypatch)
    forget(monkeypatch)
    calls = Calls(seed, "cpu")
    for _ in range(200):
        results(calls.draw())
    assert not wrong
    monkeypatch.setattr(launch, "alignments", one_alignment_for_all)
    forget(monkeypatch)
    for _ in range(200):
        results(calls.draw())
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


def test_no_tensor_is_kept_alive(monkeypatch, device):
    """The cache holds the common properties of calls and none of their tensors."""
    import gc
    import weakref

    forget(monkeypatch)
    calls, alive = Calls(3, device), []
    for _ in range(12):
        call = calls.draw()
        results(call)
        alive += [weakref.ref(x) for x in (*call.tensors, *call.tables)]
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


@pytest.mark.process
@pytest.mark.gpu
def test_a_key_that_mixes_the_alignments_faults_on_a_gpu():
    done = in_a_process_of_its_own("1", "100", "mixed")
    assert done.returncode != 0 and "misaligned" in done.stdout + done.stderr, done.stdout + done.stderr


if __name__ == "__main__":
    first, number, *mixed = sys.argv[1:]
    with pytest.MonkeyPatch.context() as patch:
        if mixed:
            patch.setattr(launch, "alignments", one_alignment_for_all)
        check_sequences(patch, "cuda" if HAS_GPU else "cpu", int(first), int(number))
