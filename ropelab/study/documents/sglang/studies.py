"""The studies that measure the records of SGLang#14302."""

from ropelab.bench.study import Study
from ropelab.study.documents.sglang.calls import operator_calls, operator_test, synchronize
from ropelab.study.documents.sglang.measure import (
    diffusion,
    flashinfer_calls,
    head_sizes,
    low_tokens,
    protocols,
    second_grid,
    vector_widths,
)

STUDIES: dict[str, Study] = {
    # The memory holds 65,536 tokens of 32 heads of 64 and 32,768 tokens of 32 heads of 128, q, k and cotangents, and
    # their float64 check.
    "sglang_protocols": Study(protocols, gpu_gib=6, rows=108),
    "sglang_second_grid": Study(second_grid, gpu_gib=4, rows=10),
    "sglang_flashinfer_calls": Study(flashinfer_calls, gpu_gib=39, rows=96),
    "sglang_head_sizes": Study(head_sizes, gpu_gib=3, rows=9),
    "sglang_low_tokens": Study(low_tokens, gpu_gib=1, rows=8),
    "sglang_vector_widths": Study(vector_widths, gpu_gib=4, rows=4),
    "sglang_diffusion": Study(diffusion, gpu_gib=4, rows=2),
    "sglang_operator_calls": Study(operator_calls, gpu_gib=1, rows=36, timed=False),
    "sglang_operator_test": Study(operator_test, gpu_gib=3, rows=240, timed=False),
    "sglang_synchronize": Study(synchronize, gpu_gib=1, rows=5, timed=False),
}
"""The name of a record -> the study that measures it."""
