"""What the public functions refuse: every message names the argument, what was expected and what came."""

import torch

from ropelab.kernels import NO_POSITION, position_count
from ropelab.layout import check_layout
from ropelab.memory import may_share_elements, overlaps_itself
from ropelab.seq_format import check_seq_format, rank, to_bshd

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
POSITION_DTYPES = (torch.int32, torch.int64)


def check_rope_arguments(q, k, cos, sin, positions, options, inplace: bool) -> None:
    """Raise ValueError or TypeError for arguments that `apply_rope` cannot serve, judged by their metadata.

    Args:
        positions: positions or, with ``options.offsets``, offsets; or None.
        options: `ropelab.prepared.Options`.
    """
    check_layout(options.layout)
    check_layout(options.out_layout, "out_layout")
    check_seq_format(options.seq_format)
    check_tensor("q", q, (rank(options.seq_format),), f"{options.seq_format} of rank {rank(options.seq_format)}")
    if options.table_free:
        check_tensor("frequencies", cos, (2,), "[rotary_dim/2, 3]", (torch.int64,))
    else:
        tables = "[positions, columns]" + ("" if options.seq_format == "thd" else " or [batch, positions, columns]")
        table_ranks = (2,) if options.seq_format == "thd" else (2, 3)
        check_tensor("cos", cos, table_ranks, tables)
        check_tensor("sin", sin, table_ranks, tables)
    shape = to_bshd(q, options.seq_format).shape
    if k is not None:
        check_tensor("k", k, (rank(options.seq_format),), f"{options.seq_format} of rank {rank(options.seq_format)}")
        _check_key(q, k, shape, to_bshd(k, options.seq_format).shape)
    if options.table_free:
        _check_frequencies(q, shape, cos, options)
    else:
        _check_tables(q, shape, cos, sin, options)
    if positions is not None:
        _check_positions_tensor(q, shape, positions, options)
    if inplace:
        _check_inplace(q, k, options)


def check_first_position(first_position: int, seq_len: int, cos: torch.Tensor) -> None:
    """Raise unless the tables have a row for each of ``seq_len`` positions from ``first_position`` on."""
    if not isinstance(first_position, (int, torch.SymInt)):
        raise TypeError(f"offsets: expected an int or a tensor, got {type(first_position).__name__}")
    if first_position + seq_len > position_count(cos):
        start = f" from {first_position} on" if first_position else ""
        name = "frequencies" if cos.dtype == torch.int64 else "cos"
        raise ValueError(
            f"{name}: expected a row for each of {seq_len} positions{start}, got {position_count(cos)} rows"
        )


def check_positions(positions: torch.Tensor, seq_len: int, cos: torch.Tensor, offsets: bool) -> None:
    """Raise unless every position in CPU memory has a row. On a GPU this would have to wait for the GPU."""
    real = positions[positions != NO_POSITION]
    if not real.numel() or not seq_len:
        return
    first, last = real.min().item(), real.max().item() + (seq_len - 1 if offsets else 0)
    if max(-first, last) >= position_count(cos):
        name = "offsets" if offsets else "positions"
        worst = last if last >= -first else first
        rows = "" if cos.dtype == torch.int64 else " rows of cos"
        raise ValueError(f"{name}: expected |positions| below the {position_count(cos)}{rows}, got {worst}")


