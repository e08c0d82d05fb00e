"""Two processes that share queries and keys as DTensors compute what one process computes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
RANKS = 2
SENTENCES = (
    "calls: the bits of one process",
    "gradients of weights and tables: within the bound",
    "a model, tensor parallel: within the bound",
    "a model, context parallel: within the bound",
    "refusals: named",
    "compiled: the bits of the eager call",
)

nccl = pytest.param(
    "nccl",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs"),
    ],
)


@pytest.mark.skipif(not dist.is_available(), reason="this torch was built without torch.distributed")
@pytest.mark.parametrize("backend", ["gloo", nccl])
def test_ranks_compute_what_one_process_computes(backend, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.interop.sharded_rank", backend, f"file://{tmp_path}/rendezvous"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(RANKS)], cwd=ROOT, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
        assert all(sentence in output for sentence in SENTENCES), output
