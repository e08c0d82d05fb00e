"""The studies that measure the records of TransformerEngine#3057."""

from ropelab.bench.study import Study
from ropelab.study.documents.transformer_engine.layer import layer
from ropelab.study.documents.transformer_engine.measure import kernels, parity, past_the_end

STUDIES: dict[str, Study] = {
    # The memory holds the right results and their bounds in float64, for x and its gradient: 65,536 x 32 x 128 each.
    "te_kernels": Study(kernels, gpu_gib=4, rows=71),
    "te_layer": Study(layer, gpu_gib=10, rows=8),
    "te_parity": Study(parity, gpu_gib=1, timed=False),
    "te_past_the_end": Study(past_the_end, gpu_gib=1, rows=1, timed=False),
}
"""The name of a record -> the study that measures it."""
