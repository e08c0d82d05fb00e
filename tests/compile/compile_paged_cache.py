"""Compile the kernels of `rope_and_cache` and `rotate_cached_keys` for a GPU that need not be there.

Run as a script by test_ptx.py: compiling needs a process in which kernels are not interpreted.
"""

import itertools
import re
import sys
from functools import partial
from unittest import mock

import torch

from ropelab.kernels import Norm, Rotation, cached_keys_triton, paged_cache_triton
from ropelab.kernels.float8 import FLOAT8_DTYPES
from ropelab.kernels.tensors import CachedKeys, CacheTensors
from ropelab.layout.pairing import LAYOUTS
from ropelab.positions.axes import mrope_axes
from tests.compile import compile_kernel
from tests.support import all_but_one

INTEGERS = dict(zip(FLOAT8_DTYPES, ("e4m3", "e5m2"), strict=True))

# q heads, k heads, head_dim, features that rotate, features of v
SHAPES = [
    (32, 8, 128, 128, 128), (28, 4, 128, 64, 128), (128, 1, 64, 64, 512), (16, 1, 256, 256, 256),
    (48, 8, 160, 160, 160),
]  # fmt: skip

VARIANTS = {
    "table-free": {"table_free": True}, "norm across heads": {"across": True},
    "axes in turns": {"axes": mrope_axes((24, 20, 20), mrope_interleaved=True)},
    "q apart": {"nope_dim": 512, "cache_dtype": FLOAT8_DTYPES[0], "q_dtype": FLOAT8_DTYPES[0]},
    "made scales": {"made_scales": True, "cache_dtype": FLOAT8_DTYPES[0], "q_dtype": FLOAT8_DTYPES[0]},
    "made scales, q apart, table-free": {
        "nope_dim": 512, "made_scales": True, "shared": True, "cache_dtype": FLOAT8_DTYPES[0],
        "q_dtype": FLOAT8_DTYPES[0], "table_free": True,
    },
    "made scales, q apart": {
        "nope_dim": 512, "made_scales": True, "shared": True, "cache_dtype": FLOAT8_DTYPES[0],
        "q_dtype": FLOAT8_DTYPES[0],
    },
}  # fmt: skip


