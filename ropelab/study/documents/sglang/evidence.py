"""The evidence for the claims of SGLang#14302 that a CPU computes in seconds."""

from collections.abc import Callable
from itertools import product

import pandas as pd
import torch

from ropelab import rotary_table
from ropelab.bench.records import ROOT
from ropelab.bench.unavailable import Unavailable
from ropelab.interop import sglang as interop
from ropelab.kernels import use_backend
from ropelab.layout.pairing import join
from ropelab.study.documents.sglang import calls, operators
from ropelab.study.documents.sglang.names import HEAD_SIZES
from ropelab.study.engine.computed import evidence
from ropelab.study.engine.sources import facts, where

DOCUMENTS = ROOT / "data" / "documents"

OUR_OPERATOR, THEIR_OPERATOR = "ropelab", "first version (model)"
TOKENS, D = 5, 8
ADJACENT, HALVES, NEITHER = "adjacent pairs", "halves", "neither"
QWEN_IMAGE_CALLS = 60 * 50 * 2 * 2
"""The calls of the rotation in one image. The document does not state this number.

The factors are the blocks, the steps, a conditional and an unconditional pass, and image and text tokens. They follow
the published configuration of Qwen-Image (60 blocks, 50 steps, true classifier-free guidance).
"""


@evidence("sglang_flags", "computed on the CPU: each convention on the same random heads")
def flags() -> pd.DataFrame:
    """The truth table of the layout flag: columns implementation, flag, value, formula, says.

    ``formula`` is the formula that the result agrees with, and ``says`` is the formula that the flag's name promises.
    """
    rows = []
    for (implementation, flag), rotate in _flagged().items():
        for value in (True, False):
            adjacent = value == (flag in ("interleaved", "use_real_unbind_dim=-1"))
            rows.append({
                "implementation": implementation, "flag": flag, "value": value, "formula": _formula_of(rotate, value),
                "says": ADJACENT if adjacent else HALVES,
            })  # fmt: skip
    return pd.DataFrame(rows)


@evidence("sglang_sources", "facts of the files (data/sources.toml, data/documents/facts.csv)")
def sources() -> pd.DataFrame:
    """The document's test and benchmark: columns file, read, defines (the helper that makes tables), flag, layout.

    ``flag`` is the value of the layout flag that the file passes, and ``layout`` the formula that the value selects.
    """
    rows = []
    for entry in facts("test", "sglang"):
        found, theirs = entry["found"], _flagged()[THEIR_OPERATOR, "is_neox"]
        rows.append({
            "file": entry["path"], "read": where(entry), "defines": bool(found["helper"]), "flag": found["flag"],
            "layout": _formula_of(theirs, found["flag"] == "True"),
        })  # fmt: skip
    return pd.DataFrame(rows)


def _flagged() -> dict[tuple[str, str], Callable]:
    """(Implementation, flag) -> ``rotate(x, cos, sin, value)`` in place; x ``[T, H, D]``, tables ``[T, D/2]``."""

    def ours(x, cos, sin, value):
        interop.rotary_embedding_cos_sin(cos, sin, x, None, D, value)

    def ours_cache(x, cos, sin, value):
        cache = torch.cat((cos, sin), -1)
        interop.apply_rope_with_cos_sin_cache_inplace(torch.arange(TOKENS), x, None, D, cache, value)

    def theirs(x, cos, sin, value):
        tables = (cos, sin) if value else (join(t, t, "split_half") for t in (cos, sin))
        operators.document(*tables, x, None, D, value)

    def theirs_positions(x, cos, sin, value):
        operators.positions_operator(torch.arange(TOKENS), x, None, D, torch.cat((cos, sin), -1), value)

    found = {
        (THEIR_OPERATOR, "is_neox"): theirs,
        ("vLLM, FlashInfer (model)", "is_neox"): theirs_positions,
        ("ropelab, positions", "is_neox"): ours_cache,
        ("ropelab, cos and sin", "interleaved"): ours,
    }
    try:
        version, apply = operators.diffusers()
    except Unavailable:
        return found

    def diffusers(x, cos, sin, value):
        tables = tuple(join(t, t, "interleaved" if value else "split_half") for t in (cos, sin))
        options = {"use_real_unbind_dim": -1 if value else -2, "sequence_dim": 1}
        x.copy_(apply(x[None], tables, **options)[0])

    return found | {(f"diffusers {version}", "use_real_unbind_dim=-1"): diffusers}


def _formula_of(rotate: Callable, value: bool) -> str:
    x = calls.random_heads(TOKENS, 3, D)
    cos, sin = _tables(TOKENS, D)
    y = x.clone()
    rotate(y, cos, sin, value)
    for layout, name in (("interleaved", ADJACENT), ("split_half", HALVES)):
        if torch.allclose(y.double(), calls.exact(x, cos, sin, layout), rtol=0, atol=1e-5):
            return name
    return NEITHER


