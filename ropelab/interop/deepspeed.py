"""``deepspeed.sequence.layer.apply_rotary_pos_emb`` over the kernel."""

import torch

from ropelab.interop.broadcast import check_tables, formula, rotate


def apply_rotary_pos_emb(t: torch.Tensor, freqs_cos: torch.Tensor, freqs_sin: torch.Tensor) -> torch.Tensor:
    """Rotate ``t`` by tables that broadcast against it, in DeepSpeed's convention: split-half pairs.

    Whatever the shapes, the result is ``t * cos + rotate_half(t) * sin``. Where the tables change along one axis of
    ``t``, the sequence, or along two, batch and sequence, it is one launch of the kernel: the docstring of DeepSpeed
    promises ``[s, b, h, d]`` with ``[s, 1, 1, r]``, its FPDT layer and ``DistributedAttention`` pass ``[b, s, h, d]``
    with ``[1, s, 1, r]`` (github.com/deepspeedai/DeepSpeed, deepspeed/sequence). All else takes the formula.

    Args:
        t: ``[..., d]``, any strides.
        freqs_cos, freqs_sin: cosines and sines (not angles), ``[..., r]`` with ``0 < r <= d`` even, a column for each
            feature. Features of ``t`` from r on pass unchanged.

    Returns:
        Shape of ``t``; the dtype that ``t`` and the tables promote to, as in DeepSpeed: float16 with float32 tables
        is float32, for which ``t`` is converted first. The maths is in float32 or wider and rounds once; DeepSpeed's
        own rounds after every operation. Differentiable any number of times, also in the tables.

    Raises:
        TypeError: not a tensor, bools, tables that are not floating.
        ValueError: a wrong number of columns, shapes that do not broadcast, devices that differ.
    """
    check_tables({"t": t}, {"freqs_cos": freqs_cos, "freqs_sin": freqs_sin})
    dtype = torch.promote_types(torch.promote_types(t.dtype, freqs_cos.dtype), freqs_sin.dtype)
    rotated = rotate([t.to(dtype)], freqs_cos, freqs_sin)
    return formula(t, freqs_cos, freqs_sin) if rotated is None else rotated[0]
