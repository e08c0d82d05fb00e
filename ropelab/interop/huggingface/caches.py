"""Attention layers that rotate q and k and update a static cache, with both steps as one call of `rope_and_cache`.

The call writes the rotated q in the place of q. So a layer qualifies if nothing reads q or k between its rotation and
the update of its cache; the layer is called with small random hidden states to find that out.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from ropelab.interop.calls import ForeignRotation, Kind, Rotating
from ropelab.interop.huggingface.layers import Norm, changed_layers, forward_of, observed, own, with_rotation
from ropelab.interop.huggingface.projections import are_of, check_tables, of_pairs
from ropelab.interop.patch import Place
from ropelab.interop.probe import Refused, memory
from ropelab.paged_cache import rope_and_cache

TABLES = "position_embeddings"
_CACHES = "cache", "past_key_values"
"""The argument of a layer that is its cache, since Transformers 5.24 and before."""


def caching_layers(
    model: torch.nn.Module, rotations: Mapping[Place, ForeignRotation], forwards: Mapping[Place, object],
    norms: Mapping[torch.nn.Module, list[Norm]],
) -> dict[Place, object]:  # fmt: skip
    """The new ``forward`` of each layer that can rotate and update a static cache in one pass.

    Args:
        forwards: the forwards that other parts of the patch give to layers. The new forward calls such a forward where
            there is no static cache.
        norms: the norms of q and k that the one pass computes, for the layers whose norms return their inputs.
    """
    said: set[str] = set()
    device = next((x.device for x in model.parameters()), torch.device("cpu"))

    def caching(layer: torch.nn.Module, name: str, rotation: ForeignRotation) -> dict[Place, object]:
        function, kind = forward_of(layer), rotation.understood[0].kind
        with device:  # a caller may have another default
            check_tables(model, kind)
            _check(layer, name, rotation)
        plain: Any = getattr(forwards.get((layer, "forward")), "__func__", function)
        return {(layer, "forward"): own(_caching(layer, name, kind, plain, norms.get(layer, []), said), layer)}

    return {} if device.type == "meta" else changed_layers(model, rotations, caching)


def _caching(layer: Any, name: str, kind: Kind, plain: Rotating, norms: list[Norm], said: set[str]) -> Rotating:
    unrotated = with_rotation(type(layer).forward, name, lambda q, k, *tables, **options: (q, (q, k)))
    cache_name = _cache_of(layer)

    def forward(self, *args, **kwargs):
        cache, tables = kwargs.get(cache_name), kwargs.get(TABLES)
        if tables is None or torch.is_grad_enabled() or not _is_static(cache, self.layer_idx):
            return plain(self, *args, **kwargs)
        if why := _unfit(cache, self.layer_idx, tables[0].dtype):
            if why not in said and not torch.compiler.is_compiling():
                said.add(why)
                text = f"{type(self).__name__}: rotation and update of the cache stay two steps, because {why}"
                warnings.warn(text, stacklevel=2)
            return plain(self, *args, **kwargs)
        return unrotated(self, *args, **kwargs | {cache_name: _OnePass(self, cache, tables, kind, norms)})

    return forward


def _cache_of(layer: torch.nn.Module) -> str:
    """The name of the argument that is the layer's cache."""
    parameters = inspect.signature(type(layer).forward).parameters
    return next((name for name in _CACHES if name in parameters), _CACHES[0])


def _is_static(cache: Any, layer_idx: int) -> bool:
    """Whether the cache of a layer has one size from the start."""
    layers = getattr(cache, "layers", ())
    return layer_idx < len(layers) and getattr(layers[layer_idx], "is_compileable", False)


def _unfit(cache: Any, layer_idx: int, dtype: torch.dtype) -> str:
    """Why the one pass cannot update the static cache of a layer, or an empty text."""
    layer = cache.layers[layer_idx]
    if type(layer).__name__ != "StaticLayer" or not hasattr(layer, "cumulative_length"):
        return f"its cache is a {type(layer).__name__}"
    if cache.offloading:
        return "its cache is offloaded"
    if layer.is_initialized and layer.dtype != dtype:
        return f"its cache has {layer.dtype}, and its tables have {dtype}"
    return ""


class _OnePass:
    """A static cache whose update also rotates, in place of q.

    Args:
        attention: the module of the norms.
        cache: the ``StaticCache``.
        tables: cosines and sines of the tokens, ``[B, S, columns]``.
    """

    def __init__(
        self, attention: torch.nn.Module, cache: Any, tables: tuple[torch.Tensor, ...], kind: Kind, norms: list[Norm]
    ):
        self.attention, self.cache, self.tables, self.kind, self.norms = attention, cache, tables, kind, norms

    def update(self, q_and_k, v, layer_idx, *args, **kwargs):
        q, k = q_and_k
        layer = self.cache.layers[layer_idx]
        if not layer.is_initialized:
            layer.lazy_initialization(k, v)
        batch, _, length, _ = k.shape
        if not are_of(self.tables, batch, length):
            raise ValueError(f"position_embeddings: expected tables of {length} tokens, got {self.tables[0].shape[1]}")
        if batch != len(layer.keys):
            raise IndexError(f"past_key_values: expected a cache of {batch} sequences, got {len(layer.keys)}")
        size = layer.max_cache_len
        slots = torch.arange(length, device=k.device) + layer.cumulative_length
        fits = layer.cumulative_length.add_(length) <= size
        torch._assert_async(fits, f"past_key_values: expected at most {size} tokens in the cache, got more")
        if batch > 1:  # a token beyond the end of its sequence belongs to no other sequence
            first = torch.arange(0, batch * size, size, device=k.device)
            slots = torch.where(slots < size, first[:, None] + slots, batch * size).flatten()
        rotary_dim = self.kind.rotary_dim(self.tables[0])
        cos, sin = (of_pairs(table, self.kind, rotary_dim) for table in self.tables)
        options: dict[str, Any] = {}
        if self.norms:
            weights = dict(
                zip(("q_weight", "k_weight"), (norm.weight(self.attention) for norm in self.norms), strict=True)
            )
            options = weights | {"eps": self.norms[0].eps}
        rope_and_cache(
            q, k, v, layer.keys.transpose(1, 2), layer.values.transpose(1, 2), slots, cos=cos, sin=sin, q_out=q,
            layout=self.kind.layout, seq_format="bhsd", rotary_slice=(0, rotary_dim), **options,
        )  # fmt: skip
        return layer.keys, layer.values


def _check(layer: Any, name: str, rotation: ForeignRotation) -> None:
    """Raise Refused unless the layer gives the update what it rotates, and reads q and k nowhere between."""
    seen = observed(layer, name, rotation, _cache_of(layer))
    if not seen.updated:
        raise Refused("it updates no cache")
    [q, _], tables = seen.heads, seen.given.get(TABLES, ())
    right = (
        seen.updated[0] is seen and seen.updated[2] == layer.layer_idx,
        [id(seen.rotated[table]) for table in rotation.understood[0].call.tables] == [id(table) for table in tables],
        seen.rotated.get("unsqueeze_dim", 1) == 1 and q.ndim == 4,
        memory(q) not in seen.uses.used,
    )
    if not all(right):
        raise Refused("something else happens between its rotation and the update of its cache")
