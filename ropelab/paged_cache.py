"""The public functions `rope_and_cache` and `mla_rope_and_cache`, for inference with a paged cache."""

from collections.abc import Sequence
from typing import Never

import torch

from ropelab.arguments import check_tensor, flag, single
from ropelab.call.angles import given_angles
from ropelab.call.checks import warn_of_accidents
from ropelab.call.dispatcher import check_untransformed
from ropelab.call.memory import empty_heads
from ropelab.call.paged_cache import Q_OUT, WRITE, WRITE_LATENT
from ropelab.call.where import located
from ropelab.foreign import hinted, unexpected
from ropelab.kernels import Norm
from ropelab.kernels.float8 import FLOAT8_DTYPES
from ropelab.layout.pairing import Layout
from ropelab.layout.seq_format import SeqFormat, check_heads, check_seq_format


@hinted
def rope_and_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    frequencies: torch.Tensor | None = None,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    weight_offset: float = 0.0,
    norm_first: bool = True,
    layout: Layout = "split_half",
    seq_format: SeqFormat = "thd",
    positions: torch.Tensor | None = None,
    axes: Sequence[int] | None = None,
    offsets: int | torch.Tensor = 0,
    rotary_slice: tuple[int, int] | None = None,
    q_out: torch.Tensor | None = None,
    k_out: torch.Tensor | None = None,
    v_out: torch.Tensor | None = None,
    q_nope: torch.Tensor | None = None,
    q_nope_out: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    q_scale_out: torch.Tensor | None = None,
    k_scale_cache: torch.Tensor | None = None,
    v_scale_cache: torch.Tensor | None = None,
    **foreign: Never,
) -> torch.Tensor:
    """Rotate queries and keys, and write keys and values into a paged cache, in one pass over their memory.

    Example: ``q = rope_and_cache(q, k, v, key_cache, value_cache, slots, cos=cos, sin=sin)``.

    With weights, q and k are normalized, as by `apply_qk_norm_rope`. The rotation is the rotation of `apply_rope`. The
    rotated q, the rotated k and v are written; q, k and v are read once. The function is for inference and has no
    backward.

    The norm is over each head if the weights have an element for each feature of a head. The norm is over all heads of
    a token if the weights have an element for each feature of each head (Wan). A program of the kernel then takes all
    heads of q, or all heads of k, of one token; numbers of heads that are no power of two leave threads idle. Nothing
    is rounded between norm and rotation.

    Slot ``s`` is the place ``s % block_size`` of block ``s // block_size`` of a cache. The token with the slot ``s``
    writes its k and its v there. A token with a negative slot writes nothing to the caches, and neither does a token
    without a slot. Slots that no token has do not change. The slots of the tokens must differ from each other;
    otherwise the content of a shared slot is undefined. No call compares them, also not in CPU memory.

    A cache has 8-bit floats or the usual dtypes. The result for k has the dtype of k first, as if a separate launch had
    written it, and is then converted. An 8-bit float holds ``value / scale``, rounded to nearest even; a quotient
    beyond the largest finite number becomes that number, and NaN stays NaN (the convention of vLLM). The scales stay on
    the GPU; the host does not read them.

    You pass the scales, or the kernel computes a scale for each head of each token and writes it beside the 8-bit
    floats: the largest magnitude of the head divided by the largest finite number, but at least 1e-6 (vLLM's
    ``fp8_per_token_head``). The magnitudes are taken after the rounding to the dtype of q. NaN
    counts as 0, and an infinity as the largest float32, so that every scale is a positive finite number. With the unit
    roundoff u of the 8-bit float, 2^-4 or 2^-3, a stored number times its scale is within ``u |x|`` of the value x, or
    within half of the smallest positive number times the scale; the roundings of float32 come on top
    (`ropelab.conformance.cache_bounds.float8_bound`).

    A call in code that ``torch.compile`` compiles does not check that the tensors that it writes lie apart from all
    others, because a tensor has no address while the compiler traces. What a call leaves in tensors that overlap is
    undefined there.

    With ``torch.compile(dynamic=True)``, caches that are views of one tensor must have static sizes
    (``torch._dynamo.mark_static``). Inductor otherwise hands an operator that writes to a view a different view
    (https://github.com/pytorch/pytorch/issues/198068). By default torch.compile treats sizes that do not change as
    static.

    Args:
        q: ``[T, Hq, D]`` (``thd``), or another format of `apply_rope`; bfloat16, float16, float32 or float64; any
            strides, for example a view of a packed qkv.
        k: ``[T, Hk, D]``, as ``q``.
        v: ``[T, Hk, Dv]``, as ``q``.
        key_cache: ``[blocks, block_size, Hk, D]`` in bfloat16, float16, float32, float64, float8_e4m3fn or float8_e5m2;
            any strides that keep the features adjacent. A cache in the order ``[blocks, Hk, block_size, D]`` (HND) is
            passed as its transpose. The call overwrites the slots of its tokens.
        value_cache: ``[blocks, block_size, Hk, Dv]``, as ``key_cache``.
        slot_mapping: ``[N]`` of int32 or int64, the slots of the first N tokens, sequence after sequence. All further
            tokens are padding and have no slot.
        cos, sin, frequencies, layout, seq_format, positions, axes, offsets, rotary_slice: as for `apply_rope`. A token
            at ``NO_POSITION`` gives zeros for q and k.
        q_weight, k_weight: both ``[D]``, or ``[Hq * D]`` and ``[Hk * D]`` for a norm across heads; of one floating
            dtype. Without weights there is no norm.
        eps: a number of at least 0, added to the mean of the squares. With 0, heads of zeros stay zeros.
        weight_offset: a number that is added to the weights: 1 for a model that multiplies by ``1 + w`` (Gemma).
        norm_first: normalize before the rotation (Qwen3); otherwise normalize the rotated heads (Hunyuan).
        q_out: as ``q``, or in float8_e4m3fn or float8_e5m2: the tensor for the result for q; ``q`` itself for a result
            in place. By default a new tensor.
        k_out, v_out: as ``k`` and ``v``: tensors for the rotated k, and for v, of all tokens, or ``k`` and ``v``
            themselves. By default k and v are written to the caches only.
        q_nope: ``[T, Hq, N]``, further features of q, which do not rotate and lie elsewhere; as ``q``. A token at
            ``NO_POSITION`` keeps them. There must be no norm, because a norm takes whole heads.
        q_nope_out: as ``q_nope``, in the dtype of ``q_out``: the tensor for these features.
        q_scale: float32 ``()``, ``(1,)`` or ``(Hq,)``, the scale of ``q_out`` and ``q_nope_out`` in 8-bit floats; by
            default 1.
        k_scale, v_scale: float32 ``()``, ``(1,)`` or ``(Hk,)``, the scales of caches in 8-bit floats; by default 1.
        q_scale_out: float32, the shape of ``q`` without the features, in place of ``q_scale``: the tensor for the
            scales that the call makes. A head has the features of ``q`` and of ``q_nope``.
        k_scale_cache, v_scale_cache: float32 ``[blocks, block_size, Hk]``, any strides, in place of ``k_scale`` and
            ``v_scale``: the tensors for the scales of the slots. The same tensor for both gives k and v of a head one
            scale.

    Returns:
        ``q_out``, or the new tensor for q.

    Raises:
        TypeError: an argument is not a tensor, or a dtype is not supported or does not match.
        ValueError: shapes, strides, devices or options do not fit each other; tensors that are written overlap others;
            a tensor requires grad while autograd records; or, for slots in CPU memory, a slot is beyond the cache. On a
            GPU a slot beyond the cache is skipped.
        NotImplementedError: the call is under a transform of torch.func or in forward mode.
    """
    if foreign:
        raise unexpected(rope_and_cache, *foreign)
    made: tuple = (q_scale_out, k_scale_cache, v_scale_cache)
    if q_scale_out is not None or k_scale_cache is not None:
        check_seq_format(seq_format)
        check_heads("q", q, seq_format)
        made = made_scales(q.ndim - 1, value_cache, v_scale, *made)
    given = [
        key_cache, value_cache, q_out, k_out, v_out, q_nope_out, *made, q, k, v, q_nope, slot_mapping, q_weight,
        k_weight, q_scale, k_scale, v_scale,
    ]  # fmt: skip
    words, numbers = (layout, seq_format, frequencies is None), (eps, weight_offset, norm_first)
    tensors = (cos, sin) if frequencies is None else (frequencies, sin if cos is None else cos)
    key, prepared = WRITE.look_up(words, numbers, given, *tensors, positions, offsets, axes, rotary_slice)
    if prepared is not None:
        given[Q_OUT] = q_out = empty_heads(q) if q_out is None else q_out
        prepared(given, *tensors, positions, offsets)
        return q_out
    check_untransformed("rope_and_cache")
    check_seq_format(seq_format)
    check_heads("q", q, seq_format)
    angles = given_angles(cos, sin, frequencies)
    where = located(q, angles, positions, offsets, layout, None, seq_format, rotary_slice, axes=axes)
    norm = given_norm(q_weight, k_weight, eps, weight_offset, norm_first)
    given[Q_OUT] = q_out = empty_heads(q) if q_out is None else q_out
    read = Norm(0.0) if norm is None else norm
    WRITE.run(given, where, norm, flat=(read.eps, read.weight_offset, read.first))
    warn_of_accidents(q, where)
    WRITE.remember(key, given, where, norm)
    return q_out


