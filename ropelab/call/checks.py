"""Checks of the arguments of a call against each other.

Each message names the argument, what the call expected and what it got.
"""

from collections.abc import Sequence

import torch

from ropelab.arguments import POSITION_DTYPES, check_device, check_dtype, check_like, check_tensor, integers, warn
from ropelab.call.angles import Angles
from ropelab.call.memory import Named, check_disjoint
from ropelab.call.where import Options, Where
from ropelab.foreign import ARGUMENTS
from ropelab.kernels.rotation import INVALID_POSITION, NO_POSITION
from ropelab.layout.pairing import MOST_FEATURES, check_layout
from ropelab.layout.seq_format import (
    SEQ_AXIS,
    check_heads,
    check_seq_format,
    likely_format,
    likely_swapped,
    rank,
    to_bshd,
)


def check_rope_arguments(q: torch.Tensor, k: torch.Tensor | None, where: Where) -> None:
    """Raise for arguments that `apply_rope` cannot serve, judged by their metadata.

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, devices or options do not fit each other.
    """
    angles, positions, _, options = where
    check_layout(options.layout)
    check_layout(options.out_layout, "out_layout")
    check_seq_format(options.seq_format)
    check_heads("q", q, options.seq_format)
    if not angles.table_free:
        _check_ranks(angles, options)
    shape = to_bshd(q, options.seq_format).shape
    if k is not None:
        check_heads("k", k, options.seq_format)
        _check_key(q, k, shape, to_bshd(k, options.seq_format).shape, options.seq_format)
    if angles.table_free:
        _check_frequencies(q, shape, angles.cos, options)
    else:
        _check_tables(q, shape, *angles.for_kernels, options)
    if options.axes is not None:
        _check_axes(angles, options)
    if positions is not None:
        _check_positions_tensor(q, shape, positions, options)
    elif q.is_meta and not torch.compiler.is_compiling():  # no call follows that would make `check_places`
        check_first_position(where.first_position, q, options.seq_format, angles)


MOST_HEADS = 256
"""No model has as many heads: an axis that is longer has tokens."""


def warn_of_accidents(q: torch.Tensor, where: Where) -> None:
    """Warn of a call that fits by accident: heads and tokens that changed places, or tables for narrower heads."""
    if torch.compiler.is_compiling():
        return
    angles, positions, first_position, options = where
    tokens, heads, head_dim = to_bshd(q, options.seq_format).shape[1:]
    rows = angles.position_count if positions is None and first_position == 0 else 0

    def fits(other: str) -> bool:
        swapped = rank(other) == q.ndim and q.shape[SEQ_AXIS[other]] == heads
        return swapped and q.shape[other.index("h")] <= MOST_HEADS

    if tokens > 1 and (rows == heads != tokens or heads > MOST_HEADS):
        if likely := likely_format("q", options.seq_format, fits):
            warn(f"q: {heads} heads of {tokens} tokens{likely}")
    turns = 2 * angles.columns
    if options.rotary_slice is None and turns < head_dim:
        warn(
            f"{angles.name}: {angles.columns} columns turn the first {turns} of {head_dim} features (if that is meant, "
            f"pass rotary_slice=(0, {turns}), or RotaryEmbedding a Rope with head_dim={head_dim}; else make the tables "
            f"for heads of {head_dim} features)"
        )


def check_places(q: torch.Tensor, where: Where) -> None:
    """Raise ValueError for tokens that are beyond the tables, as far as the host knows without waiting for a GPU.

    The answer depends on values, so every call makes this check. The arguments have passed `check_rope_arguments`.
    `ropelab.positions` says which row of the tables a position reads.
    """
    angles, positions, first_position, options = where
    if positions is not None and positions.is_cuda:
        return
    seq_len = q.shape[SEQ_AXIS[options.seq_format]]
    if positions is None:
        check_first_position(first_position, q, options.seq_format, angles)
    else:
        read = positions if options.axes is None else positions[sorted(set(options.axes))]
        check_positions(read, seq_len, angles, options.offsets)


