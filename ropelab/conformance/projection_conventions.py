"""Calling conventions of projections to q, k and v that rotate q and k in their epilogue."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from ropelab.angles.frequencies import inverse_frequencies
from ropelab.conformance.bounds import FLOAT32_UNIT
from ropelab.conformance.case import Broken
from ropelab.conformance.convention import Arguments, Convention
from ropelab.conformance.rotation_conventions import ALL, Ropelab, as_pair, features_of, native
from ropelab.layout.seq_format import to_bshd


class QKVRope(Ropelab):
    """The convention of `ropelab.qkv_rope`: q, k and v out of hidden states, in one call.

    The hidden states are those of `_hidden`. Wherever the returned v has other numbers, the result for k is wrong.
    """

    name = "qkv_rope"
    passes = "v"
    signature = (
        "fn(x, weight, *, q_heads, k_heads, cos, sin, layout, seq_format, positions=None, axes=None, offsets=0) "
        "-> (q, k, v)"
    )
    expresses = ALL - {"inverse", "padding"}  # a token without a position keeps its v
    in_place = False
    constant_tables = True
    autocasts = True
    gradients_mean = {
        "has twice the gradient in the features that do not rotate": "lacks the part of v: no gradient arrives from v"
    }
    seq_formats = ("bshd", "sbhd")

    def arguments(self, implementation, case):
        q, k = native(implementation, case, pair=True)
        x, weight = _hidden(q, k)
        options = super().arguments(implementation, case).keywords
        return Arguments((x, weight), (x, weight), options | {"q_heads": q.shape[-2], "k_heads": k.shape[-2]})

    def outputs(self, implementation, case, returned, arguments):
        x, head_dim = arguments.inputs[0], features_of(case)
        heads = [arguments.keywords[name] for name in ("q_heads", "k_heads", "k_heads")]
        expected = tuple((*x.shape[:-1], count, head_dim) for count in heads)
        got = tuple(getattr(y, "shape", None) for y in returned) if isinstance(returned, (tuple, list)) else ()
        if got != expected:
            raise Broken(f"the function, called as {self.signature}, returned shapes {got}, expected {expected}")
        q, k, v = returned
        given = x[..., 1 + sum(heads[:2]) * head_dim :][..., : heads[2] * head_dim].unflatten(-1, (heads[2], head_dim))
        parts = q, _with_v(k, v, given, case.rotary_dim, self.part)
        return tuple(to_bshd(y, implementation.format(case)) for y in parts[: len(case.inputs)])

    def bad(self, implementation, case):
        yield from super().bad(implementation, case)
        good = self.translate(implementation, case)
        x, weight = good.positional
        yield "a weight with a row less", replace(good, positional=(x, weight[:-1]))


class RotaryEpilogue(Convention):
    """The convention of quack's ``rope_posfreq_epi``: a product whose epilogue rotates by angles that it computes.

    Hidden states and weight are those of `QKVRope`. Columns of v and of features that do not rotate have frequency 0.
    Source of the signature: quack-kernels 0.6.5, ``quack/epilogue/rotary.py``.
    """

    name = "rope_posfreq_epi"
    passes = "v"
    signature = (
        "fn(x, weight, pos, freq) -> y or {'D': y}, x [T, K], weight [K, N], y [T, N] for q, k and v, "
        "pos float32 [1, T], freq float32 [1, N] with two float32 numbers for the turns per position of each pair"
    )
    expresses = frozenset({"inverse", "offset", "offsets per sequence", "positions", "positions per batch", "negative",
                           "packed"})  # fmt: skip
    pair = True
    sees_documents = False
    negates = True
    differentiable = False
    computes_cosines = True
    autocasts = True
    layouts = ("interleaved",)

    def arguments(self, implementation, case):
        q, k = (y.flatten(0, 1) for y in as_pair(case.inputs))
        x, weight = _hidden(q, k)
        turns = torch.zeros(features_of(case), dtype=torch.float64)
        exact = inverse_frequencies(case.rotary_dim, implementation.base) / (2 * math.pi)
        turns[: case.rotary_dim : 2] = exact.float()
        turns[1 : case.rotary_dim : 2] = exact - exact.float()
        freq = torch.cat((turns.repeat(q.shape[1] + k.shape[1]), torch.zeros(k.shape[1] * k.shape[2]))).float()[None]
        positions = case.token_positions().flatten()[None].float() * (-1 if case.inverse else 1)
        operands = {"pos": positions.to(x.device), "freq": freq.to(x.device)}
        return Arguments((x, weight.T.contiguous()), (x, weight.T.contiguous()), operands)

    def outputs(self, implementation, case, returned, arguments):
        y = returned["D"] if isinstance(returned, Mapping) and "D" in returned else returned
        x = arguments.inputs[0][:, 1 : arguments.inputs[1].shape[1] + 1]
        y = y[0] if isinstance(y, torch.Tensor) and y.shape == (1, *x.shape) else y  # of positions [1, T]
        if not isinstance(y, torch.Tensor) or y.shape != x.shape:
            got = getattr(y, "shape", type(y).__name__)
            raise Broken(f"the function, called as {self.signature}, returned {got}, expected {tuple(x.shape)}")
        q, k = as_pair(case.inputs)
        count = q.shape[2], k.shape[2], k.shape[2]
        parts, given = (z.unflatten(-1, (-1, features_of(case))).split(count, dim=1) for z in (y, x))
        found = parts[0], _with_v(parts[1], parts[2], given[2], case.rotary_dim, self.part)
        return tuple(z.reshape(like.shape) for z, like in zip(found, case.inputs, strict=False))

    def angle_error(self, angles, frequencies):
        """Return the error of cosines and sines by fast maths: 2^-20.5, and the rounding of an angle below pi.

        Source: PTX ISA, ``sin.approx.f32`` and ``cos.approx.f32`` for angles of at most a turn. The turns per position
        have 48 bits.
        """
        return 2.0**-20.5 + 2 * math.pi * FLOAT32_UNIT + abs(angles) * 2.0**-46

    def bad(self, implementation, case):
        good = self.translate(implementation, case)
        x, weight = good.positional
        yield "a weight with a row less", replace(good, positional=(x, weight[:-1]))


def passing(k: torch.Tensor) -> torch.Tensor:
    """Return the v that goes with k ``[..., heads, features]``: its numbers in other places, with other signs."""
    count = k.shape[-2] * k.shape[-1]
    order = torch.randperm(count, generator=torch.Generator().manual_seed(count))
    order = order.roll(1) if (order == torch.arange(count)).all() else order
    signs = 1 - 2 * (torch.arange(count) % 2)
    return (k.flatten(-2)[..., order.to(k.device)] * signs.to(k)).unflatten(-1, k.shape[-2:])


def _hidden(q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states ``[..., K]`` and a weight ``[N, K]`` whose product is q, k and v, each number exactly.

    A number, q, k, v and the rest of a head stand in a row, so that a transposed weight is seen, and K is not N.
    """
    parts = [heads.flatten(-2) for heads in (q, k, _Value.apply(k))]
    rest = passing(q.detach())[..., 0, :]
    x = torch.cat((rest[..., :1], *parts, rest[..., 1:]), dim=-1)
    count = sum(part.shape[-1] for part in parts)
    return x, torch.eye(count, x.shape[-1], dtype=x.dtype, device=x.device).roll(1, 1)


