"""Wrong values of arguments, by hand, for the valid calls of `tests.ops.public_calls` and `tests.ops.adapter_calls`.

A row has the argument and the value, or a function that makes the value of the valid one. A third entry is the name to
be blamed, where it is that of another argument. Where several arguments change, a row has all of them, and this name.
`any_name` makes rows whose refusal may name any argument.
"""

import math
from types import SimpleNamespace

import torch

import ropelab
from ropelab.angles.frequencies import inverse_frequencies
from tests.ops.adapter_calls import CONFIG

FLOAT8 = torch.float8_e4m3fn
NAN, INF = math.nan, math.inf
FEWER, THETA = (lambda x: x[..., :-1]), inverse_frequencies(16)
ONES, HALF, TO_E5M2 = torch.ones, (lambda x: x.half()), (lambda x: x.to(torch.float8_e5m2))
ELSEWHERE, INTEGERS, FLOATS = (lambda x: x.to("meta")), torch.Tensor.long, torch.Tensor.float


def grad(x):
    return x.detach().clone().requires_grad_()


def shaped(*shape, dtype=torch.float32):
    return torch.zeros(shape).to(dtype)


def apart(x):
    """The features in every second place."""
    return torch.cat((x, x), -1)[..., ::2]


def one_place(x):
    return x[:1].expand(x.shape)


def more_heads(x):
    return x.repeat_interleave(2, -2)


def sparse(x):
    return x.to_sparse()


def any_name(**values):
    """A row for each value of each argument."""
    return [({name: value}, None) for name, many in values.items() for value in many]


def nested(layout):
    return lambda x: torch.nested.nested_tensor(list(x), layout=layout)