@evidence("sglang_shapes", "computed on the CPU with our model of the first version, and with ours")
def shapes() -> pd.DataFrame:
    """The table of `calls.outcomes` of the models; the record sglang_operator_calls has the published operator's."""
    theirs, ours = operators.document, interop.rotary_embedding_cos_sin
    size = calls.HEAD_SIZE
    with use_backend("torch"):  # even where Triton would interpret our kernel
        return calls.outcomes(
            {
                THEIR_OPERATOR: lambda tables, query, key, flag: theirs(*tables, query, key, size, flag),
                OUR_OPERATOR: lambda tables, query, key, flag: ours(*tables, query, key, size, flag),
            },
            "cpu",
        )


@evidence("sglang_accuracy", "computed on the CPU: float32 maths as in the document's operator")
def accuracy() -> pd.DataFrame:
    """The relative L2 errors of the model of the first version, and the errors that its tables add.

    The record sglang_operator_test has the calls of the published operator.

    Columns:
        operator, dtype.
        position: the position of the last of 256 tokens.
        same: the error against float64 with the very same rounded tables, as a test sees it.
        exact: the error against float64 with exact tables; the operator takes them rounded to the dtype of q.
    """
    rows = []
    for dtype, last in product((torch.bfloat16, torch.float16, torch.float32), (255, 8191, 65535)):
        positions = torch.arange(last - 255, last + 1)
        x = torch.randn(256, 4, 128, generator=torch.Generator().manual_seed(0)).to(dtype)
        exact = [t[positions] for t in rotary_table(last + 1, 128, dtype=torch.float64)]
        rounded = [t.to(dtype) for t in exact]
        y = _rotated(x, rounded)
        same, true = (_relative(y, calls.exact(x, *tables, "interleaved")) for tables in (rounded, exact))
        rows.append({"operator": THEIR_OPERATOR, "dtype": str(dtype).removeprefix("torch."), "position": last,
                     "same": same, "exact": true})  # fmt: skip
    return pd.DataFrame(rows)


def _rotated(x: torch.Tensor, tables) -> torch.Tensor:
    y = x.clone()
    operators.document(*tables, y, None, x.shape[-1], True)
    return y


@evidence("sglang_alignment", "derived from the head sizes of the document's tests, and 96")
def alignment() -> pd.DataFrame:
    """The alignment of the parts of 16-bit tensors that begin where torch allocates them, for any heads and tokens.

    Columns:
        head_dim, part, stride_bytes.
        listed: whether the document's benchmarks have this head size.
        multiple: the largest power of two that divides the address of every such part, in bytes.
        aligned: whether every such part begins at a multiple of 16 bytes.
    """
    rows, listed = [], set(pd.read_csv(DOCUMENTS / "sglang_14302_grids.csv").head_dim)
    for size in HEAD_SIZES:
        for part, elements in (("head", size), ("second half of a head", size // 2), ("row of a table", size // 2)):
            stride = 2 * elements
            rows.append({
                "head_dim": size, "listed": size in listed, "part": part, "stride_bytes": stride,
                "multiple": stride & -stride, "aligned": stride % 16 == 0,
            })  # fmt: skip
    return pd.DataFrame(rows)


@evidence("sglang_published_e2e", "the document's table of stages")
def published_e2e() -> pd.DataFrame:
    """The document's stages, with each change computed again.

    Columns row, baseline, new, stated_change_percent, change_ms, change_percent.
    """
    frame = pd.read_csv(DOCUMENTS / "sglang_14302_e2e.csv")
    change = frame.new - frame.baseline
    return frame.assign(change_ms=change, change_percent=100 * change / frame.baseline)


@evidence("sglang_published_kernel", "the document's mean kernel times")
def published_kernel() -> pd.DataFrame:
    """The document's kernel times on Qwen-Image, and two times of an image that follow from them.

    Columns:
        before_us, after_us, ratio.
        calls: the assumed calls of an image, `QWEN_IMAGE_CALLS`.
        expected_ms: the time that is saved if the kernel before was slower by the document's factor for the positions
            API (SG-10).
        all_ms: the time of the whole rotation with the slower kernel, which is more than a faster kernel can save.
    """
    times = pd.read_csv(DOCUMENTS / "sglang_14302_kernel_us.csv").set_index("version").average_us
    gain = published_speedups().low["SG-10"]
    milliseconds = QWEN_IMAGE_CALLS / 1000
    return pd.DataFrame([{
        "before_us": times.before, "after_us": times.after, "ratio": times.before / times.after,
        "calls": QWEN_IMAGE_CALLS, "expected_ms": (gain - 1) * times.after * milliseconds,
        "all_ms": max(times.before, times.after) * milliseconds,
    }])  # fmt: skip


def published_speedups() -> pd.DataFrame:
    """The speed-ups that the document states, indexed by claim: columns what, low, high."""
    return pd.read_csv(DOCUMENTS / "sglang_14302_speedups.csv").set_index("claim")


# -------------------------------------------------------------------------------------------------------- helpers


def _tables(tokens: int, rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables for the positions from 1 on, because at position 0 both formulas are the identity."""
    return tuple(table[1:].contiguous() for table in rotary_table(tokens + 1, rotary_dim))


def _relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()
