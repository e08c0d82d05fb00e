"""This file holds the public function `apply_rope`."""

from typing import overload

import torch

from ropelab.arguments import flag
from ropelab.autograd.rotation import differentiated
from ropelab.call.angles import given_angles
from ropelab.call.options import Options, features, locate


@overload
def apply_rope(
    q: torch.Tensor,
    k: None = None,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    frequencies: torch.Tensor | None = None,
    layout: str = "split_half",
    out_layout: str | None = None,
    seq_format: str = "bshd",
    positions: torch.Tensor | None = None,
    offsets: int | torch.Tensor = 0,
    rotary_slice: tuple[int, int] | None = None,
    inverse: bool = False,
    inplace: bool = False,
) -> torch.Tensor: ...
@overload
def apply_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    frequencies: torch.Tensor | None = None,
    layout: str = "split_half",
    out_layout: str | None = None,
    seq_format: str = "bshd",
    positions: torch.Tensor | None = None,
    offsets: int | torch.Tensor = 0,
    rotary_slice: tuple[int, int] | None = None,
    inverse: bool = False,
    inplace: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]: ...
@overload
def apply_rope(
    q: torch.Tensor,
    k: torch.Tensor | None,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    frequencies: torch.Tensor | None = None,
    layout: str = "split_half",
    out_layout: str | None = None,
    seq_format: str = "bshd",
    positions: torch.Tensor | None = None,
    offsets: int | torch.Tensor = 0,
    rotary_slice: tuple[int, int] | None = None,
    inverse: bool = False,
    inplace: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
def apply_rope(
    q: torch.Tensor,
    k: torch.Tensor | None = None,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    frequencies: torch.Tensor | None = None,
    layout: str = "split_half",
    out_layout: str | None = None,
    seq_format: str = "bshd",
    positions: torch.Tensor | None = None,
    offsets: int | torch.Tensor = 0,
    rotary_slice: tuple[int, int] | None = None,
    inverse: bool = False,
    inplace: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding of queries and keys, in one pass over their memory.

    Each pair ``(x0, x1)`` of features of a token turns by the angle of the row of the tables that belongs to the
    token's position::

        y0 = x0 cos - x1 sin
        y1 = x1 cos + x0 sin

    (Su et al., RoFormer, arXiv 2104.09864, equation 34.) The maths is in float32, or wider if the inputs are.
    CUDA tensors go through one Triton kernel, all others through torch operations with the same results.

    Args:
        q: ``[B, S, Hq, D]`` (``bshd``), ``[S, B, Hq, D]`` (``sbhd``), ``[B, Hq, S, D]`` (``bhsd``) or
            ``[T, Hq, D]`` (``thd``); bfloat16, float16, float32 or float64; any strides.
        k: as ``q``, with any number of heads (GQA, MQA); or None.
        cos, sin: ``[P, R/2]``, or ``[B, P, R/2]`` with tables for each batch; ``R <= D``. Row ``p`` serves the
            positions ``p`` and, with the sine negated, ``-p``. See ``rotary_table``.
        frequencies: in place of cos and sin, those of `rotary_frequencies`, of which the kernel computes them, for
            contexts whose tables would be large: right within an ulp of float32 at every int32 position.
        layout: ``"split_half"`` pairs features ``(i, i + R/2)`` (GPT-NeoX, Hugging Face Llama);
            ``"interleaved"`` pairs ``(2i, 2i + 1)`` (GPT-J, Meta Llama).
        out_layout: that of the result, if it is to be another one (DeepSeek-V3 reads adjacent pairs and writes
            halves).
        seq_format: order of the axes of ``q`` and ``k``.
        positions: of the tokens, ``[S]``, ``[1, S]`` or ``[B, S]`` (``thd``: ``[T]`` or ``[1, T]``), int32 or int64,
            also negative. For packed sequences and context parallelism see ``PackedSequences`` and
            ``context_parallel_positions``; a token at ``NO_POSITION`` becomes zeros and gets zero gradient. By default
            tokens count from 0 on.
        offsets: position of the first token, or one for each sequence: an int, or ``[B]`` int32 or int64.
        rotary_slice: ``(first, end)``, the features that rotate; all others pass unchanged. By default the first
            ``R``. With a slice the tables may also have a column per feature, ``[..., end - first]``, in the order
            of the features; if the two of a pair differ (apex, TransformerEngine, Hunyuan-VL), this is
            ``y0 = x0 cos0 - x1 sin0``, ``y1 = x1 cos1 + x0 sin1``.
        inverse: apply the transposed matrices, which rotate by minus the angle.
        inplace: overwrite ``q`` and ``k``; autograd is told.

    Returns:
        The rotated ``q``, or ``(q, k)`` when ``k`` is given; shape and dtype of the inputs. Differentiable any
        number of times in ``q``, ``k``, ``cos`` and ``sin``, in reverse and in forward mode; the gradient in ``q``
        and ``k`` is the transposed rotation, made by the same kernel.

    Raises:
        TypeError: not a tensor, or a dtype that is not supported or does not match.
        ValueError: wrong rank or shape, tables too short or too wide, devices that differ, unknown layout or
            format; for ``inplace``: overlapping memory, or a tensor that autograd needs unchanged.

    Positions given by tensors are compared with the tables before the call if they are on the CPU (ValueError).
    On a GPU that would have to wait for it: there a position without a row yields NaN, and reads nothing.
    """
    inverse, inplace = flag("inverse", inverse), flag("inplace", inplace)
    angles = given_angles(cos, sin, frequencies)
    positions, first_position, is_offset = locate(q, positions, offsets, seq_format)
    slice_ = None if rotary_slice is None else features(rotary_slice)
    out_layout = layout if out_layout is None else out_layout
    options = Options(layout, out_layout, seq_format, slice_, is_offset, inverse)
    return differentiated(q, k, angles, positions, first_position, options, inplace)
