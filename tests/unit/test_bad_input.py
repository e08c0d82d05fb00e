"""Arguments that cannot be served raise an error that names them; nothing is rotated by guess."""

import re
import warnings

import pytest
import torch

import ropelab
from ropelab.call.memory import may_share_elements, overlaps_itself
from ropelab.interop.sglang import apply_rope_with_cos_sin_cache_inplace

Q, K = torch.randn(2, 5, 4, 16), torch.randn(2, 5, 2, 16)
COS, SIN = ropelab.rotary_table(8, 16)

LIKELY = {
    "q of rank 3": ({"q": Q[0]}, "q", "thd"),
    "q and k are bhsd": ({"q": Q.transpose(1, 2), "k": K.transpose(1, 2)}, "k", "bhsd"),
    "q and k are bshd": ({"seq_format": "bhsd"}, "k", "bshd"),
    "tables of bhsd": (
        {"q": Q.repeat(1, 1, 2, 1).transpose(1, 2), "k": None, "cos": COS[:5], "sin": SIN[:5]}, "cos", "bhsd",
    ),
    "positions of bhsd": (
        {"q": Q.transpose(1, 2), "k": None, "positions": torch.arange(5)}, "positions", "bhsd",
    ),
    "k of another length, and no other format": ({"k": K[:, :4]}, "k", None),
}  # fmt: skip


@pytest.mark.parametrize(("change", "argument", "likely"), LIKELY.values(), ids=LIKELY)
def test_a_refusal_names_the_format_that_would_have_fitted(change, argument, likely):
    with pytest.raises(ValueError, match=f"^{argument}: expected .* got ") as refused:
        ropelab.apply_rope(**{"q": Q, "k": K, "cos": COS, "sin": SIN} | change)
    assert ("pass seq_format" in str(refused.value)) == bool(likely)
    assert not likely or f"'{likely}'" in str(refused.value)


