"""Fill what torch.empty returns with NaN, so that an output element nobody wrote is seen.

No user has this, so a lane runs with ``-p no:tests.poison``.
"""

import pytest
import torch


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Poison the memory of every test."""
    torch.set_deterministic_debug_mode("warn")  # the like of use_deterministic_algorithms, which imports Inductor
    yield
    torch.set_deterministic_debug_mode("default")
