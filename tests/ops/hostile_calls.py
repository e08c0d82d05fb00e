"""Invalid calls: for every public function a valid call, and values that must not take the place of an argument.

A kind says what an argument is. Each kind has hostile values, all of which must be refused by name, and equivalents,
other ways to write a valid value, which must give the same result.
"""

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

import ropelab
from ropelab.angles import frequencies
from ropelab.angles.table_free import fixed_point
from ropelab.angles.tables import frequency_tables
from ropelab.interop import deepspeed, fairseq2, huggingface, megatron, sglang, transformer_engine, vllm
from ropelab.layout.pairing import permutation
from ropelab.positions.axes import interleaved_sections, sections

NAN, INF = math.nan, math.inf
NO_TENSORS = [None, 3.0, [[1.0, 2.0]], np.ones((2, 2)), "tensor"]


def sparse(x):
    return x.to_sparse()


def nested(x):
    return torch.nested.nested_tensor([x[0]], layout=torch.jagged)


class Kind(NamedTuple):
    """A kind of argument.

    Attributes:
        hostile: values that must be refused, or functions that make one of the valid value.
        equivalents: functions that write the valid value in another way.
    """

    hostile: list
    equivalents: list[Callable] = []


INTEGER = Kind(
    [None, "3", 2.5, 2.0, NAN, INF, True, [2], torch.tensor(2), np.float64(2.0), 1j, -5, 10**30],
    [np.int64, np.int32],
)
NUMBER = Kind(
    [None, "2.0", NAN, INF, -INF, True, [2.0], torch.tensor(2.0), 1j, 0.0, -1.0, 10**400], [np.float64, np.float32]
)
FLAG = Kind([None, "no", "False", 0, 1, torch.tensor(True), [True]], [np.bool_])
CHOICE = Kind([3, "nonsense", "", b"bshd", ["bshd"], np.array(["bshd"]), True])
DTYPE = Kind([None, "float32", torch.int32, torch.bool, torch.complex64, torch.float8_e4m3fn, np.float32, float])
DEVICE = Kind(["nonsense", 3.5, ["cpu"], "cuda:77", True, torch.float32], [torch.device])
TENSOR = Kind(
    [*NO_TENSORS, torch.Tensor.long, torch.Tensor.cfloat, torch.Tensor.bool, sparse, nested, lambda x: x.to("meta"),
     torch.Tensor.sum, lambda x: x[None, None]],
)  # fmt: skip
"""The kind of q, k and similar tensors."""
ANY_SHAPE = Kind([*NO_TENSORS, torch.Tensor.bool, sparse, nested, lambda x: x.to("meta")])
"""`TENSOR` where the number of axes is free."""
KEY = Kind(TENSOR.hostile[1:])
TABLE = Kind(
    [*NO_TENSORS, torch.Tensor.long, torch.Tensor.cfloat, torch.Tensor.bool, sparse, lambda x: x.to("meta"),
     lambda x: x[..., :0], lambda x: x[..., :-1], lambda x: torch.cat((x, x), -1), lambda x: x.flatten()[0]],
)  # fmt: skip
POSITIONS = Kind(
    [3.0, [1, 2], np.arange(4), "tensor", torch.Tensor.float, torch.Tensor.bool, torch.Tensor.short, sparse,
     lambda x: x.flatten()[0], lambda x: x[None, None, None]],
    [torch.Tensor.int, torch.Tensor.long],
)  # fmt: skip
FEWER, ELSEWHERE = (lambda x: x[..., :-1]), (lambda x: x.to("meta"))
INTEGERS = Kind(
    [None, 3, "16", 2.5, lambda x: [float(i) for i in x], lambda x: [str(i) for i in x], lambda x: [*x[:-1], None],
     lambda x: [*x[:-1], True], lambda x: dict.fromkeys(x), lambda x: [list(x)], [], lambda x: [-i - 2 for i in x],
     lambda x: [*x[:-1], NAN]],
    [list, tuple, np.array, lambda x: [np.int64(i) for i in x]],
)  # fmt: skip


def but(kind: Kind, *values: Any) -> Kind:
    """The kind without the hostile values ``values``, which the argument accepts."""
    return Kind(
        [v for v in kind.hostile if not any(v is w or type(v) is type(w) and v == w for w in values)], kind.equivalents
    )


