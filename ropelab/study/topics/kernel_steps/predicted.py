"""The roofs of a step: the least time that its bytes, its instructions, its programs and their wait allow."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ropelab.bench import records
from ropelab.bench.rows import are_copies, timed
from ropelab.study.plots.gpus import short
from ropelab.study.topics.kernel_steps.machine_code import MULTIPROCESSORS, THREADS, occupancy
from ropelab.study.topics.kernel_steps.step import STEPS

SCHEDULERS = 4
"""The schedulers of a multiprocessor; each issues at most one instruction of a warp in a cycle (CUDA C++ Programming
Guide, "Multiprocessor Level")."""
START_NS = 0.57
"""The nanoseconds between the starts of two programs on an H200; `ropelab.kernels.tile_cost` rests on it too."""
WAIT_US = 0.9
"""The microseconds in which memory answers a load under load; `ropelab.kernels.tile_cost` rests on it too."""


@dataclass(frozen=True)
class Gpu:
    """A GPU as far as the predictions need it.

    Attributes:
        name: such as "H100".
        bytes_per_us: the fastest copy of the record `dense`; bytes are counted when they are read and when written.
        warps_per_us: the instructions of warps that all multiprocessors can issue.
    """

    name: str
    bytes_per_us: float
    warps_per_us: float


def gpus(where: records.Where) -> list[Gpu]:
    """Every GPU that has the record `dense`.

    Raises:
        Unusable: there is no such record.
    """
    found = []
    for record in records.of_each_gpu("dense", where):
        copies = timed(record.frame)
        copies = copies[are_copies(copies)]
        about = record.provenance["gpu"]
        megahertz = float(about["clocks.max.sm"].split()[0])
        rate = (copies.bytes / copies.median_us).max()
        found.append(Gpu(short(about["name"]), rate, about["sm_count"] * SCHEDULERS * megahertz))
    return found


def roofs(facts: Mapping[str, Any], gpu: Gpu, moved: int) -> dict[str, float]:
    """The least microseconds of a step by each resource.

    Args:
        facts: as `machine_code.facts` returns them; empty for lines of torch, of which only the bytes are known.
        moved: the bytes that the step moves.

    Returns:
        bytes: memory moves them. instructions: the schedulers issue them. starts: the GPU starts the programs one after
        another. waits: memory answers once for each wave of programs that the GPU holds at once.
    """
    found = {"bytes": moved / gpu.bytes_per_us}
    if facts:
        warps = facts["warps"] * facts["programs"]
        held = MULTIPROCESSORS * THREADS // 32 * occupancy(facts["registers"], facts["warps"])
        found |= {
            "instructions": facts["instructions"] * warps / gpu.warps_per_us,
            "starts": facts["programs"] * START_NS / 1000,
            "waits": max(1, warps / held) * WAIT_US,
        }
    return found


def bytes_of(tokens: int, heads: int, head_dim: int, rows: int) -> int:
    """The least bytes of a step in bfloat16: every feature read and written once, and ``rows`` of both tables."""
    return 2 * 2 * tokens * heads * head_dim + 2 * 4 * rows * (head_dim // 2)


def bytes_in_torch(tokens: int, heads: int, head_dim: int) -> int:
    """The bytes that the operations of step 0 read and write, each operation from memory to memory."""
    x = torch.empty(tokens, heads, head_dim, dtype=torch.bfloat16, device="meta")
    table = torch.empty(tokens, head_dim // 2, device="meta")
    with Traffic() as traffic:
        STEPS["0 torch"].kernel(x, table, table)
    return traffic.bytes


class Traffic(TorchDispatchMode):
    """Add up the bytes of the tensors that operations read and write, as ``bytes``; a view moves nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not any(returned.alias_info for returned in function._schema.returns):
            given = [x for arg in args for x in (arg if isinstance(arg, list) else [arg])]
            self.bytes += sum(x.numel() * x.itemsize for x in [*given, result] if isinstance(x, torch.Tensor))
        return result
