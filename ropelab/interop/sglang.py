"""The in-place operators of SGLang, vLLM and FlashInfer, over `ropelab.apply_rope`.

- `rotary_embedding_cos_sin` takes cosines and sines of each token, as in SGLang#14302 for diffusion models.
- `apply_rope_with_cos_sin_cache_inplace` takes positions and a cache of cosines and sines, as in vLLM, SGLang and
  FlashInfer.
- `apply_rope_qk_inplace` takes q and k of a diffusion model and its frequencies, complex numbers or a cache.
  `SplitTables` keeps the tables that it makes of complex frequencies.

The operators differ from the operator in SGLang#14302 on purpose:

- ``interleaved`` means adjacent pairs ``(2i, 2i+1)`` and ``is_neox`` means halves ``(i, i + R/2)``, as everywhere else.
  In the pull request both words stood for adjacent pairs.
- No argument decides how a call is launched. The operator in the pull request divides the heads of a token between
  several blocks for up to 4 tokens. The kernel here does so whenever the tokens alone would leave multiprocessors idle.
- The width of the tables does not decide which features rotate. In the pull request ``W`` columns meant ``2 W``
  features in one layout and ``W`` features in the other.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ropelab.arguments import DTYPES, POSITION_DTYPES, check_tensor, dtype_name, flag, integer, tensor
from ropelab.call.refusals import in_words
from ropelab.call.traced import one_node
from ropelab.layout.pairing import Layout
from ropelab.layout.seq_format import SeqFormat
from ropelab.rope import apply_rope

__all__ = [
    "KEPT", "SplitTables", "apply_rope_qk_inplace", "apply_rope_with_cos_sin_cache_inplace", "rotary_embedding_cos_sin",
]  # fmt: skip

_FREQS_DTYPES = (*DTYPES, torch.complex64, torch.complex128)


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
        head_size: the features of a head, D. A 2-D ``query`` or ``key`` needs it; otherwise it may stay 0.
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
    in_words(apply_rope, q="query", k="key")(
        q, k, cos=cos, sin=sin, layout=layout, seq_format=seq_format, rotary_slice=(0, rotary_dim), positions=positions,
        inplace=True,
    )  # fmt: skip


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
        head_size: the features of a head, D.
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
    in_words(apply_rope, q="query", k="key", cos="cos_sin_cache", sin="cos_sin_cache")(
        q, k, cos=cos, sin=sin, layout=layout, seq_format=seq_format, positions=positions, axes=axes, inplace=True
    )


@one_node
def apply_rope_qk_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    head_size: int | None = None,
    is_neox: bool = False,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k of a diffusion model in place, and return them.

    Args:
        q: ``[B, S, Hq, D]``, any strides that keep the features of a head together.
        k: ``[B, S, Hk, D]`` with any number of heads.
        cos_sin_cache: the frequencies, a row for each token of a sequence, of all sequences, or of more positions:

            - complex64 or complex128 ``[P, R/2]``, ``cos + i sin`` of each pair, as Qwen-Image makes them. Their
              parts are copied once and kept in `KEPT`.
            - a floating dtype ``[P, R]``, the cosines of the R/2 pairs before the sines.
        head_size: D; by default the last axis of ``q``.
        is_neox: pairs are ``(i, i + R/2)``; otherwise ``(2i, 2i+1)``, as in diffusion models.
        positions: ``[B S]`` int32 or int64, the row of each token. Without positions, tables of B S rows have a row for
            each token; other tables have the rows of a sequence first, and all sequences share these rows.

    Returns:
        q and k, with new values.

    Raises:
        TypeError: an argument is not a tensor, or a dtype is not supported or does not match.
        ValueError: shapes do not fit one another, or memory overlaps.

    Source: ``apply_sglang_jit_rope_qk_inplace`` of SGLang#14302, and ``apply_flashinfer_rope_qk_inplace`` of SGLang,
    which take the same arguments. For tensors with gaps, SGLang's functions return copies, and this function writes
    into the tensors themselves.
    """
    for name, x in (("q", q), ("k", k)):
        check_tensor(name, tensor(name, x), (4,), "[batch, seq_len, heads, head_size]")
    if head_size is not None and integer("head_size", head_size) != q.shape[-1]:
        raise ValueError(f"head_size: expected q's last axis {q.shape[-1]}, got {head_size}")
    cos, sin = _tables(cos_sin_cache, q.shape[-1])
    layout: Layout = "split_half" if flag("is_neox", is_neox) else "interleaved"
    batch, seq_len = q.shape[:2]
    if positions is not None:
        positions = _positions_of_tokens(positions, q)
    elif batch > 1 and len(cos) == batch * seq_len:
        cos, sin = (table.unflatten(0, (batch, seq_len)) for table in (cos, sin))
    elif len(cos) >= seq_len:
        cos, sin = cos[:seq_len], sin[:seq_len]
    else:
        raise ValueError(f"cos_sin_cache: expected a row for each of {seq_len} tokens, got {len(cos)}")
    in_words(apply_rope, cos="cos_sin_cache", sin="cos_sin_cache")(
        q, k, cos=cos, sin=sin, layout=layout, positions=positions, rotary_slice=(0, 2 * cos.shape[-1]), inplace=True
    )
    return q, k


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


