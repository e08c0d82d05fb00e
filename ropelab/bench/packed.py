"""Measure packed sequences: the same tokens cut into few or many sequences, alike or of two lengths."""

from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType

import pandas as pd
import torch

import ropelab
from ropelab.angles.frequencies import inverse_frequencies
from ropelab.bench import peers, varlen_models
from ropelab.bench.operation import table
from ropelab.bench.rotation import PeerRotation
from ropelab.bench.workloads import Workload
from ropelab.layout import pairing
from ropelab.layout.pairing import LAYOUTS

_SKEWED = "one of 34,336 and 2,400 of 13"
_LEGACY = "legacy grid"
_PACKAGES = (peers.TRANSFORMER_ENGINE_OLD_GRID, peers.TRANSFORMER_ENGINE)


def packings() -> list[Workload]:
    """65,536 tokens in 1 to 2,401 sequences of nearly equal length, or in a long sequence and 2,400 of 13 tokens."""
    shape = Workload("", 1, 65536, 32, 0, 128, 128, seq_format="thd", lengths=(65536,))
    found = []
    for n in (1, 8, 128, 1024, 2401):
        short, longer = divmod(shape.seq_len, n)
        found.append(replace(shape, name=f"n={n}", lengths=(short + 1,) * longer + (short,) * (n - longer)))
    return [*found, replace(shape, name=_SKEWED, lengths=(34336,) + (13,) * 2400)]


def packed(*, smoke: bool = False) -> pd.DataFrame:
    """Time every packing in both layouts and directions.

    Columns: case, n_seqs, longest, tokens, heads, head_dim, dtype, layout, direction, bytes, freqs_len, and those
        of `operation.compare`. freqs_len is the number of rows of the table of angles, for the legacy grid and
        TransformerEngine, because their times depend on it.
    """
    cases = [replace(packings()[2], seq_len=8192, lengths=(64,) * 128)] if smoke else packings()
    rotations = [Packed(replace(case, layout=layout), contenders()) for case in cases for layout in LAYOUTS]
    return table(rotations, rounds=3 if smoke else 6)


@dataclass(frozen=True)
class Packed(PeerRotation):
    """One set of buffers is enough, because x alone is nine times as large as the cache."""

    count: int = 1

    of_contenders = MappingProxyType({})

    @property
    def columns(self):
        work, lengths = self.work.columns, self.work.lengths
        found = {"case": work["cell"], "n_seqs": len(lengths), "longest": max(lengths), "tokens": work["seq_len"]}
        kept = ("head_dim", "dtype", "layout", "direction", "bytes")
        return found | {"heads": work["q_heads"]} | {name: work[name] for name in kept}

    def finished(self, frame):
        rows = {_LEGACY: _freqs_len(self.work)} | {peer.name: self.work.seq_len for peer in _PACKAGES}
        return frame.assign(freqs_len=frame.contender.map(rows))


def contenders() -> list[peers.Peer]:
    """Ropelab with positions computed once or in every call, flash-attn, TransformerEngine, and models of its grids."""
    model = partial(peers.Peer, own_tables=True)
    return [
        peers.BY_NAME["ropelab"],
        peers.Peer("ropelab with positions", _with_positions, directions=("forward",)),
        peers.BY_NAME["flash_attn"],
        *_PACKAGES,
        model("token-linear, reads twice", partial(_model, kernel=varlen_models.token_linear)),
        model(_LEGACY, partial(_model, kernel=varlen_models.legacy_grid)),
    ]


def _with_positions(workload: Workload, cos: torch.Tensor, sin: torch.Tensor) -> peers.Rotate:
    """Ropelab with positions that every call computes."""
    cu_seqlens = workload.cu_seqlens(cos.device)
    options = {"cos": cos, "sin": sin, "layout": workload.layout, "seq_format": "thd"}

    def rotate(q, k):
        positions = ropelab.PackedSequences(cu_seqlens, workload.seq_len).positions
        return ropelab.apply_rope(q, **options, positions=positions), None

    return rotate


def _model(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, kernel) -> peers.Rotate:
    inverse_frequency = inverse_frequencies(workload.rotary_dim, 10000.0).float()
    angles = torch.outer(torch.arange(_freqs_len(workload)), inverse_frequency)
    angles = pairing.join(angles, angles, workload.layout).to(cos.device)
    where = {"cu_seqlens": workload.cu_seqlens(cos.device), "interleaved": workload.layout == "interleaved"}
    return peers.differentiable(lambda x, inverse: kernel(x, angles, inverse=inverse, **where))


def _freqs_len(workload: Workload) -> int:
    """The number of all tokens, as in TransformerEngine#3057; in the skewed case the length of the longest sequence."""
    return max(workload.lengths) if workload.name == _SKEWED else workload.seq_len