QKV = torch.randn(2, 5, 32)
SLOTS = torch.arange(10)
HND = torch.zeros(2, 2, 8, 16)
MEANT = {
    "no tables": (lambda: ropelab.apply_rope(Q), "cos and sin, as from rotary_table, or frequencies"),
    "inverse frequencies": (lambda: ropelab.apply_rope(Q, frequencies=torch.ones(8)), "Rope(inv_freq).frequencies()"),
    "inverse frequencies in two axes": (
        lambda: ropelab.apply_rope(Q, frequencies=torch.ones(8, 3)), "Rope(inv_freq).frequencies()",
    ),
    "complex tables": (lambda: ropelab.apply_rope(Q, cos=torch.polar(COS, SIN), sin=SIN), "cos=freqs_cis.real"),
    "complex frequencies": (lambda: ropelab.apply_rope(Q, frequencies=torch.polar(COS, SIN)), "cos=freqs_cis.real"),
    "columns twice": (lambda: ropelab.apply_rope(Q, cos=COS.repeat(1, 2), sin=SIN.repeat(1, 2)), "cos[..., :8]"),
    "an odd head": (lambda: ropelab.apply_rope(Q[..., :15], cos=COS, sin=SIN), "the last of 15 features"),
    "tables of three": (
        lambda: ropelab.apply_rope(Q, cos=COS.expand(3, -1, -1), sin=SIN.expand(3, -1, -1)), "each of 2 sequences or for",
    ),
    "an offset": (lambda: ropelab.apply_rope(Q, cos=COS, sin=SIN, offsets=4), "from 4 on, 9 rows, got 8"),
    "a module": (
        lambda: ropelab.qkv_rope(QKV, torch.nn.Linear(32, 64), q_heads=2, k_heads=1, cos=COS, sin=SIN), "linear.weight",
    ),
    "a module for the weight of a norm": (
        lambda: ropelab.apply_qk_norm_rope(Q, K, torch.nn.RMSNorm(16), torch.nn.RMSNorm(16), cos=COS, sin=SIN),
        "pass its attribute weight",
    ),
    "packed sequences for their positions": (
        lambda: ropelab.apply_rope(
            Q[0], cos=COS, sin=SIN, seq_format="thd", positions=ropelab.PackedSequences(torch.tensor([0, 5]), 5),
        ), "pass its attribute positions",
    ),
    "a position for each sequence": (
        lambda: ropelab.apply_rope(Q[:, :1], K[:, :1], cos=COS, sin=SIN, positions=torch.tensor([3, 4])),
        "pass offsets=positions",
    ),
    "positions along axes": (
        lambda: ropelab.apply_rope(Q, cos=COS, sin=SIN, positions=torch.arange(5).expand(3, 2, 5)), "pass axes",
    ),
    "positions along axes of packed tokens": (
        lambda: ropelab.apply_rope(
            Q[0], cos=COS, sin=SIN, seq_format="thd", positions=torch.arange(5).expand(3, 5),
        ), "pass axes",
    ),
    "positions of another batch": (
        lambda: ropelab.apply_rope(Q, cos=COS, sin=SIN, positions=torch.arange(5).expand(3, 5)), "got (3, 5)",
    ),
    "position ids for k": (
        lambda: ropelab.RotaryEmbedding(16)(Q, torch.arange(5)[None]), "pass them as positions",
    ),
    "all heads in an axis": (
        lambda: ropelab.apply_rope(Q.flatten(2), cos=COS, sin=SIN), "q.unflatten(-1, (heads, head_dim))",
    ),
    "a pool of slots": (
        lambda: ropelab.rope_and_cache(
            Q[0], K[0], K[0], torch.zeros(16, 2, 16), torch.zeros(16, 2, 16), SLOTS[:5], cos=COS, sin=SIN,
        ), "key_cache.unsqueeze(1)",
    ),
    "keys and values in a cache": (
        lambda: ropelab.rope_and_cache(
            Q[0], K[0], K[0], torch.zeros(3, 2, 8, 2, 16), torch.zeros(3, 8, 2, 16), SLOTS[:5], cos=COS, sin=SIN,
        ), "cache.unbind(1)",
    ),
    "a number of features": (lambda: ropelab.apply_rope(Q, cos=COS, sin=SIN, rotary_slice=8), "did you mean (0, 8)"),
    "a module for wider heads": (lambda: ropelab.RotaryEmbedding(32)(Q, K), "the 32 features of this module, got 16"),
    "a format in capitals": (lambda: ropelab.apply_rope(Q, cos=COS, sin=SIN, seq_format="BHSD"), "mean 'bhsd'"),
    "heads before slots": (
        lambda: ropelab.rope_and_cache(
            Q.flatten(0, 1), K.flatten(0, 1), K.flatten(0, 1), HND, HND.clone(), SLOTS, cos=COS, sin=SIN,
            positions=SLOTS % 5,
        ), "key_cache.transpose(1, 2)",
    ),
    "a file": (lambda: ropelab.rope_from_config("config.json"), "json.load"),
    "a name": (lambda: ropelab.rope_from_config("meta-llama/Llama-3.1-8B"), "AutoConfig.from_pretrained"),
    "BERT": (
        lambda: ropelab.RotaryEmbedding.from_config({"model_type": "bert", "hidden_size": 8, "num_attention_heads": 2}),
        "BERT, GPT-2 and T5 do not rotate",
    ),
    "no CUDA": (
        lambda: ropelab.rotary_table(8, 16, device=f"cuda:{torch.cuda.device_count()}"), "is available, got 'cuda:",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("call", "said"), MEANT.values(), ids=MEANT)
def test_a_refusal_names_what_was_meant(call, said):
    with pytest.raises((TypeError, ValueError), match=rf"^\w+: expected .*{re.escape(said)}"):
        call()


ACCIDENTS = {
    "a row for each head": ({"q": Q.repeat(1, 1, 2, 1)}, "'bhsd'"),
    "more heads than a model has": ({"q": Q.repeat(1, 1, 65, 1)}, "'bhsd'"),
    "more heads than a model has, in bhsd": (
        {"q": Q.repeat(1, 65, 1, 1), "seq_format": "bhsd", "k": None}, "'bshd'",
    ),
    "tables of narrower heads": ({"cos": COS[:, :4], "sin": SIN[:, :4]}, "rotary_slice=(0, 8)"),
    "frequencies of narrower heads": (
        {"frequencies": ropelab.rotary_frequencies(8), "cos": None, "sin": None}, "rotary_slice=(0, 8)",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "said"), ACCIDENTS.values(), ids=ACCIDENTS)
def test_a_call_that_fits_by_accident_warns_once(change, said):
    call = {"q": Q, "k": None, "cos": COS, "sin": SIN} | change
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        for q in (call["q"], call["q"][:1]):
            ropelab.apply_rope(**call | {"q": q})
    assert [one.filename for one in warned] == [__file__] and said in str(warned[0].message)


def test_a_pool_of_slots_is_no_latent_cache():
    pool, slots = torch.randn(16, 2, 16), torch.arange(4)
    with pytest.warns(UserWarning, match=r"key_cache\.unsqueeze\(1\)"):
        ropelab.rotate_cached_keys(pool.clone(), slots, 2, cos=COS, sin=SIN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ropelab.rotate_cached_keys(pool.unsqueeze(1), slots, 2, cos=COS, sin=SIN)
        ropelab.rotate_cached_keys(pool.clone(), slots, 2, cos=COS, sin=SIN, rotary_slice=(0, 16))
        ropelab.rotate_cached_keys(pool.clone(), slots, 2, cos=COS[:, :4], sin=SIN[:, :4])


def test_what_is_meant_does_not_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ropelab.apply_rope(Q, K, cos=COS[:, :4], sin=SIN[:, :4], rotary_slice=(0, 8))
        ropelab.RotaryEmbedding(ropelab.Rope(torch.ones(4), head_dim=16))(Q, K)
        ropelab.apply_rope(Q[:, :1].repeat(1, 1, 75, 1), cos=COS[:1], sin=SIN[:1])  # a matrix, a head for each column
        cache = torch.cat((COS[:, :4], SIN[:, :4]), -1)
        apply_rope_with_cos_sin_cache_inplace(torch.arange(5), Q[0].clone(), None, 16, cache)


@pytest.mark.gpu
def test_positions_in_gpu_memory_yield_nan():
    positions = torch.tensor([0, 8, 1, 2, -9], device="cuda")
    y = ropelab.apply_rope(Q.cuda(), cos=COS.cuda(), sin=SIN.cuda(), positions=positions)
    assert y[:, [1, 4]].isnan().all() and not y[:, [0, 2, 3]].isnan().any()


def test_inference_may_overwrite_a_leaf(device):
    q = torch.randn(1, 5, 2, 16, device=device, requires_grad=True)
    expected = ropelab.apply_rope(q.detach(), cos=COS.to(device), sin=SIN.to(device))
    with torch.no_grad():
        ropelab.apply_rope(q, cos=COS.to(device), sin=SIN.to(device), inplace=True)
    assert torch.equal(q, expected)


def test_overlap_within_a_tensor():
    x = torch.empty(24)
    assert not overlaps_itself(x.view(2, 3, 4))
    assert not overlaps_itself(x.view(2, 3, 4).permute(2, 0, 1))
    assert not overlaps_itself(x.view(2, 3, 4)[:, ::2, 1:3])
    assert overlaps_itself(x[:4].expand(3, 4))
    assert overlaps_itself(x.unfold(0, 4, 2))


def test_overlap_between_tensors():
    qkv = torch.empty(2, 5, 6, 8)
    assert not may_share_elements(qkv[:, :, :4], qkv[:, :, 4:])
    assert not may_share_elements(qkv[:, :, 4:], qkv[:, :, :4])
    assert not may_share_elements(qkv[..., ::2], qkv[..., 1::2])
    assert not may_share_elements(qkv.transpose(1, 2)[:, :4], qkv.transpose(1, 2)[:, 4:])
    assert not may_share_elements(qkv[:1], qkv[1:])
    assert not may_share_elements(qkv, qkv.clone())
    memory = torch.zeros(4, 20, dtype=torch.uint8)  # a number of float32 behind 16 bytes
    assert not may_share_elements(memory[:, :16], memory.view(torch.float32)[:, 4])
    assert may_share_elements(memory[:, :17], memory.view(torch.float32)[:, 4])
    assert may_share_elements(qkv, qkv)
    assert may_share_elements(qkv[:, :, :4], qkv[:, :, 3:])
    assert may_share_elements(qkv[:, 1:], qkv[:, :-1])
    assert may_share_elements(qkv[..., :5], qkv[..., 4:])


@pytest.mark.parametrize("seq_format", ["bshd", "thd"])
def test_positions_of_one_batch_serve_all(device, seq_format):
    """Hugging Face's position_ids are ``[1, S]`` where all sequences of a batch share them."""
    q, cos, sin = (x.to(device) for x in (Q[0] if seq_format == "thd" else Q, COS, SIN))
    positions = torch.tensor([4, -3, 0, 7, 2], device=device)
    options = {"cos": cos, "sin": sin, "seq_format": seq_format}
    expected = ropelab.apply_rope(q, positions=positions, **options)
    assert torch.equal(ropelab.apply_rope(q, positions=positions[None], **options), expected)


def test_a_sparse_tensor_is_refused_after_a_strided_one_of_its_shape(device):
    """A sparse tensor has the strides of an expanded one, so these must not decide alone."""
    cos, sin = COS.to(device), SIN.to(device)
    ropelab.apply_rope(torch.zeros(1, 1, 1, 1, device=device).expand(Q.shape), cos=cos, sin=sin)
    with pytest.raises(ValueError, match="q: expected a dense tensor"):
        ropelab.apply_rope(Q.to(device).to_sparse(), cos=cos, sin=sin)
