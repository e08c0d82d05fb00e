"""The calling forms of the rotations of Transformers 5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ropelab.interop.calls import SIZES, Call, Complex, Turn, Unsqueezed

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
