"""TransformerEngine's functions: angles instead of tables, packed sequences, context parallelism, qkv.

The contract comes from ``transformer_engine/pytorch/attention/rope.py`` of TransformerEngine 2.18 and 2.20, with the
fused path. ``test_gpu_real_te.py`` compares the functions with the kernels of both versions. These functions differ
from TransformerEngine's functions:

- Rows past ``cu_seqlens[-1]`` and their gradients are zeros. TransformerEngine leaves such rows as they were allocated.
- In the packed form, the gradient honours ``start_positions``, and ``start_positions`` work together with context
  parallelism. TransformerEngine's gradient leaves them out, and its function refuses both together.
- Offsets into tensors are 64 bits wide, and the results are differentiable any number of times, also in ``freqs``.
- A position without a row in ``freqs`` is an error or NaN. TransformerEngine reads past the end of ``freqs``.

`thd_grid` says how TransformerEngine launches its own kernel. The functions here have one grid for all lengths.

Every call computes the cosines and sines of ``freqs`` and finds the positions anew, because the convention has no place
to keep them. A caller that can change builds both once, for `ropelab.apply_rope` with `ropelab.PackedSequences`.
"""

from collections.abc import Sequence

import torch

from ropelab.arguments import (
    DTYPES,
    POSITION_DTYPES,
    check_device,
    check_shape,
    check_tensor,
    choice,
    flag,
    integer,
    integers,
    shown,
    tensor,
)
from ropelab.call.refusals import in_words
from ropelab.call.traced import one_node
from ropelab.kernels import NO_POSITION
from ropelab.layout.pairing import Layout
from ropelab.layout.seq_format import SEQ_AXIS, SeqFormat
from ropelab.positions.packed import PackedSequences, context_parallel_positions
from ropelab.rope import apply_rope

FORMATS = ("sbhd", "bshd", "thd")
LEGACY, LINEAR = "legacy", "linear"
"""TransformerEngine's grids: a block for each row of freqs and each sequence, or a block for each token."""

_LEAST_DEAD_BLOCKS = 65536
_CONTIGUOUS = torch.contiguous_format


