"""The backend that `use_backend` asks for ends with its context."""

import threading

import pytest
import torch

import ropelab
from ropelab.kernels import HAS_TRITON, INTERPRETED, backends, use_backend, uses_triton


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
@pytest.mark.parametrize("first_ends_first", [True, False])
def test_threads_may_leave_in_any_order(first_ends_first):
    """The context that began last decides until it ends; afterwards nothing is forced."""
    x = torch.ones(1)
    entered, ended = threading.Event(), [threading.Event(), threading.Event()]

    def other():
        with use_backend("triton"):
            entered.set()
            ended[0].wait(300)
        ended[1].set()

    thread = threading.Thread(target=other)
    with use_backend("torch"):
        thread.start()
        assert entered.wait(300) and uses_triton(x)
        if not first_ends_first:
            ended[0].set()
            assert ended[1].wait(300) and not uses_triton(x)
    if first_ends_first:
        assert uses_triton(x)
        ended[0].set()
        assert ended[1].wait(300)
    thread.join(300)
    assert uses_triton(x) == INTERPRETED


def test_contexts_nest_and_end_after_errors():
    x = torch.ones(1)
    with use_backend("torch"):
        with pytest.raises(RuntimeError, match="within"), use_backend("torch"):
            raise RuntimeError("within")
        assert not uses_triton(x)
    with pytest.raises(ValueError, match="name: expected one of"), ropelab.use_backend("cuda"):
        pass
    assert uses_triton(x) == INTERPRETED


@pytest.mark.skipif(not HAS_TRITON, reason="needs Triton")
def test_a_kernel_needs_a_gpu_or_the_interpreter(monkeypatch):
    monkeypatch.setattr(backends, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="name: expected 'torch' without a usable GPU"), use_backend("triton"):
        pass
    assert not uses_triton(torch.ones(1))
