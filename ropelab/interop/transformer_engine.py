"""TransformerEngine's calls: angles instead of tables, packed sequences, context parallelism, a packed qkv.

Contract: ``transformer_engine/pytorch/attention/rope.py`` of TransformerEngine 2, with its fused path. What differs:

- rows past ``cu_seqlens[-1]`` come out as zeros, and so does their gradient; there they are left as they were allocated
- the gradient honours ``start_positions``, and they may be used together with context parallelism
- offsets are 64 bits wide, and everything is differentiable again, also in ``freqs``

Every call takes the cosine and sine of all of ``freqs`` and finds the positions anew, because the convention has no
place to keep them. Who can change the caller builds them once: `ropelab.apply_rope` with `ropelab.PackedSequences`.
"""

from collections.abc import Sequence

import torch

from ropelab.positions import PackedSequences, context_parallel_positions
from ropelab.rope import apply_rope
from ropelab.seq_format import SEQ_AXIS

FORMATS = ("sbhd", "bshd", "thd")


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    fused: bool = True,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """Rotate the first ``d2`` features of every head by the angles of the token's position.

    Args:
        t: ``[s, b, h, d]``, ``[b, s, h, d]`` or ``[t, h, d]``; bfloat16, float16, float32 or float64; any strides.
        freqs: float32 ``[s2, 1, 1, d2]``, ``d2 <= d`` even: angles in rad, one for each feature.
        tensor_format: order of the axes of ``t``: ``"sbhd"``, ``"bshd"`` or ``"thd"``.
        start_positions: int32 ``[b]`` (``thd``: ``[n]``): position of the first token of each sequence.
        interleaved: features ``(2i, 2i + 1)`` form a pair; by default ``(i, i + d2/2)``.
        fused: accepted for its callers' sake; there is one path.
        cu_seqlens: int32 ``[n + 1]``, with ``thd`` only: where the sequences begin and end in the *unsharded* tokens.
            With ``cp_size > 1`` those of sequences padded to multiples of ``2 * cp_size``.
        cp_size, cp_rank: ranks that share every sequence, and which one this is: ``t`` holds chunks ``cp_rank`` and
            ``2 * cp_size - 1 - cp_rank`` of each sequence.

    Returns:
        A new tensor of the shape and dtype of ``t``; the maths is in float32 or wider.

    Raises:
        TypeError, ValueError: as the message says. What lies in tensors on a GPU cannot be checked without waiting
            for it: there a position without a row in ``freqs`` yields NaN.
    """
    cos, sin = _tables(freqs)
    _check(t, freqs, tensor_format, cu_seqlens)
    where = _where(t, len(freqs), tensor_format, start_positions, cu_seqlens, cp_size, cp_rank)
    return apply_rope(
        t, cos=cos, sin=sin, layout=_layout(interleaved), seq_format=tensor_format,
        rotary_slice=(0, freqs.shape[-1]), **where,
    )  # fmt: skip