def also(kind: Kind, *values: Any) -> Kind:
    return Kind([*kind.hostile, *values], kind.equivalents)


class Target(NamedTuple):
    """A valid call, and the kind of each argument that is replaced.

    Attributes:
        names: further names that a message may begin with, besides the names of the arguments.
    """

    function: Callable
    arguments: dict[str, Any]
    kinds: dict[str, Kind]
    names: tuple[str, ...] = ()


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


def from_config(**settings):
    rope = ropelab.rope_from_config({key: value for key, value in settings.items() if key != "scaling"})
    return rope.tables(16, device="cpu")


def scaled(**parameters):
    rope = ropelab.rope_from_config(CONFIG | {"rope_parameters": {"rope_theta": 1e4} | parameters})
    return rope.tables(16, device="cpu")


def encode(**options):
    forward = {name: options.pop(name) for name in ("seqs", "seqs_layout", "state_bag") if name in options}
    encoder = fairseq2.KernelRotaryEncoder(**options).eval()
    return encoder(forward.pop("seqs"), forward.pop("seqs_layout"), **forward)


def in_place(function: Callable, *names: str) -> Callable:
    """The contents that the function left in the tensors of these names."""

    def call(**arguments):
        arguments |= {
            n: arguments[n].clone() if isinstance(arguments[n], torch.Tensor) else arguments[n] for n in names
        }
        function(**arguments)
        return tuple(arguments[name] for name in names)

    return call


CACHE = torch.zeros(3, 4, 1, 16)
"""A paged cache for one head of k, and below it the cache of multi-head latent attention for half as many features."""
LATENT = torch.zeros(3, 4, 12 + 8)
SLOTS = torch.tensor([5, -1, 0, 11])
QKV = torch.linspace(-1, 1, 4 * 5 * 16).view(4, 80)
CACHES = also(Kind(TENSOR.hostile), lambda x: x.to(torch.uint8), lambda x: x[..., :-1], lambda x: x[:, :0])
SLOT_MAPPING = also(POSITIONS, None, ELSEWHERE, torch.arange(5), torch.tensor([0, 1, 2, 12]), lambda x: x[None])
WEIGHT = but(TABLE, 0.5)
OPTIONS = {"positions": torch.arange(4), "slot_mapping": SLOTS}
PROJECTION = {"x": Q[:, :, 0, :4], "weight": QKV.T, "q_heads": 3, "k_heads": 1, "cos": COS, "sin": SIN,
              "layout": "split_half", "seq_format": "bshd"}  # fmt: skip


PADDED = fairseq2.BatchLayout((2, 4), [4, 3])
BASE = {"rotary_dim": 16, "base": 1e4}
BASED = {"rotary_dim": also(INTEGER, 0, 1, 7), "base": NUMBER}
SCALING = {
    "linear": {"factor": 2.0},
    "ntk": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32, "attention_factor": 1.25, "beta_fast": 32.0,
             "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": True},
    "longrope": {"factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "attention_factor": 1.25,
                 "original_max_position_embeddings": 64},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.5},
    "default": {"mrope_section": [4, 2, 2], "partial_rotary_factor": 1.0, "rope_theta": 1e4},
}  # fmt: skip
OPTIONAL = but(NUMBER, None)
FACTORS = Kind(
    [None, 3, "16", [1.0], [NAN] * 8, [0.0] * 8, [-1.0] * 8, [1.0] * 7 + [NAN], ["1"] * 8, [True] * 8, [None] * 8,
     [INF] * 8, [[1.0]] * 8, {}, "abcdefgh"],
    [tuple, np.array],
)  # fmt: skip
OF_KEY = {
    "factor": NUMBER, "low_freq_factor": NUMBER, "high_freq_factor": NUMBER, "rope_theta": but(NUMBER, None),
    "original_max_position_embeddings": but(INTEGER, None), "attention_factor": OPTIONAL, "beta_fast": OPTIONAL,
    "beta_slow": OPTIONAL, "mscale": but(OPTIONAL, 0.0), "mscale_all_dim": but(OPTIONAL, 0.0),
    "truncate": but(FLAG, None), "short_factor": FACTORS, "long_factor": FACTORS,
    "partial_rotary_factor": also(OPTIONAL, 2.0, 1.01), "mrope_section": but(also(INTEGERS, [4, 5], [8, 1, -1]), None),
}  # fmt: skip


