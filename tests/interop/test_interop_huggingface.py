"""Hugging Face's convention, and models that compute the same before and after one line."""

import functools
import importlib
import types

import pytest
import torch

from ropelab.interop import calls
from ropelab.interop.broadcast import formula
from ropelab.interop.calls import ForeignRotation
from ropelab.interop.huggingface import apply_rotary_pos_emb, patch
from ropelab.interop.huggingface.model import CALLS
from tests.conftest import HAS_GPU
from tests.support import older

OLDER = older("transformers")
of_today = pytest.mark.skipif(bool(OLDER), reason=OLDER)
DEVICE = "cuda" if HAS_GPU else "cpu"
SMALL = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPTJ = {"vocab_size": 40, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 1,
        "eos_token_id": 2}  # fmt: skip
MODELS = {
    # name of the model: its class, its configuration, launches for each layer
    "llama": ("LlamaForCausalLM", SMALL, 1),
    "gptj": ("GPTJForCausalLM", GPTJ | {"rotary_dim": 4}, 2),
    "cohere": ("CohereForCausalLM", SMALL, 1),
    "glm": ("GlmForCausalLM", SMALL | {"head_dim": 8}, 1),
    "gpt_neox": ("GPTNeoXForCausalLM", SMALL, 1),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        SMALL | {"num_key_value_heads": 4, "first_k_dense_replace": 2, "q_lora_rank": 8, "kv_lora_rank": 8,
                 "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "n_routed_experts": 2,
                 "n_group": 1, "topk_group": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 8},
        1,
    ),
}  # fmt: skip


def build(name, dtype=torch.float64):
    transformers = pytest.importorskip("transformers")
    kind, options, launches = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, kind).config_class(**options)
    model = getattr(transformers, kind)(config).to(DEVICE, dtype)
    return model.eval(), launches


