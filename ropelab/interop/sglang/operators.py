"""The operators on the tokens of SGLang, vLLM and FlashInfer.

Tensors are flat, ``[T, heads * head_size]``, or have an axis of heads.

The operators differ from the operator in SGLang#14302 on purpose:

- ``interleaved`` means adjacent pairs ``(2i, 2i+1)`` and ``is_neox`` means halves ``(i, i + R/2)``, as everywhere else.
  In the pull request both words stood for adjacent pairs.
- No argument decides how a call is launched. The operator in the pull request divides the heads of a token between
  several blocks for up to 4 tokens. The kernel here does so whenever the tokens alone would leave multiprocessors idle.
- The width of the tables does not decide which features rotate. In the pull request ``W`` columns meant ``2 W``
  features in one layout and ``W`` features in the other.
"""

from collections.abc import Sequence

import torch

from ropelab.arguments import DTYPES, POSITION_DTYPES, check_tensor, flag, integer, tensor
from ropelab.call.traced import one_node
from ropelab.interop.refusals import renamed
from ropelab.layout.pairing import Layout
from ropelab.layout.seq_format import SeqFormat
from ropelab.rope import apply_rope


@one_node
def rotary_embedding_cos_sin(
    cos: torch.Tensor,
    sin: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None = None,
    head_size: int = 0,
    interleaved: bool = False,
    *,
    rotary_dim: int | None = None,
    positions: torch.Tensor | None = None,
) -> None:
    """Rotate query and key in place by the cos and sin of each token.

    Args:
        cos, sin: ``[T, R/2]``, a column for each pair, or ``[T, R]``, a column for each feature in the order of the
            features; bfloat16, float16, float32 or float64. The dtype may differ from the dtype of ``query``, and the
            arithmetic is in float32 or wider. For 4-D tensors also ``[S, ...]``, which all sequences share. With
            positions ``[P, ...]``.
        query: ``[T, Hq * D]``, ``[T, Hq, D]`` or ``[B, S, Hq, D]`` with ``T = B S``; any strides that keep the
            features of a head together.
        key: as ``query`` with any number of heads (GQA, MQA), or None.
        head_size: D. A 2-D ``query`` or ``key`` needs it; otherwise it may stay 0.
        interleaved: pairs are ``(2i, 2i+1)`` (GPT-J); otherwise ``(i, i + R/2)`` (NeoX).
        rotary_dim: R, the number of leading features that rotate; by default all D.
        positions: ``[T]`` int32 or int64, the row of the tables for each token; by default each token has its own row.

    Raises:
        TypeError: an argument is not a tensor, or a dtype is not supported or does not match.
        ValueError: shapes do not fit one another, ``rotary_dim`` is odd, or memory overlaps; or a position in CPU
            memory has no row. On a GPU a position without a row yields NaN.

    Source: SGLang#14302. The meaning of ``interleaved`` follows the word.
    """
    head_size = integer("head_size", head_size, at_least=0)
    q = _with_heads("query", query, 2, (3, 4), head_size)
    k = None if key is None else _with_heads("key", key, 2, (3, 4), head_size)
    rotary_dim = q.shape[-1] if rotary_dim is None else integer("rotary_dim", rotary_dim)
    if not 0 < rotary_dim <= q.shape[-1] or rotary_dim % 2:
        raise ValueError(f"rotary_dim: expected an even number up to head_size = {q.shape[-1]}, got {rotary_dim}")
    cos, sin = (_columns(name, table, rotary_dim) for name, table in (("cos", cos), ("sin", sin)))
    if positions is None:
        cos, sin = (_rows_of_tokens(name, table, q) for name, table in (("cos", cos), ("sin", sin)))
    else:
        positions = _positions_of_tokens(positions, q)
    layout: Layout = "interleaved" if flag("interleaved", interleaved) else "split_half"
    seq_format: SeqFormat = "thd" if q.ndim == 3 else "bshd"
    slice_ = 0, rotary_dim
    try:
        apply_rope(
            q, k, cos=cos, sin=sin, layout=layout, seq_format=seq_format, rotary_slice=slice_, positions=positions,
            inplace=True,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise renamed(error, q="query", k="key") from error


@one_node
def apply_rope_with_cos_sin_cache_inplace(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
    *,
    axes: Sequence[int] | None = None,
) -> None:
    """Rotate query and key in place, each token by the row of the cache that its position reads.

    Args:
        positions: ``[T]`` or ``[B, S]``, int32 or int64; ``[axes, T]`` with ``axes``. `ropelab.positions` says which
            row a position reads.
        query: ``[T, Hq * D]`` or ``[T, Hq, D]``, with ``[B, S]`` in the place of T for positions ``[B, S]``; any
            strides that keep the features of a head together.
        key: as ``query`` with any number of heads, or None.
        head_size: D.
        cos_sin_cache: ``[P, R]`` with ``R <= D``: the cosines of the R/2 pairs, then the sines. The dtype is float32 as
            in FlashInfer, the dtype of ``query`` as in vLLM, or another floating dtype.
        is_neox: pairs are ``(i, i + R/2)``; otherwise ``(2i, 2i+1)``.
        axes: as for `ropelab.apply_rope`: the axis of positions that each pair reads (M-RoPE). The packages have no
            such argument.

    Raises:
        TypeError, ValueError: as `rotary_embedding_cos_sin`; or a position in CPU memory has no row. On a GPU a
            position without a row yields NaN.

    Source: ``vllm._custom_ops.rotary_embedding``, ``sgl_kernel`` and ``flashinfer.rope``, which share these arguments.
    """
    check_tensor("positions", tensor("positions", positions), (1, 2), "[T] or [B, S]", POSITION_DTYPES)
    if axes is not None:
        check_tensor("positions", positions, (2,), "[axes, T] with axes", POSITION_DTYPES)
    head_size = integer("head_size", head_size, at_least=0)
    tokens = positions if axes is None else positions[0] if len(positions) else positions.new_empty(0)
    ranks = tokens.ndim + 1, (tokens.ndim + 2,)
    q = _with_heads("query", query, *ranks, head_size)
    k = None if key is None else _with_heads("key", key, *ranks, head_size)
    check_tensor("cos_sin_cache", tensor("cos_sin_cache", cos_sin_cache), (2,), "[positions, rotary_dim]", DTYPES)
    columns = cos_sin_cache.shape[1]
    if not 0 < columns <= q.shape[-1] or columns % 2:
        expected = f"[positions, rotary_dim] with an even rotary_dim up to head_size = {q.shape[-1]}"
        raise ValueError(f"cos_sin_cache: expected {expected}, got {tuple(cos_sin_cache.shape)}")
    if q.shape[: tokens.ndim] != tokens.shape:
        raise ValueError(
            f"positions: expected shape {tuple(q.shape[:-2])}, as the tokens of query, got {tuple(positions.shape)}"
        )
    cos, sin = cos_sin_cache.chunk(2, dim=-1)
    seq_format: SeqFormat = "thd" if tokens.ndim == 1 else "bshd"
    layout: Layout = "split_half" if flag("is_neox", is_neox) else "interleaved"
    try:
        apply_rope(
            q, k, cos=cos, sin=sin, layout=layout, seq_format=seq_format, positions=positions, axes=axes, inplace=True
        )
    except (TypeError, ValueError) as error:
        raise renamed(error, q="query", k="key", cos="cos_sin_cache", sin="cos_sin_cache") from error


def _with_heads(name: str, x: torch.Tensor, flat: int, ranks: tuple[int, ...], head_size: int) -> torch.Tensor:
    """A view with an axis of heads. ``x`` has no axis of heads if its rank is ``flat``, and has one for ``ranks``."""
    if tensor(name, x).ndim not in (flat, *ranks):
        expected = "shape [tokens, heads * head_size] or [tokens, heads, head_size]"
        raise ValueError(f"{name}: expected {expected}, got {tuple(x.shape)}")
    if x.ndim == flat:
        if head_size <= 0 or x.shape[-1] % head_size:
            raise ValueError(f"head_size: expected a divisor of {name}'s last axis {x.shape[-1]}, got {head_size}")
        return x.unflatten(-1, (x.shape[-1] // head_size, head_size))
    if head_size not in (0, x.shape[-1]):
        raise ValueError(f"head_size: expected {name}'s last axis {x.shape[-1]}, got {head_size}")
    return x


def _columns(name: str, table: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """The table, with a column for each pair or for each feature that rotates."""
    if tensor(name, table).ndim != 2 or table.shape[-1] not in (rotary_dim, rotary_dim // 2):
        raise ValueError(
            f"{name}: expected a column for each of {rotary_dim // 2} pairs or {rotary_dim} features that rotate, "
            f"got shape {tuple(table.shape)} (see rotary_dim)"
        )
    return table


def _rows_of_tokens(name: str, table: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The table in the shape for `apply_rope`: a row for each token, with a batch axis if the sequences differ."""
    tokens = q.shape[:-2]
    if len(table) == tokens.numel():
        return table.unflatten(0, tokens) if len(tokens) == 2 else table
    if len(tokens) == 2 and len(table) == tokens[1]:
        return table
    raise ValueError(f"{name}: expected a row for each of {tokens.numel()} tokens, got {len(table)}")


def _positions_of_tokens(positions: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """The positions ``[T]`` in the shape of the tokens of q."""
    check_tensor("positions", tensor("positions", positions), (1,), "[tokens]", POSITION_DTYPES)
    tokens = q.shape[:-2]
    if len(positions) != tokens.numel():
        raise ValueError(f"positions: expected a row for each of {tokens.numel()} tokens, got {len(positions)}")
    return positions.view(tokens)
