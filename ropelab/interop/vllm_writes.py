"""The operators that a served layer of vLLM calls: norm, rotation and cache write in one pass, by vLLM's own cache.

A backend of vLLM writes keys and values through a function of its module, such as ``reshape_and_cache_flash``. That
call has all that the one pass needs: the caches as views, the slots and the scales. So the operators have the backend
write, and `take_over` makes the function do the whole pass while an operator waits for it. For every other caller the
function stays vLLM's.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ropelab.interop.log import say
from ropelab.interop.vllm import cache_in_its_dtype
from ropelab.paged_cache import mla_rope_and_cache, rope_and_cache

ATTENTION, LATENT = "ropelab::vllm_attention", "ropelab::vllm_latent_attention"
WRITES = ("triton_reshape_and_cache_flash", "reshape_and_cache_flash")
"""The functions through which vLLM's backends write keys and values."""
_AS_KEYS = {"bfloat16": "auto", "float16": "auto"}
LATENT_WRITE = "concat_and_cache_mla"
"""The function of ``vllm._custom_ops`` that writes the latent cache."""


@dataclass
class Plan:
    """The modules and numbers that the one pass of a layer needs besides the tensors of a call.

    Attributes:
        layer: the module, by its name in the model.
        rotary: vLLM's module of the rotation.
        q_norm, k_norm: vLLM's modules of the norms, or None.
        norm_first: normalize before the rotation.
        weight_offset: the number that the norms add to their weights.
        axes: as for `ropelab.apply_rope`, for positions of several axes.
        broken: whether the one pass has failed; the layer then makes separate calls of vLLM.
        ran: whether the layer has made the one pass.
    """

    layer: str
    rotary: Any
    q_norm: Any = None
    k_norm: Any = None
    norm_first: bool = True
    weight_offset: float = 0.0
    axes: tuple[int, ...] | None = None
    broken: bool = field(default=False, init=False)
    ran: bool = field(default=False, init=False)

    @cached_property
    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"layout": "split_half" if self.rotary.is_neox_style else "interleaved"}
        if self.q_norm is not None:
            options |= {
                "eps": self.q_norm.variance_epsilon, "weight_offset": self.weight_offset,
                "norm_first": self.norm_first,
            }  # fmt: skip
        return options

    def where(self, positions: torch.Tensor) -> dict[str, Any]:
        """The arguments of `rope_and_cache` for the angles and the norms."""
        table = self.rotary.cos_sin_cache
        pairs = table.shape[1] // 2
        where = {**self.options, "cos": table[:, :pairs], "sin": table[:, pairs:], "positions": positions}
        if positions.ndim == 2:
            where["axes"] = self.axes
        if self.q_norm is not None:
            where |= {"q_weight": self.q_norm.weight, "k_weight": self.k_norm.weight}
        return where

    def count(self) -> None:
        """Note that the layer made the one pass, and say so when the first layer of the process does."""
        if not self.ran:
            self.ran = True
            _ran.append(self.layer)
            if len(_ran) == 1:
                say("info", f"{self.layer} has run norm, rotation and cache write in one kernel")

    def give_up(self, error: Exception) -> None:
        """Have the layer make separate calls from now on, and say why."""
        self.broken = True
        say("warning", f"{self.layer} makes separate calls of vLLM from now on: {type(error).__name__}: {error}")


_ran: list[str] = []
"""The layers of this process that have made the one pass."""


class _Waiting(threading.local):
    work: Callable[..., None] | None = None


_waiting = _Waiting()


def take_over(holder: dict[str, Any], name: str) -> None:
    """Replace a function that writes a cache, held under a name, by one that does the work that waits; else its own."""
    theirs = holder[name]
    if getattr(theirs, "of_ropelab", False):
        return

    def write(*given: Any, **named: Any) -> Any:
        work, _waiting.work = _waiting.work, None
        return theirs(*given, **named) if work is None else work(*given, **named)

    write.of_ropelab = True  # type: ignore[attr-defined]
    holder[name] = write


