"""Words of other projects, and words with a typo: what somebody may have meant who got an error."""

import inspect
import re
from collections.abc import Callable, Collection, Iterable
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, TypeVar

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

FOREIGN = {
    "hf": "huggingface", "transformers": "huggingface", "te": "transformer_engine", "megatron": "transformer_engine",
    "fa": "flash_attn", "flash_attention": "flash_attn", "ds": "deepspeed", "llama": "complex", "sglang": "vllm",
    "neox": "split_half", "gpt_neox": "split_half", "half": "split_half float16", "rotate_half": "split_half",
    "gptj": "interleaved", "adjacent": "interleaved", "rotate_every_two": "interleaved",
    "bnsd": "bhsd", "bntd": "bhsd", "bhtd": "bhsd", "bsnd": "bshd", "btnd": "bshd", "bthd": "bshd", "sbnd": "sbhd",
    "tnd": "thd", "nhd": "thd",
    "bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64",
    "float": "float32", "double": "float64", "clockwise": "reversed", "negative": "reversed",
}  # fmt: skip
"""A word of other projects -> the words of this one that it may mean."""

_TABLES = "cos, sin = rotary_table(seq_len, rotary_dim, base=theta)"
_COMPLEX = "cos=freqs_cis.real, sin=freqs_cis.imag, layout='interleaved'"
_FREQUENCIES = "frequencies=Rope(inv_freq).frequencies()"
_PACKED = "positions=PackedSequences(cu_seqlens, total_tokens).positions"
_PAIRS = "layout='interleaved' or layout='split_half'"
ARGUMENTS = {
    "position_ids": ("positions",), "pos_ids": ("positions",), "input_pos": ("positions", "offsets"),
    "cache_position": ("positions",), "start_pos": ("offsets",), "start_positions": ("offsets",),
    "seqlen_offsets": ("offsets",), "seqlen_offset": ("offsets",), "past_key_values_length": ("offsets",),
    "cu_seqlens": (_PACKED,), "cu_seqlens_q": (_PACKED,), "max_seqlen": ("seq_len",),
    "max_position_embeddings": ("seq_len",), "max_seq_len": ("seq_len",),
    "base": (_TABLES.replace("theta", "base"),),
    "theta": ("base", _TABLES), "rope_theta": ("base", _TABLES), "rotary_base": ("base", _TABLES),
    "inv_freq": (_FREQUENCIES, "cos, sin = Rope(inv_freq).tables(seq_len)"),
    "freqs": ("cos=freqs.cos(), sin=freqs.sin()",),
    "freqs_cis": (_COMPLEX,), "freqs_complex": (_COMPLEX,),
    "cos_sin_cache": ("cos, sin = cos_sin_cache.chunk(2, dim=-1)",), "cos_cached": ("cos",), "sin_cached": ("sin",),
    "interleaved": (_PAIRS,), "is_neox": (_PAIRS,), "is_neox_style": (_PAIRS,), "neox": (_PAIRS,), "half": (_PAIRS,),
    "rotary_interleaved": (_PAIRS,), "rope_interleave": (_PAIRS,),
    "tensor_format": ("seq_format",), "qkv_format": ("seq_format",), "unsqueeze_dim": ("seq_format",),
    "dim": ("rotary_dim", "rope", "rotary_slice=(0, dim)"), "head_dim": ("rotary_dim", "rope"),
    "head_size": ("rotary_dim", "rope"), "rotary_dim": ("rotary_slice=(0, rotary_dim)", "rope"),
    "mrope_section": ("axes=mrope_axes(mrope_section)",),
    "conjugate": ("inverse",), "query": ("q",), "key": ("k",), "xq": ("q",), "xk": ("k",),
    "epsilon": ("eps",), "variance_epsilon": ("eps",), "rms_norm_eps": ("eps",),
    "k_cache": ("key_cache",), "v_cache": ("value_cache",), "slots": ("slot_mapping",),
}  # fmt: skip
"""An argument of other projects -> what to write here. Each begins with the argument that a function must have."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return a question to add to an error; empty if no choice is near ``word``."""
    choices = list(choices)
    foreign = FOREIGN.get(str(word).lower().replace("-", "_"), "").split()
    near = [choice for choice in foreign if choice in choices] or get_close_matches(str(word).lower(), choices, 1)
    return "".join(f"; did you mean {one!r}?" for one in near)


def unexpected(function: Callable, word: str, *_: str) -> TypeError:
    """The error for an argument that a function lacks: Python's words, and what somebody may have meant."""
    known = inspect.signature(function).parameters
    written = [one for one in ARGUMENTS.get(word, ()) if re.match(r"\w+", one)[0] in known]  # type: ignore[index]
    guess = "" if word in ARGUMENTS else did_you_mean(word, known)  # by its spelling a known word may be like any other
    near = f"; did you mean {written[0]}?" if written else guess
    return TypeError(f"{function.__qualname__}() got an unexpected keyword argument {word!r}{near}")


def by_position(function: Callable, given: int) -> TypeError:
    """The error for tables by position, which other projects take so."""
    took = f"{function.__qualname__}() takes q and k by position, got {given}"
    return TypeError(f"{took}; did you mean cos=cos, sin=sin?")


def hinted(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let a call of a public function with a word of another project say what to write.

    A wrapper takes the host .4 us. A function whose calls are short takes ``**foreign`` itself and raises `unexpected`,
    and `apply_rope` ``*more``; their signatures do not show that.
    """
    signature = inspect.signature(function)
    kinds = {one.kind for one in signature.parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        hidden = inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL
        shown = [one for one in signature.parameters.values() if one.kind not in hidden]
        function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
        return function
    known: Collection[str] = frozenset(signature.parameters)

    @wraps(function)
    def call(*arguments: Any, **keywords: Any) -> Any:
        for word in keywords:
            if word not in known:
                raise unexpected(function, word)
        return function(*arguments, **keywords)

    return call
