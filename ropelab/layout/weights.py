"""Weights of one layout for kernels of the other: what makes queries and keys, reordered within every head.

With ``P`` the permutation of `pairing.permutation`, ``R_target = P R_source P^T``. Then ``P q`` and ``P k``
rotated in the target layout are ``P`` times those rotated in the source's, and ``P^T P = I`` leaves every score as it
was; values and outputs are not touched. Both q and k must be converted, and caches of rotated keys along their last
axis too (``keys[..., permutation(...)]``). A wrong conversion is exact at distance 0 and mild at small distances.
"""

import torch

from ropelab.arguments import integer, integers, tensor
from ropelab.layout.pairing import check_layout, permutation


def convert_layout(
    x: torch.Tensor,
    head_dim: int,
    source: str,
    target: str,
    *,
    rotary_slice: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Reorder the features of each head of q or k along the first axis of what makes them.

    One function for the weight of a projection ``[heads * head_dim, in]``, its bias ``[heads * head_dim]``, scales of
    its rows, and the weight of a norm of the heads ``[head_dim]``. Heads are counted by ``head_dim``, so that keys with
    fewer of them (GQA, MQA) need nothing else. Of a fused qkv projection pass the rows of q and of k, not of v.

    Args:
        x: first axis ``heads * head_dim`` features, in the order of heads; any dtype.
        source, target: the layout that ``x`` was trained for, and that of the rotation to come: Meta's Llama is
            ``"interleaved"``, Hugging Face's ``"split_half"``.
        rotary_slice: ``(first, end)`` of the features of a head that rotate; by default all. The others stay.

    Returns:
        A new tensor; converting back gives the bits of ``x``.

    Raises:
        TypeError: not a tensor, not integers, layouts that are not strings.
        ValueError: unknown layout, rows that are not entire heads, or a slice that is not an even number of features.
    """
    check_layout(source, "source")
    check_layout(target, "target")
    head_dim = integer("head_dim", head_dim, at_least=1)
    slice_ = (0, head_dim) if rotary_slice is None else integers("rotary_slice", rotary_slice)
    if len(slice_) != 2 or not 0 <= slice_[0] < slice_[1] <= head_dim or (slice_[1] - slice_[0]) % 2:
        raise ValueError(f"rotary_slice: expected an even number of the {head_dim} features of a head, got {slice_}")
    first, end = slice_
    if tensor("x", x).ndim == 0 or len(x) % head_dim:
        raise ValueError(f"x: expected heads of {head_dim} features along axis 0, got shape {tuple(x.shape)}")
    order = torch.arange(head_dim, device="cpu")
    order[first:end] = order[first:end][permutation(end - first, source, target)]
    heads = x.unflatten(0, (-1, head_dim))
    return heads.index_select(1, order.to(x.device)).flatten(0, 1)
