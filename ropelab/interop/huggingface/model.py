"""Patch a model of Transformers, so that the model rotates with the kernel."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ropelab.arguments import flag
from ropelab.interop.calls import SIZES, Call, Complex, ForeignRotation, Rotating, Turn, Unsqueezed, rotation_of
from ropelab.interop.huggingface.caches import caching_layers
from ropelab.interop.huggingface.layers import Norm, fused_layers, is_of_class, is_own
from ropelab.interop.huggingface.projections import projected_layers
from ropelab.interop.patch import Patch, Place, check_model, is_replaced, undo_all


def patch(model: torch.nn.Module, *, qk_norm: bool = False, projection: bool = False) -> Patch:
    """Make a Transformers model rotate with the kernel: ``patch(model)``, or ``with patch(model): ...``.

    The patch replaces the functions ``apply_rotary_pos_emb...`` in the files of the model's layers, so it affects every
    model of the architecture in the process. The patch calls each function with small random tensors to learn its
    convention, and does not look at the model's name. It knows halves (Llama), adjacent pairs (GPT-J, Cohere, GLM) and
    adjacent pairs that become halves (DeepSeek-V3). It knows complex tables (DeepSeek-V2, Llama 4), the negative angle
    (nanochat) and tokens without a position (DINOv3). A function may take one, two or three tensors, and tables may
    have a column for each feature or for each pair.

    A call that one launch cannot compute goes to the original function, and so does a call with wrong arguments. With
    bfloat16 the result is closer to the definition than the result of the original, which rounds after every operation.
    The dtype of the result stays.

    With ``qk_norm=True``, the RMS norms of the heads of q and k and the rotation become one pass
    (`ropelab.apply_qk_norm_rope`), forward and backward. This concerns each attention layer of this model that
    normalizes q and k and then rotates both by one call (Qwen3, Gemma 3). The patch then replaces ``forward`` of these
    layers, and of their norms, which return their inputs. Hooks on these norms see inputs as outputs.

    With ``projection=True``, the projections to q, k and v and the rotation become one call of `ropelab.qkv_rope`,
    where one kernel that does both is faster for the size. This concerns each attention layer of this model that has
    plain linear layers ``q_proj``, ``k_proj`` and ``v_proj`` and rotates q and k as they are (Llama, Qwen2). The patch
    then replaces ``forward`` of these layers, and the three weights become views of one tensor; the parameters, their
    values and the state_dict stay. A call under torch.compile keeps the layer's own projections. So does a layer whose
    projections are not plain at the call (LoRA, quantized or sharded weights, hooks, weights that were moved to another
    device after the patch); a warning says why, once for each reason.

    Without gradients, and with a ``StaticCache``, the rotation and the update of the cache become one call of
    `ropelab.rope_and_cache`, for each attention layer of this model that rotates q and k and then updates the cache;
    with ``qk_norm=True`` the norms are part of the call. The patch replaces ``forward`` of these layers. A layer whose
    cache is a sliding or an offloaded one, or has another dtype than the tables, takes two steps; a warning says so
    once for each reason.

    A function that several patches replaced stays so until all of them are undone, or `unpatch` was called for the
    models. A deep copy of a patched model has the new layers and separate weights; with ``projection=True`` a copy
    keeps its own projections until it is patched, too. A pickled model has the layers of Transformers.

    Raises:
        TypeError: ``model`` is not a module, or ``qk_norm`` or ``projection`` is not a bool.
        ValueError: the model has no rotation, or a rotation of another convention; with ``qk_norm=True`` no layer can
            be fused, or with ``projection=True`` no layer projects and then rotates, and the message says why; or both
            are true, because the kernel has no norm. The patch replaces nothing then.
    """
    check_model(model)
    if flag("qk_norm", qk_norm) and flag("projection", projection):
        raise ValueError("projection: expected False beside qk_norm=True (the kernel has no norm), got True")
    flag("projection", projection)
    functions = dict(rotation_functions(model))
    if not functions:
        raise ValueError(
            f"model: expected a Transformers model whose files define apply_rotary_pos_emb, got {type(model).__name__}"
        )
    _drop_copied_forwards(model)
    rotations = {
        (module, name): rotation_of(function) or ForeignRotation(f"{module.__name__}.{name}", function, CALLS)
        for (module, name), function in functions.items()
    }
    new: dict[Place, object] = {
        place: rotation.over_kernel() if rotation_of(functions[place]) is None else functions[place]
        for place, rotation in rotations.items()
    }
    norms: dict[torch.nn.Module, list[Norm]] = {}
    if qk_norm:
        fused, norms = fused_layers(model, rotations)
        new |= fused
    if projection:
        new |= projected_layers(model, rotations)
    new |= caching_layers(model, rotations, new, norms)
    patched = {(layer, "forward"): layer.forward for layer in model.modules() if is_own(layer)}
    return Patch(patched | new, model)


def unpatch(model: torch.nn.Module) -> None:
    """Undo every patch of a model, or of a deep copy of a patched model: ``unpatch(model)``.

    The functions of the architecture stay replaced while another model's patch wants them.
    """
    check_model(model)
    undo_all(model)
    _drop_copied_forwards(model)


def is_patched(model: torch.nn.Module) -> bool:
    """Whether a model rotates with the kernel, by its own patch or that of another model of the architecture."""
    check_model(model)
    functions = (function for _, function in rotation_functions(model))
    return any(map(rotation_of, functions)) or any(map(is_own, model.modules()))


def _drop_copied_forwards(model: torch.nn.Module) -> None:
    """Take away the forwards of no patch's layers: of the layers of a deep copy, or of a model that pickle loaded."""
    for layer in model.modules():
        if is_own(layer) and not is_replaced(layer, "forward") or is_of_class(layer):
            del layer.forward


