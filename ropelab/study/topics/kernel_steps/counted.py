"""Count what the kernels of step 4 ask of the caches and of memory, under Nsight Compute.

``python -m ropelab.study.topics.kernel_steps.counted`` makes the record `RECORD` on the GPU at hand.
"""

import os
import sys

import pandas as pd
import torch

from ropelab.bench import ncu, records, staleness
from ropelab.study.topics.kernel_steps.step import STEPS
from ropelab.study.topics.kernel_steps.timed import CASES, Case

RECORD = "kernel_steps_counters"
NAMES = ("4 split pairs", "4 strided loads", "4 strided stores", "4 strided pairs")
CASE: Case = CASES[0]
"""The largest shape: nothing of a call is in the L2 cache when the next one begins."""
COLUMNS = {
    "dram_read": ncu.READ,
    "dram_written": ncu.WRITTEN,
    "l2_read_sectors": ncu.SECTORS[0],
    "l2_written_sectors": ncu.SECTORS[1],
    "load_sectors": ncu.COLUMNS["load_sectors"],
    "store_sectors": ncu.COLUMNS["store_sectors"],
    "dram_percent": ncu.COLUMNS["dram_percent"],
    "issue_percent": ncu.COLUMNS["issue_percent"],
    "counted_ns": ncu.TIME,
}
"""Short names -> counters. ``load_sectors`` and ``store_sectors`` are of a request, on average."""


def count() -> None:
    """Launch each kernel in a range of its own; Nsight Compute listens."""
    (inputs,) = CASE.inputs(1, "cuda")
    for number, name in enumerate(NAMES):
        y = torch.empty_like(inputs.x)
        ncu.counted(STEPS[name].plan(inputs, y), number)


def table(counters: pd.DataFrame) -> pd.DataFrame:
    """A row for each kernel: contender, the shape, its bytes, and `COLUMNS`.

    Args:
        counters: the result of `ncu.run`.
    """
    shape = {"tokens": CASE.tokens, "heads": CASE.heads, "head_dim": CASE.head_dim, "bytes": CASE.bytes}
    rows = [
        {"contender": NAMES[int(one.range)], **shape, **{name: one[metric] for name, metric in COLUMNS.items()}}
        for _, one in counters.iterrows()
    ]
    return pd.DataFrame(rows)


def main() -> None:
    if sys.argv[1:] == ["--count"]:
        count()
        return
    assert __spec__ is not None
    found = ncu.run(__spec__.name, ["--count"], os.environ.get("CUDA_VISIBLE_DEVICES", "0"))
    why = "Nsight Compute launched them, in a process of its own"
    code = {"protocol": staleness.numbers(RECORD), "kernels_unknown": why}
    records.write(RECORD, table(found), parameters={"smoke": False}, **code)


if __name__ == "__main__":
    main()