def checked_axes(options: Options) -> tuple[int, ...]:
    """The axes of a call that has axes; raise TypeError or ValueError unless they are integers of at least 0."""
    axes = integers("axes", options.axes, at_least=0, below=MOST_FEATURES)
    if not axes:
        raise ValueError("axes: expected an axis for each pair, got none")
    return axes


def check_first_position(first_position: int, q: torch.Tensor, seq_format: str, angles: Angles) -> None:
    """Raise ValueError unless there is a row for the position of each token of q, from ``first_position`` on."""
    rows, tokens = angles.position_count, q.shape[SEQ_AXIS[seq_format]]
    if first_position + tokens > rows:
        start = f" from {first_position} on, {first_position + tokens} rows" if first_position else ""
        hint = likely_format("q", seq_format, lambda other: _tokens(q, other) == rows - first_position)
        raise ValueError(f"{angles.name}: expected a row for each of {tokens} positions{start}, got {rows} rows{hint}")


def _tokens(q: torch.Tensor, seq_format: str) -> int | None:
    """The number of tokens of a sequence of q as another format counts them; None for another number of axes."""
    return q.shape[SEQ_AXIS[seq_format]] if q.ndim == rank(seq_format) else None


def check_positions(positions: torch.Tensor, seq_len: int, angles: Angles, offsets: bool) -> None:
    """Raise ValueError unless every position has a row.

    Args:
        positions: positions or offsets in CPU memory. The host would have to wait for a GPU to read them there.
        offsets: whether ``positions`` holds offsets.
    """
    real = positions[positions != NO_POSITION]
    if not real.numel() or not seq_len:
        return
    name = "offsets" if offsets else "positions"
    first, last = int(real.min()), int(real.max()) + (seq_len - 1 if offsets else 0)
    if max(-first, last) >= angles.position_count:
        worst = last if last >= -first else first
        rows = " that frequencies serve" if angles.table_free else " rows of cos"
        raise ValueError(f"{name}: expected |positions| below the {angles.position_count}{rows}, got {worst}")
    if first == INVALID_POSITION:
        raise ValueError(f"{name}: expected other numbers, because INVALID_POSITION is reserved, got {first}")


def check_layouts_alike(options: Options) -> None:
    """Raise ValueError unless the result has the layout of the input, because a rotation in place keeps the layout."""
    if options.layout != options.out_layout:
        raise ValueError(
            f"out_layout: expected {options.layout!r}, the layout of the input, for inplace=True, "
            f"got {options.out_layout!r}"
        )


INPLACE = " for inplace=True"


def check_memory(q: torch.Tensor, k: torch.Tensor | None, read: Named | None = None) -> None:
    """Raise ValueError where an element of q or k, which are written, may have the address of another element.

    Args:
        read: the other tensors of the call, as `Where.read`.
    """
    check_disjoint({"q": q, "k": k}, read or {}, where=INPLACE)


def check_writable(names: Sequence[str], tensors: Sequence[torch.Tensor | None], condition: str = INPLACE) -> None:
    """Raise ValueError for an inference tensor outside of inference mode, because PyTorch allows no write there."""
    for name, x in zip(names, tensors, strict=False):
        if x is not None and x.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(
                f"{name}: expected a tensor that is not an inference tensor{condition} outside of "
                "torch.inference_mode(), got an inference tensor"
            )


def check_fixed_tables(cos: torch.Tensor, sin: torch.Tensor | None) -> None:
    """Raise ValueError for a table that requires grad while autograd records, in an operation without its gradient."""
    if torch.is_grad_enabled():
        for name, table in (("cos", cos), ("sin", sin)):
            if table is not None and table.requires_grad:
                raise ValueError(f"{name}: expected a table without grad (unlike apply_rope), got requires_grad=True")


def check_no_grad(names: Sequence[str], given: Sequence[torch.Tensor | None], where: Where | None = None) -> None:
    """Raise ValueError for a tensor that requires grad while autograd records, because there is no backward."""
    if not torch.is_grad_enabled():
        return
    for name, x in (*zip(names, given, strict=True), *({} if where is None else where.read).items()):
        if isinstance(x, torch.Tensor) and x.requires_grad:
            raise ValueError(
                f"{name}: expected a tensor without grad, or torch.no_grad() (the call has no "
                "backward), got requires_grad=True"
            )


