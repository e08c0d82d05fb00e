"""This file holds the in-place operators of SGLang, vLLM and FlashInfer, over `ropelab.apply_rope`.

`rotary_embedding_cos_sin` takes cosines and sines of each token, as in SGLang#14302 for diffusion models.
`apply_rope_with_cos_sin_cache_inplace` takes positions and a cache of cosines and sines, as in vLLM, SGLang and
FlashInfer. Tensors are flat, ``[T, heads * head_size]``, or have an axis of heads.

The operators differ from the operator in SGLang#14302 on purpose:

- ``interleaved`` means adjacent pairs ``(2i, 2i+1)`` and ``is_neox`` means halves ``(i, i + R/2)``, as everywhere else.
  In the pull request both words stood for adjacent pairs.
- The width of the tables does not decide which features rotate. In the pull request ``W`` columns meant ``2 W``
  features in one layout and ``W`` features in the other.
"""

import torch
from torch.autograd.graph import increment_version

from ropelab.arguments import DTYPES, POSITION_DTYPES, check_tensor, flag, integer, tensor
from ropelab.call.angles import Tables
from ropelab.call.checks import check_memory, check_rope_arguments, check_writable
from ropelab.call.options import Options
from ropelab.interop.refusals import renamed
from ropelab.kernels import backend, uses_triton
from ropelab.kernels.tiles import PAIRS_PER_ACCESS, Tile, next_power_of_2
from ropelab.layout.seq_format import to_bshd
from ropelab.rope import apply_rope


def rotary_embedding_cos_sin(
    cos: torch.Tensor,
    sin: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None = None,
    head_size: int = 0,
    interleaved: bool = False,
    *,
    rotary_dim: int | None = None,
    low_token_launch: bool = True,
) -> None:
    """Rotate query and key in place by the cos and sin of each token.

    Args:
        cos, sin: ``[T, R/2]``, a column for each pair, or ``[T, R]``, a column for each feature in the order of the
            features; bfloat16, float16, float32 or float64. The dtype may differ from the dtype of ``query``, and the
            arithmetic is in float32 or wider. For 4-D tensors also ``[S, ...]``, which all sequences share.
        query: ``[T, Hq * D]``, ``[T, Hq, D]`` or ``[B, S, Hq, D]`` with ``T = B S``; any strides that keep the
            features of a head together.
        key: as ``query`` with any number of heads (GQA, MQA), or None.
        head_size: D. A 2-D ``query`` or ``key`` needs it; otherwise it may stay 0.
        interleaved: pairs are ``(2i, 2i+1)`` (GPT-J); otherwise ``(i, i + R/2)`` (NeoX).
        rotary_dim: R, the number of leading features that rotate; by default all D.
        low_token_launch: several programs share the heads of a token, so that few tokens keep several multiprocessors
            busy. False starts one program for each token, to measure the cost of such a launch. The results are the
            same. The argument matters to launches of Triton only.

    Raises:
        TypeError: an argument is not a tensor, or a dtype is not supported or does not match.
        ValueError: shapes do not fit one another, ``rotary_dim`` is odd, or memory overlaps.

    Source: SGLang#14302. The meaning of ``interleaved`` follows the word.
    """
    head_size = integer("head_size", head_size, at_least=0)
    q = _with_heads("query", query, 2, (3, 4), head_size)
    k = None if key is None else _with_heads("key", key, 2, (3, 4), head_size)
    rotary_dim = q.shape[-1] if rotary_dim is None else integer("rotary_dim", rotary_dim)
    if not 0 < rotary_dim <= q.shape[-1] or rotary_dim % 2:
        raise ValueError(f"rotary_dim: expected an even number up to head_size = {q.shape[-1]}, got {rotary_dim}")
    cos, sin = (_rows_of_tokens(name, table, q, rotary_dim) for name, table in (("cos", cos), ("sin", sin)))
    layout = "interleaved" if flag("interleaved", interleaved) else "split_half"
    seq_format, slice_ = "thd" if q.ndim == 3 else "bshd", (0, rotary_dim)
    try:
        if not flag("low_token_launch", low_token_launch) and uses_triton(q):
            _one_program_per_token(q, k, cos, sin, Options(layout, layout, seq_format, slice_, False, False))
            return
        apply_rope(q, k, cos=cos, sin=sin, layout=layout, seq_format=seq_format, rotary_slice=slice_, inplace=True)
    except (TypeError, ValueError) as error:
        raise renamed(error, q="query", k="key") from error