def rotation_functions(model: torch.nn.Module) -> Iterator[tuple[Place, Rotating]]:
    """((module, name), function) of all rotations in the files that define the model's layers."""
    for name in dict.fromkeys(type(layer).__module__ for layer in model.modules()):
        module = sys.modules.get(name)
        if module is None:
            continue
        for attribute, value in list(vars(module).items()):
            if callable(value) and re.match(r"(apply|vision_apply)_(\w+_)?rotary_", attribute):
                yield (module, attribute), value


# ----------------------------------------------------------------------- how the rotations of Transformers 5 are called

PREFIX = 2
"""The number of tokens without a position in the probe of `PrefixTokens`."""


@dataclass(frozen=True)
class PrefixTokens(Call):
    """Tables of the last tokens. The tokens before them have no position, and pass unchanged (DINOv3)."""

    def broadcast(self, cos, sin, arguments):
        prefix = arguments[self.rotated[0]].shape[-2] - cos.shape[-2]
        if prefix < 0 or cos.ndim != 2:
            return None
        if prefix == 0:
            return cos, sin
        rows = prefix, cos.shape[-1]
        return torch.cat((cos.new_ones(rows), cos)), torch.cat((sin.new_zeros(rows), sin))

    def _heads(self, draw, heads):
        return draw(SIZES["b"], heads, SIZES["s"] + PREFIX, SIZES["d"])


@dataclass(frozen=True)
class GatheredRows(Call):
    """Tables whose rows ``position_ids`` chooses. Values rotate as well (CLVP)."""

    def turns(self, arguments):
        rows, place = arguments["position_ids"], arguments["unsqueeze_dim"]
        cos, sin = (arguments[name][rows].unsqueeze(place) for name in self.tables)
        return [Turn(self.rotated[:2], cos, sin), Turn(self.rotated[2:], cos, sin)]

    def _probe_tables(self, draw, columns, width):
        rows = torch.arange(SIZES["b"] * SIZES["s"]).flip(0).view(SIZES["b"], SIZES["s"])
        return {name: columns(draw(rows.numel(), width)) for name in self.tables} | {"position_ids": rows}


@dataclass(frozen=True)
class KeysOfTheirOwn(Call):
    """Keys of another length than the queries, with tables of their own or the first rows of the queries' (SAM 2)."""

    def turns(self, arguments):
        cos, sin = (arguments[name] for name in self.tables[:2])
        cos_k, sin_k = (arguments[name] for name in self.tables[-2:])
        q, k = (arguments[name] for name in self.rotated)
        if k.shape[-2] == 0 or cos.ndim != 2 or cos_k.ndim != 2 or cos_k.shape[-2] != k.shape[-2]:
            return None
        if cos_k is cos and q.shape[-2] == k.shape[-2]:
            return [Turn(self.rotated, cos, sin)]
        return [Turn(self.rotated[:1], cos, sin), Turn(self.rotated[1:], cos_k, sin_k)]


_PAIR = ("q", "k")
_VISION = Unsqueezed(_PAIR, "bshd")
_HEADS_FIRST = Unsqueezed(_PAIR, place=1)

CALLS: Mapping[tuple[str, ...], Sequence[Call]] = {
    ("q", "k", "cos", "sin", "unsqueeze_dim"): (_HEADS_FIRST, Unsqueezed(_PAIR, "bshd", place=2)),
    # position_ids is unused in recent versions.
    ("q", "k", "cos", "sin", "position_ids", "unsqueeze_dim"): (
        Unsqueezed(_PAIR, options={"position_ids": None}, place=1),
    ),
    # The towers for images; the last is SAM 3.
    ("q", "k", "cos", "sin"): (
        _VISION, Unsqueezed(_PAIR, "shd", "s"), PrefixTokens(_PAIR, "bhsd", "s"), Call(_PAIR, "bhsd", "s"),
    ),
    ("q", "k", "v", "cos", "sin", "position_ids", "unsqueeze_dim"): (GatheredRows(("q", "k", "v")),),
    ("q", "k", "cos", "sin", "num_k_exclude_rope", "repeat_freqs_k"): (
        KeysOfTheirOwn(_PAIR, "bhsd", "s", options={"num_k_exclude_rope": 0}),
    ),
    ("q", "k", "cos", "sin", "cos_k", "sin_k", "num_k_exclude_rope", "repeat_freqs_k"): (
        KeysOfTheirOwn(
            _PAIR, "bhsd", "s", ("cos", "sin", "cos_k", "sin_k"), {"num_k_exclude_rope": 0, "repeat_freqs_k": 1}
        ),
    ),
    ("x", "cos", "sin", "unsqueeze_dim"): (Unsqueezed(("x",), place=1), Unsqueezed(("x",), "bshd", place=2)),
    ("x", "cos", "sin"): (Unsqueezed(("x",), "bshd"), Unsqueezed(("x",), place=1)),
    ("tensor", "sin", "cos"): (Unsqueezed(("tensor",), "bshd"),),
    ("hidden_states", "cos", "sin"): (Call(("hidden_states",), "bsd"),),  # Music Flamingo
    ("xq", "xk", "freqs_cis"): (  # DeepSeek-V2 and Llama 4
        Complex(("xq", "xk"), "bhsd", tables=("freqs_cis",), index=(slice(None), None)),
        Complex(("xq", "xk"), "bshd", tables=("freqs_cis",), index=(slice(None), slice(None), None)),
    ),
    ("query", "key", "freqs_ci"): (  # the tower for images of Llama 4
        Complex(("query", "key"), "bshd", "s", ("freqs_ci",), index=(None, slice(None), None)),
    ),
}  # fmt: skip
"""The names of a function's parameters -> the calls to try."""
