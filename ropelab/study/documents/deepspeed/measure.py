"""Measure the evidence for claims DS-01 to DS-17. `ropelab.bench.records` keeps the data frames.

``correctness`` needs the wheels of torchembed under ``build/peers``, and a GPU or Triton's interpreter
(TRITON_INTERPRET=1). The other measurements need a GPU.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import pandas as pd
import torch

from ropelab import apply_rope, reference, rotary_table
from ropelab.bench import timing
from ropelab.bench.copies import copies as copy_contenders
from ropelab.bench.launches import kernel_names, peak_bytes
from ropelab.bench.unavailable import Unavailable
from ropelab.interop.broadcast import formula
from ropelab.study.documents.deepspeed import peers
from ropelab.study.documents.deepspeed.dispatch import merged_function
from ropelab.study.documents.deepspeed.names import HEAD_DIM, HEADS
from ropelab.study.topics.gradients.wrong_backward import expected_error

SLICED_SEQ_LEN = 2
"""With two rows, every address that a wrong row stride leads to still lies inside the table's own memory."""

SEQ_LENS = {"cuda": (1, 8, 17, 128, 1024, 8192, 65535, 65536), "cpu": (1, 8, 17)}
"""The kernel's grid carries the tokens on an axis that ends at 65,535."""

DTYPES = {
    "cuda": (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ),
    "cpu": ((torch.float32, torch.float32), (torch.float16, torch.float32)),
}
"""The dtypes of input and tables. Triton's interpreter has no bf16 arithmetic."""


def correctness(*, smoke: bool = False) -> pd.DataFrame:
    """Errors of torchembed's kernel against the float64 definition, per version, sequence length and dtype.

    Errors are relative L2 norms. ``formula_error`` and ``formula_gradient_error`` are the errors of the plain formula
    in the same dtypes. ``wrong_backward_error`` is the error that the closed form predicts for a backward that repeats
    the forward (`topics.gradients.wrong_backward`). ``norm_ratio`` is the norm of the gradient over the norm of the
    right gradient.
    """
    device = _kernel_device()
    versions = _versions_with_kernel()
    rows = []
    for version in versions:
        rotate = peers.torchembed(version).fused_rope_forward
        for dtype, table_dtype in DTYPES[device]:
            for seq_len in SEQ_LENS["cpu" if smoke else device]:
                rows.append(_errors(version, rotate, device, seq_len, dtype, table_dtype, "whole"))
        rows.append(_errors(version, rotate, device, SLICED_SEQ_LEN, *DTYPES[device][0], "column slice"))
    return pd.DataFrame(rows)