def _in_one_pass(plan: Plan, work: Callable[..., None], write: Callable[[], None]) -> bool:
    """Have a backend write, with the work in the place of its function; whether the work was done."""
    _waiting.work = work
    try:
        write()
        if _waiting.work is not None:
            raise RuntimeError("the backend did not call the function that writes its cache")
    except Exception as error:  # a server goes on without the plugin
        plan.give_up(error)
        return False
    finally:
        _waiting.work = None
    plan.count()
    return True


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor, name: str, float8: bool
) -> torch.Tensor:
    """Normalize and rotate q and k, write k and v into the cache of the layer ``name``, and return q.

    Args:
        q, k, v: ``[T, H, D]``.
        positions: ``[T]``, or ``[axes, T]``.
        name: the attention of vLLM, by its name in the model.
        float8: return q in 8-bit floats, divided by the layer's scale.
    """
    layer, cache, slots = _context(name)
    plan: Plan = layer.of_ropelab
    if slots is not None and not plan.broken:
        made = torch.empty(q.shape, dtype=torch.float8_e4m3fn if float8 else q.dtype, device=q.device)

        def work(key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, k_scale, v_scale):
            kv_cache_dtype = _AS_KEYS.get(kv_cache_dtype, kv_cache_dtype)
            key_cache, k_scale = cache_in_its_dtype("key_cache", key_cache, kv_cache_dtype, k_scale, q.dtype)
            value_cache, v_scale = cache_in_its_dtype("value_cache", value_cache, kv_cache_dtype, v_scale, q.dtype)
            rope_and_cache(
                q, key, value, key_cache, value_cache, slot_mapping, **plan.where(positions), q_out=made,
                q_scale=layer._q_scale if float8 else None, k_scale=k_scale, v_scale=v_scale,
            )  # fmt: skip

        if _in_one_pass(plan, work, lambda: layer.impl.do_kv_cache_update(layer, k, v, cache, slots)):
            return made
    normalize = plan.q_norm is not None
    if normalize and plan.norm_first:
        q, k = plan.q_norm.forward_native(q), plan.k_norm.forward_native(k)
    shapes = q.shape, k.shape
    flat = (x.reshape(len(x), -1) for x in (q, k))
    q, k = (x.view(shape) for x, shape in zip(plan.rotary.forward_native(positions, *flat), shapes, strict=True))
    if normalize and not plan.norm_first:
        q, k = plan.q_norm.forward_native(q), plan.k_norm.forward_native(k)
    if slots is not None:
        layer.impl.do_kv_cache_update(layer, k, v, cache, slots)
    if float8:
        q = layer.query_quant(q.reshape(len(q), -1), layer._q_scale)[0].view(shapes[0])
    return q


def _latent_attention(
    q: torch.Tensor, kv_c: torch.Tensor, k_pe: torch.Tensor, positions: torch.Tensor, name: str
) -> torch.Tensor:
    """Rotate q in place and k_pe, write kv_c and k_pe into the latent cache of the layer ``name``, and return k_pe.

    Args:
        q: ``[T, H, N + R]``; the last R features rotate.
        kv_c: ``[T, L]``.
        k_pe: ``[T, 1, R]``.
        positions, name: as for the operator of attention with keys.
    """
    layer, cache, slots = _context(name)
    plan: Plan = layer.of_ropelab
    q_pe = q[..., -k_pe.shape[-1] :]
    if slots is not None and cache.numel() and not plan.broken:
        made = torch.empty_like(k_pe, memory_format=torch.contiguous_format)

        def work(kv_c, _, kv_cache, slot_mapping, kv_cache_dtype, scale, **more):
            if any(more.values()):
                raise NotImplementedError(f"the write into the cache has the arguments {', '.join(more)}")
            kv_cache_dtype = _AS_KEYS.get(kv_cache_dtype, kv_cache_dtype)
            kv_cache, scale = cache_in_its_dtype("kv_cache", kv_cache, kv_cache_dtype, scale, q.dtype)
            mla_rope_and_cache(
                q_pe, k_pe, kv_c, kv_cache, slot_mapping, **plan.where(positions), q_out=q_pe, k_out=made,
                kv_scale=scale,
            )  # fmt: skip

        def write():
            layer.impl.do_kv_cache_update(kv_c, k_pe, cache, slots, layer.kv_cache_dtype, layer._k_scale)

        if _in_one_pass(plan, work, write):
            return made
    turned, k_pe = plan.rotary.forward_native(positions, q_pe, k_pe)
    q_pe.copy_(turned)
    if slots is not None:
        layer.impl.do_kv_cache_update(kv_c, k_pe, cache, slots, layer.kv_cache_dtype, layer._k_scale)
    return k_pe.clone()  # an operator returns none of its arguments


def _context(name: str) -> tuple[Any, torch.Tensor, torch.Tensor | None]:
    """The attention of a name, its cache, and the slots of the tokens of this step."""
    from vllm.model_executor.layers.attention.attention import get_attention_context

    _, layer, cache, slots = get_attention_context(name)
    return layer, cache, slots


_LIBRARY = torch.library.Library("ropelab", "FRAGMENT")


def define() -> None:
    """Define the operators once; a compiled model of vLLM calls them by their names."""
    if hasattr(torch.ops.ropelab, "vllm_attention"):
        return
    keys = ("CPU", "CUDA")
    _LIBRARY.define("vllm_attention(Tensor q, Tensor k, Tensor v, Tensor positions, str name, bool float8) -> Tensor")
    _LIBRARY.define(
        "vllm_latent_attention(Tensor(a!) q, Tensor kv_c, Tensor k_pe, Tensor positions, str name) -> Tensor"
    )
    for key in keys:
        _LIBRARY.impl("vllm_attention", _attention, key)
        _LIBRARY.impl("vllm_latent_attention", _latent_attention, key)
    _LIBRARY._register_fake(
        "vllm_attention",
        lambda q, k, v, positions, name, float8: q.new_empty(q.shape, dtype=torch.float8_e4m3fn if float8 else q.dtype),
    )
    _LIBRARY._register_fake("vllm_latent_attention", lambda q, kv_c, k_pe, positions, name: k_pe.new_empty(k_pe.shape))
