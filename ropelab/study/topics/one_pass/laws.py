"""Hold each kind of the pass to the laws of operators that write a cache."""

from collections.abc import Iterator, Sequence

import torch

from ropelab.bench.workers import spread
from ropelab.conformance import verify
from ropelab.kernels import use_backend
from ropelab.paged_cache import rope_and_cache

FEW = ("definition", "other_slots_unchanged", "equals_separate_launches")
"""Laws for a run that shows whether everything runs."""
VARIANTS = {
    "norm of each head, then rotation": {},
    "rotation, then norm of each head": {"norm_last": True},
    "norm across heads, then rotation": {"norm_across": True},
    "rotation, then norm across heads": {"norm_last": True, "norm_across": True},
    "norm of each head, then rotation, without tables": {"table_free": True},
}
"""A pass in words -> the arguments of `verify` that describe it."""


def variants(laws: Sequence[str]) -> Iterator[dict[str, object]]:
    """Hold every kind of pass to these laws in bfloat16; without a GPU in torch operations.

    On a GPU every kind has a process of its own, because most of the time goes into compiling kernels.

    Returns:
        For each pass, as it ends: ``pass``, ``kept``, the number of laws that it keeps, and ``laws``, the number that
        apply.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return spread([], [(_held_variant, (words, tuple(laws), device)) for words in VARIANTS], here=device == "cpu")


def _held_variant(words: str, laws: tuple[str, ...], device: str) -> dict[str, object]:
    with use_backend("triton" if device == "cuda" else "torch"):
        report = verify(
            rope_and_cache, "rope_and_cache", dtype=torch.bfloat16, device=device, laws=laws,
            shrink=False, **VARIANTS[words],
        )  # fmt: skip
    applies = [result for result in report.results if result.status != "not applicable"]
    return {"pass": words, "kept": sum(result.status == "pass" for result in applies), "laws": len(applies)}
