"""Time kernels with the chosen tile and with other tiles.

`tile_of.latent` and `tile_of.paged_cache` rest on these sweeps.
"""

from dataclasses import dataclass

import pandas as pd
import torch

from ropelab.bench.cache_operations import EPS, CacheOperation, LatentCache, NormAndCache, Tensors, WholeLatentCache
from ropelab.bench.latent_attention import Latent
from ropelab.bench.operation import Sweep, table
from ropelab.kernels import Norm, Rotation, latent_triton, paged_cache_triton, tile_of
from ropelab.kernels.run import run
from ropelab.kernels.tensors import CacheTensors, LatentGradients, LatentTensors, TailTensors
from ropelab.kernels.tile_of import CacheTile
from ropelab.kernels.tiles import PAIRS_PER_ACCESS, Tile
from ropelab.layout.pairing import LAYOUTS

LATENT_SIZES = ((128, 4096), (16, 4096), (16, 16384))
"""The numbers of heads and of tokens of `latent_tiles`."""
STEPS = {"forward": "k and v", "backward": "k and v", "turn_tail": "q"}
"""The functions of `latent_triton` -> the part of the heads that they serve."""
_TENSORS = {"forward": LatentTensors, "backward": LatentGradients, "turn_tail": TailTensors}


def latent_tiles(*, smoke: bool = False, device: torch.device | str = "cuda") -> pd.DataFrame:
    """Time each kernel of latent attention with tiles of one token and of several, of more heads and of more warps.

    Columns: the columns of `Latent`, step, and those of `Sweep`.
    """
    cases = [
        LatentSweep(Latent("sbhd", heads=heads, tokens=64 if smoke else tokens, part=part), step)
        for heads, tokens in LATENT_SIZES for step, part in STEPS.items()
    ]  # fmt: skip
    return table(cases[-1:] if smoke else cases, rounds=3 if smoke else 10, device=device)


def one_pass_tiles(*, smoke: bool = False, device: torch.device | str = "cuda") -> pd.DataFrame:
    """Time the one launch of `rope_and_cache` with other tiles.

    Columns: the columns of the operation in `ropelab.bench.paged_cache`, and those of `Sweep`.
    """
    cases = [CacheSweep(case) for case in _cases()]
    # So many processes keep the compilation shorter than the compilation of others.
    return table(cases[:1] if smoke else cases, rounds=3 if smoke else 9, device=device, parts=6)


