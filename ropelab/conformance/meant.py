"""The conventions that the parameters of a function fit."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ropelab.conformance.convention import accepts, parameters, required

NEAREST = 3
"""The number of conventions that are named where none fits."""


def conventions_of(function: Callable[..., Any], known: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the names of the conventions that fit the parameters of a function, and of the nearest ones.

    A call fits if it has every parameter without a default, and if the function takes every argument without one. A
    call whose parameters are part of those of another call that fits is left out.

    Args:
        function: a function, a class or a module.
        known: name -> convention.
    """
    if inspect.isclass(function):
        return ["module"], ["module"]
    needed, taken = set(required(function)), set(parameters(function))
    fitting: dict[str, set[str]] = {}
    near: dict[str, float] = {}
    for name, kind in known.items():
        for call in (kind.signature, *kind.other_signatures):
            places, keywords, optional = _arguments(call)
            passed = places | keywords | optional
            common = passed & taken
            near[name] = max(len(common) / len(passed | taken), near.get(name, 0.0))
            if common and needed <= passed and places <= taken and all(accepts(function, name) for name in keywords):
                fitting[name] = common | fitting.get(name, set())
    best = [name for name, common in fitting.items() if not any(common < other for other in fitting.values())]
    if not best and isinstance(function, torch.nn.Module):
        best = ["module"]
    return best, sorted(filter(near.get, near), key=near.__getitem__, reverse=True)[:NEAREST]


def _arguments(call: str) -> tuple[set[str], set[str], set[str]]:
    """Return the arguments of a call in words: by place, by keyword, and those with a default."""
    found = re.search(r"fn\((.*?)\)", call)
    before, _, after = (found[1] if found else "").partition("*, ")
    places, keywords = (set(filter(str.isidentifier, part.split(", "))) for part in (before, after))
    return places, keywords, set(re.findall(r"(\w+)=", found[1] if found else ""))