def _tables(freqs: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines ``[P, R/2]`` of complex frequencies, or of a cache."""
    check_tensor("cos_sin_cache", tensor("cos_sin_cache", freqs), (2,), "[positions, columns]", _FREQS_DTYPES)
    features = freqs.shape[1] * (2 if freqs.is_complex() else 1)
    if not 0 < features <= head_size or features % 2:
        wanted = f"complex [positions, R/2] or [positions, R] with an even R up to head_size = {head_size}"
        raise ValueError(f"cos_sin_cache: expected {wanted}, got {tuple(freqs.shape)}")
    if freqs.is_complex():
        return KEPT.split(freqs)
    cos, sin = freqs.chunk(2, dim=-1)
    return cos, sin


# -------------------------------------------------------------------------- cosines and sines of complex frequencies

# A kernel wants contiguous rows of cosines and of sines. In complex numbers cosines and sines alternate, so both have
# to be copied. A diffusion model hands the same frequencies to every block in every step, and one copy is enough.

Tables = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class _Entry:
    owner: weakref.ref
    version: int
    tables: Tables


class SplitTables:
    """Cosines and sines of complex frequencies, kept while the frequencies live and do not change.

    An entry belongs to a tensor, or to the tensor of which the frequencies are a view. The entry is used while this
    tensor lives, as long as torch counts no write to it, for frequencies at the same address with the same shape,
    strides, dtype, bit of conjugation and bit of negation, and on the same CUDA stream. A view that each call makes
    anew therefore finds its entry, and a new tensor at the address of a deleted tensor does not.

    The tables are made anew in every call

    - under ``torch.compile``, and for subclasses of tensors, which may have no memory;
    - for tensors of ``torch.inference_mode``, for which torch counts no writes;
    - while a CUDA graph is captured: the graph then makes its own tables, and rests on no memory of this object;
    - for frequencies that require a gradient.

    A write that torch does not count, through ``Tensor.data`` or a pointer, is not noticed: call `clear` after such a
    write.

    Args:
        most: the most entries. The entry that was not used for the longest time is dropped.

    Raises:
        TypeError, ValueError: ``most`` is not an integer of at least 0.
    """

    def __init__(self, most: int = 64) -> None:
        self._most = integer("most", most, at_least=0)
        self._entries: OrderedDict[tuple, _Entry] = OrderedDict()
        self._lock = threading.RLock()  # a tensor may die, and its entries with it, while this thread holds the lock

    def __len__(self) -> int:
        return len(self._entries)

    def clear(self) -> None:
        """Forget all tables."""
        with self._lock:
            self._entries.clear()

    def split(self, freqs: torch.Tensor) -> Tables:
        """The real and the imaginary part of ``freqs``, contiguous, and shared by the calls that find an entry.

        Raises:
            TypeError: ``freqs`` is not a complex tensor.
        """
        if not _countable(freqs):
            return _parts(freqs)
        owner = freqs if freqs._base is None else freqs._base
        stream = torch.cuda.current_stream(freqs.device).cuda_stream if freqs.is_cuda else None
        layout = tuple(freqs.shape), freqs.stride(), freqs.dtype, freqs.is_conj(), freqs.is_neg()
        key = id(owner), freqs.data_ptr(), *layout, freqs.device, stream
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.owner() is owner and entry.version == freqs._version:
                self._entries.move_to_end(key)
                return entry.tables
        version = freqs._version
        tables = _parts(freqs)
        with self._lock:
            self._entries[key] = _Entry(weakref.ref(owner, lambda _: self._drop(key)), version, tables)
            self._entries.move_to_end(key)
            while len(self._entries) > self._most:
                self._entries.popitem(last=False)
        return tables

    def _drop(self, key: tuple) -> None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.owner() is None:  # else a new tensor already has this place
                del self._entries[key]


def _parts(freqs: torch.Tensor) -> Tables:
    if not tensor("freqs", freqs).is_complex():
        raise TypeError(f"freqs: expected a complex tensor, got {dtype_name(freqs.dtype)}")
    freqs = freqs.resolve_conj().resolve_neg()  # a kernel reads memory, and sees neither bit
    return freqs.real.contiguous(), freqs.imag.contiguous()


def _countable(freqs: torch.Tensor) -> bool:
    """Whether an entry for these frequencies can be recognized, and noticed to be old."""
    if torch.compiler.is_compiling() or type(freqs) not in (torch.Tensor, torch.nn.Parameter):
        return False
    if freqs.requires_grad or freqs.is_inference() or freqs.is_meta:
        return False
    return not (freqs.is_cuda and torch.cuda.is_current_stream_capturing())


KEPT = SplitTables()
"""The tables that `apply_rope_qk_inplace` keeps."""
