"""Which layers of a model in vLLM take norm, rotation and cache write in one pass, and how."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ropelab.interop.probe import PartCall, Refused, StandIn, Trace, same_numbers
from ropelab.interop.vllm_writes import LATENT_WRITE, WRITES, Plan, take_over
from ropelab.layout.pairing import Layout
from ropelab.positions.axes import mrope_axes
from ropelab.rope import apply_rope

_TOKENS = 3
CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3")
"""vLLM's names of caches that the one pass writes."""
BACKENDS = ("TRITON_ATTN", "FLASH_ATTN")
"""The backends of attention that read keys of earlier and current tokens from the cache alone."""
_ROTATIONS = ("forward_native", "forward_cuda", "forward_static")


def serve_attention(layer: torch.nn.Module, name: str, vllm_config: Any) -> None:
    """Make a layer call the one pass.

    Raises:
        Refused: the layer is not norm, rotation and attention, or its cache is none that the one pass writes.
    """
    rotary, attention = part_of(layer, "rotation", is_rotation), part_of(layer, "attention", is_attention)
    rotation, attend = getattr(layer, rotary), getattr(layer, attention)
    check_cache(attend, vllm_config)
    _check_attention(attend)
    norms = tuple(child for child, module in layer.named_children() if _offset_of_norm(module) is not None)
    parts = projections(layer, {rotary, attention, *norms})
    width = attend.num_heads * attend.head_size_v
    found = probe(
        layer, rotary=rotary, attention=attention, norms=norms, parts=parts, attention_width=width
    )  # fmt: skip
    q_norm, k_norm = (None if norm is None else getattr(layer, norm) for norm in (found.q_norm, found.k_norm))
    offset = _checked_norms(q_norm, k_norm, attend.head_size)
    check_rotation(rotation, attend.head_size)
    take_over(*_write_of(attend))
    attend.of_ropelab = Plan(name, rotation, q_norm, k_norm, found.norm_first, offset, axes_of(rotation))
    stands: dict[str, Any] = {rotary: _unrotated}
    stands |= {norm: _unchanged for norm in (found.q_norm, found.k_norm) if norm is not None}
    run_with(layer, attention, stands, _attend, attend)


def serve_latent_attention(layer: torch.nn.Module, name: str, vllm_config: Any) -> None:
    """Make a layer of latent attention call the one pass.

    Raises:
        Refused: the layer does something else, or its cache is none that the one pass writes.
    """
    from vllm import _custom_ops

    rotary, attention = part_of(layer, "rotation", is_rotation), part_of(layer, "attention", is_latent_attention)
    rotation, attend = getattr(layer, rotary), getattr(layer, attention)
    check_cache(attend, vllm_config)
    if attend.use_direct_call:
        raise Refused("its platform has no operator for attention")
    if getattr(attend, "use_pcp", False):
        raise Refused("its prefill is context parallel")
    write = type(attend.impl).do_kv_cache_update
    if LATENT_WRITE not in write.__code__.co_names:
        raise Refused(f"the cache write of its backend is unknown: {write.__module__}.{write.__qualname__}")
    _probe_latent(layer, rotary, attention)
    check_rotation(rotation, rotation.rotary_dim)
    take_over(vars(_custom_ops), LATENT_WRITE)
    attend.of_ropelab = Plan(name, rotation, axes=axes_of(rotation))
    run_with(layer, attention, {rotary: None}, _attend_latent, attend)


# ------------------------------------------------------------------------------------------------- what a model runs


def run_with(
    layer: torch.nn.Module, attention: str, stands: dict[str, Any], attend: Callable[..., torch.Tensor], owner: Any
) -> None:
    """Give the forward of a layer stand-ins, and ``attend(owner, positions, ...)`` for its attention."""
    base: Any = type(layer)
    index, name = next(
        (i, parameter)
        for i, parameter in enumerate(list(inspect.signature(base.forward).parameters)[1:])
        if parameter in ("positions", "position_ids")
    )
    layer.__class__ = _served(base, attention, tuple(stands.items()), attend, index, name)
    vars(layer)["owner_of_ropelab"] = (owner,)  # a tuple, so that the layer has no further child


@functools.cache
def _served(
    base: Any, attention: str, stands: tuple[tuple[str, Any], ...], attend: Callable, index: int, name: str
) -> type:
    """The subclass of a layer's class whose forward has stand-ins."""

    def forward(self, *given: Any, **named: Any) -> Any:
        more = [*given[2:], *(x for key, x in named.items() if key not in (name, "hidden_states"))]
        if any(x is not None for x in more):  # the probe did not see such a call
            return base.forward(self, *given, **named)
        positions = named[name] if name in named else given[index]
        parts = {**dict(stands), attention: functools.partial(attend, self.owner_of_ropelab[0], positions)}
        return base.forward(StandIn(self, parts), *given, **named)

    return type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__})