def run(model):
    """Logits of two sequences, the first padded on the left, and the gradients of all parameters."""
    tokens = torch.randint(1, 40, (2, 7), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    mask = torch.ones_like(tokens)
    mask[0, :3] = 0
    model.zero_grad()
    logits = model(input_ids=tokens, attention_mask=mask).logits
    cotangent = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    logits.backward(cotangent.to(logits))
    return [logits.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_computes_the_same_before_and_after(launches, name):
    """The comparison is in float64, where a rotation that differs in more than rounding shows."""
    model, per_layer = build(name)
    before = run(model)
    assert not launches
    with patch(model) as patched:
        assert patched.functions
        launches.clear()  # the launches that find out what the functions do
        during = run(model)
        # Forward and backward of every layer.
        assert len(launches) == 2 * 2 * per_layer
    after = run(model)
    assert len(launches) == 2 * 2 * per_layer
    for one, other, again in zip(before, during, after, strict=True):
        # Cohere's own rotation is in float32, whatever the model.
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-6 if name == "cohere" else 1e-10)
        assert torch.equal(one, again)
    assert before[0].abs().max() > 1e-3


def test_the_cache_of_keys_and_positions_as_models_have_them(launches):
    model, _ = build("llama")
    tokens = torch.randint(1, 40, (2, 6), device=DEVICE)
    with torch.no_grad(), patch(model):
        whole = model(tokens).logits
        first = model(tokens[:, :5], use_cache=True)
        last = model(tokens[:, 5:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(last, whole[:, 5:], rtol=1e-9, atol=1e-10)
    assert launches


# ------------------------------------------------------------------------------------------- doing and undoing


def test_undo_leaves_what_others_put_there():
    module = pytest.importorskip("transformers.models.llama.modeling_llama")
    original = module.apply_rotary_pos_emb
    patched = patch(build("llama")[0])
    ours = module.apply_rotary_pos_emb

    def theirs(*arguments, **options):
        return ours(*arguments, **options)

    try:
        module.apply_rotary_pos_emb = theirs
        patched.undo()
        assert module.apply_rotary_pos_emb is theirs
    finally:
        module.apply_rotary_pos_emb = original


def test_what_the_original_refuses_is_refused():
    """Unknown, surplus and missing arguments are refused; mixed dtypes work as in the original."""
    module = pytest.importorskip("transformers.models.llama.modeling_llama")
    q, k = torch.randn(2, 4, 5, 8, device=DEVICE), torch.randn(2, 1, 5, 8, device=DEVICE)
    cos, sin = torch.randn(2, 2, 5, 8, device=DEVICE)
    expected = module.apply_rotary_pos_emb(q, k.double(), cos, sin)
    with patch(build("llama")[0]):
        rotate = module.apply_rotary_pos_emb
        for arguments, options in (
            ((q, k, cos), {}), ((q, k, cos, sin, 1, 2), {}), ((q, k, cos, sin), {"layout": "neox"}),
            ((q, k, cos, sin), {"sin": sin}),
        ):  # fmt: skip
            with pytest.raises(TypeError, match="apply_rotary_pos_emb|rotate"):
                rotate(*arguments, **options)
        found = rotate(q, k.double(), cos, sin)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other)


def test_a_patch_is_found_whatever_the_defaults():
    module = pytest.importorskip("transformers.models.llama.modeling_llama")
    original, model = module.apply_rotary_pos_emb, build("llama")[0]
    before = torch.get_default_dtype()
    for dtype in (torch.float64, torch.bfloat16):
        try:
            torch.set_default_dtype(dtype)
            with torch.device("meta"), patch(model):
                assert module.apply_rotary_pos_emb is not original
        finally:
            torch.set_default_dtype(before)


def test_what_raises_inside_a_block_undoes_too():
    module = pytest.importorskip("transformers.models.llama.modeling_llama")
    original = module.apply_rotary_pos_emb
    with pytest.raises(KeyError), patch(build("llama")[0]):
        raise KeyError
    assert module.apply_rotary_pos_emb is original


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda q, k, cos, sin, unsqueeze_dim=1: formula(q, cos, -sin), "got another function"),
        (lambda q, k, cos, sin, unsqueeze_dim=1: (q, k), "got another function"),
        (lambda q, k, cos, sin, scale, unsqueeze_dim=1: (q, k), "expected parameters such as .* got .*'scale'"),
    ],
)
def test_what_it_does_not_know_is_refused_and_nothing_replaced(monkeypatch, wrong, message):
    module = pytest.importorskip("transformers.models.llama.modeling_llama")
    model, _ = build("llama")
    original = module.apply_rotary_pos_emb
    monkeypatch.setattr(module, "apply_rotary_pos_emb_other", wrong, raising=False)
    with pytest.raises(ValueError, match=f"modeling_llama.apply_rotary_pos_emb_other: .*{message}"):
        patch(model)
    assert module.apply_rotary_pos_emb is original and module.apply_rotary_pos_emb_other is wrong


def test_a_model_without_rotation_is_refused():
    with pytest.raises(ValueError, match="model: expected a Transformers model .*, got Linear"):
        patch(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    "model, name, call",
    [
        ("llama", "apply_rotary_pos_emb", "pair"),
        ("cohere", "apply_rotary_pos_emb", "pair"),
        ("olmo2", "apply_rotary_pos_emb", "pair"),
        ("gemma3n", "apply_rotary_pos_emb", "one"),
        ("qwen2_vl", "apply_rotary_pos_emb_vision", "vision"),
    ],
)
@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float32), (torch.float32, torch.float32)], ids=str)
def test_functions_keep_their_results_dtype(model, name, call, dtypes):
    """Llama's function promotes float16 with float32 tables to float32; others return the dtype of their inputs."""
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    original = getattr(module, name)
    x, table = dtypes
    q, k = (torch.randn(2, 3, 5, 8).to(DEVICE, x) for _ in range(2))
    cos, sin = torch.randn(2, 2, 5, 8, dtype=table, device=DEVICE)
    arguments = {"pair": (q, k, cos, sin), "one": (q, cos, sin), "vision": (q[0], k[0], cos[0, :3], sin[0, :3])}[call]
    expected = original(*arguments)
    layer = type("Layer", (torch.nn.Module,), {"__module__": module.__name__})()
    with patch(layer):
        assert getattr(module, name) is not original
        found = getattr(module, name)(*arguments)
    expected, found = ((y,) if call == "one" else y for y in (expected, found))
    for one, other in zip(expected, found, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=2e-3, atol=4e-3 if x == torch.float16 else 2e-6)


