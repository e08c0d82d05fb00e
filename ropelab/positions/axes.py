"""Make positions along several axes, for images and video, and assign an axis to each plane.

A token has a position along each axis, and every plane reads the position along one axis: see `ropelab.positions`.
`axial_tables` makes tables with a row for each token from both, and the kernel rotates by these tables::

    rope = axial_rope((16, 56, 56))                                # Flux; Qwen-Image
    rope = axial_rope((44, 42, 42))                                # Wan
    rope = axial_rope((16, 56, 56), base=256.0)                    # HunyuanVideo
    positions = grid_positions(frames, height, width)              # Wan, HunyuanVideo; Flux with one frame
    positions = grid_positions(frames, height, width, centred=(1, 2))  # Qwen-Image: rows and columns around 0
    positions = text_positions(tokens, start=max(height // 2, width // 2))  # Qwen-Image; Flux: torch.zeros
    cos, sin = rope.tables(512, positions)

Qwen2-VL and similar models compute positions ``[3, B, S]`` themselves. `rope_from_config` reads the sections of these
models, and `mrope_axes` takes the sections. With ``axes=rope.axes`` the kernel reads the positions itself, from tables
with a row for each position.
"""

import math
from collections.abc import Collection, Sequence

import torch

from ropelab.arguments import device as usable
from ropelab.arguments import flag, integer, integers, sequence
from ropelab.foreign import hinted
from ropelab.layout.pairing import MOST_FEATURES


def sections(widths: Sequence[int], name: str = "widths") -> tuple[int, ...]:
    """The axis of each plane where every axis has a band of adjacent planes: ``(2, 3)`` -> ``0 0 1 1 1``.

    Source: M-RoPE of Qwen2-VL (arXiv 2409.12191, section 2.1), and the axes of Flux side by side.

    Args:
        widths: the number of planes of each axis.
        name: the name of ``widths`` in messages.

    Returns:
        The axis of each plane.

    Raises:
        TypeError: ``widths`` is not a sequence of integers.
        ValueError: a width is negative, or there is no plane at all.
    """
    widths = _checked(widths, name)
    return tuple(axis for axis, width in enumerate(widths) for _ in range(width))


def interleaved_sections(widths: Sequence[int], name: str = "widths") -> tuple[int, ...]:
    """The axis of each plane where the axes take turns, ``0 1 2 0 1 2 ...``, until an axis has all of its planes.

    Plane ``i`` belongs to axis ``a = i mod n`` of ``n`` axes if ``i < n * widths[a]``, else to axis 0. Source: Qwen3-VL
    (arXiv 2511.21631), ``mrope_interleaved`` in transformers.

    Raises:
        TypeError, ValueError: as `sections`; or the turns give an axis another number of planes than its width.
    """
    widths = _checked(widths, name)
    count = len(widths)
    found = tuple(i % count if i < count * widths[i % count] else 0 for i in range(sum(widths)))
    for axis, width in enumerate(widths):
        if found.count(axis) != width:
            raise ValueError(f"{name}: expected turns that give {width} planes to axis {axis}, got {found.count(axis)}")
    return found


@hinted
def mrope_axes(mrope_section: Sequence[int], *, mrope_interleaved: bool = False) -> tuple[int, ...]:
    """The ``axes`` of `ropelab.apply_rope` and `ropelab.axial_tables` for the M-RoPE of a model.

    ::

        axes = mrope_axes((16, 24, 24))                          # Qwen2-VL, Qwen2.5-VL
        axes = mrope_axes((24, 20, 20), mrope_interleaved=True)  # Qwen3-VL
        axes = mrope_axes((11, 11, 10), mrope_interleaved=True)  # Qwen3.5: 64 of 256 features rotate
        q, k = apply_rope(q, k, cos=cos, sin=sin, positions=positions, axes=axes)  # positions [3, T] or [3, B, S]

    Args:
        mrope_section: the number of pairs of each axis (time, height and width), as in a model's configuration.
        mrope_interleaved: the axes take turns (`interleaved_sections`) instead of having blocks of pairs (`sections`).

    Returns:
        The axis of each pair, ``[R/2]``.

    Raises:
        TypeError: ``mrope_section`` is not a sequence of integers, or ``mrope_interleaved`` is not a bool.
        ValueError: a section is negative, there is no pair, or turns cannot give an axis its number of pairs.
    """
    arrange = interleaved_sections if flag("mrope_interleaved", mrope_interleaved) else sections
    return arrange(mrope_section, "mrope_section")