def of_scaling(rope_type: str, parameters: dict) -> Target:
    kinds = {key: OF_KEY[key] for key in parameters}
    if rope_type in ("yarn", "longrope"):  # the factor then is the quotient of the lengths
        kinds["factor"] = but(NUMBER, None)
    if rope_type == "proportional":
        kinds["factor"] = but(NUMBER, None)
    return Target(scaled, {"rope_type": rope_type} | parameters, kinds, names=("config",))


TARGETS = {
    "frequency_tables": Target(
        frequency_tables, {"frequencies": THETA, "seq_len": 5, "attention_factor": 1.5, "dtype": torch.float64, "device": "cpu"},
        {"frequencies": Kind([*NO_TENSORS, THETA.long(), THETA[None], THETA.to("meta"), THETA.cfloat(), THETA[:0]]),
         "seq_len": INTEGER, "attention_factor": NUMBER, "dtype": DTYPE},
    ),
    "fixed_point": Target(
        fixed_point, {"frequencies": THETA, "attention_factor": 1.5, "device": "cpu"},
        {"frequencies": Kind([*NO_TENSORS, THETA.long(), THETA[None], THETA.to("meta"), THETA[:0], THETA * NAN, THETA * INF]),
         "attention_factor": also(NUMBER, 1e39)},
    ),
    "inverse_frequencies": Target(frequencies.inverse_frequencies, BASE, BASED),
    "linear": Target(frequencies.linear, BASE | {"factor": 2.0}, BASED | {"factor": NUMBER}),
    "ntk_aware": Target(frequencies.ntk_aware, BASE | {"factor": 2.0}, BASED | {"factor": also(NUMBER, 1e300)}),
    "dynamic_ntk": Target(
        frequencies.dynamic_ntk, BASE | {"factor": 2.0, "seq_len": 64, "max_position_embeddings": 32},
        BASED | {"factor": NUMBER, "seq_len": INTEGER, "max_position_embeddings": also(INTEGER, 0)},
    ),
    "yarn": Target(
        frequencies.yarn,
        BASE | {"factor": 4.0, "original_max_position_embeddings": 512, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True},
        BASED | {"factor": NUMBER, "original_max_position_embeddings": also(INTEGER, 0), "beta_fast": also(NUMBER, 0.5),
                 "beta_slow": also(NUMBER, 64), "truncate": FLAG, "base": also(NUMBER, 1.0, 0.5)},
    ),
    "yarn_attention_factor": Target(
        frequencies.yarn_attention_factor, {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5},
        {"factor": NUMBER, "mscale": but(NUMBER, None, 0.0), "mscale_all_dim": but(NUMBER, None, 0.0)},
    ),
    "longrope": Target(
        frequencies.longrope, BASE | {"rescale_factors": [1.0, 2.0] * 4}, BASED | {"rescale_factors": FACTORS}
    ),
    "longrope_attention_factor": Target(
        frequencies.longrope_attention_factor, {"factor": 4.0, "original_max_position_embeddings": 512},
        {"factor": NUMBER, "original_max_position_embeddings": also(INTEGER, 0, 1)},
    ),
    "llama3": Target(
        frequencies.llama3, BASE | SCALING["llama3"],
        BASED | {"factor": NUMBER, "low_freq_factor": also(NUMBER, 8.0), "high_freq_factor": also(NUMBER, 0.5),
                 "original_max_position_embeddings": also(INTEGER, 0)},
    ),
    "proportional": Target(
        frequencies.proportional, {"head_dim": 16, "base": 1e4, "rotated_fraction": 0.5, "factor": 2.0},
        {"head_dim": also(INTEGER, 7), "base": NUMBER, "rotated_fraction": also(NUMBER, 1.5), "factor": NUMBER},
    ),
    "axial": Target(
        frequencies.axial, {"axes_dims": (4, 6), "base": 1e4}, {"axes_dims": also(INTEGERS, (3, 5), (0, 4)), "base": NUMBER}
    ),
    "sections": Target(sections, {"widths": (2, 3)}, {"widths": also(INTEGERS, (0, 0))}),
    "interleaved_sections": Target(interleaved_sections, {"widths": (2, 2)}, {"widths": also(INTEGERS, (1, 9))}),
    "permutation": Target(
        permutation, {"rotary_dim": 8, "source": "split_half", "target": "interleaved"},
        {"rotary_dim": also(INTEGER, 0, 7), "source": also(CHOICE, None), "target": also(CHOICE, None)},
    ),
    "rope_from_config": Target(
        from_config,
        CONFIG | {"head_dim": 16, "rotary_dim": 8, "partial_rotary_factor": 0.5, "rope_interleave": False},
        {"head_dim": also(but(INTEGER, None), 64.5, 7), "rotary_dim": but(also(INTEGER, 7, 32), None),
         "max_position_embeddings": but(also(INTEGER, 0), None), "rope_theta": NUMBER, "model_type": Kind([3, ["llama"], True, "unheard_of", "kimi_k2", "gemma4_vision"]),
         "partial_rotary_factor": also(OPTIONAL, 2.0, 1.01), "rope_interleave": but(FLAG, None)},
        names=("config", "layout"),
    ),
    "rope_from_config, heads": Target(
        from_config, CONFIG,
        {"hidden_size": also(INTEGER, 66, 0), "num_attention_heads": also(INTEGER, 0, 5, [4, 4])}, names=("config",),
    ),
    "rope_from_config, arguments": Target(
        lambda **options: ropelab.rope_from_config(**options).inverse_frequencies,
        {"config": CONFIG | {"layer_types": ["full_attention"], "rope_scaling": {"type": "dynamic", "factor": 2.0}},
         "layer_type": "full_attention", "layout": "split_half", "seq_len": 200},
        {"config": Kind([None, "llama", 3, [], {}, SimpleNamespace(), object()]),
         "layer_type": also(CHOICE, "sliding_atention"), "layout": also(CHOICE, "interleaved"), "seq_len": but(INTEGER, None)},
    ),
    "megatron.fused_mla_rope_kv_split": Target(
        megatron.fused_mla_rope_kv_split,
        {"kv": torch.cat((Q, Q), -1)[..., :20], "k_pos_emb": K[..., :8], "cos": FULL[0][:, None, None, :8],
         "sin": FULL[1][:, None, None, :8], "emb_dim": 8, "k_dim": 8, "v_dim": 12, "remove_interleaving": False},
        {"kv": TENSOR, "k_pos_emb": TENSOR, "cos": TABLE, "sin": TABLE, "emb_dim": also(INTEGER, 0, 4),
         "k_dim": also(INTEGER, 7), "v_dim": also(INTEGER, 7), "remove_interleaving": FLAG},
    ),
    "megatron.fused_apply_rotary_pos_emb": Target(
        megatron.fused_apply_rotary_pos_emb,
        {"t": Q, "freqs": ANGLES[:2], "interleaved": False, "mscale": 1.5, "inverse": False},
        {"t": but(TENSOR, 0.5), "freqs": TABLE, "interleaved": FLAG, "mscale": NUMBER, "inverse": FLAG},
    ),
    "vllm.fused_qknorm_rope_cache": Target(
        in_place(vllm.fused_qknorm_rope_cache, "q_out", "k_out", "v_out", "k_cache", "v_cache"),
        OPTIONS | {"q_out": QKV[:, :48] + 1, "k_out": QKV[:, 48:64] + 1, "v_out": QKV[:, 64:] + 1, "qkv": QKV,
         "q_weight": COS[0].repeat(2), "k_weight": SIN[1].repeat(2), "cos": COS, "sin": SIN, "k_cache": CACHE,
         "v_cache": CACHE + 1, "head_dim": 16, "num_q_heads": 3, "num_kv_heads": 1, "rotary_pairs": 8, "epsilon": 1e-6,
         "norm_weight_bias": 1.0, "kv_cache_dtype": "auto"},
        {"q_out": but(TENSOR, None), "qkv": TENSOR, "q_weight": WEIGHT, "k_weight": WEIGHT, "cos": TABLE, "sin": TABLE,
         "positions": also(POSITIONS, None, FEWER, ELSEWHERE), "slot_mapping": SLOT_MAPPING, "k_cache": CACHES,
         "v_cache": CACHES, "head_dim": also(INTEGER, 0, 8), "num_q_heads": also(INTEGER, 4),
         "num_kv_heads": also(INTEGER, 2), "rotary_pairs": also(INTEGER, 0, 4), "epsilon": but(NUMBER, 0.0),
         "norm_weight_bias": but(NUMBER, 0.0, -1.0), "kv_cache_dtype": also(CHOICE, None, "fp8", "int8")},
        names=("k_cache", "v_cache"),
    ),
    "vllm.concat_and_cache_mla_rope_fused": Target(
        in_place(vllm.concat_and_cache_mla_rope_fused, "q_pe", "k_pe", "kv_cache"),
        OPTIONS | {"q_pe": Q[0, ..., :8], "k_pe": K[0, :, 0, :8], "kv_c": K[1, :, 0, :12], "kv_cache": LATENT,
         "cos_sin_cache": torch.cat((COS[:, ::2], SIN[:, ::2]), -1), "is_neox": False, "kv_cache_dtype": "auto",
         "kv_cache_scale": torch.ones(1)},
        {"q_pe": TENSOR, "k_pe": TENSOR, "kv_c": TENSOR, "cos_sin_cache": TABLE, "is_neox": FLAG,
         "positions": also(POSITIONS, None, FEWER, ELSEWHERE), "slot_mapping": SLOT_MAPPING, "kv_cache": CACHES,
         "kv_cache_dtype": also(CHOICE, None, "fp8")},
        names=("kv_cache",),
    ),
    "deepspeed.apply_rotary_pos_emb": Target(
        deepspeed.apply_rotary_pos_emb, {"t": Q, "freqs_cos": FULL[0][:, None], "freqs_sin": FULL[1][:, None]},
        {"t": ANY_SHAPE, "freqs_cos": TABLE, "freqs_sin": TABLE},
    ),
    "deepspeed.fused_rope_forward": Target(
        deepspeed.fused_rope_forward,
        {"q": Q.transpose(1, 2), "k": K.transpose(1, 2), "cos": FULL[0], "sin": FULL[1]},
        {"q": ANY_SHAPE, "k": ANY_SHAPE, "cos": TABLE, "sin": TABLE},
    ),
    "huggingface.apply_rotary_pos_emb": Target(
        huggingface.apply_rotary_pos_emb,
        {"q": Q, "k": K, "cos": FULL[0][None], "sin": FULL[1][None], "unsqueeze_dim": 2, "layout": "split_half"},
        {"q": ANY_SHAPE, "k": ANY_SHAPE,
         "cos": TABLE, "sin": TABLE, "unsqueeze_dim": also(INTEGER, 4, -5), "layout": also(CHOICE, None)},
    ),
    "huggingface.patch": Target(huggingface.patch, {"model": torch.nn.Linear(1, 1)}, {"model": Kind([None, "llama", torch.nn.Linear])}),
    "transformer_engine.apply_rotary_pos_emb": Target(
        transformer_engine.apply_rotary_pos_emb,
        {"t": Q, "freqs": ANGLES, "tensor_format": "bshd", "start_positions": torch.tensor([1, 2]), "interleaved": False,
         "fused": True, "cp_size": 1, "cp_rank": 0},
        {"t": TENSOR, "freqs": also(TABLE, ANGLES.long(), ANGLES[:2], ANGLES[0]), "tensor_format": also(CHOICE, None),
         "start_positions": also(POSITIONS, FEWER, ELSEWHERE, torch.tensor([7, 7])), "interleaved": FLAG, "fused": FLAG,
         "cp_size": also(INTEGER, 0, 4), "cp_rank": also(INTEGER, 1)},
    ),
    "transformer_engine.apply_rotary_pos_emb, thd": Target(
        transformer_engine.apply_rotary_pos_emb,
        {"t": Q.flatten(0, 1), "freqs": ANGLES, "tensor_format": "thd", "start_positions": torch.tensor([1, 2]),
         "cu_seqlens": CU, "cp_size": 1, "cp_rank": 0},
        {"t": TENSOR, "freqs": also(TABLE, ANGLES.long(), ANGLES[:2], ANGLES[0]),
         "start_positions": also(POSITIONS, FEWER, ELSEWHERE, torch.tensor([7, 7])),
         "cu_seqlens": also(POSITIONS, None, ELSEWHERE, torch.tensor([], dtype=torch.long), torch.tensor([1, 4, 5]), torch.tensor([0, 4, 40])),
         "cp_size": also(INTEGER, 0), "cp_rank": also(INTEGER, 1)},
    ),
    "transformer_engine.apply_fused_qkv_rotary_pos_emb": Target(
        transformer_engine.apply_fused_qkv_rotary_pos_emb,
        {"qkv": torch.ones(2, 4, 2, 64), "q_freqs": ANGLES, "k_freqs": ANGLES, "qkv_split_arg_list": [32, 16, 16],
         "tensor_format": "bshd", "start_positions": torch.tensor([1, 2]), "interleaved": False, "cp_size": 1, "cp_rank": 0},
        {"qkv": TENSOR, "q_freqs": also(TABLE, ANGLES.long(), ANGLES[:2]), "k_freqs": also(TABLE, ANGLES.long(), ANGLES[:2]),
         "qkv_split_arg_list": also(INTEGERS, [32, 32], [33, 16, 15]), "tensor_format": also(CHOICE, None, "thd"),
         "start_positions": also(POSITIONS, FEWER, ELSEWHERE, torch.tensor([7, 7])), "interleaved": FLAG,
         "cp_size": also(INTEGER, 0, 4), "cp_rank": also(INTEGER, 1)},
    ),
    "sglang.rotary_embedding_cos_sin": Target(
        in_place(sglang.rotary_embedding_cos_sin, "query", "key"),
        {"cos": COS[:4], "sin": SIN[:4], "query": Q, "key": K, "head_size": 16, "interleaved": False, "rotary_dim": 16,
         "positions": torch.arange(8) % 4},
        {"cos": TABLE, "sin": TABLE, "query": TENSOR, "key": KEY, "head_size": also(INTEGER, 8),
         "interleaved": FLAG, "rotary_dim": but(also(INTEGER, 0, 7, 32), None),
         "positions": but(also(POSITIONS, FEWER, ELSEWHERE, torch.full((8,), 8)), None)},
    ),
    "sglang.apply_rope_qk_inplace": Target(
        in_place(sglang.apply_rope_qk_inplace, "q", "k"),
        {"q": Q, "k": K, "cos_sin_cache": torch.cat((COS, SIN), -1), "head_size": 16, "is_neox": True,
         "positions": torch.arange(8) % 4},
        {"q": TENSOR, "k": but(KEY, None), "cos_sin_cache": TABLE, "head_size": but(also(INTEGER, 8), None),
         "is_neox": FLAG, "positions": but(also(POSITIONS, FEWER, ELSEWHERE, torch.full((8,), 8)), None)},
    ),
    "sglang.apply_rope_with_cos_sin_cache_inplace": Target(
        in_place(sglang.apply_rope_with_cos_sin_cache_inplace, "query", "key"),
        {"positions": torch.arange(8).view(2, 4), "query": Q, "key": K, "head_size": 16,
         "cos_sin_cache": torch.cat((COS, SIN), -1), "is_neox": True},
        {"positions": also(POSITIONS, None, FEWER, ELSEWHERE, torch.full((2, 4), 8)), "query": TENSOR, "key": KEY,
         "head_size": also(INTEGER, 8), "cos_sin_cache": TABLE, "is_neox": FLAG},
    ),
    "fairseq2.BatchLayout": Target(
        lambda **options: fairseq2.BatchLayout(**options).position_indices,
        {"shape": (2, 4), "seq_lens": [4, 3], "packed": False, "device": "cpu"},
        {"shape": also(INTEGERS, (2,), (0, 4)), "seq_lens": but(also(INTEGERS, [5, 1], [1]), None),
         "packed": FLAG, "device": DEVICE},
    ),
    "fairseq2.KernelRotaryEncoder": Target(
        encode,
        {"encoding_dim": 16, "max_seq_len": 8, "theta": 1e4, "freqs_init_fn": lambda encoder: THETA.float(), "device": "cpu",
         "impl": "llama", "seqs": Q, "seqs_layout": PADDED, "state_bag": SimpleNamespace(step_nr=2)},
        {"encoding_dim": also(INTEGER, 7, 0), "max_seq_len": also(INTEGER, 0), "theta": NUMBER,
         "freqs_init_fn": Kind([3, "f", lambda e: None, lambda e: THETA[:3], lambda e: THETA.long()]), "device": DEVICE,
         "impl": also(CHOICE, None), "seqs": Kind(TENSOR.hostile[:-1]),
         "seqs_layout": Kind([None, 3, "layout", SimpleNamespace(packed=False, padded=True, max_seq_len=4, position_indices=None),
                              SimpleNamespace(packed=False, padded=True, max_seq_len=4, position_indices=torch.zeros(2, 3).long())]),
         "state_bag": Kind([3, SimpleNamespace(step_nr=1.5), SimpleNamespace(step_nr=-1), SimpleNamespace(step_nr=100)])},
    ),
}  # fmt: skip
ENCODER = {"encoding_dim": 16, "max_seq_len": 8, "theta": 1e4, "device": "cpu"}
HOSTILE_ENCODER = {
    "encoding_dim": also(INTEGER, 7, 0),
    "max_seq_len": also(INTEGER, 0),
    "theta": NUMBER,
    "device": DEVICE,
}
TARGETS["fairseq2.DualRotaryEncoder"] = Target(
    lambda **options: fairseq2.DualRotaryEncoder(**options)(Q, PADDED), ENCODER | {"dual_theta": 1e5},
    HOSTILE_ENCODER | {"encoding_dim": also(INTEGER, 6, 0), "dual_theta": NUMBER},
)  # fmt: skip
TARGETS["fairseq2.YaRNRotaryEncoder"] = Target(
    lambda **options: fairseq2.YaRNRotaryEncoder(**options)(Q, PADDED),
    ENCODER | {"scale_factor": 4.0, "original_max_seq_len": 32, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0,
               "mscale_all_dim": 0.5, "truncate": True},
    HOSTILE_ENCODER | {"scale_factor": NUMBER, "original_max_seq_len": also(INTEGER, 0), "beta_fast": NUMBER,
                       "beta_slow": NUMBER, "mscale": but(NUMBER, 0.0), "mscale_all_dim": but(NUMBER, 0.0),
                       "truncate": FLAG},
)  # fmt: skip
for rope_type, parameters in SCALING.items():
    TARGETS[f"rope_from_config, {rope_type}"] = of_scaling(rope_type, parameters)


