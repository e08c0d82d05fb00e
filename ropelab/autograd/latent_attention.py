"""The derivatives of the assembly of multi-head latent attention.

The assembly is linear: ``(key, value) = A (kv, k_pe)``. Its backward is the transpose, and the backward of the
transpose is the assembly, so that both are differentiable any number of times. Under torch.func and in forward mode,
torch operations and a rotation replace the kernels.
"""

import torch

from ropelab.autograd.batching import for_each_batched_gradient, is_batched_gradient
from ropelab.autograd.rotation import check_untransformed, needs_autograd, rotate_recorded
from ropelab.autograd.rotation import differentiated as rotated
from ropelab.call.checks import check_inplace_autograd, check_recordable, check_writable
from ropelab.call.dispatcher import copy_over, must_dispatch, transformed
from ropelab.call.latent_attention import ASSEMBLE, ASSEMBLE_BACK, TURN_TAIL, check_latent_arguments, check_tail
from ropelab.call.memory import overlaps_itself
from ropelab.call.where import Where


def differentiated(kv, k_pe, where: Where, copy_value: bool = True):
    """Assemble key and value, and let autograd record the step where a caller differentiates it."""
    if transformed():
        check_latent_arguments((kv, k_pe), where)
        return _composed(kv, k_pe, where, copy_value)
    if not needs_autograd(kv, k_pe):
        return _assembled(kv, k_pe, where, copy_value)
    return _Assembly.apply(kv, k_pe, *where.flat, False, copy_value)


def _assembled(kv, k_pe, where: Where, copy_value: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value. The value may be a view of kv, taken here: an operator of the dispatcher may not return one."""
    key, *copied = ASSEMBLE.run((kv, k_pe), where, copy_value)
    return key, copied[0] if copied else kv[..., where.options.slice(0)[0] :]


def _composed(kv, k_pe, where: Where, copy_value: bool):
    """Assemble in torch operations and a rotation, for torch.func and forward mode."""
    first = where.options.slice(0)[0]
    whole = torch.cat((kv[..., :first], k_pe.expand(*kv.shape[:-1], -1)), dim=-1)
    value = kv[..., first:]
    key = rotated(whole, None, where, False)
    return key, value.clone(memory_format=torch.contiguous_format) if copy_value else value


class _Assembly(torch.autograd.Function):
    """``(key, value) = A (kv, k_pe)`` or, with ``back``, ``(dkv, dk_pe) = A^T (dkey, dvalue)``."""

    @staticmethod
    def forward(ctx, x, y, cos, sin, positions, first_position, options, back, copy_value):
        if not torch.compiler.is_compiling():
            check_recordable(cos=cos, sin=sin, positions=positions)
        ctx.save_for_backward(cos, sin, positions)
        ctx.first_position, ctx.options, ctx.step = first_position, options, differentiated if back else _transposed
        where = Where.of(cos, sin, positions, first_position, options)
        return ASSEMBLE_BACK.run((x, y), where) if back else _assembled(x, y, where, copy_value)

    @staticmethod
    def backward(ctx, *grads):
        where = Where.of(*ctx.saved_tensors, ctx.first_position, ctx.options).transposed()
        found = for_each_batched_gradient(lambda x, y: ctx.step(x, y, where), *grads)
        return *(g if need else None for g, need in zip(found, ctx.needs_input_grad, strict=False)), *[None] * 7


def _transposed(key_grad, value_grad, where: Where):
    """``(dkv, dk_pe)``, recorded where a caller differentiates the gradients again."""
    if transformed():  # in torch operations and a rotation
        first, heads = where.options.slice(0)[0], where.options.seq_format.index("h")
        turned = rotate_recorded(key_grad, None, where)
        return torch.cat((turned[..., :first], value_grad), -1), turned[..., first:].sum(heads, keepdim=True)
    if needs_autograd(key_grad, value_grad):
        return _Assembly.apply(key_grad, value_grad, *where.flat, True, True)
    return ASSEMBLE_BACK.run((key_grad, value_grad), where)


# --------------------------------------------------------------------------------------------------- the tail in place


def overwrite_tail(q, where: Where, consume: bool):
    """Rotate the last features of every head of q in place, let autograd record it, and return the query.

    Args:
        consume: the caller gives up q and the gradient of the query: see `ropelab.rotate_mla_query`.
    """
    check_untransformed()
    check_tail(q, where)
    if must_dispatch(q, None):
        if consume:
            return rotated(q, None, where, False)
        if not torch.compiler.is_compiling():  # compilers cannot follow these checks; PyTorch has its own checks
            check_writable(("q",), (q,))
            check_inplace_autograd(q, None, where.angles)
        return copy_over((q,), (rotated(q, None, where, False),))[0]
    if not needs_autograd(q):
        TURN_TAIL((q,), where)
        return q
    if not consume:
        check_inplace_autograd(q, None, where.angles)
    check_recordable(positions=where.positions, **where.angles.named)
    return _OverwrittenTail.apply(q, *where.flat, consume)


class _OverwrittenTail(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, cos, sin, positions, first_position, options, consume):
        TURN_TAIL((q,), Where.of(cos, sin, positions, first_position, options))
        if not consume:
            ctx.mark_dirty(q)
        ctx.save_for_backward(cos, sin, positions)
        ctx.first_position, ctx.options, ctx.consume = first_position, options, consume
        return q

    @staticmethod
    def backward(ctx, grad):
        where = Where.of(*ctx.saved_tensors, ctx.first_position, ctx.options).transposed()
        if ctx.consume and _may_be_overwritten(grad):
            TURN_TAIL((grad,), where)
        else:
            (grad,) = for_each_batched_gradient(lambda g: (rotated(g, None, where, False),), grad)
        return grad, None, None, None, None, None, None


def _may_be_overwritten(grad: torch.Tensor) -> bool:
    """Whether a kernel can write to a gradient, and nobody differentiates the gradient."""
    known = not (transformed() or is_batched_gradient(grad) or needs_autograd(grad) or must_dispatch(grad, None))
    return known and not overlaps_itself(grad) and not grad.is_inference()