@hinted
def grid_positions(
    *sizes: int, start: int = 0, centred: Collection[int] = (), device: torch.device | str | None = None
) -> torch.Tensor:
    """The positions of the tokens of a flattened grid, the last axis fastest, as in images and video.

    Example: ``positions = grid_positions(1, 8, 8)``.

    Args:
        sizes: the number of tokens along each axis, for example ``(frames, height, width)``.
        start: the first position along axis 0, in Qwen-Image the number of the image. Positions must stay within int32.
        centred: the axes of size ``n`` that count from ``-(n - n // 2)`` to ``n // 2 - 1``, around 0. Height and width
            of Qwen-Image count this way (``scale_rope``).
        device: the device of the result, by default torch's default device.

    Returns:
        int64 ``[axes, product of sizes]``.

    Raises:
        TypeError: an argument is not an integer.
        ValueError: there is no size or a negative size, a position is beyond int32, or ``centred`` names an axis that
            the grid lacks.
    """
    sizes, start = integers("sizes", sizes), integer("start", start)
    if any(size < 0 for size in sizes) or not sizes:
        raise ValueError(f"sizes: expected at least one number of tokens, all >= 0, got {sizes}")
    if isinstance(centred, (set, frozenset)):
        centred = tuple(centred)
    centred = {integer("centred", axis) for axis in sequence("centred", centred)}
    if not centred <= set(range(len(sizes))):
        raise ValueError(f"centred: expected axes below {len(sizes)}, got {tuple(centred)}")
    if math.prod(sizes) >= MOST_FEATURES:
        raise ValueError(f"sizes: expected fewer than 2**31 tokens, got {sizes}")
    _check_range(start, max(sizes))
    device = usable("device", device)
    firsts = [-(size - size // 2) if axis in centred else 0 for axis, size in enumerate(sizes)]
    ranges = [torch.arange(first, first + size, device=device) for first, size in zip(firsts, sizes, strict=True)]
    positions = torch.stack(torch.meshgrid(*ranges, indexing="ij")).flatten(1)
    positions[0] += start
    return positions


@hinted
def text_positions(
    tokens: int, *, start: int = 0, axes: int = 3, device: torch.device | str | None = None
) -> torch.Tensor:
    """The positions of text, which are equal along all axes and count from ``start``: int64 ``[axes, tokens]``.

    Example: ``positions = text_positions(64)``.

    Raises:
        TypeError: an argument is not an integer.
        ValueError: the number of tokens is negative, there is no axis, or a position is beyond int32.
    """
    tokens, start, axes = integer("tokens", tokens, 0), integer("start", start), integer("axes", axes, 1, MOST_FEATURES)
    _check_range(start, tokens)
    device = usable("device", device)
    return torch.arange(start, start + tokens, device=device).expand(axes, tokens)


def _check_range(start: int, tokens: int) -> None:
    if not -(2**31) < start <= start + tokens <= 2**31:
        raise ValueError(f"start: expected positions within int32 for {tokens} tokens along an axis, got {start}")


def _checked(widths: Sequence[int], name: str) -> tuple[int, ...]:
    widths = integers(name, widths)
    if any(width < 0 for width in widths) or not widths:
        raise ValueError(f"{name}: expected at least one number of planes, all >= 0, got {widths}")
    if not 0 < sum(widths) < MOST_FEATURES:
        raise ValueError(f"{name}: expected a sum >= 1 and < 2**31, got {widths}")
    return widths
