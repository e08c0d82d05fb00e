"""The rotation of keys that a paged cache holds, for plain tensors and as an operator of PyTorch's dispatcher."""

import torch

from ropelab.arguments import POSITION_DTYPES, check_device, check_tensor
from ropelab.call.checks import check_places, check_rope_arguments
from ropelab.call.operation import Operation, Tensors
from ropelab.call.paged_cache_checks import CACHE_DTYPES, check_adjacent, check_made_scale
from ropelab.call.where import Where
from ropelab.kernels.tensors import CachedKeys


def as_keys(key_cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """A tensor that has the heads of the slots in ``thd``, without memory of its own for them: for checks."""
    return torch.empty((), device=key_cache.device).expand(len(slots), *key_cache.shape[2:])


def check_call(given: Tensors, where: Where) -> None:
    """Raise TypeError or ValueError for arguments that the kernels cannot serve, judged by all but their contents."""
    key_cache, k_scale_cache, slots = given
    check_tensor("key_cache", key_cache, (4,), "[blocks, block_size, heads, head_dim]", CACHE_DTYPES)
    if not key_cache.shape[1]:
        raise ValueError(f"key_cache: expected blocks of at least one slot, got {tuple(key_cache.shape)}")
    check_adjacent("key_cache", key_cache)
    check_tensor("slots", slots, (1,), "[slots]", POSITION_DTYPES)
    check_device("slots", slots, key_cache)
    check_rope_arguments(as_keys(key_cache, slots), None, where)
    if k_scale_cache is not None:
        check_made_scale("k_scale_cache", k_scale_cache, tuple(key_cache.shape[:3]), "key_cache", key_cache)


def check_contents(given: Tensors, where: Where) -> None:
    """Raise ValueError for a slot beyond the cache, a slot twice, or a delta without a row, as far as CPU memory says.

    The host would have to wait for a GPU to read slots there.
    """
    key_cache, _, slots = given
    check_places(as_keys(key_cache, slots), where)
    if slots.is_cuda or not slots.numel():
        return
    last, capacity = int(slots.max()), key_cache.shape[0] * key_cache.shape[1]
    if last >= capacity:
        raise ValueError(f"slots: expected slots below the {capacity} slots of key_cache, got {last}")
    found, counts = slots[slots >= 0].unique(return_counts=True)
    if (twice := found[counts > 1]).numel():
        raise ValueError(f"slots: expected slots that differ from each other, got slot {int(twice[0])} twice")


ROTATE = Operation(
    "cached_keys", "rotate", CachedKeys, ("key_cache", "k_scale_cache", "slots"), check_call,
    check_contents=check_contents, writes=2, heads=(0,),
)  # fmt: skip
ROTATE.operator("ropelab::rotate_cached_keys")
