"""Count and time the launches of DeepSpeed's function and of ours, for the shapes that callers pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import pandas as pd
import torch

from ropelab import rotary_table
from ropelab.bench import timing
from ropelab.bench.cells import progress
from ropelab.bench.copies import copies
from ropelab.bench.launches import kernel_names, peak_bytes
from ropelab.bench.unavailable import Unavailable
from ropelab.bench.workloads import DIRECTIONS
from ropelab.interop.broadcast import formula
from ropelab.interop.deepspeed import apply_rotary_pos_emb
from ropelab.study.documents.deepspeed import peers
from ropelab.study.documents.deepspeed.dispatch import Function, merged_function, rounding_bound
from ropelab.study.documents.deepspeed.names import FORMULA, OURS, TORCHEMBED

ROUNDS, SMOKE_ROUNDS = 10, 3


@dataclass(frozen=True)
class Caller:
    """Shapes of one call, and whether DeepSpeed's tree has such a caller."""

    name: str
    t: tuple[int, ...]
    tables: tuple[int, ...]
    in_tree: bool = False
    dtype: torch.dtype = torch.bfloat16
    table_dtype: torch.dtype = torch.bfloat16


def cases(tokens: int = 4096) -> tuple[Caller, ...]:
    """The callers, each with ``tokens`` tokens of 32 heads of 128 features: 32 MiB of bfloat16 by default."""
    h, d, quarter = 32, 128, tokens // 4
    fpdt = {"in_tree": True}
    mixed = {"dtype": torch.float16, "table_dtype": torch.float32}
    return (
        Caller("[s, b, h, d] with [s, 1, 1, d]", (tokens, 1, h, d), (tokens, 1, 1, d)),
        Caller("[s, b, h, d] with [s, 1, 1, d/2]", (tokens, 1, h, d), (tokens, 1, 1, d // 2)),
        Caller("[s, b, h, d] fp16 with [s, 1, 1, d] fp32", (tokens, 1, h, d), (tokens, 1, 1, d), **mixed),
        Caller("[b, s, h, d] with [1, s, 1, d]", (4, quarter, h, d), (1, quarter, 1, d), **fpdt),
        Caller("[1, s, h, d] with [1, s, 1, d]", (1, tokens, h, d), (1, tokens, 1, d), **fpdt),
        Caller("[1, s, h, d] fp16 with [1, s, 1, d] fp32", (1, tokens, h, d), (1, tokens, 1, d), **fpdt, **mixed),
        Caller("[b, s, h, d] with [b, s, 1, d]", (4, quarter, h, d), (4, quarter, 1, d)),
        Caller("[b, h, s, d] with [1, 1, s, d]", (1, h, tokens, d), (1, 1, tokens, d)),
    )


def callers(*, smoke: bool = False) -> pd.DataFrame:
    """Launches, memory and GPU time of each caller's call, forward and backward.

    Contenders are DeepSpeed's function with the newest torchembed at hand, DeepSpeed's function without torchembed (the
    formula), and `ropelab.interop.deepspeed`. Each contender is checked in a direction before it is timed there.

    Returns:
        Columns caller, in_tree, t, tables, dtype, table_dtype, direction, contender, code (which of DeepSpeed's code
        was run), status, gate_open (the kernel was called), relative_error, launches, kernels, tensor_bytes,
        extra_bytes (peak of allocated memory beyond inputs and result), median_us, copy_us (the best copy of ``t`` in
        the same rounds) and fraction_of_copy.
    """
    if not torch.cuda.is_available():
        raise Unavailable("launches are counted on a GPU")
    chosen = cases(64)[2:4] if smoke else cases()
    frames = [_case(case, "cuda", smoke) for case in progress(chosen, lambda case: case.name)]
    return pd.concat(frames, ignore_index=True)


def _case(case: Caller, device: str, smoke: bool) -> pd.DataFrame:
    generator = torch.Generator(device).manual_seed(0)
    sets = max(2, -(-2 * timing.cache_bytes() // _bytes(case))) if device == "cuda" and not smoke else 2

    def draw() -> torch.Tensor:
        return torch.randn(case.t, generator=generator, device=device, dtype=case.dtype)

    tensors, cotangents = ([draw() for _ in range(sets)] for _ in range(2))
    tables = caller_tables(case, device)
    functions, gate = contenders(device)
    rows = []
    for direction in DIRECTIONS:
        calls, found = {}, []
        for name, (function, code) in functions.items():
            gate.clear()
            outcome = checked(function, case, tensors[0], cotangents[0], tables, direction)
            found.append({"contender": name, "code": code, "gate_open": bool(gate), **outcome})
            if outcome["status"] == "ok":
                calls[name] = partial(_calls, function, tensors, cotangents, tables, direction)
        rows += _timed(found, calls, case, direction, cotangents if direction == "backward" else tensors, smoke)
    about = {
        "caller": case.name, "in_tree": case.in_tree, "t": str(case.t), "tables": str(case.tables),
        "dtype": _name(case.dtype), "table_dtype": _name(case.table_dtype),
    }  # fmt: skip
    return pd.DataFrame([about | row for row in rows])


def caller_tables(case: Caller, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables whose two halves are equal, as in DeepSpeed."""
    rows = torch.Size(case.tables[:-1]).numel()
    halves = rotary_table(rows, case.tables[-1], dtype=case.table_dtype, device=device)
    return tuple(torch.cat((half, half), -1).reshape(case.tables) for half in halves)


def contenders(device: str) -> tuple[dict[str, tuple[Function, str]], list]:
    """Name -> the function and the source of its code; and a list that grows with every call of torchembed's kernel."""
    reached: list[bool] = []
    found: dict[str, tuple[Function, str]] = {OURS: (apply_rotary_pos_emb, "ropelab.interop.deepspeed")}
    try:
        found = {FORMULA: merged_function(available=False)} | found
        kernel = peers.torchembed().fused_rope_forward
    except Unavailable:
        return found, reached

    def rotate(*args):
        reached.append(True)
        return kernel(*args)

    merged = merged_function(rotate, on_device=lambda t: t.is_cuda or device == "cpu")
    return {TORCHEMBED: merged} | found, reached


def checked(
    function: Function, case: Caller, t: torch.Tensor, cotangent: torch.Tensor, tables: tuple, direction: str
) -> dict:
    """status and relative_error (L2) of the result, or of the gradient, against the formula in float64.

    The error may be `rounding_bound`; the narrowest dtype on the way counts.
    """
    exact, wide = t.double().requires_grad_(), [table.double() for table in tables]
    expected = formula(exact, *wide)
    dtype = torch.promote_types(case.dtype, case.table_dtype)
    try:
        leaf = t.clone().requires_grad_()
        found = function(leaf, *tables)
        if found.dtype != dtype:
            return {"status": f"wrong: the result is {_name(found.dtype)}, the formula's {_name(dtype)}"}
        if direction == "backward":
            (found,) = torch.autograd.grad(found, leaf, cotangent.to(dtype))
            (expected,) = torch.autograd.grad(expected, exact, cotangent.double())
            dtype = case.dtype
    except Exception as error:  # a contender that cannot run is a result too
        return {"status": timing.failure(error)}
    error = ((found.double() - expected).norm() / expected.norm()).item()
    allowed = rounding_bound(dtype)
    status = "ok" if error <= allowed else f"wrong: relative error {error:.3g}, at most {allowed:.3g} allowed"
    return {"status": status, "relative_error": error}


def _calls(function: Function, tensors, cotangents, tables, direction: str) -> list[Callable]:
    if direction == "forward":
        return [partial(function, t, *tables) for t in tensors]
    leaves = [t.detach().requires_grad_() for t in tensors]
    results = [function(leaf, *tables) for leaf in leaves]
    return [
        partial(torch.autograd.grad, y, leaf, g.to(y.dtype), retain_graph=True)
        for y, leaf, g in zip(results, leaves, cotangents, strict=True)
    ]


def _timed(found: list[dict], calls: Mapping[str, Callable], case: Caller, direction: str, sources, smoke: bool):
    """The rows of one direction, with launches, memory and times where there are any."""
    copied = {name: partial(_copies, copy, sources) for name, copy in copies().items()}
    frame = timing.gpu_times(dict(calls) | copied, rounds=SMOKE_ROUNDS if smoke else ROUNDS)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # frees the memory of the graphs
    times = frame.set_index("contender")
    copy_us = times.median_us[list(copied)].min()
    for row in found:
        row |= {"direction": direction, "tensor_bytes": _bytes(case), "copy_us": copy_us}
        name = row["contender"]
        if name not in calls:
            continue
        row["status"] = times.status[name]
        if row["status"] == "ok":
            row |= _on_the_gpu(calls[name]()[0])
            row |= {"median_us": times.median_us[name], "fraction_of_copy": copy_us / times.median_us[name]}
    return found


def _on_the_gpu(call: Callable) -> dict:
    names = kernel_names(call)
    result = call()
    result = result[0] if isinstance(result, tuple) else result
    result_bytes = result.numel() * result.element_size()
    del result
    return {"launches": len(names), "kernels": "; ".join(names), "extra_bytes": peak_bytes(call) - result_bytes}


def _copies(copy: Callable, tensors) -> list[Callable]:
    return [partial(copy, [t.detach()]) for t in tensors]


def _bytes(case: Caller) -> int:
    return torch.Size(case.t).numel() * case.dtype.itemsize


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
