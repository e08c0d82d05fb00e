"""This file applies the RMS norm of every head of q and k with learned weights, then the rotation, in one pass."""

from collections.abc import Callable, Sequence

import torch

from ropelab.arguments import number
from ropelab.autograd import recorded, rotate_differentiably, transformed
from ropelab.batching import for_each_batched_gradient, is_batched_gradient
from ropelab.checks import (
    check_device,
    check_places,
    check_recordable,
    check_rope_arguments,
    check_tensor,
    dtype_name,
)
from ropelab.kernels import backend, qk_norm_torch, uses_triton
from ropelab.kernels.rotation import row_count
from ropelab.launch_cache import LaunchCache, call_key
from ropelab.ops import must_dispatch
from ropelab.prepared import Options, features, locate
from ropelab.seq_format import to_bshd


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
    slice_ = None if rotary_slice is None else features(rotary_slice)
    options = Options(layout, layout, seq_format, slice_, is_offset, False)
    eps = number("eps", eps, at_least=0)
    arguments = q, k, q_weight, k_weight, cos, sin, positions, first_position, options, eps
    if torch.is_grad_enabled():
        for name, table in (("cos", cos), ("sin", sin)):
            if getattr(table, "requires_grad", False):
                raise ValueError(f"{name}: expected a table without grad (unlike apply_rope), got requires_grad=True")
    if transformed():
        _check(*arguments[:-1])
        return _composed(*arguments)
    return _QKNormRope.apply(*arguments) if recorded(q, k, q_weight, k_weight) else _forward(*arguments)


def _composed(q, k, q_weight, k_weight, cos, sin, positions, first_position, options: Options, eps: float):
    """The same in torch operations and a rotation, for torch.func and forward mode, which the kernel does not know.

    The arithmetic is in the same dtype, and only the result is rounded to that of q.
    """
    wide = qk_norm_torch.compute_dtype(q, cos, (q_weight, k_weight))
    normed = []
    for x, weight in ((q, q_weight), (k, k_weight)):
        x = x.to(wide)
        normed.append(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(wide))
    rotated = rotate_differentiably(normed[0], normed[1], cos, sin, positions, first_position, options)
    return tuple(y.to(q.dtype) for y in rotated)


_NAMES = "q", "k", "q_weight", "k_weight", "cos", "sin", "positions"


class _QKNormRope(torch.autograd.Function):
    @staticmethod
    def forward(q, k, q_weight, k_weight, cos, sin, positions, first_position, options, eps):
        return _forward(q, k, q_weight, k_weight, cos, sin, positions, first_position, options, eps)

    @staticmethod
    def setup_context(ctx, inputs, outputs):
        *tensors, ctx.first_position, ctx.options, ctx.eps = inputs
        if not torch.compiler.is_compiling():
            check_recordable(**dict(zip(_NAMES, tensors, strict=True)))
        ctx.save_for_backward(*tensors)
        q_needs, k_needs, q_weight_needs, k_weight_needs, *_ = ctx.needs_input_grad
        needed = q_needs or q_weight_needs, k_needs or k_weight_needs
        ctx.mark_non_differentiable(*(y for y, need in zip(outputs, needed, strict=True) if not need))

    @staticmethod
    def backward(ctx, q_grad, k_grad):
        q, k, q_weight, k_weight, cos, sin, positions = ctx.saved_tensors
        where = cos, sin, positions, ctx.first_position, ctx.options, ctx.eps
        if transformed():  # as by vmap over the gradients of the results

            def composed(q, k, q_weight, k_weight):
                return _composed(q, k, q_weight, k_weight, *where)

            _, pull_back, *_ = torch.func.vjp(composed, q, k, q_weight, k_weight)
            grads = pull_back((q_grad, k_grad))
            return *(g if need else None for g, need in zip(grads, ctx.needs_input_grad, strict=False)), *[None] * 6
        # Without it, what is asked for a second time would silently be a constant.
        step = _Gradients.apply if torch.is_grad_enabled() else _backward
        weight_grads = any(ctx.needs_input_grad[2:4])

        def gradients(q_grad, k_grad):
            return step(q, k, q_grad, k_grad, q_weight, k_weight, *where, weight_grads)

        if not torch.compiler.is_compiling() and (is_batched_gradient(q_grad) or is_batched_gradient(k_grad)):
            found = for_each_batched_gradient(gradients, q_grad, k_grad)
        else:
            found = gradients(q_grad, k_grad)
        grads = *found, None, None
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
    if must_dispatch(q, k):
        _check(*arguments, options)
        return torch.ops.ropelab.qk_norm_rope(*arguments, *_names(options), eps)
    key = call_key((q, k, q_weight, k_weight, positions), (cos, sin), "forward", options, eps)
    launch = _launches.get(key)
    if launch is None:
        _check(*arguments, options)
    check_places(q, cos, positions, first_position, options)
    ys = _empty_like(q), _empty_like(k)
    pairs, weights = ((q, k), ys), ((q_weight, k_weight),)
    launch = launch or _prepare("forward", key, pairs, weights, cos, sin, positions, options, eps)
    launch(pairs, weights, cos, sin, positions, first_position)
    return ys


