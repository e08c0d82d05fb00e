"""The calling conventions of rotations by name."""

from ropelab.conformance.convention import Convention
from ropelab.conformance.latent_conventions import AssembleMLA, MegatronMLAKeyValue, MegatronMLAQuery
from ropelab.conformance.projection_conventions import QKVRope, RotaryEpilogue
from ropelab.conformance.rotation_conventions import (
    VLLM,
    ComplexNumbers,
    DeepSpeed,
    FlashAttention,
    FlashInfer,
    GatheredMRope,
    HuggingFace,
    Module,
    MRope,
    Plain,
    Ropelab,
    TransformerEngine,
)

CONVENTIONS: dict[str, Convention] = {
    c.name: c
    for c in (
        Ropelab(), QKVRope(), AssembleMLA(), HuggingFace(), FlashAttention(), TransformerEngine(), DeepSpeed(), VLLM(),
        ComplexNumbers(), Module(), Plain(), FlashInfer(), MRope(), GatheredMRope(), MegatronMLAQuery(),
        MegatronMLAKeyValue(), RotaryEpilogue(),
    )
}  # fmt: skip
"""Name -> convention."""
