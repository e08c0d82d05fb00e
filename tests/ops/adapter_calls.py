"""Valid calls of adapters, and of functions of the library that have no public name; and their wrong values by hand.

`tests.ops.hostile_adapters` replaces each argument of a valid call by values that cannot be meant.
"""

from collections.abc import Callable
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch

import ropelab
from ropelab.angles import frequencies
from ropelab.angles.table_free import fixed_point
from ropelab.angles.tables import frequency_tables
from ropelab.interop import deepspeed, fairseq2, flashinfer, huggingface, megatron, sglang, transformer_engine, vllm
from ropelab.layout.pairing import permutation
from ropelab.positions.axes import interleaved_sections, sections
from tests.interop.test_interop_flashinfer import append_call
from tests.interop.test_interop_vllm import latent_call, norm_call
from tests.ops.hostile_adapters import Adapter, copied

Q = torch.linspace(-1, 1, 2 * 4 * 3 * 16).view(2, 4, 3, 16)
K = torch.linspace(-1, 1, 2 * 4 * 1 * 16).view(2, 4, 1, 16)
COS, SIN = ropelab.rotary_table(8, 16, device="cpu")
FULL = torch.cat((COS, COS), -1)[:4], torch.cat((SIN, SIN), -1)[:4]
CU = torch.tensor([0, 4, 8])
THETA = frequencies.inverse_frequencies(16)
CONFIG = {
    "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 128, "rope_theta": 1e4,
    "model_type": "llama",
}  # fmt: skip
ANGLES = torch.linspace(0, 1, 8 * 16).view(8, 1, 1, 16)
LATENT = torch.zeros(3, 4, 12 + 8)
"""A paged cache of multi-head latent attention."""
SLOTS = torch.tensor([5, -1, 0, 11])
QKV = torch.linspace(-1, 1, 4 * 5 * 16).view(4, 80)
STARTS = torch.tensor([1, 2])
PROJECTION = {"x": Q[:, :, 0, :4], "weight": QKV.T, "q_heads": 3, "k_heads": 1, "cos": COS, "sin": SIN,
              "layout": "split_half", "seq_format": "bshd"}  # fmt: skip


def of(function: Callable, *free: str, **arguments: Any) -> Adapter:
    """The function with a valid call."""
    return Adapter(function, lambda: copied(arguments), free)


# --------------------------------------------------------------------------------------------------------- adapters


def append(**options: Any) -> Adapter:
    """FlashInfer's function with tensors for its results that are not neighbours."""

    def arguments():
        call = append_call(**options)
        outs = {f"{name}_out": call[name].to(call["quantize_dtype"]) for name in ("q_rope", "q_nope")}
        return call | outs | {"enable_pdl": False}

    return Adapter(
        flashinfer.rope_quantize_fp8_append_paged_kv_cache, arguments, ("quantize_dtype torch.float8_e4m3fn",)
    )


def mla(function: Callable, *free: str, **more: Any) -> Adapter:
    """Megatron-LM's function for queries of latent attention, with packed tokens."""
    cos, sin = (torch.randn(8, 1, 1, 8) for _ in range(2))
    return of(
        function, *free, t=Q.flatten(0, 1), cos=cos, sin=sin, emb_dim=8, cu_seqlens_q=CU, cp_rank=0, cp_size=1,
        rotary_interleaved=False, **more,
    )  # fmt: skip


