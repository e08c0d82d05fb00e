"""Put other implementations of the rotation behind one signature; each must pass a check to be timed.

``bind(workload, cos, sin)`` of a peer converts the float32 tables ``[S, rotary_dim/2]`` to the peer's form. The
conversion is not timed, because models build their tables once. ``bind`` returns ``rotate(q, k) -> (q', k')``, a
differentiable function of tensors in the ``seq_format`` of the workload. ``k`` and ``k'`` are None if the workload has
no k. A peer calls the public function of its package if there is one, and passes transposed views, which cost nothing.
"""

from dataclasses import replace
from functools import partial
from importlib import import_module

from ropelab.bench import packages
from ropelab.bench.peer_table import ENTRIES, Entry
from ropelab.bench.peers.checking import Check, calls, check, error_bound
from ropelab.bench.peers.peer import BOTH, Bind, Pair, Peer, Rotate, differentiable


def _peer(entry: Entry) -> Peer:
    module, _, function = entry.bind.partition(".")
    bind = getattr(import_module(f"{__name__}.{module}"), function)
    return Peer(entry.name, partial(bind, **entry.options) if entry.options else bind, **entry.about)


BY_NAME = {entry.name: _peer(entry) for entry in ENTRIES}


def of(study: str) -> tuple[Peer, ...]:
    """The peers whose entries name the study."""
    return tuple(BY_NAME[entry.name] for entry in ENTRIES if study in entry.studies)


PEERS = of("dense")
"""The peers of the dense benchmark."""
TRANSFORMER_ENGINE_OLD_GRID = BY_NAME["TransformerEngine 2.18"]
"""The last version whose only grid for packed sequences has a block for every row of freqs and every sequence."""
TRANSFORMER_ENGINE = BY_NAME["TransformerEngine 2.20"]
"""A version with the grid of TransformerEngine#3057 beside the old grid."""
TORCHEMBED_API = BY_NAME["torchembed API"]

__all__ = [
    "BOTH", "BY_NAME", "PEERS", "TORCHEMBED_API", "TRANSFORMER_ENGINE", "TRANSFORMER_ENGINE_OLD_GRID", "Bind", "Check",
    "Pair", "Peer", "Rotate", "available", "calls", "check", "differentiable", "error_bound", "of",
]  # fmt: skip


def available(peers: tuple[Peer, ...] = PEERS) -> tuple[list[Peer], dict[str, str]]:
    """The peers that can run here, each bound to a version; and the name of each other peer -> its status."""
    found, missing = [], {}
    for peer in peers:
        try:
            found.append(_with_version(peer))
        except packages.NotInstalled as error:
            missing[peer.name] = f"not run: {error}"
    return found, missing


def _with_version(peer: Peer) -> Peer:
    if peer.package is None:
        return peer
    version, _ = packages.locate(peer.package, peer.version)
    bind = peer.bind if peer.version else partial(peer.bind, version=version)
    return replace(peer, bind=bind, version=version)
