"""This file lists the measurements that need only kernels and a GPU. Each function returns a table to record."""

from ropelab.bench.cache_tile_sweep import one_pass_tiles
from ropelab.bench.conformance import conformance
from ropelab.bench.dense import deepspeed_table, dense, few_tokens, formats
from ropelab.bench.host import host
from ropelab.bench.latent_attention import latent_attention
from ropelab.bench.model_heads import model_heads
from ropelab.bench.packed import packed
from ropelab.bench.paged_cache import one_pass_cells, paged_cache
from ropelab.bench.peak_memory import memory
from ropelab.bench.qk_norm import qk_norm
from ropelab.bench.study import Study
from ropelab.bench.table_free import table_free, table_free_error
from ropelab.bench.tile_sweep import tiles
from ropelab.bench.workers import MOST_PROCESSES

STUDIES: dict[str, Study] = {
    # For each element of q, the check in float64 takes about 60 bytes, and two sets of buffers take 20 bytes more.
    "dense": Study(dense, gpu_gib=5),
    "formats": Study(formats, gpu_gib=8, wide=True),
    "packed": Study(packed, gpu_gib=16),
    "few_tokens": Study(few_tokens, gpu_gib=1, wide=True),
    "qk_norm": Study(qk_norm, gpu_gib=8),
    # With 4,096 tokens a set of all features of q of latent attention takes 1 GiB, and its check in float64 10 GiB.
    "paged_cache": Study(paged_cache, gpu_gib=14),
    "one_pass_cells": Study(one_pass_cells, gpu_gib=27, wide=True),
    # The tensors of k and v take 0.8 GiB in two sets, their gradients as much, and the check about as much again.
    "latent_attention": Study(latent_attention, gpu_gib=8),
    "table_free": Study(table_free, gpu_gib=18),
    "table_free_error": Study(table_free_error, gpu_gib=3, timed=False),
    "memory": Study(memory, gpu_gib=3, timed=False),
    "host": Study(host, gpu_gib=1),
    "deepspeed_table": Study(deepspeed_table, gpu_gib=3),
    "tiles": Study(tiles, gpu_gib=8, wide=True),
    "one_pass_tiles": Study(one_pass_tiles, gpu_gib=4, wide=True),
    "model_heads": Study(model_heads, gpu_gib=2, wide=True),
    # This study starts processes, each with a CUDA context.
    "conformance": Study(conformance, gpu_gib=1.5 * MOST_PROCESSES, timed=False, wide=True),
}
"""The name of the record -> the study."""
