"""A peer, and the code that the adapters share."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ropelab.angles.frequencies import inverse_frequencies
from ropelab.bench.workloads import STORAGES, Workload
from ropelab.layout.seq_format import from_bshd, to_bshd

Pair = tuple[torch.Tensor, torch.Tensor | None]
Rotate = Callable[[torch.Tensor, torch.Tensor | None], Pair]
Bind = Callable[[Workload, torch.Tensor, torch.Tensor], Rotate]

BOTH = ("split_half", "interleaved")


@dataclass(frozen=True)
class Peer:
    """An implementation to compare with.

    Attributes:
        name: the name in records.
        bind: the function that returns the rotation: see `ropelab.bench.peers`.
        layouts, directions, storages: what the peer offers of each, as in `Workload`.
        package, version: the package and its version; None for code of this repository.
        narrow: whether the peer rounds intermediate results to the dtype of q, in the forward because its tables have
            this dtype, or in the backward because torch adds the gradients of products in this dtype.
        own_tables: whether the peer builds its own tables, from angles in float32.
        in_place: whether the result overwrites the input or, in the backward, the cotangent.
    """

    name: str
    bind: Bind
    layouts: tuple[str, ...] = BOTH
    directions: tuple[str, ...] = ("forward", "backward")
    storages: tuple[str, ...] = STORAGES
    package: str | None = None
    version: str | None = None
    narrow: bool = False
    own_tables: bool = False
    in_place: bool = False

    def offers(self, workload: Workload) -> bool:
        """Whether the peer offers the layout and the storage of the workload."""
        return workload.layout in self.layouts and workload.storage in self.storages


def to_bhsd(x: torch.Tensor | None, seq_format: str) -> torch.Tensor | None:
    """A view of ``x`` as ``[B, H, S, D]``; `from_bhsd` is the inverse."""
    if x is None or seq_format == "bhsd":
        return x
    return to_bshd(x, seq_format).transpose(1, 2)


def from_bhsd(x: torch.Tensor | None, seq_format: str) -> torch.Tensor | None:
    """The inverse of `to_bhsd`."""
    if x is None or seq_format == "bhsd":
        return x
    return from_bshd(x.transpose(1, 2), seq_format)


def require_full_width(workload: Workload, package: str) -> None:
    """Raise NotImplementedError unless whole heads rotate."""
    if workload.rotary_dim != workload.head_dim:
        raise NotImplementedError(f"{package}: rotates whole heads only")


def require_pair(k: torch.Tensor | None, package: str) -> None:
    """Raise NotImplementedError if the workload has no k."""
    if k is None:
        raise NotImplementedError(f"{package}: rotates q and k together")


def float32_angles(workload: Workload, device: torch.device | str) -> torch.Tensor:
    """The angles of the workload's positions in rad, float32 ``[S, rotary_dim/2]``, each rounded once from float64."""
    positions = torch.arange(workload.seq_len, dtype=torch.float64) + workload.first_position
    return torch.outer(positions, inverse_frequencies(workload.rotary_dim)).to(device, torch.float32)


class _Rotated(torch.autograd.Function):
    """A differentiable ``rotate(x, inverse)``, whose gradient is the inverse rotation."""

    @staticmethod
    def forward(ctx, x, rotate):
        ctx.rotate = rotate
        return rotate(x, False)

    @staticmethod
    def backward(ctx, grad):
        return ctx.rotate(grad, True), None


def differentiable(rotate: Callable[[torch.Tensor, bool], torch.Tensor]) -> Rotate:
    """A differentiable rotation of q and k from a function ``rotate(x, inverse)`` of one tensor."""

    def one(x):
        return None if x is None else _Rotated.apply(x, rotate)

    return lambda q, k: (one(q), one(k))