@one_node
def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    tensor_format: SeqFormat = "sbhd",
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
        freqs: ``[s2, 1, 1, d2]``, ``d2 <= d`` even: angles in rad, one for each feature. Angles of another
            floating-point dtype than float32 become float32, as in TransformerEngine; an angle of 1,000 rad that was
            rounded to bfloat16 before is off by up to 2 rad.
        tensor_format: the order of the axes of ``t``: ``"sbhd"``, ``"bshd"`` or ``"thd"``.
        start_positions: int32 ``[b]`` (``thd``: ``[n]``): the position of the first token of each sequence.
        interleaved: features ``(2i, 2i + 1)`` form a pair; by default ``(i, i + d2/2)``.
        fused: has no effect, because there is one path. Callers pass it.
        cu_seqlens: int32 ``[n + 1]``, for ``thd``: where the sequences begin and end in the *unsharded* tokens. With
            ``cp_size > 1`` the sequences are padded to multiples of ``2 * cp_size``. The dense formats ignore
            ``cu_seqlens``, as in TransformerEngine, because some callers pass it with every format.
        cp_size, cp_rank: the number of ranks that share every sequence, and the number of this rank. ``t`` holds the
            chunks ``cp_rank`` and ``2 * cp_size - 1 - cp_rank`` of each sequence.

    Returns:
        A new, contiguous tensor of the shape and dtype of ``t``; the arithmetic is in float32 or wider. A ``t`` whose
        axes lie in memory in another order costs one more copy of the result.

    Raises:
        TypeError, ValueError: an argument has another type or shape, or a position has no row in ``freqs``. The message
            names the argument. The host does not read tensors on a GPU: there a position without a row yields NaN (see
            `ropelab.positions`).
    """
    flag("fused", fused)
    _check_heads("t", t, choice("tensor_format", tensor_format, FORMATS))
    cos, sin = _cos_and_sin("freqs", freqs, t.shape[-1])
    if tensor_format == "thd" and cu_seqlens is None:
        raise ValueError("cu_seqlens: expected a tensor for tensor_format 'thd', got None")
    where = _position_arguments("t", t, {"freqs": freqs}, tensor_format, start_positions, cu_seqlens, cp_size, cp_rank)
    layout, slice_ = _layout(interleaved), (0, freqs.shape[-1])
    rotate = in_words(apply_rope, q="t", positions="freqs", offsets="start_positions", cos="freqs")
    y = rotate(t, cos=cos, sin=sin, layout=layout, seq_format=tensor_format, rotary_slice=slice_, **where)
    return y.contiguous()


@one_node
def apply_fused_qkv_rotary_pos_emb(
    qkv: torch.Tensor,
    q_freqs: torch.Tensor,
    k_freqs: torch.Tensor,
    qkv_split_arg_list: Sequence[int],
    tensor_format: SeqFormat = "sbhd",
    start_positions: torch.Tensor | None = None,
    interleaved: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotate q and k of a packed qkv, in one launch if q and k share their angles.

    Args:
        qkv: ``[s, b, g, w]`` or ``[b, s, g, w]``. Each of ``g`` groups has query heads, a key head and a value head.
        q_freqs, k_freqs: ``[s2, 1, 1, d2]``, as ``freqs`` of `apply_rotary_pos_emb`.
        qkv_split_arg_list: the widths of the queries, the key and the value of a group. The second width is the head
            size ``d``, the first is a multiple of ``d``, and the sum is ``w``.
        tensor_format: ``"sbhd"`` or ``"bshd"``.
        start_positions, interleaved, cp_size, cp_rank: as for `apply_rotary_pos_emb`.
        cu_seqlens: ignored, as in TransformerEngine. It keeps the places of the other arguments.

    Returns:
        q ``[.., g * widths[0] / d, d]``, k ``[.., g, d]`` and v ``[.., g, widths[2]]``, new and contiguous. v is a
        copy, as in TransformerEngine. The gradient of qkv takes one rotation and one concatenation.

    Raises:
        TypeError, ValueError: as `apply_rotary_pos_emb`; or the widths do not fit.
    """
    _check_heads("qkv", qkv, choice("tensor_format", tensor_format, FORMATS[:2]))
    q_width, head_dim, v_width = _widths(qkv, qkv_split_arg_list)
    tables = {"q_freqs": _cos_and_sin("q_freqs", q_freqs, head_dim)}
    if k_freqs is not q_freqs:
        tables["k_freqs"] = _cos_and_sin("k_freqs", k_freqs, head_dim)
    layout = _layout(interleaved)
    where = _position_arguments(
        "qkv", qkv, {"q_freqs": q_freqs, "k_freqs": k_freqs}, tensor_format, start_positions, None, cp_size, cp_rank
    )
    q, k, v = qkv.split((q_width, head_dim, v_width), dim=-1)
    leading, q_heads = qkv.shape[:3], q_width // head_dim
    # The heads of a group lie side by side, but groups do not, so each group of a token counts as a token.
    q, k = (x.reshape(leading.numel(), heads, head_dim) for x, heads in ((q, q_heads), (k, 1)))
    positions = _token_positions(qkv, tensor_format, **where).expand(leading).reshape(-1)

    def rotate_by(freqs, *xs):
        cos, sin = tables[freqs]
        rotate, slice_ = in_words(apply_rope, q="qkv", k="qkv", cos=freqs, positions=freqs), (0, cos.shape[-1])
        return rotate(*xs, cos=cos, sin=sin, layout=layout, seq_format="thd", positions=positions, rotary_slice=slice_)

    q, k = rotate_by("q_freqs", q, k) if q_freqs is k_freqs else (rotate_by("q_freqs", q), rotate_by("k_freqs", k))
    q = q.contiguous().reshape(*leading[:2], leading[2] * q_heads, head_dim)
    return q, k.contiguous().reshape(*leading, head_dim), v.clone(memory_format=_CONTIGUOUS)


def thd_grid(n_seqs: int, freqs_len: int, tokens: int, cp_size: int = 1) -> str:
    """The grid that TransformerEngine takes for packed tokens since 2.19.

    The linear grid has a block for each token; each block searches for its sequence. The legacy grid has ``freqs_len *
    n_seqs`` blocks; blocks without a token end at once. TransformerEngine takes the linear grid if the legacy grid has
    more than ``2 * cp_size`` times as many blocks as there are tokens, and at least 65,536 blocks more than tokens.

    The condition comes from ``use_fused_rope_thd_linear_grid_launch`` in
    ``transformer_engine/common/fused_rope/fused_rope.cu`` at commit 0d1594aa0fc5c48a4d8999e8bda13e43292fa679.

    Args:
        n_seqs: the number of sequences, ``len(cu_seqlens) - 1``.
        freqs_len: the number of rows of ``freqs``.
        tokens: the number of tokens on this rank, ``len(t)``.
        cp_size: the number of ranks that share every sequence.

    Returns:
        `LINEAR` or `LEGACY`.

    Raises:
        TypeError, ValueError: an argument is no integer, or is negative, or ``cp_size`` is below 1.
    """
    sizes = {"n_seqs": n_seqs, "freqs_len": freqs_len, "tokens": tokens}
    n_seqs, freqs_len, tokens = (integer(name, size, at_least=0) for name, size in sizes.items())
    blocks = n_seqs * freqs_len
    many = blocks > 2 * integer("cp_size", cp_size, at_least=1) * tokens
    return LINEAR if tokens and many and blocks - tokens >= _LEAST_DEAD_BLOCKS else LEGACY