def _unrotated(positions, q, k):
    return q, k


def _unchanged(x):
    return x


def _attend(attention: Any, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor):
    """Attention with norm and rotation, in the place of vLLM's module."""
    from vllm.model_executor.layers.attention.attention import _encode_layer_name

    heads, value_size, name = attention.num_heads, attention.head_size_v, attention.layer_name
    q, k = q.view(-1, heads, attention.head_size), k.view(-1, attention.num_kv_heads, attention.head_size)
    v = v.view(-1, attention.num_kv_heads, value_size)
    out = torch.empty((q.shape[0], heads, value_size), dtype=q.dtype, device=q.device)
    q = torch.ops.ropelab.vllm_attention(q, k, v, positions, name, attention.query_quant is not None)
    torch.ops.vllm.unified_attention_with_output(q, k, v, out, _encode_layer_name(name))
    return out.view(-1, heads * value_size)


def _attend_latent(attention: Any, positions: torch.Tensor, q, kv_c, k_pe, output_shape=None):
    """Latent attention with the rotation, in the place of vLLM's module."""
    from vllm.model_executor.layers.attention.attention import _encode_layer_name

    name = attention.layer_name
    out = torch.empty(output_shape, dtype=q.dtype, device=q.device)
    k_pe = torch.ops.ropelab.vllm_latent_attention(q, kv_c, k_pe, positions, name)
    torch.ops.vllm.unified_mla_attention_with_output(q, kv_c, k_pe, out, _encode_layer_name(name))
    return out


# ------------------------------------------------------------------------------------------------- what can be served


def is_rotation(module: Any) -> bool:
    """Whether the module is a rotation of vLLM."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

    return isinstance(module, RotaryEmbeddingBase)


def is_attention(module: Any) -> bool:
    """Whether the module is vLLM's attention with keys."""
    from vllm.model_executor.layers.attention import Attention

    return isinstance(module, Attention)


def is_latent_attention(module: Any) -> bool:
    """Whether the module is vLLM's latent attention."""
    from vllm.model_executor.layers.attention import MLAAttention

    return isinstance(module, MLAAttention)


def part_of(layer: torch.nn.Module, kind: str, of_kind: Callable[[Any], bool]) -> str:
    """The name of the only child of a kind.

    Raises:
        Refused: the layer has none, or more than one.
    """
    names = [name for name, child in layer.named_children() if of_kind(child)]
    if len(names) != 1:
        raise Refused(f"it has {len(names)} modules of {kind}")
    return names[0]


def projections(layer: torch.nn.Module, others: set[str]) -> dict[str, Callable[..., Any]]:
    """Functions that return the same random numbers in each call, in the place of all modules but the others."""
    parts: dict[str, Callable[..., Any]] = {}
    for name, child in layer.named_children():
        if name in others:
            continue
        width = getattr(child, "output_size_per_partition", getattr(child, "output_size", None))
        made = None if width is None else random_heads(width)

        def part(*given, _made=made, _name=name, **named):
            if _made is None:
                raise Refused(f"its forward calls {_name}")
            return _made, None

        parts[name] = part
    return parts


def check_cache(attention: Any, vllm_config: Any) -> None:
    """Refuse a cache that the one pass does not write as vLLM does.

    Raises:
        Refused: see the message.
    """
    if attention.kv_cache_dtype not in CACHE_DTYPES:
        raise Refused(f"its cache is in {attention.kv_cache_dtype}")
    if getattr(attention, "calculate_kv_scales", False):  # no longer in vLLM 0.33
        raise Refused("the scales of its cache are computed from the first tokens")
    passes = vllm_config.compilation_config.pass_config
    if getattr(passes, "fuse_attn_quant", False) and getattr(attention, "quant_config", None) is not None:
        raise Refused("vLLM fuses the quantization into its attention (fuse_attn_quant)")
    if getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1) > 1:
        raise Refused("its decoding is context parallel")


def _check_attention(attention: Any) -> None:
    if attention.attn_type != "decoder" or attention.kv_sharing_target_layer_name is not None:
        raise Refused("it writes no cache of its own")
    if attention.attn_backend.forward_includes_kv_cache_update:
        raise Refused("its backend writes the cache within the attention")
    if attention.attn_backend.get_name() not in BACKENDS:
        raise Refused(f"its backend is {attention.attn_backend.get_name()}, not one of {', '.join(BACKENDS)}")
    if attention.use_direct_call:
        raise Refused("its platform has no operator for attention")


