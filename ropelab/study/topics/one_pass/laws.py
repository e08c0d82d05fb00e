"""Hold the pass to the laws of operators that write a cache."""

import pandas as pd
import torch

from ropelab.bench.workers import spread
from ropelab.conformance import CACHE_LAWS, verify
from ropelab.kernels import use_backend
from ropelab.paged_cache import rope_and_cache
from ropelab.study.topics.gradients import bound_evidence

SMALL = {"head_dim": 8, "q_heads": 2, "k_heads": 1}
"""The sizes of the heads where a kernel is interpreted."""
FEW = ("definition", "other_slots_unchanged", "equals_separate_launches")
OF_A_CACHE = (
    "other_slots_unchanged", "skipped_slots", "slots_permute", "scale_law", "neighbours", "stored_is_the_result"
)  # fmt: skip
"""Laws that a cache adds to those of a rotation."""


def kept(*, smoke: bool = False) -> pd.DataFrame:
    """`ropelab.rope_and_cache`, held to every law on this machine, in bfloat16.

    Args:
        smoke: only the laws in `FEW`.

    Returns:
        A row for each law: ``law``, ``statement``, ``latex``, ``status``, and ``violation`` and ``bound`` of the
        element that comes nearest to its bound.
    """
    has_gpu = torch.cuda.is_available()
    report = verify(
        rope_and_cache, "rope_and_cache", dtype=torch.bfloat16, device="cuda" if has_gpu else "cpu",
        laws=FEW if smoke else tuple(CACHE_LAWS), shrink=False, **({} if has_gpu else SMALL),
    )  # fmt: skip
    return pd.DataFrame(
        {"law": result.law, "statement": result.statement, "latex": CACHE_LAWS[result.law].latex,
         "status": result.status, "violation": result.violation, "bound": result.bound}
        for result in report.results
    )  # fmt: skip


def sentence(kept: pd.DataFrame) -> str:
    """How many of the laws that apply `kept` found kept."""
    asked = kept[kept.status != "not applicable"]
    return (
        f"`rope_and_cache` on {bound_evidence.backend()} keeps {(asked.status == 'pass').sum()} of {len(asked)} laws "
        "of operators that write a cache. One of these laws asks for the same bits as the separate functions."
    )


VARIANTS = {
    "norm of each head, then rotation": {},
    "rotation, then norm of each head": {"norm_last": True},
    "norm across heads, then rotation": {"norm_across": True},
    "rotation, then norm across heads": {"norm_last": True, "norm_across": True},
    "norm of each head, then rotation, without tables": {"table_free": True},
}
"""A pass in words -> the arguments of `verify` that describe it."""


def variants(*, smoke: bool = False) -> pd.DataFrame:
    """Every kind of pass, held to every law in bfloat16; without a GPU in torch operations.

    On a GPU every kind has a process of its own, because most of the time goes into compiling kernels.

    Args:
        smoke: only the laws in `FEW`.

    Returns:
        A row for each pass: ``pass``, ``kept``, the number of laws that it keeps, and ``laws``, the number that apply.
    """
    laws = FEW if smoke else tuple(CACHE_LAWS)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    jobs = [(_held_variant, (words, laws, device)) for words in VARIANTS]
    rows = {row["pass"]: row for row in spread([], jobs, here=smoke or device == "cpu")}
    return pd.DataFrame([rows[words] for words in VARIANTS])


def _held_variant(words: str, laws: tuple[str, ...], device: str) -> dict[str, object]:
    with use_backend("triton" if device == "cuda" else "torch"):
        report = verify(
            rope_and_cache, "rope_and_cache", dtype=torch.bfloat16, device=device, laws=laws,
            shrink=False, **VARIANTS[words],
        )  # fmt: skip
    applies = [result for result in report.results if result.status != "not applicable"]
    return {"pass": words, "kept": sum(result.status == "pass" for result in applies), "laws": len(applies)}