class Call(NamedTuple):
    target: str
    argument: str
    value: Any
    equivalent: bool

    def __str__(self) -> str:
        shown = (
            self.value.__name__ if callable(self.value) and hasattr(self.value, "__name__") else f"{self.value!r:.40}"
        )
        return f"{self.target}({self.argument}={'as ' if self.equivalent else ''}{shown})".replace("\n", "")


def equal(found: Any, expected: Any) -> bool:
    """Whether two results are the same, bit for bit, NaN included."""
    if isinstance(expected, torch.Tensor):
        same = found.shape == expected.shape and found.dtype == expected.dtype and found.device == expected.device
        return same and torch.equal(found.nan_to_num(), expected.nan_to_num())
    if isinstance(expected, (tuple, list)):
        return len(found) == len(expected) and all(map(equal, found, expected))
    return found == expected


def calls() -> Iterator[Call]:
    for name, target in TARGETS.items():
        for argument, kind in target.kinds.items():
            yield from (Call(name, argument, value, False) for value in kind.hostile)
            yield from (Call(name, argument, value, True) for value in kind.equivalents)


def run(call: Call) -> Any:
    """The result of the call."""
    target = TARGETS[call.target]
    valid, value = target.arguments[call.argument], call.value
    makes_one = callable(value) and not isinstance(value, type) and call.argument != "freqs_init_fn"
    if call.equivalent or makes_one:
        value = value(valid)
    return target.function(**target.arguments | {call.argument: value})


def names(call: Call) -> set[str]:
    """The names that the message of a refusal may begin with."""
    target = TARGETS[call.target]
    return {*target.arguments, *target.names}
