import pytest

from ropelab.kernels.launch import Launch
from tests.support import forget


@pytest.fixture
def launches(monkeypatch):
    """The launches of the kernel, also in Triton's interpreter where there is no GPU."""
    forget(monkeypatch)  # a call that another test has prepared keeps that test's launches
    counted = []
    original = Launch.at
    monkeypatch.setattr(Launch, "at", lambda self, *arguments: (counted.append(self), original(self, *arguments)))
    return counted
