"""Calls of `qkv_rope` that an earlier call prepared give, refuse and record what a first call would."""

import itertools

import pytest
import torch

import ropelab
from ropelab import qkv_rope, qkv_rope_and_cache
from ropelab.call import operation
from ropelab.kernels import INTERPRETED, use_backend
from tests.support import forget

B, S, K, D, N = 2, 5, 24, 16, 128
HEADS = {"q_heads": 4, "k_heads": 2}
TABLES = dict(zip(("cos", "sin"), ropelab.rotary_table(12, D), strict=True))
POSITIONS = torch.tensor([[0, 3, -5, 7, 11], [2, 2, 0, 1, 4]])


@pytest.fixture(autouse=True)
def own_cache(monkeypatch):
    forget(monkeypatch)


def drawn(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype)


def unaligned(x):
    return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)


def transposed(x):
    return x.mT.contiguous().mT


X, W, BIAS, NORM = drawn(B, S, K), drawn(N, K), drawn(N), {"q_weight": drawn(D), "k_weight": drawn(D)}
VARIATIONS = {
    "plain": {}, "bias": {"bias": BIAS}, "other heads": {"q_heads": 2, "k_heads": 3}, "norm": NORM,
    "eps": NORM | {"eps": 0.5}, "three": {"weight": [w.clone() for w in W.split((64, 32, 32))]},
    "half": {"x": X.half(), "weight": W.half()}, "unaligned": {"x": unaligned(X)}, "weight unaligned":
    {"weight": unaligned(W)}, "strides": {"x": transposed(X)}, "weight strides": {"weight": transposed(W)},
    "interleaved": {"layout": "interleaved"}, "a start": {"offsets": 3}, "before 0": {"offsets": -3},
    "starts": {"offsets": torch.tensor([3, 1])}, "positions": {"positions": POSITIONS},
    "positions for all": {"positions": POSITIONS[0]}, "int32": {"positions": POSITIONS.int()},
    "axes": {"positions": POSITIONS[:, None], "axes": [0] * 5 + [1] * 3}, "sbhd": {"seq_format": "sbhd"},
    "a slice": {"rotary_slice": (0, 16)}, "tables for each": {name: torch.stack((t, t.flip(0))) for name, t in
    TABLES.items()}, "wide tables": {name: t.double() for name, t in TABLES.items()},
    "frequencies": {"cos": None, "sin": None, "frequencies": ropelab.rotary_frequencies(D)},
}  # fmt: skip


def called(change, **options):
    return qkv_rope(**{"x": X, "weight": W, **HEADS, **TABLES, **change, **options})


def results(name, recorded, path):
    """q, k, v and the gradient of the weight, or the message of the refusal."""
    change = dict(VARIATIONS[name])
    if recorded:
        weights = change.get("weight", W)
        leaves = [w.detach().requires_grad_() for w in ([weights] if torch.is_tensor(weights) else weights)]
        change["weight"] = leaves[0] if len(leaves) == 1 else leaves
    try:
        ys = called(change, path=path)
    except (ValueError, RuntimeError) as error:
        return [str(error)]
    grads = torch.autograd.grad(sum(y.double().square().sum() for y in ys), leaves) if recorded else ()
    return [*ys, *grads]


@pytest.mark.parametrize("seed", range(2))
def test_in_any_order_calls_give_what_they_give_alone(monkeypatch, seed):
    names = [*itertools.product(VARIATIONS, (False, True), ("auto", "pass", "product"))]
    backends = ("torch", "triton") if INTERPRETED else ("torch",)  # the tensors are on the CPU
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed)).tolist()
    for number in (*order, *order[:20]):
        name, recorded, path = names[number]
        with use_backend(backends[number % len(backends)]):
            found, kept = results(name, recorded, path), operation.prepared_calls
            forget(monkeypatch)
            alone = results(name, recorded, path)
        monkeypatch.setattr(operation, "prepared_calls", kept)
        same = [a == b if isinstance(a, str) else torch.equal(a, b) for a, b in zip(found, alone, strict=True)]
        assert all(same), names[number]


