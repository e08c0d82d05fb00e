"""Rotary position embedding for PyTorch at nearly the speed of a memory copy."""

from importlib.util import find_spec as _find_spec

if _find_spec("ropelab.kernels") is None:
    raise ImportError(
        "ropelab/kernels: expected a symlink to the folder kernels, got none: check the repository out with symlinks "
        "(git config core.symlinks true; on Windows with developer mode on), or copy the folder there"
    )

from ropelab import first_calls as _first_calls  # noqa: F401  before any other module computes
from ropelab.angles.model_config import rope_from_config
from ropelab.angles.rope_parameters import Rope, axial_rope
from ropelab.angles.table_free import rotary_frequencies
from ropelab.angles.tables import axial_tables, rotary_table
from ropelab.block_scales import rope_and_block_scaled_cache, rope_and_quantize, rope_and_quantize_indexer
from ropelab.cached_keys import rotate_cached_keys
from ropelab.embedding import RotaryEmbedding
from ropelab.kernels.backends import use_backend
from ropelab.latent_attention import assemble_mla, assemble_mla_kv, rotate_mla_query
from ropelab.layout.weights import convert_layout
from ropelab.paged_cache import mla_rope_and_cache, rope_and_cache
from ropelab.positions.axes import grid_positions, mrope_axes, text_positions
from ropelab.positions.packed import NO_POSITION, PackedSequences, context_parallel_positions
from ropelab.projection import qkv_rope, qkv_rope_and_cache
from ropelab.qk_norm import apply_qk_norm_rope
from ropelab.rope import apply_rope

__all__ = [
    "NO_POSITION",
    "PackedSequences",
    "Rope",
    "RotaryEmbedding",
    "apply_qk_norm_rope",
    "apply_rope",
    "assemble_mla",
    "assemble_mla_kv",
    "axial_rope",
    "axial_tables",
    "context_parallel_positions",
    "convert_layout",
    "grid_positions",
    "mla_rope_and_cache",
    "mrope_axes",
    "qkv_rope",
    "qkv_rope_and_cache",
    "rope_and_block_scaled_cache",
    "rope_and_cache",
    "rope_and_quantize",
    "rope_and_quantize_indexer",
    "rope_from_config",
    "rotary_frequencies",
    "rotary_table",
    "rotate_cached_keys",
    "rotate_mla_query",
    "text_positions",
    "use_backend",
]
__version__ = "0.4.0"
