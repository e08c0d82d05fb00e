"""Hold the plugin of vLLM to vLLM's own model classes, cache writes and forward context, on a CPU.

    CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 python tests/interop/serving_vllm.py MODEL CACHE_DTYPE

A process without a GPU has no attention of vLLM. A stand-in reads keys and values from the cache that the layer wrote,
so a wrong place in the cache, a wrong rotation or a missing norm changes the output of the model. The process prints
what it found, as JSON.
"""

import json
import sys
import tempfile
from types import SimpleNamespace

import torch
import vllm
import vllm.model_executor.layers.attention.attention as attention_module
import vllm.model_executor.layers.attention.mla_attention as latent_module
from vllm import _custom_ops
from vllm.config import CacheConfig, CompilationConfig, DeviceConfig, ModelConfig, VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention import MLAAttention
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends import fa_utils, triton_attn
from vllm.v1.attention.ops import triton_reshape_and_cache_flash

from ropelab.interop import vllm_writes
from ropelab.interop.vllm_plugin import serve

COMMON = {
    "torch_dtype": "float32", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "rope_theta": 10000.0,
}  # fmt: skip
GEMMA = {
    "query_pre_attn_scalar": 16, "sliding_window": 512, "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
EXPERTS = {
    "first_k_dense_replace": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16,
    "num_key_value_heads": 4, "routed_scaling_factor": 1.0, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
}  # fmt: skip
MODELS = {
    "llama": ("LlamaForCausalLM", "llama", {}),
    "mistral": ("MistralForCausalLM", "mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2ForCausalLM", "qwen2", {}),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", {}),
    "qwen3-mrope": ("Qwen3ForCausalLM", "qwen3", {}),
    "gemma2": (
        "Gemma2ForCausalLM",
        "gemma2",
        {**GEMMA, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text", {**GEMMA, "rope_local_base_freq": 1e4}),
    "glm4": ("Glm4ForCausalLM", "glm4", {"partial_rotary_factor": 0.5, "attention_bias": True}),
    "phi3": ("Phi3ForCausalLM", "phi3", {}),
    "deepseek_v3": ("DeepseekV3ForCausalLM", "deepseek_v3", {**EXPERTS, **LATENT}),
}
TOKENS, BLOCKS, BLOCK = 9, 4, 16


def prepare() -> None:
    """Make vLLM build its layers on a CPU as it builds them on a GPU, with attention that reads the cache."""
    torch.cuda.get_device_capability = lambda *given: (9, 0)
    platform = type(current_platform)
    platform.opaque_attention_op = classmethod(lambda cls: True)
    platform.device_type = "cpu"
    platform.num_compute_units = classmethod(lambda cls, *given: 1)
    triton_reshape_and_cache_flash._is_supported_kv_cache_dtype = lambda dtype: True
    attention_module.get_attn_backend = lambda *given, **named: triton_attn.TritonAttentionBackend
    for name in ("compile_flash_attn_varlen_func_from_specs", "flash_attn_varlen_func"):
        if getattr(fa_utils, name, None) is None:  # attend_latent is in their place
            setattr(fa_utils, name, lambda *given, **named: None)

    def latent_backend(*given, **named):
        from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend

        return TritonMLABackend

    latent_module.get_attn_backend = latent_backend
    from vllm.v1.attention.backends.mla.prefill import flash_attn

    flash_attn.flash_attn_varlen_func = lambda *given, **named: None
    flash_attn.get_flash_attn_version = lambda *given, **named: 3
    triton_attn.TritonAttentionImpl.forward = attend
    MLAAttention.forward_impl = attend_latent
    _custom_ops.concat_and_cache_mla = write_latent
    with set_current_vllm_config(VllmConfig(device_config=DeviceConfig(device="cpu"))):
        init_distributed_environment(1, 0, f"file://{tempfile.mkdtemp()}/store", 0, "gloo")
        initialize_model_parallel(1, 1)


def attend(self, layer, query, key, value, kv_cache, metadata, output, *given, **named):
    """Causal attention of one sequence, in float32, with the keys and values of the cache."""
    caches = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
    scales = layer._k_scale, layer._v_scale
    if kv_cache.dtype == torch.uint8:
        caches = [cache.view(torch.float8_e4m3fn).float() * scale for cache, scale in zip(caches, scales, strict=True)]
    keys, values = (cache.float().reshape(-1, *cache.shape[2:])[metadata.slots] for cache in caches)
    keys, values = (x.repeat_interleave(self.num_heads // self.num_kv_heads, 1) for x in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", query.float(), keys) * self.scale
    later = torch.ones(len(query), len(query), dtype=torch.bool).triu(1)
    output.copy_(torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -torch.inf).softmax(-1), values))
    return output


def attend_latent(self, q, kv_c, k_pe, kv_cache, metadata, output, **named):
    """Some function of all that latent attention is given, and of the cache."""
    entries = kv_cache.reshape(-1, kv_cache.shape[-1])[metadata.slots]
    given = torch.cat((q.flatten(1), entries, k_pe.flatten(1)), 1)
    output.copy_(torch.stack([given.roll(i, 1)[:, 0] + given.sin().sum(1) for i in range(output.shape[1])], 1))


def write_latent(kv_c, k_pe, kv_cache, slot_mapping, kv_cache_dtype, scale, **named):
    """vLLM's write into the latent cache, in torch operations."""
    kv_cache.view(-1, kv_cache.shape[-1])[slot_mapping] = torch.cat((kv_c, k_pe), 1)


def build(name: str, cache_dtype: str) -> tuple[torch.nn.Module, VllmConfig]:
    """A model with random weights, and its configuration."""
    architecture, model_type, more = MODELS[name]
    folder = tempfile.mkdtemp()
    with open(f"{folder}/config.json", "w", encoding="utf-8") as file:
        json.dump({**COMMON, **more, "architectures": [architecture], "model_type": model_type}, file)
    config = VllmConfig(
        model_config=ModelConfig(
            model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="float32", enforce_eager=True
        ),
        device_config=DeviceConfig(device="cpu"),
        cache_config=CacheConfig(block_size=BLOCK, cache_dtype=cache_dtype),
        compilation_config=CompilationConfig(custom_ops=["none"]),
    )
    with set_current_vllm_config(config), set_default_torch_dtype(torch.float32):
        model = initialize_model(vllm_config=config, model_config=config.model_config)
        if name.endswith("mrope"):
            from vllm.model_executor.layers.rotary_embedding import MRotaryEmbedding

            for layer in model.model.layers:
                layer.self_attn.rotary_emb = MRotaryEmbedding(
                    16, 16, 512, 1e4, True, torch.float32, mrope_section=[4, 2, 2], mrope_interleaved=True
                )
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return model, config


def run(call, config: VllmConfig, inputs: dict) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What a model computes, and the caches that it wrote."""
    layers = config.compilation_config.static_forward_context
    for layer in layers.values():
        shape = (BLOCKS, layer.num_kv_heads, BLOCK, 2 * layer.head_size)
        if isinstance(layer, MLAAttention):
            shape = (BLOCKS, BLOCK, layer.kv_lora_rank + layer.qk_rope_head_dim)
        layer.kv_cache = torch.zeros(shape).to(getattr(layer, "kv_cache_torch_dtype", torch.float32))
    slots = inputs["slots"]
    with (
        torch.no_grad(),
        set_current_vllm_config(config),
        set_forward_context(  # fmt: skip
            dict.fromkeys(layers, SimpleNamespace(slots=slots, num_decode_tokens=0)),
            config,
            num_tokens=TOKENS,
            slot_mapping=dict.fromkeys(layers, slots),
        ),
    ):
        return call(inputs["ids"], inputs["positions"]), [layer.kv_cache for layer in layers.values()]


def plans(config: VllmConfig) -> list[vllm_writes.Plan]:
    """The plans of the served layers."""
    layers = config.compilation_config.static_forward_context.values()
    return [layer.of_ropelab for layer in layers if hasattr(layer, "of_ropelab")]


def numbers(cache: torch.Tensor) -> torch.Tensor:
    """The contents of a cache."""
    return cache.view(torch.float8_e4m3fn).float() if cache.dtype == torch.uint8 else cache.float()


def apart(x, y) -> float:
    """The largest distance of two results."""
    return (x - y).abs().max().item()


def main(name: str, cache_dtype: str) -> dict:
    """Compare a model of vLLM with and without the plugin."""
    prepare()
    vllm_writes.define()
    torch.manual_seed(0)
    model, config = build(name, cache_dtype)
    positions = torch.randint(0, 512, (3, TOKENS)) if name.endswith("mrope") else torch.randperm(500)[:TOKENS]
    ids, slots = torch.randint(0, 128, (TOKENS,)), torch.randperm(BLOCKS * BLOCK)[:TOKENS]
    inputs = {"ids": ids, "positions": positions, "slots": slots}
    expected, caches = run(model, config, inputs)
    again = [cache.clone() for cache in caches]
    outcomes = dict(serve(model, config))
    found, written = run(model, config, inputs)
    result = {
        "vllm": vllm.__version__, "outcomes": outcomes, "scale": expected.abs().max().item(),
        "apart": apart(found, expected),
        "caches_apart": max(apart(numbers(x), numbers(y)) for x, y in zip(again, written, strict=True)),
        "first_cache": [numbers(x)[0].flatten().tolist() for x in (again[0], written[0])],
        "cache_scale": max(numbers(x).abs().max().item() for x in again),
        "broken": [plan.broken for plan in plans(config)],
    }  # fmt: skip
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    result["compiled_apart"] = apart(run(compiled, config, inputs)[0], found)

    result["ran"] = [plan.ran for plan in plans(config)]

    def fails(*given, **named):
        raise RuntimeError("a kernel that does not compile")

    vllm_writes.rope_and_cache = vllm_writes.mla_rope_and_cache = fails
    fallen, own = run(model, config, inputs)
    result["fallen_apart"] = apart(fallen, expected)
    result["fallen_caches_apart"] = max(apart(numbers(x), numbers(y)) for x, y in zip(again, own, strict=True))
    result["fallen"] = [plan.broken for plan in plans(config)]
    return result


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