THD = {"q": lambda x: x[0], "k": lambda x: x[0], "seq_format": "thd"}
POSITIONS = [
    ("positions", lambda x: x.float()), ("positions", lambda x: x[:-1]), ("positions", ELSEWHERE),
    ("positions", lambda x: x.tolist()), ("positions", lambda x: x * 0 + 8), ("positions", lambda x: x * 0 - 8),
    ("offsets", 3),
]  # fmt: skip
ROPE = [
    ("q", lambda x: x[0]), ("q", lambda x: x.tolist()), ("q", INTEGERS), ("q", sparse), ("k", lambda x: x[None]),
    ("k", HALF), ("k", ELSEWHERE), ("k", lambda x: x[:1]), ("k", lambda x: x[:, :3]), ("k", lambda x: x[..., :8]),
    ("k", sparse), ("k", nested(torch.strided)), ("k", nested(torch.jagged)), ("cos", lambda x: x[None, None]),
    ({"cos": lambda x: x.expand(3, -1, -1), "sin": lambda x: x.expand(3, -1, -1)}, "cos"),
    ({"cos": lambda x: x[:3], "sin": lambda x: x[:3], "positions": None}, "cos"),
    ({"cos": lambda x: x[:, [0] * 16], "sin": lambda x: x[:, [0] * 16], "rotary_slice": None}, "cos"),
    ({"cos": lambda x: x[:, :0], "sin": lambda x: x[:, :0], "rotary_slice": None}, "cos"), ("cos", INTEGERS),
    ("cos", ONES(())), ("sin", None), ("sin", lambda x: x[:7]), ("sin", lambda x: x.double()), ("layout", "neox"),
    ("layout", ["split_half"]), ("seq_format", "bsd"), ("seq_format", "thd", "q"), ("seq_format", "bhsd", "k"),
    ({"positions": None, "offsets": 5}, "cos"), ({"positions": None, "offsets": torch.tensor([0, 5])}, "offsets"),
    ({"positions": None, "offsets": torch.tensor([-8, 0])}, "offsets"), ({"positions": None, "offsets": -8}, "offsets"),
    ({"positions": None, "offsets": ONES(1).long()}, "offsets"), ({"positions": None, "offsets": "3"}, "offsets"),
    ({"positions": None, "offsets": ONES(2)}, "offsets"), ({"positions": None, "offsets": 1.5}, "offsets"),
    ({"positions": None, "offsets": True}, "offsets"), ({"positions": None, "offsets": -(2**63) - 1}, "offsets"),
    ("positions", torch.zeros(4, 2).long()), ("rotary_slice", 16), ("rotary_slice", "16"), ("rotary_slice", (0, 8, 16)),
    ("rotary_slice", (0, 16.0)), ("rotary_slice", (4, 20)), ("rotary_slice", (4, 9)), ("rotary_slice", (8, 4)),
    ("rotary_slice", (0, 12), "cos"), *POSITIONS,
]  # fmt: skip
CACHED = [
    ("q", lambda x: x[None]), ("k", None), ("slot_mapping", None), ("v", more_heads), ("v", lambda x: x[:3]),
    ("v", lambda x: x[..., :0]), ("v", ELSEWHERE), ("key_cache", lambda x: x[0]), ("key_cache", more_heads),
    ("key_cache", lambda x: x[:, :0]), ("value_cache", lambda x: x[:4]), ("key_cache", apart), ("key_cache", one_place),
    ("key_cache", lambda x: x.to(torch.uint8)), ("slot_mapping", lambda x: x[None]), ("slot_mapping", FLOATS),
    ("slot_mapping", torch.arange(5)), ("slot_mapping", ELSEWHERE), ("slot_mapping", torch.tensor([0, 1, 2, 20])),
    ("k_scale", ONES(1)), ("q_scale", ONES(1)), ("q_out", shaped(4, 3, 8)), ("k_out", shaped(4, 1, 16).half()),
    ("k_out", shaped(4, 1, 16, dtype=FLOAT8)), ("layout", "neox"), ("offsets", 5, "cos"), ("q", grad),
    ("key_cache", grad), ("cos", grad), ("q_scale_out", shaped(4, 3)), ("k_scale_cache", shaped(5, 4, 1)),
]  # fmt: skip
ROTARY_DIM = [("rotary_dim", 0), ("rotary_dim", 1), ("rotary_dim", 7)]
F8 = {"key_cache": lambda x: x.to(FLOAT8), "value_cache": lambda x: x.to(FLOAT8)}
SCALES = F8 | {"k_scale_cache": shaped(5, 4, 1), "v_scale_cache": shaped(5, 4, 1)}
ROWS = {
    "apply_rope": [
        *ROPE, ("out_layout", "neox"), ("inverse", "False"), ("inplace", "no"), ("inplace", 1),
        ({"rotary_slice": (0, 8), "out_layout": "interleaved"}, "out_layout"),
        ({"inplace": True, "out_layout": "interleaved"}, "out_layout"),
        (THD | {name: lambda x: x.expand(2, -1, -1) for name in ("cos", "sin")} | {"positions": None}, "cos"),
        (THD | {"positions": torch.zeros(2, 4).long()}, "positions"),
        (THD | {"positions": torch.arange(3)}, "positions"),
    ],
    "apply_rope, in place": [
        ("q", one_place), ("q", grad), ("q", sparse), ("k", sparse), ("cos", grad),
        ("k", lambda x: grad(x)[:, :, :1]),
    ],
    "apply_rope, frequencies": [
        ({"cos": ONES(8, 8), "sin": ONES(8, 8)}, "frequencies"), ("frequencies", FLOATS),
        ("frequencies", lambda x: x[:, 0]), ("frequencies", ropelab.rotary_frequencies(18)), ("frequencies", ELSEWHERE),
        ("frequencies", lambda x: x.T), ("rotary_slice", (0, 6), "frequencies"), ("offsets", 2**31 - 3, "frequencies"),
        ({"offsets": 0, "positions": torch.tensor([0, 1, 2, 1 - 2**31])}, "positions"),
    ],
    "apply_rope, axes": [
        ({"positions": None}, "axes"), ({"positions": None, "offsets": torch.tensor([1, 2])}, "axes"),
        ("axes", (0, 1, 1)), ("axes", ()), ("axes", (0, 1, -1, 0, 0, 0, 0, 0)), ("axes", (0.0,) * 8),
        ("axes", torch.zeros(8)), ("positions", lambda x: x[0]), ("positions", lambda x: x[:1]),
        ("positions", lambda x: x.T), ("positions", lambda x: x * 0 + 8),
        ({"rotary_slice": (0, 8), "axes": (0, 1, 0, 1)}, "cos"),
    ],
    "apply_qk_norm_rope": [
        *ROPE, ("k", None), ("q_weight", 1.0), ("q_weight", lambda x: x[None]), ("k_weight", lambda x: x[:8]),
        ("q_weight", INTEGERS), ("k_weight", HALF), ("k_weight", ELSEWHERE), ("eps", -1e-6), ("eps", float("nan")),
        ("eps", ONES(16)), ("cos", grad), ("sin", grad),
    ],
    "rope_and_cache, numbers": [
        *CACHED, ({"q_weight": ONES(16), "k_weight": None}, "k_weight"), ("q_weight", ONES(8)),
        ("k_weight", lambda x: x.half()), ("q_weight", ONES(80)),
        ({"q_weight": ONES(48), "k_weight": ONES(16).half()}, "k_weight"),
        ("eps", -1.0), ("weight_offset", None), ("norm_first", 1), ("frequencies", ropelab.rotary_frequencies(16)),
        (F8 | {"k_scale": ONES(2)}, "k_scale"), (F8 | {"v_scale": ONES(1).double()}, "v_scale"),
        (F8 | {"v_scale": 1.0}, "v_scale"),
        ({"q_out": shaped(4, 3, 16, dtype=FLOAT8), "q_scale": ONES(6)[::2]}, "q_scale"),
        ({"q_nope": shaped(4, 3, 8)}, "q_nope_out"), ({"q_nope_out": shaped(4, 3, 8)}, "q_nope"),
        ({"q_nope": shaped(4, 2, 8), "q_nope_out": shaped(4, 2, 8)}, "q_nope"),
        ({"q_nope": shaped(4, 3, 8), "q_nope_out": shaped(4, 3, 8)}, "q_nope"),
        (SCALES | {"k_scale_cache": shaped(5, 4, 1).double()}, "k_scale_cache"),
        (SCALES | {"v_scale_cache": shaped(4, 4, 1)}, "v_scale_cache"),
        (SCALES | {"v_scale_cache": shaped(5, 4, 1).to("meta")}, "v_scale_cache"),
        (SCALES | {"v_scale_cache": None}, "v_scale_cache"), (SCALES | {"v_scale_cache": 1.0}, "v_scale_cache"),
        (SCALES | {"k_scale": ONES(1)}, "k_scale"),
        (SCALES | {"k_scale_cache": shaped(1, 1, 1).expand(5, 4, 1)}, "k_scale_cache"),
        (SCALES | {"k_scale_cache": grad(shaped(5, 4, 1))}, "k_scale_cache"),
        (SCALES | dict.fromkeys(("k_scale_cache", "v_scale_cache"), shaped(5, 4, 1)) | {"value_cache": TO_E5M2},
         "value_cache"),
    ],
    "rope_and_cache, q apart": [("q_nope_out", lambda x: x.to(FLOAT8)), ("q_nope", lambda x: x[:, :, :2])],
    "rope_and_cache, made scales": [
        ("q_scale_out", lambda x: x[:, :, :2]), ("q_scale_out", lambda x: x[..., None]),
    ],
    "mla_rope_and_cache": [
        ("q_pe", lambda x: x[:, 0]), ("k_pe", lambda x: torch.cat((x, x), -1), "kv_cache"), ("k_pe", lambda x: x[:3]),
        ("kv_c", HALF), ("kv_cache", lambda x: x[..., :19]), ("kv_cache", lambda x: x.float().int()), ("k_out", 3.0),
        ("kv_scale_cache", shaped(3, 4), "kv_scale"),
    ],
    "mla_rope_and_cache, rows": [("kv_scale", ONES(1))],
    "mla_rope_and_cache, made scales": [
        ("kv_scale_cache", lambda x: x[..., None]), ("kv_scale_cache", lambda x: x[:, :2]), ("kv_scale", ONES(1)),
    ],
    "qkv_rope": [
        ("x", lambda x: x[None]), ("x", lambda x: x[..., :0]), ("x", INTEGERS), ("x", 1.0), ("weight", lambda x: x.T),
        ("weight", HALF), ("weight", ELSEWHERE),
        ({"weight": lambda x: (x, x), "bias": None}, "weight"),
        ("k_heads", 2, "weight"), ("k_heads", 0),
        ({"weight": lambda x: (x[:48], x[48:64], x[:8]), "bias": None}, "weight"),
        ("bias", lambda x: x[:3]), ("bias", lambda x: [x[:48]] * 3),
        ("seq_format", "bhsd"), ("seq_format", "bsd"), ("k_weight", None), ("q_weight", ONES(4)),
        ({"cos": None, "sin": None, "frequencies": ropelab.rotary_frequencies(16)}, "frequencies"),
        ({"cos": lambda x: x.repeat(1, 2), "sin": lambda x: x.repeat(1, 2), "rotary_slice": None}, "cos"),
        ({"cos": lambda x: x[:3], "sin": lambda x: x[:3], "positions": None}, "cos"), ("cos", grad), ("eps", -1.0),
    ],
    "qkv_rope_and_cache": [
        ("weight", grad), ("key_cache", grad), ("slot_mapping", torch.arange(9)),
        ("slot_mapping", torch.tensor([0, 1, 2, 20])),
    ],
    "rotate_cached_keys, frequencies": [
        ("key_cache", lambda x: x[0, 0]), ("key_cache", lambda x: x.to(torch.uint8)), ("key_cache", apart),
        ("key_cache", lambda x: x[:, :0]), ("key_cache", one_place), ("key_cache", grad), ("slots", lambda x: x[None]),
        ("slots", FLOATS), ("slots", ELSEWHERE), ("slots", lambda x: x.clamp(min=20)), ("slots", lambda x: x * 0 + 3),
        ("deltas", torch.arange(3)), ("deltas", torch.zeros(4)), ("deltas", 1.0), ("deltas", None),
        ({"frequencies": None}, "cos"), ("layout", "neox"), ("rotary_slice", (0, 4), "frequencies"),
        ("k_scale_cache", shaped(5, 4, 1)),
    ],
    "rotate_cached_keys": [
        ("slots", lambda x: x.clamp(min=0) * 0 + 3), ("deltas", 40), ("k_scale_cache", lambda x: x[:, :, :0]),
        ("rotary_slice", (0, 6), "cos"),
    ],
    "rotate_cached_keys, axes": [
        ("deltas", lambda x: x[:1]), ("deltas", lambda x: x[:, :3]), ("deltas", lambda x: x[None]),
        ("deltas", lambda x: x[0, :1]), ("axes", (0, 1)), ("axes", ()), ("axes", (0, 2) * 4, "deltas"),
        ("axes", None, "deltas"),
    ],
    "rope_and_quantize": [
        ("x", lambda x: x[0]), ("x", torch.Tensor.int), ("groups", 2), ("block_dim", 3), ("block_dim", 32),
        ("amax_epsilon", 0.0), ("rotary_slice", (0, 12), "cos"),
        ({"rotary_slice": (3, 7), "cos": lambda x: x[:, :2], "sin": lambda x: x[:, :2]}, "rotary_slice"),
        ("scale_dtype", torch.float64), ("x", grad), ("positions", lambda x: x * 0 + 8),
    ],
    "rope_and_quantize, results": [
        ("out", shaped(4, 1, 48).bfloat16()), ("out", shaped(4, 3, 24, dtype=FLOAT8)), ("out", FEWER),
        ("out", lambda x: x[None]),
        ("scales", shaped(4, 3, 3)),
        ({"groups": None, "out": None, "scale_dtype": None, "scales": shaped(4, 1, 1).int()}, "scales"),
    ],
    "rope_and_block_scaled_cache": [
        ("kv", lambda x: x[:, None]), ("q", FLOATS), ("kv", FLOATS), ("kv_cache", lambda x: x[:, :-1]),
        ("kv_cache", FLOATS), ("kv_cache", shaped(3, 113, dtype=torch.uint8)), ("rotary_slice", (0, 8)),
        ("kv_cache", shaped(337, dtype=torch.uint8)[1:].view(3, 112)), ("block_dim", 16),
        ("slot_mapping", torch.arange(5)), ("slot_mapping", torch.tensor([12])), ("q_out", lambda x: x[:, :1]),
        ("block_size", 0),
    ],
    "assemble_mla": [
        ("k_pe", lambda x: x.expand(-1, -1, 3, -1)), ("kv", lambda x: x[..., :4]), ("k_pe", lambda x: x.double()),
        ("q", lambda x: x[..., :7]), ("copy_value", 1), ("seq_format", "hbsd"), ("out_layout", "halves"), ("sin", grad),
        ({"cos": lambda x: x[:, :3], "sin": lambda x: x[:, :3]}, "cos"), ("positions", torch.tensor([0, 1, 40])),
        ({"positions": None, "offsets": 38}, "cos"),
    ],
    "assemble_mla_kv": [("nope_dim", 4.0)],
    "rotate_mla_query": [
        ({"inplace": False}, "consume"), ("nope_dim", 7), ("nope_dim", 12), ("nope_dim", 17),
    ],
    "rotary_table": ROTARY_DIM,
    "rotary_frequencies": ROTARY_DIM,
    "axial_tables": [
        ("positions", None), ("positions", ELSEWHERE), ("positions", lambda x: x[:0]),
        ("positions", lambda x: x[:1], "axes"), ("axes", [0, 0, 1, 1, 0, 0, 1, 2]), ("axes", torch.zeros(8)),
        ("sin", lambda x: torch.cat((x, x), -1)), ("sin", lambda x: x[:4]), ("sin", lambda x: x.double()),
        ("axes", ONES(8).bool()), ("axes", torch.full((8,), 2)), ("axes", torch.full((8,), -1)), ("axes", [0.0] * 8),
    ],
    "axial_rope": [("axes_dims", (3, 5)), ("axes_dims", (0, 4)), ("layout", None)],
    "Rope": [
        ("head_dim", 8), ("layout", None), ("axes", (0, 1)), ("max_seq_len", 0),
        *(("inverse_frequencies", value) for value in (
            INTEGERS, ELSEWHERE, grad, lambda x: x[None], lambda x: x[:0], lambda x: x * NAN, lambda x: x * INF,
        )),
    ],
    "Rope.tables": [("positions", lambda x: x[:2])],
    "grid_positions": [
        *(("sizes", x) for x in ((), (2.5,), (-1, 2), (True, 2), ("2", 3), (None,), ((2, 3),), (NAN,))),
        ("centred", (2,)), ("centred", (-1,)),
    ],
    "text_positions": [("axes", 0), ("start", 2**40), ("start", -(2**40)), ("start", 2**31 - 2)],
    "mrope_axes": [("mrope_section", []), ("mrope_section", [4, -1]), ("mrope_section", {2: 1})],
    "convert_layout": [
        ("x", ONES(())), ("x", ONES(17)), ("x", sparse), ("head_dim", 0), ("head_dim", 5, "rotary_slice"),
        ("head_dim", 7, "rotary_slice"),
        ("heads", 4),
        ("source", None), ("target", None), *(("rotary_slice", x) for x in (
            3, "04", (0,), (0, 2, 4), (0, 3), (0.0, 4.0), (0, True), (4, 0), (-4, 0), (0, 10**6), [None, 4], (0, "4"),
        )),
    ],
    "PackedSequences": [
        ("cu_seqlens", torch.tensor([]).long()), ("cu_seqlens", torch.tensor([1, 4])), ("offsets", torch.tensor([1])),
        ("cu_seqlens", torch.tensor([0, 40])), ("offsets", torch.tensor([1.0, 2.0])), ("cp_size", 0), ("cp_rank", 1),
        ("chunks", None), ("cu_seqlens", FLOATS), ("cu_seqlens", lambda x: x[None]), ("cu_seqlens", lambda x: x[0]),
        ("offsets", lambda x: torch.zeros(3)), ("offsets", 2**31), ("offsets", -(2**31) - 1), ("offsets", 2**31 - 2),
    ],
    "PackedSequences, offsets": [("offsets", ELSEWHERE), ("offsets", lambda x: x[None])],
    "context_parallel_positions": [
        ("seq_len", 7), ("seq_len", 2**31 + 4), ("cp_size", 0), ("cp_rank", 2), ("chunks", None),
    ],
    "RotaryEmbedding": [
        ("seq_format", None), ("rope", CONFIG), ("rope", 15), ("base", -1.0), ("rope", THETA), ("rope", 7),
        ("rope", lambda x: ropelab.Rope),
    ],
    "RotaryEmbedding.forward": [
        ("positions", FEWER), ("positions", ELSEWHERE), ("positions", torch.full((4,), 2**40)),
        ("positions", torch.full((4,), -(2**63))), ("offsets", 3), ("positions", torch.zeros(3, 1, 4).long()),
    ],
    "RotaryEmbedding.forward, lengths unsaid": [("offsets", torch.tensor([1.0, 2.0])), ("offsets", torch.tensor([1]))],
    "RotaryEmbedding.tables": [("seq_len", 4096 * 4 / 3)],
}  # fmt: skip


