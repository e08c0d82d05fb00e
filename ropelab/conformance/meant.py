"""What a user may have meant: a word of another project, a word with a typo, a function without a named convention."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any

import torch

from ropelab.conformance.convention import accepts, parameters, required

FOREIGN = {
    "hf": "huggingface", "transformers": "huggingface", "te": "transformer_engine", "megatron": "transformer_engine",
    "fa": "flash_attn", "flash_attention": "flash_attn", "ds": "deepspeed", "llama": "complex", "sglang": "vllm",
    "neox": "split_half", "half": "split_half", "rotate_half": "split_half", "gptj": "interleaved",
    "adjacent": "interleaved", "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64",
    "float": "float32", "double": "float64", "clockwise": "reversed", "negative": "reversed",
}  # fmt: skip
"""A word of other projects -> a word of this one."""
NEAREST = 3
"""The number of conventions that are named where none fits."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return a question to add to an error; empty if no choice is near ``word``."""
    choices = list(choices)
    foreign = FOREIGN.get(str(word).lower().replace("-", "_"))
    near = [foreign] if foreign in choices else get_close_matches(str(word), choices, 1)
    return "".join(f"; did you mean {one!r}?" for one in near)


def conventions_of(function: Callable[..., Any], known: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the names of the conventions that fit the parameters of a function, and of the nearest ones.

    A call fits if it has every parameter without a default, and if the function takes every argument without one. A
    call whose parameters are part of those of another call that fits is left out.

    Args:
        function: a function, a class or a module.
        known: name -> convention.
    """
    if inspect.isclass(function):
        return ["module"], ["module"]
    needed, taken = set(required(function)), set(parameters(function))
    fitting: dict[str, set[str]] = {}
    near: dict[str, float] = {}
    for name, kind in known.items():
        for call in (kind.signature, *kind.other_signatures):
            places, keywords, optional = _arguments(call)
            passed = places | keywords | optional
            common = passed & taken
            near[name] = max(len(common) / len(passed | taken), near.get(name, 0.0))
            if common and needed <= passed and places <= taken and all(accepts(function, name) for name in keywords):
                fitting[name] = common | fitting.get(name, set())
    best = [name for name, common in fitting.items() if not any(common < other for other in fitting.values())]
    if not best and isinstance(function, torch.nn.Module):
        best = ["module"]
    return best, sorted(filter(near.get, near), key=near.__getitem__, reverse=True)[:NEAREST]


def _arguments(call: str) -> tuple[set[str], set[str], set[str]]:
    """Return the arguments of a call in words: by place, by keyword, and those with a default."""
    found = re.search(r"fn\((.*?)\)", call)
    before, _, after = (found[1] if found else "").partition("*, ")
    places, keywords = (set(filter(str.isidentifier, part.split(", "))) for part in (before, after))
    return places, keywords, set(re.findall(r"(\w+)=", found[1] if found else ""))
