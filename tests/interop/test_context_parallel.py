"""Two processes that share every sequence rotate the same bits as one that has the whole."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ropelab.layout.seq_format import SEQ_FORMATS
from ropelab.positions.packed import CHUNKS

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
RANKS = 2

nccl = pytest.param(
    "nccl",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason=f"needs {RANKS} GPUs"),
    ],
)


@pytest.mark.skipif(not dist.is_available(), reason="this torch was built without torch.distributed")
@pytest.mark.parametrize("backend", ["gloo", nccl])
def test_ranks_rotate_the_bits_of_the_whole(backend, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.interop.context_parallel_rank", backend, f"file://{tmp_path}/rendezvous"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(RANKS)],
            cwd=ROOT,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        for rank in range(RANKS)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output
        assert output.count("the same bits") == len(SEQ_FORMATS) * len(CHUNKS) * 2, output
