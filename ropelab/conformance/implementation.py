"""An implementation: a function under test, with the claims that its author makes about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache
from typing import Any

import torch

from ropelab.angles.frequencies import inverse_frequencies
from ropelab.angles.tables import rotary_table
from ropelab.conformance.case import Case
from ropelab.conformance.surroundings import Surroundings
from ropelab.kernels import NO_POSITION


@dataclass(frozen=True)
class Implementation:
    """A function under test, and the claims that the laws check.

    Attributes:
        function: the function, class or module, as its author wrote it.
        layout: how the function pairs the features that it reads.
        out_layout: how the function pairs the features that it writes.
        seq_format: the order of the axes of the function's tensors.
        reversed: whether the function is declared to rotate by minus the angle.
        in_place: whether the result overwrites the inputs.
        narrow: whether the function rounds its tables and every operation to the dtype of the inputs; otherwise it
            computes in float32 or wider.
        lenient: whether the bounds allow the roundings of ``narrow`` to a function that is not narrow.
        once: whether the function is declared to be differentiable only once.
        base: the base of the frequencies.
        frequencies: the inverse frequencies of a function for one number of features, ``[R/2]``; None for the base's.
        device: the device of all tensors.
        dtype: the dtype of the tensors of most laws.
        state: the memory of the convention from call to call, such as an instance of a module.
        surroundings: the global state that the import of the function left, kept apart from the state of the laws.
    """

    function: Callable[..., Any]
    _: KW_ONLY
    layout: str = "split_half"
    out_layout: str = "split_half"
    seq_format: str = "bshd"
    reversed: bool = False
    in_place: bool = False
    narrow: bool = False
    lenient: bool = False
    once: bool = False
    base: float = 10000.0
    frequencies: torch.Tensor | None = field(default=None, compare=False)
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    state: dict[str, Any] = field(default_factory=dict, compare=False)
    surroundings: Surroundings = field(default_factory=Surroundings, compare=False, repr=False)

    @property
    def rounds_operations(self) -> bool:
        """Whether the bounds allow a rounding to the dtype of the inputs after every operation."""
        return self.narrow or self.lenient

    def format(self, case: Case) -> str:
        """Return the order of the axes in which the function sees the case; packed documents have the order thd."""
        return "thd" if case.lengths is not None else self.seq_format

    def angles(self, positions: torch.Tensor, rotary_dim: int) -> torch.Tensor:
        """Return the angles of positions.

        Args:
            positions: integers ``[...]``.
            rotary_dim: R, the number of features that rotate.

        Returns:
            float64 ``[..., R/2]`` in rad on the CPU, in the standard sense of rotation; 0 where there is no position.
        """
        positions = positions.cpu().double().masked_fill(positions.cpu() == NO_POSITION, 0)
        return positions[..., None] * inverse_frequencies(rotary_dim, self.base)

    def tables(self, case: Case, positions: torch.Tensor | int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines that the caller of the function would pass, times the factor of the case.

        Args:
            case: the call; its inputs determine the dtype.
            positions: integers ``[...]``, or a number P for the positions from 0 to P - 1.

        Returns:
            cos and sin ``[..., R/2]``, in the dtype of the inputs if the function is ``narrow``, else in float32 or
            wider. The caller may overwrite them.
        """
        dtype = case.inputs[0].dtype
        dtype = dtype if self.narrow else torch.promote_types(dtype, torch.float32)
        if isinstance(positions, int):
            cos, sin = _table(positions, case.rotary_dim, self.base, case.factor, dtype, self.device)
            return cos.clone(), sin.clone()
        angles = self.angles(positions, case.rotary_dim)
        cos, sin = ((case.factor * t).to(self.device, dtype) for t in (angles.cos(), angles.sin()))
        return cos, sin


@lru_cache(4)
def _table(
    rows: int, rotary_dim: int, base: float, factor: float, dtype: torch.dtype, device: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin ``[rows, R/2]``, rounded once. They are cached, because a million rows take a while."""
    tables = rotary_table(rows, rotary_dim, base, dtype=torch.float64)
    cos, sin = ((factor * table).to(device, dtype) for table in tables)
    return cos, sin