HEADS = [torch.Tensor.sum, lambda x: x[None, None], sparse, nested(torch.jagged)]
TABLE = [lambda x: x[..., :0], FEWER, lambda x: torch.cat((x, x), -1), lambda x: x.flatten()[0], sparse]
PLACES = [lambda x: x.flatten()[0], lambda x: x[None, None, None], FEWER]
IN_CACHE = [lambda x: x.to(torch.uint8), FEWER, lambda x: x[:, :0]]
WHICH = [*PLACES[:2], torch.arange(99), lambda x: x * 0 + 10**6]
NUMBER, COUNT = [0.0, -1.0], [0, 7]
ANGLES = [*TABLE, lambda x: x[:2], lambda x: x[0]]
LISTS = [[], {}, "abcdefgh", [NAN] * 8, [0.0] * 8, [-1.0] * 8, ["1"] * 8, [True] * 8, [None] * 8, [[1.0]] * 8, [1.0]]
START = {"start_positions": [*PLACES, torch.tensor([7, 7])]}
ROWS |= {
    "vllm, norm, auto": any_name(
        qkv=HEADS, q_weight=TABLE, k_weight=TABLE, cos=TABLE, sin=TABLE, positions=PLACES, slot_mapping=WHICH,
        k_cache=HEADS + IN_CACHE, v_cache=HEADS + IN_CACHE, head_dim=[0, 8], num_q_heads=[5], num_kv_heads=[3],
        rotary_pairs=[0], kv_cache_dtype=["fp8", "int8"],
    ),
    "vllm, MLA, auto": any_name(
        q_pe=HEADS, k_pe=HEADS, kv_c=HEADS, cos_sin_cache=TABLE, positions=PLACES, slot_mapping=WHICH,
        kv_cache=HEADS + IN_CACHE, kv_cache_dtype=["fp8"],
    ),
    "megatron, kv": any_name(kv=HEADS, k_pos_emb=HEADS, cos=TABLE, sin=TABLE, emb_dim=[0, 4], k_dim=[7], v_dim=[7]),
    "megatron, dense": any_name(t=HEADS, freqs=TABLE, mscale=NUMBER),
    "deepspeed": any_name(t=[sparse], freqs_cos=TABLE, freqs_sin=TABLE),
    "deepspeed, rows": any_name(q=[sparse], k=[sparse], cos=TABLE, sin=TABLE),
    "huggingface": any_name(q=[sparse], k=[sparse], cos=TABLE, sin=TABLE, unsqueeze_dim=[4, -5]),
    "transformer_engine": any_name(t=HEADS, freqs=ANGLES, cp_size=[0, 4], cp_rank=[1], **START),
    "transformer_engine, packed": any_name(
        t=HEADS, freqs=ANGLES, cp_size=[0], cp_rank=[1], **START,
        cu_seqlens=[torch.tensor([]).long(), torch.tensor([1, 4, 5]), torch.tensor([0, 4, 40])],
    ),
    "transformer_engine, qkv": any_name(
        qkv=HEADS, q_freqs=ANGLES[:-1], k_freqs=ANGLES[:-1], qkv_split_arg_list=[[32, 32], [33, 16, 15], [32, 16, NAN]],
        tensor_format=["thd"], cp_size=[0, 4], cp_rank=[1], **START,
    ),
    "sglang, cos and sin": any_name(
        cos=TABLE, sin=TABLE, query=HEADS, key=HEADS, head_size=[8], rotary_dim=[0, 7, 32],
        positions=[*PLACES, torch.full((8,), 8)],
    ),
    "sglang, diffusion": any_name(
        q=HEADS, k=HEADS, cos_sin_cache=TABLE, head_size=[8], positions=[*PLACES, torch.full((8,), 8)]
    ),
    "sglang, cache": any_name(
        query=HEADS, key=HEADS, cos_sin_cache=TABLE, head_size=[8], positions=[*PLACES, torch.full((2, 4), 8)]
    ),
    "frequency_tables": any_name(
        frequencies=[INTEGERS, lambda x: x[None], lambda x: x[:0]], attention_factor=NUMBER,
        dtype=[torch.int32, torch.complex64],
    ),
    "fixed_point": any_name(
        frequencies=[INTEGERS, lambda x: x[None], lambda x: x[:0], lambda x: x * NAN, lambda x: x * INF],
        attention_factor=[*NUMBER, 1e39],
    ),
    "inverse_frequencies": any_name(rotary_dim=[0, 1, 7], base=NUMBER),
    "linear": any_name(factor=NUMBER),
    "ntk_aware": any_name(factor=[*NUMBER, 1e300]),
    "dynamic_ntk": any_name(factor=NUMBER, max_position_embeddings=[0]),
    "yarn": any_name(
        factor=NUMBER, original_max_position_embeddings=[0], beta_fast=[*NUMBER, 0.5], beta_slow=[*NUMBER, 64],
        base=[1.0, 0.5],
    ),
    "yarn_attention_factor": any_name(factor=NUMBER, mscale=[-1.0], mscale_all_dim=[-1.0]),
    "longrope": any_name(rescale_factors=LISTS),
    "longrope_attention_factor": any_name(factor=NUMBER, original_max_position_embeddings=[0, 1]),
    "llama3": any_name(
        factor=NUMBER, low_freq_factor=[*NUMBER, 8.0], high_freq_factor=[*NUMBER, 0.5],
        original_max_position_embeddings=[0],
    ),
    "proportional": any_name(head_dim=[7], base=NUMBER, rotated_fraction=[*NUMBER, 1.5], factor=NUMBER),
    "axial": any_name(axes_dims=[(3, 5), (0, 4), (-4, 6), [[4, 6]]], base=NUMBER),
    "sections": any_name(widths=[(0, 0), (-2, 3)]),
    "interleaved_sections": any_name(widths=[(1, 9), ()]),
    "permutation": any_name(rotary_dim=[0, 7], source=[None], target=[None]),
    "configuration": any_name(
        head_dim=[64.5, 7], rotary_dim=[7, 32], max_position_embeddings=[0], rope_theta=NUMBER,
        model_type=[3, ["llama"], True, "unheard_of", "kimi_k2", "gemma4_vision"],
        partial_rotary_factor=[*NUMBER, 2.0, 1.01],
    ),
    "configuration, heads": any_name(hidden_size=[66, 0, None], num_attention_heads=[0, 5, [4, 4], None]),
    "scaling, linear": any_name(factor=[*NUMBER, None]),
    "scaling, ntk": any_name(factor=[*NUMBER, None]),
    "scaling, dynamic": any_name(factor=[*NUMBER, None]),
    "scaling, yarn": any_name(
        factor=NUMBER, original_max_position_embeddings=[0], attention_factor=NUMBER, beta_fast=NUMBER,
        beta_slow=NUMBER, mscale=[-1.0], mscale_all_dim=[-1.0],
    ),
    "scaling, longrope": any_name(
        factor=NUMBER, short_factor=[*LISTS, None], long_factor=[*LISTS, None], attention_factor=NUMBER
    ),
    "scaling, llama3": any_name(
        factor=[*NUMBER, None], low_freq_factor=[*NUMBER, None], high_freq_factor=[*NUMBER, None]
    ),
    "scaling, proportional": any_name(factor=NUMBER, partial_rotary_factor=[*NUMBER, 2.0, 1.01]),
    "scaling, default": any_name(
        mrope_section=[[4, 5], [8, 1, -1], [], [[4, 2, 2]]], partial_rotary_factor=NUMBER, rope_theta=NUMBER
    ),
    "fairseq2, layout": any_name(shape=[(2,), (0, 4)], seq_lens=[[5, 1], [1]]),
    "fairseq2, kernel": any_name(
        encoding_dim=COUNT, max_seq_len=[0], theta=NUMBER, freqs_init_fn=[3, "f", lambda e: lambda x: None,
        lambda e: lambda x: THETA[:3], lambda e: lambda x: THETA.long()],
        state_bag=[3, *(lambda bag, n=n: SimpleNamespace(step_nr=n) for n in (1.5, -1, 100))],
        seqs_layout=[None, 3, "layout", *(lambda layout, at=at: SimpleNamespace(
            packed=False, padded=True, max_seq_len=4, position_indices=at) for at in (None, torch.zeros(2, 3).long()))],
    ),
    "fairseq2, dual": any_name(encoding_dim=[*COUNT, 6], max_seq_len=[0], theta=NUMBER, dual_theta=NUMBER),
    "fairseq2, YaRN": any_name(
        encoding_dim=COUNT, theta=NUMBER, scale_factor=NUMBER, original_max_seq_len=[0], beta_fast=NUMBER,
        beta_slow=NUMBER, mscale=[-1.0], mscale_all_dim=[-1.0],
    ),
}  # fmt: skip


def _changes(row: tuple) -> tuple[dict, str]:
    """All arguments that a row changes, and the name to be blamed."""
    return row if isinstance(row[0], dict) else ({row[0]: row[1]}, row[-1] if len(row) == 3 else row[0])


BOUNDARIES = {name: [_changes(row) for row in rows] for name, rows in ROWS.items()}
"""Name of a call -> the arguments that change, and the name that the refusal begins with."""