def _write_of(attention: Any) -> tuple[dict[str, Any], str]:
    """The module of the backend, as a dict, and the name of the function through which it writes the cache."""
    write = type(attention.impl).do_kv_cache_update
    names = [name for name in WRITES if name in write.__code__.co_names and name in write.__globals__]
    if len(names) != 1:
        raise Refused(f"the cache write of its backend is unknown: {write.__module__}.{write.__qualname__}")
    return write.__globals__, names[0]


def _offset_of_norm(module: Any) -> float | None:
    """The number that a norm of vLLM adds to its weights; None for other modules."""
    from vllm.model_executor.layers import layernorm

    return {layernorm.RMSNorm: 0.0, layernorm.GemmaRMSNorm: 1.0}.get(type(module))


def _checked_norms(q_norm: Any, k_norm: Any, head_size: int) -> float:
    if q_norm is None:
        return 0.0
    offset = _offset_of_norm(q_norm)
    if offset is None or _offset_of_norm(k_norm) != offset or q_norm.variance_epsilon != k_norm.variance_epsilon:
        raise Refused("q and k have unlike norms")
    for norm in (q_norm, k_norm):
        if getattr(norm, "variance_size_override", None) is not None or not getattr(norm, "has_weight", True):
            raise Refused("its norm takes the variance of part of the features, or has no weight")
        if norm.weight.shape != (head_size,):
            raise Refused(f"its norm has {norm.weight.numel()} weights for heads of {head_size} features")
    return offset


def axes_of(rotation: Any) -> tuple[int, ...] | None:
    """The axis of positions that each pair reads, for M-RoPE."""
    section = getattr(rotation, "mrope_section", None)
    return mrope_axes(section, mrope_interleaved=bool(rotation.mrope_interleaved)) if section else None


def check_rotation(rotation: Any, head_size: int) -> None:
    """Refuse a rotation that reads anything but its tables, and compare it with `apply_rope` for a few tokens.

    Raises:
        Refused: its class rotates in its own way, or its results are others.
    """
    from vllm.model_executor.layers.rotary_embedding import DeepseekScalingRotaryEmbedding, MRotaryEmbedding
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    kind = type(rotation)
    for base in (RotaryEmbedding, MRotaryEmbedding, DeepseekScalingRotaryEmbedding):
        if isinstance(rotation, base):
            alike = all(getattr(kind, name, None) is getattr(base, name, None) for name in _ROTATIONS)
            break
    else:
        alike = False
    table = getattr(rotation, "cos_sin_cache", None)
    if not alike or table is None or table.ndim != 2:
        raise Refused(f"its rotation {kind.__name__} has its own formula")
    if vars(rotation).get("agrees_of_ropelab"):
        return
    axes = axes_of(rotation)
    shape = (8,) if axes is None else (max(axes) + 1, 8)
    positions = torch.randint(0, len(table), shape, device=table.device)
    q = torch.randn(8, 1, head_size, dtype=table.dtype, device=table.device)
    theirs = rotation.forward_native(positions, q.reshape(8, -1) if axes else q, q.reshape(8, -1) if axes else q)[0]
    cos, sin = rotation.cos_sin_cache.cpu().chunk(2, dim=-1)
    layout: Layout = "split_half" if rotation.is_neox_style else "interleaved"
    ours = apply_rope(
        q.cpu(), cos=cos, sin=sin, layout=layout, seq_format="thd", positions=positions.cpu(), axes=axes
    )  # fmt: skip
    # Both compute two products and a sum, rounded at most three times, and the terms are below 8.
    if not (theirs.reshape(q.shape).cpu() - ours).abs().max() <= 3 * 16 * torch.finfo(table.dtype).eps:
        raise Refused(f"its rotation {kind.__name__} gives other results than the kernel")
    rotation.agrees_of_ropelab = True


# ---------------------------------------------------------------------------------------------- what a forward computes


