"""Compare the features that turn in each layer of a model with what a new model of its class in Transformers turns.

The queries and keys of the products that make scores are watched, so that a model may rotate in any function. All
tokens of a sequence get one position: 0, and then another. The distances between tokens are 0 in both calls, so the
layers read the same, and only the rotation changes queries and keys.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from ropelab.conformance.bounds import FLOAT32_UNIT
from ropelab.conformance.models.attention_laws import SHIFT, ModelResult, Noise, NotOffered, apart, gap, outputs
from ropelab.conformance.models.factory import TinyModel
from ropelab.conformance.models.layers import Recorder, recorded
from ropelab.conformance.models.trace import rotation_of, rotations
from ropelab.conformance.words import listed

STATEMENT = (
    "Each layer turns the features that the model's class in Transformers turns, in the same pairs, by the same angles."
)
CHANGED = 1e-5
"""A feature turns for certain if it changes by more than this part of the largest element."""
ROUNDING = 4 * FLOAT32_UNIT
"""Scores and norms in float32 change features behind layer 0 by this part, and nothing changes those of layer 0.
A slow pair may change by more than rounding and by less than `CHANGED`; it is then not compared."""
FAR = 2**15
"""The largest position of a token that turns, in a model that has so many."""
Scored = dict[int, tuple[torch.Tensor, ...]]
"""The number of a layer -> its queries ``[B, H, S, D]``, keys and values ``[B, Hk, S, D]``; values if they are seen."""


@dataclass(frozen=True)
class Turning:
    """The features of queries or keys that turn in a layer.

    Attributes:
        features: their numbers.
        layout: how they are paired; empty if they turn in no known pairs.
        slow: those of them that change by little more than rounding.
    """

    features: tuple[int, ...]
    layout: str
    slow: frozenset[int] = frozenset()

    def __str__(self) -> str:
        return f"{self.features[0]} to {self.features[-1]}" if self.features else "none"


def turning(tiny: TinyModel) -> dict[tuple[int, str], Turning]:
    """The features of ``"q"``, ``"k"`` and ``"v"`` that turn in each layer of a model in float64, if they are seen.

    Raises:
        NotOffered: no product of queries and keys is seen.
    """
    zeros = torch.zeros_like(tiny.inputs["input_ids"])
    longest = getattr(tiny.model.config, "max_position_embeddings", None) or SHIFT + 1
    before, after = scored(tiny, zeros), scored(tiny, zeros + min(max(longest - 1, SHIFT), FAR))
    return {
        (layer, name): _turning(x, y, 0 if layer == min(before) else ROUNDING)
        for layer in before
        for name, x, y in zip("qkv", before[layer], after.get(layer, before[layer]), strict=False)
        if name != "v" or layer == min(before)  # later values follow from the scores of layers before
    }


def turns(tiny: TinyModel) -> bool:
    """Whether a feature of queries or keys turns in a layer of a model in float64, as far as its scores can be seen."""
    try:
        with torch.no_grad():
            return any(one.slow != set(one.features) for one in turning(tiny).values())
    except Exception:  # the model does not take these calls
        return False


def turns_as_its_class(tiny: TinyModel) -> ModelResult:
    """Check a model in float64 against `STATEMENT`; equal scores for equal weights prove it.

    Scores that differ without a rotation as well are no evidence while the same features turn: the law does not apply.
    """
    name = "turns_as_its_class"
    try:
        with torch.no_grad():
            holds, difference, allowed, message = _held(tiny)
    except NotOffered as reason:
        return ModelResult(name, STATEMENT, "not applicable", message=str(reason))
    except Exception as error:  # the class or the model does not take these calls
        words = (str(error).strip().splitlines() or [""])[0][:120]
        return ModelResult(name, STATEMENT, "not applicable", message=f"{type(error).__name__}: {words}")
    return ModelResult(name, STATEMENT, "pass" if holds else "fail", difference, allowed, message)


def _held(tiny: TinyModel) -> tuple[bool, float, float, str]:
    if not tiny.takes_tokens:
        raise NotOffered("the model takes no tokens")
    own = _of_its_class(tiny)
    at = torch.arange(tiny.inputs["input_ids"].shape[1]).expand_as(tiny.inputs["input_ids"])
    scores, wide, moved = _scores(tiny, at), _scores(own, at), _scores(own, gap(at))
    narrow = _scores(own.single(), at)
    own.double()
    allowed = Noise(_apart(wide, narrow), _apart(wide, moved), at.shape[1] + SHIFT).allowed
    difference = _apart(wide, scores)
    if difference <= allowed:
        return True, difference, allowed, ""
    if message := _turning_apart(tiny, own) or _pairs_apart(tiny, own, allowed) or _other_features(tiny, own):
        return False, difference, allowed, message
    if _apart(_scores(own, 0 * at), _scores(tiny, 0 * at)) <= allowed:
        told = "scores are those of the class where all positions are 0, and others where tokens have their own"
        return False, difference, allowed, told + _first_apart(tiny, own, at, allowed)
    raise NotOffered("its scores are not those of the class, but the same features turn in the same pairs")


def _first_apart(tiny: TinyModel, own: TinyModel, positions: torch.Tensor, allowed: float) -> str:
    """Return in words the first layer whose queries or keys are not those of the class; empty if there is none."""
    ones, others = scored(tiny, positions), scored(own, positions)
    for layer in sorted(others.keys() & ones.keys()):
        both = zip("qk", ones[layer], others[layer], strict=False)
        apart = [name for name, x, y in both if x.shape == y.shape and (x - y).abs().max() > allowed * y.abs().max()]
        if apart:
            return f": layer {layer} is the first that differs, in {' and '.join(apart)}"
    return ""


def _turning_apart(tiny: TinyModel, own: TinyModel) -> str:
    found, meant = turning(tiny), turning(own)
    apart: dict[str, dict[int, list[str]]] = {}  # what is apart, in words -> the tensors of each layer
    for (layer, name), right in meant.items():
        one, said = found.get((layer, name), right), ""
        if (set(one.features) ^ set(right.features)) - one.slow - right.slow:
            features = f"features {one}" if one.features else "no features"
            said = f"{features} turn, in place of {right}"
        elif one.layout != right.layout and one.layout and right.layout:
            said = f"features are paired as {one.layout} in place of {right.layout}"
        if said:
            apart.setdefault(said, {}).setdefault(layer, []).append(name)
    return "; ".join(f"{_sites(layers)}: {said}" for said, layers in apart.items())


def _sites(layers: dict[int, list[str]]) -> str:
    """Return layers and their tensors in words."""
    alike: dict[str, list[int]] = {}
    for layer, names in layers.items():
        alike.setdefault(" and ".join(names), []).append(layer)
    numbered = ((names, listed(np.array(some)), len(some) > 1) for names, some in alike.items())
    return ", ".join(f"layer{'s' * several} {numbers}, {names}" for names, numbers, several in numbered)


def _pairs_apart(tiny: TinyModel, own: TinyModel, allowed: float) -> str:
    """Which functions pair other features, in words; a new order of features is seen at position 0 as well."""
    zeros = torch.zeros_like(tiny.inputs["input_ids"])
    ones, others = scored(tiny, zeros), scored(own, zeros)
    found, meant = _pairs(tiny), _pairs(own)
    for layer, right in meant.items():
        one, other = Counter(found.get(layer, ())), Counter(right)
        wrong, missing = list(one - other), list(other - one)
        names = [n for n, x, y in zip("qk", ones[layer], others[layer], strict=False)
                 if x.shape != y.shape or apart(x, y) > allowed * float(y.abs().max())]  # fmt: skip
        if wrong and missing and names:
            return f"layer {layer}, {' and '.join(names)}: features are paired as {wrong[0]} in place of {missing[0]}"
    return ""


def _other_features(tiny: TinyModel, own: TinyModel) -> str:
    """Which features of the class turn in the places of others, in words; without a rotation they show their order."""
    zeros = torch.zeros_like(tiny.inputs["input_ids"])
    ones, others, meant = scored(tiny, zeros), scored(own, zeros), turning(own)
    layer = min(ones)  # all layers behind it read other numbers
    for name, x, y in zip("qk", ones[layer], others[layer], strict=False):
        if x.shape != y.shape:
            continue
        near = CHANGED * y.abs().max()
        order = [next((i for i in range(y.shape[-1]) if bool(((x[..., j] - y[..., i]).abs() <= near).all())), -1)
                 for j in range(x.shape[-1])]  # fmt: skip
        right = set(meant[layer, name].features)
        turns = {order[j] for j in right}
        if sorted(order) == list(range(len(order))) and turns != right:
            told, place = (f"{min(some)} to {max(some)}" for some in (turns, right))
            return f"layer {layer}, {name}: features {told} of the class turn, in place of {place}"
    return ""


def _pairs(tiny: TinyModel) -> dict[int, list[str]]:
    """The pairs of the functions that rotate in each layer, before and after the rotation."""
    found: dict[int, list[str]] = {}
    with recorded(tiny.model) as recorder:
        for one in rotations(lambda: outputs(tiny), lambda: recorder.layer):
            for turn in one.turns:
                pairs = turn.layout if turn.layout == turn.out_layout else f"{turn.layout}, then {turn.out_layout}"
                if turn.layer is not None:
                    found.setdefault(turn.layer, []).append(pairs)
    return found


def _of_its_class(tiny: TinyModel) -> TinyModel:
    """A new model of the class in Transformers, with the same configuration and weights, in float64."""
    kind: Any = next((k for k in type(tiny.model).__mro__ if k.__module__.startswith("transformers.models.")), None)
    if kind is None:
        raise NotOffered("its class is not one of Transformers")
    model = kind(copy.deepcopy(tiny.model.config)).eval()
    try:
        model.load_state_dict(tiny.model.state_dict())
    except RuntimeError as error:
        raise NotOffered("its weights are not those of its class in Transformers") from error
    return TinyModel(tiny.architecture, model, tiny.inputs).double()


def scored(tiny: TinyModel, at: torch.Tensor) -> Scored:
    """The queries and keys of each layer at positions ``[B, S]``.

    Raises:
        NotOffered: no product of queries and keys is seen.
    """
    with recorded(tiny.model) as recorder, _Products(recorder, at.shape[-1]) as products:
        outputs(tiny, position_ids=at)
    if not products.found:
        raise NotOffered("no product of queries and keys is seen")
    return products.found


def _scores(tiny: TinyModel, at: torch.Tensor) -> dict[int, torch.Tensor]:
    """The scores ``[B, H, S, S]`` of each layer, divided by the largest."""
    products = {
        layer: q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT for layer, (q, k, *_) in scored(tiny, at).items()
    }
    return {layer: scores / scores.abs().max() for layer, scores in products.items()}


def _apart(ones: dict[int, torch.Tensor], others: dict[int, torch.Tensor]) -> float:
    if {layer: x.shape for layer, x in ones.items()} != {layer: x.shape for layer, x in others.items()}:
        raise NotOffered("its scores have other shapes than those of its class in Transformers")
    return max(apart(x, others[layer]) for layer, x in ones.items())


def _turning(before: torch.Tensor, after: torch.Tensor, rounding: float) -> Turning:
    change = (before - after).abs().flatten(0, -2).amax(0) / before.abs().max()
    features, certain = (tuple((change > least).nonzero().flatten().tolist()) for least in (rounding, CHANGED))
    if not certain:
        return Turning(features, "", frozenset(features))
    part = slice(certain[0], certain[-1] + 1)
    known = rotation_of(before[..., part], after[..., part])
    return Turning(features, known[0] if known else "", frozenset(features) - frozenset(certain))


class _Products(TorchFunctionMode):
    """Keeps the first product of queries and keys in each layer, and the next of its scores with values.

    Scores have a row and a column for each token.
    """

    def __init__(self, recorder: Recorder, tokens: int) -> None:
        super().__init__()
        self.found: Scored = {}
        self._recorder, self._tokens = recorder, tokens

    def __torch_function__(self, func, types, args=(), kwargs=None):
        layer = self._recorder.layer
        if layer is not None and layer not in self.found and len(args) > 1 and func in _SCORING:
            q, k = args[0], args[1] if func is torch.nn.functional.scaled_dot_product_attention else args[1].mT
            if q.ndim == k.ndim == 4 and q.shape[2] == k.shape[2] == self._tokens and q.shape[-1] == k.shape[-1]:
                given = (q, k, *(args[2:3] if func is torch.nn.functional.scaled_dot_product_attention else ()))
                self.found[layer] = tuple(x.detach().double() for x in given)
        elif layer in self.found and len(self.found[layer]) == 2 and len(args) > 1 and func in _SCORING:
            weights, v = args[:2]
            if weights.ndim == v.ndim == 4 and weights.shape[2:] == 2 * (self._tokens,) and v.shape[2] == self._tokens:
                self.found[layer] = *self.found[layer], v.detach().double()
        return func(*args, **(kwargs or {}))


_SCORING = (
    torch.nn.functional.scaled_dot_product_attention, torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__,
)  # fmt: skip
