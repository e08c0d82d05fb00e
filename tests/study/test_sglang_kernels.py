"""The published operator of SGLang#14302: how its library is called, and how its calls are judged. Needs no GPU."""

import contextlib
import ctypes
import json
from types import SimpleNamespace

import pytest
import torch

from ropelab.bench import packages
from ropelab.layout.pairing import LAYOUTS
from ropelab.study.documents.sglang import calls, evidence, kernel_contenders, kernels, operators
from tests.conftest import HAS_GPU

_DTYPES = {number: dtype for dtype, number in kernels._DTYPES.items()}
_VIEW = ctypes.POINTER(kernels._View)
_TENSORS = (_VIEW, _VIEW, _VIEW, _VIEW, ctypes.c_int64, ctypes.c_int)
_END = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def tensor_at(view):
    """A tensor over the memory that the library is given."""
    shape, dtype = tuple(view.sizes[: view.rank]), _DTYPES[view.dtype]
    count = torch.Size(shape).numel()
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(view.data)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def called(cos, sin, query, key, head_size, adjacent, *rest):
    """A library of our own: the model of the operator on CPU memory."""
    *_, message, length = rest
    tensors = [tensor_at(view.contents) if view else None for view in (cos, sin, query, key)]
    try:
        if not query.contents.contiguous:
            raise ValueError("query must be contiguous")
        operators.document(*tensors, head_size, bool(adjacent))
    except (ValueError, IndexError) as error:
        text = str(error).encode()[: length - 1] + b"\0"
        ctypes.memmove(message, text, len(text))
        return 1
    return 0


@pytest.fixture
def library(monkeypatch):
    rotate = ctypes.CFUNCTYPE(ctypes.c_int, *_TENSORS, *_END)(called)
    by_one_block = ctypes.CFUNCTYPE(ctypes.c_int, *_TENSORS, ctypes.c_int, *_END)(called)
    found = SimpleNamespace(rotate=rotate, rotate_by_one_block=by_one_block)
    monkeypatch.setattr(kernels, "_library", lambda name: found)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0))


def tables(tokens, pairs, layout, dtype):
    cos, sin = (torch.randn(tokens, pairs).to(dtype) for _ in range(2))
    given = (cos, sin) if layout == "interleaved" else tuple(torch.cat((t, t), -1) for t in (cos, sin))
    return (cos, sin), given


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("with_key", [True, False])
@pytest.mark.parametrize("form", ["operator", "by_one_block"])
def test_the_library_is_given_the_tensors(library, form, with_key, flat, layout, dtype):
    narrow, given = tables(5, 4, layout, dtype)
    q, k = (torch.randn(5, heads, 8).to(dtype) for heads in (4, 2))
    query, key = q.clone(), k.clone() if with_key else None
    rotate = kernels.operator("first") if form == "operator" else kernels.by_one_block("second", wide=True)
    views = [x if x is None or not flat else x.flatten(1) for x in (query, key)]
    rotate(*given, *views, 8, layout == "interleaved")
    for found, x in ((query, q), (key, k))[: 1 + with_key]:
        exact = calls.exact(x, *(t.double() for t in narrow), layout)
        torch.testing.assert_close(found.double(), exact, rtol=0.02, atol=0.05)


def test_what_the_library_refuses_is_raised(library):
    cos = torch.zeros(4, 4)
    query = torch.zeros(4, 4, 8).transpose(0, 1)
    with pytest.raises(RuntimeError, match="query must be contiguous"):
        kernels.operator("first")(cos, cos, query, None, 8, True)
    with pytest.raises(ValueError, match="tensor: expected at most 4 axes"):
        kernels.operator("first")(cos, cos, torch.zeros(1, 1, 1, 4, 8), None, 8, True)


@pytest.mark.parametrize("state", kernels.STATES)
def test_a_state_without_a_library_says_so(state, monkeypatch, tmp_path):
    kernels._library.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(packages.NotInstalled, match="needs a GPU"):
        kernels.operator(state)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(packages, "PEERS", tmp_path)
    with pytest.raises(packages.NotInstalled, match=f"at {kernels.STATES[state].commit[:9]} is not compiled for sm_90"):
        kernels.by_one_block(state)


@pytest.mark.parametrize("changed", [True, False])
def test_a_library_that_was_changed_is_not_loaded(changed, monkeypatch, tmp_path):
    def loaded(path):
        raise AssertionError(f"{path} is loaded")

    kernels._library.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(packages, "PEERS", tmp_path)
    monkeypatch.setattr(ctypes, "CDLL", loaded)
    library = tmp_path / "compiled" / "sglang-14302-02f22ef8f-sm_90.so"
    library.parent.mkdir()
    library.write_text("as it was compiled")
    library.with_suffix(".json").write_text(json.dumps({"sha256": packages.sha256(library)}))
    if changed:
        library.write_text("as somebody left it")
    with pytest.raises(packages.NotInstalled if changed else AssertionError, match="changed" if changed else "loaded"):
        kernels.operator("first")


# ------------------------------------------------------------------------------------------------------ the calls


@pytest.mark.skipif(HAS_GPU, reason="on a GPU the operator itself is called: see test_gpu_real_sg.py")
def test_the_calls_are_those_of_the_operator(library, monkeypatch):
    """On the CPU our model answers, which raises where the operator writes past the heads."""
    outcomes = calls.outcomes
    monkeypatch.setattr(calls, "outcomes", lambda operators_, device: outcomes(operators_, "cpu"))
    table = calls.operator_calls()
    assert set(table.operator) == {kernel_contenders.FIRST_KERNEL}
    model = evidence.shapes()
    model = model[model.operator == evidence.THEIR_OPERATOR]
    assert list(table.columns) == list(model.columns) and len(table) == len(model)
    assert (table[table.claimed].outcome == "right").all()


def test_a_write_past_the_heads_is_seen():
    def beyond(tables, query, key, adjacent):
        memory = query.as_strided((query.numel() + 1,), (1,), query.storage_offset())
        memory[-1] = 1.0

    def nothing(tables, query, key, adjacent):
        pass

    table = calls.outcomes({"beyond": beyond, "nothing": nothing}, "cpu")
    assert set(table[table.operator == "beyond"].outcome) == {calls.OUT_OF_BOUNDS}
    assert set(table[table.operator == "nothing"].outcome) == {"wrong"}


def test_what_synchronize_raises_is_read_from_each_process(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(calls, "_BEYOND", "class torch:\n  class cuda:\n    synchronize = staticmethod(lambda: None)")
    monkeypatch.setattr(calls, "FAILURES", {"one": "raise ZeroDivisionError", "none": "pass"})
    table = calls.synchronize()
    assert dict(zip(table.failure, table.exception, strict=True)) == {"one": "ZeroDivisionError", "none": ""}
    monkeypatch.setattr(calls, "FAILURES", {"broken": "raise SystemExit"})
    with pytest.raises(RuntimeError, match="broken: expected what"):
        calls.synchronize()
