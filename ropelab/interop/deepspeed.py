"""This file holds ``deepspeed.sequence.layer.apply_rotary_pos_emb`` over ropelab's kernel."""

import torch

from ropelab.interop.broadcast import check_tables, formula, rotate_in_one_launch


def apply_rotary_pos_emb(t: torch.Tensor, freqs_cos: torch.Tensor, freqs_sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``t`` by tables that broadcast against ``t``, in DeepSpeed's convention: split-half pairs.

    The result is ``t * cos + rotate_half(t) * sin`` for all shapes. One launch of the kernel computes the result where
    the tables change along one axis of ``t``, the sequence, or along two axes, batch and sequence. The docstring of
    DeepSpeed promises ``[s, b, h, d]`` with ``[s, 1, 1, r]``; DeepSpeed's FPDT layer and ``DistributedAttention`` pass
    ``[b, s, h, d]`` with ``[1, s, 1, r]`` (github.com/deepspeedai/DeepSpeed, deepspeed/sequence). For all other shapes
    torch operations compute the formula.

    Args:
        t: ``[..., d]``, any strides.
        freqs_cos, freqs_sin: cosines and sines (not angles), ``[..., r]`` with ``0 < r <= d`` even, a column for each
            feature. Features of ``t`` from r on pass unchanged.

    Returns:
        A tensor of the shape of ``t``, in the dtype to which ``t`` and the tables promote, as in DeepSpeed: for float16
        with float32 tables ``t`` is converted to float32 first. The kernel computes in float32 or wider and rounds
        once; DeepSpeed's own function rounds after every operation. The result is differentiable any number of times,
        also in the tables.

    Raises:
        TypeError: an argument is not a tensor, ``t`` holds bools, or the tables are not floating.
        ValueError: the tables have a wrong number of columns, shapes do not broadcast, or devices differ.
    """
    check_tables({"t": t}, {"freqs_cos": freqs_cos, "freqs_sin": freqs_sin})
    dtype = torch.promote_types(torch.promote_types(t.dtype, freqs_cos.dtype), freqs_sin.dtype)
    rotated = rotate_in_one_launch([t.to(dtype)], freqs_cos, freqs_sin)
    return formula(t, freqs_cos, freqs_sin) if rotated is None else rotated[0]