def check_recordable(**tensors: torch.Tensor | None) -> None:
    """Raise ValueError for an inference tensor, because autograd cannot save it for the backward."""
    for name, x in tensors.items():
        if x is not None and x.is_inference():
            raise ValueError(
                f"{name}: expected a tensor made outside of torch.inference_mode() while autograd records, "
                "got an inference tensor"
            )


def check_inplace_autograd(q: torch.Tensor, k: torch.Tensor | None, angles: Angles) -> None:
    """Raise ValueError for a tensor that autograd does not allow to be overwritten.

    Only calls that autograd records make this check.
    """
    for name, x in (("q", q), ("k", k)):
        if x is None or not x.requires_grad:
            continue
        if x.is_leaf or (x._base is not None and x._base.is_leaf):
            raise ValueError(
                f"{name}: expected a tensor that autograd may overwrite for inplace=True, "
                "got a leaf that requires grad (or a view of a leaf)"
            )
        if x._is_view() and (made := _NO_OVERWRITING.get(str(_creation(x)))):
            raise ValueError(
                f"{name}: expected a tensor that autograd may overwrite for inplace=True, got a view {made}"
            )
    for name, table in zip(("cos", "sin"), angles, strict=True):
        if table is not None and table.requires_grad:
            raise ValueError(
                f"{name}: expected a table without grad for inplace=True (the gradient of a table needs "
                "the input, which inplace overwrites), got requires_grad=True"
            )


# autograd's name for the origin of a view -> the origin in words
_NO_OVERWRITING = {
    "CreationMeta.MULTI_OUTPUT_NODE": "made by split, chunk or unbind (a slice can be overwritten)",
    "CreationMeta.NO_GRAD_MODE": "made under torch.no_grad()",
    "CreationMeta.INFERENCE_MODE": "made in torch.inference_mode()",
    "CreationMeta.IN_CUSTOM_FUNCTION": "made by a custom autograd function",
}
_creation = torch._C._autograd._get_creation_meta


def _check_ranks(tables: Angles, options: Options) -> None:
    batch = "1" if options.seq_format == "thd" else "1 or batch"
    for name, table in zip(("cos", "sin"), tables.for_kernels, strict=True):
        hint = f" (for freqs_cis pass {ARGUMENTS['freqs_cis'][0]})" if table.is_complex() else ""
        check_tensor(name, table, (2, 3), f"[positions, columns] or [{batch}, positions, columns]", hint=hint)


def _check_key(q: torch.Tensor, k: torch.Tensor, q_shape: torch.Size, k_shape: torch.Size, seq_format: str) -> None:
    check_like("k", k, q)
    for axis, what in ((0, "batch size"), (1, "sequence length"), (3, "head_dim")):
        if k_shape[axis] != q_shape[axis]:
            hint = likely_swapped(q, k, seq_format)
            raise ValueError(f"k: expected q's {what} {q_shape[axis]}, got {k_shape[axis]}{hint}")


