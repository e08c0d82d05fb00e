"""Build whole models of Transformers and diffusers, and the steps that a study times.

The models have the sizes of published models, at a reduced depth and with a vocabulary of `VOCABULARY` tokens, so that
the layers take most of the time. Every model runs in several ways:

- "Transformers": as it is
- "ropelab": after `ropelab.interop.huggingface.patch`
- "ropelab with norms": after ``patch(model, qk_norm=True)``, where the model normalizes q and k
- "ropelab with projection": after ``patch(model, projection=True)``, where the model projects and then rotates
- "no rotation": q and k pass unchanged, which no rotation can beat
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ropelab.interop import diffusers
from ropelab.interop.huggingface import patch
from ropelab.interop.huggingface.model import rotation_functions
from ropelab.interop.patch import Patch

PLAIN, OURS, NORMS, NONE = "Transformers", "ropelab", "ropelab with norms", "no rotation"
PROJECTION = "ropelab with projection"
WAYS = (PLAIN, OURS, NORMS, PROJECTION, NONE)
TRAINING, PREFILL, DECODE, DENOISING = "training step", "prefill", "decode", "denoising step"
VOCABULARY = 1024
BATCH, TOKENS, DECODED, CONTEXT = 2, 4096, 8, 1000
"""Training and prefill take BATCH sequences of TOKENS tokens. Decoding adds a token to DECODED sequences of CONTEXT."""


@dataclass(frozen=True)
class Architecture:
    """A model to measure.

    Attributes:
        name: the published model.
        model: the name of the class of Transformers.
        sizes: the fields of the configuration.
        compiled: whether the model is measured under ``torch.compile`` as well.
        losses: whether the losses of training steps are recorded.
        package: the package with the class; a model of diffusers turns image tokens into image tokens.
    """

    name: str
    model: str
    sizes: Mapping[str, Any]
    compiled: bool = False
    losses: bool = False
    package: str = "transformers"

    def build(self, device: torch.device | str, smoke: bool) -> torch.nn.Module:
        """The model in bfloat16, with the same random weights each time.

        Raises:
            ImportError: the package is not installed.
        """
        kind = getattr(importlib.import_module(self.package), self.model)
        torch.manual_seed(0)
        with torch.device(device):
            if self.package == "diffusers":
                return kind(**self.sizes).to(torch.bfloat16)
            sizes = {**self.sizes, "vocab_size": VOCABULARY, "pad_token_id": 0, **(SMOKE if smoke else {})}
            return kind(kind.config_class(**sizes)).to(torch.bfloat16)


SMOKE = {
    "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
ARCHITECTURES = (
    Architecture("Llama 3 8B, 4 layers", "LlamaForCausalLM", {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 4, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 8192,
    }, compiled=True),
    Architecture("Qwen3 8B, 4 layers", "Qwen3ForCausalLM", {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 4, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 8192,
    }, compiled=True, losses=True),
    Architecture("Gemma 3 4B, 6 layers", "Gemma3ForCausalLM", {
        "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 6, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 1024, "max_position_embeddings": 8192,
    }),
    Architecture("DeepSeek-V3, 2 dense layers", "DeepseekV3ForCausalLM", {
        "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 2, "first_k_dense_replace": 2,
        "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "max_position_embeddings": 8192,
    }),
    Architecture("Flux, 2 blocks and 4 single blocks", "FluxTransformer2DModel", {
        "num_layers": 2, "num_single_layers": 4,
    }, package="diffusers"),
)  # fmt: skip


def in_way(way: str, model: torch.nn.Module) -> contextlib.AbstractContextManager[object]:
    """The context in which a model runs in a way.

    Raises:
        ValueError: the model cannot run in this way.
    """
    if way == PLAIN:
        return contextlib.nullcontext()
    if type(model).__module__.startswith("diffusers."):
        if way in (NORMS, PROJECTION):
            raise ValueError("the patch for diffusers rotates, and does nothing else")
        functions = dict(diffusers.rotation_functions(model))
        return diffusers.patch(model) if way == OURS else Patch(dict.fromkeys(functions, _one_unrotated))
    if way == NONE:
        return Patch(dict.fromkeys(dict(rotation_functions(model)), _unrotated))
    return patch(model, qk_norm=way == NORMS, projection=way == PROJECTION)


def _unrotated(q: torch.Tensor, k: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return q, k


def _one_unrotated(x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return x


def steps(model: torch.nn.Module, run: Callable[..., Any], smoke: bool, decode: bool) -> dict[str, Callable[[], Any]]:
    """The calls that are timed, by the name of the step."""
    if type(model).__module__.startswith("diffusers."):
        return _denoising(model, run)
    batch, tokens, decoded, context = (1, 8, 2, 8) if smoke else (BATCH, TOKENS, DECODED, CONTEXT)
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(1)
    ids = torch.randint(1, VOCABULARY, (batch, tokens), generator=generator, device=device)
    prompt = torch.randint(1, VOCABULARY, (decoded, context), generator=generator, device=device)

    def training() -> None:
        model.zero_grad(set_to_none=True)
        run(input_ids=ids, labels=ids, use_cache=False).loss.backward()

    @torch.no_grad()
    def prefill() -> object:
        return run(input_ids=ids, use_cache=False, logits_to_keep=1)

    steps: dict[str, Callable[[], Any]] = {TRAINING: training, PREFILL: prefill}
    if decode:
        with torch.no_grad():
            cache = model(input_ids=prompt, use_cache=True, logits_to_keep=1).past_key_values

        @torch.no_grad()
        def decode_one() -> None:
            run(input_ids=prompt[:, :1], past_key_values=cache, use_cache=True)
            cache.crop(-1)

        steps[DECODE] = decode_one
    return steps


def _denoising(model: torch.nn.Module, run: Callable[..., Any]) -> dict[str, Callable[[], Any]]:
    """A training step and a denoising step of Flux: an image of 1,024 x 1,024 pixels and 512 tokens of text."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    places = torch.cartesian_prod(torch.zeros(1), torch.arange(64.0), torch.arange(64.0)).to(device)
    inputs = {
        "hidden_states": draw(1, 4096, 64), "encoder_hidden_states": draw(1, 512, 4096),
        "pooled_projections": draw(1, 768), "timestep": torch.tensor([0.5], device=device, dtype=torch.bfloat16),
        "img_ids": places, "txt_ids": torch.zeros(512, 3, device=device), "return_dict": False,
    }  # fmt: skip

    def training() -> None:
        model.zero_grad(set_to_none=True)
        run(**inputs)[0].square().mean().backward()

    @torch.no_grad()
    def denoise() -> object:
        return run(**inputs)

    return {TRAINING: training, DENOISING: denoise}
