"""Measure the cost of cosines and sines that the kernel computes, and their error."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import pandas as pd
import torch

from ropelab import apply_rope, rotary_frequencies
from ropelab.angles.frequencies import inverse_frequencies
from ropelab.angles.table_free import fixed_point
from ropelab.bench.exact_waves import exact_waves, ulps
from ropelab.bench.operation import table
from ropelab.bench.peers import BY_NAME, Peer
from ropelab.bench.rotation import PeerRotation
from ropelab.bench.workloads import DENSE_CELLS, Workload
from ropelab.layout.pairing import LAYOUTS

TABLE_FREE = "ropelab, table-free"
LAST = 2**22
"""`table_free_error` looks at the positions below this number."""

_BASE = 500_000.0
_CHUNK = 2**17


def _bind(workload: Workload, cos: torch.Tensor, sin: torch.Tensor) -> Callable:
    options = {
        "frequencies": rotary_frequencies(workload.rotary_dim, device=cos.device),
        "offsets": workload.first_position, "layout": workload.layout, "seq_format": workload.seq_format,
    }  # fmt: skip
    return lambda q, k: apply_rope(q, k, **options)


_CONTENDERS = Peer(TABLE_FREE, _bind), BY_NAME["ropelab"]


def table_free(*, smoke: bool = False) -> pd.DataFrame:
    """Time the kernel with and without tables. Columns: those of `PeerRotation`."""
    cells = {cell.workload.name: cell.workload for cell in DENSE_CELLS}
    names = ("4x4096 32/8 128", "1x4096 32/8 128", "1x4096 32/8 64", "1x4096 16/1 256")
    shapes = [cells[name] for name in names]
    shapes.append(replace(shapes[0], name="1x65536 32/8 128", batch=1, seq_len=65536))
    shapes.append(replace(shapes[0], seq_format="bhsd"))
    shapes = [replace(shape, layout=layout) for shape in (shapes[1:2] if smoke else shapes) for layout in LAYOUTS]
    return table([PeerRotation(shape, _CONTENDERS) for shape in shapes], rounds=3 if smoke else 10)


def table_free_error(*, smoke: bool = False, device: str = "cuda") -> pd.DataFrame:
    """Measure the largest errors of the kernel's cosines and sines in each octave of positions, for 128 features.

    Columns: base; first and last, the positions of the octave; values, the number of cosines, equal to the number of
        sines; cos_ulps and sin_ulps, the largest errors in units in the last place of float32. The reference
        is the cosine and the sine of the exact product of position and frequency.
    """
    theta = inverse_frequencies(128, _BASE)
    frequencies = fixed_point(theta, device=device)
    rows = []
    for first, end in _octaves(2**12 if smoke else LAST):
        worst = {"cos_ulps": 0.0, "sin_ulps": 0.0}
        for start in range(first, end, _CHUNK):
            positions = torch.arange(start, min(end, start + _CHUNK), device=device)
            for name, exact, found in zip(worst, exact_waves(positions, theta), kernel_waves(positions, frequencies),
                                          strict=True):  # fmt: skip
                worst[name] = max(worst[name], ulps(found, exact))
        rows.append({"base": _BASE, "first": first, "last": end - 1, "values": (end - first) * len(theta), **worst})
    return pd.DataFrame(rows)


def _octaves(last: int) -> Iterator[tuple[int, int]]:
    yield 0, 2
    yield from ((2**i, 2 ** (i + 1)) for i in range(1, math.ceil(math.log2(last))))


def kernel_waves(positions: torch.Tensor, frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's cosines and sines, float32 ``[P, R/2]``: the pair (1, 0) rotates to (cos, sin)."""
    pairs = len(frequencies)
    unit = torch.cat((torch.ones(pairs), torch.zeros(pairs))).to(positions.device)
    y = apply_rope(unit.expand(1, len(positions), 1, 2 * pairs), frequencies=frequencies, positions=positions)
    return y[0, :, 0, :pairs], y[0, :, 0, pairs:]
