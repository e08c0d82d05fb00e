"""Positions along several axes, as images and video have them, and which axis turns which plane.

A token has one position for each axis, and every plane reads the axis that it belongs to. Both are data for
`axial_tables`, which makes the tables of the tokens for the same kernel::

    rope = axial_rope((16, 56, 56))                                # Flux; Qwen-Image
    rope = axial_rope((44, 42, 42))                                # Wan
    rope = axial_rope((16, 56, 56), base=256.0)                    # HunyuanVideo
    positions = grid_positions(frames, height, width)              # Wan, HunyuanVideo; Flux with one frame
    positions = grid_positions(frames, height, width, centred=(1, 2))  # Qwen-Image: rows and columns around 0
    positions = text_positions(tokens, start=max(height // 2, width // 2))  # Qwen-Image; Flux: torch.zeros
    cos, sin = rope.tables(512, positions)

Qwen2-VL and its like hand out positions ``[3, B, S]`` themselves, and
`rope_from_config` reads their sections.
"""

from collections.abc import Collection, Sequence

import torch

from ropelab.arguments import device as usable
from ropelab.arguments import integer, integers, sequence
from ropelab.layout.pairing import MOST_FEATURES


def sections(widths: Sequence[int], name: str = "widths") -> tuple[int, ...]:
    """Bands of planes, one axis each: ``(2, 3)`` -> ``0 0 1 1 1``.

    Source: M-RoPE of Qwen2-VL (arXiv 2409.12191, section 2.1), and the axes of Flux side by side.

    Args:
        widths: planes of each axis.
        name: of ``widths`` in messages.

    Returns:
        The axis of each plane.

    Raises:
        TypeError: not a sequence of integers.
        ValueError: a negative width, or no plane at all.
    """
    widths = _checked(widths, name)
    return tuple(axis for axis, width in enumerate(widths) for _ in range(width))


def interleaved_sections(widths: Sequence[int], name: str = "widths") -> tuple[int, ...]:
    """Axes in turn, ``0 1 2 0 1 2 ...``, as long as axis ``a > 0`` has planes left; all others are of axis 0.

    Plane ``i`` belongs to axis ``a = i mod n`` of ``n`` if ``i < n * widths[a]``, else to axis 0. Source: Qwen3-VL
    (arXiv 2511.21631), ``mrope_interleaved`` in transformers.

    Raises:
        TypeError, ValueError: as `sections`, and widths that do not come out: more planes of an axis than have their
            turn.
    """
    widths = _checked(widths, name)
    count = len(widths)
    found = tuple(i % count if i < count * widths[i % count] else 0 for i in range(sum(widths)))
    for axis, width in enumerate(widths):
        if found.count(axis) != width:
            raise ValueError(f"{name}: expected {width} planes of axis {axis} in turn, got {found.count(axis)}")
    return found


def grid_positions(
    *sizes: int, start: int = 0, centred: Collection[int] = (), device: torch.device | str | None = None
) -> torch.Tensor:
    """The positions of a grid's tokens, the last axis fastest, as images and video are flattened.

    Args:
        sizes: tokens along each axis, e.g. ``(frames, height, width)``.
        start: first position along axis 0 (Qwen-Image: the number of the image); positions stay within int32.
        centred: axes that count around 0: from ``-(n - n // 2)`` to ``n // 2 - 1``. Qwen-Image does so
            (``scale_rope``) for height and width.
        device: of the result, by default torch's default device.

    Returns:
        int64 ``[axes, product of sizes]``.

    Raises:
        TypeError: not integers.
        ValueError: a negative size or none, positions beyond int32, or a centred axis that is not there.
    """
    sizes, start = integers("sizes", sizes), integer("start", start)
    if any(size < 0 for size in sizes) or not sizes:
        raise ValueError(f"sizes: expected numbers of tokens >= 0, got {sizes}")
    if isinstance(centred, (set, frozenset)):
        centred = tuple(centred)
    centred = {integer("centred", axis) for axis in sequence("centred", centred)}
    if not centred <= set(range(len(sizes))):
        raise ValueError(f"centred: expected axes below {len(sizes)}, got {tuple(centred)}")
    _check_range(start, max(sizes))
    device = usable("device", device)
    firsts = [-(size - size // 2) if axis in centred else 0 for axis, size in enumerate(sizes)]
    ranges = [torch.arange(first, first + size, device=device) for first, size in zip(firsts, sizes, strict=True)]
    positions = torch.stack(torch.meshgrid(*ranges, indexing="ij")).flatten(1)
    positions[0] += start
    return positions


def text_positions(
    tokens: int, *, start: int = 0, axes: int = 3, device: torch.device | str | None = None
) -> torch.Tensor:
    """The same position along every axis, counting from ``start``: int64 ``[axes, tokens]``.

    Raises:
        TypeError: not integers.
        ValueError: a negative number of tokens, no axes, or positions beyond int32.
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
        raise ValueError(f"{name}: expected numbers of planes >= 0, got {widths}")
    if not 0 < sum(widths) < MOST_FEATURES:
        raise ValueError(f"{name}: expected at least one plane, below 2**31, got {widths}")
    return widths