def arguments_of(layer: torch.nn.Module, tokens: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of ``tokens`` whose names the forward of a layer has as arguments.

    Raises:
        Refused: the forward needs an argument that is not in ``tokens``.
    """
    named = {}
    for parameter in list(inspect.signature(type(layer).forward).parameters.values())[1:]:
        if parameter.name in tokens:
            named[parameter.name] = tokens[parameter.name]
        elif parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD:
            raise Refused(f"its forward has the argument {parameter.name}")
    return named


def random_tokens() -> dict[str, torch.Tensor]:
    """Positions and hidden states of a few tokens, under the names that servers give them."""
    positions, hidden = torch.arange(_TOKENS), torch.randn(_TOKENS, 8)
    return {"positions": positions, "position_ids": positions, "hidden_states": hidden}


def random_heads(*features: int) -> torch.Tensor:
    """Random numbers for the tokens of a probe."""
    return torch.randn(_TOKENS, *features)


def _same_arguments(given: tuple, again: tuple) -> bool:
    pairs = [(x, y) for x, y in zip(given, again, strict=True) if isinstance(x, torch.Tensor)]
    return all(same_numbers(x, y) for x, y in pairs)


@dataclass(frozen=True)
class Found:
    """The norms that a layer applies to q and k, by name, and their place."""

    q_norm: str | None = None
    k_norm: str | None = None
    norm_first: bool = True


def probe(
    layer: torch.nn.Module,
    *,
    rotary: str,
    attention: str,
    norms: tuple[str, ...],
    parts: Mapping[str, Callable[..., Any]],
    attention_width: int,
) -> Found:
    """Find out which norms a layer applies to its heads, and that it does nothing else around the rotation.

    Args:
        layer: the layer.
        rotary, attention, norms: the names of its rotation, its attention, and modules that may be norms of heads.
        parts: for all other modules of the layer, functions that return the same numbers, at random, in each call.
        attention_width: the features that the attention returns for a token.

    Raises:
        Refused: the layer computes something else.
    """
    tokens, attended = random_tokens(), random_heads(attention_width)

    def run() -> Trace:
        def rotated(positions, q, k, *rest, **named):
            return torch.randn(q.shape), torch.randn(k.shape)

        stands = {**parts, **dict.fromkeys(norms, lambda x, *rest, **named: torch.randn(x.shape))}
        stands |= {rotary: rotated, attention: lambda *given, **named: attended}
        return Trace.of(layer, stands, arguments_of(layer, tokens))

    trace, again = run(), run()  # norms and rotation return other numbers, and nothing but the attention may see them
    for name in parts:
        seen, seen_again = ([call.given for call in t.calls if call.name == name] for t in (trace, again))
        if len(seen) != len(seen_again) or not all(map(_same_arguments, seen, seen_again)):
            raise Refused(f"{name} uses q or k besides the attention")
    turn, attend = trace.only(rotary), trace.only(attention)
    if len(turn.given) != 3 or turn.named or turn.given[0] is not tokens["positions"]:
        raise Refused("it rotates by other positions than those of its tokens, or with further arguments")
    if len(attend.given) < 3:
        raise Refused("its attention is not called with q, k and v")
    heads, names = attend.given[:2], []
    for place, x in enumerate(heads):
        names.append(_norm_around(trace, norms, place, turn, x))
    (q_norm, first), (k_norm, k_first) = names
    if (q_norm is None) != (k_norm is None) or first != k_first:
        raise Refused("q and k are not normalized alike")
    return Found(q_norm, k_norm, first)


def _norm_around(
    trace: Trace, norms: tuple[str, ...], place: int, turn: PartCall, attended: Any
) -> tuple[str | None, bool]:
    """The norm of q (place 0) or of k (place 1), and whether it comes before the rotation."""
    given, turned, name = turn.given[1 + place], turn.returned[place], "qk"[place]
    calls = [call for call in trace.calls if call.name in norms]
    before = [call for call in calls if same_numbers(given, call.returned)]
    after = [call for call in calls if same_numbers(call.given[0], turned)]
    if len(before) + len(after) > 1:
        raise Refused(f"{name} has more than one norm")
    last = after[0].returned if after else turned
    if not same_numbers(attended, last):
        raise Refused(f"something happens to {name} between its rotation and the attention")
    if any(len(call.given) != 1 or call.named for call in (*before, *after)):
        raise Refused(f"the norm of {name} has further arguments")
    return (before or after)[0].name if before or after else None, not after


def _probe_latent(layer: torch.nn.Module, rotary: str, attention: str) -> None:
    """Find out that a layer without rotation gives the attention what the rotation would get, and all else alike."""
    attend = getattr(layer, attention)
    parts: dict[str, Any] = projections(layer, {rotary, attention})
    for name in ("q_a_layernorm", "kv_a_layernorm"):
        if name in parts:
            parts[name] = lambda x: 2 * x + 1
    tokens, width = random_tokens(), attend.num_heads * attend.v_head_dim

    def run(rotates: bool) -> Trace:
        def turned(positions, q, k):
            return torch.randn(q.shape), torch.randn(k.shape)

        stands = {**parts, rotary: turned if rotates else None, attention: lambda *given, **named: random_heads(width)}
        return Trace.of(layer, stands, arguments_of(layer, tokens))

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
        raise Refused("something else happens between its projections and the attention")
