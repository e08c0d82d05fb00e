"""The derivatives of the RMS norm with the rotation.

Reverse mode differentiates the kernel once. Under torch.func and in forward mode, torch operations replace the kernel.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from ropelab.autograd.batching import for_each_batched_gradient
from ropelab.autograd.rotation import needs_autograd, rotate_recorded
from ropelab.call.checks import check_recordable
from ropelab.call.dispatcher import transformed
from ropelab.call.qk_norm import BACKWARD, FORWARD, check_qk_norm_arguments
from ropelab.call.where import Where, along_axes
from ropelab.kernels import NO_POSITION, rotate_torch
from ropelab.layout.seq_format import from_bshd


def differentiated(q, k, q_weight, k_weight, where: Where, eps: float):
    """Normalize and rotate q and k, and let autograd record the step where a caller differentiates it."""
    given = q, k, q_weight, k_weight
    if transformed():
        check_qk_norm_arguments(given, where)
        return composed(*given, where, eps)
    if not needs_autograd(*given):
        return FORWARD.run(given, where, eps)
    return _QKNormRope.apply(*given, *where.flat, eps)


def composed(q, k, q_weight, k_weight, where: Where, eps: float):
    """Normalize and rotate in torch operations and a rotation, for torch.func and forward mode.

    The arithmetic has the dtype that the kernel uses, and only the result is rounded to the dtype of q.
    """
    wide = torch.promote_types(rotate_torch.compute_dtype(q, where.angles.cos), q_weight.dtype)
    normed, nowhere, (_, positions, _, options) = [], None, where
    if positions is not None:
        nowhere = positions == NO_POSITION
        if options.axes is not None:
            nowhere = along_axes(nowhere, options.axes).all(0)
        nowhere = nowhere[:, None] if options.offsets else torch.atleast_2d(nowhere)
        nowhere = from_bshd(nowhere[:, :, None, None], options.seq_format)
    for x, weight in ((q, q_weight), (k, k_weight)):
        x = x.to(wide)
        if nowhere is not None:  # a token without a position may hold any values, and has zero gradient
            x = x.masked_fill(nowhere, 1)
        normed.append(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(wide))
    rotated = rotate_recorded(normed[0], normed[1], where)
    return tuple(y.to(q.dtype) for y in rotated)


_NAMES = "q", "k", "q_weight", "k_weight", "cos", "sin", "positions"


class _QKNormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        *tensors, ctx.first_position, ctx.options, ctx.eps = inputs
        if not torch.compiler.is_compiling():
            check_recordable(**dict(zip(_NAMES, tensors, strict=True)))
        ctx.save_for_backward(*tensors)
        made = FORWARD.run(tensors[:4], Where.of(*inputs[4:-1]), ctx.eps)
        q_needs, k_needs, q_weight_needs, k_weight_needs, *_ = ctx.needs_input_grad
        needed = q_needs or q_weight_needs, k_needs or k_weight_needs
        ctx.mark_non_differentiable(*(y for y, need in zip(made, needed, strict=True) if not need))
        return made

    @staticmethod
    def backward(ctx, *grads):
        *given, cos, sin, positions = ctx.saved_tensors
        where = Where.of(cos, sin, positions, ctx.first_position, ctx.options)
        found = [*gradients(given, grads, where, ctx.eps, any(ctx.needs_input_grad[2:4])), None, None]
        return *(g if need else None for g, need in zip(found[:4], ctx.needs_input_grad, strict=False)), *[None] * 6


def gradients(
    given: Sequence[Any], grads: Sequence[Any], where: Where, eps: float, weight_grads: bool
) -> Sequence[torch.Tensor]:
    """The gradients of q and k and, with ``weight_grads``, of their weights, under every transform.

    Args:
        given: q, k and their weights.
        grads: the gradients of the results for q and k.
    """
    if transformed():  # for example by vmap over the gradients of the results
        _, pull_back, *_ = torch.func.vjp(partial(composed, where=where, eps=eps), *given)
        return pull_back(grads)
    # Without `_Gradients`, autograd would silently treat the gradients as constants in a second derivative.
    step = _Gradients.apply if torch.is_grad_enabled() else _gradients

    def found(q_grad, k_grad):
        return step(*given[:2], q_grad, k_grad, *given[2:], *where.flat, eps, weight_grads)

    return for_each_batched_gradient(found, *grads)


def _gradients(*arguments: Any):
    q, k, q_grad, k_grad, q_weight, k_weight, *flat, eps, weight_grads = arguments
    return BACKWARD.run((q, k, q_grad, k_grad, q_weight, k_weight), Where.of(*flat), eps, weight_grads)


class _Gradients(torch.autograd.Function):
    """The gradients. A caller who differentiates them gets NotImplementedError."""

    @staticmethod
    def forward(ctx, *arguments):
        return _gradients(*arguments)

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError(
            "apply_qk_norm_rope: second derivatives are unsupported, except under transforms of torch.func"
        )
