"""Weights converted from one layout to the other: the scores of the attention stay as they were."""

import importlib
import re
import sys

import pytest
import torch

import ropelab
from ropelab import convert_layout
from ropelab.interop.huggingface import apply_rotary_pos_emb
from ropelab.layout.pairing import permutation

LAYOUTS = [("interleaved", "split_half"), ("split_half", "interleaved")]


def scores(x, weights, head_dim, layout, rotary_slice, positions):
    """The scores of every query head and shared key (GQA): projected, normed with a weight and rotated, in float64."""
    tokens = []
    for weight, bias, gain in weights:
        y = torch.nn.functional.linear(x, weight, bias).unflatten(-1, (-1, head_dim))
        tokens.append(torch.nn.functional.rms_norm(y, (head_dim,), gain, 1e-6))
    first, end = rotary_slice
    cos, sin = ropelab.rotary_table(4000, end - first, dtype=torch.float64)
    options = {"layout": layout, "rotary_slice": rotary_slice, "positions": positions}
    q, k = ropelab.apply_rope(*tokens, cos=cos, sin=sin, **options)
    return torch.einsum("bshd,bthd->bhst", q, k.repeat_interleave(q.shape[2] // k.shape[2], 2))


@pytest.mark.parametrize(("source", "target"), LAYOUTS)
@pytest.mark.parametrize(("head_dim", "rotary_slice"), [(16, (0, 16)), (16, (0, 8)), (12, (4, 10)), (2, (0, 2))])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
def test_scores_are_unchanged(source, target, head_dim, rotary_slice, heads, kv_heads):
    """Some tokens are far apart, because a wrong pairing is exact at distance 0 and nearly right at small distances."""
    x = torch.randn(2, 5, 7, dtype=torch.float64)
    positions = torch.tensor([0, 1, 17, 900, 3999])
    weights = [
        [torch.randn(n * head_dim, 7).double(), torch.randn(n * head_dim).double(), torch.randn(head_dim).double()]
        for n in (heads, kv_heads)
    ]
    converted = [
        [convert_layout(w, head_dim, source, target, rotary_slice=rotary_slice) for w in group] for group in weights
    ]
    before = scores(x, weights, head_dim, source, rotary_slice, positions)
    torch.testing.assert_close(scores(x, converted, head_dim, target, rotary_slice, positions), before)
    if rotary_slice[1] - rotary_slice[0] > 2:  # a single pair has one layout
        assert not torch.allclose(scores(x, weights, head_dim, target, rotary_slice, positions), before)
        for left_out in range(3):  # the weight, the bias, the norm
            mixed = [[w if i == left_out else c for i, (w, c) in enumerate(zip(*pair, strict=True))]
                     for pair in zip(weights, converted, strict=True)]  # fmt: skip
            assert not torch.allclose(scores(x, mixed, head_dim, target, rotary_slice, positions), before)


@pytest.mark.parametrize(("source", "target"), LAYOUTS)
def test_converting_back_gives_the_same_bits(source, target):
    for dtype in (torch.bfloat16, torch.int8, torch.float64):
        x = torch.randn(24, 3).mul(50).to(dtype)
        there = convert_layout(x, 8, source, target, rotary_slice=(0, 6))
        assert torch.equal(convert_layout(there, 8, target, source, rotary_slice=(0, 6)), x)
        assert torch.equal(convert_layout(x, 8, source, source), x) and there.dtype == dtype


def test_is_metas_to_hugging_face():
    """The permutation in transformers' conversion script of Llama, written as in the script."""
    heads, head_dim, inputs = 3, 8, 5
    w = torch.randn(heads * head_dim, inputs)
    published = w.view(heads, head_dim // 2, 2, inputs).transpose(1, 2).reshape(heads * head_dim, inputs)
    assert torch.equal(convert_layout(w, head_dim, "interleaved", "split_half"), published)


def test_cached_keys_are_converted_along_their_features():
    k = torch.randn(1, 6, 2, 16)
    cos, sin = ropelab.rotary_table(6, 16)
    cached = ropelab.apply_rope(k, cos=cos, sin=sin, layout="interleaved")
    order = permutation(16, "interleaved", "split_half")
    assert torch.equal(cached[..., order], ropelab.apply_rope(k[..., order].contiguous(), cos=cos, sin=sin))


def test_an_attention_of_transformers_keeps_its_output():
    """Cohere's layer, made for adjacent pairs, with converted weights in Llama's, made for halves."""
    pytest.importorskip("transformers")
    from transformers.models.cohere import configuration_cohere, modeling_cohere
    from transformers.models.llama import configuration_llama, modeling_llama

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": True}
    settings = sizes | {"rope_theta": 1e4, "num_hidden_layers": 1, "attn_implementation": "eager"}
    old_config, new_config = configuration_cohere.CohereConfig(**settings), configuration_llama.LlamaConfig(**settings)
    old = modeling_cohere.CohereAttention(old_config, 0).double()
    new = modeling_llama.LlamaAttention(new_config, 0).double()
    state = old.state_dict()
    for name in state:
        if name.startswith(("q_proj", "k_proj")):
            state[name] = convert_layout(state[name], 8, "interleaved", "split_half")
    new.load_state_dict(state)
    x, positions = torch.randn(1, 6, 32).double(), torch.tensor([[0, 1, 5, 40, 700, 3000]])
    outputs = [
        layer(x, rotary(config)(x, positions), None)[0]
        for layer, rotary, config in (
            (old, modeling_cohere.CohereRotaryEmbedding, old_config),
            (new, modeling_llama.LlamaRotaryEmbedding, new_config),
        )
    ]
    torch.testing.assert_close(outputs[1], outputs[0])


@pytest.mark.parametrize(("name", "options"), [("Llama", {"attention_bias": True, "mlp_bias": True}), ("Qwen3", {})])
def test_a_checkpoint_goes_there_and_back(monkeypatch, name, options):
    """Halves become adjacent pairs: the same outputs, and on the way back the bits. Qwen3 has norms of q and k."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 40, "num_hidden_layers": 2, "head_dim": 8}
    model = getattr(transformers, f"{name}ForCausalLM")
    model = model(model.config_class(**sizes, **options, attn_implementation="eager")).double().eval()
    for x in model.parameters():  # biases and norms too
        torch.nn.init.normal_(x, std=0.3)

    def converted(state, source, target):
        turns = re.compile(r"\.[qk]_(proj|norm)\.")
        return {key: convert_layout(x, 8, source, target) if turns.search(key) else x for key, x in state.items()}

    def pairs(q, k, cos, sin, unsqueeze_dim=1):
        order = permutation(8, "split_half", "interleaved")
        return apply_rotary_pos_emb(q, k, cos[..., order], sin[..., order], unsqueeze_dim, layout="interleaved")

    tokens = torch.randint(40, (2, 9))
    state = {key: x.clone() for key, x in model.state_dict().items()}
    with torch.no_grad():
        before = model(tokens).logits
        model.load_state_dict(converted(state, "split_half", "interleaved"))
        assert not torch.allclose(model(tokens).logits, before)
        monkeypatch.setattr(sys.modules[type(model).__module__], "apply_rotary_pos_emb", pairs)
        torch.testing.assert_close(model(tokens).logits, before)
    back = converted(model.state_dict(), "interleaved", "split_half")
    assert back.keys() == state.keys() and all(torch.equal(back[key], x) for key, x in state.items())


def test_a_fused_projection_converts_the_heads_of_q_and_k():
    """`ropelab.qkv_rope` gives the same scores and the same v in either layout."""
    x, weight, bias = torch.randn(1, 6, 10).double(), torch.randn(64, 10).double(), torch.randn(64).double()
    cos, sin = ropelab.rotary_table(6, 8, dtype=torch.float64)
    options = {"q_heads": 4, "k_heads": 2, "cos": cos, "sin": sin}
    q, k, v = ropelab.qkv_rope(x, weight, bias, **options)
    there = [convert_layout(t, 8, "split_half", "interleaved", heads=6) for t in (weight, bias)]
    new_q, new_k, new_v = ropelab.qkv_rope(x, *there, **options, layout="interleaved")
    assert torch.equal(new_v, v) and not torch.allclose(new_q, q)
    scores = [torch.einsum("bshd,btgd->bhgst", *pair) for pair in ((q, k), (new_q, new_k))]
    torch.testing.assert_close(scores[1], scores[0])
    assert torch.equal(convert_layout(there[0], 8, "interleaved", "split_half", heads=6), weight)


def test_computer_algebra_proves_it_and_refuses_what_is_false():
    pytest.importorskip("sympy")
    algebra = importlib.import_module("ropelab.study.topics.algebra")
    for source, target in LAYOUTS:
        identities = algebra.conversion_identities(source, target)
        assert len(identities) == 6 and all(map(algebra.is_zero, identities.values()))
    wrong = algebra.conversion_identities("split_half", "split_half")
    assert all(map(algebra.is_zero, wrong.values())), "nothing to convert is an identity too"
    angles = algebra.sp.symbols("a b", real=True)
    rotations = [algebra.head_rotation(angles, layout, 5, first=1) for layout, _ in LAYOUTS]
    assert not algebra.is_zero(rotations[0] - rotations[1])
