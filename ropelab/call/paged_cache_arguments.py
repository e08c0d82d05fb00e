"""This file gathers the arguments of a rotation that also writes into a paged cache."""

from typing import NamedTuple

import torch

from ropelab.call.angles import Tables
from ropelab.call.options import Options
from ropelab.kernels.paged_cache import Norm, Scales, Tensors


class PagedCacheCall(NamedTuple):
    """The arguments of `ropelab.rope_and_cache`, with the weights and scales as the kernels take them."""

    tensors: Tensors
    tables: Tables
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
    def numbers(self) -> tuple[float, float]:
        """eps and the offset of the weights."""
        return (0.0, 0.0) if self.norm is None else self.norm[2:]