def apply_fused_qkv_rotary_pos_emb(
    qkv: torch.Tensor,
    q_freqs: torch.Tensor,
    k_freqs: torch.Tensor,
    qkv_split_arg_list: Sequence[int],
    tensor_format: str = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotate q and k where they lie in a packed qkv; one launch if they share their angles.

    Args:
        qkv: ``[s, b, g, w]`` or ``[b, s, g, w]``: in each of ``g`` groups the query heads, a key and a value head.
        q_freqs, k_freqs: float32 ``[s2, 1, 1, d2]``, as for `apply_rotary_pos_emb`.
        qkv_split_arg_list: widths of the queries, key and value of a group; the first a multiple of the second,
            which is the head size ``d``; their sum ``w``.
        tensor_format: ``"sbhd"`` or ``"bshd"``.
        start_positions, interleaved, cp_size, cp_rank: as for `apply_rotary_pos_emb`.

    Returns:
        q ``[.., g * widths[0] / d, d]`` and k ``[.., g, d]``, new tensors, and v ``[.., g, widths[2]]``, a view.
        The gradient of qkv is made by one rotation and one concatenation.

    Raises:
        TypeError, ValueError: as the message says.
    """
    if tensor_format not in FORMATS[:2]:
        raise ValueError(f"tensor_format: expected one of {FORMATS[:2]}, got {tensor_format!r}")
    q_width, head_dim, v_width = _widths(qkv, qkv_split_arg_list)
    for freqs in (q_freqs, k_freqs):
        _check(qkv, freqs, tensor_format, None, head_dim)
    q, k, v = qkv.split((q_width, head_dim, v_width), dim=-1)
    leading = qkv.shape[:3]
    # Heads of a group lie side by side, groups do not: each group of a token counts as a token of its own.
    q, k = q.reshape(-1, q_width // head_dim, head_dim), k.reshape(-1, 1, head_dim)
    rows = min(len(q_freqs), len(k_freqs))
    where = _where(qkv, rows, tensor_format, start_positions, None, cp_size, cp_rank)
    positions = _token_positions(qkv, tensor_format, **where).expand(leading).reshape(-1)
    options = {"layout": _layout(interleaved), "seq_format": "thd", "positions": positions}

    def rotate(freqs, *xs):
        cos, sin = _tables(freqs)
        return apply_rope(*xs, cos=cos, sin=sin, rotary_slice=(0, freqs.shape[-1]), **options)

    q, k = rotate(q_freqs, q, k) if q_freqs is k_freqs else (rotate(q_freqs, q), rotate(k_freqs, k))
    return q.reshape(*leading[:2], -1, head_dim), k.reshape(*leading, head_dim), v


def _tables(freqs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin ``[s2, d2]``."""
    if not isinstance(freqs, torch.Tensor) or freqs.dtype != torch.float32:
        got = getattr(freqs, "dtype", type(freqs).__name__)
        raise TypeError(f"freqs: expected float32 angles, got {got}")
    if freqs.ndim != 4 or freqs.shape[1:3] != (1, 1) or freqs.shape[-1] % 2:
        raise ValueError(f"freqs: expected shape [s2, 1, 1, d2] with d2 even, got {tuple(freqs.shape)}")
    angles = freqs[:, 0, 0]
    return angles.cos(), angles.sin()


def _check(t, freqs, tensor_format: str, cu_seqlens, head_dim: int | None = None) -> None:
    """What has another name here than in `apply_rope`."""
    if tensor_format not in FORMATS:
        raise ValueError(f"tensor_format: expected one of {FORMATS}, got {tensor_format!r}")
    if t.ndim != len(tensor_format):
        raise ValueError(f"t: expected {len(tensor_format)} axes ({tensor_format}), got shape {tuple(t.shape)}")
    if (cu_seqlens is not None) != (tensor_format == "thd"):
        got = "None" if cu_seqlens is None else "a tensor"
        raise ValueError(f"cu_seqlens: expected a tensor with 'thd' and with it only, got {got} with {tensor_format!r}")
    if freqs.shape[-1] > (t.shape[-1] if head_dim is None else head_dim):
        raise ValueError(f"freqs: expected d2 of at most the head size, got {freqs.shape[-1]} for {tuple(t.shape)}")


def _where(t, rows: int, tensor_format: str, start_positions, cu_seqlens, cp_size: int, cp_rank: int) -> dict:
    """The positions of the tokens, as `apply_rope` takes them."""
    starts = 0 if start_positions is None else start_positions
    shard = {"cp_size": cp_size, "cp_rank": cp_rank}
    sequences = len(cu_seqlens) - 1 if tensor_format == "thd" else t.shape[tensor_format.index("b")]
    if start_positions is not None and start_positions.shape != (sequences,):
        raise ValueError(f"start_positions: expected shape ({sequences},), got {tuple(start_positions.shape)}")
    if tensor_format == "thd":
        return {"positions": PackedSequences(cu_seqlens, len(t), offsets=starts, **shard).positions}
    seq_len = t.shape[SEQ_AXIS[tensor_format]] * cp_size
    if seq_len > rows:
        raise ValueError(f"freqs: expected at least s * cp_size = {seq_len} rows, got {rows}")
    positions = context_parallel_positions(seq_len, **shard, device=t.device)  # also checks the ranks
    if cp_size == 1:
        return {"offsets": starts}
    return {"positions": positions if start_positions is None else starts[:, None] + positions}


def _token_positions(qkv, tensor_format: str, positions=None, offsets=0) -> torch.Tensor:
    """``positions`` or ``offsets`` of `apply_rope`, to broadcast against the first three axes of ``qkv``."""
    if positions is None:
        positions = torch.arange(qkv.shape[SEQ_AXIS[tensor_format]], device=qkv.device)
        if isinstance(offsets, torch.Tensor):
            positions = offsets[:, None] + positions
    by_batch = positions.expand(1, -1) if positions.ndim == 1 else positions
    return (by_batch if tensor_format == "bshd" else by_batch.T)[..., None]


def _widths(qkv: torch.Tensor, widths: Sequence[int]) -> tuple[int, int, int]:
    widths = tuple(widths)
    if len(widths) != 3 or sum(widths) != qkv.shape[-1] or widths[1] < 1 or widths[0] % widths[1]:
        expected = f"three widths whose sum is {qkv.shape[-1]}, the first a multiple of the second"
        raise ValueError(f"qkv_split_arg_list: expected {expected}, got {list(widths)}")
    return widths


def _layout(interleaved: bool) -> str:
    return "interleaved" if interleaved else "split_half"