class _Value(torch.autograd.Function):
    """`passing`, whose gradient is that of k in the same place, which `_with_v` takes off twice the gradient of k."""

    @staticmethod
    def forward(ctx, k):
        return passing(k)

    @staticmethod
    def backward(ctx, grad):
        return grad


def _with_v(k: torch.Tensor, v: torch.Tensor, given: torch.Tensor, rotary_dim: int, part: str) -> torch.Tensor:
    """Return k, with wrong numbers where the returned v is not the given v; or one of the two by itself."""
    if part:
        return k if part == "k" else v
    (turned, kept), (v0, v1), (given0, given1) = (x.tensor_split([rotary_dim], -1) for x in (k, v, given))
    return torch.cat((Beside.apply((0, 1), given0, turned, v0), Beside.apply((-1, 2), given1, kept, v1)), dim=-1)


class Beside(torch.autograd.Function):
    """A result, wrong wherever others are not what they should be. Gradients are its own times weights, its last."""

    @staticmethod
    def forward(ctx, weights, right, y, *others):
        ctx.weights = weights
        for other in others:
            y = y.where((other == right) | right.isnan(), y + (other - right))
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        *others, own = Shares.apply(ctx.weights, grad)
        return None, None, own, *others


class Agreed(torch.autograd.Function):
    """The number that all parts have, or else a wrong one: a part that is not the given number.

    Where no number is given, two parts that differ make a number that neither is. The gradient of each part is the
    gradient times its weight. The weights sum to 1, and no sum of some of them rounds.
    """

    @staticmethod
    def forward(ctx, weights, given, first, *others):
        ctx.weights, y = weights, first
        for other in others:
            if given is None:
                y = y.where(first == other, 2 * first - other)
            else:
                y = y.where((y != given) & ~(y.isnan() & given.isnan()), other)
        return y.clone()

    @staticmethod
    def backward(ctx, grad):
        return None, None, *Shares.apply(ctx.weights, grad)


class Shares(torch.autograd.Function):
    """A gradient times each of some weights. Its own gradient is a sum in float64, which rounds once."""

    @staticmethod
    def forward(ctx, weights, grad):
        ctx.weights = weights
        return tuple(weight * grad for weight in weights)

    @staticmethod
    def backward(ctx, *grads):
        shares = (weight * grad.double() for weight, grad in zip(ctx.weights, grads, strict=True))
        return None, sum(shares).to(grads[0].dtype)
