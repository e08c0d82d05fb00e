"""Bamba without `position_ids`: a token after a prefill turns as the first token, where Llama's has its place."""

import inspect

import torch
import transformers

small = {"vocab_size": 40, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64,
         "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "initializer_range": 0.3}  # fmt: skip
mamba = {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1,
         "mamba_chunk_size": 16}  # fmt: skip
tokens = torch.tensor([[11, 12, 13, 14, 15, 16]])
print("transformers", transformers.__version__)
for name, kind, options in (
    ("llama", transformers.LlamaForCausalLM, {}),
    ("bamba", transformers.BambaForCausalLM, mamba),
):
    torch.manual_seed(0)
    model = kind(kind.config_class(**small, **options)).double().eval()
    # The parameter that takes the cache has another name in 5.24.
    taken = "cache" if "cache" in inspect.signature(model.model.forward).parameters else "past_key_values"
    with torch.no_grad():
        whole = model(input_ids=tokens).logits[:, -1]
        for where in ({}, {"position_ids": torch.tensor([[5]])}):
            prefill = model(input_ids=tokens[:, :5], use_cache=True)
            cache = getattr(prefill, taken, None) or prefill.past_key_values
            decoded = model(input_ids=tokens[:, 5:], use_cache=True, **{taken: cache}, **where).logits[:, -1]
            apart = (decoded - whole).abs().max().item()
            print(f"{name}, {'with' if where else 'without'} position_ids: decode and prefill are {apart:.0e} apart")
