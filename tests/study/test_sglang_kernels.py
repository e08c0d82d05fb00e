"""The published operator of SGLang#14302: how its library is called, and how its calls are judged. Needs no GPU."""

import ctypes
import json

import pytest
import torch

from ropelab.bench import packages
from ropelab.study.documents.sglang import calls, kernels


def tables(tokens, pairs, layout, dtype):
    cos, sin = (torch.randn(tokens, pairs).to(dtype) for _ in range(2))
    given = (cos, sin) if layout == "interleaved" else tuple(torch.cat((t, t), -1) for t in (cos, sin))
    return (cos, sin), given


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
