"""Run a module under Nsight Compute, and read the counters of the kernels in its ranges."""

import csv
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from glob import glob
from pathlib import Path

import pandas as pd
import torch

STALLS = {
    "barrier": "wait at a barrier",
    "branch_resolving": "wait for a branch",
    "dispatch_stall": "wait for the dispatcher",
    "drain": "wait for their last stores",
    "gmma": "wait for the tensor cores",
    "imc_miss": "wait for constants",
    "lg_throttle": "wait to issue accesses of memory",
    "long_scoreboard": "wait for memory",
    "math_pipe_throttle": "wait for an arithmetic unit",
    "membar": "wait for a memory barrier",
    "mio_throttle": "wait to issue accesses of shared memory",
    "misc": "wait for something else",
    "no_instruction": "wait for instructions",
    "not_selected": "wait for their turn",
    "short_scoreboard": "wait for shared memory or a special function",
    "sleeping": "sleep",
    "tex_throttle": "wait for the texture unit",
    "wait": "wait for the fixed latency of an instruction",
}
"""The reasons for which a warp issues nothing, as Nsight Compute names them -> the reason in words."""
TIME, READ, WRITTEN = "gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum"
SECTORS = tuple(f"lts__t_sectors_srcunit_tex_op_{way}.sum" for way in ("read", "write"))
"""Sectors between the multiprocessors and the L2 cache, without those that its two halves exchange."""
BLOCK = "launch__block_size"
FITS = {
    "launch__occupancy_limit_blocks": "blocks",
    "launch__occupancy_limit_registers": "registers",
    "launch__occupancy_limit_shared_mem": "shared memory",
    "launch__occupancy_limit_warps": "warps",
}
"""The blocks that fit a multiprocessor -> the resource that limits them."""
COLUMNS = {
    "registers": "launch__registers_per_thread",
    "waves": "launch__waves_per_multiprocessor",
    "warps_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "issue_percent": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "load_sectors": "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_ld.ratio",
    "store_sectors": "l1tex__average_t_sectors_per_request_pipe_lsu_mem_global_op_st.ratio",
}
"""Short names -> counters that a table shows as they are."""
_UNITS = {TIME: ("ns", "nsecond"), READ: ("byte",), WRITTEN: ("byte",)}
_RANGE = re.compile(r"ropelab range (\d+)")


def stall(reason: str) -> str:
    """The counter of a reason of `STALLS`: the warps that wait for it whenever a warp issues."""
    return f"smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"


METRICS = (TIME, READ, WRITTEN, *SECTORS, BLOCK, *FITS, *COLUMNS.values(), *map(stall, STALLS))


def run(module: str, arguments: Sequence[object], gpu: str) -> pd.DataFrame:
    """Run ``python -m module arguments`` on a GPU, under Nsight Compute; return the counters of its `counted` calls.

    Args:
        gpu: the GPU as CUDA_VISIBLE_DEVICES names it.

    Raises:
        FileNotFoundError: there is no Nsight Compute.
        RuntimeError: Nsight Compute or the module failed.
    """
    program = shutil.which("ncu") or max(glob("/opt/nvidia/nsight-compute/*/ncu"), default=None)
    if program is None:
        raise FileNotFoundError("ncu: expected Nsight Compute on the PATH or under /opt/nvidia/nsight-compute")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "counters.csv")
        # Nsight Compute has a lock in the folder for temporary files; profilers of other GPUs need not wait for it.
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": gpu, "TMPDIR": folder}
        command = [
            program, "--csv", "--page", "raw", "--log-file", log, "--print-units", "base", "--nvtx",
            "--print-kernel-base", "function", "--profile-from-start", "off", "--clock-control", "none",
            "--target-processes", "application-only", "--metrics", ",".join(METRICS),
            sys.executable, "-m", module, *arguments,
        ]  # fmt: skip
        done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True, check=False)
        said = log.read_text() if log.exists() else ""
    if done.returncode:
        raise RuntimeError(f"{module}: {(said + done.stdout + done.stderr).strip()[-3000:]}")
    return parsed(said)


def counted(call: Callable[[], object], number: int) -> None:
    """Warm a call up, and run it once for the profiler, in a range with a number.

    The range is one of the thread and one of the process, because a backward has a thread of its own.
    """
    name = f"ropelab range {number}"
    call()
    torch.cuda.synchronize()
    of_process = torch.cuda.nvtx.range_start(name)
    with torch.cuda.nvtx.range(name):
        torch.cuda.cudart().cudaProfilerStart()
        call()
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaProfilerStop()
    torch.cuda.nvtx.range_end(of_process)


def parsed(text: str) -> pd.DataFrame:
    """The raw page of Nsight Compute in CSV: a row for each kernel, with range (its number), kernel, and `METRICS`.

    The page has a row of units below its head, and quotes every value. Other lines are messages.

    Raises:
        ValueError: the page has no kernel, another unit, or a kernel outside the ranges.
    """
    lines = [line for line in text.splitlines() if line.startswith('"')]
    if len(lines) < 3:
        raise ValueError(f"expected a head, units and kernels, got {text.strip()[-1000:]!r}")
    units, *kernels = csv.DictReader(io.StringIO("\n".join(lines)))
    for name, known in _UNITS.items():
        if units.get(name) not in known:
            raise ValueError(f"{name}: expected the unit {' or '.join(known)}, got {units.get(name)!r}")
    found = []
    for row in kernels:
        match = _RANGE.search(" ".join(map(str, row.values())))
        if match is None:
            raise ValueError(f"{row['Kernel Name']}: expected a range of ours, got none")
        about = {"range": int(match[1]), "kernel": row["Kernel Name"]}
        found.append(about | {name: _number(row.get(name, "")) for name in METRICS})
    return pd.DataFrame(found)


def _number(text: str) -> float:
    try:
        return float(text.replace(",", ""))
    except ValueError:  # Nsight Compute writes "n/a" for a counter that the GPU lacks
        return float("nan")
