"""The type of the argument that a rotation turns by: `Angles`, which are tables or frequencies."""

from typing import NamedTuple

import torch

from ropelab.arguments import check_tensor, tensor
from ropelab.foreign import ARGUMENTS
from ropelab.kernels.rotation import MOST_ROWS


class Angles(NamedTuple):
    """Cosines and sines, or frequencies from which the kernel computes them.

    Attributes:
        cos: ``[P, W]``, ``[1, P, W]`` or ``[B, P, W]``, a column for each pair of features or feature; or int64
            ``[R/2, 3]``, the frequencies that `ropelab.angles.table_free` describes.
        sin: as ``cos``; None beside frequencies.
    """

    cos: torch.Tensor
    sin: torch.Tensor | None

    @property
    def table_free(self) -> bool:
        """Whether these are frequencies."""
        return self.sin is None

    @property
    def name(self) -> str:
        """The name of the first argument."""
        return "frequencies" if self.sin is None else "cos"

    @property
    def named(self) -> dict[str, torch.Tensor | None]:
        """The name of the argument -> the tensor."""
        return {self.name: self.cos, "sin": self.sin}

    @property
    def columns(self) -> int:
        """W, the number of columns of a table; R/2, the number of pairs, of frequencies."""
        return self.cos.shape[0 if self.sin is None else -1]

    @property
    def position_count(self) -> int:
        """The number of positions, from 0 on: the rows of tables, at most 2**31 - 1, or all that int32 holds."""
        return 2**31 if self.sin is None else min(self.cos.shape[-2], MOST_ROWS)

    @property
    def for_kernels(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The two arguments of a kernel, which reads frequencies from both."""
        return self.cos, self.cos if self.sin is None else self.sin

    def key(self) -> tuple | None:
        """The properties that the checks and the launch depend on, without the number of rows, which every call checks.

        Returns:
            None where ``cos`` and ``sin`` differ in shape.
        """
        cos, sin = self.for_kernels
        shape = cos.shape
        if shape != sin.shape:
            return None
        kept = shape if self.sin is None else (shape[-1], None if len(shape) == 2 else shape[:-2])
        return self.sin is None, kept, *[(type(x), x.stride(), x.dtype, x.device) for x in (cos, sin)]


def given_angles(cos: torch.Tensor | None, sin: torch.Tensor | None, frequencies: torch.Tensor | None) -> Angles:
    """The angles that a caller gave: ``cos`` and ``sin``, or ``frequencies``.

    Raises:
        TypeError: an argument is missing or is not a tensor, or the frequencies are not int64.
        ValueError: the caller gave frequencies beside tables, the frequencies do not have two axes, or a tensor is not
            dense.
    """
    if frequencies is None:
        if cos is None and sin is None:
            expected = "cos and sin, as from rotary_table, or frequencies, as from rotary_frequencies"
            raise TypeError(f"cos: expected {expected}, got none of them")
        return given_tables(cos, sin)
    if cos is not None or sin is not None:
        raise ValueError("frequencies: expected no frequencies beside cos and sin, got both")
    hint = ""
    if isinstance(frequencies, torch.Tensor) and frequencies.dtype != torch.int64:
        foreign = "freqs_cis" if frequencies.is_complex() else "inv_freq"
        hint = f" (for {foreign} pass {ARGUMENTS[foreign][0]})"
    check_tensor("frequencies", frequencies, (2,), "[rotary_dim/2, 3]", (torch.int64,), hint)
    return Angles(frequencies, None)


def given_tables(cos: torch.Tensor | None, sin: torch.Tensor | None) -> Angles:
    """The tables that a caller gave.

    Raises:
        TypeError: an argument is missing or is not a tensor.
        ValueError: a tensor is not dense.
    """
    if not isinstance(cos, torch.Tensor):
        cos = tensor("cos", cos)
    if not isinstance(sin, torch.Tensor):
        sin = tensor("sin", sin)
    return Angles(cos, sin)
