"""The derivatives of the projection to q, k and v with a rotation.

With the rotation R and ``qkv = x W^T + b``, the gradients g of q, k and v give::

    dqkv = [R^T gq, R^T gk, gv],    dx = dqkv W,    dW = dqkv^T x,    db = sum over tokens of dqkv

The gradients g are read once, and ``dqkv`` is written once, as one tensor, so each product takes it whole. With a norm,
R^T stands for the gradient of norm and rotation, which reads q and k as the product made them.

Autograd keeps the weights and, for dW or for a norm, x. With a norm it also keeps the product, ``[..., N]``. q and k
are then further tensors, and v is a part of the product. Without a norm, neither the product nor q nor k are kept.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ropelab.autograd import qk_norm, rotation
from ropelab.autograd.batching import for_each_batched_gradient
from ropelab.call.checks import check_fixed_tables, check_recordable
from ropelab.call.dispatcher import transformed
from ropelab.call.operation import Prepared, Tensors
from ropelab.call.projection import (
    PROJECT,
    Call,
    Heads,
    check_call,
    check_served,
    factors,
    product,
    run_gradient,
    run_projection,
    three,
)
from ropelab.call.where import Where


def differentiated(given: Tensors, where: Where, call: Call):
    """q, k and v; autograd records the step where a caller differentiates it."""
    if transformed():
        return _composed(given, where, call)
    if not rotation.needs_autograd(*given):
        return run_projection(given, where, call)[:3]
    return _record(*given, *where.flat, call, None)


def project_again(prepared: Prepared, given: Tensors, cos, sin, positions, offsets):
    """`differentiated`, as `Operation.look_up` found it, where autograd records."""
    if type(offsets) is not int:
        positions, offsets = offsets, 0
    check_fixed_tables(cos, sin)
    return _record(*given, cos, sin, positions, offsets, prepared.options, *prepared.numbers, prepared)


def _record(*arguments):
    try:
        return _Projection.apply(*arguments)
    except RuntimeError:  # autograd saves no inference tensor, but its message names no argument
        if not torch.compiler.is_compiling():
            given, (cos, sin, positions, *_) = dict(zip(PROJECT.names, arguments, strict=False)), arguments[9:]
            saved = {name: x for name, x in given.items() if not name.startswith("bias")}
            check_recordable(**saved, cos=cos, sin=sin, positions=positions)
        raise


def _composed(given: Tensors, where: Where, call: Call):
    """Project in torch operations, and rotate, for torch.func and forward mode."""
    heads = check_call(given, where, call)
    check_served(call.path)
    q, k, v = heads.split(product(*factors(given), plain=False))
    if call.norm is None:
        return *rotation.differentiated(q, k, where, False), v
    return *qk_norm.composed(q, k, given[7], given[8], where, call.norm.eps), v


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, x, w0, w1, w2, b0, b1, b2, q_weight, k_weight, cos, sin, positions, first_position, options, call, prepared
    ):
        given, normed = (x, w0, w1, w2, b0, b1, b2, q_weight, k_weight), call.norm is not None
        if prepared is None:
            where = Where.of(cos, sin, positions, first_position, options)
            q, k, v, y = run_projection(given, where, call._replace(keep=normed))
        else:
            q, k, v, y = prepared(given, cos, sin, positions, first_position)
        kept = x if normed or any(ctx.needs_input_grad[1:4]) else None
        ctx.save_for_backward(
            kept, w0, w1, w2, q_weight, k_weight, cos, sin, positions, y.flatten(-2) if normed else None
        )
        ctx.first_position, ctx.options, ctx.eps = first_position, options, call.norm.eps if normed else 0.0
        ctx.heads = Heads(q.shape[-2], k.shape[-2], q.shape[-1])
        return q, k, v

    @staticmethod
    def backward(ctx, *grads):
        needed = ctx.needs_input_grad[:9]

        def found(*grads):
            return tuple(g for g in _gradients(ctx, grads, needed) if g is not None)

        remaining = iter(for_each_batched_gradient(found, *grads))
        return *(next(remaining) if need else None for need in needed), *[None] * 7


def _gradients(ctx, grads: tuple[Any, Any, Any], needed: Sequence[bool]) -> list[torch.Tensor | None]:
    """The gradients of x, three weights, three biases and the weights of the norms, and None where not needed."""
    x, w0, w1, w2, q_weight, k_weight, cos, sin, positions, qkv = ctx.saved_tensors
    where = Where.of(cos, sin, positions, ctx.first_position, ctx.options)
    weights = [w for w in (w0, w1, w2) if w is not None]
    norms, (*of_product, _, _), of_norms = (q_weight, k_weight), needed, needed[7:]
    if torch.is_grad_enabled() or transformed():
        qkv_grad, *norm_grads = _recorded(x, weights, qkv, norms, grads, where, ctx.heads, ctx.eps)
    else:
        qkv_grad, *norm_grads = run_gradient(*grads, qkv, norms, where, ctx.eps, any(of_norms))
    made = _of_product(qkv_grad, x, weights, ctx.heads, of_product)
    norm_grads = [*norm_grads, None, None][:2]
    return [*made, *(g if need else None for g, need in zip(norm_grads, of_norms, strict=True))]


def _recorded(
    x, weights: Tensors, qkv, norms: Tensors, grads: tuple[Any, Any, Any], where: Where, heads: Heads, eps: float
):
    """`run_gradient` in operations that autograd and torch.func can differentiate or, with a norm, refuse to."""
    q_grad, k_grad, v_grad = grads
    if qkv is None:
        made = rotation.rotate_recorded(q_grad, k_grad, where.transposed())
    else:
        q, k, _ = heads.split(qkv)
        made = qk_norm.gradients((q, k, *norms), (q_grad, k_grad), where, eps, True)
        if torch.is_grad_enabled() and not transformed():  # qkv has lost its history
            made = _Once.apply(x, *three(weights), *made)
    q_grad, k_grad, *norm_grads = made
    return torch.cat([g.flatten(-2) for g in (q_grad, k_grad, v_grad)], -1), *norm_grads


class _Once(torch.autograd.Function):
    """The last four tensors, which are functions of the others. A caller who differentiates them gets an error."""

    @staticmethod
    def forward(ctx, x, w0, w1, w2, *gradients):
        return tuple(g.view_as(g) for g in gradients)

    @staticmethod
    def backward(ctx, *grads):
        raise NotImplementedError("qkv_rope: second derivatives are unsupported for a call with a norm")


def _of_product(qkv_grad, x, weights: Tensors, heads: Heads, needed) -> list[torch.Tensor | None]:
    """The gradients of x, three weights and three biases."""
    x_needed, of_weights, of_biases = needed[0], needed[1:4], needed[4:7]
    rows = qkv_grad.reshape(-1, qkv_grad.shape[-1])
    parts = (rows,) if len(weights) == 1 else rows.split(heads.features, 1)
    x_grad = None
    if x_needed:
        x_grad = parts[0] @ weights[0]
        for part, weight in zip(parts[1:], weights[1:], strict=True):
            x_grad.addmm_(part, weight)
        x_grad = x_grad.view(*qkv_grad.shape[:-1], weights[0].shape[1])
    weight_grads = [
        part.T @ x.reshape(-1, x.shape[-1]) if need else None
        for part, need in zip(three(parts), of_weights, strict=True)
    ]
    bias_grads = [part.sum(0) if need else None for part, need in zip(three(parts), of_biases, strict=True)]
    return [x_grad, *weight_grads, *bias_grads]
