"""Every random number of a test follows from its function and parameters, wherever its file lies."""

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
def test_numbers_follow_from_the_name(shared, which):
    assert numbers() == expected(f"test_numbers_follow_from_the_name[{which}]")
    assert OF_THE_MODULE == expected("test_seed.py")
    assert shared == expected("shared")
