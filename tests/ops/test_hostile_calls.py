"""Invalid calls are refused by name, and valid calls are served, however their values are written."""

import re
from contextlib import contextmanager
from functools import cache

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tests.ops.hostile_calls import OPERATORS, QUARTERS, TARGETS, calls, copied, equal, names, operands, run, sharing
from tests.support import forget

CALLS = [*calls()]
VALID = [name for name in TARGETS if name != "huggingface.patch"]  # whose valid model is in test_interop_huggingface


@pytest.mark.parametrize("target", TARGETS)
def test_what_cannot_be_meant_is_refused_by_name(target, monkeypatch):
    forget(monkeypatch)  # a remembered call takes True for the axis 1
    wrong = []
    for call in (call for call in CALLS if call.target == target and not call.equivalent):
        try:
            run(call)
        except (TypeError, ValueError) as error:
            begins = re.match(r"(\w+)(\[\d+\])?: expected", str(error))
            if not begins or begins[1] not in names(call):
                wrong.append(f"{call}: {type(error).__name__}: {error}")
        except (RuntimeError, IndexError, KeyError, AttributeError, ArithmeticError, AssertionError) as error:
            wrong.append(f"{call}: {type(error).__name__}: {error}")
        else:
            wrong.append(f"{call}: accepted")
    assert not wrong, f"{len(wrong)} calls:\n" + "\n".join(wrong)


@cache
def expected(target: str):
    """The result of the valid call where nothing around it was changed."""
    return TARGETS[target].function(**TARGETS[target].arguments)


@pytest.mark.parametrize("target", VALID)
def test_a_value_written_in_another_way_is_the_same(target):
    for call in (call for call in CALLS if call.target == target and call.equivalent):
        assert equal(run(call), expected(target)), str(call)


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


CONTEXTS = {
    "device meta": lambda: torch.device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "inference mode": torch.inference_mode,
}


@pytest.mark.parametrize("target", VALID)
def test_defaults_of_torch_change_nothing(target):
    """The first call in a context builds objects that must be right inside and outside of the context."""
    function, arguments, *_ = TARGETS[target]
    before = expected(target)
    for context, entered in CONTEXTS.items():
        with entered():
            found = [function(**arguments) for _ in range(2)]
        assert all(equal(y, before) for y in (*found, function(**arguments))), context


# ------------------------------------------------------------------------------------------------ memory and sizes


def outcome(name, arguments):
    """The tensors that the call returns, and afterwards the arguments that it writes."""
    operator = OPERATORS[name]
    found = operator.function(**arguments)
    return [*(found if isinstance(found, tuple) else (found,)), *(arguments[x] for x in operator.written)]


def floats(results) -> list[torch.Tensor]:
    return [x.float() if x.itemsize == 1 else x for x in results]


@pytest.mark.parametrize("where", ["positions", "offsets"])
@pytest.mark.parametrize("name", [name for name, operator in OPERATORS.items() if operator.written])
def test_inputs_in_the_memory_of_outputs_are_refused_or_right(device, name, where):
    """A refused call writes nothing. A call that is prepared looks at the memory as well."""
    torch.manual_seed(1)
    tensors = {x: t for x, t in operands(name, where=where).items() if isinstance(t, torch.Tensor)}
    if device == "cuda":
        pytest.skip("memory is shared in the same way on the CPU")
    assert equal(*(floats(outcome(name, copied(operands(name, where=where) | tensors))) for _ in range(2)))
    pairs = [(written, other) for written in OPERATORS[name].written for other in tensors if other != written]
    for written, other, quarters in ((*pair, quarters) for pair in pairs for quarters in QUARTERS):
        arguments = sharing(operands(name, where=where) | copied(tensors), written, other, quarters)
        before = copied(arguments)
        try:
            found = outcome(name, arguments)
        except ValueError as error:
            assert re.match(rf"({'|'.join(arguments)}): expected ", str(error)), error
            assert "memory disjoint" in str(error), error
            assert equal(*(floats(x.values()) for x in map(only_tensors, (arguments, before)))), (written, other)
        else:
            assert equal(floats(found), floats(outcome(name, before))), (written, other, quarters)


def only_tensors(arguments):
    return {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor)}


EMPTY = {
    "batches": {"batch": 0}, "tokens": {"tokens": 0}, "heads": {"heads": 0}, "heads of k": {"kv_heads": 0},
    "any heads": {"heads": 0, "kv_heads": 0},
}  # fmt: skip


@pytest.mark.parametrize("where", ["positions", "offsets", "neither"])
@pytest.mark.parametrize("missing", EMPTY)
@pytest.mark.parametrize("name", OPERATORS)
def test_calls_with_nothing_to_rotate(device, name, missing, where):
    arguments = operands(name, where=where, device=device, **EMPTY[missing])
    shapes = {x: t.shape for x, t in only_tensors(arguments).items()}
    found = outcome(name, copied(arguments))
    for x, y in zip(OPERATORS[name].written[::-1], found[::-1], strict=False):
        assert y.shape == shapes[x]
    if "cache" not in name and not OPERATORS[name].written:
        differentiable = [x for x in ("q", "k", "kv", "k_pe", "q_weight", "k_weight") if x in arguments]
        leaves = [arguments[x].requires_grad_() for x in differentiable]
        results = outcome(name, arguments)
        grads = torch.autograd.grad(results, leaves, [torch.ones_like(y) for y in results])
        assert all(g.shape == x.shape and not g.isnan().any() for g, x in zip(grads, leaves, strict=True))


def described(results):
    return [(x.shape, x.stride(), x.dtype) for x in results]


@pytest.mark.parametrize("where", ["positions", "offsets", "neither"])
@pytest.mark.parametrize("name", OPERATORS)
def test_tensors_without_data_give_the_shapes_and_strides(device, name, where):
    """Meta and fake tensors, with gradients."""

    def shapes(device):
        arguments = operands(name, where=where, device=device)
        for x in ("q", "k_pe", "q_weight"):
            if x in arguments and "cache" not in name and not OPERATORS[name].written:
                arguments[x].requires_grad_()
        if "q" in arguments and arguments["q"].ndim == 4 and "cache" not in name:  # strides that are not contiguous
            arguments["q"] = arguments["q"].transpose(1, 2).contiguous().transpose(1, 2)
        results = outcome(name, arguments)
        leaves = [x for x in only_tensors(arguments).values() if x.requires_grad and x.is_leaf]
        recorded = [y for y in results if y.requires_grad]
        return described([*results, *torch.autograd.grad(recorded, leaves, recorded)]) if leaves else described(results)

    wanted = shapes(device)
    assert shapes("meta") == wanted
    with FakeTensorMode():
        assert shapes(device) == wanted
