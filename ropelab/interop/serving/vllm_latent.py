"""Which layers of multi-head latent attention in vLLM take rotation and cache write in one pass, and how."""

from typing import Any

import torch

from ropelab.interop.serving.stand_ins import (
    StandIn,
    Trace,
    Unlike,
    arguments_of,
    random_heads,
    random_tokens,
    same_numbers,
)
from ropelab.interop.serving.vllm_layers import (
    axes_of,
    check_cache,
    check_rotation,
    is_rotation,
    part_of,
    projections,
    run_with,
)
from ropelab.interop.serving.vllm_writes import LATENT_WRITE, Plan, take_over


def is_latent_attention(module: Any) -> bool:
    """Whether the module is vLLM's latent attention."""
    from vllm.model_executor.layers.attention import MLAAttention

    return isinstance(module, MLAAttention)


def serve_latent_attention(layer: torch.nn.Module, name: str, vllm_config: Any) -> None:
    """Make a layer of latent attention call the one pass.

    Raises:
        Unlike: the layer does something else, or its cache is none that the one pass writes.
    """
    from vllm import _custom_ops

    rotary, attention = part_of(layer, "rotation", is_rotation), part_of(layer, "attention", is_latent_attention)
    rotation, attend = getattr(layer, rotary), getattr(layer, attention)
    check_cache(attend, vllm_config)
    if attend.use_direct_call:
        raise Unlike("its platform has no operator for attention")
    if getattr(attend, "use_pcp", False):
        raise Unlike("its prefill is context parallel")
    write = type(attend.impl).do_kv_cache_update
    if LATENT_WRITE not in write.__code__.co_names:
        raise Unlike(f"the cache write of its backend is unknown: {write.__module__}.{write.__qualname__}")
    _probe(layer, rotary, attention)
    check_rotation(rotation, rotation.rotary_dim)
    take_over(vars(_custom_ops), LATENT_WRITE)
    attend.of_ropelab = Plan(name, rotation, axes=axes_of(rotation))
    run_with(layer, attention, {rotary: None}, _attend, attend)


def _attend(attention: Any, positions: torch.Tensor, q, kv_c, k_pe, output_shape=None):
    """Latent attention with the rotation, in the place of vLLM's module."""
    from vllm.model_executor.layers.attention.attention import _encode_layer_name

    name = attention.layer_name
    out = torch.empty(output_shape, dtype=q.dtype, device=q.device)
    k_pe = torch.ops.ropelab.vllm_latent_attention(q, kv_c, k_pe, positions, name)
    torch.ops.vllm.unified_mla_attention_with_output(q, kv_c, k_pe, out, _encode_layer_name(name))
    return out


def _probe(layer: torch.nn.Module, rotary: str, attention: str) -> None:
    """Find out that a layer without rotation gives the attention what the rotation would get, and all else alike."""
    attend = getattr(layer, attention)
    parts: dict[str, Any] = projections(layer, {rotary, attention})
    for name in ("q_a_layernorm", "kv_a_layernorm"):
        if name in parts:
            parts[name] = lambda x: 2 * x + 1
    tokens, width = random_tokens(), attend.num_heads * attend.v_head_dim

    def run(rotates: bool) -> Trace:
        trace = Trace()
        turned = trace.recorded(rotary, lambda positions, q, k: (torch.randn(q.shape), torch.randn(k.shape)))
        attended = trace.recorded(attention, lambda *given, **named: random_heads(width))
        stands = {**parts, rotary: turned if rotates else None, attention: attended}
        forward = type(layer).forward
        try:
            with torch.no_grad(), torch.device("cpu"):
                forward(StandIn(layer, stands), **arguments_of(forward, tokens))
        except Unlike:
            raise
        except Exception as error:
            raise Unlike(f"its forward did not run with stand-ins: {type(error).__name__}: {error}") from error
        return trace

    rotated, plain = run(rotates=True), run(rotates=False)
    turn, with_turn, without = rotated.only(rotary), rotated.only(attention), plain.only(attention)
    (q, kv_c, k_pe), (q_plain, kv_c_plain, k_plain) = with_turn.given, without.given
    pairs = turn.given[1].shape[-1]
    alike = (
        turn.given[0] is tokens["positions"],
        set(with_turn.named) == set(without.named) == {"output_shape"},
        same_numbers(kv_c, kv_c_plain),
        same_numbers(q[..., :-pairs], q_plain[..., :-pairs]),
        same_numbers(q[..., -pairs:], turn.returned[0]),
        same_numbers(k_pe, turn.returned[1]),
        same_numbers(k_plain, turn.given[2]),
        k_plain.shape == (len(q), 1, pairs),
    )
    if not all(alike):
        raise Unlike("something else happens between its projections and the attention")