def _cos_and_sin(name: str, freqs: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The cosines and sines of ``freqs`` in float32, each ``[s2, d2]``."""
    if not isinstance(freqs, torch.Tensor) or freqs.dtype not in DTYPES:
        raise TypeError(f"{name}: expected floating-point angles, got {getattr(freqs, 'dtype', shown(freqs))}")
    if tensor(name, freqs).ndim != 4 or freqs.shape[1:3] != (1, 1) or freqs.shape[-1] % 2 or not freqs.shape[-1]:
        raise ValueError(f"{name}: expected shape [s2, 1, 1, d2] with d2 even, got {tuple(freqs.shape)}")
    if freqs.shape[-1] > head_dim:
        raise ValueError(f"{name}: expected d2 of at most the head size {head_dim}, got {freqs.shape[-1]}")
    angles = freqs[:, 0, 0].float()
    return angles.cos(), angles.sin()


def _check_heads(name: str, t: torch.Tensor, tensor_format: str) -> None:
    rank = len(tensor_format)
    check_tensor(name, tensor(name, t), (rank,), f"{tensor_format} of rank {rank}", DTYPES)


def _position_arguments(
    name: str, t, freqs: dict[str, torch.Tensor], tensor_format: str, start_positions, cu_seqlens, cp_size, cp_rank
) -> dict:
    """The arguments ``positions`` or ``offsets`` of `apply_rope`, after a check of ``t`` and ``freqs`` by name."""
    shard = {"cp_size": cp_size, "cp_rank": cp_rank}
    for freqs_name, angles in freqs.items():
        check_device(freqs_name, angles, t, name)
    packed = tensor_format == "thd"
    if packed:
        check_shape("cu_seqlens", cu_seqlens, ("sequences + 1",), t, name, POSITION_DTYPES)
    sequences = len(cu_seqlens) - 1 if packed else t.shape[tensor_format.index("b")]
    if start_positions is not None:
        check_shape("start_positions", start_positions, (sequences,), t, name, POSITION_DTYPES)
    starts = 0 if start_positions is None else start_positions
    if packed:
        sequences_of = in_words(PackedSequences, offsets="start_positions", total_tokens="t")
        return {"positions": sequences_of(cu_seqlens, len(t), offsets=starts, **shard).positions}
    seq_len = t.shape[SEQ_AXIS[tensor_format]] * integer("cp_size", cp_size, at_least=1)
    for freqs_name, angles in freqs.items():
        if seq_len > len(angles):
            raise ValueError(f"{freqs_name}: expected at least s * cp_size = {seq_len} rows, got {len(angles)}")
    # This checks the ranks, too.
    positions = in_words(context_parallel_positions, seq_len=name)(seq_len, **shard, device=t.device)
    if cp_size == 1:
        return {"offsets": starts}
    return {"positions": positions if start_positions is None else _from_starts(start_positions, positions)}


def _from_starts(starts: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The positions of the tokens at ``places`` of sequences that begin at ``starts``, int64 ``[B, S]``.

    A sequence that starts at ``NO_POSITION`` has no positions (see `ropelab.positions`). A sum that is ``NO_POSITION``
    by chance becomes the position before it, which has no row either.
    """
    starts = starts[:, None].long()
    positions = starts + places
    positions = positions.masked_fill(positions == NO_POSITION, NO_POSITION - 1)
    return positions.masked_fill(starts == NO_POSITION, NO_POSITION)


def _token_positions(qkv, tensor_format: str, positions=None, offsets=0) -> torch.Tensor:
    """The position of every token, in a shape that broadcasts against the first three axes of ``qkv``.

    ``positions`` and ``offsets`` are arguments of `apply_rope`: see `ropelab.positions`.
    """
    if positions is None:
        positions = torch.arange(qkv.shape[SEQ_AXIS[tensor_format]], device=qkv.device)
        if isinstance(offsets, torch.Tensor):
            positions = _from_starts(offsets, positions)
    by_batch = positions.expand(1, -1) if positions.ndim == 1 else positions
    return (by_batch if tensor_format == "bshd" else by_batch.T)[..., None]


def _widths(qkv: torch.Tensor, widths: Sequence[int]) -> tuple[int, int, int]:
    widths = integers("qkv_split_arg_list", widths, at_least=0)
    if len(widths) != 3 or sum(widths) != qkv.shape[-1] or widths[1] < 1 or widths[0] % widths[1]:
        expected = f"three widths whose sum is {qkv.shape[-1]}, the first a multiple of the second"
        raise ValueError(f"qkv_split_arg_list: expected {expected}, got {list(widths)}")
    return widths


def _layout(interleaved: bool) -> Layout:
    return "interleaved" if flag("interleaved", interleaved) else "split_half"
