"""Two processes compute what one computes: DTensors of queries and keys, and sequences that both share."""

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from tests.environments import ROOT

RANKS = 2
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not dist.is_available(), reason="this torch was built without torch.distributed"),
]
GPUS = pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs")


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=[pytest.mark.gpu, GPUS])])
def test_ranks_compute_what_one_process_computes(backend, tmp_path):
    """The ranks of both programs run at the same time."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", f"tests.interop.{program}", backend, f"file://{tmp_path}/{program}", f"{rank}",
             f"{RANKS}"],
            cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for program in ("sharded_rank", "context_parallel_rank") for rank in range(RANKS)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0 and output.endswith("right\n"), output