# ------------------------------------------------------------------------- functions that are called otherwise

OTHERWISE = [
    ("clvp", "apply_rotary_pos_emb"), ("deepseek_v2", "apply_rotary_emb"), ("deepseek_v4", "apply_rotary_pos_emb"),
    ("llama4", "apply_rotary_emb"), ("llama4", "vision_apply_rotary_emb"), ("dinov3_vit", "apply_rotary_pos_emb"),
    ("edgetam_video", "apply_rotary_pos_emb_2d_cross_attn"), ("sam2_video", "apply_rotary_pos_emb_2d"),
    ("sam3", "apply_rotary_pos_emb_2d"), ("minimax_m3_vl", "apply_rotary_pos_emb_vision"),
    ("musicflamingo", "apply_rotary_time_emb"), ("nanochat", "apply_rotary_pos_emb"),
]  # fmt: skip


@of_today
@pytest.mark.parametrize("rotary_dim", [8, 4])
@pytest.mark.parametrize("model, name", OTHERWISE)
def test_functions_that_are_called_otherwise(torch_backend, model, name, rotary_dim):
    """Results and gradients agree, also with tables that are narrower than a head where the function allows them."""
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    original = getattr(module, name)
    rotation = ForeignRotation(name, original, CALLS)
    [understood] = rotation.understood
    arguments = rotation.bound((), calls._probe(understood.call, understood.kind, rotary_dim))
    arguments |= understood.call.options
    xs = {x: torch.randn_like(arguments[x]).requires_grad_() for x in understood.call.rotated}
    try:
        expected = original(**arguments | xs)
    except RuntimeError:
        assert rotary_dim == 4
        return
    assert understood.rotated(arguments | xs) is not None
    found = rotation.over_kernel()(**arguments | xs)
    found, expected = ((y,) if isinstance(y, torch.Tensor) else y for y in (found, expected))
    cotangents = [torch.randn_like(y) for y in expected]
    grads = [torch.autograd.grad(ys, list(xs.values()), cotangents) for ys in (found, expected)]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------- norms of q and k, fused


def normed(architecture, **fields):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    kind = getattr(transformers, architecture)
    model = kind(kind.config_class(**SMALL | {"head_dim": 8} | fields)).to(DEVICE, torch.float64)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.3)
    return model.eval()


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Gemma3ForCausalLM", "Exaone4ForCausalLM"])
def test_norms_and_rotation_become_one_launch(launches, architecture):
    model = normed(architecture)
    before = run(model)
    with patch(model, qk_norm=True) as patched:
        assert any("RMSNorm.forward" in name for name in patched.functions)
        launches.clear()
        during = run(model)
        assert len(launches) == 2 * 3  # of every layer; the backward has a second launch for the weights of the norms
    after = run(model)
    for one, other, again in zip(before, during, after, strict=True):
        # The original computes norms and tables in float32.
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * float(one.abs().max()))
        assert torch.equal(one, again)
    assert not any("forward" in vars(layer) for layer in model.modules())


def test_fused_layers_compile(torch_backend):
    model = normed("Qwen3ForCausalLM")
    tokens = torch.randint(1, 40, (2, 7), device=DEVICE)
    expected = model(tokens).logits
    with patch(model, qk_norm=True):
        found = torch.compile(model, backend="aot_eager", fullgraph=True)(tokens).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "architecture, reason",
    [
        ("LlamaForCausalLM", "it rotates q or k without a norm before"),
        ("Olmo2ForCausalLM", "its norm is not over the features of a head"),
        ("BeamForCausalLM", "an argument of the call decides whether it normalizes or rotates"),
    ],
)
@of_today
def test_layers_that_cannot_be_fused(architecture, reason):
    model = normed(architecture)
    module = importlib.import_module(type(model).__module__)
    original = module.apply_rotary_pos_emb
    with pytest.raises(ValueError, match=f"model: expected a layer that normalizes .*, got .*: {reason}"):
        patch(model, qk_norm=True)
    assert module.apply_rotary_pos_emb is original


