"""Call the published operator of SGLang#14302 as the document says that it can be called. Nothing is timed.

The calls need a GPU. `evidence` calls the model of the first version in the same way, without a GPU.
"""

import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from itertools import product

import pandas as pd
import torch

from ropelab import reference, rotary_table
from ropelab.bench import packages, processes
from ropelab.bench.unavailable import Unavailable
from ropelab.layout.pairing import LAYOUTS, join
from ropelab.study.documents.sglang import kernels
from ropelab.study.documents.sglang.names import FIRST_KERNEL

Operator = Callable[[list[torch.Tensor], torch.Tensor, torch.Tensor, bool], object]
"""The signature ``operator(tables, query, key, adjacent)``. The operator rotates query and key in place."""

TOKENS, HEAD_SIZE = 6, 8
HEADS = ((4, 4), (4, 2), (4, 1))
OUT_OF_BOUNDS = "out of bounds"

_TESTED_HEADS = ((32, 8), (64, 8), (8, 8), (32, 1))
_TESTED_SIZES = (64, 128, 256, 80, 320)
_TESTED_TOKENS = (1, 256, 2048)
"""The heads and the head sizes of the pull request's test, and some of its numbers of tokens."""

FAILURES = {
    "an assertion of torch's index kernel": "torch.zeros(3, device='cuda')[torch.tensor([7], device='cuda')]",
    "torch._assert_async": "torch._assert_async(torch.zeros((), device='cuda'))",
    "a store to an illegal address": "beyond(0)[2**41:2**41 + 9].fill_(1)",
    "a store to a misaligned address": "beyond(1)[:9].fill_(1)",
    "no failure": "torch.zeros(3, device='cuda')",
}
"""The failure of a kernel in words -> the statement that starts the kernel."""

_BEYOND = """
import torch
memory = torch.ones(2**20, device="cuda")
def beyond(offset):
    about = {"data": (memory.data_ptr() + offset, False), "shape": (2**42,), "typestr": "<f4", "version": 3}
    return torch.as_tensor(type("Memory", (), {"__cuda_array_interface__": about})(), device="cuda")
torch.cuda.synchronize()
"""
"""A program that defines tensors that claim more memory than there is, or memory at an odd address."""


def operator_calls(*, smoke: bool = False) -> pd.DataFrame:
    """The outcomes of the published operator in the state that the description speaks of, as a table of `outcomes`.

    Raises:
        Unavailable: the first state is not installed.
    """
    operator = _installed("first")["first"]

    def rotate(tables, query, key, adjacent):
        operator(*tables, query, key, HEAD_SIZE, adjacent)

    return outcomes({FIRST_KERNEL: rotate}, "cuda")


def operator_test(*, smoke: bool = False) -> pd.DataFrame:
    """The pull request's test: the operator against a reference in float32 with the same tables.

    Columns operator (the state), dtype, layout, head_dim, q_heads, k_heads, tokens, difference (the largest absolute
    difference of q and k from the reference in the dtype of q). The test rotates adjacent pairs; halves are added.

    Raises:
        Unavailable: no state is installed.
    """
    rows = []
    sizes, tokens = (_TESTED_SIZES[:1], _TESTED_TOKENS[:2]) if smoke else (_TESTED_SIZES, _TESTED_TOKENS)
    cases = list(product((torch.bfloat16, torch.float16), LAYOUTS, sizes, _TESTED_HEADS, tokens))
    for name, operator in _installed(*kernels.STATES).items():
        for dtype, layout, size, (q_heads, k_heads), count in cases:
            rows.append({
                "operator": name, "dtype": str(dtype).removeprefix("torch."), "layout": layout, "head_dim": size,
                "q_heads": q_heads, "k_heads": k_heads, "tokens": count,
                "difference": _difference(operator, dtype, layout, size, (q_heads, k_heads), count),
            })  # fmt: skip
    return pd.DataFrame(rows)


