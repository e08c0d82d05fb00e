"""The check that a peer must pass to be timed."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch

import ropelab
from ropelab import reference
from ropelab.bench.peers.peer import Peer, Rotate
from ropelab.bench.workloads import Buffers, Workload
from ropelab.layout import pairing
from ropelab.layout.seq_format import from_bshd, to_bshd


@dataclass(frozen=True)
class Check:
    """The outcome of a comparison with the reference.

    Attributes:
        what: "result" or "gradient".
        relative_error: ``|y - y_ref| / |y_ref|``, with norms over all elements.
        worst: the largest quotient of the error of an element and its bound. The result is right if it is at most 1.
    """

    what: str
    relative_error: float
    worst: float

    @property
    def status(self) -> str:
        """``"ok"`` or ``"wrong: ..."``. A NaN is wrong."""
        if self.worst <= 1:
            return "ok"
        size = f"relative error {self.relative_error:.3g}, {self.worst:.3g} times its bound"
        return f"wrong: {self.what} has {size}"


def error_bound(x: torch.Tensor, workload: Workload, peer: Peer) -> torch.Tensor:
    """The largest error that the roundings of the peer allow for each element of the rotated ``x``, in float64.

    For a pair ``x0, x1`` and cosines and sines of magnitude at most 1::

        |error| <= (t + a + 2 u + o) (|x0| + |x1|) (1 + higher orders)

    - ``t``: the unit roundoff of the tables.
    - ``a``: the error of the angles in rad. Angles ``position * inv_freq`` in float32 have an error of a few float32
      roundings of the position.
    - ``u``: the unit roundoff of the arithmetic: float32 or wider, or the dtype of q for a narrow peer. A product
      and a sum are rounded, so each term takes two roundings.
    - ``o``: the unit roundoff of the result.

    Features that do not rotate must not change.
    """
    wide = torch.promote_types(workload.dtype, torch.float32)
    narrow = workload.dtype if peer.narrow else wide
    last = workload.first_position + workload.seq_len - 1
    # inv_freq takes a division and a power, 4 roundings together. The product with the position takes one rounding.
    angle = 5 * last * _roundoff(torch.float32) if peer.own_tables else 0.0
    factor = _roundoff(narrow) + angle + 2 * _roundoff(narrow) + _roundoff(workload.dtype)
    x = to_bshd(x.detach().abs().double(), workload.seq_format)
    bound = torch.zeros_like(x)
    r = workload.rotary_dim
    x0, x1 = pairing.pairs(x[..., :r], workload.layout)
    for half in pairing.pairs(bound[..., :r], workload.layout):
        # 1.05 covers the products of two roundoffs. The last term covers results that underflow.
        half.copy_(1.05 * factor * (x0 + x1) + 4 * torch.finfo(workload.dtype).tiny)
    return from_bshd(bound, workload.seq_format)


def check(
    peer: Peer, rotate: Rotate, workload: Workload, buffers: Buffers, exact: Sequence[torch.Tensor] | None = None
) -> Check:
    """Compare the result or, for a backward, the gradient with the float64 definition.

    The cotangents are random. The peer gets copies of the inputs that lie in memory as the inputs do, because it may
    overwrite them.

    Args:
        rotate: the result of ``peer.bind`` for this workload in either direction.
        exact: cos and sin in float64, ``[S, rotary_dim/2]``; by default the tables of the workload's positions.

    Raises:
        TypeError: the shape or the dtype of a result differs from the input.
        Exception: any error of the peer.
    """
    fresh = [x.requires_grad_() for x in _copies(buffers.inputs)]
    results = _outputs(rotate, *fresh)
    sources, what, backward = buffers.inputs, "result", workload.direction == "backward"
    if backward:
        sources, what = buffers.cotangents, "gradient"
        results = torch.autograd.grad(results, fresh, [g.clone() for g in sources])
    squared_error = squared_norm = worst = 0.0
    for y, x in zip(results, sources, strict=True):
        if y.shape != x.shape or y.dtype != x.dtype:
            found, expected = (f"{t.dtype} {tuple(t.shape)}" for t in (y, x))
            raise TypeError(f"{peer.name}: expected a {what} of {expected}, got {found}")
        cos, sin = exact or _exact_tables(workload.first_position, workload.seq_len, workload.rotary_dim, x.device)
        truth = reference.rotate(
            x.detach(), cos, sin, layout=workload.layout, seq_format=workload.seq_format,
            positions=workload.positions(x.device), inverse=backward,
        )  # fmt: skip
        error = (y.detach().double() - truth).abs()
        # 0/0 is a feature that does not rotate and did not change.
        excess = torch.where(error == 0, 0.0, error / error_bound(x, workload, peer)).max().item()
        worst = max(worst, float("inf") if math.isnan(excess) else excess)
        squared_error += error.square().sum().item()
        squared_norm += truth.square().sum().item()
    return Check(what, (squared_error / squared_norm) ** 0.5, worst)


def calls(rotate: Rotate, workload: Workload, sets: list[Buffers]) -> list[Callable[[], object]]:
    """One call for each set of buffers. For a backward, this function runs the forward."""
    if workload.direction == "forward":
        return [partial(_outputs, rotate, *b.inputs) for b in sets]
    return [
        partial(torch.autograd.grad, _outputs(rotate, *b.inputs), b.inputs, b.cotangents, retain_graph=True)
        for b in sets
    ]


def _outputs(rotate: Rotate, q: torch.Tensor, k: torch.Tensor | None = None) -> list[torch.Tensor]:
    return [y for y in rotate(q, k) if y is not None]


@lru_cache(maxsize=1)  # all peers of a workload are checked one after another
def _exact_tables(first: int, seq_len: int, rotary_dim: int, device: torch.device) -> list[torch.Tensor]:
    tables = ropelab.rotary_table(first + seq_len, rotary_dim, dtype=torch.float64, device=device)
    return [t[first:] for t in tables]


def _copies(xs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies with the same strides; copies of views of one tensor are views of one copy."""
    wholes = [x.detach() if x._base is None else x._base for x in xs]
    copied = {id(whole): whole.clone() for whole in wholes}
    return [
        copied[id(whole)].as_strided(x.shape, x.stride(), x.storage_offset())
        for whole, x in zip(wholes, xs, strict=True)
    ]


def _roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2
