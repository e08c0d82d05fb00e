"""Rotations that store 8-bit floats with a scale for each block of features, for inference: DeepSeek-V4's operators.

All features of a block have one scale, a power of two, so that a byte holds it (UE8M0). With the largest magnitude
``amax`` of a block, ``scale = 2^ceil(log2(max(amax, amax_epsilon) / 448))``, and float8_e4m3fn holds ``value / scale``,
rounded to nearest even. `ropelab.kernels.block_scales` derives the roundings. Pairs are interleaved, and the first
feature that rotates has an even number.
"""

import torch

from ropelab.arguments import FLOAT32, check_tensor, flag, integer, single, tensor
from ropelab.call.angles import given_tables
from ropelab.call.block_scales import PACKED, QUANTIZE, SCALE_DTYPES, WRITE, check_out
from ropelab.call.dispatcher import check_untransformed
from ropelab.call.memory import empty_heads
from ropelab.call.refusals import renamed
from ropelab.call.where import Where, located
from ropelab.foreign import hinted

TMA_SCALES = 4
"""TMA reads the scales of a column in units of 16 bytes: so many scales of four bytes."""


@hinted
def rope_and_quantize(
    x: torch.Tensor,
    *,
    cos: torch.Tensor,
    sin: torch.Tensor,
    groups: int | None = None,
    block_dim: int = 128,
    scale_dtype: torch.dtype | None = None,
    amax_epsilon: float = 1e-10,
    round_first: bool = False,
    inverse: bool = False,
    positions: torch.Tensor | None = None,
    offsets: int | torch.Tensor = 0,
    rotary_slice: tuple[int, int] | None = None,
    out: torch.Tensor | None = None,
    scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate heads and quantize them to 8-bit floats with block scales, in one pass over their memory.

    Example: ``out, scales = rope_and_quantize(x, cos=cos, sin=sin, groups=8, inverse=True, rotary_slice=(448, 512))``.

    DeepSeek-V4 calls this on the output of attention, whose tail still has the rotation of the values: with
    ``inverse=True`` and ``rotary_slice=(448, 512)``. The two results are the operand of DeepGEMM's ``fp8_einsum`` for
    the groups of the output projection, with the scales in the layout that it reads: float32 on sm_90, and packed int32
    on sm_100. The function is for inference and has no backward.

    The rotation computes in float32, or in float64 where an input has it. The scale and the quotient follow from the
    rotated value in float32, so a result has one rounding to float32 for each operation of the rotation, and then the
    rounding to 8 bits. A token at ``NO_POSITION`` gives zeros.

    Args:
        x: ``[T, H, D]`` in bfloat16, float16, float32 or float64; any strides.
        cos, sin: ``[P, R/2]``, as for `apply_rope`.
        groups: a divisor of H: the heads of a group are the features of one row. By default those of ``out``, or 1.
        block_dim: the features of a block, a power of two from 4 on that divides D.
        scale_dtype: float32 for powers of two, or int32 for the exponents of four successive blocks, the first in the
            lowest byte, each with the bias 127. By default the dtype of ``scales``, or float32.
        amax_epsilon: the least ``amax`` of a block, a positive normal float32.
        round_first: round the rotated features to the dtype of x before the scale is computed.
        inverse: rotate by the inverse.
        positions, offsets, rotary_slice: as for `apply_rope` with ``thd``.
        out: float8_e4m3fn ``[T, groups, (H / groups) D]``, any strides that keep features adjacent; by default a new
            tensor in which the rows of a group follow each other.
        scales: ``[T, groups, N]`` in float32 with ``N = (H / groups) D / block_dim``, or in int32 with a quarter of
            that; any strides. By default a new tensor in which the tokens of a column follow each other. Its columns
            begin at multiples of 16 bytes, as TMA asks, and zeros fill each column up to the next multiple. The memory
            of a given tensor in this order must hold the last column up to such a multiple as well, because TMA reads
            it; the call does not write there.

    Returns:
        ``out`` and ``scales``.

    Raises:
        TypeError: an argument is not a tensor, or a dtype is not supported.
        ValueError: shapes, strides, devices or options do not fit each other; tensors that are written overlap others;
            a tensor requires grad while autograd records; or, for positions in CPU memory, a position has no row.
        NotImplementedError: the call is under a transform of torch.func or in forward mode.
    """
    asked = groups, block_dim, amax_epsilon, round_first, inverse
    key, prepared = QUANTIZE.look_up(
        (scale_dtype,), asked, (out, scales, None, x, None), cos, sin, positions, offsets, None, rotary_slice
    )
    try:
        if prepared is None:
            where, numbers = _given(
                "rope_and_quantize", x, cos, sin, positions, offsets, rotary_slice, inverse, block_dim, amax_epsilon,
                round_first, 1.0,
            )  # fmt: skip
            block_dim = numbers[0]
        tokens, heads, head_dim = x.shape
        if out is None:
            groups = integer("groups", 1 if groups is None else groups, at_least=1)
            if heads % groups:
                raise ValueError(f"groups: expected a divisor of {heads} heads, got {groups}")
            features = heads // groups * head_dim
            strides = features, tokens * features, 1
            out = torch.empty_strided((tokens, groups, features), strides, dtype=torch.float8_e4m3fn, device=x.device)
        elif prepared is None:
            check_out(out)
            if groups is not None and integer("groups", groups) != out.shape[1]:
                raise ValueError(f"groups: expected {out.shape[1]}, the groups of out, got {groups}")
        if scales is None:
            scale_dtype = torch.float32 if scale_dtype is None else scale_dtype
            if scale_dtype not in SCALE_DTYPES:
                raise TypeError(f"scale_dtype: expected one of {SCALE_DTYPES}, got {scale_dtype}")
            columns = out.shape[2] // (block_dim * (PACKED if scale_dtype == torch.int32 else 1))
            scales = _scales(tokens, out.shape[1], columns, scale_dtype, x.device)
        else:
            tensor("scales", scales)
            if scale_dtype is not None and scale_dtype != scales.dtype:
                raise TypeError(f"scale_dtype: expected {scales.dtype}, the dtype of scales, got {scale_dtype}")
            _check_last_column(scales)
        given = out, scales, None, x, None
        if prepared is None:
            QUANTIZE.run(given, where, *numbers, key=key)
        else:
            prepared(given, cos, sin, positions, offsets)
    except (TypeError, ValueError) as error:
        raise renamed(error, q="x") from error
    return out, scales


@hinted
def rope_and_quantize_indexer(
    q: torch.Tensor,
    weights: torch.Tensor,
    *,
    cos: torch.Tensor,
    sin: torch.Tensor,
    weight_scale: float = 1.0,
    amax_epsilon: float = 1e-4,
    positions: torch.Tensor | None = None,
    offsets: int | torch.Tensor = 0,
    rotary_slice: tuple[int, int] | None = None,
    out: torch.Tensor | None = None,
    weights_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the queries of a sparse indexer, and quantize each head with one scale, which becomes part of its weight.

    Example: ``q, weights = rope_and_quantize_indexer(q, weights, cos=cos, sin=sin, rotary_slice=(64, 128))``.

    The logit of the indexer is a sum over heads of ``weight * relu(q k)``, and a scale of q is positive, so the weight
    can carry it: ``weights_out = weights * weight_scale * scale``. The rotated features are rounded to the dtype of q
    before the scale is computed, as vLLM and DeepSeek-V4 do. In float32 the first product rounds, and the second is
    exact. The function is for inference and has no backward.

    Args:
        q: ``[T, H, D]``, D a power of two from 4 on; otherwise as ``x`` of `rope_and_quantize`.
        weights: ``[T, H]`` in bfloat16, float16, float32 or float64, any strides.
        weight_scale: the scale of the softmax times the scale of the heads.
        cos, sin, amax_epsilon, positions, offsets, rotary_slice: as for `rope_and_quantize`.
        out: float8_e4m3fn ``[T, H, D]`` with adjacent heads; by default a new tensor.
        weights_out: float32 ``[T, H]``; by default a new tensor.

    Returns:
        ``out`` and ``weights_out``.

    Raises:
        TypeError, ValueError, NotImplementedError: as `rope_and_quantize`.
    """
    key, prepared = QUANTIZE.look_up(
        (), (weight_scale, amax_epsilon), (out, None, weights_out, q, weights), cos, sin, positions, offsets, None,
        rotary_slice,
    )  # fmt: skip
    try:
        if prepared is None:
            block_dim = max(1, q.shape[-1]) if isinstance(q, torch.Tensor) and q.ndim else 1
            where, numbers = _given(
                "rope_and_quantize_indexer", q, cos, sin, positions, offsets, rotary_slice, False, block_dim,
                amax_epsilon, True, weight_scale,
            )  # fmt: skip
            tensor("weights", weights)
        if out is None:
            out = torch.empty(q.shape, dtype=torch.float8_e4m3fn, device=q.device)
        if weights_out is None:
            weights_out = torch.empty(weights.shape, dtype=torch.float32, device=q.device)
        given = out, None, weights_out, q, weights
        if prepared is None:
            QUANTIZE.run(given, where, *numbers, key=key)
        else:
            prepared(given, cos, sin, positions, offsets)
    except (TypeError, ValueError) as error:
        raise renamed(error, x="q") from error
    return out, weights_out


@hinted
def rope_and_block_scaled_cache(
    q: torch.Tensor,
    kv: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    cos: torch.Tensor,
    sin: torch.Tensor,
    block_size: int,
    eps: float = 1e-6,
    block_dim: int = 64,
    positions: torch.Tensor | None = None,
    offsets: int | torch.Tensor = 0,
    rotary_slice: tuple[int, int] | None = None,
    q_out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalize and rotate queries, and write the rotated key-value vector into a cache with block scales, in one pass.

    Example: ``q = rope_and_block_scaled_cache(q, kv, kv_cache, slots, cos=cos, sin=sin, block_size=64)``.

    Each head of q is divided by ``sqrt(mean(q^2) + eps)``, without weights, and its tail rotates; nothing is rounded in
    between. The tail of kv, which all heads share, rotates, and kv is rounded to its dtype. The features before the
    tail become 8-bit floats with a scale for each block, with the least ``amax`` 1e-4. The tail keeps the dtype of kv.

    A block of the cache has ``block_size`` rows of data and after them ``block_size`` rows of scales (``fp8_ds_mla`` of
    vLLM and FlashMLA for DeepSeek-V4)::

        data:    [D - R] in float8_e4m3fn, [R] in the dtype of kv       448 + 128 bytes
        scales:  [(D - R) / block_dim] bytes e for 2^(e - 127), zeros    7 + 1 bytes

    The zeros end at a multiple of four bytes. Slots are as for `rope_and_cache`. The function is for inference and has
    no backward.

    Args:
        q: ``[T, H, D]`` in bfloat16 or float16, any strides.
        kv: ``[T, D]`` after its norm, of q's dtype, any strides.
        kv_cache: uint8 ``[blocks, bytes]`` with at least the bytes of a block, for example the view ``[blocks, -1]`` of
            a cache ``[blocks, block_size, 584]``. The call overwrites the rows of its tokens.
        slot_mapping: ``[N]``, as for `rope_and_cache`.
        cos, sin: ``[P, R/2]``, as for `apply_rope`.
        block_size: the tokens of a block of the cache.
        eps: a number of at least 0, added to the mean of the squares. With 0, heads of zeros stay zeros.
        block_dim: the features with a common scale, a power of two from 4 on that divides D - R.
        positions, offsets: as for `apply_rope` with ``thd``.
        rotary_slice: the last features of a head, for example ``(448, 512)``; this is the default.
        q_out: as ``q``: the tensor for the queries; ``q`` itself for a result in place. By default a new tensor.

    Returns:
        ``q_out``, or the new tensor.

    Raises:
        TypeError, ValueError, NotImplementedError: as `rope_and_quantize`.
    """
    key, prepared = WRITE.look_up(
        (), (eps, block_size, block_dim), (kv_cache, q_out, q, kv, slot_mapping), cos, sin, positions, offsets, None,
        rotary_slice,
    )  # fmt: skip
    if prepared is not None:
        q_out = empty_heads(q) if q_out is None else q_out
        prepared((kv_cache, q_out, q, kv, slot_mapping), cos, sin, positions, offsets)
        return q_out
    check_untransformed("rope_and_block_scaled_cache")
    check_tensor("q", q, (3,), "[tokens, heads, head_dim]")
    tables = given_tables(cos, sin)
    if rotary_slice is None:
        check_tensor("cos", cos, (2,), "[positions, columns]")
        rotary_slice = q.shape[2] - 2 * tables.columns, q.shape[2]
    where = located(q, tables, positions, offsets, "interleaved", None, "thd", rotary_slice)
    numbers = (
        single("eps", eps, at_least=0),
        integer("block_size", block_size, at_least=1),
        integer("block_dim", block_dim, at_least=1),
    )
    q_out = empty_heads(q) if q_out is None else q_out
    given = kv_cache, q_out, q, kv, slot_mapping
    WRITE.run(given, where, *numbers, key=key)
    return q_out


def _scales(tokens: int, groups: int, columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An empty tensor ``[tokens, groups, columns]`` as TMA reads it, with zeros behind the tokens of a column."""
    rows = -(-tokens // TMA_SCALES) * TMA_SCALES
    shape, strides = (tokens, groups, columns), (1, columns * rows, rows)
    if not torch.compiler.is_compiling() and rows == tokens:  # one compiled graph serves any number of tokens
        return torch.empty_strided(shape, strides, dtype=dtype, device=device)
    return torch.zeros(groups * columns * rows, dtype=dtype, device=device).as_strided(shape, strides)


def _check_last_column(scales: torch.Tensor) -> None:
    """Raise ValueError for scales in the order that TMA reads, if TMA would read beyond the end of their memory."""
    if torch.compiler.is_compiling() or scales.ndim != 3 or not scales.numel() or not len(scales) % TMA_SCALES:
        return
    of_token, of_group, of_column = scales.stride()
    if of_token == 1 and of_column % TMA_SCALES == 0:
        _, groups, columns = scales.shape
        rows = -(-len(scales) // TMA_SCALES) * TMA_SCALES
        end = scales.storage_offset() + (groups - 1) * of_group + (columns - 1) * of_column + rows
        got = scales.untyped_storage().nbytes()
        if end * scales.itemsize > got:
            raise ValueError(
                f"scales: expected memory of {end * scales.itemsize} bytes, because TMA reads whole units of "
                f"{TMA_SCALES} tokens of a column, got {got} bytes"
            )


def _given(
    name: str, x, cos, sin, positions, offsets, rotary_slice, inverse, block_dim, amax_epsilon, round_first,
    weight_scale,
) -> tuple[Where, tuple]:  # fmt: skip
    """The place of the tokens of ``x``, and the numbers of `call.block_scales.QUANTIZE`."""
    check_untransformed(name)
    check_tensor("q", x, (3,), "[tokens, heads, head_dim]")
    inverse, tables = flag("inverse", inverse), given_tables(cos, sin)
    where = located(x, tables, positions, offsets, "interleaved", None, "thd", rotary_slice, inverse)
    numbers = (
        integer("block_dim", block_dim, at_least=1),
        single("amax_epsilon", amax_epsilon, at_least=FLOAT32.tiny),
        flag("round_first", round_first),
        single("weight_scale", weight_scale),
    )
    return where, numbers
