"""The peers of the rotation: an entry for each, with all that the study says of it. The module imports no adapter.

An added peer takes an entry here, a function that binds it in a module of `ropelab.bench.peers`, and the package in
``data/peers.toml``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Entry:
    """A peer.

    Attributes:
        name: the name in records.
        bind: the function that binds it, as ``"<module of ropelab.bench.peers>.<function>"``.
        label: the name in figures; "" for the same.
        color: a place in `ropelab.study.plots.looks.COLORBLIND`, which two names of one implementation share.
        marker: matplotlib's.
        studies: the studies that take it by their names. "dense" has every peer.
        options: further arguments of the function that binds it.
        about: further attributes of `ropelab.bench.peers.Peer`.
    """

    name: str
    bind: str
    label: str
    color: int
    marker: str
    studies: tuple[str, ...] = ("dense", "host")
    options: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)


_FORWARD = {"directions": ("forward",)}
_IN_PLACE = {"in_place": True, **_FORWARD}
_QKV = {"storages": ("qkv",), **_IN_PLACE}
_ALL = ("dense", "host")
_ANY_FORMAT = (*_ALL, "formats", "few_tokens")
"""Few tokens and other formats are for peers that need no compilation of seconds in every cell and format."""
_SERVING = (*_ALL, "model_heads")
_TE = {"package": "transformer-engine-cu13", "own_tables": True}


def _torchembed(version: str, **about: Any) -> dict[str, Any]:
    return {"options": {"version": version}, "about": {"package": "torchembed", "version": version, **about}}


def _transformer_engine(version: str) -> dict[str, Any]:
    return {"options": {"version": version}, "about": {"version": version, **_TE}}


ENTRIES = (
    Entry("ropelab", "ours.bind", "", 0, "o", (*_ANY_FORMAT, "lengths", "memory")),
    Entry("ropelab in place", "ours.bind", "ropelab, in place", 9, "P", _ANY_FORMAT,
          {"inplace": True}, _IN_PLACE),
    Entry("hf_eager", "formulas.hugging_face", "formula, eager", 7, "p", (*_ALL, "memory"),
          about={"narrow": True}),
    Entry("hf_compiled", "formulas.hugging_face", "formula, torch.compile", 3, "X", (*_ALL, "lengths"),
          {"compiled": True}, {"narrow": True}),
    Entry("complex", "formulas.complex_product", "complex product", 4, "*",
          about={"layouts": ("interleaved",)}),
    Entry("torchembed 0.3.0", "torchembed.bind", "", 8, "^", **_torchembed("0.3.0", layouts=("split_half",))),
    Entry("torchembed 0.3.2", "torchembed.bind", "", 2, "v", _ANY_FORMAT, **_torchembed("0.3.2")),
    Entry("liger", "liger.bind", "Liger, in place", 6, "D",
          (*_ANY_FORMAT, "lengths", "memory", "model_heads, compiled here"),
          about={"layouts": ("split_half",), "package": "liger-kernel", "narrow": True, "in_place": True}),
    Entry("flash_attn", "flash_attention.bind", "flash-attn", 1, "s",
          (*_ANY_FORMAT, "lengths", "memory", "model_heads, compiled here"), about={"package": "flash-attn"}),
    Entry("quack", "quack.bind", "", 8, "p", (*_ANY_FORMAT, "model_heads, compiled here"),
          about={"package": "quack-kernels"}),
    Entry("quack in place", "quack.bind", "quack, in place", 8, "X",
          (*_ANY_FORMAT, "model_heads, compiled here"), {"inplace": True}, {"package": "quack-kernels", **_IN_PLACE}),
    Entry("quack qkv", "quack.bind_qkv", "quack, packed qkv in place", 8, "d", _ANY_FORMAT,
          about={"package": "quack-kernels", **_QKV}),
    Entry("quack kv", "quack.bind_kv", "quack, packed kv in place", 8, "*", _ANY_FORMAT,
          about={"package": "quack-kernels", **_QKV}),
    Entry("transformers", "transformers.bind", "transformers' own", 7, "d",
          about={"package": "transformers", "narrow": True}),
    Entry("rotary-embedding-torch", "rotary_embedding_torch.bind", "", 5, "<",
          about={"layouts": ("interleaved",), "package": "rotary-embedding-torch", "own_tables": True,
                 "narrow": True}),
    Entry("TransformerEngine 2.20", "transformer_engine.bind", "", 5, ">", ("dense", "model_heads"),
          **_transformer_engine("2.20.2")),
    Entry("flashinfer", "flashinfer.bind", "FlashInfer", 4, "X", _SERVING,
          about={"package": "flashinfer-python", **_FORWARD}),
    Entry("flashinfer 0.6.13", "flashinfer.bind", "FlashInfer 0.6.13", 4, "h",
          options={"version": "0.6.13"}, about={"package": "flashinfer-python", "version": "0.6.13", **_FORWARD}),
    Entry("vllm", "cos_sin_cache.bind", "vLLM, in place", 5, "D", _SERVING, {"engine": "vllm"},
          {"package": "vllm", "narrow": True, **_IN_PLACE}),
    Entry("sglang", "cos_sin_cache.bind", "SGLang, in place", 8, "<", _SERVING, {"engine": "sglang"},
          {"package": "sglang-kernel", "narrow": True, **_IN_PLACE}),
    # Peers of single studies, which name them.
    Entry("TransformerEngine 2.18", "transformer_engine.bind", "", 3, "<", (), **_transformer_engine("2.18.0")),
    Entry("torchembed API", "torchembed.bind_module", "torchembed, module", 8, "^", (), {"version": "0.3.2"},
          {"layouts": ("split_half",), "package": "torchembed", "version": "0.3.2", "own_tables": True}),
)  # fmt: skip
"""The host time of a call of TransformerEngine is not measured: our adapter stands in for the package's Python code."""
