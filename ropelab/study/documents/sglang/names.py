"""The contenders of the records of SGLang#14302, and the sizes of the document's grids."""

OURS, OURS_CACHE = "ropelab", "ropelab, positions"
OURS_FLOAT32 = "ropelab, float32 tables"
PERSISTENT = "warp per head (model)"
"""The beginning of the names of `PERSISTENT_PEERS`, which differ in the number of blocks a multiprocessor."""
FLASH, FLASH_PACKED, FLASH_FULL = "flash-attn", "flash-attn, packed", "flash-attn, all heads"
EAGER, COMPILED = "eager", "compile"
FLASHINFER, FLASHINFER_NEWEST, SGL_KERNEL = "FlashInfer", "FlashInfer, newest", "sgl_kernel"
FLASHINFER_FROM_CPU = "FlashInfer, positions from the CPU"
VLLM = "vLLM"

FIRST_KERNEL, FIRST_KERNEL_GATHER = "first version", "first version, gather"
SECOND_KERNEL, THIRD_KERNEL = "second version", "third version"
JUST_IN_TIME, JUST_IN_TIME_CAST = "just-in-time version", "just-in-time version, cast"
LAST_KERNEL, LAST_KERNEL_GATHER = "last version", "last version, gather"
"""The published operator, in the states of `kernels.STATES`."""

FIRST_GRID = ((1, 32, 8, 128), (1, 64, 8, 128), (1, 32, 8, 64), (1, 32, 8, 256), (32, 32, 8, 64), (1, 32, 1, 128),
              (32, 8, 8, 128), (1, 32, 8, 80))  # fmt: skip
"""Batch, query heads, key heads and head size of the document's first benchmark."""
FIRST_GRID_CELLS = len(FIRST_GRID) * 14
"""The number of cells of the first grid, whose lengths are the 14 powers of two from 1 to 8192."""
SECOND_GRID_CELLS = 8 * 2 * 2
"""The number of cells of the later grid: batches of 1, 2, 4, ... 128, 1 or 2048 tokens, and both layouts."""
HEAD_SIZES = (64, 80, 96, 128, 160, 192, 256, 320)
