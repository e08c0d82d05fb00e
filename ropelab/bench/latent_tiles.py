"""Time the kernels of latent attention with the chosen tile and with other tiles.

`tile_of.latent` rests on this sweep.
"""

from collections.abc import Callable, Sequence
from functools import partial

import pandas as pd
import torch

from ropelab.bench import cells
from ropelab.bench.latent_attention import Latent
from ropelab.bench.operation import sweep
from ropelab.kernels import Rotation, latent_triton, tile_of
from ropelab.kernels.run import run
from ropelab.kernels.tensors import LatentGradients, LatentTensors, TailTensors
from ropelab.kernels.tiles import Tile

SIZES = ((128, 4096), (16, 4096), (16, 16384))
"""The numbers of heads and of tokens."""
STEPS = {"forward": "k and v", "backward": "k and v", "turn_tail": "q"}
"""The functions of `latent_triton` -> the part of the heads that they serve."""
FIELDS = dict.fromkeys(("block_tokens", "block_heads", "num_warps"), 0)
"""The attributes of tiles in a record."""
_TENSORS = {"forward": LatentTensors, "backward": LatentGradients, "turn_tail": TailTensors}


def latent_tiles(*, smoke: bool = False) -> pd.DataFrame:
    """Time each kernel with tiles of one token and of several, of fewer and more heads, and of fewer and more warps.

    Columns: the columns of `Latent`, step, block_tokens, block_heads, num_warps, chosen, status, median_us, q20_us,
        q80_us, samples, fraction_of_copy.
    """
    cases = [
        (Latent("sbhd", heads=heads, tokens=64 if smoke else tokens, part=part), step)
        for heads, tokens in SIZES for step, part in STEPS.items()
    ]  # fmt: skip
    return cells.table(
        cases[-1:] if smoke else cases, lambda case: _sweep(*case, rounds=3 if smoke else 10),
        lambda case: f"{case[1]}, {case[0].heads} {case[0].tokens}",
    )  # fmt: skip


def candidate_tiles(heads: int, chosen: Tile) -> list[Tile]:
    """The chosen tile first, and tiles of half, the same and twice as many heads, tokens and warps."""
    found = [chosen]
    for tokens in (1, 2, 4):
        for block_heads in (chosen.block_heads // 2, chosen.block_heads, 2 * chosen.block_heads):
            for warps in (chosen.num_warps // 2, chosen.num_warps, 2 * chosen.num_warps):
                tile = Tile(tokens, block_heads, warps, chosen.innermost)
                if 0 < block_heads <= 2 * heads and warps and tile not in found:
                    found.append(tile)
    return found


def _sweep(case: Latent, step: str, rounds: int) -> pd.DataFrame:
    draw = case.normal("cuda")
    sets = [_tensors(case, step, draw) for _ in range(case.count)]
    widest = case.rotary_dim if step == "turn_tail" else max(case.nope_dim, case.rotary_dim, case.value_dim)
    chosen = tile_of.latent(widest, case.heads, case.tokens, itemsize=case.dtype.itemsize)
    copied = [[case.must_move(step, draw)] for _ in sets]
    return sweep(
        candidate_tiles(case.heads, chosen), chosen, partial(_calls, case, step, sets), FIELDS, copied,
        case.sizes | {"step": step}, rounds=rounds,
    )  # fmt: skip


def _tensors(case: Latent, step: str, draw: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that ``step`` reads, ``[1, S, ...]``; turn_tail overwrites them."""
    given = case.cotangents(draw) if step == "backward" else case.inputs(draw)
    return [x.transpose(0, 1) for x in given]


def _calls(case: Latent, step: str, sets: Sequence[Sequence[torch.Tensor]], tile: Tile) -> list[Callable[[], object]]:
    """One call for each set; the results of a forward or backward are new tensors."""
    cos, sin = case.tables("cuda")
    transposed = step == "backward"
    rotation = Rotation(
        case.rotary_dim, case.nope_dim, interleaved=not transposed, out_interleaved=transposed, transpose=transposed
    )
    widths = {"forward": (case.nope_dim + case.rotary_dim, case.value_dim), "turn_tail": (),
              "backward": (case.nope_dim + case.value_dim, case.rotary_dim)}[step]  # fmt: skip
    heads = (case.heads, 1 if transposed else case.heads)

    def call(given):
        made = [given[0].new_empty(1, case.tokens, h, width) for h, width in zip(heads, widths, strict=False)]
        run(getattr(latent_triton, f"plan_{step}"), _TENSORS[step](*given, *made, cos, sin, None), rotation, tile)
        return made

    return [partial(call, given) for given in sets]
