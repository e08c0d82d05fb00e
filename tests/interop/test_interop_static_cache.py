"""Models of Transformers whose rotation and update of a static cache become one call."""

import contextlib
import subprocess
import sys
import warnings

import pytest
import torch

from ropelab import rope_and_cache
from ropelab.interop.huggingface import caches, patch
from tests.interop.tiny import build, transformers

MODELS = "Llama", "Qwen2", "Qwen3", "Mistral", "Cohere", "Glm", "Glm4", "Phi3", "Olmo2"
TOKENS = torch.randint(1, 40, (2, 5), generator=torch.Generator().manual_seed(0))
PADDED = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


@pytest.fixture
def calls(monkeypatch):
    """The weights of the norm of q in each call of `rope_and_cache`."""
    made = []

    def counted(*arguments, **options):
        made.append(options.get("q_weight"))
        return rope_and_cache(*arguments, **options)

    monkeypatch.setattr(caches, "rope_and_cache", counted)
    return made


def generated(model, **options):
    """Greedy tokens, and the logits of each step."""
    options = {"attention_mask": PADDED, "cache_implementation": "static", "max_new_tokens": 9} | options
    found = model.generate(
        TOKENS, do_sample=False, use_cache=True, output_logits=True, return_dict_in_generate=True, eos_token_id=None,
        **options,
    )  # fmt: skip
    return found.sequences, torch.stack(found.logits)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_equal_with_one_call_a_layer(calls, torch_backend, name):
    model = build(name)
    tokens, logits = generated(model)
    with patch(model):
        ours, found = generated(model)
    assert len(calls) == 2 * 9 and calls[0] is None
    assert torch.equal(ours, tokens)
    torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("projection", [False, True])
@pytest.mark.parametrize(
    "name, options",
    [
        ("Cohere2", {"layer_types": ["sliding_attention", "full_attention"]}),
        ("Cohere2", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("SmolLM3", {"no_rope_layers": [1, 0]}),
    ],
    ids=str,
)
def test_layers_that_do_not_rotate_keep_two_steps(torch_backend, name, options, projection):
    model = build(name, sliding_window=8, **options)
    cache = {"max_new_tokens": 4, "attention_mask": None}
    tokens, logits = generated(model, **cache)
    with patch(model, projection=projection):
        ours, found = generated(model, **cache)
    assert torch.equal(ours, tokens)
    torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5)


def test_norms_are_part_of_the_call(calls, torch_backend):
    model = build("Qwen3")
    for module in model.modules():
        if "Norm" in type(module).__name__:
            torch.nn.init.normal_(module.weight, mean=1, std=0.3)
    tokens, logits = generated(model)
    with patch(model, qk_norm=True):
        ours, found = generated(model)
        dynamic = generated(model, cache_implementation=None)
    assert len(calls) == 2 * 9 and calls[0].shape == (8,)
    assert torch.equal(ours, tokens) and torch.equal(dynamic[0], tokens)
    torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5)