@hinted
def mla_rope_and_cache(
    q_pe: torch.Tensor,
    k_pe: torch.Tensor,
    kv_c: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    frequencies: torch.Tensor | None = None,
    layout: Layout = "split_half",
    positions: torch.Tensor | None = None,
    axes: Sequence[int] | None = None,
    offsets: int | torch.Tensor = 0,
    q_out: torch.Tensor | None = None,
    k_out: torch.Tensor | None = None,
    q_nope: torch.Tensor | None = None,
    q_nope_out: torch.Tensor | None = None,
    q_scale: torch.Tensor | None = None,
    kv_scale: torch.Tensor | None = None,
    q_scale_out: torch.Tensor | None = None,
    kv_scale_cache: torch.Tensor | None = None,
    **foreign: Never,
) -> torch.Tensor:
    """Rotate the queries and the shared key of multi-head latent attention, and write the latent cache, in one pass.

    Example: ``q_pe = mla_rope_and_cache(q_pe, k_pe, kv_c, kv_cache, slots, cos=cos, sin=sin)``.

    An entry of the cache is the latent vector ``kv_c`` followed by the rotated ``k_pe``. Slots, 8-bit floats and their
    scales are as for `rope_and_cache`. The function is for inference and has no backward.

    Args:
        q_pe: ``[T, H, R]``, the features of the queries that rotate; any strides, for example ``q[..., -R:]``.
        k_pe: ``[T, R]`` or ``[T, 1, R]``, the key that all heads share.
        kv_c: ``[T, L]``, the latent vector after its norm.
        kv_cache: ``[blocks, block_size, L + R]``; dtypes and strides as ``key_cache`` of `rope_and_cache`.
        slot_mapping: ``[N]``, as for `rope_and_cache`.
        cos, sin: ``[P, R/2]``, as for `apply_rope`.
        frequencies: int64 ``[R/2, 3]`` in place of cos and sin, as for `apply_rope`.
        layout, positions, axes, offsets: as for `apply_rope` with ``thd``. DeepSeek-V3's checkpoint has interleaved
            pairs.
        q_out, q_nope, q_nope_out, q_scale, q_scale_out: as for `rope_and_cache`; ``q_out`` may be ``q_pe`` for a
            result in place.
        k_out: as ``k_pe``: a tensor for the rotated key of all tokens, or ``k_pe`` itself. By default the rotated key
            is written to the cache only.
        kv_scale: float32 ``()`` or ``(1,)``, the scale of a cache in 8-bit floats; by default 1.
        kv_scale_cache: float32 ``[blocks, block_size]`` in place of ``kv_scale``: the tensor for the scales that the
            call makes, one for each entry of the cache.

    Returns:
        ``q_out``, or a new tensor: the rotated queries.

    Raises:
        TypeError, ValueError, NotImplementedError: as `rope_and_cache`.
    """
    if foreign:
        raise unexpected(mla_rope_and_cache, *foreign)
    given = (
        kv_cache, q_out, k_out, q_nope_out, q_scale_out, kv_scale_cache, q_pe, k_pe, kv_c, q_nope, slot_mapping,
        q_scale, kv_scale,
    )  # fmt: skip
    tensors = (cos, sin) if frequencies is None else (frequencies, sin if cos is None else cos)
    key, prepared = WRITE_LATENT.look_up((layout, frequencies is None), (), given, *tensors, positions, offsets, axes)
    if prepared is None:
        check_untransformed("mla_rope_and_cache")
        check_tensor("q_pe", q_pe, (3,), "[tokens, heads, rotary_dim]")
        angles = given_angles(cos, sin, frequencies)
        where = located(q_pe, angles, positions, offsets, layout, None, "thd", None, axes=axes)
    q_out = empty_heads(q_pe) if q_out is None else q_out
    given = kv_cache, q_out, *given[2:]
    if prepared is not None:
        prepared(given, *tensors, positions, offsets)
        return q_out
    WRITE_LATENT.run(given, where)
    warn_of_accidents(q_pe, where)
    WRITE_LATENT.remember(key, given, where)
    return q_out