def _check_tables(q: torch.Tensor, shape: torch.Size, cos: torch.Tensor, sin: torch.Tensor, options: Options) -> None:
    batch, head_dim, width = shape[0], shape[3], cos.shape[-1]
    check_device("cos", cos, q)
    check_device("sin", sin, q)
    if sin.shape != cos.shape:
        raise ValueError(f"sin: expected cos's shape {tuple(cos.shape)}, got {tuple(sin.shape)}")
    check_dtype("sin", sin, cos, "cos")
    if cos.ndim == 3 and cos.shape[0] not in (1, batch):
        raise ValueError(f"cos: expected tables for each of {batch} sequences or for all, got {cos.shape[0]} tables")
    if options.rotary_slice is None:
        if not 0 < 2 * width <= head_dim:
            half = head_dim // 2
            of_features = f"(if columns repeat, pass cos[..., :{half}] of halves or cos[..., ::2] of adjacent ones; a"
            hint = {
                head_dim: f" {of_features} column per feature needs rotary_slice)",
                (head_dim + 1) / 2: f" (the last of {head_dim} features has no partner)",
            }.get(width, "")
            raise ValueError(f"cos: expected 1 to head_dim/2 = {half} columns, a column per pair, got {width}{hint}")
        return
    first, end = options.rotary_slice
    _check_slice(first, end, head_dim)
    if width not in (end - first, (end - first) // 2):
        raise ValueError(
            f"cos: expected {(end - first) // 2} columns (one per pair) or {end - first} columns (one per feature), "
            f"got {width}"
        )
    if width == end - first and options.layout != options.out_layout:
        raise ValueError(
            f"out_layout: expected {options.layout!r}, the layout of the input, for tables with a column per feature, "
            f"got {options.out_layout!r}"
        )


def _check_frequencies(q: torch.Tensor, shape: torch.Size, frequencies: torch.Tensor, options: Options) -> None:
    check_device("frequencies", frequencies, q)
    if options.rotary_slice:
        first, end = options.rotary_slice
        _check_slice(first, end, shape[3])
        pairs = (end - first) // 2
        expected = f"({pairs}, 3), a row per pair"
        fits = tuple(frequencies.shape) == (pairs, 3)
    else:
        expected = f"(pairs, 3) with 1 to head_dim/2 = {shape[3] // 2} pairs"
        fits = frequencies.shape[1] == 3 and 0 < 2 * len(frequencies) <= shape[3]
    if not fits:
        raise ValueError(f"frequencies: expected shape {expected}, got {tuple(frequencies.shape)}")


def _check_axes(angles: Angles, options: Options) -> None:
    first, end = options.slice(angles.columns)
    axes = checked_axes(options)
    if len(axes) != (end - first) // 2:
        raise ValueError(f"axes: expected an axis for each of {(end - first) // 2} pairs, got {len(axes)}")
    if angles.columns == end - first and not angles.table_free:
        raise ValueError(
            f"cos: expected {len(axes)} columns, a column per pair, beside axes, got {angles.columns}, one per feature"
        )


def _check_slice(first: int, end: int, head_dim: int) -> None:
    if not 0 <= first < end <= head_dim or (end - first) % 2:
        raise ValueError(
            f"rotary_slice: expected an even number of the {head_dim} features of a head, got {(first, end)}"
        )


def _check_positions_tensor(q: torch.Tensor, shape: torch.Size, positions: torch.Tensor, options) -> None:
    batch, seq_len = shape[:2]
    name, sizes = "positions", [(seq_len,), (1, seq_len), (batch, seq_len)]
    if options.offsets:
        name, sizes = "offsets", [(batch,)]
    if options.axes is not None:
        count = max(options.axes) + 1
        if isinstance(positions, torch.Tensor) and tuple(positions.shape[1:]) in sizes:  # further axes are not read
            count = max(count, positions.shape[0])
        sizes = [(count, *size) for size in sizes]
    fits = isinstance(positions, torch.Tensor) and any(tuple(positions.shape) == size for size in sizes)
    if not fits:  # compilers cannot follow the construction of the message
        expected = " or ".join(map(str, dict.fromkeys(sizes)))
        count = positions.shape[-1] if isinstance(positions, torch.Tensor) and positions.ndim else None
        if options.offsets or count is None:
            hint = ""
        elif positions.ndim == 1 and count == batch:
            hint = " (a position for each sequence: pass offsets=positions)"
        elif options.axes is None and positions.ndim == rank(options.seq_format) - 1:
            hint = " (positions along several axes: pass axes, as from mrope_axes)"
        else:
            hint = likely_format("q", options.seq_format, lambda other: _tokens(q, other) == count)
        check_tensor(name, positions, (), expected, POSITION_DTYPES, hint)
    check_tensor(name, positions, (1, 2, 3), "", POSITION_DTYPES)
    check_device(name, positions, q)
