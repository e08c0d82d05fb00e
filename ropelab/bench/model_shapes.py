"""The heads of published models: their numbers, their widths, and the part of a head that rotates."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """The heads of one attention layer.

    Attributes:
        name: the repository of the weights at huggingface.co, whose ``config.json`` states the numbers.
        q_heads, k_heads: the numbers of heads of q and of k.
        head_dim, rotary_dim: the number of features of a head, and the number of features that rotate.
        first: the first feature that rotates.
        interleaved: whether adjacent features form pairs in the model.
    """

    name: str
    q_heads: int
    k_heads: int
    head_dim: int
    rotary_dim: int
    first: int = 0
    interleaved: bool = False

    @property
    def heads(self) -> str:
        """Short words for the heads, such as ``"32/8 128"`` or ``"64/64 96:24"``."""
        part = "" if self.rotary_dim == self.head_dim else f":{self.rotary_dim}"
        return f"{self.q_heads}/{self.k_heads} {self.head_dim}{part}"


MODELS = (
    Model("meta-llama/Llama-2-7b-hf", 32, 32, 128, 128),
    Model("meta-llama/Llama-2-13b-hf", 40, 40, 128, 128),
    Model("meta-llama/Llama-3.2-1B", 32, 8, 64, 64),
    Model("meta-llama/Llama-3.2-3B", 24, 8, 128, 128),
    Model("meta-llama/Llama-3.1-8B", 32, 8, 128, 128),
    Model("meta-llama/Llama-3.1-70B", 64, 8, 128, 128),
    Model("meta-llama/Llama-3.1-405B", 128, 8, 128, 128),
    Model("meta-llama/Llama-4-Scout-17B-16E", 40, 8, 128, 128, interleaved=True),
    Model("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 32, 4, 64, 64),
    Model("openlm-research/open_llama_3b", 32, 32, 100, 100),
    Model("HuggingFaceTB/SmolLM-135M", 9, 3, 64, 64),
    Model("HuggingFaceTB/SmolLM-360M", 15, 5, 64, 64),
    Model("mistralai/Mistral-Large-Instruct-2407", 96, 8, 128, 128),
    Model("mistralai/Mixtral-8x22B-v0.1", 48, 8, 128, 128),
    Model("Qwen/Qwen2.5-0.5B", 14, 2, 64, 64),
    Model("Qwen/Qwen2.5-1.5B", 12, 2, 128, 128),
    Model("Qwen/Qwen2.5-3B", 16, 2, 128, 128),
    Model("Qwen/Qwen2.5-7B", 28, 4, 128, 128),
    Model("Qwen/Qwen3-235B-A22B", 64, 4, 128, 128),
    Model("Qwen/Qwen3-Next-80B-A3B-Instruct", 16, 2, 256, 64),
    Model("google/gemma-2b", 8, 1, 256, 256),
    Model("google/gemma-2-9b", 16, 8, 256, 256),
    Model("google/gemma-3-27b-pt", 32, 16, 128, 128),
    Model("google/recurrentgemma-2b", 10, 1, 256, 128),
    Model("microsoft/phi-1_5", 32, 32, 64, 32),
    Model("microsoft/phi-2", 32, 32, 80, 32),
    Model("microsoft/Phi-3-mini-4k-instruct", 32, 32, 96, 96),
    Model("microsoft/Phi-3-medium-4k-instruct", 40, 10, 128, 128),
    Model("microsoft/Phi-4-mini-instruct", 24, 8, 128, 96),
    Model("tiiuae/falcon-7b", 71, 1, 64, 64),
    Model("tiiuae/falcon-40b", 128, 8, 64, 64),
    Model("EleutherAI/gpt-j-6b", 16, 16, 256, 64, interleaved=True),
    Model("EleutherAI/gpt-neox-20b", 64, 64, 96, 24),
    Model("EleutherAI/pythia-2.8b", 32, 32, 80, 20),
    Model("stabilityai/stablelm-2-12b", 32, 8, 160, 40),
    Model("zai-org/glm-4-9b-chat-hf", 32, 2, 128, 64, interleaved=True),
    Model("zai-org/GLM-4.5", 96, 8, 128, 64),
    Model("CohereForAI/c4ai-command-r-v01", 64, 64, 128, 128, interleaved=True),
    Model("nvidia/Nemotron-4-340B-Instruct", 96, 8, 192, 96),
    Model("bigcode/starcoder2-3b", 24, 2, 128, 128),
    Model("bigcode/starcoder2-7b", 36, 4, 128, 128),
    Model("01-ai/Yi-34B", 56, 8, 128, 128),
    Model("ByteDance-Seed/Seed-OSS-36B-Base", 80, 8, 128, 128),
    Model("baidu/ERNIE-4.5-21B-A3B-PT", 20, 4, 128, 128, interleaved=True),
    Model("facebook/esm2_t33_650M_UR50D", 20, 20, 64, 64),
    Model("answerdotai/ModernBERT-base", 12, 12, 64, 64),
    Model("openai/gpt-oss-20b", 64, 8, 64, 64),
    Model("openbmb/MiniCPM-2B-sft-bf16", 36, 36, 64, 64),
    Model("Qwen/Qwen2.5-VL-7B-Instruct, images", 16, 16, 80, 80),
    Model("Qwen/Qwen3-VL-8B-Instruct, images", 16, 16, 72, 72),
    Model("black-forest-labs/FLUX.1-dev", 24, 24, 128, 128, interleaved=True),
    Model("Wan-AI/Wan2.1-T2V-14B", 40, 40, 128, 128, interleaved=True),
    # The rotating part of each head of q, the rotating head of k that all heads share, whole heads of q, and heads of q
    # that have been multiplied into the latent space.
    Model("deepseek-ai/DeepSeek-V3", 128, 1, 64, 64, interleaved=True),
    Model("deepseek-ai/DeepSeek-V3, whole heads", 128, 128, 192, 64, first=128, interleaved=True),
    Model("deepseek-ai/DeepSeek-V3, latent heads", 128, 1, 576, 64, first=512, interleaved=True),
)
"""The heads of published models, each shape once."""

SHAPES = (
    Model("40/8 192", 40, 8, 192, 192),
    Model("24/8 112", 24, 8, 112, 112),
)
"""Shapes of no model in `MODELS` that complete the widths of heads."""


def halves() -> tuple[frozenset[str], frozenset[str]]:
    """The names of the models for the fit, and of the models for its test: each model is in one half.

    Two models whose heads are alike are in different halves.
    """
    alike = sorted(MODELS + SHAPES, key=lambda m: (m.rotary_dim, m.head_dim, m.k_heads, m.q_heads, m.name))
    names = [model.name for model in alike]
    return frozenset(names[::2]), frozenset(names[1::2])
