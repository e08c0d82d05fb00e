"""The public function `apply_qk_norm_rope`."""

from collections.abc import Sequence
from typing import Never

import torch
from torch.fx import Proxy

from ropelab.arguments import single
from ropelab.autograd.qk_norm import differentiated
from ropelab.call.angles import given_tables
from ropelab.call.checks import check_fixed_tables, warn_of_accidents
from ropelab.call.qk_norm import FORWARD
from ropelab.call.traced import recorded
from ropelab.call.where import located
from ropelab.foreign import hinted, unexpected
from ropelab.layout.pairing import Layout
from ropelab.layout.seq_format import SeqFormat


@hinted
def apply_qk_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    *,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float = 1e-6,
    layout: Layout = "split_half",
    seq_format: SeqFormat = "bshd",
    positions: torch.Tensor | None = None,
    axes: Sequence[int] | None = None,
    offsets: int | torch.Tensor = 0,
    rotary_slice: tuple[int, int] | None = None,
    **foreign: Never,
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMS norm of every head of queries and keys, then rotary position embedding, in one pass over their memory.

    Example: ``q, k = apply_qk_norm_rope(q, k, q_weight, k_weight, cos=cos, sin=sin)``.

    For every head ``x`` of q and of k, with the weight ``w`` of q or k::

        n = x / sqrt(mean(x^2) + eps) * w
        y = rotation of n, as by `apply_rope`

    (Zhang and Sennrich, arXiv 1910.07467, equation 4, over ``head_dim``; then Su et al., arXiv 2104.09864, equation
    34.) The arithmetic is in float32, or wider if an input is wider, and only ``y`` is rounded to the dtype of q.
    Hugging Face's Qwen3 also rounds ``x / sqrt(...)`` before the weight, and ``n`` before the rotation.

    Args:
        q: ``[B, S, Hq, D]`` (``bshd``), ``[S, B, Hq, D]`` (``sbhd``), ``[B, Hq, S, D]`` (``bhsd``) or ``[T, Hq, D]``
            (``thd``); bfloat16, float16, float32 or float64; any strides.
        k: as ``q``, with any number of heads (GQA, MQA).
        q_weight, k_weight: ``[D]``, both of one floating dtype, which may differ from the dtype of q. For a model that
            multiplies by ``1 + w`` (Gemma), pass ``1 + w``.
        cos, sin, layout, seq_format, positions, axes, offsets, rotary_slice: as for `apply_rope`. Features outside of
            the rotary slice are normalized and not rotated.
        eps: a number of at least 0, added to the mean of the squares.

    Returns:
        The new ``(q, k)``, with the shapes and dtypes of the inputs. The results are differentiable once, in q, k and
        the weights, and autograd keeps nothing but the inputs. A token at ``NO_POSITION`` becomes zeros, gets zero
        gradient and adds nothing to the gradients of the weights. The gradients of the weights have the same bits every
        time on the same GPU.

    Raises:
        TypeError, ValueError: as `apply_rope`; a weight has the wrong shape, dtype or device; ``eps`` is negative; or a
            table requires grad.
    """
    if isinstance(q, Proxy):
        return recorded(apply_qk_norm_rope, locals())
    if foreign:
        raise unexpected(apply_qk_norm_rope, *foreign)
    given = q, k, q_weight, k_weight
    key, prepared = FORWARD.look_up(
        (layout, seq_format), (eps,), given, cos, sin, positions, offsets, axes, rotary_slice
    )
    if prepared is not None:
        return prepared(given, cos, sin, positions, offsets)
    where = located(q, given_tables(cos, sin), positions, offsets, layout, None, seq_format, rotary_slice, axes=axes)
    eps = single("eps", eps, at_least=0)
    check_fixed_tables(cos, sin)
    ys = differentiated(*given, where, eps)
    warn_of_accidents(q, where)
    FORWARD.remember(key, given, where, eps)
    return ys
