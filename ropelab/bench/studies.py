"""The measurements that need only kernels and a GPU. Each function returns a table to record."""

from functools import partial

from ropelab.bench.all_pairs import all_pairs
from ropelab.bench.block_scales import block_scales
from ropelab.bench.cached_keys import cached_keys
from ropelab.bench.conformance import conformance
from ropelab.bench.dense import deepspeed_table, dense, few_tokens, formats, lengths
from ropelab.bench.host import host
from ropelab.bench.host import projection as projection_host
from ropelab.bench.host_functions import functions as host_functions
from ropelab.bench.latent_attention import latent_attention
from ropelab.bench.model_heads import CELLS, model_heads
from ropelab.bench.mrope import mrope
from ropelab.bench.packed import packed
from ropelab.bench.paged_cache import one_pass_cells, paged_cache
from ropelab.bench.peak_memory import memory
from ropelab.bench.projection import blocks, compiled, projections
from ropelab.bench.projection import tiles as projection_tiles
from ropelab.bench.projection_sizes import sizes as projection_sizes
from ropelab.bench.qk_norm import qk_norm
from ropelab.bench.row_scales import row_scales
from ropelab.bench.server_logits import server_logits
from ropelab.bench.servers import servers
from ropelab.bench.study import Study
from ropelab.bench.table_free import table_free, table_free_error
from ropelab.bench.tile_regret import tile_regret
from ropelab.bench.tile_sweeps import latent_tiles, one_pass_tiles
from ropelab.bench.whole_models import whole_models
from ropelab.bench.workers import MOST_PROCESSES

STUDIES: dict[str, Study] = {
    "dense": Study(dense, gpu_gib=6, rows=32),
    "formats": Study(formats, gpu_gib=8, rows=96, wide=True),
    "packed": Study(packed, gpu_gib=4, rows=24),
    "few_tokens": Study(few_tokens, gpu_gib=1, rows=16),
    # With 131,072 tokens q and k take 1.3 GB, and each contender keeps results of this size.
    "lengths": Study(lengths, gpu_gib=16, rows=16, wide=True),
    "qk_norm": Study(qk_norm, gpu_gib=11, rows=12),
    # With 4,096 tokens a set of all features of q of latent attention takes 1 GiB.
    "paged_cache": Study(paged_cache, gpu_gib=7, rows=25),
    "one_pass_cells": Study(one_pass_cells, gpu_gib=13, rows=120, wide=True),
    "row_scales": Study(row_scales, gpu_gib=13, wide=True),
    "cached_keys": Study(cached_keys, gpu_gib=2, rows=50, wide=True),
    # With 8,192 tokens q of 128 heads takes 1 GiB, and two sets take turns.
    "block_scales": Study(block_scales, gpu_gib=8, rows=32, wide=True),
    # With 16,384 tokens a copy of the part of k and v takes 1.1 GiB, and each contender keeps a result of such a size;
    # three processes compile the parts.
    "latent_attention": Study(latent_attention, gpu_gib=27, rows=30),
    "latent_tiles": Study(latent_tiles, gpu_gib=12, rows=243, wide=True),
    # A set of 16,384 tokens takes 0.2 GiB, and each contender keeps results of such a size.
    "mrope": Study(mrope, gpu_gib=2, rows=120, wide=True),
    "table_free": Study(table_free, gpu_gib=6, rows=24),
    "table_free_error": Study(table_free_error, gpu_gib=3, rows=22, timed=False),
    # With 16,384 tokens x, the weight and a result of 10,240 features take 0.8 GiB, and each contender keeps a result.
    "projection": Study(projections, gpu_gib=4, rows=63),
    "projection_blocks": Study(blocks, gpu_gib=3, rows=24),
    "projection_compiled": Study(compiled, gpu_gib=4, rows=3),
    "projection_tiles": Study(projection_tiles, gpu_gib=4, rows=6, wide=True),
    # With 32,768 tokens and 96 heads a result takes 0.8 GiB, and each contender keeps one.
    "projection_sizes": Study(projection_sizes, gpu_gib=5, wide=True),
    # A block of 2^22 pairs takes 20 tensors of float64.
    "all_pairs": Study(all_pairs, gpu_gib=2, rows=10, timed=False),
    "memory": Study(memory, gpu_gib=3, rows=2, timed=False),
    "host": Study(host, gpu_gib=1, rows=8),
    "host_functions": Study(host_functions, gpu_gib=2, rows=8),
    "projection_host": Study(projection_host, gpu_gib=2),
    "deepspeed_table": Study(deepspeed_table, gpu_gib=3, rows=12),
    "one_pass_tiles": Study(one_pass_tiles, gpu_gib=9, rows=450, wide=True),
    "model_heads": Study(model_heads, gpu_gib=8, rows=CELLS, wide=True, short=partial(model_heads, count=CELLS // 10)),
    "tile_regret": Study(tile_regret, gpu_gib=8, rows=3343, wide=True),
    # DeepSeek-V3's two layers have 3.2 GB of weights and as many gradients; activations of 8,192 tokens come on top.
    "whole_models": Study(whole_models, gpu_gib=40, wide=True, short=partial(whole_models, short=True)),
    # Eleven engines have caches of 1 GiB and the weights of four layers, or three have 2 GiB and 8 GB of weights.
    "servers": Study(servers, gpu_gib=60, wide=True, kernels_unknown="vLLM's engines launched them"),
    # Two engines have 8 GB of weights and a cache of 4 GiB, and one has twice the weights.
    "server_logits": Study(server_logits, gpu_gib=50, rows=2, timed=False),
    # This study starts processes, each with a CUDA context.
    "conformance": Study(conformance, gpu_gib=1.5 * MOST_PROCESSES, timed=False),
}
"""The name of the record -> the study."""
