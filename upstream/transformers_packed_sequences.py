"""Two packed sequences in a row see each other, for some architectures; Llama and most others mask them."""

import torch
import transformers

small = {"vocab_size": 40, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0,
         "initializer_range": 0.3}  # fmt: skip
grouped = {"num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64}
encoder = {"vocab_size": 40, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
           "num_attention_heads": 4}  # fmt: skip
protein = {"num_key_value_heads": 2, "intermediate_size": 64, "bos_token_id": 1, "eos_token_id": 2,
           "protein_encoder_config": encoder, "aligner_num_add_layers": 1, "resampler_depth": 1}  # fmt: skip
experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "layer_types": ["full_attention"] * 2}
models = {
    "llama": (transformers.LlamaForCausalLM, grouped),
    "gpt_oss": (transformers.GptOssForCausalLM, grouped | experts),
    "afmoe": (transformers.AfmoeForCausalLM, grouped | {"num_dense_layers": 2}),
    "evolla": (transformers.EvollaForProteinText2Text, protein),
    "falcon": (transformers.FalconForCausalLM, {"alibi": False}),
}
tokens = torch.tensor([[11, 12, 13, 14, 15, 21, 22, 23, 24]])
position_ids = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]])
print("transformers", transformers.__version__)
for name, (kind, options) in models.items():
    torch.manual_seed(0)
    model = kind(kind.config_class(**small, **options)).eval()
    packed = model(input_ids=tokens, position_ids=position_ids, use_cache=False).logits[:, 5:]
    alone = model(input_ids=tokens[:, 5:], use_cache=False).logits
    print(f"{name}: the second sequence, packed and alone, is {(packed - alone).abs().max().item():.0e} apart")
