"""The studies that measure the records of fairseq2#1213."""

from ropelab.bench.study import Study
from ropelab.study.documents.fairseq2.measure import defaults, equality, generated, grid, inductor, reorderings

STUDIES: dict[str, Study] = {
    # The memory holds the tables of six encoders, x and its cotangent, and the tensors that a compiled call keeps, in
    # float32. With the clock stopped, no eager encoder is called, and the grid has only one cell for each compilation.
    "fairseq2_defaults": Study(defaults, gpu_gib=1, rows=28, timed=False),
    "fairseq2_equality": Study(equality, gpu_gib=1, rows=26, timed=False),
    "fairseq2_grid": Study(grid, gpu_gib=10, rows=108),
    "fairseq2_inductor": Study(inductor, untimed=generated, gpu_gib=9, rows=8),
    "fairseq2_reorderings": Study(reorderings, gpu_gib=8, rows=4),
}
"""The name of a record -> the study that measures it."""
