"""The kernels of every operator have the bits of torch operations, in every memory, also where others prepared a call.

Tensors lie in storages of their own, whose other elements a call must not change.
"""

import itertools
import random

import pytest
import torch

import ropelab
from ropelab.kernels import HAS_TRITON, INTERPRETED
from tests.ops.specs import FORMS, OPERATORS, WHERE, call_of, copied, excess, recorded, same, tensors
from tests.support import forget

if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MEMORIES = ("unaligned", "rows apart", "features apart", "axes reversed", "expanded")


def placed(x: torch.Tensor, memory: str) -> torch.Tensor:
    """The numbers in a storage of their own that is full of 7: behind an address that is a multiple of 16 bytes, with
    gaps in every axis, with reversed axes, or with the first number of an axis in all its places.
    """

    def filled(*shape):
        return torch.full(shape, 7.0).to(x.device, x.dtype)

    if memory == "rows apart":
        view = filled(*(n + 1 for n in x.shape[:-1]), x.shape[-1])[tuple(slice(1, None) for _ in x.shape[:-1])]
    elif memory == "features apart":
        view = filled(*x.shape, 2)[..., 0]
    elif memory == "axes reversed":
        view = filled(*x.shape[::-1]).permute(*range(x.ndim)[::-1])
    elif memory == "heads first":
        view = filled(*x.shape[:-1][::-1], x.shape[-1]).permute(*range(x.ndim - 1)[::-1], x.ndim - 1)
    elif memory == "expanded":
        return x[:1].clone().expand(x.shape)
    else:
        view = filled(x.numel() + 1)[1:].view(x.shape)
    return view.copy_(x)


def moved(name: str, call: dict, memory: str) -> dict:
    """The call with all its tensors in that memory, as far as the operator takes it."""
    spec = OPERATORS[name]

    def move(key, x):
        if not isinstance(x, torch.Tensor) or x.dtype == torch.uint8 or not x.ndim or key == "frequencies":
            return x
        if memory == "axes reversed" and key in spec.fixed:  # as caches with the heads before the slots
            return placed(x, "heads first")
        keeps_features = memory == "features apart" and key in spec.fixed
        if keeps_features or (memory == "expanded" and not (x.is_floating_point() and key not in spec.written)):
            return placed(x, "rows apart")
        return placed(x, memory)

    return {
        key: tuple(move(key, x) for x in value) if isinstance(value, tuple) else move(key, value)
        for key, value in call.items()
    }


def prepared(name: str, memory: str, where: str, form: tuple, seed: int) -> dict:
    """A call of random numbers in that memory, the same ones for the same seed."""
    torch.manual_seed(seed)
    call = call_of(name, where, *form, device=DEVICE)
    return call if memory == "contiguous" else moved(name, call, memory)


def storage(x: torch.Tensor) -> torch.Tensor:
    return x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of the interpreter, for NaN that a kernel makes and drops
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_kernels_have_the_bits_of_torch_operations(monkeypatch, operator, where, memory, form):
    forget(monkeypatch)
    spec = OPERATORS[operator]
    first = call_of(operator, where, *form, device=DEVICE)
    call = moved(operator, call_of(operator, where, *form, device=DEVICE), memory)
    with ropelab.use_backend("torch"):
        plain = copied(call)
        expected = recorded(operator, plain)
    before = {key: storage(x).clone() for key, x in tensors(call).items()}
    given = copied(call)
    with ropelab.use_backend("triton"):
        recorded(operator, first)
        found = recorded(operator, call)
    truncates = INTERPRETED and torch.bfloat16 in form
    if spec.bits and not truncates:
        assert same(found, expected)
    elif spec.roundings:
        leaves = sum(x in call for x in spec.leaves)
        assert excess(operator, given, [y.detach() for y in found[: len(found) - leaves]]) <= 1
        if not truncates:
            torch.testing.assert_close(found[len(found) - leaves :], expected[len(found) - leaves :])
    for key, x in tensors(call).items():
        after, was = storage(x.detach()).clone(), before[key]
        if key in spec.written:
            after.as_strided(x.shape, x.stride(), x.storage_offset()).copy_(
                was.as_strided(x.shape, x.stride(), x.storage_offset())
            )
        assert same([after], [was]), f"{key}: an element that the call must not write has changed"


@pytest.mark.parametrize("shared", ["cos", "sin"])
def test_sequences_may_share_one_of_two_tables(monkeypatch, shared):
    forget(monkeypatch)
    call = call_of("apply_rope", "each", *FORMS[0], device=DEVICE)
    call[shared] = placed(call[shared], "expanded")
    found = []
    for backend in ("torch", "triton"):
        with ropelab.use_backend(backend):
            found.append(recorded("apply_rope", call))
    assert same(*found)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", OPERATORS)
def test_a_remembered_call_is_a_fresh_one(monkeypatch, name):
    """Calls of one shape, which differ in strides, dtypes, positions and backends."""
    forget(monkeypatch)
    forms = [("split_half", "bshd", torch.float32, {}), ("split_half", "bshd", torch.float16, {})]
    ways = [*itertools.product(("contiguous", *MEMORIES), forms, ("triton", "torch"), ("positions", "rows"))]
    for seed, (memory, form, backend, where) in enumerate(random.Random(1).sample(ways, 5)):
        with ropelab.use_backend(backend):
            found = recorded(name, prepared(name, memory, where, form, seed))
            with monkeypatch.context() as fresh:
                forget(fresh)
                assert same(found, recorded(name, prepared(name, memory, where, form, seed))), (memory, form, where)
