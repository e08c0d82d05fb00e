"""The function that DeepSpeed#8052 changed, as first proposed and as merged, with any kernel.

Contract of ``deepspeed.sequence.layer.apply_rotary_pos_emb(t, cos, sin)``: the tables hold cosines and sines (not
angles) in R <= D columns, both halves equal, and broadcast against ``t [..., D]``. The function rotates split-half
pairs. Features from R on pass unchanged. The result has the dtype to which input and tables promote. torchembed's
kernel takes ``x [*lead, S, R]`` and tables ``[S, R]``, rotates axis -2 by the rows, and returns x's dtype.

Both functions are DeepSpeed's own source: the merged function of the release under ``build/peers``, the first function
of the first commit (``data/sources.toml``). A force push gave this commit another hash. The hash that the review
names, 3855dbb0c2, follows from the commit's tree, parent, author and message without the line that signs it off.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from ropelab.study.documents.deepspeed import peers

Function = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Rotate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def rounding_bound(dtype: torch.dtype | str) -> float:
    """The largest relative error (L2) that rounding gives a rotation, or its gradient, computed in a dtype.

    Where every operation rounds to a unit u, an element of a pair is off by at most 2 u (|x0| + |x1|). The sum
    |x0| + |x1| is at most the root of 2 times the pair's norm, and two elements of a pair err. So the error of a tensor
    is at most 4 u times its norm. 5 % cover the products of two roundings.

    Args:
        dtype: the narrowest dtype on the way; a string is the name of the dtype without "torch.".
    """
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    return 1.05 * 4 * torch.finfo(dtype).eps / 2


def first_function(
    rotate: Rotate | None = None, *, available: bool = True, on_device: Callable[[torch.Tensor], bool] = lambda t: True
) -> tuple[Function, str]:
    """The function of the first commit with ``rotate`` in place of torchembed's kernel, and the source of its code.

    Args:
        rotate, available, on_device: as for `merged_function`.

    Raises:
        Unavailable: the file of the commit is not under ``build/peers``.
    """

    def plain(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rotate(*(x.as_subclass(torch.Tensor) for x in tensors))

    commit, source = peers.first_source()
    names = {"_torchembed_available": available, "_torchembed_rope_forward": plain}
    function = peers.deepspeed_functions(source, names)

    def first(t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        t = t.as_subclass(_SaysCuda) if on_device(t) and not t.is_cuda else t
        return function(t, cos, sin).as_subclass(torch.Tensor)

    return first, f"DeepSpeed's own source at {commit[:7]}"


def merged_function(
    rotate: Rotate | None = None, *, available: bool = True, on_device: Callable[[torch.Tensor], bool] = lambda t: True
) -> tuple[Function, str]:
    """The merged function with ``rotate`` in place of torchembed's kernel, and the source of its code.

    Args:
        rotate: ``(q, k, cos, sin) -> (q, k)`` in torchembed's convention; None where no call reaches the kernel.
        available: whether the guarded import of torchembed succeeded.
        on_device: the device test of the gate. The default lets CPU tensors through, so that gate and reshaping can
            be studied without a GPU.

    Raises:
        Unavailable: no DeepSpeed is under ``build/peers``.
    """
    version, source = peers.deepspeed_source()
    accelerator = SimpleNamespace(on_accelerator=on_device)
    names: dict[str, Any] = {"get_accelerator": lambda: accelerator, "_torchembed_available": available,
                             "_torchembed_rope_forward": rotate}  # fmt: skip
    return peers.deepspeed_functions(source, names), f"DeepSpeed {version}'s own source"


class _SaysCuda(torch.Tensor):
    """A CPU tensor that says that it is a CUDA tensor, for a gate that asks ``t.is_cuda`` and ``t.device.type``."""

    is_cuda = True
    device = torch.device("cuda")
