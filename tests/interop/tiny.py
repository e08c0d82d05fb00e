"""Small models of Transformers with random weights."""

import pytest
import torch

transformers = pytest.importorskip("transformers")
SIZES = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "attn_implementation": "eager", "sliding_window": None,
}  # fmt: skip


def build(name: str = "Llama", dtype: torch.dtype = torch.float32, seed: int = 0, **options) -> torch.nn.Module:
    kind = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(seed)
    return kind(kind.config_class(**SIZES | options)).to(dtype).eval()
