"""The names that options take, as text; `ropelab.conformance` has what they name."""

FAMILIES = {
    "rotation": "definition identity tail positions_per_batch offsets axes interpolation extents",
    "columns": "feature_columns",
    "group": "isometry relative_position composition inverse layout",
    "gradients": "adjoint adjoint_expanded adjoint_strided gradients_reach_inputs lone_gradients",
    "gradients_of_tables": "table_gradients",
    "second_derivatives": "second_order second_backward",
    "side_effects": "inputs_unchanged guards all_written",
    "in_place": "inplace",
    "memory_order": "strides token_bits",
    "split_calls": "decode packed zero_length rows_past_end context_parallel single_head batch_independent "
                   "heads_independent keys_independent tokens_permute neighbours drafts",
    "precision": "rounding dtype large_positions autocast matmul_precision float8",
    "repeated_calls": "determinism compile stored_is_the_result equals_separate_launches",
    "long_calls": "token_counts huge",
    "refusals": "empty bad_input",
    "slots": "other_slots_unchanged skipped_slots fewer_slots slots_permute cache_arrangement",
    "scales": "row_scales scale_law scales_apart norm_removes_the_size",
}  # fmt: skip
"""Family -> its laws. A name may belong to a law of rotations and to one of operators that write a cache."""
FAMILY = {law: family for family, laws in FAMILIES.items() for law in laws.split()}
"""Law -> its family."""
CONVENTIONS = (
    "ropelab", "qkv_rope", "assemble_mla_kv", "huggingface", "flash_attn", "transformer_engine", "deepspeed", "vllm",
    "complex", "module", "plain", "flashinfer", "mrope", "triton_mrope", "fused_apply_mla_rope_for_q",
    "fused_apply_mla_rope_for_kv", "rope_posfreq_epi", "rope_and_cache", "rope_and_cache_row_scales",
    "rotate_cached_keys", "mla_rope_and_cache", "fused_qknorm_rope_cache", "fused_qk_norm_rope",
    "sglang_fused_qk_norm_rope", "concat_and_cache_mla_rope_fused", "rope_quantize_fp8_append_paged_kv_cache",
    "rope_and_quantize", "rope_and_quantize_packed", "rope_and_quantize_indexer", "rope_and_block_scaled_cache",
)  # fmt: skip
CHOICES = {
    "layout": ("split_half", "interleaved"),
    "out_layout": ("split_half", "interleaved"),
    "seq_format": ("bshd", "sbhd", "bhsd", "thd"),
    "sign": ("standard", "reversed"),
    "maths": ("narrow", "wide"),
    "columns": ("split_half", "interleaved", "pair", "repeated"),
    "dtype": ("float32", "float64", "bfloat16", "float16"),
    "arrays": ("torch", "jax", "numpy"),
}
"""Option -> its values; a convention may take a part of them."""
MOST_TOKENS = 2**22
"""The largest number of tokens of a call."""
