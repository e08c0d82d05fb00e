"""A call whose launch an earlier call prepared is looked up before anything is made of its arguments.

It gives, writes, refuses and records what a first call would, whoever watches.
"""

import importlib
import threading
import warnings
from itertools import product

import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import ropelab
from ropelab.call import operation
from ropelab.call.remembered import Remembered
from ropelab.kernels import INTERPRETED, rotate_torch, use_backend
from tests.ops.specs import CASES, OPERATORS, arguments, copied, results, same, tensors
from tests.support import forget

ROPE = [name for name in OPERATORS if OPERATORS[name].leaves]
RECORDS = [
    name
    for name, spec in OPERATORS.items()
    if not spec.written or spec.function is ropelab.assemble_mla or spec.options.get("consume")
]
"""Calls that autograd records; those of all others refuse what requires a gradient."""
NAMED = [name for name in OPERATORS if "three weights" not in name]
"""Calls that have a name for each of their tensors."""


def leaves_of(name, call):
    return [x for x in OPERATORS[name].leaves or ("x", "kv", "q") if x in call][: None if name in ROPE else 1]


@pytest.fixture(autouse=True)
def own_calls(monkeypatch):
    forget(monkeypatch)


def never(*arguments, **options):
    raise AssertionError("expected a call that is looked up, got one that is made anew")


@pytest.fixture
def warm(monkeypatch):
    """Make a call that later calls find, and return its arguments and its results."""

    def made(name, where="rows", **sizes):
        call = arguments(name, where, **sizes)
        found = results(name, copied(call))
        module = importlib.import_module(OPERATORS[name].function.__module__)
        with monkeypatch.context() as looked_up:
            looked_up.setattr(module, "located", never)
            assert same(results(name, copied(call)), found)
        return call, found

    return made


@pytest.mark.parametrize(("name", "where"), CASES)
def test_gives_what_the_first_call_gives(torch_backend, name, where):
    call = arguments(name, where)
    expected = results(name, copied(call))
    for _ in range(2):
        assert same(results(name, copied(call)), expected)


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter; a GPU compares the results of every operator")
@pytest.mark.parametrize("name", OPERATORS)
def test_gives_what_the_first_launch_gives(warm, name):
    with use_backend("triton"):
        warm(name, "positions")


@pytest.mark.parametrize("name", RECORDS)
def test_autograd_records_it(torch_backend, warm, name):
    call, expected = warm(name)
    for leaf in leaves_of(name, call):
        recorded = copied(call)
        recorded[leaf].requires_grad_()
        found = results(name, recorded)
        assert any(y.requires_grad for y in found) and same(found, expected)
        with torch.no_grad():
            assert not any(y.grad_fn for y in results(name, recorded))
        if "cos" not in OPERATORS[name].leaves:
            trained = {leaf: call[leaf].clone().requires_grad_(), "cos": call["cos"].clone().requires_grad_()}
            with pytest.raises(ValueError, match="cos: expected a table without grad"):
                results(name, copied(call) | trained)
    assert not any(y.requires_grad for y in results(name, copied(call)))


@pytest.mark.parametrize("where", ["rows", "positions", "offsets", "frequencies"])
@pytest.mark.parametrize("name", [x for x in ROPE if OPERATORS[x].function in (ropelab.apply_rope, ropelab.qkv_rope)])
def test_a_recorded_call_has_the_gradients_of_the_first(monkeypatch, device, name, where):
    if (name, where) == ("qkv_rope, a norm", "frequencies"):
        pytest.skip("a norm takes tables")
    call = arguments(name, where)
    leaves = [x for x in OPERATORS[name].leaves if x in call]
    found = []
    for number in range(3):
        if number == 2:
            monkeypatch.setattr(importlib.import_module(OPERATORS[name].function.__module__), "located", never)
        recorded = {x: y.requires_grad_() if x in leaves else y for x, y in copied(call).items()}
        ys = results(name, recorded)
        grads = torch.autograd.grad(ys, [recorded[x] for x in leaves], [y.detach() for y in ys], create_graph=True)
        found.append([*ys, *grads])
        with torch.no_grad():
            results(name, copied(call))
    assert same(found[1], found[0]) and same(found[2], found[0])
    with torch.inference_mode():
        tables = {x: call[x].clone() for x in ("cos", "sin", "frequencies") if x in call}
    with pytest.raises(ValueError, match="expected a tensor made outside of torch.inference_mode"):
        results(name, {**copied(call), **tables, leaves[0]: call[leaves[0]].clone().requires_grad_()})


