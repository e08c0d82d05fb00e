"""The public function `apply_rope`."""

from collections.abc import Sequence
from typing import Never, overload

import torch
from torch.fx import Proxy

from ropelab.arguments import flag
from ropelab.autograd.rotation import differentiated, rotate_again
from ropelab.call.angles import given_angles
from ropelab.call.checks import warn_of_accidents
from ropelab.call.rotation import ROTATE, ROTATE_IN_PLACE
from ropelab.call.traced import recorded
from ropelab.call.where import located
from ropelab.foreign import by_position, hinted, unexpected
from ropelab.layout.pairing import Layout
from ropelab.layout.seq_format import SeqFormat


@overload
def apply_rope(
    q: torch.Tensor,
    k: None = None,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    frequencies: torch.Tensor | None = None,
    layout: Layout = "split_half",
    out_layout: Layout | None = None,
    seq_format: SeqFormat = "bshd",
    positions: torch.Tensor | None = None,
    axes: Sequence[int] | None = None,
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
    layout: Layout = "split_half",
    out_layout: Layout | None = None,
    seq_format: SeqFormat = "bshd",
    positions: torch.Tensor | None = None,
    axes: Sequence[int] | None = None,
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
    layout: Layout = "split_half",
    out_layout: Layout | None = None,
    seq_format: SeqFormat = "bshd",
    positions: torch.Tensor | None = None,
    axes: Sequence[int] | None = None,
    offsets: int | torch.Tensor = 0,
    rotary_slice: tuple[int, int] | None = None,
    inverse: bool = False,
    inplace: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...
@hinted
def apply_rope(
    q: torch.Tensor,
    k: torch.Tensor | None = None,
    *more: Never,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    frequencies: torch.Tensor | None = None,
    layout: Layout = "split_half",
    out_layout: Layout | None = None,
    seq_format: SeqFormat = "bshd",
    positions: torch.Tensor | None = None,
    axes: Sequence[int] | None = None,
    offsets: int | torch.Tensor = 0,
    rotary_slice: tuple[int, int] | None = None,
    inverse: bool = False,
    inplace: bool = False,
    **foreign: Never,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Rotary position embedding of queries and keys, in one pass over their memory.

    Example: ``q, k = apply_rope(q, k, cos=cos, sin=sin)``.

    Each pair ``(x0, x1)`` of features of a token rotates by the angle of the token's position, whose ``cos`` and
    ``sin`` stand in a row of the tables (see `ropelab.positions`)::

        y0 = x0 cos - x1 sin
        y1 = x1 cos + x0 sin

    (Su et al., RoFormer, arXiv 2104.09864, equation 34.) The arithmetic is in float32, or wider if an input is wider. A
    Triton kernel rotates CUDA tensors, and torch operations rotate all other tensors with the same results.

    Args:
        q: ``[B, S, Hq, D]`` (``bshd``), ``[S, B, Hq, D]`` (``sbhd``), ``[B, Hq, S, D]`` (``bhsd``) or
            ``[T, Hq, D]`` (``thd``); bfloat16, float16, float32 or float64; any strides.
        k: as ``q``, with any number of heads (GQA, MQA); or None.
        cos, sin: ``[P, R/2]`` or ``[1, P, R/2]``, or ``[B, P, R/2]`` with tables for each sequence; ``R <= D``. See
            `rotary_table`. Row ``p`` has the angles of position ``p`` and, with the sine negated, of ``-p``.
        frequencies: int64 ``[R/2, 3]`` in place of cos and sin, from `rotary_frequencies`. The kernel computes cosines
            and sines from the frequencies, at every position of int32: within an ulp of float32, of an angle that is
            within 2^-58 rad of the exact one. A context of millions of tokens then needs no large tables.
        layout: ``"split_half"`` pairs features ``(i, i + R/2)`` (GPT-NeoX, Hugging Face Llama);
            ``"interleaved"`` pairs ``(2i, 2i + 1)`` (GPT-J, Meta Llama).
        out_layout: the layout of the result, by default ``layout``. DeepSeek-V3 reads adjacent pairs and writes halves.
        seq_format: the order of the axes of ``q`` and ``k``.
        positions: the positions of the tokens, ``[S]``, ``[1, S]`` or ``[B, S]`` (``thd``: ``[T]`` or ``[1, T]``), of
            int32 or int64, also negative. By default tokens count from ``offsets``. `PackedSequences` has the positions
            of packed sequences, and `context_parallel_positions` the positions under context parallelism. A token at
            ``NO_POSITION`` becomes zeros and gets zero gradient.
        axes: the axis of positions that each pair reads, ``[R/2]``, for positions along several axes (M-RoPE, images);
            `mrope_axes` makes them from the sections of a model. ``positions`` are then ``[axes, S]``, ``[axes, 1, S]``
            or ``[axes, B, S]`` (``thd``: ``[axes, T]``), and tables have a column for each pair. The kernel reads the
            position along each axis and the tables, so nothing is gathered before: the bits are those of
            `axial_tables`. A token at ``NO_POSITION`` along every axis becomes zeros.
        offsets: the position of the first token of every sequence: an int, or ``[B]`` of int32 or int64.
        rotary_slice: ``(first, end)``, the features that rotate; by default the first ``R``, with a warning if a head
            has more, because the tables may be meant for other heads. All other features pass unchanged. With a slice
            the tables may have a column for each feature, ``[..., end - first]``, in the order of the features. If the
            columns of a pair differ (apex, TransformerEngine, Hunyuan-VL), the result is ``y0 = x0 cos0 - x1 sin0``,
            ``y1 = x1 cos1 + x0 sin1``.
        inverse: apply the transposed matrices, which rotate by minus the angle.
        inplace: overwrite ``q`` and ``k``. Autograd records the rotation and the change of the tensors.

    Returns:
        The rotated ``q``, or ``(q, k)`` when ``k`` is given, with the shapes and dtypes of the inputs. The results are
        differentiable any number of times in ``q``, ``k``, ``cos`` and ``sin``, in reverse and in forward mode. The
        gradient in ``q`` and ``k`` is the transposed rotation, by the same kernel.

    Raises:
        TypeError: an argument is not a tensor, or a dtype is not supported or does not match.
        ValueError: a rank or a shape is wrong, tables are too short or too wide, devices differ, or a layout or format
            is unknown. For ``inplace``: memory overlaps, or autograd needs a tensor unchanged.
        NotImplementedError: ``inplace`` under a transform of torch.func or in forward mode.

    The call compares positions in CPU memory with the tables and raises ValueError before it writes anything. On a GPU
    the host would have to wait for the positions: there a position without a row yields NaN, and nothing is read out of
    bounds.
    """
    if isinstance(q, Proxy):
        return recorded(apply_rope, locals())
    if foreign or more:
        raise unexpected(apply_rope, *foreign) if foreign else by_position(apply_rope, 2 + len(more))
    if type(inplace) is not bool:  # of NumPy
        inplace = flag("inplace", inplace)
    operation, given = ROTATE_IN_PLACE if inplace else ROTATE, (q, k)
    words, flags = (layout, out_layout, seq_format, frequencies is None), (inverse, inplace)
    tensors = (cos, sin) if frequencies is None else (frequencies, sin if cos is None else cos)
    key, prepared = operation.look_up(words, flags, given, *tensors, positions, offsets, axes, rotary_slice)
    if prepared is not None:
        if prepared.recorded:
            return rotate_again(prepared, q, k, *tensors, positions, offsets)
        ys = prepared(given, *tensors, positions, offsets)
        return ys[0] if k is None else ys
    inverse = flag("inverse", inverse)
    angles = given_angles(cos, sin, frequencies)
    where = located(q, angles, positions, offsets, layout, out_layout, seq_format, rotary_slice, inverse, axes)
    ys = differentiated(q, k, where, inplace)
    warn_of_accidents(q, where)
    operation.remember(key, given, where)
    return ys