def test_layers_that_do_something_else_with_a_norm(monkeypatch):
    """A layer that uses the normalized q before the rotation, and a norm that is no RMS norm of a head."""
    model = normed("Qwen3ForCausalLM")
    attention = model.model.layers[0].self_attn
    module = importlib.import_module(type(attention).__module__)
    norm = type(attention.q_norm)
    forward = norm.forward
    monkeypatch.setattr(norm, "forward", lambda self, x: forward(self, x) + 1)
    with pytest.raises(ValueError, match="is not an RMS norm of a head with a weight"):
        patch(model, qk_norm=True)
    monkeypatch.undo()

    class Used(type(attention)):
        def forward(self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs):
            shape = (*hidden_states.shape[:-1], -1, self.head_dim)
            q = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
            k = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
            size = q.sum()
            q, k = apply_rotary_pos_emb(q, k, *position_embeddings)  # noqa: F821
            return self.o_proj(q.transpose(1, 2).flatten(2)) * size, None

    Used.__module__ = module.__name__
    Used.forward = types.FunctionType(Used.forward.__code__, vars(module), "forward", (None,))
    for layer in model.model.layers:
        layer.self_attn.__class__ = Used
    with pytest.raises(ValueError, match="it uses q or k between the norm and the rotation"):
        patch(model, qk_norm=True)


def test_a_call_that_one_launch_cannot_serve_is_normalized_too(torch_backend):
    """The tables require grad, as in a model that learns the frequencies."""
    model = normed("Qwen3ForCausalLM")
    layer = model.model.layers[0].self_attn
    hidden = torch.randn(2, 5, 32, dtype=torch.float64, device=DEVICE)
    tables = torch.randn(2, 2, 5, 8, dtype=torch.float64, device=DEVICE).requires_grad_()
    expected = layer(hidden, (tables[0], tables[1]), None)[0]
    with patch(model, qk_norm=True):
        found = layer(hidden, (tables[0], tables[1]), None)[0]
    torch.testing.assert_close(found, expected)


# -------------------------------------------------------------------------------------------- the function


def test_one_launch_for_queries_and_keys(launches):
    q, k = torch.randn(2, 4, 5, 8, device=DEVICE), torch.randn(2, 1, 5, 8, device=DEVICE)
    cos, sin = torch.randn(2, 2, 5, 8, device=DEVICE)
    for batch in (2, 1):
        apply_rotary_pos_emb(q, k, cos[:batch], sin[:batch])
    assert len(launches) == 2
    # Keys of another length have no row of their own.
    with pytest.raises(ValueError, match=r"cos: expected a shape that broadcasts against k \(2, 1, 3, 8\), got shape"):
        apply_rotary_pos_emb(q, k[:, :, :3], cos, sin)


def test_a_decorated_forward_is_patched_with_its_decorator(monkeypatch):
    """Transformers 5.24 decorates the forward of its layers, to rename an argument."""
    model, hidden, seen = normed("Qwen3ForCausalLM"), torch.randn(1, 3, 32, device=DEVICE, dtype=torch.float64), []
    layer = model.model.layers[0].self_attn
    original = type(layer).forward

    def renames(function):
        @functools.wraps(function)
        def forward(*args, **kwargs):
            seen.append(kwargs.pop("old_name", None))
            return function(*args, **kwargs)

        return forward

    monkeypatch.setattr(type(layer), "forward", renames(original))
    given = {
        "position_embeddings": model.model.rotary_emb(hidden, torch.arange(3, device=DEVICE)[None]),
        "attention_mask": None,
    }
    expected = layer(hidden, **given)[0]
    with patch(model, qk_norm=True):
        seen.clear()
        torch.testing.assert_close(layer(hidden, **given, old_name=1)[0], expected)
    assert seen == [1]
    monkeypatch.setattr(type(layer), "forward", functools.wraps(original)(lambda *args, **kwargs: None))
    with pytest.raises(ValueError, match="its forward is wrapped or replaced"):
        patch(model, qk_norm=True)


def test_a_patch_leaves_the_random_numbers_of_the_caller():
    model = normed("Qwen3ForCausalLM")
    before = torch.random.get_rng_state()
    with patch(model, qk_norm=True):
        assert torch.equal(torch.random.get_rng_state(), before)
    model = normed("LlamaForCausalLM")
    before = torch.random.get_rng_state()
    with patch(model, projection=True):
        assert torch.equal(torch.random.get_rng_state(), before)