@pytest.mark.parametrize("name", [name for name in OPERATORS if name not in RECORDS])
def test_what_autograd_would_need_is_refused(torch_backend, warm, name):
    call, _ = warm(name)
    for argument, x in tensors(call).items():
        if x.is_floating_point() and x.itemsize > 1:
            with pytest.raises(ValueError, match=f"{argument}: expected"):
                results(name, copied(call) | {argument: x.clone().requires_grad_()})


def test_autograd_sees_what_it_overwrites(device, warm):  # torch operations would say so themselves
    for name in ("apply_rope, in place", "rope_and_cache"):
        call, _ = warm(name)
        for argument in OPERATORS[name].written:
            saved = copied(call)
            leaf = torch.ones((), requires_grad=True)
            y = leaf * saved[argument]
            results(name, saved)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                y.sum().backward()


@pytest.mark.parametrize("name", OPERATORS)
def test_transforms_and_forward_mode_see_it(torch_backend, warm, name):
    call, expected = warm(name)
    x = next(iter(tensors(call)))

    def function(value):
        return results(name, copied(call) | {x: value})[0]

    if OPERATORS[name].written:
        for transform in (torch.func.vmap(function), lambda v: torch.func.jvp(function, (v[0],), (v[0],))):
            with pytest.raises(NotImplementedError):
                transform(call[x][None])
        return
    torch.testing.assert_close(torch.func.vmap(function)(torch.stack((call[x], call[x])))[1], expected[0])
    tangent = torch.func.jvp(function, (call[x],), (torch.ones_like(call[x]),))[1]
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(call[x], torch.ones_like(call[x]))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(function(dual)).tangent, tangent)
    assert tangent.any()


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.namespace)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", [name for name in OPERATORS if "consume" not in OPERATORS[name].options])
def test_modes_compilers_and_tracers_see_it(torch_backend, warm, name):
    call, expected = warm(name)
    with Seen() as seen:
        assert same(results(name, copied(call)), expected)
    assert "ropelab" in seen.names
    compiled = torch.compile(OPERATORS[name].function, fullgraph=True, backend="aot_eager")
    assert same(results(name, copied(call), compiled), expected)
    assert same(results(name, copied(call)), expected)


def test_autocast_sees_it(torch_backend, warm):
    call, _ = warm("qkv_rope")
    with torch.autocast(call["x"].device.type, torch.bfloat16):
        assert {y.dtype for y in results("qkv_rope", copied(call))} == {torch.bfloat16}


@pytest.mark.parametrize("name", NAMED)
def test_fake_tensors_and_tensors_without_memory_reach_no_launch(torch_backend, warm, name):
    call, expected = warm(name)
    with FakeTensorMode() as mode:
        fake = {x: mode.from_tensor(value) for x, value in tensors(call).items()}
        shapes = [y.shape for y in results(name, call | fake)]
    assert shapes == [y.shape for y in expected]
    for argument in ("cos", "sin"):
        with pytest.raises(TypeError, match=f"{argument}: expected a plain tensor"):
            results(name, copied(call) | {argument: fake[argument]})
    on_meta = results(name, call | {x: value.to("meta") for x, value in tensors(call).items()})
    assert all(y.is_meta for y in on_meta)
    assert same(results(name, copied(call)), expected)


@pytest.mark.parametrize("name", OPERATORS)
def test_contents_that_the_host_sees_are_checked(torch_backend, warm, name):
    wrong = {"positions": -40, "deltas": -40, "offsets": 38, "slot_mapping": 40, "slots": 40}
    # of tables with 40 rows, and a cache of 40 slots
    for where in ("positions", "offsets", "rows"):
        call, _ = warm(name, where)
        added = {"offsets"} & OPERATORS[name].parameters if where == "rows" else set()
        for argument in wrong.keys() & call.keys() | added:
            beyond, number, x = copied(call), wrong[argument], call.get(argument)
            beyond[argument] = torch.full_like(x, number) if isinstance(x, torch.Tensor) else number
            before = copied(beyond)
            with pytest.raises(ValueError, match=f"{argument}: expected|cos: expected a row"):
                results(name, beyond)
            assert all(same([beyond[x]], [before[x]]) for x in OPERATORS[name].written)