def _backward(
    q, k, q_grad, k_grad, q_weight, k_weight, cos, sin, positions, first_position, options: Options, eps: float,
    weight_grads: bool,
) -> Sequence[torch.Tensor]:  # fmt: skip
    """The gradients in q and k and, if wanted, in their weights."""
    tensors = q, k, q_grad, k_grad, q_weight, k_weight
    if must_dispatch(q, k):
        where = cos, sin, positions, first_position, *_names(options)
        return torch.ops.ropelab.qk_norm_rope_backward(*tensors, *where, eps, weight_grads)
    key = call_key((*tensors, positions), (cos, sin), "backward", options, eps, weight_grads)
    dxs, dws = (_empty_like(q), _empty_like(k)), None
    if weight_grads:
        dws = tuple(torch.empty_like(w, memory_format=torch.contiguous_format) for w in (q_weight, k_weight))
    pairs, weights = ((q, k), (q_grad, k_grad), dxs), ((q_weight, k_weight), dws)
    launch = _launches.get(key) or _prepare("backward", key, pairs, weights, cos, sin, positions, options, eps)
    launch(pairs, weights, cos, sin, positions, first_position)
    return dxs + (dws or ())


_launches: LaunchCache[Callable[..., None]] = LaunchCache()


def _prepare(step: str, key, pairs, weights, cos, sin, positions, options: Options, eps: float) -> Callable[..., None]:
    """Find out how to run ``step``, "forward" or "backward", for tensors like these, and remember it under ``key``.

    Args:
        pairs: of tensors for q and for k, in the order of the backend's arguments.
        weights: those of q and k and, in the backward, their gradients (or None).

    Returns:
        ``run(pairs, weights, cos, sin, positions, first_position)``
    """
    q = pairs[0][0]
    module, rotation = backend("qk_norm", q), options.rotation(cos)

    # What is remembered must keep no tensor alive, so these functions refer to none of this call.
    def views(pairs, positions):
        pairs = [[to_bshd(x, options.seq_format) for x in pair] for pair in pairs]
        if positions is not None and not options.offsets:
            positions = positions.expand(pairs[0][0].shape[:2])
        return pairs, positions

    def run_backend(pairs, weights, cos, sin, positions, first_position) -> None:
        pairs, positions = views(pairs, positions)
        where = {"positions": positions, "first_position": first_position}
        getattr(module, step)(*pairs, *weights, cos, sin, rotation, eps, **where)

    run = run_backend
    tensors = *(x for pair in pairs for x in pair), *weights[0], cos, sin
    viewed, positions_viewed = views(pairs, positions)
    if uses_triton(q) and all(x.stride(-1) == 1 for x in tensors) and len(viewed[0][0]) <= module.MAX_BATCH:
        plan = module.plan_forward if step == "forward" else module.plan_backward
        launch = plan(*viewed, *weights, cos, sin, positions_viewed, rotation, eps)

        def run_launch(pairs, weights, cos, sin, positions, first_position) -> None:
            flat = [x for pair in pairs for x in pair]
            # Where there are no positions, the kernel ignores what stands in for them.
            tables = cos, sin, cos if positions is None else positions
            launch(*flat, *weights[0], *weights[1:], *tables, first_position, row_count(cos))

        run = run_launch
    _launches.put(key, run)
    return run


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
    slice_ = None if rotary_slice is None else (rotary_slice[0], rotary_slice[1])
    return Options(layout, layout, seq_format, slice_, offsets, False)


# ----------------------------------------------------------------------------------------------------------- checks


def _check(q, k, q_weight, k_weight, cos, sin, positions, first_position, options: Options) -> None:
    if k is None:
        raise TypeError("k: expected a torch.Tensor, got NoneType")
    check_rope_arguments(q, k, cos, sin, positions, options)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        check_tensor(name, weight, (1,), f"({q.shape[-1]},), one for each feature of a head")
        if weight.shape[0] != q.shape[-1]:
            raise ValueError(f"{name}: expected shape ({q.shape[-1]},), that of a head, got {tuple(weight.shape)}")
        check_device(name, weight, q)
    if k_weight.dtype != q_weight.dtype:
        raise TypeError(
            f"k_weight: expected q_weight's dtype {dtype_name(q_weight.dtype)}, got {dtype_name(k_weight.dtype)}"
        )