def kernel(capability, shape, layout, *, cache_dtype=torch.bfloat16, norm=False, tokens=4096, q_dtype=torch.bfloat16,
           outputs=False, across=False, table_free=False, nope_dim=0, made_scales=False, shared=False,
           axes=None):  # fmt: skip
    """The kernel that `rope_and_cache` launches for views of a packed qkv and positions of int64.

    Args:
        norm, across: normalize each head, or all heads of a token.
        nope_dim: the features of q that lie apart.
        made_scales, shared: the kernel makes the scales of 8-bit floats; k and v share them.
        axes: the axis of each pair.
    """
    q_heads, k_heads, head_dim, rotary_dim, value_dim = shape

    def empty(*sizes, dtype=torch.bfloat16):
        return torch.empty(sizes, dtype=dtype, device="meta")

    widths = q_heads * head_dim, k_heads * head_dim, k_heads * value_dim
    q, k, v = empty(1, tokens, sum(widths)).split(widths, -1)
    q, k, v = q.unflatten(-1, (q_heads, -1)), k.unflatten(-1, (k_heads, -1)), v.unflatten(-1, (k_heads, -1))
    caches = [empty(64, 16, k_heads, dim, dtype=cache_dtype) for dim in (head_dim, value_dim)]
    slots, positions = empty(tokens, dtype=torch.int64), empty(1, tokens, dtype=torch.int64)
    if axes:
        positions = empty(3, 1, tokens, dtype=torch.int64).movedim(0, -1)
    k_out, v_out = (empty(*x.shape) if outputs else None for x in (k, v))
    nope = [empty(1, tokens, q_heads, nope_dim, dtype=dtype) if nope_dim else None for dtype in (q.dtype, q_dtype)]
    cos = empty(tokens, rotary_dim // 2, dtype=torch.float32)
    if table_free:
        cos = empty(rotary_dim // 2, 3, dtype=torch.int64)
    scale = empty(1, dtype=torch.float32)
    scales = [
        scale if q_dtype in FLOAT8_DTYPES else None,
        empty(k_heads, dtype=torch.float32) if cache_dtype in FLOAT8_DTYPES else None,
        scale if cache_dtype in FLOAT8_DTYPES else None,
    ]
    made: list = [None, None, None]
    if made_scales:
        sizes = (1, tokens, q_heads, 1), (64, 16, k_heads), (64, 16, k_heads)
        made = [x if x is None else empty(*shape, dtype=torch.float32) for x, shape in zip(scales, sizes, strict=True)]
        scales = [None, None, None]
    if shared:
        made[2] = None
    heads = (q_heads, k_heads) if across else (1, 1)
    weights = [empty(count * head_dim) if norm or across else None for count in heads]
    tensors = CacheTensors(
        *caches, empty(*q.shape, dtype=q_dtype), k_out, v_out, nope[1], *made, q, k, v, nope[0], slots, *weights,
        *scales, cos, cos, positions,
    )  # fmt: skip
    interleaved = layout == "interleaved"
    options = {"table_free": table_free, "axes": axes}
    rotation = Rotation(rotary_dim, interleaved=interleaved, out_interleaved=interleaved, **options)
    with mock.patch.object(paged_cache_triton, "conversion", partial(conversion, capability)):
        launch = paged_cache_triton.plan_write(tensors, rotation, Norm(1e-6) if norm or across else None)
    return compile_kernel.compiled(*compile_kernel.with_bytes(launch, (tensors, 0, tokens)), capability)


def conversion(capability, dtype, device):
    return "none" if dtype not in FLOAT8_DTYPES else "instruction" if capability >= 89 else INTEGERS[dtype]


# heads, head_dim, the first feature that rotates, features that rotate
CACHED = [(8, 128, 0, 128), (1, 576, 512, 64)]


def cached_keys(capability, shape, layout, dtype, *, made_scales=False, slots=4096, axes=None):
    """The kernel that `rotate_cached_keys` launches."""
    heads, head_dim, first, rotary_dim = shape

    def empty(*sizes, dtype):
        return torch.empty(sizes, dtype=dtype, device="meta")

    cos, scales = empty(8192, rotary_dim // 2, dtype=torch.float32), empty(512, 16, heads, dtype=torch.float32)
    tensors = CachedKeys(
        empty(512, 16, heads, head_dim, dtype=dtype), scales if made_scales else None, empty(slots, dtype=torch.int64),
        cos, cos, empty(1, slots, *([] if axes is None else [3]), dtype=torch.int64),
    )  # fmt: skip
    interleaved = layout == "interleaved"
    rotation = Rotation(rotary_dim, first=first, interleaved=interleaved, out_interleaved=interleaved, axes=axes)
    with mock.patch.object(cached_keys_triton, "conversion", partial(conversion, capability)):
        launch = cached_keys_triton.plan_rotate(tensors, rotation)
    return compile_kernel.compiled(*compile_kernel.with_bytes(launch, (tensors, 0, 8192)), capability)


SLOTS = 25
"""The instructions that an H200 executes while it moves the 3 bytes of a feature that becomes an 8-bit float.

132 multiprocessors x 128 lanes x 1.98 GHz; a copy of 75.5 MB takes 19.0 microseconds (record `paged_cache`).
"""


def check_instructions(layout: str, capability: int) -> None:
    """The instructions of a row of q take no longer than its bytes."""
    float8 = FLOAT8_DTYPES[0]
    found = kernel(capability, SHAPES[0], layout, cache_dtype=float8, q_dtype=float8)
    features = 32  # of a thread: 16 pairs in all passes
    instructions = compile_kernel.paths(found.asm["cubin"])[0] / features
    assert instructions < SLOTS, f"{layout}: {instructions:.1f} instructions for a feature, expected below {SLOTS}"
    print(f"sm_{capability} {layout}: {instructions:.1f} instructions for a feature of 8-bit q")


def check_pieces(layout: str, capability: int) -> None:
    """A lane of a head of 160, in pieces, takes at most a fifth more instructions than one of a head of 128.

    The 80 pairs have 80 lanes if they are adjacent, and 96 lanes as halves; whole heads would have 128 lanes.
    """
    lanes = 80 if layout == "interleaved" else 96
    counts = []
    for shape, features in ((SHAPES[0], 32), (SHAPES[-1], 40)):  # the features of a thread
        of_k = compile_kernel.paths(kernel(capability, shape, layout, norm=True).asm["cubin"])[1]
        counts.append(of_k / features)
    assert counts[1] < 1.2 * counts[0] * lanes / 80, f"{layout}: {counts} instructions for a feature of k"
    print(f"sm_{capability} {layout}: {counts} instructions for a feature of k in heads of 128 and of 160")


def main(capability: int) -> None:
    """Loads and stores of 16 bytes, and of 8 bytes for 8-bit floats, no spilled registers, and few instructions."""
    first = itertools.product(SHAPES[:1], LAYOUTS, (True,))
    for shape, layout, norm in all_but_one(SHAPES, LAYOUTS, (False, True)) if capability == 90 else first:
        name = f"sm_{capability} {layout} {shape}{' norm' if norm else ''}"
        found = kernel(capability, shape, layout, norm=norm)
        compile_kernel.check_accesses(name, found, 16)
        assert ".v4.b32" in "".join(re.findall(r"ld\.global\S*evict_last\S*", found.asm["ptx"])), name
    for dtype, layout in itertools.product(FLOAT8_DTYPES, LAYOUTS):
        name = f"sm_{capability} {layout} {dtype}"
        found = kernel(capability, SHAPES[0], layout, norm=True, cache_dtype=dtype)
        compile_kernel.check_accesses(name, found, 16)  # v is read and q is written 16 bytes at once
        assert re.search(r"st\.global\.(v2\.b32|v4\.b32|b64)", found.asm["ptx"]), name
        assert not found.metadata.shared, f"{name}: threads exchange {found.metadata.shared} bytes"
    for layout, dtype in zip(LAYOUTS, FLOAT8_DTYPES, strict=True):
        kernel(capability, SHAPES[0], layout, tokens=1, cache_dtype=dtype, q_dtype=dtype, outputs=True)
    for shape, layout, slots in all_but_one(CACHED, LAYOUTS, (1, 4096)):
        for dtype, made_scales in ((torch.bfloat16, False), (FLOAT8_DTYPES[0], False), (FLOAT8_DTYPES[1], True)):
            found = cached_keys(capability, shape, layout, dtype, made_scales=made_scales, slots=slots)
            width = 16 if dtype == torch.bfloat16 else 8
            compile_kernel.check_accesses(f"sm_{capability} cached keys {shape} {layout} {dtype}", found, width)
    for layout, in_turns in zip(LAYOUTS, (True, False), strict=True):
        axes = mrope_axes((24, 20, 20) if in_turns else (16, 24, 24), mrope_interleaved=in_turns)
        found = cached_keys(capability, CACHED[0], layout, torch.bfloat16, axes=axes)
        compile_kernel.check_accesses(f"sm_{capability} cached keys {layout} with axes", found, 16)
    for layout in LAYOUTS if capability == 90 else ():
        check_instructions(layout, capability)
        check_pieces(layout, capability)
        for name, options in [*VARIANTS.items()][LAYOUTS.index(layout) :: 2]:
            shape, width = (SHAPES[2 if "nope_dim" in options else 0], 8 if "q_dtype" in options else 16)
            found = kernel(capability, shape, layout, **options)
            compile_kernel.check_accesses(f"{layout} {name}", found, width)
            assert not (options.get("axes") and found.metadata.shared), f"{layout} {name}: threads exchange columns"


if __name__ == "__main__":
    main(int(sys.argv[1]))
