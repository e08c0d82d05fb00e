"""Architectures that break a law of attention by design, and the design."""

from collections.abc import Mapping

DELIBERATE: Mapping[tuple[str, str], str] = {
    ("beam", "distances_only"): "layers without a rotation scale their queries by the position",
    ("csm", "angles_of_the_configuration"): "the depth decoder says that it ignores position_ids",
    ("csm", "positions_are_used"): "the depth decoder says that it ignores position_ids, and counts tokens itself",
    (
        "deepseek_v4",
        "distances_only",
    ): "compressed keys count windows from the first token, not from position_ids",
    ("hunyuan_v1_dense", "distances_only"): "norms after the rotation weigh the two features of a pair apart",
    ("hunyuan_v1_moe", "distances_only"): "norms after the rotation weigh the two features of a pair apart",
    ("hunyuan_vl", "distances_only"): "norms after the rotation weigh the two features of a pair apart",
    ("mistral_large4", "distances_only"): "queries are scaled by the logarithm of the position",
    ("recurrent_gemma", "distances_only"): "position 0 resets the state of the recurrent layers",
}
"""(architecture, name of the law) -> the design that breaks the law. Source: the modeling files of Transformers
5.23."""
