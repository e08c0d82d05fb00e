"""The functions with the arguments of the functions in Transformers, for q and k or for one tensor."""

import torch

from ropelab.interop.broadcast import check_tables, formula, rotate_in_one_launch
from ropelab.interop.huggingface.function import apply_rotary_pos_emb

__all__ = ["apply_rotary_pos_emb", "apply_rotary_pos_emb_single"]


def apply_rotary_pos_emb_single(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1, *, layout: str = "split_half"
) -> torch.Tensor:
    """`apply_rotary_pos_emb` for one tensor, which may be the queries alone.

    Args:
        x: ``[B, H, S, D]`` for ``unsqueeze_dim=1``, ``[B, S, H, D]`` for 2; any strides.
        cos, sin, unsqueeze_dim, layout: as for `apply_rotary_pos_emb`.

    Returns:
        The rotated tensor, in the dtype to which ``x`` and the tables promote.

    Raises:
        TypeError, ValueError: as `apply_rotary_pos_emb`.
    """
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    check_tables({"x": x}, {"cos": cos, "sin": sin})
    x = x.to(torch.promote_types(x.dtype, cos.dtype))
    rotated = rotate_in_one_launch([x], cos, sin, layout=layout)
    return formula(x, cos, sin, layout) if rotated is None else rotated[0]
