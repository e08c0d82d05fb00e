"""The public functions `qkv_rope` and `qkv_rope_and_cache`."""

from collections.abc import Sequence
from typing import Any, Literal, Never

import torch
from torch.fx import Proxy

from ropelab.arguments import check_tensor, choice, integer, sequence, single, tensor
from ropelab.autograd.projection import differentiated, project_again
from ropelab.call.angles import given_angles
from ropelab.call.checks import check_fixed_tables, check_no_grad
from ropelab.call.dispatcher import check_untransformed, must_dispatch
from ropelab.call.memory import check_apart
from ropelab.call.projection import PROJECT, Call, check_served, factors, heads_of, product, three
from ropelab.call.projection_cache import INTO_CACHE
from ropelab.call.projection_paths import PATHS, Path
from ropelab.call.traced import recorded
from ropelab.call.where import located
from ropelab.foreign import hinted, unexpected
from ropelab.kernels import Norm
from ropelab.layout.pairing import Layout
from ropelab.layout.seq_format import SeqFormat
from ropelab.paged_cache import given_norm, made_scales, rope_and_cache

Weight = torch.Tensor | Sequence[torch.Tensor]


@hinted
def qkv_rope(
    x: torch.Tensor,
    weight: Weight,
    bias: Weight | None = None,
    *,
    q_heads: int,
    k_heads: int,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    frequencies: torch.Tensor | None = None,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    layout: Layout = "split_half",
    seq_format: SeqFormat = "bshd",
    positions: torch.Tensor | None = None,
    axes: Sequence[int] | None = None,
    offsets: int | torch.Tensor = 0,
    rotary_slice: tuple[int, int] | None = None,
    path: Path = "auto",
    **foreign: Never,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The projection of hidden states to queries, keys and values, with the rotation of queries and keys.

    Example: ``q, k, v = qkv_rope(x, weight, q_heads=8, k_heads=2, cos=cos, sin=sin)``.

    With ``y = x W^T + b``, the first heads of y are q, the next are k, and the last are v. q and k rotate as in
    `apply_rope`; with ``q_weight`` and ``k_weight`` each head is normalized before, as in `apply_qk_norm_rope`.

    On the path "pass", PyTorch computes y, and a second kernel rotates q and k in place, so a feature rounds to the
    dtype of x twice: after the product and after the rotation. On the path "product", one fused kernel rotates before
    it stores, and rounds once. The path "quack" is the fused kernel of quack 0.6, which rotates v by an angle of zero,
    so a feature of v that is not finite makes its neighbour NaN.

    The product of K terms and a bias is within ``2 (K + 1) u`` of its exact value, times the sum of ``|x_i w_i|`` and
    ``|b|``, to first order in the unit roundoff u of float32. Both kernels compute the cosines and sines of frequencies
    within 2^-20. `ropelab.conformance.projection_bounds` derives the bound of every result and gradient.

    Args:
        x: ``[B, S, K]`` (``bshd``), ``[S, B, K]`` (``sbhd``) or ``[T, K]`` (``thd``); bfloat16, float16, float32 or
            float64; strides other than those of a contiguous tensor cost a copy. Under `torch.autocast`, x, weight and
            bias take the dtype that a linear layer computes in.
        weight: ``[N, K]`` with ``N = (q_heads + 2 k_heads) D``, in the dtype of x; or the three weights of q, k and v,
            ``[q_heads D, K]`` and twice ``[k_heads D, K]``. Three weights take three products, and a bias then costs a
            copy.
        bias: ``[N]``; or three, beside three weights; or None.
        q_heads, k_heads: the heads of q, and those of k, which are also those of v.
        cos, sin, frequencies, layout, positions, axes, offsets, rotary_slice: as for `apply_rope`. A token at
            ``NO_POSITION`` has zeros in q and k, and keeps its v.
        q_weight, k_weight: ``[D]``, the weights of a norm of every head of q and of k, as for `apply_qk_norm_rope`; or
            both None for no norm. A norm takes tables, and no frequencies.
        eps: a number of at least 0, added to the mean of the squares.
        seq_format: the order of the axes of q, k and v: ``"bshd"``, ``"sbhd"`` or ``"thd"``.
        path: ``"auto"``, ``"pass"``, ``"product"`` or ``"quack"``. With ``"auto"`` a call takes the path "product"
            where measurements on its GPU found it faster (`ropelab.call.projection_paths`), else "pass", which supports
            every call. The path "product" supports 16 bits on an H100 or H200, heads of 64, 128 or 256, one weight,
            rows of whole 16 bytes, and pairs of halves if all features rotate. It does not support ``sbhd``, tables for
            each batch, offsets in a tensor, and a norm while autograd records. The path "quack" supports frequencies,
            adjacent pairs and positions that count up, where quack is installed.

    Returns:
        ``(q, k, v)``, each with the axes of x but the last, then heads and D features: views of one contiguous tensor
        ``[..., N]``. With a norm, q and k are separate tensors during training. The results are differentiable in x,
        weight, bias and the weights of the norms: any number of times without a norm, and once with a norm. Autograd
        keeps x and the weights and, with a norm, the product ``[..., N]``; it keeps no q and k without a norm.

    Raises:
        TypeError, ValueError: as `apply_rope` and `apply_qk_norm_rope`; the shapes, dtypes or devices of x, weight and
            bias do not fit; a table requires grad; or ``path`` does not support the call.
    """
    if isinstance(x, Proxy):
        return recorded(qkv_rope, locals())
    if foreign:
        raise unexpected(qkv_rope, *foreign)
    words, numbers = (layout, seq_format, path, frequencies is None, type(weight), type(bias)), (q_heads, k_heads, eps)
    tensors = (cos, sin) if frequencies is None else (frequencies, sin if cos is None else cos)
    given = x, *_parts(weight), *_parts(bias), q_weight, k_weight
    key, prepared = PROJECT.look_up(words, numbers, given, *tensors, positions, offsets, axes, rotary_slice)
    if prepared is not None:
        if prepared.recorded:
            return project_again(prepared, given, *tensors, positions, offsets)
        return prepared(given, *tensors, positions, offsets)[:3]
    given = *_given(x, weight, bias), q_weight, k_weight
    q_heads, k_heads = integer("q_heads", q_heads, at_least=1), integer("k_heads", k_heads, at_least=1)
    norm, path = Norm(single("eps", eps, at_least=0)), choice("path", path, PATHS)
    call = Call(q_heads, k_heads, None if q_weight is None and k_weight is None else norm, path)
    angles = given_angles(cos, sin, frequencies)
    check_fixed_tables(*angles)
    tokens = _tokens(offsets, given, call, seq_format)
    where = located(tokens, angles, positions, offsets, layout, None, seq_format, rotary_slice, axes=axes)
    made = differentiated(given, where, call)
    keep = key is not None and key[1] and call.norm is not None  # what autograd recorded
    PROJECT.remember(key, given, where, call._replace(keep=keep))
    return made


@hinted
def qkv_rope_and_cache(
    x: torch.Tensor,
    weight: Weight,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    bias: Weight | None = None,
    *,
    q_heads: int,
    k_heads: int,
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
    path: Literal["auto", "pass", "product"] = "auto",
    **foreign: Never,
) -> torch.Tensor:
    """`qkv_rope` for inference with a paged cache: its k and v go into the caches.

    Example: ``q = qkv_rope_and_cache(x, weight, *caches, slots, q_heads=8, k_heads=2, cos=cos, sin=sin)``.

    On the path "product", one fused kernel writes q and both caches, and stores k and v nowhere else. It supports what
    it supports in `qkv_rope`, with caches in the dtype of x, no output but q, and no norm after the rotation. Otherwise
    PyTorch computes q, k and v, and `rope_and_cache` rotates and writes them.

    Args:
        x, weight, bias, q_heads, k_heads: as for `qkv_rope`.
        key_cache, value_cache, slot_mapping: as for `rope_and_cache`. What the call writes must not overlap x, weight
            and bias.
        cos, sin, frequencies, q_weight, k_weight, eps, weight_offset, norm_first: as for `rope_and_cache`.
        layout, seq_format, positions, axes, offsets, rotary_slice, k_out, v_out, q_nope, q_nope_out: the same.
        q_scale, k_scale, v_scale, q_scale_out, k_scale_cache, v_scale_cache: the same.
        q_out: as for `rope_and_cache`; by default a new contiguous tensor, on every path.
        path: ``"auto"``, ``"pass"`` or ``"product"``, as for `qkv_rope`.

    Returns:
        q, ``[T, q_heads, D]``, or in the order of another ``seq_format``.

    Raises:
        TypeError, ValueError, NotImplementedError: as `qkv_rope` and `rope_and_cache`.
    """
    if foreign:
        raise unexpected(qkv_rope_and_cache, *foreign)
    words = layout, seq_format, path, frequencies is None, type(weight), type(bias)
    tensors = (cos, sin) if frequencies is None else (frequencies, sin if cos is None else cos)
    outputs: dict[str, Any] = {"q_out": q_out, "k_out": k_out, "v_out": v_out, "q_nope_out": q_nope_out}
    made: dict[str, Any] = {"q_scale_out": q_scale_out, "k_scale_cache": k_scale_cache, "v_scale_cache": v_scale_cache}
    scales_out: tuple = (q_scale_out, k_scale_cache, v_scale_cache)
    if q_scale_out is not None or k_scale_cache is not None:
        check_tensor("x", x, (2, 3), "[T, K], [B, S, K] or [S, B, K]")
        scales_out = made_scales(x.ndim, value_cache, v_scale, *scales_out)
    written = key_cache, value_cache, *outputs.values(), *scales_out
    rest = q_nope, slot_mapping, q_weight, k_weight, q_scale, k_scale, v_scale
    given = *written, x, *_parts(weight), *_parts(bias), *rest
    numbers = q_heads, k_heads, eps, weight_offset, norm_first
    key, prepared = INTO_CACHE.look_up(words, numbers, given, *tensors, positions, offsets, axes, rotary_slice)
    if prepared is not None:
        return prepared(given, *tensors, positions, offsets)[0]
    check_untransformed("qkv_rope_and_cache")
    multiplied = _given(x, weight, bias)
    call = Call(
        integer("q_heads", q_heads, at_least=1), integer("k_heads", k_heads, at_least=1),
        given_norm(q_weight, k_weight, eps, weight_offset, norm_first), choice("path", path, PATHS[:3]),
    )  # fmt: skip
    through = must_dispatch(multiplied[0], multiplied[1], PROJECT.names[:2])
    if through or multiplied[0] is not x:
        _check_apart(
            {"key_cache": key_cache, "value_cache": value_cache, **outputs, **made}, x=x, weight=weight, bias=bias
        )
    if not through:
        given = *written, *multiplied, *rest
        tokens, angles = _tokens(offsets, multiplied, call, seq_format), given_angles(cos, sin, frequencies)
        where = located(tokens, angles, positions, offsets, layout, None, seq_format, rotary_slice, axes=axes)
        check_no_grad(INTO_CACHE.names, given, where)
        made_q = INTO_CACHE(given, where, call)[0]
        INTO_CACHE.remember(key, given, where, call)
        return made_q
    heads, (_, weights, biases) = heads_of(multiplied, call, seq_format), factors(multiplied)
    check_no_grad(("x", *["weight"] * len(weights), *["bias"] * len(biases)), (x, *weights, *biases))
    check_served(path)
    q, k, v = heads.split(product(*factors(multiplied), plain=False))
    return rope_and_cache(
        q, k, v, key_cache, value_cache, slot_mapping, cos=cos, sin=sin, frequencies=frequencies, q_weight=q_weight,
        k_weight=k_weight, eps=eps, weight_offset=weight_offset, norm_first=norm_first, layout=layout,
        seq_format=seq_format, positions=positions, axes=axes, offsets=offsets, rotary_slice=rotary_slice,
        q_nope=q_nope, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, **outputs, **made,
    )  # fmt: skip


def _tokens(offsets, given, call: Call, seq_format: str) -> torch.Tensor:
    """x, of the rank of q where `located` looks at it."""
    if isinstance(offsets, torch.Tensor) or integer("offsets", offsets) >= 0:
        return given[0]
    heads_of(given, call, seq_format)
    return given[0].unsqueeze(-1)


def _parts(weight: Weight | None) -> Sequence:
    """The tensors that a caller gave, as `three`."""
    return three(weight) if isinstance(weight, (tuple, list)) else (weight, None, None)


def _check_apart(written: dict[str, torch.Tensor | None], **read: Any) -> None:
    """Raise ValueError where a tensor that a call writes has an element in common with x, a weight or a bias."""
    for name, value in [*read.items()]:
        if isinstance(value, (tuple, list)):
            del read[name]
            read |= {f"{name}[{i}]": x for i, x in enumerate(value)}
    check_apart({name: tensor(name, x) for name, x in written.items() if x is not None}, read)


_AUTOCAST = tuple(kind for kind in ("cpu", "cuda", "mps", "xpu", "hpu") if torch.amp.is_autocast_available(kind))
"""The devices with autocast, found once, because torch.compile of torch 2.11 cannot ask for them."""


def _given(x, weight, bias) -> tuple:
    """The tensors of `factors`, in the dtype of autocast."""
    if isinstance(weight, torch.nn.Linear):
        raise TypeError("weight: expected a tensor or three, got Linear (pass linear.weight, and linear.bias as bias)")
    weights = (weight,) if isinstance(weight, torch.Tensor) else _three("weight", weight)
    biases = () if bias is None else (bias,) if isinstance(bias, torch.Tensor) else _three("bias", bias)
    if biases and len(biases) != len(weights):
        raise ValueError(f"bias: expected as many tensors as of weight, {len(weights)}, got {len(biases)}")
    kind, tensors = x.device.type if isinstance(x, torch.Tensor) else "meta", (x, *three(weights), *three(biases))
    if kind not in _AUTOCAST or not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(_narrow(t, dtype) for t in tensors)


def _three(name: str, tensors) -> tuple[torch.Tensor, ...]:
    found = sequence(name, tensors)
    if len(found) != 3:
        raise ValueError(f"{name}: expected a tensor, or the three tensors of q, k and v, got {len(found)}")
    for i, x in enumerate(found):
        if not isinstance(x, torch.Tensor):
            tensor(f"{name}[{i}]", x)
    return found


def _narrow(x, dtype: torch.dtype):
    """``x`` in the dtype of autocast, which leaves float64 as it is."""
    return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != torch.float64 else x
