"""The rotation of a workload by peers, as most studies time it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import torch

from ropelab.bench import peers, timing
from ropelab.bench.operation import Contender, Operation
from ropelab.bench.packages import NotInstalled
from ropelab.bench.workloads import DIRECTIONS, Buffers, Workload


@dataclass(frozen=True)
class PeerRotation(Operation):
    """A rotation, first the forward, then the backward; the column in_place says whether a peer overwrites its input.

    Attributes:
        work: the workload, in either direction.
        peers: the peers; those that do not offer the workload are left out.
        count: the sets of buffers; 0 for as many as `Workload.cold_count` says.
        exact: cosines and sines for `ropelab.bench.peers.check`.
        bar: the fraction of the copy that the kernel should reach, as a column of records; None for no such column.
    """

    work: Workload
    peers: Sequence[peers.Peer]
    count: int = 0
    exact: Sequence[torch.Tensor] | None = None
    bar: float | None = None

    steps = DIRECTIONS
    step_column = "direction"
    of_contenders = MappingProxyType({"in_place": False})
    checks_each_step = True
    differentiates = True

    @property
    def columns(self):
        return self.work.columns

    @property
    def description(self):
        return self.work.description

    def sets(self, device):
        return self.work.buffers(self.count or self.work.cold_count(timing.cache_bytes()), device)

    def contenders(self, sets, device):
        offering = tuple(peer for peer in self.peers if peer.offers(self.work))
        at_hand, missing = peers.available(offering)
        about = {peer.name: {"in_place": peer.in_place} for peer in offering}
        found = {name: Contender(why, about[name]) for name, why in missing.items()}
        for peer in at_hand:
            run: peers.Rotate | str
            try:
                run = peer.bind(self.work, sets[0].cos, sets[0].sin)
            except NotInstalled as error:  # a package that the peer's package needs
                run = f"not run: {error}"
            except Exception as error:  # the status records the error
                run = timing.failure(error)
            steps = None if isinstance(run, str) else peer.directions
            found[peer.name] = Contender(run, about[peer.name], steps, partial(self._check, peer))
        return found

    def at(self, step: str) -> Workload:
        """The workload in a direction."""
        return replace(self.work, direction=step)

    def _check(self, peer: peers.Peer, run: peers.Rotate, call: Buffers, step: str) -> str:
        return peers.check(peer, run, self.at(step), call, self.exact).status

    def check(self, run, call, step=""):
        raise NotImplementedError("each peer has a check of its own")

    def calls(self, run, sets, step=""):
        return peers.calls(run, self.at(step), sets)

    def to_copy(self, call, step=""):
        """The tensors that the rotation reads: the inputs, or in the backward the cotangents."""
        return call.cotangents if step == "backward" else call.inputs

    def finished(self, frame):
        return frame if self.bar is None else frame.assign(bar=self.bar)
