"""Every adapter keeps the laws of its convention, has the strides of its original, and refuses by its own words.

A row of `REFUSED` changes a valid call of `tests.ops.adapter_calls`; generated values of other types, shapes and
devices are in tests/ops/test_hostile_calls.py.
"""

import pytest
import torch

from ropelab import conformance
from ropelab.conformance.report import text
from ropelab.interop import deepspeed, huggingface, sglang, transformer_engine
from ropelab.interop.broadcast import formula
from ropelab.interop.fairseq2 import LAYOUTS, BatchLayout, KernelRotaryEncoder
from tests.ops.adapter_calls import ADAPTERS
from tests.ops.boundaries import shaped
from tests.ops.hostile_adapters import outcome

pytestmark = pytest.mark.usefixtures("torch_backend")

# ---------------------------------------------------------------------------------------------------------- laws


def interleaved(q, k, cos, sin, unsqueeze_dim=1):
    return huggingface.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim, layout="interleaved")


def by_token(positions, query, key, head_size, cos_sin_cache, is_neox):
    """SGLang's form with cos and sin for each token, called like the form with a cache."""
    cos, sin = cos_sin_cache[positions].chunk(2, dim=-1)
    rotary_dim = cos_sin_cache.shape[-1]
    sglang.rotary_embedding_cos_sin(cos, sin, query, key, head_size, not is_neox, rotary_dim=rotary_dim)


class QAndK(torch.nn.Module):
    """An encoder of fairseq2 as the laws call modules."""

    def __init__(self, head_dim, impl):
        super().__init__()
        self.encoder = KernelRotaryEncoder(head_dim, 2**13, impl=impl)

    def forward(self, q, k):
        return tuple(self.encoder(x, BatchLayout(x.shape[:2])) for x in (q, k))


OF_FAIRSEQ2 = {"seq_format": "bshd", "maths": "wide", "skip": ("empty", "large_positions", "compile")}
"""fairseq2 has no layout without tokens, and serves positions below max_seq_len; it is compiled elsewhere."""
CONFORMING = [
    (huggingface.apply_rotary_pos_emb, "huggingface", {}),
    (huggingface.apply_rotary_pos_emb, "huggingface", {"seq_format": "bshd", "rotary_dim": 8, "k_heads": 1}),
    (interleaved, "huggingface", {"layout": "interleaved"}),
    (interleaved, "huggingface", {"layout": "interleaved", "seq_format": "bshd", "rotary_dim": 4}),
    (deepspeed.apply_rotary_pos_emb, "deepspeed", {}),
    (deepspeed.apply_rotary_pos_emb, "deepspeed", {"seq_format": "bshd"}),
    (deepspeed.apply_rotary_pos_emb, "deepspeed", {"seq_format": "bhsd", "rotary_dim": 8}),
    (sglang.apply_rope_with_cos_sin_cache_inplace, "vllm", {}),
    (sglang.apply_rope_with_cos_sin_cache_inplace, "vllm", {"layout": "interleaved", "rotary_dim": 4}),
    (by_token, "vllm", {}),
    (by_token, "vllm", {"layout": "interleaved", "rotary_dim": 4}),
    (transformer_engine.apply_rotary_pos_emb, "transformer_engine", {"dtype": torch.float32}),
    (transformer_engine.apply_rotary_pos_emb, "transformer_engine", {"layout": "interleaved"}),
    *(
        (lambda head_dim, impl=impl: QAndK(head_dim, impl), "module", {"layout": LAYOUTS[impl]} | OF_FAIRSEQ2)
        for impl in LAYOUTS
    ),
]


@pytest.mark.parametrize("function, convention, options", CONFORMING)
def test_an_adapter_keeps_the_laws(function, convention, options):
    report = conformance.verify(function, convention, **options)
    assert report.passed, text(report)


@pytest.mark.parametrize("width", [16, 8])
def test_strides_are_those_of_the_formula(width):
    t, tables = torch.randn(2, 5, 3, 16).transpose(0, 1), [torch.randn(5, 1, 1, width) for _ in range(2)]
    assert deepspeed.apply_rotary_pos_emb(t, *tables).stride() == formula(t, *tables).stride()
    q, (cos, sin) = torch.randn(2, 5, 3, 16).transpose(1, 2), torch.randn(2, 2, 5, width)
    found, _ = huggingface.apply_rotary_pos_emb(q, q, cos, sin)
    assert found.stride() == formula(q, cos[:, None], sin[:, None]).stride()


# ------------------------------------------------------------------------------------------------------ refusals


def first_is(number):
    """The tensor in int64, with this number at the place that the first token reads."""
    return lambda x: torch.cat((x.new_tensor([number], dtype=torch.int64), x[1:].long()))


def viewed(dtype):
    return lambda x: x.view(dtype)


