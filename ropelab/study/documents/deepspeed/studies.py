"""The studies that measure the records of DeepSpeed#8052."""

from ropelab.bench.study import Study
from ropelab.study.documents.deepspeed.callers import callers
from ropelab.study.documents.deepspeed.measure import correctness, inductor_evidence, launch_evidence
from ropelab.study.documents.deepspeed.peers import wheels

STUDIES: dict[str, Study] = {
    "deepspeed_packages": Study(wheels, gpu_gib=0, rows=1, timed=False),
    "deepspeed_correctness": Study(correctness, gpu_gib=2, rows=33, timed=False),
    "deepspeed_launches": Study(launch_evidence, gpu_gib=2, rows=6),
    "deepspeed_callers": Study(callers, gpu_gib=4, rows=16),
    "deepspeed_inductor": Study(inductor_evidence, gpu_gib=2, rows=4),
}
"""The name of a record -> the study that measures it."""
