"""Right implementations, which no law may flag; some of them only look wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ropelab.study.faults import correct


@dataclass(frozen=True)
class Control:
    """A right implementation.

    Attributes:
        name: the identifier.
        function, convention, options: as for a `Fault`; the options declare unusual properties.
        why: why the implementation looks wrong; empty if it does not.
    """

    name: str
    function: Callable[..., Any]
    convention: str
    options: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""


def _reversed(q, k, cos, sin, unsqueeze_dim=1):
    return correct.huggingface(q, k, cos, -sin, unsqueeze_dim)


def _adjacent_to_halves(q, k, cos, sin, unsqueeze_dim=1):
    return correct.huggingface(q, k, cos, sin, unsqueeze_dim, layout="interleaved", out_layout="split_half")


CONTROLS = (
    Control("ropelab", correct.ropelab, "ropelab"),
    Control("hugging_face", correct.huggingface, "huggingface"),
    Control("flash_attention", correct.flash_attn, "flash_attn"),
    Control("transformer_engine", correct.transformer_engine, "transformer_engine"),
    Control("deepspeed", correct.deepspeed, "deepspeed"),
    Control("vllm", correct.vllm, "vllm"),
    Control("complex_numbers", correct.complex_numbers, "complex", {"layout": "interleaved"}),
    Control("module", correct.Module, "module"),
    Control("plain", correct.plain, "plain"),
    Control(
        "sign_reversed", _reversed, "huggingface", {"sign": "reversed"},
        why="it rotates by minus the angle, and declares so (nanochat#489)",
    ),
    Control(
        "adjacent_to_halves", _adjacent_to_halves, "huggingface", {"layout": "interleaved", "out_layout": "split_half"},
        why="it reads adjacent pairs and writes halves, like DeepSeek-V3; the scores are the same",
    ),
)  # fmt: skip
