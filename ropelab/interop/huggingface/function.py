"""``apply_rotary_pos_emb`` of Transformers over the kernel."""

import torch

from ropelab.arguments import integer, tensor
from ropelab.call.traced import one_node
from ropelab.interop.broadcast import check_tables, rotate
from ropelab.layout.pairing import Layout, check_layout


@one_node
def apply_rotary_pos_emb(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int = 1,
    *,
    layout: Layout = "split_half",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k in one launch, in the convention of most models of Hugging Face's Transformers.

    The result is ``x * cos + rotate_half(x) * sin`` with the unsqueezed tables, for all shapes that broadcast. Where
    one launch cannot compute the result (see `ropelab.interop.broadcast.rotate_in_one_launch`), torch operations
    compute the formula.

    Args:
        q, k: ``[B, H, S, D]`` for ``unsqueeze_dim=1``, ``[B, S, H, D]`` for 2; any strides. The number of heads of q
            and k may differ (GQA).
        cos, sin: ``[B, S, R]`` or ``[1, S, R]`` with ``R <= D`` even, a column for each feature. Features from R on
            pass unchanged.
        unsqueeze_dim: the place at which the tables get the axis of the heads.
        layout: ``"split_half"`` (Llama and most models) or ``"interleaved"`` with each column twice in a row (Cohere).

    Returns:
        ``(q, k)``, each in the dtype to which the tensor and the tables promote; models cast the tables to q's dtype.
        The kernel computes in float32 or wider and rounds once. The results are differentiable any number of times,
        also in the tables.

    Raises:
        TypeError: an argument is not a tensor, q or k holds bools, the tables are not floating, or a number has another
            type.
        ValueError: the number of columns is odd or larger than the number of features, shapes do not broadcast, devices
            differ, or the layout is unknown.
    """
    check_layout(layout)
    unsqueeze_dim = integer("unsqueeze_dim", unsqueeze_dim)
    for name, table in (("cos", cos), ("sin", sin)):
        rank = tensor(name, table).ndim
        if not -1 - rank <= unsqueeze_dim <= rank or unsqueeze_dim in (-1, rank):
            raise ValueError(f"unsqueeze_dim: expected a place before the last axis of {name}, got {unsqueeze_dim}")
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    check_tables({"q": q, "k": k}, {"cos": cos, "sin": sin})
    q_out, k_out = rotate([q, k], cos, sin, layout)
    return q_out, k_out