def test_a_path_that_does_not_serve_is_refused_again_and_again(torch_backend):
    for _ in range(2):
        with pytest.raises(ValueError, match="path: expected 'auto' or 'pass' for a call that 'product'"):
            called(VARIATIONS["three"], path="product")
        with pytest.raises(ValueError, match="path: expected 'auto' or 'pass' for a call that 'quack'"):
            called({}, path="quack")
        called(VARIATIONS["three"])


@pytest.mark.parametrize("path", ["pass", "product"])
def test_autograd_records_what_was_warm_without_it(torch_backend, path):
    with torch.no_grad():
        expected = called({}, path=path)
    weight = W.clone().requires_grad_()
    assert not called({}, path=path)[0].requires_grad
    ys = called({"weight": weight}, path=path)
    assert all(y.requires_grad and torch.equal(y, e) for y, e in zip(ys, expected, strict=True))
    with torch.no_grad():
        assert not any(y.requires_grad for y in called({"weight": weight}, path=path))
    with torch.inference_mode():
        x = X.clone()
        called({"x": x}, path=path)
    with pytest.raises(ValueError, match="x: expected a tensor made outside of torch.inference_mode"):
        called({"x": x, "weight": weight}, path=path)


@pytest.mark.parametrize("path", ["pass", "product"])
def test_a_warm_call_into_a_cache_makes_the_checks_of_memory_and_contents(torch_backend, path):
    memory = torch.zeros(3 * 8 * 2 * D)
    caches = memory[: 8 * 2 * D].view(2, 4, 2, D), memory[8 * 2 * D : 2 * 8 * 2 * D].view(2, 4, 2, D)
    given = {"x": X[0], "weight": W, "key_cache": caches[0], "value_cache": caches[1], "slot_mapping": torch.arange(5)}
    for _ in range(2):
        version = caches[0]._version
        expected = qkv_rope_and_cache(**given, **HEADS, **TABLES, path=path)
        assert caches[0]._version > version and torch.equal(caches[1].flatten(0, 1)[:5], called({}, path=path)[2][0])
    within = caches[0].view(-1)[: S * K].view(S, K)
    for change, error, message in (
        ({"x": within}, ValueError, "key_cache: expected memory disjoint from x"),
        ({"value_cache": caches[0]}, ValueError, "value_cache: expected memory disjoint from key_cache"),
        ({"slot_mapping": torch.tensor([0, 8])}, ValueError, "slot_mapping: expected slots below the 8"),
        ({"offsets": 8}, ValueError, "cos: expected a row for each of 5 positions from 8 on"),
        ({"weight": W.clone().requires_grad_()}, ValueError, "weight: expected a tensor without grad"),
        ({"cos": TABLES["cos"].clone().requires_grad_()}, ValueError, "cos: expected a tensor without grad"),
        ({"path": "quack"}, ValueError, "path: expected one of"),
    ):
        with pytest.raises(error, match=message):
            qkv_rope_and_cache(**{**given, **HEADS, **TABLES, "path": path, **change})
    with pytest.raises(NotImplementedError, match="transforms of torch.func .* unsupported"):
        torch.func.vmap(lambda x: qkv_rope_and_cache(**given | {"x": x}, **HEADS, **TABLES, path=path))(X)
    assert torch.equal(qkv_rope_and_cache(**given, **HEADS, **TABLES, path=path), expected)


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("moved", ["x", "weight"])
def test_blocks_at_other_addresses_than_multiples_of_16_are_not_moved(moved):
    """The tensor memory accelerator cannot; both functions take the pass for them, whatever was warm."""
    given = {"x": drawn(5, 48).half(), "weight": drawn(4 * 64, 48).half()}
    cos, sin = ropelab.rotary_table(12, 64)
    options = {"q_heads": 2, "k_heads": 1, "cos": cos, "sin": sin, "seq_format": "thd", "path": "product"}
    caches = [torch.zeros(2, 4, 1, 64).half() for _ in range(2)]
    cached = dict(zip(("key_cache", "value_cache", "slot_mapping"), (*caches, torch.arange(5)), strict=True))
    for function, more in ((qkv_rope, {}), (qkv_rope_and_cache, cached)):
        function(**given, **options, **more)
        with pytest.raises(ValueError, match="path: expected 'auto' or 'pass'"):
            function(**given | {moved: unaligned(given[moved])}, **options, **more)
        function(**given, **options, **more)
