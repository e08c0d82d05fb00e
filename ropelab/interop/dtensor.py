"""`apply_rope` and `apply_qk_norm_rope` for DTensors: how each placement of q and k is rotated.

Each rank rotates its own part of q and k, and no rank communicates in the forward. Along each axis of the device mesh,

- the batch and the heads may be sharded, because sequences and heads are independent of each other
- the sequence may be sharded, because a token needs its own position only: every rank gets the positions of its tokens
- the features may not be sharded, because two features of different ranks would form a pair

The rank's part of positions, offsets and tables follows from the placement of q. In the backward the gradients of the
weights of a norm, and of tables, are sums over the ranks that share them.

`ropelab.rope_and_cache` and `ropelab.mla_rope_and_cache` write into the cache of one rank and take no DTensors: call
them with ``q.to_local()`` and the rank's own cache, slots and positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard

from ropelab import qk_norm, rope
from ropelab.arguments import POSITION_DTYPES, check_tensor, flag, integer, shown
from ropelab.autograd.rotation import needs_autograd
from ropelab.call.angles import Angles, given_angles
from ropelab.call.checks import check_inplace_autograd, check_layouts_alike, check_memory, check_writable
from ropelab.call.dispatcher import copy_over
from ropelab.call.traced import one_node
from ropelab.call.where import Options, check_one_start
from ropelab.kernels import NO_POSITION
from ropelab.layout.seq_format import SEQ_AXIS, SeqFormat, check_seq_format, rank

__all__ = ["apply_qk_norm_rope", "apply_rope"]


@one_node
def apply_rope(
    q: DTensor,
    k: DTensor | None = None,
    *,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    frequencies: torch.Tensor | None = None,
    seq_format: SeqFormat = "bshd",
    positions: torch.Tensor | None = None,
    offsets: int | torch.Tensor = 0,
    inplace: bool = False,
    **options: Any,
) -> DTensor | tuple[DTensor, DTensor]:
    """`ropelab.apply_rope` for DTensors of any sharding along the batch, the sequence and the heads.

    Args:
        q: as for `ropelab.apply_rope`, each placement ``Replicate()``, or ``Shard`` along the batch, the sequence or
            the heads. The shards may be uneven.
        k: on the mesh of q, with the placements of q; where q is sharded along the heads, k may be replicated (MQA).
        cos, sin, frequencies, positions, offsets: for the whole q, as for `ropelab.apply_rope`. A tensor that is no
            DTensor is the same on all ranks. A DTensor may have any placement.
        seq_format, inplace, options: as for `ropelab.apply_rope`.

    Returns:
        The rotated q, or q and k, with the shapes and placements of the inputs. The results have the same bits as in
        one process.

    Raises:
        TypeError: q or k is not a DTensor, or as `ropelab.apply_rope`.
        ValueError: a placement cannot be rotated, q and k are placed apart, or as `ropelab.apply_rope`.
    """
    sharding, inplace = _Sharding(q, k, seq_format), flag("inplace", inplace)
    angles = given_angles(cos, sin, frequencies)
    options |= {name: sharding.local_table(name, x) for name, x in angles.named.items() if x is not None}
    options |= sharding.local_positions(positions, offsets)
    local = rope.apply_rope(q.to_local(), None if k is None else k.to_local(), seq_format=seq_format, **options)
    ys = sharding.whole((local,) if isinstance(local, torch.Tensor) else local)
    if inplace:
        layout = options.get("layout", "split_half")
        check_layouts_alike(Options(layout, options.get("out_layout") or layout, seq_format, None, False, None, False))
        _check_overwritable(q, k, angles)
        copy_over(sharding.xs, ys)
        ys = sharding.xs
    return ys[0] if k is None else (ys[0], ys[1])


@one_node
def apply_qk_norm_rope(
    q: DTensor,
    k: DTensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    *,
    cos: torch.Tensor,
    sin: torch.Tensor,
    seq_format: SeqFormat = "bshd",
    positions: torch.Tensor | None = None,
    offsets: int | torch.Tensor = 0,
    **options: Any,
) -> tuple[DTensor, DTensor]:
    """`ropelab.apply_qk_norm_rope` for DTensors of any sharding along the batch, the sequence and the heads.

    Args:
        q, k, cos, sin, seq_format, positions, offsets: as for `apply_rope` of this file.
        q_weight, k_weight: ``[D]``; tensors that are the same on all ranks, or DTensors of any placement.
        options: as for `ropelab.apply_qk_norm_rope`.

    Returns:
        The new q and k with the shapes and placements of the inputs. The gradient of a weight sums over all ranks that
        hold a part of its tensor.

    Raises:
        TypeError, ValueError: as `apply_rope` of this file, or as `ropelab.apply_qk_norm_rope`.
    """
    _check_dtensor("k", k)
    sharding = _Sharding(q, k, seq_format)
    options |= sharding.local_positions(positions, offsets)
    ys = qk_norm.apply_qk_norm_rope(
        q.to_local(), k.to_local(),
        sharding.local_weight("q_weight", q_weight, q), sharding.local_weight("k_weight", k_weight, k),
        cos=sharding.local_table("cos", cos), sin=sharding.local_table("sin", sin), seq_format=seq_format, **options,
    )  # fmt: skip
    q_out, k_out = sharding.whole(ys)
    return q_out, k_out


def _check_overwritable(q: DTensor, k: DTensor | None, angles: Angles) -> None:
    """Raise ValueError unless results may be written over q and k."""
    if torch.compiler.is_compiling():  # compilers cannot follow these checks; PyTorch has its own checks
        return
    check_memory(q.to_local(), None if k is None else k.to_local())
    check_writable(("q", "k"), (q, k))
    if needs_autograd(q, k, *angles):
        check_inplace_autograd(q, k, angles)


def _check_dtensor(name: str, x: object) -> None:
    """Raise TypeError unless the argument ``name`` is a DTensor."""
    if not isinstance(x, DTensor):
        raise TypeError(f"{name}: expected a DTensor, got {shown(x)}")


def _check_tensor(name: str, x: object) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {shown(x)}")


def grad_placements(placements: Sequence[Placement], x: DTensor) -> list[Placement]:
    """The placements of a gradient that sums over the parts of ``x``."""
    pairs = zip(placements, x.placements, strict=True)
    return [Partial() if isinstance(of_x, Shard) and isinstance(own, Replicate) else own for own, of_x in pairs]


class _Sharding:
    """The placements of q and k, and what they leave of every other argument on this rank."""

    def __init__(self, q: DTensor, k: DTensor | None, seq_format: str):
        check_seq_format(seq_format)
        self.seq_format = seq_format
        self.xs = [q] if k is None else [q, k]
        for name, x in zip("qk", self.xs, strict=False):
            _check_dtensor(name, x)
            if x.ndim != rank(seq_format):
                raise ValueError(
                    f"{name}: expected {seq_format} of rank {rank(seq_format)}, got shape {tuple(x.shape)}"
                )
        self.mesh: DeviceMesh = q.device_mesh
        self.seq, self.batch, self.heads = SEQ_AXIS[seq_format], seq_format.find("b"), seq_format.find("h")
        self.tokens = q.shape[self.seq]
        for name, x in zip("qk", self.xs, strict=False):
            for placement in x.placements:
                if not (isinstance(placement, Replicate) or self._shards(placement, self.batch, self.seq, self.heads)):
                    raise ValueError(
                        f"{name}: expected Replicate() or Shard along the batch, the sequence or the heads, "
                        f"got {placement} for {seq_format}"
                    )
        if k is not None:
            self._check_key(q, k)

    def _check_key(self, q: DTensor, k: DTensor) -> None:
        if k.device_mesh != q.device_mesh:
            raise ValueError(f"k: expected q's mesh {q.device_mesh}, got {k.device_mesh}")
        for of_q, of_k in zip(q.placements, k.placements, strict=True):
            by_heads = [isinstance(p, Replicate) or self._shards(p, self.heads) for p in (of_q, of_k)]
            if of_q != of_k and not all(by_heads):
                raise ValueError(f"k: expected q's placements {q.placements}, got {k.placements}")

    def _shards(self, placement: Placement, *axes: int) -> bool:
        return isinstance(placement, Shard) and placement.dim in axes

    def whole(self, ys: Sequence[torch.Tensor]) -> list[DTensor]:
        """The DTensors whose parts on this rank are ``ys``."""
        found = []
        for x, y in zip(self.xs, ys, strict=True):
            strides = torch.empty_like(torch.empty_strided(x.shape, x.stride(), device="meta")).stride()
            whole = DTensor.from_local(y, self.mesh, x.placements, run_check=False, shape=x.shape, stride=strides)
            found.append(whole)
        return found

    def local_positions(
        self, positions: torch.Tensor | None, offsets: int | torch.Tensor
    ) -> dict[str, torch.Tensor | int]:
        """The arguments ``positions`` or ``offsets`` of this rank's tokens."""
        check_one_start(positions, offsets)
        if positions is not None:
            check_tensor("positions", positions, (1, 2), "[S], [1, S] or [B, S]", POSITION_DTYPES)
        if isinstance(offsets, torch.Tensor):
            check_tensor("offsets", offsets, (1,), "[B]", POSITION_DTYPES)
        along_sequence = any(self._shards(p, self.seq) for p in self.xs[0].placements)
        if positions is None and along_sequence:
            positions = self._counted(offsets)
        elif positions is None:
            if isinstance(offsets, torch.Tensor):
                offsets = self._local(offsets, self._follow(batch_axis=0))
            return {"offsets": offsets}
        batch_axis = 0 if positions.ndim == 2 and len(positions) > 1 else None
        return {"positions": self._local(positions, self._follow(batch_axis, positions.ndim - 1))}

    def _counted(self, offsets: int | torch.Tensor) -> torch.Tensor:
        """The positions of all tokens that count from ``offsets``."""
        along = torch.arange(self.tokens, device=self.xs[0].device)
        if not isinstance(offsets, torch.Tensor):
            return along + integer("offsets", offsets, at_least=-(2**63), below=2**63 - self.tokens)
        first = offsets.full_tensor() if isinstance(offsets, DTensor) else offsets
        return torch.where(first[:, None] == NO_POSITION, NO_POSITION, first[:, None] + along)

    def local_table(self, name: str, table: torch.Tensor) -> torch.Tensor:
        """This rank's part of a table or of frequencies; the gradient of a table sums over q and k."""
        _check_tensor(name, table)
        placements = self._follow(batch_axis=0 if table.ndim == 3 and len(table) > 1 else None)
        if table.requires_grad and any(x.placements != self.xs[0].placements for x in self.xs):
            raise ValueError(f"{name}: expected q's placements for k where a table has a gradient, got others")
        return self._local(table, placements, grad_placements(placements, self.xs[0]))

    def local_weight(self, name: str, weight: torch.Tensor, x: DTensor) -> torch.Tensor:
        """A weight of the norm of ``x``, whose gradient sums over the parts of ``x``."""
        _check_tensor(name, weight)
        placements: list[Placement] = [Replicate()] * self.mesh.ndim
        return self._local(weight, placements, grad_placements(placements, x))

    def _follow(self, batch_axis: int | None = None, seq_axis: int | None = None) -> list[Placement]:
        """The placements of a tensor with these axes that hold what this rank's part of q needs."""

        def of(placement: Placement) -> Placement:
            if batch_axis is not None and self._shards(placement, self.batch):
                return Shard(batch_axis)
            if seq_axis is not None and self._shards(placement, self.seq):
                return Shard(seq_axis)
            return Replicate()

        return [of(placement) for placement in self.xs[0].placements]

    def _local(
        self, x: torch.Tensor, placements: list[Placement], grad_placements: list[Placement] | None = None
    ) -> torch.Tensor:
        """This rank's part of ``x`` with these placements. A plain tensor is the same on all ranks."""
        if not isinstance(x, DTensor):
            x = DTensor.from_local(x, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        return x.redistribute(self.mesh, placements).to_local(grad_placements=grad_placements)
