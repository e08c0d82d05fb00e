"""Put other implementations of the rotation behind one signature; each must pass a check to be timed.

``bind(workload, cos, sin)`` of a peer converts the float32 tables ``[S, rotary_dim/2]`` to the peer's form. The
conversion is not timed, because models build their tables once. ``bind`` returns ``rotate(q, k) -> (q', k')``, a
differentiable function of tensors in the ``seq_format`` of the workload. ``k`` and ``k'`` are None if the workload has
no k. A peer calls the public function of its package if there is one, and passes transposed views, which cost nothing.
"""

from dataclasses import replace
from functools import partial

from ropelab.bench import packages
from ropelab.bench.peers import (
    flash_attention,
    flashinfer,
    formulas,
    liger,
    ours,
    quack,
    rotary_embedding_torch,
    sglang_kernel,
    te_library,
    torchembed,
    transformer_engine,
    transformers,
    vllm,
)
from ropelab.bench.peers.checking import Check, calls, check, error_bound
from ropelab.bench.peers.peer import BOTH, Bind, Pair, Peer, Rotate, differentiable

_FP32, _OF_Q, _OWN = "float32", "rounded to the dtype of q", "its own, float32 angles"
_FORWARD = {"directions": ("forward",)}
_quack = partial(Peer, tables=_FP32, package=quack.PACKAGE)


def _transformer_engine(version: str) -> Peer:
    name = f"TransformerEngine {version.rpartition('.')[0]}"
    bind = partial(transformer_engine.bind, version=version)
    return Peer(
        name, bind, _OWN, package=te_library.DISTRIBUTION, version=version, own_tables=True, own_host_time=False
    )


TRANSFORMER_ENGINE_OLD_GRID = _transformer_engine("2.18.0")
"""The last version whose only grid for packed sequences has a block for every row of freqs and every sequence."""
TRANSFORMER_ENGINE = _transformer_engine("2.20.2")
"""A version with the grid of TransformerEngine#3057 beside the old grid."""

PEERS: tuple[Peer, ...] = (
    Peer("ropelab", ours.bind, _FP32),
    Peer("ropelab in place", partial(ours.bind, inplace=True), _FP32, in_place=True, **_FORWARD),
    Peer("hf_eager", formulas.hugging_face, _OF_Q, narrow=True),
    Peer("hf_compiled", partial(formulas.hugging_face, compiled=True), _OF_Q, narrow=True),
    Peer("complex", formulas.complex_product, "float32, as complex64", layouts=("interleaved",)),
    Peer("torchembed 0.3.0", partial(torchembed.bind, version="0.3.0"), _FP32, layouts=("split_half",),
         package="torchembed", version="0.3.0"),
    Peer("torchembed 0.3.2", partial(torchembed.bind, version="0.3.2"), _FP32,
         package="torchembed", version="0.3.2"),
    Peer("liger", liger.bind, _OF_Q, layouts=("split_half",), package="liger-kernel", narrow=True, in_place=True),
    Peer("flash_attn", flash_attention.bind, _FP32, package="flash-attn"),
    _quack("quack", quack.bind),
    _quack("quack in place", partial(quack.bind, inplace=True), in_place=True, **_FORWARD),
    _quack("quack qkv", quack.bind_qkv, storages=("qkv",), in_place=True, **_FORWARD),
    _quack("quack kv", quack.bind_kv, storages=("qkv",), in_place=True, **_FORWARD),
    Peer("transformers", transformers.bind, _OF_Q, package="transformers", narrow=True),
    Peer("rotary-embedding-torch", rotary_embedding_torch.bind, _OWN, layouts=("interleaved",),
         package="rotary-embedding-torch", own_tables=True, narrow=True),
    TRANSFORMER_ENGINE,
    Peer("flashinfer", flashinfer.bind, _FP32, package=flashinfer.PACKAGE, **_FORWARD),
    Peer("flashinfer 0.6.13", partial(flashinfer.bind, version="0.6.13"), _FP32,
         package=flashinfer.PACKAGE, version="0.6.13", **_FORWARD),
    Peer("vllm", vllm.bind, _OF_Q, package=vllm.PACKAGE, narrow=True, in_place=True, **_FORWARD),
    Peer("sglang", sglang_kernel.bind, _OF_Q, package=sglang_kernel.PACKAGE, narrow=True, in_place=True, **_FORWARD),
)  # fmt: skip
"""The peers of the dense benchmark."""

TORCHEMBED_API = Peer(
    "torchembed API", partial(torchembed.bind_module, version="0.3.2"), _OWN,
    layouts=("split_half",),
    package="torchembed", version="0.3.2", own_tables=True,
)  # fmt: skip

__all__ = [
    "BOTH", "PEERS", "TORCHEMBED_API", "TRANSFORMER_ENGINE", "TRANSFORMER_ENGINE_OLD_GRID", "Bind", "Check", "Pair",
    "Peer", "Rotate", "available", "calls", "check", "differentiable", "error_bound",
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