def made_scales(
    rank: int, value_cache, v_scale, q_scale_out, k_scale_cache, v_scale_cache
) -> tuple[torch.Tensor | None, ...]:
    """The tensors for made scales as `CacheTensors` has them: those of q as heads of one feature.

    Args:
        rank: the number of axes of q without the features.
    """
    if q_scale_out is not None:
        check_tensor("q_scale_out", q_scale_out, (rank,), "of q without the features", (torch.float32,))
        q_scale_out = q_scale_out.unsqueeze(-1)
    if k_scale_cache is not None and v_scale is None and getattr(value_cache, "dtype", None) in FLOAT8_DTYPES:
        check_tensor("k_scale_cache", k_scale_cache, (3,), "[blocks, block_size, heads]", (torch.float32,))
        if v_scale_cache is None:
            raise TypeError("v_scale_cache: expected a torch.Tensor beside k_scale_cache, got None")
        v_scale_cache = None if v_scale_cache is k_scale_cache else v_scale_cache
    return q_scale_out, k_scale_cache, v_scale_cache


def given_norm(q_weight, k_weight, eps: float, weight_offset: float, norm_first: bool) -> Norm | None:
    """The norm that a caller gave by its arguments."""
    eps, weight_offset = single("eps", eps, at_least=0), single("weight_offset", weight_offset)
    norm_first = flag("norm_first", norm_first)
    if q_weight is None and k_weight is None:
        return None
    for name, weight, other in (("q_weight", q_weight, "k_weight"), ("k_weight", k_weight, "q_weight")):
        if weight is None:
            raise TypeError(f"{name}: expected a torch.Tensor beside {other}, got None")
    return Norm(eps, weight_offset, norm_first)
