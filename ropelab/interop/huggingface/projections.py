"""Attention layers that project to q, k and v and then rotate, with both steps as one call of `ropelab.qkv_rope`.

The call pays where one kernel makes the product and rotates (`ropelab.call.projection_paths`). That kernel takes one
weight. So `patch` moves the weights of the three projections behind one another into one tensor, of which the
parameters become views; the parameters themselves, their values and the state_dict stay. Whatever moves a weight again
(another device, sharding) separates them, and the layer then keeps its own projections.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from ropelab.call.projection_paths import ProductSize, fastest
from ropelab.interop.calls import ForeignRotation, Kind, Rotating
from ropelab.interop.huggingface.layers import changed_layers, forward_of, observed, own, with_rotation
from ropelab.interop.patch import Place
from ropelab.interop.probe import Refused, StandIn
from ropelab.kernels import uses_triton
from ropelab.layout.pairing import pairs
from ropelab.projection import qkv_rope

NAMES = ("q_proj", "k_proj", "v_proj")


def projected_layers(model: torch.nn.Module, rotations: Mapping[Place, ForeignRotation]) -> dict[Place, object]:
    """The new ``forward`` of each layer that projects to q, k and v and then rotates q and k.

    Raises:
        ValueError: no layer does; the message gives the reason of the first layer that rotates.
    """

    def projected(layer: torch.nn.Module, name: str, rotation: ForeignRotation) -> dict[Place, object]:
        check_tables(model, rotation.understood[0].kind)
        forward = own(_projected(layer, name, rotation), layer)
        for parts in _parts(layer):
            _lay_together(parts)
        return {(layer, "forward"): forward}

    return changed_layers(model, rotations, projected, "projects to q, k and v and then rotates")


def _projected(layer: torch.nn.Module, attribute: str, rotation: ForeignRotation) -> Rotating:
    function = forward_of(layer)
    if why := _unfit(layer):
        raise Refused(why)
    kind = rotation.understood[0].kind
    _check_inputs(layer, attribute, rotation)
    signature = inspect.signature(function)
    without_rotation = with_rotation(function, attribute, lambda q, k, *args, **kwargs: (q, k))
    said: set[str] = set()

    def forward(self, *args, **kwargs):
        named = "hidden_states" in kwargs and "position_embeddings" in kwargs  # else the host has to find the names
        given = kwargs if named else signature.bind(self, *args, **kwargs).arguments
        hidden, tables = given["hidden_states"], given["position_embeddings"]
        q, k, v = (len(getattr(self, name).weight) for name in NAMES)
        size = ProductSize(hidden.shape[:-1].numel(), hidden.shape[-1], q + k + v, q + k)
        pays = fastest(size, hidden.device) == "product" and uses_triton(hidden)
        serves = hidden.dtype.itemsize == 2 and hidden.ndim == 3 and are_of(tables, *hidden.shape[:2])
        if not pays or not serves or torch.compiler.is_compiling():
            return function(self, *args, **kwargs)
        why = _unfit(self) or ("" if all(map(_is_together, _parts(self))) else "its weights were moved apart")
        if why:
            if why not in said:
                said.add(why)
                warnings.warn(f"{type(self).__name__}: a layer keeps its own projections, because {why}", stacklevel=2)
            return function(self, *args, **kwargs)
        flat = (y.flatten(-2) for y in _heads(self, hidden, tables, kind))
        stands = {name: lambda hidden_states, y=y: y for name, y in zip(NAMES, flat, strict=True)}
        return without_rotation(StandIn(self, stands), *args, **kwargs)

    return forward


def _heads(layer, hidden, tables, kind: Kind) -> tuple[torch.Tensor, ...]:
    """q, k and v ``[B, S, heads, D]``, from one call for the tokens of all sequences, as the kernel takes them."""
    rotary_dim = kind.rotary_dim(tables[0])
    cos, sin = (of_pairs(table, kind, rotary_dim) for table in tables)
    batch, tokens = hidden.shape[:2]
    each = cos.ndim == 3  # every sequence has tables of its own, so a row for each token of the batch
    weight, *bias = (_Joined.apply(*parts) for parts in _parts(layer))
    heads = qkv_rope(
        hidden.flatten(0, 1) if each else hidden, weight, *bias, cos=cos.flatten(0, -2), sin=sin.flatten(0, -2),
        layout=kind.layout, rotary_slice=(0, rotary_dim), seq_format="thd" if each else "bshd",
        q_heads=len(layer.q_proj.weight) // layer.head_dim, k_heads=len(layer.k_proj.weight) // layer.head_dim,
    )  # fmt: skip
    return tuple(y.unflatten(0, (batch, tokens)) for y in heads) if each else heads


def _parts(layer) -> list[list[torch.Tensor]]:
    """The weights of q, k and v, and the biases if the layer has any."""
    modules = [getattr(layer, name) for name in NAMES]
    biases = [] if modules[0].bias is None else [[module.bias for module in modules]]
    return [[module.weight for module in modules], *biases]


def _lay_together(parts: list[torch.Tensor]) -> None:
    """Make parameters views of one tensor, in which they lie one behind another."""
    if not _is_together(parts):
        whole = torch.cat([part.detach() for part in parts])
        for part, view in zip(parts, whole.split([len(part) for part in parts]), strict=True):
            part.data = view


def _is_together(parts: list[torch.Tensor]) -> bool:
    ends = [part.data_ptr() + part.nbytes for part in parts]
    same = len({part.untyped_storage().data_ptr() for part in parts}) == 1
    return same and all(part.is_contiguous() for part in parts) and ends[:-1] == [x.data_ptr() for x in parts[1:]]


class _Joined(torch.autograd.Function):
    """The tensor in which the given tensors lie one behind another; the gradient of each is its part."""

    @staticmethod
    def forward(ctx, *parts):
        first, ctx.rows = parts[0].detach(), [len(part) for part in parts]
        return first.as_strided((sum(ctx.rows), *first.shape[1:]), first.stride())

    @staticmethod
    def backward(ctx, grad):
        return grad.split(ctx.rows)


def are_of(tables: tuple[torch.Tensor, ...], batch: int, tokens: int) -> bool:
    """Whether tables ``[B or 1, S, columns]`` have a row for each token, and no more."""
    rows = tables[0].shape
    return rows[1] == tokens and rows[0] in (1, batch)


def of_pairs(table: torch.Tensor, kind: Kind, rotary_dim: int) -> torch.Tensor:
    """The columns of the pairs, ``[S, R/2]`` or ``[B, S, R/2]``, of a table whose columns `check_tables` compared."""
    if kind.columns == "feature":
        table, _ = pairs(table, kind.layout)
    table = table[..., : rotary_dim // 2]
    return table[0] if len(table) == 1 else table


def _unfit(layer: Any) -> str:
    """Why the projections of a layer cannot be joined now, or an empty text."""
    for name in NAMES:
        module: Any = getattr(layer, name, None)
        if type(module) is not torch.nn.Linear:  # LoRA, 8 bits, parametrizations
            return f"its {name} is a {type(module).__name__}, no plain linear layer"
        if type(module.weight) not in (torch.nn.Parameter, torch.Tensor) or "forward" in vars(module):
            return f"its {name} has a sharded or a wrapped weight, or a forward of its own"
        if any(getattr(module, hooks) for hooks in _HOOKS):
            return f"its {name} has hooks"
    if torch.nn.modules.module._has_any_global_hook():  # they would not see the projections
        return "PyTorch has global module hooks"
    if len({getattr(layer, name).bias is None for name in NAMES}) == 2:
        return "some of its projections have no bias"
    if not isinstance(getattr(layer, "head_dim", None), int):
        return "it has no head_dim"
    return ""


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _check_inputs(layer: torch.nn.Module, attribute: str, rotation: ForeignRotation) -> None:
    """Raise Refused unless the layer rotates the results of q_proj and k_proj of its hidden states as they are."""
    seen = observed(layer, attribute, rotation)
    if not {"hidden_states", "position_embeddings"} <= seen.given.keys():
        raise Refused("its forward takes no tables")
    with torch.no_grad():
        for name, x in zip(NAMES, seen.heads, strict=False):
            heads = getattr(layer, name)(seen.given["hidden_states"]).unflatten(-1, (-1, layer.head_dim))
            if not torch.equal(heads.transpose(1, 2), x):
                raise Refused(f"it does something between {name} and the rotation")


def check_tables(model: torch.nn.Module, kind: Kind) -> None:
    """Raise Refused unless the modules that make the tables of the model give both members of a pair one angle."""
    makers = [module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding")]
    if not makers:
        raise Refused("no module of the model makes its tables")
    device = next(model.parameters()).device
    for maker in makers:
        kinds = getattr(maker, "layer_types", None)  # Gemma 3 has tables for each type of layer
        for options in [{}] if kinds is None else [{"layer_type": each} for each in kinds]:
            try:
                tables = maker(
                    torch.zeros(1, 3, 2, device=device), torch.tensor([[1, 2, 700]], device=device), **options
                )
            except Exception as error:
                raise Refused(f"its tables could not be made ({type(error).__name__})") from error
            if kind.columns == "feature" and not all(torch.equal(*pairs(table, kind.layout)) for table in tables):
                raise Refused("its tables give the members of a pair two angles")