@pytest.mark.parametrize("name", OPERATORS)
def test_equal_values_of_another_type_are_refused_again(torch_backend, warm, name):
    """1 is True and 8.0 is 8, so each finds a key that is made of values alone."""
    call, _ = warm(name)
    others = {"inverse": [1, 0], "inplace": [1, 0], "norm_first": [1], "rotary_slice": [(2.0, 10), (2, 10.0)]}
    others |= {"offsets": [False, 0.0], "weight_offset": [False]}
    for argument in others.keys() & OPERATORS[name].parameters:
        for value in others[argument]:
            with pytest.raises((TypeError, ValueError), match=rf"{argument}(\[\d\])?: expected"):
                results(name, copied(call) | {argument: value})
    if "axes" in OPERATORS[name].where:
        call, _ = warm(name, "axes")
        for value in (False, 0.0):
            with pytest.raises(TypeError, match=r"axes\[0\]: expected"):
                results(name, copied(call) | {"axes": (value, *call["axes"][1:])})


@pytest.mark.parametrize("name", [x for x in NAMED if "inplace" in OPERATORS[x].parameters and "other" not in x])
def test_a_flag_of_numpy_is_one_of_python(torch_backend, warm, name):
    numpy = pytest.importorskip("numpy")
    for flag in (False, True):
        call = arguments(name)
        call |= {x: flag for x in ("inplace", "consume") if x in call} | {"inplace": flag}
        expected = results(name, copied(call))
        for _ in range(2):
            found = copied(call) | {"inplace": numpy.bool_(flag)}
            assert same(results(name, found), expected) and torch.equal(found["q"], call["q"]) != flag


def test_positions_and_a_start_are_refused_again(torch_backend, warm):
    for name in [name for name in OPERATORS if "offsets" in OPERATORS[name].parameters]:
        call, _ = warm(name, "positions")
        with pytest.raises(ValueError, match="offsets: expected no offsets beside positions"):
            results(name, copied(call) | {"offsets": 1})
        if "frequencies" in OPERATORS[name].where:
            call, _ = warm(name, "frequencies")
            for table in ("cos", "sin"):
                with pytest.raises(ValueError, match="frequencies: expected no frequencies beside cos and sin"):
                    results(name, copied(call) | {table: torch.ones(40, 4)})


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in OPERATORS
        if "seq_format" in OPERATORS[name].parameters and OPERATORS[name].function is not ropelab.qkv_rope_and_cache
    ],
)
def test_positions_are_no_offsets(monkeypatch, torch_backend, name):
    """One tensor: of a position for each token, or of an offset for each of as many sequences."""
    call = arguments(name, "offsets", batch=2, tokens=2, seq_format="sbhd")
    offsets = call.pop("offsets")
    ways = [call | {"positions": offsets}, call | {"offsets": offsets}]
    for first, second in (ways, ways[::-1]):
        forget(monkeypatch)
        expected = results(name, copied(second))
        forget(monkeypatch)
        results(name, copied(first))
        assert same(results(name, copied(second)), expected)


def test_memory_is_checked(torch_backend, warm):
    call, _ = warm("apply_rope, in place")
    overlapping = call["q"].clone()
    with pytest.raises(ValueError, match="q: expected memory disjoint|k: expected memory disjoint"):
        results("apply_rope, in place", call | {"q": overlapping, "k": overlapping[:, :, :1]})
    call, _ = warm("rope_and_cache, q apart")
    with pytest.raises(ValueError, match="expected memory disjoint"):
        results("rope_and_cache, q apart", call | {"key_cache": call["key_cache"], "q_out": call["q"].clone()} | {
            "q_nope_out": call["q_nope"], "value_cache": call["key_cache"][..., :6]
        })  # fmt: skip


def test_an_inference_tensor_is_refused_again(torch_backend, warm):
    call, expected = warm("apply_rope, in place")
    with torch.inference_mode():
        inference = copied(call)
        assert same(results("apply_rope, in place", inference), expected)
    with pytest.raises(ValueError, match="q: expected a tensor that is not an inference tensor"):
        results("apply_rope, in place", inference)


