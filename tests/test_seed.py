"""Every random number of a test follows from the test's name."""

import random
import zlib

import numpy as np
import pytest
import torch


def numbers() -> tuple[float, float, float]:
    return random.random(), np.random.random(), torch.rand(()).item()


def expected(name: str) -> tuple[float, float, float]:
    seed = zlib.crc32(name.encode())
    generator = torch.Generator().manual_seed(seed)
    return (
        random.Random(seed).random(),
        np.random.RandomState(seed).random(),
        torch.rand((), generator=generator).item(),
    )


OF_THE_MODULE = numbers()


@pytest.fixture(scope="module")
def shared():
    return numbers()


@pytest.mark.parametrize("which", ["one", "other"])
def test_numbers_follow_from_the_name(request, shared, which):
    assert request.node.nodeid == f"tests/test_seed.py::test_numbers_follow_from_the_name[{which}]"
    assert numbers() == expected(request.node.nodeid)
    assert OF_THE_MODULE == expected("tests/test_seed.py")
    assert shared == expected("tests/test_seed.py::shared")
