"""Words of other projects, and words with a typo: what somebody may have meant who got an error."""

from collections.abc import Iterable
from difflib import get_close_matches

FOREIGN = {
    "hf": "huggingface", "transformers": "huggingface", "te": "transformer_engine", "megatron": "transformer_engine",
    "fa": "flash_attn", "flash_attention": "flash_attn", "ds": "deepspeed", "llama": "complex", "sglang": "vllm",
    "neox": "split_half", "gpt_neox": "split_half", "half": "split_half float16", "rotate_half": "split_half",
    "gptj": "interleaved", "adjacent": "interleaved", "rotate_every_two": "interleaved",
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64",
    "float": "float32", "double": "float64", "clockwise": "reversed", "negative": "reversed",
}  # fmt: skip
"""A word of other projects -> the words of this one that it may mean."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return a question to add to an error; empty if no choice is near ``word``."""
    choices = list(choices)
    foreign = FOREIGN.get(str(word).lower().replace("-", "_"), "").split()
    near = [choice for choice in foreign if choice in choices] or get_close_matches(str(word), choices, 1)
    return "".join(f"; did you mean {one!r}?" for one in near)