@pytest.mark.skipif(not INTERPRETED, reason="both backends compute on one device under TRITON_INTERPRET=1")
def test_the_backend_that_was_asked_for_computes(monkeypatch, warm):
    calls, computed = [], rotate_torch.rotate
    monkeypatch.setattr(rotate_torch, "rotate", lambda *arguments: (calls.append(1), computed(*arguments)))
    with use_backend("torch"):
        call, expected = warm("apply_rope")
    assert calls
    for name, grows in (("triton", False), ("torch", True), ("triton", False)):
        before = len(calls)
        with use_backend(name):
            assert same(results("apply_rope", call), expected) and (len(calls) > before) == grows


def test_a_wrong_argument_is_named_again(torch_backend, warm):
    for name, where in product(NAMED, ("positions", "offsets")):
        call, _ = warm(name, where)
        for argument, x in tensors(call).items():
            for value in (x.tolist(), x.to_sparse() if x.is_floating_point() and x.itemsize > 1 else x[:0, None]):
                with pytest.raises((TypeError, ValueError), match=r"\w+: expected"):
                    results(name, copied(call) | {argument: value})


# ---------------------------------------------------------------------------------------------------- what is forgotten


def test_the_oldest_lengths_are_forgotten_one_by_one(monkeypatch, torch_backend):
    kept = operation.PreparedCalls(most=20)
    monkeypatch.setattr(operation, "prepared_calls", kept)
    cos, sin = ropelab.rotary_table(300, 8)
    x = torch.randn(1, 300, 2, 8)
    whole = ropelab.apply_rope(x, cos=cos, sin=sin)
    for length in range(1, 300):
        assert torch.equal(ropelab.apply_rope(x[:, :length], cos=cos, sin=sin), whole[:, :length])
        assert min(length, 10) <= len(kept) <= 20
    with monkeypatch.context() as looked_up:
        looked_up.setattr("ropelab.rope.located", never)
        for length in range(292, 300):
            ropelab.apply_rope(x[:, :length], cos=cos, sin=sin)
        with pytest.raises(AssertionError, match="made anew"):
            ropelab.apply_rope(x[:, :3], cos=cos, sin=sin)


def test_threads_forget_together():
    remembered = Remembered[int, int](most=50)

    def keep(first):
        for i in range(2000):
            remembered.keep(first + i, i)

    threads = [threading.Thread(target=keep, args=(2000 * i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(remembered) == 50


class Counted(torch.Tensor):
    """A subclass without operations of its own."""


class Number:
    """An integer that may change."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


def test_a_subclass_goes_through_the_dispatcher_every_time(torch_backend):
    call = arguments("apply_rope", "rows")
    found = [ropelab.apply_rope(**copied(call) | {"q": call["q"].clone().as_subclass(Counted)}) for _ in range(3)]
    assert {tuple(map(type, ys)) for ys in found} == {tuple(map(type, found[0]))}


def test_numbers_that_overflow_or_change_are_read_every_time(torch_backend):
    cos, sin = ropelab.rotary_table(8, 8)
    x = torch.ones(4, 4, 128)
    shapes = [
        [y.shape for y in ropelab.rope_and_quantize(x, cos=cos, sin=sin, block_dim=b, rotary_slice=(120, 128))]
        for b in (64, np.uint8(64), np.uint8(64))
    ]
    assert shapes[0] == shapes[1] == shapes[2]
    dim, kv, k_pe = Number(16), torch.ones(1, 3, 2, 32), torch.ones(1, 3, 1, 8)
    for dim.value in (16, 8, 16):
        _, value = ropelab.assemble_mla_kv(kv, k_pe, dim, cos=cos, sin=sin)
        assert value.shape[-1] == 32 - dim.value


def test_a_warning_that_is_an_error_refuses_every_call(torch_backend):
    cos, sin = ropelab.rotary_table(8, 16)
    q, cache = torch.ones(1, 3, 2, 32), torch.ones(5, 8, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            with pytest.raises(UserWarning, match="columns turn the first 16 of 32 features"):
                ropelab.apply_rope(q, cos=cos, sin=sin)
            with pytest.raises(UserWarning, match="all of whose 16 features turn"):
                ropelab.rotate_cached_keys(cache, torch.arange(3), 1, cos=cos, sin=sin)
    assert bool((cache == 1).all())
