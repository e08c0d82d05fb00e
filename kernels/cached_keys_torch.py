"""The rotation of keys that a paged cache holds, in torch operations for any device and strides."""

import torch

from ropelab.kernels import rotate_torch
from ropelab.kernels.float8 import FLOAT8_DTYPES, scale_of_rows
from ropelab.kernels.paged_cache_torch import rows_of_slots, stored
from ropelab.kernels.rotation import NO_POSITION, Rotation
from ropelab.kernels.tensors import CachedKeys, RotateTensors


def rotate(t: CachedKeys, rotation: Rotation, first_position: int = 0) -> None:
    """Rotate the keys in slots of the cache in place, with the bits of `cached_keys_triton`.

    A negative slot, a slot beyond the cache and a slot without a position stay as they are. One scale for a whole row
    commutes with the rotation, so 8-bit floats rotate without their scale, unless every row gets a new scale.

    Args:
        rotation: without ``out_interleaved``.
        first_position: unused, because there are positions.
    """
    turns = t.positions[0] != NO_POSITION
    turns = turns.any(-1) if rotation.axes else turns
    turned, row = rows_of_slots(t.slots.where(turns, -1), t.k_cache)
    positions = t.positions[:, turned]
    is_float8 = t.k_cache.dtype in FLOAT8_DTYPES
    cache = t.k_cache.view(torch.uint8) if is_float8 else t.k_cache  # not every version of torch indexes 8-bit floats
    x = cache[row].view(t.k_cache.dtype)
    x = x.float() if is_float8 else x
    y = torch.empty(x.shape, dtype=compute_dtype(t) if is_float8 else x.dtype, device=x.device)
    rotate_torch.rotate(RotateTensors.of((x[None],), (y[None],), t.cos, t.sin, positions), rotation)
    if t.k_scale_cache is not None:
        y = y.float() * t.k_scale_cache[row][..., None]
        scale = t.k_scale_cache[row] = scale_of_rows(y, t.k_cache.dtype)
        y = stored(y, t.k_cache.dtype, scale)
    cache[row] = stored(y, t.k_cache.dtype, None).view(cache.dtype)


def compute_dtype(t: CachedKeys) -> torch.dtype:
    """The dtype of the arithmetic: at least float32, and no narrower than the cache or the tables."""
    dtype = torch.float32 if t.k_cache.dtype in FLOAT8_DTYPES else t.k_cache.dtype
    return torch.promote_types(torch.promote_types(dtype, t.cos.dtype), torch.float32)
