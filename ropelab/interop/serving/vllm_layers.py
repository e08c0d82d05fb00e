"""Which layers of a model in vLLM take norm, rotation and cache write in one pass, and how."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from ropelab.interop.serving.stand_ins import StandIn, Unlike, probe, random_heads
from ropelab.interop.serving.vllm_writes import WRITES, Plan, take_over
from ropelab.layout.pairing import Layout
from ropelab.positions.axes import mrope_axes
from ropelab.rope import apply_rope

CACHE_DTYPES = ("auto", "bfloat16", "float16", "fp8", "fp8_e4m3")
"""vLLM's names of caches that the one pass writes."""
BACKENDS = ("TRITON_ATTN", "FLASH_ATTN")
"""The backends of attention that read keys of earlier and current tokens from the cache alone."""
_ROTATIONS = ("forward_native", "forward_cuda", "forward_static")


def serve_attention(layer: torch.nn.Module, name: str, vllm_config: Any) -> None:
    """Make a layer call the one pass.

    Raises:
        Unlike: the layer is not norm, rotation and attention, or its cache is none that the one pass writes.
    """
    rotary, attention = part_of(layer, "rotation", is_rotation), part_of(layer, "attention", is_attention)
    rotation, attend = getattr(layer, rotary), getattr(layer, attention)
    check_cache(attend, vllm_config)
    _check_attention(attend)
    forward = type(layer).forward
    norms = tuple(child for child, module in layer.named_children() if _offset_of_norm(module) is not None)
    parts = projections(layer, {rotary, attention, *norms})
    width = attend.num_heads * attend.head_size_v
    found = probe(
        forward, layer, rotary=rotary, attention=attention, norms=norms, parts=parts, attention_width=width
    )  # fmt: skip
    q_norm, k_norm = (None if norm is None else getattr(layer, norm) for norm in (found.q_norm, found.k_norm))
    offset = _checked_norms(q_norm, k_norm, attend.head_size)
    check_rotation(rotation, attend.head_size)
    take_over(*_write_of(attend))
    attend.of_ropelab = Plan(name, rotation, q_norm, k_norm, found.norm_first, offset, axes_of(rotation))
    stands: dict[str, Any] = {rotary: _unrotated}
    stands |= {norm: _unchanged for norm in (found.q_norm, found.k_norm) if norm is not None}
    run_with(layer, attention, stands, _attend, attend)


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

    heads, size, value_size, name = (
        attention.num_heads,
        attention.head_size,
        attention.head_size_v,
        attention.layer_name,
    )
    dtype = q.dtype
    q = q.view(-1, heads, size)
    k, v = k.view(-1, attention.num_kv_heads, size), v.view(-1, attention.num_kv_heads, value_size)
    out = torch.empty((q.shape[0], heads, value_size), dtype=dtype, device=q.device)
    q = torch.ops.ropelab.vllm_attention(q, k, v, positions, name, attention.query_quant is not None)
    torch.ops.vllm.unified_attention_with_output(q, k, v, out, _encode_layer_name(name))
    return out.view(-1, heads * value_size)


# ------------------------------------------------------------------------------------------------- what can be served


def is_rotation(module: Any) -> bool:
    """Whether the module is a rotation of vLLM."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase

    return isinstance(module, RotaryEmbeddingBase)


def is_attention(module: Any) -> bool:
    """Whether the module is vLLM's attention with keys."""
    from vllm.model_executor.layers.attention import Attention

    return isinstance(module, Attention)


def part_of(layer: torch.nn.Module, kind: str, of_kind: Callable[[Any], bool]) -> str:
    """The name of the only child of a kind.

    Raises:
        Unlike: the layer has none, or more than one.
    """
    names = [name for name, child in layer.named_children() if of_kind(child)]
    if len(names) != 1:
        raise Unlike(f"it has {len(names)} modules of {kind}")
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
                raise Unlike(f"its forward calls {_name}")
            return _made, None

        parts[name] = part
    return parts


def check_cache(attention: Any, vllm_config: Any) -> None:
    """Refuse a cache that the one pass does not write as vLLM does.

    Raises:
        Unlike: see the message.
    """
    if attention.kv_cache_dtype not in CACHE_DTYPES:
        raise Unlike(f"its cache is in {attention.kv_cache_dtype}")
    if getattr(attention, "calculate_kv_scales", False):  # no longer in vLLM 0.33
        raise Unlike("the scales of its cache are computed from the first tokens")
    passes = vllm_config.compilation_config.pass_config
    if getattr(passes, "fuse_attn_quant", False) and getattr(attention, "quant_config", None) is not None:
        raise Unlike("vLLM fuses the quantization into its attention (fuse_attn_quant)")
    if getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1) > 1:
        raise Unlike("its decoding is context parallel")


def _check_attention(attention: Any) -> None:
    if attention.attn_type != "decoder" or attention.kv_sharing_target_layer_name is not None:
        raise Unlike("it writes no cache of its own")
    if attention.attn_backend.forward_includes_kv_cache_update:
        raise Unlike("its backend writes the cache within the attention")
    if attention.attn_backend.get_name() not in BACKENDS:
        raise Unlike(f"its backend is {attention.attn_backend.get_name()}, not one of {', '.join(BACKENDS)}")
    if attention.use_direct_call:
        raise Unlike("its platform has no operator for attention")


def _write_of(attention: Any) -> tuple[dict[str, Any], str]:
    """The module of the backend, as a dict, and the name of the function through which it writes the cache."""
    write = type(attention.impl).do_kv_cache_update
    names = [name for name in WRITES if name in write.__code__.co_names and name in write.__globals__]
    if len(names) != 1:
        raise Unlike(f"the cache write of its backend is unknown: {write.__module__}.{write.__qualname__}")
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
        raise Unlike("q and k have unlike norms")
    for norm in (q_norm, k_norm):
        if getattr(norm, "variance_size_override", None) is not None or not getattr(norm, "has_weight", True):
            raise Unlike("its norm takes the variance of part of the features, or has no weight")
        if norm.weight.shape != (head_size,):
            raise Unlike(f"its norm has {norm.weight.numel()} weights for heads of {head_size} features")
    return offset


def axes_of(rotation: Any) -> tuple[int, ...] | None:
    """The axis of positions that each pair reads, for M-RoPE."""
    section = getattr(rotation, "mrope_section", None)
    return mrope_axes(section, mrope_interleaved=bool(rotation.mrope_interleaved)) if section else None


def check_rotation(rotation: Any, head_size: int) -> None:
    """Refuse a rotation that reads anything but its tables, and compare it with `apply_rope` for a few tokens.

    Raises:
        Unlike: its class rotates in its own way, or its results are others.
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
        raise Unlike(f"its rotation {kind.__name__} has its own formula")
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
        raise Unlike(f"its rotation {kind.__name__} gives other results than the kernel")
    rotation.agrees_of_ropelab = True