def _errors(
    version: str, rotate: Callable, device: str, seq_len: int, dtype: torch.dtype, table_dtype: torch.dtype, table: str
) -> dict:
    generator = torch.Generator().manual_seed(seq_len)
    x, gradient = (torch.randn(HEADS, seq_len, HEAD_DIM, generator=generator).to(device, dtype) for _ in range(2))
    cos, sin = rotary_table(seq_len, HEAD_DIM, dtype=table_dtype, device=device)
    wide_cos, wide_sin = (_duplicated(half, table) for half in (cos, sin))
    row = {
        "package": "torchembed",
        "version": version,
        "device": device,
        "seq_len": seq_len,
        "dtype": _name(dtype),
        "table_dtype": _name(table_dtype),
        "table": table,
        "outcome": "ran",
    }

    def run(function: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.detach().clone().requires_grad_()
        y = function(leaf)
        (dx,) = torch.autograd.grad(y, leaf, gradient.to(y.dtype))
        return y, dx

    definition, exact_gradient = (
        reference.rotate(z.unsqueeze(2), cos, sin, layout="split_half", inverse=inverse).squeeze(2)
        for z, inverse in ((x, False), (gradient, True))
    )
    y, dx = run(lambda leaf: formula(leaf, wide_cos, wide_sin))
    row |= {
        "formula_dtype": _name(y.dtype),
        "formula_error": _relative(y, definition),
        "formula_gradient_error": _relative(dx, exact_gradient),
        "wrong_backward_error": expected_error(gradient, sin),
    }
    try:
        y, dx = run(lambda leaf: rotate(leaf, leaf.detach(), wide_cos, wide_sin)[0])
        if device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError as error:
        return row | {"outcome": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    return row | {
        "result_dtype": _name(y.dtype),
        "forward_error": _relative(y, definition),
        "gradient_error": _relative(dx, exact_gradient),
        "norm_ratio": (dx.double().norm() / exact_gradient.norm()).item(),
    }


def launch_evidence(*, smoke: bool = False) -> pd.DataFrame:
    """Kernel launches, extra memory and time of torchembed's kernel, and of DeepSpeed's calls of the kernel.

    One tensor of shape (S, B, H, D) = (4096, 1, 32, 128) in bf16, forward. ``extra_bytes`` is the peak of
    allocated memory beyond inputs and result. ``fraction_of_copy`` is the time of the best copy of the tensor over the
    time of the call.
    """
    if not torch.cuda.is_available():
        raise Unavailable("launches are counted on a GPU")
    versions = _versions_with_kernel()
    torchembed = peers.torchembed(versions[-1])
    api, code = merged_function(torchembed.fused_rope_forward, on_device=lambda t: t.is_cuda)
    half_cos, half_sin = rotary_table(4096, 128, dtype=torch.bfloat16, device="cuda")
    cos, sin = (_duplicated(half, "whole") for half in (half_cos, half_sin))
    api_tables = cos[:, None, None], sin[:, None, None]
    by_token = [torch.randn(4096, 1, 32, 128, device="cuda", dtype=torch.bfloat16) for _ in range(_buffers())]
    by_head = [t.movedim(0, -2).contiguous() for t in by_token]
    paths = {
        ("raw kernel", "head-major"): (by_head, lambda t: torchembed._fused_rope_forward_core(t, cos, sin)),
        ("fused_rope_forward", "head-major, as q and as k"): (
            by_head,
            lambda t: torchembed.fused_rope_forward(t, t, cos, sin)[0],
        ),
        ("DeepSpeed API", "contiguous [s, b, h, d]"): (by_token, lambda t: api(t, *api_tables)),
        ("DeepSpeed API", "[s, b, h, d] over head-major memory"): (
            by_head,
            lambda t: api(t.movedim(-2, 0), *api_tables),
        ),
        ("plain formula", "contiguous [s, b, h, d]"): (by_token, lambda t: formula(t, *api_tables)),
        ("ropelab", "contiguous [s, b, h, d]"): (
            by_token,
            lambda t: apply_rope(t, cos=half_cos, sin=half_sin, seq_format="sbhd"),
        ),
    }
    calls = {key: [partial(call, t) for t in tensors] for key, (tensors, call) in paths.items()}
    times, copy_us = _times_and_copy(calls, by_token)
    tensor_bytes = by_token[0].numel() * by_token[0].element_size()
    rows = []
    for (path, tensor), (call, *_) in calls.items():
        names = kernel_names(call)
        rows.append(
            {
                "path": path,
                "input": tensor,
                "version": versions[-1],
                "code": code,
                "launches": len(names),
                "kernels": "; ".join(names),
                "tensor_bytes": tensor_bytes,
                "extra_bytes": peak_bytes(call) - tensor_bytes,
                "median_us": times[path, tensor],
                "copy_us": copy_us,
                "fraction_of_copy": copy_us / times[path, tensor],
            }
        )
    return pd.DataFrame(rows)


def inductor_evidence(*, smoke: bool = False) -> pd.DataFrame:
    """The kernels that torch.compile generates for the formula, and the buffers that are not results.

    There is a row for each dtype and direction.

    The formula rotates one tensor (1, 32, 4096, 128) with tables (4096, 128). ``fraction_of_copy`` is as in
    :func:`launch_evidence`, forward.
    """
    if not torch.cuda.is_available():
        raise Unavailable("Inductor's GPU code is generated on a GPU")
    dtypes = (torch.float32,) if smoke else (torch.float32, torch.bfloat16)
    return pd.DataFrame([row for dtype in dtypes for row in _compiled(dtype)])


def _compiled(dtype: torch.dtype) -> list[dict]:
    from torch._inductor.utils import fresh_cache, run_fw_bw_and_get_code

    tensors = [torch.randn(1, 32, 4096, 128, device="cuda", dtype=dtype) for _ in range(_buffers())]
    half_cos, half_sin = rotary_table(4096, 128, dtype=dtype, device="cuda")
    cos, sin = _duplicated(half_cos, "whole"), _duplicated(half_sin, "whole")
    torch._dynamo.reset()
    compiled = torch.compile(formula, fullgraph=True, dynamic=False)
    leaf = tensors[0].clone().requires_grad_()
    with fresh_cache():  # code that comes from the cache is not generated, and then not seen
        _, codes = run_fw_bw_and_get_code(lambda: compiled(leaf, cos, sin))
    times, copy_us = _times_and_copy({"compile": [partial(compiled, t, cos, sin) for t in tensors]}, tensors)
    fractions = {"forward": copy_us / times["compile"], "backward": float("nan")}
    return [
        {"dtype": _name(dtype), "direction": direction, "torch": torch.__version__, **generated(code),
         "result_buffers": 1, "fraction_of_copy": fractions[direction]}
        for direction, code in zip(fractions, codes, strict=True)
    ]  # fmt: skip


def generated(code: str) -> dict[str, int | str]:
    """Count the kernels that Inductor's wrapper code launches, and the buffers that the code allocates."""
    kernels = re.findall(r"^\s*(\w+)\.run\(", code, flags=re.MULTILINE)
    extern = re.findall(r"^\s*(?:\w+ = )?(extern_kernels\.\w+|torch\.ops\.[\w.]+)\(", code, flags=re.MULTILINE)
    buffers = re.findall(r"= empty_strided_(?:cuda|cpu)\(", code)
    return {"kernels": len(kernels) + len(extern), "buffers": len(buffers), "names": ", ".join(kernels + extern)}


def _buffers() -> int:
    """Tensors of 32 MiB or more that together exceed twice the L2 cache."""
    return max(2, math.ceil(2 * timing.cache_bytes() / 2**25))


def _times_and_copy(calls: Mapping, tensors: Sequence[torch.Tensor]) -> tuple[dict, float]:
    """GPU microseconds per call of each contender, and of the best copy of one tensor in the same rounds."""
    copies = {name: [partial(copy, [t]) for t in tensors] for name, copy in copy_contenders().items()}
    contenders = {**calls, **copies}
    frame = timing.gpu_times({key: (lambda c=c: c) for key, c in contenders.items()})
    failed = frame[frame.status != "ok"]
    if not failed.empty:
        raise RuntimeError(f"{failed.contender.iloc[0]}: {failed.status.iloc[0]}")
    times = dict(zip(contenders, frame.median_us, strict=True))
    return times, min(times[name] for name in copies)


def _duplicated(half: torch.Tensor, table: str) -> torch.Tensor:
    """The table of both halves, ``[S, R]``: whole, or the leading columns of a wider table (row stride 5 R / 4)."""
    both = torch.cat((half, half), dim=-1)
    if table == "whole":
        return both
    rotary_dim = both.shape[-1]
    return torch.nn.functional.pad(both, (0, rotary_dim // 4))[:, :rotary_dim]


def _kernel_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "cpu"
    raise Unavailable("torchembed's kernel runs on a GPU or in Triton's interpreter (TRITON_INTERPRET=1)")


def _versions_with_kernel() -> list[str]:
    found = [version for version, has_kernel in peers.torchembed_kernels().items() if has_kernel]
    if not found:
        raise Unavailable("no torchembed with a fused kernel under build/peers (python -m ropelab.study peers)")
    return found


def _relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
