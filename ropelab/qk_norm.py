"""RMS norm of every head of q and k with learned weights, then rotation: as Qwen3 and others have it, in one pass."""

import math
from collections.abc import Callable, Sequence

import torch

from ropelab.autograd import recorded, transformed
from ropelab.checks import (
    check_device,
    check_first_position,
    check_positions,
    check_rope_arguments,
    check_tensor,
    dtype_name,
)
from ropelab.kernels import INTERPRETED, qk_norm_torch, qk_norm_triton, rotate_triton
from ropelab.ops import must_dispatch
from ropelab.prepared import Options, locate
from ropelab.seq_format import SEQ_AXIS, to_bshd


def apply_qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    *,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float = 1e-6,
    layout: str = "split_half",
    seq_format: str = "bshd",
    positions: torch.Tensor | None = None,
    offsets: int | torch.Tensor = 0,
    rotary_slice: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of every head of queries and keys, then rotary position embedding, in one pass over their memory.

    For every head ``x`` of q and of k, with the weight ``w`` of q or k::

        n = x / sqrt(mean(x^2) + eps) * w
        y = rotation of n, as by `apply_rope`

    (Zhang and Sennrich, arXiv 1910.07467, equation 4, over ``head_dim``; then Su et al., arXiv 2104.09864, equation
    34.) The maths is in float32, or wider if an input is, and only y is rounded to the dtype of q. Hugging Face's
    Qwen3 rounds twice in between: ``x / sqrt(...)`` before the weight and n before the rotation.

    Args:
        q: ``[B, S, Hq, D]`` (``bshd``), ``[S, B, Hq, D]`` (``sbhd``), ``[B, Hq, S, D]`` (``bhsd``) or ``[T, Hq, D]``
            (``thd``); bfloat16, float16, float32 or float64; any strides.
        k: as ``q``, with any number of heads (GQA, MQA).
        q_weight, k_weight: ``[D]``, both of one floating dtype, which need not be that of q. Where a model
            multiplies by ``1 + w`` (Gemma), pass ``1 + w``.
        cos, sin, layout, seq_format, positions, offsets, rotary_slice: as for `apply_rope`. Features outside of the
            rotary slice are normalized like the others and not rotated.
        eps: added to the mean of the squares, at least 0.

    Returns:
        The new ``(q, k)``; shapes and dtypes of the inputs. Differentiable once, in q, k and their weights; nothing
        but the inputs is kept for that. A token at ``NO_POSITION`` becomes zeros, gets zero gradient and adds nothing
        to the gradients of the weights. The latter are the same bits every time on the same GPU.

    Raises:
        TypeError, ValueError: as `apply_rope`; for weights of the wrong shape, dtype or device, a negative eps, and
            tables that require grad.
    """
    positions, first_position, is_offset = locate(q, positions, offsets, seq_format)
    slice_ = None if rotary_slice is None else tuple(rotary_slice)
    options = Options(layout, layout, seq_format, slice_, is_offset, False)
    arguments = q, k, q_weight, k_weight, cos, sin, positions, first_position, options, eps
    if torch.is_grad_enabled():
        for name, table in (("cos", cos), ("sin", sin)):
            if getattr(table, "requires_grad", False):
                raise ValueError(f"{name}: expected a table without grad (unlike apply_rope), got requires_grad=True")
    return _QKNormRope.apply(*arguments) if recorded(q, k, q_weight, k_weight) else _forward(*arguments)


class _QKNormRope(torch.autograd.Function):
    @staticmethod
    def forward(q, k, q_weight, k_weight, cos, sin, positions, first_position, options, eps):
        return _forward(q, k, q_weight, k_weight, cos, sin, positions, first_position, options, eps)

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        *tensors, ctx.first_position, ctx.options, ctx.eps = inputs
        ctx.save_for_backward(*tensors)
        q_needs, k_needs, q_weight_needs, k_weight_needs, *_ = ctx.needs_input_grad
        needed = q_needs or q_weight_needs, k_needs or k_weight_needs
        ctx.mark_non_differentiable(*(y for y, need in zip(outputs, needed, strict=True) if not need))

    @staticmethod
    def backward(ctx, q_grad, k_grad):
        q, k, q_weight, k_weight, *where = ctx.saved_tensors
        # Without it, what is asked for a second time would silently be a constant.
        gradients = _Gradients.apply if torch.is_grad_enabled() or transformed() else _backward
        arguments = q, k, q_grad, k_grad, q_weight, k_weight, *where, ctx.first_position, ctx.options, ctx.eps
        grads = *gradients(*arguments, any(ctx.needs_input_grad[2:4])), None, None
        return *(g if need else None for g, need in zip(grads[:4], ctx.needs_input_grad, strict=False)), *[None] * 6


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(*arguments):
        return _backward(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        pass

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError("apply_qk_norm_rope: expected to be differentiated once, got its gradient to be")


def _forward(q, k, q_weight, k_weight, cos, sin, positions, first_position, options: Options, eps: float):
    arguments = q, k, q_weight, k_weight, cos, sin, positions, first_position
    if must_dispatch(q):
        _check(*arguments, options, eps)
        return torch.ops.ropelab.qk_norm_rope(*arguments, *_names(options), eps)
    key = _key("forward", options, eps, q, k, q_weight, k_weight, cos, sin, positions)
    if key not in _launches:
        _check(*arguments, options, eps)
    _check_positions(q, cos, positions, first_position, options)
    ys = _empty_like(q), _empty_like(k)
    _run(key, "forward", ((q, k), ys), ((q_weight, k_weight),), cos, sin, positions, first_position, options, eps)
    return ys


def _backward(
    q, k, q_grad, k_grad, q_weight, k_weight, cos, sin, positions, first_position, options: Options, eps: float,
    weight_grads: bool,
) -> Sequence[torch.Tensor]:  # fmt: skip
    """The gradients in q and k and, if wanted, in their weights."""
    tensors = q, k, q_grad, k_grad, q_weight, k_weight, cos, sin, positions
    if must_dispatch(q):
        return torch.ops.ropelab.qk_norm_rope_backward(*tensors, first_position, *_names(options), eps, weight_grads)
    key = _key("backward", options, eps, *tensors, weight_grads=weight_grads)
    weights = q_weight, k_weight
    dxs = _empty_like(q), _empty_like(k)
    dws = tuple(torch.empty_like(w, memory_format=torch.contiguous_format) for w in weights) if weight_grads else None
    pairs = (q, k), (q_grad, k_grad), dxs
    _run(key, "backward", pairs, (weights, dws), cos, sin, positions, first_position, options, eps)
    return dxs + (dws or ())


_launches: dict[tuple, Callable[..., None]] = {}
_MOST_LAUNCHES = 4096  # then all are forgotten: a bound for programs whose shapes never repeat


def _key(*what, weight_grads: bool = False) -> tuple | None:
    """All that the checks and the planning of a launch look at; None if something is no tensor that has it."""
    try:
        tensors = [x for x in what[3:] if x is not None]
        addresses = 0
        for x in tensors:
            addresses |= x.data_ptr()
        described = [(x.shape, x.stride(), x.dtype, x.device) for x in tensors]
        key = (*what[:3], what[-1] is None, weight_grads, addresses % 16, *described)
        hash(key)
    except (AttributeError, TypeError):
        return None
    return key


def _run(key, step: str, pairs, weights, cos, sin, positions, first_position, options: Options, eps: float) -> None:
    """Run ``step``, "forward" or "backward", of a backend.

    Args:
        pairs: of tensors for q and for k, in the order of the backend's arguments.
        weights: those of q and k and, in the backward, their gradients (or None).
    """
    q = pairs[0][0]
    flat = [x for pair in pairs for x in pair]
    launch = _launches.get(key)
    if launch is None:
        views = [[to_bshd(x, options.seq_format) for x in pair] for pair in pairs]
        if positions is not None and not options.offsets:
            positions = positions.expand(views[0][0].shape[:2])
        arguments = *views, *weights, cos, sin
        rotation = options.rotation(cos)
        tensors = (*flat, *weights[0], cos, sin)
        repeatable = q.is_cuda and len(views[0][0]) <= rotate_triton.MAX_BATCH
        if not repeatable or any(x.stride(-1) != 1 or x.data_ptr() % 16 for x in tensors):
            options_ = {"positions": positions, "first_position": first_position}
            getattr(_backend(q), step)(*arguments, rotation, eps, **options_)
            return
        plan = qk_norm_triton.plan_forward if step == "forward" else qk_norm_triton.plan_backward
        launch = plan(*arguments, positions, rotation, eps)
        if len(_launches) >= _MOST_LAUNCHES:
            _launches.clear()
        _launches[key] = launch
    numbers = first_position, cos.shape[-2]
    dws = weights[1:]  # none in the forward
    # Where there are no positions, the kernel ignores what stands in for them.
    tensors = *flat, *weights[0], *dws, cos, sin, cos if positions is None else positions
    if torch.cuda.current_device() == q.device.index:
        launch(*tensors, *numbers)
    else:
        with torch.cuda.device_of(q):
            launch(*tensors, *numbers)


def _backend(q: torch.Tensor):
    return qk_norm_triton if q.is_cuda or INTERPRETED else qk_norm_torch


def _empty_like(x: torch.Tensor) -> torch.Tensor:
    """In the order of ``x`` in memory if that leaves the features of a head side by side."""
    y = torch.empty_like(x)
    return y if y.stride(-1) == 1 else torch.empty_like(x, memory_format=torch.contiguous_format)


# ------------------------------------------------------------------------------------ for torch.compile: see ops.py


@torch.library.custom_op("ropelab::qk_norm_rope", mutates_args=())
def _forward_op(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    first_position: int,
    layout: str,
    seq_format: str,
    rotary_slice: Sequence[int] | None,
    offsets: bool,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    options = _options(layout, seq_format, rotary_slice, offsets)
    return _forward(q, k, q_weight, k_weight, cos, sin, positions, first_position, options, eps)


@_forward_op.register_fake
def _(q, k, *rest):
    return _empty_like(q), _empty_like(k)


@torch.library.custom_op("ropelab::qk_norm_rope_backward", mutates_args=())
def _backward_op(
    q: torch.Tensor,
    k: torch.Tensor,
    q_grad: torch.Tensor,
    k_grad: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    first_position: int,
    layout: str,
    seq_format: str,
    rotary_slice: Sequence[int] | None,
    offsets: bool,
    eps: float,
    weight_grads: bool,
) -> list[torch.Tensor]:
    where = cos, sin, positions, first_position, _options(layout, seq_format, rotary_slice, offsets)
    return list(_backward(q, k, q_grad, k_grad, q_weight, k_weight, *where, eps, weight_grads))


@_backward_op.register_fake
def _(q, k, q_grad, k_grad, q_weight, k_weight, *rest):
    grads = [_empty_like(q), _empty_like(k)]
    return grads + ([torch.empty_like(q_weight), torch.empty_like(k_weight)] if rest[-1] else [])


def _names(options: Options) -> tuple:
    return options.layout, options.seq_format, options.rotary_slice, options.offsets


def _options(layout: str, seq_format: str, rotary_slice: Sequence[int] | None, offsets: bool) -> Options:
    return Options(layout, layout, seq_format, None if rotary_slice is None else tuple(rotary_slice), offsets, False)


# ----------------------------------------------------------------------------------------------------------- checks


def _check(q, k, q_weight, k_weight, cos, sin, positions, first_position, options: Options, eps: float) -> None:
    if k is None:
        raise TypeError("k: expected a torch.Tensor, got NoneType")
    check_rope_arguments(q, k, cos, sin, positions, options, inplace=False)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        check_tensor(name, weight, (1,), f"({q.shape[-1]},), one for each feature of a head")
        if weight.shape[0] != q.shape[-1]:
            raise ValueError(f"{name}: expected shape ({q.shape[-1]},), that of a head, got {tuple(weight.shape)}")
        check_device(name, weight, q)
    if k_weight.dtype != q_weight.dtype:
        raise TypeError(
            f"k_weight: expected q_weight's dtype {dtype_name(q_weight.dtype)}, got {dtype_name(k_weight.dtype)}"
        )
    if not isinstance(eps, (int, float)) or not 0 <= eps < math.inf:
        raise ValueError(f"eps: expected a finite number, at least 0, got {eps!r}")


def _check_positions(q, cos, positions, first_position, options: Options) -> None:
    """What depends on values, so for every call."""
    seq_len = q.shape[SEQ_AXIS[options.seq_format]]
    if positions is None:
        check_first_position(first_position, seq_len, cos)
    elif not positions.is_cuda:
        check_positions(positions, seq_len, cos, options.offsets)
