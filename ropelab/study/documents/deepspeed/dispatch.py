"""The function that DeepSpeed#8052 changed, and the two ways in which the change handed it to torchembed.

Contract of ``deepspeed.sequence.layer.apply_rotary_pos_emb(t, cos, sin)``: tables of cos and sin (not
angles), width R <= D, both halves equal, broadcast against ``t [..., D]``; split-half pairs; features beyond
R pass unchanged; the result has the promoted dtype of input and table. torchembed's kernel takes ``x [*lead,
S, R]`` and tables ``[S, R]``, rotates axis -2 by the rows, and returns x's dtype.

Two dispatches are studied. The *first* is the pull request as opened, whose source was overwritten by a force
push: it is modelled here from the review. The *merged* one is tested on DeepSpeed's own source when
``build/peers`` has it (``make peers``), otherwise on our model of it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import torch

from ropelab.bench.unavailable import Unavailable
from ropelab.interop.broadcast import formula
from ropelab.study.documents.deepspeed import peers

Rotate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def kernel_contract(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What torchembed's kernel computes: axis -2 of ``[*lead, S, R]`` rotated by table rows, in the input's
    dtype."""
    rows = q.shape[-2]
    if rows > cos.shape[0]:
        raise IndexError(f"the kernel reads row {rows - 1} of tables with {cos.shape[0]} rows")
    return tuple(formula(x, cos[:rows], sin[:rows]).to(x.dtype) for x in (q, k))


def rounding_bound(dtype: torch.dtype | str) -> float:
    """The largest relative error (L2) that rounding gives a rotation, or its gradient, computed in a dtype.

    Where every operation rounds to a unit u, an element of a pair is off by at most 2 u (|x0| + |x1|), and over a
    tensor the error is at most 4 u of its norm (|x0| + |x1| is at most the root of 2 times the pair's norm, and two
    elements of a pair err). 5 % cover the products of two roundings.

    Args:
        dtype: the narrowest on the way; a string is its name without "torch.".
    """
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    return 1.05 * 4 * torch.finfo(dtype).eps / 2


def first_dispatch(
    t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotate: Rotate = kernel_contract
) -> torch.Tensor:
    """The pull request as opened: whatever the shapes, axis -2 is taken for the sequence."""
    rotary_dim = cos.shape[-1]
    if rotary_dim % 2:
        return formula(t, cos, sin)
    x = t[..., :rotary_dim]
    rotated, _ = rotate(x, x, cos.reshape(-1, rotary_dim), sin.reshape(-1, rotary_dim))
    return torch.cat((rotated, t[..., rotary_dim:]), dim=-1)


def merged_gate(t: torch.Tensor, cos: torch.Tensor) -> bool:
    """Whether the merged code takes the fused path for these shapes (its device and import tests aside)."""
    tokens, rotary_dim = cos.shape[0], cos.shape[-1]
    return rotary_dim % 2 == 0 and tokens == t.shape[0] and cos.numel() == tokens * rotary_dim


def merged_dispatch(
    t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotate: Rotate = kernel_contract
) -> torch.Tensor:
    """Our model of the merged code: where the gate opens, axis 0 is the sequence; elsewhere the formula."""
    if not merged_gate(t, cos):
        return formula(t, cos, sin)
    rotary_dim = cos.shape[-1]
    x = t[..., :rotary_dim].movedim(0, -2).contiguous()
    rotated, _ = rotate(x, x, cos.reshape(-1, rotary_dim), sin.reshape(-1, rotary_dim))
    return torch.cat((rotated.movedim(-2, 0), t[..., rotary_dim:]), dim=-1)


def merged_function(
    rotate: Rotate = kernel_contract,
    *,
    available: bool = True,
    on_device: Callable[[torch.Tensor], bool] = lambda t: True,
) -> tuple[Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor], str]:
    """The merged function with ``rotate`` in place of torchembed's kernel, and which code it is.

    Args:
        rotate: ``(q, k, cos, sin) -> (q, k)`` in torchembed's convention; may be the real kernel.
        available: what the guarded import of torchembed found.
        on_device: the device test of the gate. The default lets CPU tensors through, so that gate and reshaping can
            be studied without a GPU.
    """
    accelerator = SimpleNamespace(on_accelerator=on_device)
    names = {"get_accelerator": lambda: accelerator, "_torchembed_available": available,
             "_torchembed_rope_forward": rotate}  # fmt: skip
    try:
        version, source = peers.deepspeed_source()
        return peers.deepspeed_functions(source, names), f"DeepSpeed {version}'s own source"
    except Unavailable:
        pass

    def model(t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return merged_dispatch(t, cos, sin, rotate) if available and on_device(t) else formula(t, cos, sin)

    return model, "our model of the merged code"
