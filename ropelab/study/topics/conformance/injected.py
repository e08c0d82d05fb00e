"""The injected fault of each entry of the catalogue in the terms of the identification.

Each line follows from the code of the entry, not from an identification.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Injected(NamedTuple):
    """A fault: kinds of deviations, any of which is right; recovered parameters; whether only gradients deviate.

    ``name`` is the input that deviates, empty for all inputs. ``says`` is a part of the words, where the kind has no
    parameters that tell its members apart.
    """

    kinds: tuple[str, ...]
    parameters: dict[str, Any] = {}
    gradient: bool = False
    name: str = ""
    says: str = ""


def _one(kind: str, says: str = "", gradient: bool = False, name: str = "", **parameters) -> Injected:
    return Injected((kind,), parameters, gradient, name, says)


INJECTED: dict[str, Injected] = {
    "backward_applies_forward": _one("sign", gradient=True),
    "tail_gradient_is_one": _one("tail", "has 1", gradient=True),
    "no_autograd_node": _one("exception", "Broken", gradient=True),
    "gradient_stopped": _one("zero", gradient=True),
    "backward_permutes_heads": _one("order", "heads", gradient=True),
    "backward_forgets_offsets": _one("row", "number of the token within the call", gradient=True),
    "strided_gradient_rejected": _one("exception", "expanded or strided", gradient=True),
    "cached_angles_keep_the_graph": _one("exception", "second step", gradient=True),
    "query_and_key_mixed": _one("wiring", "read"),
    "layout_flag_ignored": _one("layout", layout="split_half", out_layout="split_half"),
    "layout_flag_inverted": _one("layout", layout="interleaved", out_layout="interleaved"),
    "sign_reversed_undeclared": _one("sign"),
    "heads_taken_for_the_sequence": _one("row", "number of the head"),
    "rotary_dim_ignored": _one("wiring", "other sums"),
    "sine_read_behind_the_padding": _one("order of frequencies", sines=[2, 3, 4, 5, -1, -1]),
    "key_permuted_with_query_heads": _one("wiring", "other sums"),
    "height_and_width_swapped": _one("order of frequencies", shift=3),
    "applied_twice": _one("multiple", multiple=2.0),
    "head_added_to_position": _one("row", "adds the number of the head"),
    "positions_from_one": _one("offset", offset=1.0),
    "decode_always_at_zero": _one("row", "single token"),
    "offset_advanced_too_early": _one("arguments"),
    "position_modulo_length": _one("row", "modulo the number of tokens"),
    "negative_position_reads_before_the_table": _one("row", "modulo the largest position plus 1"),
    "table_of_batch_zero": _one("row", "of the first sequence"),
    "frequencies_of_batch_zero": _one("row", "of the first sequence"),
    "positions_run_across_documents": _one("row", "number of the token within the call"),
    "document_begins_at_a_decrease": _one("row", "every decrease"),
    "search_stops_at_empty_document": _one("row", "first empty document"),
    "table_of_rank_zero": _one("row", "rank 0"),
    "dual_chunks_taken_for_contiguous": _one("row", "contiguous"),
    "skipped_rows_uninitialised": _one("padding", "unwritten"),
    "undeclared_in_place": _one("inputs"),
    "tail_not_copied": _one("tail", "does not write"),
    "single_head_lost": _one("identity", "single head"),
    "shuffle_in_a_divergent_branch": _one("NaN", "heads >= 1"),
    "row_stride_of_a_size_one_axis": _one("memory", "several times"),
    "frequencies_in_bfloat16": _one("rounding of frequency", format="bfloat16"),
    "positions_in_bfloat16": _one("rounding of position", format="bfloat16"),
    "angles_under_autocast": _one("rounding of operands", "autocast", format="bfloat16"),
    "angles_into_tf32": _one("rounding of operands", "TF32", format="TF32"),
    "fast_math_sine": _one("rounding of angle", "one turn"),
    "frequencies_uninitialised": _one("NaN"),
    "attention_factor_twice": _one("factor", factor=1.138629),
    "attention_factor_ignored": _one("factor", power=0.0),
    "scaled_frequencies_dropped": _one("frequencies", base=10000.0),
    "rescaled_cache_stays": _one("dynamic scaling", scaling="linear", length=16.0),
    "table_not_sized_for_scaling": _one("clamp", last=4095),
    "integer_division_in_the_exponent": _one("frequencies", "same frequency for all pairs"),
    "exponent_by_head_dim": _one("frequencies", divisor=16),
    "mask_checks_the_table": _one("overwritten", block=8),
    "offsets_in_int32": _one("addresses", "2**31"),
    "vectors_straddle_the_halves": _one("wiring", "next head"),
    "tokens_on_the_y_axis": _one("exception", "65535"),
    "key_read_with_query_strides": _one("strides"),
    "one_lane_per_feature_in_place": _one("in turn"),
    "reordered_in_place": _one("in turn", gradient=True),
    "contiguity_test_without_call": _one("memory", gradient=True),
}
"""Fault of the catalogue -> the injected fault."""
