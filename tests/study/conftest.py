"""Studies without a GPU: contenders are called, and nothing is timed."""

import pandas as pd
import pytest

from ropelab.bench import timing
from ropelab.bench.names import PREFIX


@pytest.fixture
def called_once(monkeypatch):
    """Each prepared call of a contender is made once, and takes 2 µs; one that raises has its status."""

    def gpu_times(contenders, *, rounds=1, **_):
        rows = []
        for name, prepare in contenders.items():
            times = {"status": "ok", **dict.fromkeys(("median_us", "q20_us", "q80_us"), 2.0), "samples": rounds}
            try:
                if not (name.startswith(PREFIX) and "Triton" in name):  # interpreted copies take long
                    for call in prepare():
                        call()
            except Exception as error:
                times = {"status": timing.failure(error)}
            rows.append({"contender": name} | times)
        return pd.DataFrame(rows, columns=["contender", "status", "median_us", "q20_us", "q80_us", "samples"])

    monkeypatch.setattr(timing, "gpu_times", gpu_times)
    monkeypatch.setattr(timing, "cache_bytes", lambda: 0)


def slower(frame: pd.DataFrame, where: str, factor: float) -> pd.DataFrame:
    """The record with other times in the rows that the query selects."""
    frame = frame.copy()
    frame.loc[frame.query(where).index, frame.columns.intersection(["median_us", "q20_us", "q80_us"])] *= factor
    return frame