def test_the_cache_holds_what_two_steps_write(calls, torch_backend):
    model = build("Mistral", torch.float64)
    filled = []
    for patched in (False, True):
        cache = transformers.StaticCache(config=model.config, max_cache_len=8)
        with torch.no_grad():
            undo = patch(model) if patched else None
            model(TOKENS, past_key_values=cache, use_cache=True)
            model(TOKENS[:, :1], past_key_values=cache, use_cache=True)
        if undo:
            undo.undo()
        filled.append([x for layer in cache.layers for x in (layer.keys, layer.values)])
        assert all(layer.cumulative_length == 6 for layer in cache.layers)
    for x, y in zip(*filled, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
        assert y[:, :, 6:].eq(0).all() and y[:, :, :6].ne(0).all()


REFUSED = {
    # the sequences and tokens of each call; a cache has room for 5 tokens of as many sequences as the first call has
    "a prompt that is too long": [(2, 6)],
    "a long prompt of one sequence": [(1, 9)],
    "a token too many": [(2, 5), (2, 1)],
    "a chunk across the end": [(2, 3), (2, 3)],
    "fewer sequences": [(2, 2), (1, 1)],
    "more sequences": [(2, 2), (3, 1)],
}


@pytest.mark.parametrize("patched", [False, True], ids=["original", "patched"])
@pytest.mark.parametrize("calls_made", REFUSED.values(), ids=REFUSED)
def test_what_the_original_refuses_is_refused(torch_backend, calls_made, patched):
    """In no case do logits come back, or other sequences change."""
    model, before = build(), None
    cache = transformers.StaticCache(config=model.config, max_cache_len=5)
    with torch.no_grad(), patch(model) if patched else contextlib.nullcontext():
        for i, shape in enumerate(calls_made, 1):
            before = cache.layers[0].keys.clone() if cache.layers[0].is_initialized else None
            refused = pytest.raises((IndexError, RuntimeError)) if i == len(calls_made) else contextlib.nullcontext()
            with refused:
                model(TOKENS[:1, :1].expand(shape), past_key_values=cache, use_cache=True)
    assert not patched or before is None or torch.equal(cache.layers[0].keys, before)


def test_a_full_cache_is_refused_under_torch_compile(torch_backend):
    model = build()
    cache = transformers.StaticCache(config=model.config, max_cache_len=5)
    with torch.no_grad(), patch(model):
        model(TOKENS, past_key_values=cache, use_cache=True)
        with pytest.raises(RuntimeError, match="past_key_values: expected at most 5 tokens in the cache, got more"):
            torch.compile(model, backend="aot_eager")(TOKENS[:, :1], past_key_values=cache, use_cache=True)
    torch._dynamo.reset()  # it skips code that raised


def test_under_torch_compile_tokens_are_equal(torch_backend):
    model, called = build("Qwen3"), []
    tokens, logits = generated(model)

    def compiled(graph, inputs):
        called.append(sum("rope_and_cache" in str(node.target) for node in graph.graph.nodes))
        return graph

    with patch(model):
        model.forward = torch.compile(model.forward, backend=compiled, fullgraph=True)
        ours, found = generated(model)
    assert torch.equal(ours, tokens) and called[-1] == 2, called
    torch.testing.assert_close(found, logits, rtol=1e-5, atol=1e-5)


def test_a_sliding_cache_takes_two_steps_and_says_so_once(calls, torch_backend):
    types = ["sliding_attention", "full_attention"]
    model = build("Gemma3", sliding_window=4, layer_types=types, query_pre_attn_scalar=8)
    tokens, _ = generated(model)
    with patch(model), pytest.warns(UserWarning, match="because its cache is a StaticSlidingWindowLayer") as said:
        ours, _ = generated(model)
    assert torch.equal(ours, tokens) and len(calls) == 9
    assert sum("two steps" in str(each.message) for each in said) == 1


@pytest.mark.parametrize("change", ["offloaded", "dynamic", "gradients"])
def test_other_caches_take_two_steps(calls, torch_backend, monkeypatch, change):
    model = build()
    cache = transformers.StaticCache(config=model.config, max_cache_len=8)
    if change == "dynamic":
        cache = transformers.DynamicCache(config=model.config)
    with patch(model), warnings.catch_warnings(record=True) as said, torch.set_grad_enabled(change == "gradients"):
        warnings.simplefilter("always")
        if change == "offloaded":
            cache.offloading = True
            monkeypatch.setattr(type(cache), "update", lambda self, k, v, i: self.layers[i].update(k, v))
        model(TOKENS, past_key_values=cache, use_cache=True)
    assert not calls
    assert sum("two steps" in str(each.message) for each in said) == (change == "offloaded")


def test_layers_that_use_q_or_k_before_the_update_keep_two_steps(calls, torch_backend, monkeypatch):
    model = build()
    attention = type(model.model.layers[0].self_attn)
    module = __import__(attention.__module__, fromlist=["eager_attention_forward"])

    class Scales(attention):
        def forward(self, hidden_states, position_embeddings, attention_mask=None, past_key_values=None, **kwargs):
            shape = (*hidden_states.shape[:-1], -1, self.head_dim)
            q, k, v = (p(hidden_states).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
            q, k = apply_rotary_pos_emb(q, k, *position_embeddings)  # noqa: F821
            q = q * 2
            if past_key_values is not None:
                k, v = past_key_values.update(k, v, self.layer_idx)
            out, _ = module.eager_attention_forward(self, q, k, v, attention_mask, scaling=self.scaling)
            return self.o_proj(out.reshape(*hidden_states.shape[:-1], -1)), None

    Scales.__module__ = attention.__module__
    monkeypatch.setitem(globals(), "apply_rotary_pos_emb", module.apply_rotary_pos_emb)
    for layer in model.model.layers:
        layer.self_attn.__class__ = Scales
    tokens, _ = generated(model)
    with patch(model):
        ours, _ = generated(model)
    assert not calls and torch.equal(ours, tokens)


OVERFLOW = """
import sys, torch
from ropelab.interop.huggingface import patch
from tests.interop.tiny import build, transformers
model = build("Qwen3", torch.bfloat16, head_dim=64).cuda()
cache = transformers.StaticCache(config=model.config, max_cache_len=7)
hidden = torch.randn(2, 5, 32, device="cuda", dtype=torch.bfloat16)
tables = model.model.rotary_emb(hidden, torch.arange(5, device="cuda").expand(2, -1))
with torch.no_grad(), patch(model):
    layer = model.model.layers[0].self_attn
    run = torch.compile(layer, fullgraph=True) if sys.argv[1] == "compiled" else layer

    def step(tokens=1):
        first = tuple(table[:, :tokens] for table in tables)
        return run(hidden[:, :tokens], position_embeddings=first, attention_mask=None, past_key_values=cache)

    step(5), step()
    if sys.argv[1] == "graph":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):  # the capture counts no token
            step()
        step = graph.replay
    step()
    torch.cuda.synchronize()
    print("the last token fits", flush=True)
    step()
    torch.cuda.synchronize()
print("another token was taken")
"""


@pytest.mark.gpu
@pytest.mark.process
@pytest.mark.parametrize("way", ["eager", "compiled", "graph"])
def test_a_full_cache_ends_in_a_device_assertion(way):
    """In a process of its own, because an assertion of the device ends all work of the process on it."""
    ran = subprocess.run([sys.executable, "-c", OVERFLOW, way], capture_output=True, text=True)
    assert "the last token fits" in ran.stdout and "another token" not in ran.stdout, ran.stderr
    assert ran.returncode and "device-side assert" in ran.stderr, ran.stderr


@pytest.mark.gpu
def test_the_host_does_not_wait_for_the_device():
    model = build("Qwen3", torch.bfloat16, head_dim=64).cuda()
    cache = transformers.StaticCache(config=model.config, max_cache_len=8)
    positions = torch.arange(6, device="cuda").expand(2, -1)
    with torch.no_grad(), patch(model):
        model(TOKENS.cuda(), past_key_values=cache, use_cache=True)
        layer, hidden = model.model.layers[0].self_attn, torch.randn(2, 1, 32, device="cuda", dtype=torch.bfloat16)
        tables = model.model.rotary_emb(hidden, positions[:, 5:])
        torch.cuda.set_sync_debug_mode("error")
        try:
            layer(hidden, position_embeddings=tables, attention_mask=None, past_key_values=cache)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_on_a_gpu_with_compiled_generation(calls):
    for dtype in (torch.float32, torch.bfloat16):
        model = build("Qwen3", dtype, head_dim=64).cuda()
        tokens = {}
        for way in ("plain", "patched"):
            undo = patch(model) if way == "patched" else None
            cache = {"cache_implementation": "static", "max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
            found = model.generate(TOKENS.cuda(), attention_mask=PADDED.cuda(), **cache)
            tokens[way] = found.cpu()
            if undo:
                undo.undo()
        assert calls
        if dtype == torch.float32:
            assert torch.equal(tokens["plain"], tokens["patched"])