OTHER_8_BITS = [torch.int8, torch.bool, torch.float8_e5m2, torch.float8_e4m3fnuz]
FIVE, THREE = torch.arange(5), shaped(3, 1, 1, 16)
REFUSED = {
    # the argument, the value or what makes it of the valid one, and the argument to blame where it is another; or all
    # arguments that change, and the one to blame
    "vllm, norm": [(name, viewed(dtype)) for name in ("k_cache", "v_cache") for dtype in OTHER_8_BITS] + [
        ("kv_cache_dtype", "int8"), ("kv_cache_dtype", "auto", "k_cache"),
    ],
    "vllm, norm, auto": [
        ("qkv", shaped(6, 100)), ("rotary_pairs", 3, "cos"), ("kv_cache_dtype", "fp8", "k_cache"),
        ("k_cache", shaped(6, 4, 2, 8)), ("positions", FIVE), ("q_out", shaped(6, 63)),
        ("slot_mapping", torch.full((6,), 24)),
    ],
    "vllm, MLA": [("kv_cache", viewed(dtype)) for dtype in OTHER_8_BITS],
    "flashinfer, GQA": [
        ("page_size", 8), ("kv_layout", "NDH"), ("quantize_dtype", torch.float16), ("quant_scale_kv", 0.0),
        ("k_rope", shaped(17, 1, 8)), ("k_rope", shaped(17, 16), "v"), ("v", None),
    ],
    "flashinfer, MLA": [("q_nope", lambda x: torch.cat((x, x), -1), "k_nope")],
    "flashinfer, slots": [
        *(("positions", first_is(place)) for place in (20, -1, 2**63 - 1)),
        *(("kv_indptr", first_is(place)) for place in (-5, 16)), ("batch_indices", first_is(3)),
        *(("kv_indices", lambda x, page=page: torch.full_like(x.long(), page)) for page in (-1, 2**31, 2**63 - 1)),
    ],
    "sglang, cos and sin": [
        ("query", shaped(48)), ("head_size", 8), ("key", shaped(2, 4, 1, 6), "head_size"),
        ({"query": shaped(8, 48), "key": None, "head_size": 0}, "head_size"), ("cos", shaped(4, 32)),
        ("sin", shaped(4, 16)), ("positions", FIVE),
        ("positions", torch.arange(8).view(2, 4)), ("positions", torch.arange(8) + 1), ("rotary_dim", 3),
        ("key", shaped(2, 3, 1, 16)), ("key", shaped(2, 4, 1, 16, dtype=torch.float64)),
        ("query", lambda x: x[:, :, :1].expand(x.shape)),
        ({"cos": shaped(3, 8), "sin": shaped(3, 8), "positions": None}, "cos"),
        ({"cos": shaped(4, 2), "sin": shaped(4, 2), "rotary_dim": None}, "cos"),
    ],
    "sglang, cache": [
        ("positions", FIVE, "query"), ("positions", lambda x: x.float()), ("positions", lambda x: x + 40),
        ("cos_sin_cache", shaped(40, 7)), ("cos_sin_cache", shaped(40, 18)),
    ],
    "sglang, diffusion": [
        ("q", shaped(6, 4, 8)), ("head_size", 8), ("positions", FIVE), ("positions", lambda x: x + 100),
        ("cos_sin_cache", shaped(8, 9, dtype=torch.complex64)), ("cos_sin_cache", shaped(8, 7)),
        ("cos_sin_cache", shaped(8, 16, dtype=torch.int64)), ("is_neox", 1),
    ],
    "transformer_engine": [
        ("freqs", lambda x: x.int()), ("freqs", lambda x: x[:, 0]), ("freqs", shaped(8, 1, 1, 5)),
        ("freqs", shaped(8, 1, 1, 32)), ("freqs", THREE), ("cp_size", 4, "freqs"), ("cp_rank", 1),
        ("tensor_format", "bhsd"), ("tensor_format", "thd", "t"), ("start_positions", torch.zeros(4).int()),
        ("start_positions", torch.tensor([2**31 - 2, 0])),
    ],
    "transformer_engine, packed": [
        ("cu_seqlens", None), ("cp_size", 4, "cu_seqlens"), ("start_positions", torch.zeros(3).int()), ("freqs", THREE),
    ],
    "transformer_engine, qkv": [
        *(("qkv_split_arg_list", widths) for widths in ([16, 16], [33, 16, 15], [16, 16, 16], [16, 0, 48])),
        ("tensor_format", "thd"),
    ],
    "megatron, q": [
        ("nope_dim", 9, "t"), ("emb_dim", 6, "cos"), ("rotary_interleaved", True), ("sin", lambda x: x[:3]),
    ],
    "megatron, kv": [("v_dim", 3, "kv"), ("k_pos_emb", lambda x: x.expand(-1, -1, 3, -1))],
    "megatron, dense": [("freqs", lambda x: x.long())],
    "deepspeed": [
        ("t", shaped()), ("freqs_cos", shaped(4, 1, 7)), ("freqs_cos", shaped(4, 1, 18)),
        ("freqs_cos", shaped(5, 1, 16)), ("freqs_sin", shaped(4, 1, 8)),
    ],
    "huggingface": [
        ("cos", shaped(1, 4, 7)), ("cos", shaped(1, 4, 18)), ("layout", "neox"),
        ("k", lambda x: x[:, :3], "cos"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_without_meaning_is_refused_by_the_argument(name):
    (function, arguments, _), wrong = ADAPTERS[name], []
    for row in REFUSED[name]:
        changes, named = row if isinstance(row[0], dict) else ({row[0]: row[1]}, row[2] if len(row) == 3 else row[0])
        call = arguments()
        call |= {x: value(call[x]) if callable(value) else value for x, value in changes.items()}
        if (found := outcome(function, call, argument=named)) != "refused":
            wrong.append(f"{changes}: {found}")
    assert not wrong, "\n".join(wrong)
