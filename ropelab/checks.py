"""What the public function refuses: every message names the argument, what was expected and what came."""

import torch

from ropelab.layout import check_layout
from ropelab.memory import may_share_elements, overlaps_itself
from ropelab.seq_format import check_seq_format, to_bshd

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def check_rope_arguments(
    q: torch.Tensor,
    k: torch.Tensor | None,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: str,
    seq_format: str,
    inplace: bool,
) -> None:
    """Raise ValueError or TypeError for arguments that `apply_rope` cannot serve."""
    check_layout(layout)
    check_seq_format(seq_format)
    _check_tensor("q", q, 4, f"{seq_format} of rank 4")
    _check_tensor("cos", cos, 2, "[positions, rotary_dim/2]")
    _check_tensor("sin", sin, 2, "[positions, rotary_dim/2]")
    if k is not None:
        _check_tensor("k", k, 4, f"{seq_format} of rank 4")
        _check_key(to_bshd(q, seq_format), to_bshd(k, seq_format))
    _check_table(to_bshd(q, seq_format), cos, sin)
    if inplace:
        _check_inplace(q, k, cos, sin)


def _check_tensor(name: str, x: torch.Tensor, rank: int, shape: str) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if x.ndim != rank:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(x.shape)}")
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: expected one of {', '.join(map(_short, DTYPES))}, got {_short(x.dtype)}")


def _check_key(q: torch.Tensor, k: torch.Tensor) -> None:
    if k.dtype != q.dtype:
        raise TypeError(f"k: expected q's dtype {_short(q.dtype)}, got {_short(k.dtype)}")
    if k.device != q.device:
        raise ValueError(f"k: expected q's device {q.device}, got {k.device}")
    for axis, what in ((0, "batch size"), (1, "sequence length"), (3, "head_dim")):
        if k.shape[axis] != q.shape[axis]:
            raise ValueError(f"k: expected q's {what} {q.shape[axis]}, got {k.shape[axis]}")


def _check_table(q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    seq_len, head_dim = q.shape[1], q.shape[3]
    for name, table in (("cos", cos), ("sin", sin)):
        if table.device != q.device:
            raise ValueError(f"{name}: expected q's device {q.device}, got {table.device}")
    if sin.shape != cos.shape:
        raise ValueError(f"sin: expected cos's shape {tuple(cos.shape)}, got {tuple(sin.shape)}")
    if sin.dtype != cos.dtype:
        raise TypeError(f"sin: expected cos's dtype {_short(cos.dtype)}, got {_short(sin.dtype)}")
    if not 0 < 2 * cos.shape[1] <= head_dim:
        hint = " (a table that repeats its halves is passed as cos[:, : rotary_dim // 2])"
        raise ValueError(
            f"cos: expected 1 to head_dim/2 = {head_dim // 2} columns, one per pair, got {cos.shape[1]}"
            f"{hint if cos.shape[1] == head_dim else ''}"
        )
    if cos.shape[0] < seq_len:
        raise ValueError(f"cos: expected a row for each of {seq_len} positions, got {cos.shape[0]} rows")


def _check_inplace(q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor) -> None:
    for name, x in (("q", q), ("k", k)):
        if x is None:
            continue
        if overlaps_itself(x):
            raise ValueError(
                f"{name}: expected elements at distinct addresses for inplace=True, "
                f"got strides {x.stride()} for shape {tuple(x.shape)}"
            )
        root = x._base if x._is_view() else x
        if torch.is_grad_enabled() and root.requires_grad and root.is_leaf:
            raise ValueError(
                f"{name}: expected a tensor that autograd may overwrite for inplace=True, "
                "got a leaf that requires grad (or a view of one)"
            )
    if k is not None and may_share_elements(q, k):
        raise ValueError("k: expected memory disjoint from q's for inplace=True, got overlapping tensors")
    for name, table in (("cos", cos), ("sin", sin)):
        if torch.is_grad_enabled() and table.requires_grad:
            raise ValueError(
                f"{name}: expected a table without grad for inplace=True (its gradient needs the "
                "overwritten input), got requires_grad=True"
            )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