def apply_rope_with_cos_sin_cache_inplace(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor | None,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:
    """Rotate query and key in place, each token by the row of the cache that its position reads.

    Args:
        positions: ``[T]`` or ``[B, S]``, int32 or int64. `ropelab.positions` says which row a position reads.
        query: ``[T, Hq * D]`` or ``[T, Hq, D]``, with ``[B, S]`` in the place of T for positions ``[B, S]``; any
            strides that keep the features of a head together.
        key: as ``query`` with any number of heads, or None.
        head_size: D.
        cos_sin_cache: ``[P, R]`` with ``R <= D``: the cosines of the R/2 pairs, then the sines. The dtype is float32 as
            in FlashInfer, the dtype of ``query`` as in vLLM, or another floating dtype.
        is_neox: pairs are ``(i, i + R/2)``; otherwise ``(2i, 2i+1)``.

    Raises:
        TypeError, ValueError: as `rotary_embedding_cos_sin`; or a position in CPU memory has no row. On a GPU a
            position without a row yields NaN.

    Source: `vllm._custom_ops.rotary_embedding`, `sgl_kernel` and `flashinfer.rope`, which share these arguments.
    """
    check_tensor("positions", tensor("positions", positions), (1, 2), "[T] or [B, S]", POSITION_DTYPES)
    head_size = integer("head_size", head_size, at_least=0)
    ranks = positions.ndim + 1, (positions.ndim + 2,)
    q = _with_heads("query", query, *ranks, head_size)
    k = None if key is None else _with_heads("key", key, *ranks, head_size)
    check_tensor("cos_sin_cache", tensor("cos_sin_cache", cos_sin_cache), (2,), "[positions, rotary_dim]", DTYPES)
    columns = cos_sin_cache.shape[1]
    if not 0 < columns <= q.shape[-1] or columns % 2:
        expected = f"[positions, rotary_dim] with an even rotary_dim up to head_size = {q.shape[-1]}"
        raise ValueError(f"cos_sin_cache: expected {expected}, got {tuple(cos_sin_cache.shape)}")
    if q.shape[: positions.ndim] != positions.shape:
        raise ValueError(
            f"positions: expected shape {tuple(q.shape[:-2])}, as the tokens of query, got {tuple(positions.shape)}"
        )
    cos, sin = cos_sin_cache.chunk(2, dim=-1)
    seq_format = "thd" if positions.ndim == 1 else "bshd"
    layout = "split_half" if flag("is_neox", is_neox) else "interleaved"
    try:
        apply_rope(q, k, cos=cos, sin=sin, layout=layout, seq_format=seq_format, positions=positions, inplace=True)
    except (TypeError, ValueError) as error:
        raise renamed(error, q="query", k="key", cos="cos_sin_cache", sin="cos_sin_cache") from error


def token_tile(q_heads: int, rotary_dim: int) -> Tile:
    """The tile of a program that rotates all heads of a token with at most 512 threads, as in vLLM."""
    heads, width = next_power_of_2(q_heads), next_power_of_2(rotary_dim // 2)
    return Tile(1, heads, min(16, max(1, heads * width // PAIRS_PER_ACCESS // 32)))


def _one_program_per_token(q, k, cos, sin, options: Options) -> None:
    """Rotate in place with a program for each token, without a record for autograd."""
    tables = Tables(cos, sin)
    check_rope_arguments(q, k, tables, None, options)
    check_memory(q, k)
    check_writable(q, k)
    xs = [x for x in (q, k) if x is not None]
    views = [to_bshd(x, options.seq_format) for x in xs]
    rotation = options.rotation(tables)
    tile = token_tile(q.shape[-2], rotation.rotary_dim)
    backend("rotate", q).rotate(views, views, cos, sin, rotation, tile=tile)
    increment_version(xs)  # autograd does not see a kernel write


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


def _rows_of_tokens(name: str, table: torch.Tensor, q: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """The table in the shape for `apply_rope`: a row for each token, with a batch axis if the sequences differ."""
    if tensor(name, table).ndim != 2 or table.shape[-1] not in (rotary_dim, rotary_dim // 2):
        raise ValueError(
            f"{name}: expected a column for each of {rotary_dim // 2} pairs or {rotary_dim} features that rotate, "
            f"got shape {tuple(table.shape)} (see rotary_dim)"
        )
    tokens = q.shape[:-2]
    if len(table) == tokens.numel():
        return table.unflatten(0, tokens) if len(tokens) == 2 else table
    if len(tokens) == 2 and len(table) == tokens[1]:
        return table
    raise ValueError(f"{name}: expected a row for each of {tokens.numel()} tokens, got {len(table)}")