@dataclass(frozen=True)
class LatentSweep(Sweep):
    """A kernel of latent attention."""

    case: Latent
    step: str

    fields = ("block_tokens", "block_heads", "num_warps")

    @property
    def columns(self):
        return self.case.sizes | {"step": self.step}

    @property
    def description(self):
        return f"{self.step}, {self.case.heads} {self.case.tokens}"

    def sets(self, device):
        """Each has the tensors that the step reads, ``[1, S, ...]``, the tables, and a tensor to copy."""
        case, draw = self.case, self.case.normal(device)
        read = case.cotangents if self.step == "backward" else case.inputs
        sets = [{"given": [x.transpose(0, 1) for x in read(draw)], "tables": case.tables(device)}
                for _ in range(case.count)]  # fmt: skip
        return [call | {"copied": case.must_move(self.step, draw)} for call in sets]

    def to_copy(self, call, step=""):
        return (call["copied"],)

    def tiles(self, call):
        """The chosen tile first, and tiles of half, the same and twice as many heads, tokens and warps."""
        case = self.case
        tail = self.step == "turn_tail"
        widest = case.rotary_dim if tail else max(case.nope_dim, case.rotary_dim, case.value_dim)
        chosen = tile_of.latent(widest, case.heads, case.tokens, itemsize=case.dtype.itemsize)
        others = [
            Tile(tokens, heads, warps, chosen.innermost)
            for tokens in (1, 2, 4)
            for heads in (chosen.block_heads // 2, chosen.block_heads, 2 * chosen.block_heads)
            for warps in (chosen.num_warps // 2, chosen.num_warps, 2 * chosen.num_warps)
            if 0 < heads <= 2 * case.heads and warps
        ]
        return [chosen, *others]

    def run(self, tile, call):
        """Turn the tail of q where it lies, or make new tensors."""
        case, given, transposed = self.case, call["given"], self.step == "backward"
        rotation = Rotation(
            case.rotary_dim, case.nope_dim, interleaved=not transposed, out_interleaved=transposed, transpose=transposed
        )
        widths = {"forward": (case.nope_dim + case.rotary_dim, case.value_dim), "turn_tail": (),
                  "backward": (case.nope_dim + case.value_dim, case.rotary_dim)}[self.step]  # fmt: skip
        heads = (case.heads, 1 if transposed else case.heads)
        made = [given[0].new_empty(1, case.tokens, h, width) for h, width in zip(heads, widths, strict=False)]
        tensors = _TENSORS[self.step](*given, *made, *call["tables"], None)
        run(getattr(latent_triton, f"plan_{self.step}"), tensors, rotation, tile)
        return made


def _cases() -> list[CacheOperation]:
    found: list[CacheOperation] = []
    for layout in LAYOUTS:
        found += [NormAndCache(tokens, layout) for tokens in (1, 64, 512, 4096)]
        found += [NormAndCache(4096, layout, q_heads=28, k_heads=4), NormAndCache(4096, layout, norm=False)]
        found += [NormAndCache(4096, layout, float8=True)]
        found += [NormAndCache(tokens, layout, norm=False, float8=True, float8_q=True) for tokens in (512, 4096)]
        found += [LatentCache(tokens, layout) for tokens in (64, 512, 4096)]
        found += [WholeLatentCache(tokens, layout) for tokens in (8, 64, 512)]
    return found


@dataclass(frozen=True)
class CacheSweep(Sweep):
    """The one launch of a rotation with a write into a cache."""

    case: CacheOperation

    fields = ("block_rows", "num_warps", "pairs_per_access", "passes")

    @property
    def columns(self):
        return self.case.columns

    @property
    def description(self):
        return self.case.description

    def sets(self, device):
        tables = self.case.tables(device)
        return [call | {"tables": tables} for call in self.case.sets(device)]

    def to_copy(self, call, step=""):
        return self.case.to_copy(call)

    def share(self, copied):
        return self.case.share(copied)

    @property
    def rotation(self) -> Rotation:
        interleaved = self.case.layout == "interleaved"
        return Rotation(self.case.head_dim, interleaved=interleaved, out_interleaved=interleaved)

    def tiles(self, call):
        """Programs of one to eight warps, whose threads take 16 bytes of each member of a pair, up to four times.

        A thread takes rows of other tokens, or of other heads, in one pass; or rows of the same tokens in several
        passes.
        """
        access = PAIRS_PER_ACCESS if self.case.layout == "interleaved" else 2 * PAIRS_PER_ACCESS
        sizes = [(warps, accesses, passes) for warps in (1, 2, 4) for accesses in (1, 2) for passes in (1, 2)]
        sizes += [(1, 1, 4), (2, 1, 4), (8, 1, 1)]
        pairs = self.case.head_dim // 2
        rows = [(32 * warps * access * accesses // pairs, warps, passes) for warps, accesses, passes in sizes]
        chosen = tile_of.paged_cache(self.tensors(call), self.rotation)
        return [chosen, *(CacheTile(max(1, n), warps, access, passes) for n, warps, passes in rows)]

    def run(self, tile, call):
        norm = Norm(EPS) if isinstance(self.case, NormAndCache) and self.case.norm else None
        run(paged_cache_triton.plan_write, self.tensors(call), self.rotation, norm, tile)

    def tensors(self, call: Tensors) -> CacheTensors:
        """The tensors of a call as the kernel takes them; results that are neither caches nor in place are new."""
        given = {name: x for name, x in self.case.arguments(call).items() if isinstance(x, torch.Tensor)}
        if "q_out" not in given:
            given["q_out"] = torch.empty(given["q"].shape, dtype=given["q"].dtype, device=given["q"].device)
        batched = ("q", "k", "v", "q_out", "q_nope", "q_nope_out", "positions")
        given |= dict(zip(("cos", "sin"), call["tables"], strict=True))
        given |= {name: call[name] for name in ("slots", "positions")}
        found = {"k_cache": given.pop("key_cache"), "v_cache": given.pop("value_cache")}
        found |= {name: x[None] if name in batched else x for name, x in given.items()}
        return CacheTensors(**dict.fromkeys(CacheTensors._fields) | found | self.case.scales(call["slots"].device))
