"""Rotations with block scales, for plain tensors and as operators of PyTorch's dispatcher."""

import torch

from ropelab.arguments import DTYPES, POSITION_DTYPES, check_device, check_shape, check_tensor
from ropelab.call.checks import check_places, check_rope_arguments
from ropelab.call.operation import Operation, Tensors
from ropelab.call.paged_cache_checks import check_adjacent, check_slots
from ropelab.call.where import Where
from ropelab.kernels.block_scales import Blocks, Page
from ropelab.kernels.tensors import BlockScaledCacheTensors, QuantizeTensors

SCALE_DTYPES = (torch.float32, torch.int32)
PACKED = 4
"""The exponents of an int32."""


def check_out(out: torch.Tensor) -> None:
    """Raise TypeError or ValueError unless ``out`` has three axes of 8-bit floats."""
    check_tensor("out", out, (3,), "[tokens, groups, heads / groups * head_dim]", (torch.float8_e4m3fn,))


def _check_quantize(given: Tensors, where: Where, block_dim: int, *numbers: float) -> None:
    t = QuantizeTensors._make((*given, None, None, None))
    check_rope_arguments(t.x, None, where)
    tokens, heads, head_dim = t.x.shape
    _check_pairs(where, head_dim)
    if t.weights is None:
        _check_blocks(block_dim, head_dim, "head_dim")
    elif block_dim != head_dim or head_dim < 4 or head_dim & (head_dim - 1):
        raise ValueError(f"q: expected heads with a power of two of features, at least 4, got {head_dim}")
    check_out(t.out)
    groups, group_heads = t.out.shape[1], t.out.shape[2] // head_dim
    if groups * group_heads != heads or t.out.shape != (tokens, groups, group_heads * head_dim):
        raise ValueError(
            f"out: expected shape ({tokens}, groups, {heads} * {head_dim} / groups) with a number of groups that "
            f"divides {heads} heads, got {tuple(t.out.shape)}"
        )
    check_device("out", t.out, t.x)
    check_adjacent("out", t.out)
    if t.scales is not None:
        check_tensor("scales", t.scales, (3,), "[tokens, groups, scales]", SCALE_DTYPES)
        scales = group_heads * head_dim // block_dim
        if t.scales.dtype == torch.int32:
            if scales % PACKED:
                raise ValueError(
                    f"scales: expected float32, or a number of scales in a group that {PACKED} divides, "
                    f"got {scales} scales in int32"
                )
            scales //= PACKED
        check_shape("scales", t.scales, (tokens, groups, scales), t.x, dtypes=SCALE_DTYPES)
    for name, x in (("weights", t.weights), ("weights_out", t.weights_out)):
        if x is not None:
            check_shape(name, x, (tokens, heads), t.x, dtypes=DTYPES if name == "weights" else (torch.float32,))


def _check_write(given: Tensors, where: Where, norm_eps: float, block_size: int, block_dim: int) -> None:
    t = BlockScaledCacheTensors._make((*given, None, None, None))
    check_rope_arguments(t.q, None, where)
    tokens, _, head_dim = t.q.shape
    _check_pairs(where, head_dim)
    check_tensor("q", t.q, (3,), "[tokens, heads, head_dim]", (torch.bfloat16, torch.float16))
    check_shape("kv", t.kv, (tokens, head_dim), t.q, dtypes=(t.q.dtype,))
    check_shape("q_out", t.q_out, t.q.shape, t.q, dtypes=(t.q.dtype,))
    check_adjacent("q_out", t.q_out)
    first, end = where.options.slice(where.angles.columns)
    if end != head_dim:
        raise ValueError(f"rotary_slice: expected the last features of {head_dim}, got {(first, end)}")
    _check_blocks(block_dim, first, "the features of a head that do not rotate")
    check_tensor("kv_cache", t.kv_cache, (2,), "[blocks, bytes]", (torch.uint8,))
    page = Page.of(t, where.rotation, block_size, block_dim)
    if t.kv_cache.shape[1] < page.bytes:
        raise ValueError(
            f"kv_cache: expected at least {page.bytes} bytes in a block, for {block_size} tokens of {page.data_bytes} "
            f"bytes and {page.scale_bytes} bytes of scales, got {t.kv_cache.shape[1]}"
        )
    check_device("kv_cache", t.kv_cache, t.q)
    check_adjacent("kv_cache", t.kv_cache)
    if t.kv_cache.stride(0) % t.kv.itemsize:
        raise ValueError(f"kv_cache: expected an even stride of blocks, got strides {tuple(t.kv_cache.stride())}")
    check_tensor("slot_mapping", t.slots, (1,), "[slots]", POSITION_DTYPES)
    check_device("slot_mapping", t.slots, t.q)
    if len(t.slots) > tokens:
        raise ValueError(f"slot_mapping: expected at most a slot for each of {tokens} tokens, got {len(t.slots)}")


def _check_pairs(where: Where, head_dim: int) -> None:
    first, end = where.options.slice(where.angles.columns)
    if head_dim % 2:
        raise ValueError(f"q: expected heads with an even number of features, got {head_dim}")
    if first % 2:
        raise ValueError(f"rotary_slice: expected pairs from an even feature on, got {(first, end)}")
    if where.rotation.full_width:
        raise ValueError(f"cos: expected {(end - first) // 2} columns, a column per pair, got {end - first}")


def _check_blocks(dim: int, features: int, what: str) -> None:
    if dim < 4 or dim & (dim - 1) or not features or features % dim:
        raise ValueError(f"block_dim: expected a power of two, at least 4, that divides {what}, {features}, got {dim}")


def _check_write_contents(given: Tensors, where: Where, norm_eps: float, block_size: int, block_dim: int) -> None:
    kv_cache, _, q, _, slots = given
    if kv_cache.data_ptr() % q.itemsize:  # another view of the same storage may begin elsewhere
        raise ValueError(f"kv_cache: expected an even address, got {kv_cache.data_ptr():#x}")
    check_places(q, where)
    check_slots(slots, len(kv_cache) * block_size, "kv_cache")


QUANTIZE = Operation(
    "block_scales", "quantize", QuantizeTensors, ("out", "scales", "weights_out", "x", "weights"), _check_quantize,
    writes=3,
    numbers=lambda dim, amax_epsilon, round_first, scale: (Blocks(dim, amax_epsilon, round_first), scale),
)  # fmt: skip
QUANTIZE.operator(
    "ropelab::rope_and_quantize", "int block_dim, float amax_epsilon, bool round_first, float weight_scale"
)
WRITE = Operation(
    "block_scales", "write", BlockScaledCacheTensors, ("kv_cache", "q_out", "q", "kv", "slot_mapping"), _check_write,
    writes=2, same={"q_out": "q"}, check_contents=_check_write_contents, checks_addresses=True,
)  # fmt: skip
WRITE.operator("ropelab::rope_and_block_scaled_cache", "float eps, int block_size, int block_dim")
