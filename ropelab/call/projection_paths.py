"""Which path of `ropelab.qkv_rope` is the fastest for a product on a GPU, by the study `projection`."""

from functools import cache
from typing import NamedTuple

import torch

PATHS = "auto", "pass", "product", "quack"
"""See `ropelab.call.projection`; with "auto" a call takes the faster one of "pass" and "product"."""


class Work(NamedTuple):
    """The size of a product: T, K and N."""

    tokens: int
    inputs: int
    outputs: int

    @classmethod
    def of(cls, x: torch.Tensor, outputs: int) -> "Work":
        """The product of x ``[..., K]``."""
        return cls(x.shape[:-1].numel(), x.shape[-1], outputs)


def fastest(work: Work, device: torch.device) -> str:
    """`faster` on a device; "pass" on a device beside the GPUs that were measured."""
    gpu = MEASURED.get(_name(device)) if device.type == "cuda" else None
    return "pass" if gpu is None else faster(work, gpu)


def faster(work: Work, gpu: str) -> str:
    """The faster path of "pass" and "product" for a product of 16 bits on a GPU, "H100" or "H200".

    The programs of the path "product" compute tiles of 128 tokens and 256 features, one on each multiprocessor in each
    turn. The rotation costs them 2 to 4 % of the product, and the pass costs 5 to 22 %. The rest decides: the share of
    all turns that is no work, because tiles reach past the end or the last turn has few tiles.
    """
    tiles = -(-work.tokens // _TILE_TOKENS) * -(-work.outputs // _TILE_FEATURES)
    places = -(-tiles // _MULTIPROCESSORS) * _MULTIPROCESSORS * _TILE_TOKENS * _TILE_FEATURES
    return "product" if work.tokens * work.outputs >= _LEAST_WORK * places else "pass"


MEASURED = {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200"}
"""The GPUs that were measured: their names in CUDA -> their names here."""
_TILE_TOKENS, _TILE_FEATURES, _MULTIPROCESSORS = 128, 256, 132
"""The numbers of `projection_triton.ProjectionTile`, and of the GPUs."""
_LEAST_WORK = 0.9
_name = cache(torch.cuda.get_device_name)