MEGATRON = SimpleNamespace(rotary_interleaved=False, multi_latent_attention=False, apply_rope_fusion=True)
GROUP = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
PACKED = {"t": Q.flatten(0, 1), "cu_seqlens": CU, "freqs": ANGLES, "mscale": 1.5, "inverse": False}
RANK = {"cp_size": 1, "cp_rank": 0}
TE = {"freqs": ANGLES, "start_positions": STARTS, "interleaved": False}
PLACED = {"positions": torch.arange(4), "slot_mapping": SLOTS}
FREE = ("of another dtype", "complex")
"""DeepSpeed and Hugging Face compute in any dtype."""
ADAPTERS = {
    "flashinfer, GQA": append(nope_dim=8, heads=(2, 1)),
    "flashinfer, HND": append(nope_dim=8, heads=(2, 1), kv_layout="HND"),
    "flashinfer, MLA": append(nope_dim=40, heads=(2, 1), latent=True),
    "flashinfer, slots": Adapter(
        flashinfer.slot_mapping,
        lambda: {name: x for name, x in append_call().items() if name in signature(flashinfer.slot_mapping).parameters},
    ),
    "vllm, norm": Adapter(vllm.fused_qknorm_rope_cache, lambda: norm_call(kind="fp8"), ("q_out of 8 bits",)),
    "vllm, norm, auto": Adapter(vllm.fused_qknorm_rope_cache, norm_call, ("k_scale", "v_scale", "q_out of 8 bits")),
    "vllm, MLA": Adapter(vllm.concat_and_cache_mla_rope_fused, lambda: latent_call(kind="fp8")),
    "vllm, MLA, auto": of(
        vllm.concat_and_cache_mla_rope_fused, "kv_cache_scale", "kv_cache of 8 bits", **PLACED, q_pe=Q[0, ..., :8],
        k_pe=K[0, :, 0, :8], kv_c=K[1, :, 0, :12], kv_cache=LATENT,
        cos_sin_cache=torch.cat((COS[:, ::2], SIN[:, ::2]), -1), is_neox=False, kv_cache_dtype="auto",
        kv_cache_scale=torch.ones(1),
    ),
    "megatron, q in place": mla(
        megatron.fused_mla_rope_inplace, nope_dim=8, inverse=False, remove_interleaving=False
    ),
    "megatron, q": mla(
        megatron.fused_mla_rope_out_of_place, "cu_seqlens_q", "cp_size beyond integers", nope_dim=8,
        position_ids=torch.arange(8), inverse=False, remove_interleaving=False,
    ),
    "megatron, q of 0.16.1": mla(megatron.fused_apply_mla_rope_for_q, qk_head_dim=8),
    "megatron, kv": of(
        megatron.fused_mla_rope_kv_split, "cp_size beyond integers", kv=torch.cat((Q, Q), -1)[..., :20],
        k_pos_emb=K[..., :8], cos=FULL[0][:, None, None, :8], sin=FULL[1][:, None, None, :8], emb_dim=8, k_dim=8,
        v_dim=12, remove_interleaving=False, **RANK,
    ),
    "megatron, dense": of(
        megatron.fused_apply_rotary_pos_emb, t=Q, freqs=ANGLES[:2], interleaved=False, mscale=1.5, inverse=False,
        transpose_output_memory=False,
    ),
    "megatron, packed": of(megatron.fused_apply_rotary_pos_emb_thd, **PACKED, **RANK, interleaved=False),
    "megatron, rope_utils": Adapter(
        megatron.apply_rotary_pos_emb,
        lambda: copied(PACKED) | {
            "config": MEGATRON, "cp_group": GROUP, "mla_rotary_interleaved": False,
            "mla_output_remove_interleaving": False, "max_seqlen": 8,
        }, ("max_seqlen beyond integers",),
    ),
    "deepspeed": of(
        deepspeed.apply_rotary_pos_emb, *FREE, t=Q, freqs_cos=FULL[0][:, None], freqs_sin=FULL[1][:, None]
    ),
    "deepspeed, rows": of(
        deepspeed.fused_rope_forward, *FREE, q=Q.transpose(1, 2), k=K.transpose(1, 2), cos=FULL[0], sin=FULL[1]
    ),
    "huggingface": of(
        huggingface.apply_rotary_pos_emb, *FREE, q=Q, k=K, cos=FULL[0][None], sin=FULL[1][None], unsqueeze_dim=2,
        layout="split_half",
    ),
    "transformer_engine": of(
        transformer_engine.apply_rotary_pos_emb, t=Q, **TE, tensor_format="bshd", fused=True, **RANK
    ),
    "transformer_engine, packed": of(
        transformer_engine.apply_rotary_pos_emb, t=Q.flatten(0, 1), freqs=ANGLES, tensor_format="thd",
        start_positions=STARTS, cu_seqlens=CU, **RANK,
    ),
    "transformer_engine, qkv": of(
        transformer_engine.apply_fused_qkv_rotary_pos_emb, qkv=torch.ones(2, 4, 2, 64), q_freqs=ANGLES, k_freqs=ANGLES,
        qkv_split_arg_list=[32, 16, 16], tensor_format="bshd", start_positions=STARTS, interleaved=False, **RANK,
    ),
    "sglang, cos and sin": of(
        sglang.rotary_embedding_cos_sin, cos=COS[:4], sin=SIN[:4], query=Q, key=K, head_size=16, interleaved=False,
        rotary_dim=16, positions=torch.arange(8) % 4,
    ),
    "sglang, diffusion": of(
        sglang.apply_rope_qk_inplace, q=Q, k=K, cos_sin_cache=torch.cat((COS, SIN), -1), head_size=16, is_neox=True,
        positions=torch.arange(8) % 4,
    ),
    "sglang, cache": of(
        sglang.apply_rope_with_cos_sin_cache_inplace, positions=torch.arange(8).view(2, 4), query=Q, key=K,
        head_size=16, cos_sin_cache=torch.cat((COS, SIN), -1), is_neox=True,
    ),
}  # fmt: skip

# -------------------------------------------------------------------------------------- frequencies, configurations