def synchronize(*, smoke: bool = False) -> pd.DataFrame:
    """The exceptions that torch.cuda.synchronize raises after several failures, each in a process of its own.

    Columns failure (of the kernel, in words) and exception (the name of the class; empty if nothing is raised).

    Raises:
        Unavailable: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise Unavailable("kernels fail on a GPU")
    rows = []
    with ExitStack() as started:
        ran = {}
        for name, statement in FAILURES.items():
            ran[name] = _process(statement)
            started.callback(processes.kill, ran[name])
        for name, process in ran.items():
            output, errors = process.communicate(timeout=120)
            said = [line.removeprefix("raised:") for line in output.splitlines() if line.startswith("raised:")]
            if len(said) != 1:
                raise RuntimeError(f"{name}: expected what torch.cuda.synchronize raises, got {errors[-500:]}")
            rows.append({"failure": name, "exception": said[0]})
    return pd.DataFrame(rows)


def outcomes(operators: Mapping[str, Operator], device: str) -> pd.DataFrame:
    """The outcome of each operator for every combination of arguments.

    The tensors have two to four axes, both layouts, three ratios of heads, and tables with a column for each pair or
    for each feature. Every call asks for the rotation of whole heads of `HEAD_SIZE` features in float32.

    Returns:
        Columns operator, rank, layout, heads, tables (``"per pair"``, ``"per feature"``), claimed (whether the document
        lists the combination), outcome (``"right"``, ``"wrong"``, ``"raises ..."``, ``"out of bounds"``).
    """
    rows = []
    for rank, layout, (q_heads, k_heads), width in product((2, 3, 4), LAYOUTS, HEADS, ("per pair", "per feature")):
        interleaved = layout == "interleaved"
        cos, sin = (table[1:].contiguous().to(device) for table in rotary_table(TOKENS + 1, HEAD_SIZE))
        tables = [cos, sin] if width == "per pair" else [join(t, t, layout) for t in (cos, sin)]
        # The document's tables have a column for each pair (adjacent pairs) or for each feature (halves).
        meant = width == ("per pair" if interleaved else "per feature")
        for name, operator in operators.items():
            rows.append({
                "operator": name, "rank": rank, "layout": layout, "heads": f"{q_heads}/{k_heads}", "tables": width,
                "claimed": rank < 4 and meant,
                "outcome": _outcome(operator, (q_heads, k_heads), rank, tables, (cos, sin), layout),
            })  # fmt: skip
    return pd.DataFrame(rows)


def exact(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str) -> torch.Tensor:
    """The definition in float64 for ``[T, H, D]`` and tables of each token ``[T, R/2]``."""
    return reference.rotate(x, cos, sin, layout=layout, seq_format="thd")


def random_heads(tokens: int, heads: int, head_size: int, device: str = "cpu") -> torch.Tensor:
    """Standard normal numbers ``[T, H, D]``. The number of heads is the seed."""
    return torch.randn(tokens, heads, head_size, generator=torch.Generator().manual_seed(heads)).to(device)


def _outcome(operator: Operator, heads: Iterable[int], rank: int, tables, narrow, layout: str) -> str:
    device = narrow[0].device
    inputs = [random_heads(TOKENS, count, HEAD_SIZE, device) for count in heads]
    # The operator gets the middle of a larger memory, so that a write before or behind the heads is seen.
    memories = [torch.full((x.numel() + 2 * TOKENS * HEAD_SIZE,), 7.0, device=device) for x in inputs]
    middles = [slice(TOKENS * HEAD_SIZE, TOKENS * HEAD_SIZE + x.numel()) for x in inputs]
    query, key = (
        _of_rank(memory[middle].view(x.shape).copy_(x), rank)
        for memory, middle, x in zip(memories, middles, inputs, strict=True)
    )
    try:
        operator([table.clone() for table in tables], query, key, layout == "interleaved")
    except IndexError:
        return OUT_OF_BOUNDS
    except (ValueError, RuntimeError) as error:
        return f"raises {type(error).__name__}"
    for memory, middle in zip(memories, middles, strict=True):
        outside = torch.ones_like(memory, dtype=torch.bool)
        outside[middle] = False
        if (memory[outside] != 7.0).any():
            return OUT_OF_BOUNDS
    right = all(
        torch.allclose(y.reshape(x.shape).double(), exact(x, *narrow, layout), rtol=0, atol=1e-5)
        for y, x in zip((query, key), inputs, strict=True)
    )
    return "right" if right else "wrong"


def _of_rank(x: torch.Tensor, rank: int) -> torch.Tensor:
    """A view of ``[T, H, D]`` with two, three or four axes."""
    return {2: x.flatten(1), 3: x, 4: x.unflatten(0, (2, -1))}[rank]


def _installed(*names: str) -> dict[str, kernels.Operator]:
    """The name of a state -> the operator, for every state that is installed.

    Raises:
        Unavailable: no state is installed.
    """
    found, reasons = {}, []
    for name in names:
        try:
            found[name] = kernels.operator(name)
        except packages.NotInstalled as error:
            reasons.append(str(error))
    if not found:
        raise Unavailable(reasons[0])
    return found


def _difference(operator: kernels.Operator, dtype, layout: str, size: int, heads, count: int) -> float:
    cos, sin = (t[1:].to(dtype).cuda() for t in rotary_table(count + 1, size))
    adjacent = layout == "interleaved"
    tables = (cos, sin) if adjacent else tuple(torch.cat((t, t), dim=-1) for t in (cos, sin))
    generator = torch.Generator("cuda").manual_seed(0)
    query, key = (
        torch.randn(count, number, size, device="cuda", generator=generator).to(dtype).contiguous() for number in heads
    )
    expected = [_float32(x, cos, sin, layout) for x in (query, key)]
    operator(*tables, query, key, size, adjacent)
    return max((y - x).abs().max().item() for y, x in zip((query, key), expected, strict=True))


def _float32(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, layout: str) -> torch.Tensor:
    """The test's reference: float32 products and sums, rounded once to the dtype of x."""
    wide = x.float()
    x0, x1 = (wide[..., 0::2], wide[..., 1::2]) if layout == "interleaved" else wide.chunk(2, dim=-1)
    cos, sin = (table.float()[:, None] for table in (cos, sin))
    return join(x0 * cos - x1 * sin, x1 * cos + x0 * sin, layout).to(x.dtype)


def _process(statement: str) -> subprocess.Popen:
    program = f"""{_BEYOND}
try:
    {statement}
    torch.cuda.synchronize()
    print("raised:")
except Exception as error:
    print("raised:" + type(error).__name__)
"""
    arguments = [sys.executable, "-c", program]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
