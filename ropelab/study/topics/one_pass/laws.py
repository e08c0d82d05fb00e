"""Hold the pass, and the catalogue of faults of such operators, to the laws."""

import pandas as pd
import torch

from ropelab.bench import packages
from ropelab.bench.peers import vllm
from ropelab.bench.workers import spread
from ropelab.conformance import CACHE_CONVENTIONS, CACHE_LAWS, verify
from ropelab.conformance.cache.faults import CACHE_FAULTS
from ropelab.kernels import use_backend
from ropelab.paged_cache import rope_and_cache
from ropelab.study.engine.words import listed

SMALL = {"head_dim": 8, "q_heads": 2, "k_heads": 1}
"""The sizes of the heads where a kernel is interpreted."""
FEW = ("definition", "other_slots_unchanged", "equals_separate_launches")
FEW_FAULTS = 3
VLLM = {
    "fused_qknorm_rope_cache": {"head_dim": 128, "q_heads": 32, "k_heads": 8},
    "concat_and_cache_mla_rope_fused": {"head_dim": 64, "q_heads": 16},
}
"""The name of vLLM's operator, which is also the name of its convention -> the sizes that the operator takes."""


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
        rope_and_cache, "rope_and_cache", dtype=torch.bfloat16, device="cuda" if has_gpu else "cpu", diagnose=False,
        laws=FEW if smoke else tuple(CACHE_LAWS), shrink=False, **({} if has_gpu else SMALL),
    )  # fmt: skip
    return pd.DataFrame(
        {"law": result.law, "statement": result.statement, "latex": CACHE_LAWS[result.law].latex,
         "status": result.status, "violation": result.violation, "bound": result.bound}
        for result in report.results
    )  # fmt: skip


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
            rope_and_cache, "rope_and_cache", dtype=torch.bfloat16, device=device, diagnose=False, laws=laws,
            shrink=False, **VARIANTS[words],
        )  # fmt: skip
    applies = [result for result in report.results if result.status != "not applicable"]
    return {"pass": words, "kept": sum(result.status == "pass" for result in applies), "laws": len(applies)}


def faults(*, smoke: bool = False) -> pd.DataFrame:
    """Every fault of the catalogue, held to every law.

    Args:
        smoke: only the first `FEW_FAULTS` faults.

    Returns:
        A row for each fault: ``fault``, ``mistake``, ``seen in``, ``laws that it breaks``, and whether the diagnosis
        names it first (``named``).
    """
    rows = []
    for fault in list(CACHE_FAULTS.values())[: FEW_FAULTS if smoke else None]:
        report = verify(fault.function, fault.convention, shrink=False, **fault.options)
        rows.append(
            {"fault": fault.name, "mistake": fault.sentence, "seen in": fault.seen_in or "",
             "laws that it breaks": listed(report.failed),
             "named": [found.fault.name for found in report.diagnosis][:1] == [fault.name]}
        )  # fmt: skip
    return pd.DataFrame(rows)


def engines(*, smoke: bool = False) -> pd.DataFrame:
    """vLLM's operators, held to the laws of operators that write a cache, where there is a GPU and the library.

    Args:
        smoke: only the laws in `FEW`.

    Returns:
        A row for each operator: ``operator``; ``verdict``, or why it was not run; ``kept``, the number of laws that it
        keeps, of the laws that apply; and ``remarks`` of the laws.
    """
    rows = []
    for name, sizes in VLLM.items():
        row = {"operator": name, "kept": "", "remarks": ""}
        try:
            if not torch.cuda.is_available():
                raise packages.NotInstalled("it needs an NVIDIA GPU")
            report = verify(
                getattr(vllm.operators(), name), name, device="cuda", dtype=torch.bfloat16, diagnose=False,
                laws=FEW[:2] if smoke else None, shrink=False, **sizes,
            )  # fmt: skip
            applies = [result for result in report.results if result.status != "not applicable"]
            row["kept"] = f"{sum(result.status == 'pass' for result in applies)} of {len(applies)}"
            row["remarks"] = "; ".join(result.message for result in applies if result.message)
            rows.append(row | {"verdict": report.verdict})
        except packages.NotInstalled as reason:
            rows.append(row | {"verdict": f"not run: {reason}"})
    return pd.DataFrame(rows)[["operator", "verdict", "kept", "remarks"]]


def conventions() -> pd.DataFrame:
    """The conventions of operators that write a cache: name and call."""
    calls = {name: convention.signature for name, convention in CACHE_CONVENTIONS.items()}
    return pd.DataFrame({"convention": list(calls), "call": list(calls.values())})
