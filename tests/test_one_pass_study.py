"""The bytes between the projections and attention."""

import pytest

from ropelab.study.topics.one_pass.traffic import bytes_moved


def test_bytes_of_a_token():
    """48 heads of 128 features are read; 32 heads of q and 16 heads of k and v are written."""
    frame = bytes_moved(32, 8, 128)
    one_pass = frame.loc["norm, rotation and cache"]
    assert one_pass["16-bit cache, kB"] == 2 * 128 * (48 + 32 + 16) / 1000
    assert one_pass["8-bit cache, kB"] == 2 * 128 * (48 + 32 + 8) / 1000
    assert frame["16-bit cache, passes"].tolist() == pytest.approx([2.0, 7 / 6, 1.0])
