"""Which path of `ropelab.qkv_rope` is the faster one for a product on a GPU.

The programs of the path "product" compute tiles of 128 tokens and 256 features, one on each multiprocessor in each
turn. A turn takes its time also if few tiles are left for the last one, and in each turn the rotation takes as long::

    product = start + turns (turn + rotation),    turn = step K / 64 + rest

The product of PyTorch takes a little longer than our product would if all its turns were full. The pass behind it is a
launch, and reads and writes q and k once::

    pass = 1.03 full turns * turn + bytes of q and k / bandwidth + launch

A call takes the path "product" where the law says that it is faster. The start is also the margin of a law that is not
exact: on each GPU the least quarter of a microsecond with which no size of the first draw of the record
`projection_sizes` loses.
"""

from functools import cache
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch

Path: TypeAlias = Literal["auto", "pass", "product", "quack"]
PATHS = get_args(Path)
"""See `ropelab.call.projection`; with "auto" a call takes the faster one of "pass" and "product"."""


class ProductSize(NamedTuple):
    """The size of a product of 16 bits: T, K, N, how many of the N features are those of q and k, and whether a norm
    precedes the rotation.
    """

    tokens: int
    inputs: int
    outputs: int
    turning: int
    norm: bool = False


def fastest(size: ProductSize, device: torch.device) -> str:
    """`faster` on a device; "pass" on a device beside the GPUs that were measured."""
    gpu = MEASURED.get(_name(device)) if device.type == "cuda" else None
    return "pass" if gpu is None else faster(size, gpu)


def faster(size: ProductSize, gpu: str) -> str:
    """The faster path of "pass" and "product" on a GPU, "H100" or "H200"."""
    turn = _STEP_US * size.inputs / 64 + _REST_US
    turns = -(-(-(-size.tokens // 128) * -(-size.outputs // 256)) // _MULTIPROCESSORS)
    full_turns = size.tokens * size.outputs / (128 * 256 * _MULTIPROCESSORS)
    moved = 4 * size.tokens * size.turning
    by_pass = 1.03 * full_turns * turn + moved / _BYTES_PER_US[gpu][size.norm] + _LAUNCH_US
    return "product" if START_US[gpu] + turns * (turn + _ROTATION_US) < by_pass else "pass"


MEASURED = {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200"}
"""The GPUs that were measured: their names in CUDA -> their names here."""
_MULTIPROCESSORS = 132
_STEP_US, _REST_US, _ROTATION_US, _LAUNCH_US = 0.685, 1.2, 1.85, 1.0
"""By the records `projection`, of both GPUs. 64 terms of the sums of a tile take a step."""
START_US = {"H100": 3.0, "H200": 1.0}
_BYTES_PER_US = {"H100": (3.0e6, 2.86e6), "H200": (3.95e6, 3.46e6)}
"""What a pass over many tokens reads and writes, without and with a norm: by the records `projection`, and with a norm
the median of the first draw of `projection_sizes` over passes of 20 MB and more."""


@cache
def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device)
