import pytest

from ropelab.kernels.launch import Launch


@pytest.fixture
def launches(monkeypatch):
    """The launches of the kernel, also in Triton's interpreter where there is no GPU."""
    counted = []
    original = Launch.at
    monkeypatch.setattr(Launch, "at", lambda self, *arguments: (counted.append(self), original(self, *arguments)))
    return counted