def check_inplace_autograd(q: torch.Tensor, k: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Raise for what autograd does not allow to be overwritten; called while it records."""
    for name, x in (("q", q), ("k", k)):
        if x is None:
            continue
        root = x._base if x._is_view() else x
        if root.requires_grad and root.is_leaf:
            raise ValueError(
                f"{name}: expected a tensor that autograd may overwrite for inplace=True, "
                "got a leaf that requires grad (or a view of one)"
            )
    for name, table in (("cos", cos), ("sin", sin)):
        if table.requires_grad:
            raise ValueError(
                f"{name}: expected a table without grad for inplace=True (its gradient needs the "
                "overwritten input), got requires_grad=True"
            )


def check_tensor(name: str, x: torch.Tensor, ranks: tuple[int, ...], shape: str, dtypes=DTYPES) -> None:
    """Raise unless ``x`` is a tensor of one of these ranks (``shape`` in words) and dtypes."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if x.ndim not in ranks:
        raise ValueError(f"{name}: expected shape {shape}, got {tuple(x.shape)}")
    if x.dtype not in dtypes:
        raise TypeError(f"{name}: expected one of {', '.join(map(dtype_name, dtypes))}, got {dtype_name(x.dtype)}")


def check_device(name: str, x: torch.Tensor, q: torch.Tensor) -> None:
    """Raise unless ``x`` is where ``q`` is."""
    if x.device != q.device:
        raise ValueError(f"{name}: expected q's device {q.device}, got {x.device}")


def _check_key(q: torch.Tensor, k: torch.Tensor, q_shape: torch.Size, k_shape: torch.Size) -> None:
    if k.dtype != q.dtype:
        raise TypeError(f"k: expected q's dtype {dtype_name(q.dtype)}, got {dtype_name(k.dtype)}")
    check_device("k", k, q)
    for axis, what in ((0, "batch size"), (1, "sequence length"), (3, "head_dim")):
        if k_shape[axis] != q_shape[axis]:
            raise ValueError(f"k: expected q's {what} {q_shape[axis]}, got {k_shape[axis]}")


def _check_tables(q: torch.Tensor, shape: torch.Size, cos: torch.Tensor, sin: torch.Tensor, options) -> None:
    batch, head_dim, width = shape[0], shape[3], cos.shape[-1]
    check_device("cos", cos, q)
    check_device("sin", sin, q)
    if sin.shape != cos.shape:
        raise ValueError(f"sin: expected cos's shape {tuple(cos.shape)}, got {tuple(sin.shape)}")
    if sin.dtype != cos.dtype:
        raise TypeError(f"sin: expected cos's dtype {dtype_name(cos.dtype)}, got {dtype_name(sin.dtype)}")
    if cos.ndim == 3 and cos.shape[0] != batch:
        raise ValueError(f"cos: expected tables for each of {batch} batches, got {cos.shape[0]}")
    if options.rotary_slice is None:
        if not 0 < 2 * width <= head_dim:
            hint = " (one per feature needs rotary_slice; if they only repeat, pass the first half)"
            raise ValueError(
                f"cos: expected 1 to head_dim/2 = {head_dim // 2} columns, one per pair, got {width}"
                f"{hint if width == head_dim else ''}"
            )
        return
    first, end = options.rotary_slice
    _check_slice(first, end, head_dim)
    if width not in (end - first, (end - first) // 2):
        raise ValueError(
            f"cos: expected {(end - first) // 2} columns, one per pair, or {end - first}, one per feature, got {width}"
        )
    if width == end - first and options.layout != options.out_layout:
        raise ValueError(
            f"out_layout: expected {options.layout!r}, that of the input, with a column per feature, "
            f"got {options.out_layout!r}"
        )


def _check_frequencies(q: torch.Tensor, shape: torch.Size, frequencies: torch.Tensor, options) -> None:
    check_device("frequencies", frequencies, q)
    if options.rotary_slice:
        _check_slice(*options.rotary_slice, shape[3])
        pairs = (options.rotary_slice[1] - options.rotary_slice[0]) // 2
        expected = f"({pairs}, 3), a row per pair"
        fits = tuple(frequencies.shape) == (pairs, 3)
    else:
        expected = f"(pairs, 3) with 1 to head_dim/2 = {shape[3] // 2} pairs"
        fits = frequencies.shape[1] == 3 and 0 < 2 * len(frequencies) <= shape[3]
    if not fits:
        raise ValueError(f"frequencies: expected shape {expected}, got {tuple(frequencies.shape)}")


def _check_slice(first: int, end: int, head_dim: int) -> None:
    if not 0 <= first < end <= head_dim or (end - first) % 2:
        raise ValueError(
            f"rotary_slice: expected an even number of the {head_dim} features of a head, got {(first, end)}"
        )


def _check_positions_tensor(q: torch.Tensor, shape: torch.Size, positions: torch.Tensor, options) -> None:
    batch, seq_len = shape[:2]
    name, sizes = "positions", [(seq_len,), (batch, seq_len)]
    if options.offsets:
        name, sizes = "offsets", [(batch,)]
    elif options.seq_format == "thd":
        sizes = [(seq_len,)]
    fits = isinstance(positions, torch.Tensor) and any(tuple(positions.shape) == size for size in sizes)
    if not fits:  # the message is made only then: compilers cannot follow it
        expected = " or ".join(map(str, sizes))
        check_tensor(name, positions, (), expected, POSITION_DTYPES)
    check_tensor(name, positions, (1, 2), "", POSITION_DTYPES)
    check_device(name, positions, q)


def _check_inplace(q: torch.Tensor, k: torch.Tensor | None, options) -> None:
    if options.layout != options.out_layout:
        raise ValueError(
            f"out_layout: expected {options.layout!r}, that of the input, for inplace=True, got {options.out_layout!r}"
        )
    for name, x in (("q", q), ("k", k)):
        if x is not None and overlaps_itself(x):
            raise ValueError(
                f"{name}: expected elements at distinct addresses for inplace=True, "
                f"got strides {x.stride()} for shape {tuple(x.shape)}"
            )
    if k is not None and may_share_elements(q, k):
        raise ValueError("k: expected memory disjoint from q's for inplace=True, got overlapping tensors")


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
