"""The type of the argument that a rotation turns by: `Angles`, which are tables or frequencies.

autograd, `torch.library` and the kernels take tensors alone. `Tables.tensors` are the two tensors that they get, and
`angles_of` makes the object again from the two tensors.
"""

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch

from ropelab.arguments import check_tensor, tensor
from ropelab.foreign import ARGUMENTS
from ropelab.kernels.rotation import MOST_ROWS


@dataclass(slots=True, eq=False)
class Tables:
    """Cosines and sines, ``[P, W]``, ``[1, P, W]`` or ``[B, P, W]``, a column for each pair of features or feature."""

    cos: torch.Tensor
    sin: torch.Tensor

    table_free: ClassVar[bool] = False
    name: ClassVar[str] = "cos"

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``(cos, sin)``, for functions that take only tensors."""
        return self.cos, self.sin

    @property
    def named(self) -> dict[str, torch.Tensor | None]:
        """The name of the argument -> the tensor, as `tensors`."""
        return {"cos": self.cos, "sin": self.sin}

    @property
    def columns(self) -> int:
        """W, the number of columns of a table."""
        return self.cos.shape[-1]

    @property
    def position_count(self) -> int:
        """The number of positions, from 0 on, that the tables serve: the number of rows, and at most 2**31 - 1."""
        return min(self.cos.shape[-2], MOST_ROWS)

    @property
    def for_kernels(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The two arguments of a kernel."""
        return self.cos, self.sin

    def key(self) -> tuple | None:
        """The properties that the checks and the launch depend on, without the number of rows, which every call checks.

        Returns:
            None where ``cos`` and ``sin`` differ in shape.
        """
        cos, sin = self.cos, self.sin
        shape = cos.shape
        if shape != sin.shape:
            return None
        return (
            type(cos), type(sin),
            shape[-1], None if len(shape) == 2 else shape[:-2], cos.stride(), cos.dtype, cos.device,
            sin.stride(), sin.dtype, sin.device,
        )  # fmt: skip


@dataclass(slots=True, eq=False)
class Frequencies:
    """Frequencies from which the kernel computes cosines and sines, int64 ``[R/2, 3]``.

    `ropelab.angles.table_free` describes the three numbers.
    """

    numbers: torch.Tensor

    table_free: ClassVar[bool] = True
    name: ClassVar[str] = "frequencies"

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """``(numbers, None)``, for functions that take only tensors."""
        return self.numbers, None

    @property
    def named(self) -> dict[str, torch.Tensor | None]:
        """The name of the argument -> the tensor, as `tensors`."""
        return {"frequencies": self.numbers, "sin": None}

    @property
    def columns(self) -> int:
        """R/2, the number of pairs."""
        return self.numbers.shape[0]

    @property
    def position_count(self) -> int:
        """The number of positions, from 0 on, that frequencies serve: all positions that int32 holds."""
        return 2**31

    @property
    def for_kernels(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The two arguments of a kernel, which reads the frequencies from both."""
        return self.numbers, self.numbers

    def key(self) -> tuple | None:
        """The properties that the checks and the launch depend on."""
        x = self.numbers
        return type(x), x.shape, x.stride(), x.dtype, x.device


Angles: TypeAlias = Tables | Frequencies


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
        return Tables(cos, sin) if type(cos) is type(sin) is torch.Tensor else given_tables(cos, sin)
    if cos is not None or sin is not None:
        raise ValueError("frequencies: expected no frequencies beside cos and sin, got both")
    hint = ""
    if isinstance(frequencies, torch.Tensor) and frequencies.dtype != torch.int64:
        foreign = "freqs_cis" if frequencies.is_complex() else "inv_freq"
        hint = f" (for {foreign} pass {ARGUMENTS[foreign][0]})"
    check_tensor("frequencies", frequencies, (2,), "[rotary_dim/2, 3]", (torch.int64,), hint)
    return Frequencies(frequencies)


def given_tables(cos: torch.Tensor | None, sin: torch.Tensor | None) -> Tables:
    """The tables that a caller gave.

    Raises:
        TypeError: an argument is missing or is not a tensor.
        ValueError: a tensor is not dense.
    """
    if not isinstance(cos, torch.Tensor):
        cos = tensor("cos", cos)
    if not isinstance(sin, torch.Tensor):
        sin = tensor("sin", sin)
    return Tables(cos, sin)


def angles_of(first: torch.Tensor, second: torch.Tensor | None) -> Angles:
    """The angles whose `Tables.tensors` are ``first`` and ``second``."""
    return Frequencies(first) if second is None else Tables(first, second)
