"""Convert the weights of a model from one layout to the other, by a reordering within every head.

With the matrix ``P`` of `pairing.permutation`, ``R_target = P R_source P^T``. So ``R_target (P q) = P (R_source q)``,
and the same holds for k. Because of ``P^T P = I`` every score stays as it was, and values and outputs do not change.

A model needs the conversion of q and of k. A cache of rotated keys needs it along its last axis
(``keys[..., permutation(...)]``). Mistakes are hard to see: a wrong conversion gives exact scores at distance 0, and
nearly right scores at small distances.
"""

import torch

from ropelab.arguments import integer, integers, tensor
from ropelab.foreign import hinted
from ropelab.layout.pairing import Layout, check_layout, permutation


@hinted
def convert_layout(
    x: torch.Tensor,
    head_dim: int,
    source: Layout,
    target: Layout,
    *,
    rotary_slice: tuple[int, int] | None = None,
    heads: int | None = None,
) -> torch.Tensor:
    """Reorder the features of each head of q or k along the first axis of a weight.

    Example: ``weight = convert_layout(weight, 128, "interleaved", "split_half")``.

    The function takes the weight of a projection ``[heads * head_dim, in]``, the bias ``[heads * head_dim]``, the
    scales of the rows, and the weight of a norm of the heads ``[head_dim]``. It counts heads by ``head_dim``, so keys
    with fewer heads (GQA, MQA) need no other argument. A fused qkv projection needs ``heads``.

    Args:
        x: a tensor whose first axis has ``heads * head_dim`` features, in the order of heads; any dtype.
        head_dim: the number of features of a head.
        source: the layout that ``x`` was trained for: ``"interleaved"`` for Meta's Llama.
        target: the layout of the rotation: ``"split_half"`` for Llama in Hugging Face.
        rotary_slice: ``(first, end)`` of the features of a head that rotate; by default all features. The other
            features stay in place.
        heads: reorder this many heads, the first ones, and leave all further rows as they are: the heads of q and k of
            a fused qkv projection. By default all heads.

    Returns:
        A new tensor of the shape and dtype of ``x``. The conversion back gives the bits of ``x``.

    Raises:
        TypeError: ``x`` is not a tensor, ``head_dim`` or ``rotary_slice`` are not integers, or a layout is not a
            string.
        ValueError: a layout is unknown, the rows are not entire heads or fewer than ``heads``, or the slice does not
            have an even number of features.
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
    count = len(x) // head_dim
    if heads is not None:
        count = integer("heads", heads, at_least=0, below=count + 1)
    order = torch.arange(len(x), device="cpu")
    rotating = order[: count * head_dim].view(count, head_dim)[:, first:end]
    rotating.copy_(rotating[:, permutation(end - first, source, target)])
    return x.index_select(0, order.to(x.device))
