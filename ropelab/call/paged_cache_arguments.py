"""This file gathers the arguments of a rotation that also writes into a paged cache."""

from typing import NamedTuple

import torch

from ropelab.call.angles import Angles
from ropelab.call.options import Options
from ropelab.kernels.paged_cache import Norm, Scales, Tensors


class PagedCacheCall(NamedTuple):
    """The arguments of `ropelab.rope_and_cache`, with the weights and scales as the kernels take them."""

    tensors: Tensors
    angles: Angles
    positions: torch.Tensor | None
    first_position: int
    options: Options
    norm: Norm | None
    scales: Scales

    @property
    def weights(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The weights of q and k."""
        return (None, None) if self.norm is None else self.norm[:2]

    @property
    def numbers(self) -> tuple[float, float, bool]:
        """eps, the offset of the weights, and whether the norm comes before the rotation."""
        return (0.0, 0.0, True) if self.norm is None else self.norm[2:]