def configured(*, config=None, layout=None, **settings: Any) -> ropelab.Rope:
    """The rope of a configuration; a refusal may name the configuration, and the layout that a model needs."""
    return ropelab.rope_from_config(settings)


def scaled(*, config=None, **parameters: Any) -> ropelab.Rope:
    """The rope of a configuration with these parameters of its scaling."""
    return ropelab.rope_from_config(CONFIG | {"rope_parameters": {"rope_theta": 1e4} | parameters})


def encoded(encoder: Callable) -> Callable:
    """Make an encoder of fairseq2, and encode."""

    def call(seqs=Q, seqs_layout=PADDED, state_bag=None, **options):
        return encoder(**options).eval()(seqs, seqs_layout, state_bag=state_bag)

    return call


PADDED = fairseq2.BatchLayout((2, 4), [4, 3])
BASE = {"rotary_dim": 16, "base": 1e4}
ENCODER = {"encoding_dim": 16, "max_seq_len": 8, "theta": 1e4, "device": "cpu"}
YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
SCALING = {
    "linear": {"factor": 2.0},
    "ntk": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.25, "mscale": 1.0,
             "mscale_all_dim": 0.5} | YARN,
    "longrope": {"factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "attention_factor": 1.25,
                 "original_max_position_embeddings": 64},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.5},
    "default": {"mrope_section": [4, 2, 2], "partial_rotary_factor": 1.0, "rope_theta": 1e4},
}  # fmt: skip
WIDE = ("huge", "tiny")
"""Numbers that float64 holds."""
INNER = {
    "frequency_tables": of(
        frequency_tables, *WIDE, frequencies=THETA, seq_len=5, attention_factor=1.5, dtype=torch.float64, device="cpu"
    ),
    "fixed_point": of(fixed_point, "without memory", frequencies=THETA, attention_factor=1.5, device="cpu"),
    "inverse_frequencies": of(frequencies.inverse_frequencies, *WIDE, **BASE),
    "linear": of(frequencies.linear, *WIDE, **BASE, factor=2.0),
    "ntk_aware": of(frequencies.ntk_aware, *WIDE, **BASE, factor=2.0),
    "dynamic_ntk": of(frequencies.dynamic_ntk, *WIDE, **BASE, factor=2.0, seq_len=64, max_position_embeddings=32),
    "yarn": of(frequencies.yarn, *WIDE, **BASE, factor=4.0, original_max_position_embeddings=512, **YARN),
    "yarn_attention_factor": of(
        frequencies.yarn_attention_factor, *WIDE, factor=4.0, mscale=1.0, mscale_all_dim=0.5
    ),
    "longrope": of(frequencies.longrope, *WIDE, **BASE, rescale_factors=[1.0, 2.0] * 4),
    "longrope_attention_factor": of(
        frequencies.longrope_attention_factor, *WIDE, factor=4.0, original_max_position_embeddings=512
    ),
    "llama3": of(frequencies.llama3, *WIDE, **BASE, **SCALING["llama3"]),
    "proportional": of(frequencies.proportional, *WIDE, head_dim=16, base=1e4, rotated_fraction=0.5, factor=2.0),
    "axial": of(frequencies.axial, *WIDE, axes_dims=(4, 6), base=1e4),
    "sections": of(sections, widths=(2, 3)),
    "interleaved_sections": of(interleaved_sections, widths=(2, 2)),
    "permutation": of(permutation, rotary_dim=8, source="split_half", target="interleaved"),
    "configuration": of(
        configured, *WIDE, "None", "hidden_size", "num_attention_heads", "model_type", **CONFIG, head_dim=16,
        rotary_dim=8, partial_rotary_factor=0.5, rope_interleave=False,
    ),
    "configuration, heads": of(configured, *WIDE, "None", "model_type", **CONFIG),
    **{f"scaling, {kind}": of(scaled, *WIDE, "None", rope_type=kind, **more) for kind, more in SCALING.items()},
    "fairseq2, layout": of(fairseq2.BatchLayout, shape=(2, 4), seq_lens=[4, 3], packed=False, device="cpu"),
    "fairseq2, kernel": of(encoded(fairseq2.KernelRotaryEncoder), *WIDE, "device", **ENCODER, impl="llama", seqs=Q),
    "fairseq2, dual": of(encoded(fairseq2.DualRotaryEncoder), *WIDE, "device", **ENCODER, dual_theta=1e5),
    "fairseq2, YaRN": of(
        encoded(fairseq2.YaRNRotaryEncoder), *WIDE, "device", **ENCODER, **YARN, scale_factor=4.0, mscale=1.0,
        mscale_all_dim=0.5, original_max_seq_len=32,
    ),
}  # fmt: skip
