"""Calling conventions of multi-head latent attention: parts of heads rotate, and heads share the rotated key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ropelab.conformance.case import Broken, Case, NotApplicable
from ropelab.conformance.convention import Arguments, Convention
from ropelab.conformance.implementation import Implementation
from ropelab.conformance.projection_conventions import Agreed, Beside
from ropelab.conformance.rotation_conventions import (
    ALL,
    Ropelab,
    cu_seqlens_of,
    features_of,
    native,
    signed_tables,
)
from ropelab.conformance.tensors import Tensors
from ropelab.layout.pairing import join
from ropelab.layout.seq_format import to_bshd


class AssembleMLA(Ropelab):
    """The convention of `ropelab.assemble_mla_kv`: key and value of multi-head latent attention, in one call.

    The features of x that rotate are k_pe, and x is the value. Because heads share k_pe, each head of x makes a call's
    sequence of its own, with as many heads as x has: each has the numbers of x with other signs. Wherever the heads of
    the key, or key and value, do not say the same of x, the result of x has a wrong number.
    """

    name = "assemble_mla_kv"
    signature = (
        "fn(kv, k_pe, nope_dim, *, cos, sin, layout, seq_format, positions=None, offsets=0, inverse=False) "
        "-> (key, value)"
    )
    expresses = ALL - {"padding", "axes"}  # a token without a position keeps its value
    pair = False
    in_place = False
    constant_tables: bool | None = True
    shared = "k_pe"

    def arguments(self, implementation, case):
        ours = super().arguments(implementation, heads_as_sequences(case))
        given = self._kv_and_k_pe(implementation, case, ours.inputs[0])
        return Arguments(given, (*given, features_of(case) - case.rotary_dim), ours.keywords)

    def _kv_and_k_pe(self, implementation: Implementation, case: Case, x: torch.Tensor) -> Tensors:
        """Return kv, whose heads have the numbers of the spread tensor ``x`` and other signs each, and k_pe."""
        rotary_dim, axis = case.rotary_dim, implementation.format(case).index("h")
        signs = _signs(1 if self.part else case.inputs[0].shape[2], x.shape[-1], x)
        return _Heads.apply(x, signs, rotary_dim, axis), x[..., :rotary_dim]

    def outputs(self, implementation, case, returned, arguments):
        (turned, k_pe), (nope, rest), (value, given) = self.pieces(implementation, case, returned, arguments).values()
        (rows, tokens, heads, head_dim), fmt = case.inputs[0].shape, implementation.format(case)
        if self.part:  # k_pe by itself
            y = torch.cat((turned[0], rest), dim=-1)
        else:
            once = _weights(len(value))
            none = (1 - once[0], *(-weight for weight in once[1:]))
            moved, kept = zip(*(one.tensor_split([case.rotary_dim], -1) for one in value), strict=True)
            y = Beside.apply((*none, 1), k_pe, Agreed.apply(once, None, *turned), *moved)
            y = torch.cat((y, Agreed.apply((*once, *none), rest, *nope, *kept)), dim=-1)
        return (to_bshd(y, fmt).reshape(rows, heads, tokens, head_dim).transpose(1, 2),)

    def pieces(self, implementation, case, returned, arguments):
        (kv, k_pe), rotary_dim = arguments.inputs, case.rotary_dim
        head_dim, axis = features_of(case), implementation.format(case).index("h")
        nope_dim = head_dim - rotary_dim
        expected = tuple((*kv.shape[:-1], width) for width in (nope_dim + rotary_dim, head_dim))
        got = tuple(getattr(y, "shape", None) for y in returned) if isinstance(returned, (tuple, list)) else ()
        if got != expected:
            raise Broken(f"the function, called as {self.signature}, returned shapes {got}, expected {expected}")
        key, value = returned
        signs = _signs(kv.shape[axis], head_dim, kv)
        given = kv.narrow(axis, 0, 1)[..., nope_dim:]
        return {
            "k_pe in the key": (key[..., nope_dim:].split(1, axis), k_pe),
            "the key beside k_pe": (_plus(key[..., :nope_dim], signs[:, rotary_dim:], axis), given[..., rotary_dim:]),
            "the value": (_plus(value, signs, axis), given),
        }

    def bad(self, implementation, case):
        good = self.translate(implementation, case)
        kv, k_pe, nope_dim = good.positional
        yield "k_pe with a feature more", replace(good, positional=(kv, torch.cat((k_pe, k_pe[..., :1]), -1), nope_dim))


class MegatronMLAQuery(Convention):
    """The convention of Megatron-LM's ``fused_apply_mla_rope_for_q``: the last features of every head rotate.

    Pairs are adjacent in the query and halves in the result. Source of the signature: megatron-core 0.16.1,
    ``core/fusions/fused_mla_yarn_rope_apply.py``.
    """

    name = "fused_apply_mla_rope_for_q"
    signature = (
        "fn(t, cos, sin, qk_head_dim, emb_dim, cu_seqlens_q=None, cp_rank=0, cp_size=1, rotary_interleaved=False) -> t"
    )
    expresses = frozenset({"inverse", "factor", "offset", "positions", "negative", "packed", "shards"})
    layouts = ("interleaved",)
    out_layout = "split_half"
    columns: tuple[str, ...] = ("repeated",)
    seq_formats: tuple[str, ...] = ("sbhd",)
    constant_tables: bool | None = True
    packed_name = "cu_seqlens_q"

    def arguments(self, implementation, case):
        (x,) = native(implementation, case)
        t = torch.cat((x[..., case.rotary_dim :], x[..., : case.rotary_dim]), dim=-1)
        cos, sin, options = self._where(implementation, case)
        return Arguments((t,), (t, cos, sin, features_of(case) - case.rotary_dim, case.rotary_dim), options)

    def outputs(self, implementation, case, returned, arguments):
        nope_dim = features_of(case) - case.rotary_dim
        found = super().outputs(implementation, case, returned, arguments)
        return tuple(torch.cat((y[..., nope_dim:], y[..., :nope_dim]), dim=-1) for y in found)

    def column_layout(self, implementation):
        return "split_half"

    def _where(self, implementation: Implementation, case: Case) -> tuple[torch.Tensor, torch.Tensor, dict]:
        """Return tables ``[P, 1, 1, R]`` and the arguments that say which rows packed tokens take."""
        options: dict[str, Any] = {}
        positions = case.shared_positions()
        if case.lengths is not None:
            if case.offsets != 0:
                raise NotApplicable(f"{self.name}: its packed documents all start at position 0")
            options[self.packed_name] = cu_seqlens_of(implementation, case.lengths)
            options |= dict(zip(("cp_size", "cp_rank"), case.shard or (), strict=False))
            positions = torch.arange(max(case.lengths, default=0) + 3)
        halves = signed_tables(implementation, case, positions)
        cos, sin = (join(table, table, "split_half")[:, None, None] for table in halves)
        return cos, sin, options

    def bad(self, implementation, case):
        good = self.translate(implementation, case)
        yield "heads with a feature less", replace(good, positional=(good.positional[0][..., 1:], *good.positional[1:]))


class MegatronMLAKeyValue(MegatronMLAQuery, AssembleMLA):
    """The convention of Megatron-LM's ``fused_apply_mla_rope_for_kv``: key and value, and heads that share k_pos_emb.

    Cases are those of `AssembleMLA`; signature and layouts are as for `MegatronMLAQuery`.
    """

    name = "fused_apply_mla_rope_for_kv"
    signature = (
        "fn(kv, k_pos_emb, cos, sin, emb_dim, k_dim, v_dim, cu_seqlens_kv=None, cp_rank=0, cp_size=1, "
        "rotary_interleaved=False) -> (key, value)"
    )
    packed_name = "cu_seqlens_kv"

    def arguments(self, implementation, case):
        spread = heads_as_sequences(case)
        (x,), head_dim = native(implementation, spread), features_of(case)
        given = self._kv_and_k_pe(implementation, case, x)
        cos, sin, options = self._where(implementation, spread)
        return Arguments(given, (*given, cos, sin, case.rotary_dim, head_dim - case.rotary_dim, head_dim), options)

    def outputs(self, implementation, case, returned, arguments):
        return AssembleMLA.outputs(self, implementation, case, returned, arguments)


class _Heads(torch.autograd.Function):
    """kv of heads with the numbers of ``x`` and signs of their own. Its backward adds the heads without rounding."""

    @staticmethod
    def forward(ctx, x, signs, rotary_dim, axis):
        ctx.signs, ctx.rotary_dim, ctx.axis = signs, rotary_dim, axis
        heads = (x * sign for sign in signs)
        return torch.cat([torch.cat((head[..., rotary_dim:], head), dim=-1) for head in heads], axis)

    @staticmethod
    def backward(ctx, grad):
        signs, turned = ctx.signs.double(), ctx.rotary_dim
        nope, value = grad.double().tensor_split([signs.shape[1] - turned], -1)
        signs = signs.unsqueeze(1) if ctx.axis < grad.ndim - 2 else signs  # heads come before tokens
        value, nope = (
            (part * sign).sum(ctx.axis, keepdim=True) for part, sign in ((value, signs), (nope, signs[..., turned:]))
        )
        return (value + torch.nn.functional.pad(nope, (turned, 0))).to(grad.dtype), None, None, None


def _signs(heads: int, features: int, like: torch.Tensor) -> torch.Tensor:
    """Return 1 or -1 for each feature of each head, ``[heads, features]``: rows of a Walsh matrix, negated in turn."""
    head, feature = torch.arange(heads)[:, None], torch.arange(features)
    both = (head >> 1) & feature
    odd = sum(((both >> bit) & 1 for bit in range(features.bit_length())), head & 1)
    return (1 - 2 * (odd % 2)).to(like)


def _plus(y: torch.Tensor, signs: torch.Tensor, axis: int) -> Tensors:
    """Return the heads of ``y`` with their signs removed."""
    return tuple(one * sign for one, sign in zip(y.split(1, axis), signs, strict=True))


def _weights(count: int) -> tuple[int, ...]:
    """Return numbers whose sum is 1, and none of whose sums in the usual orders needs more bits.

    The first of several differs from 1, so that the first part alone is not the sum.
    """
    first, sign = ((-1, 1), 1) if count % 2 else ((2, -1), -1)
    return (1,) if count == 1 else (*first, *(sign * (-1) ** n for n in range(count - 2)))


def heads_as_sequences(case: Case) -> Case:
    """Return the case with a sequence, or packed documents, of its own for each head."""
    (x,) = case.inputs
    rows, tokens, heads, head_dim = x.shape
    x, offsets, positions = x.transpose(1, 2), case.offsets, case.positions
    if case.lengths is not None:
        offsets = offsets * heads if isinstance(offsets, tuple) else offsets
        x = x.reshape(1, heads * tokens, 1, head_dim)
        return replace(case, inputs=(x,), lengths=case.lengths * heads, offsets=offsets)
    if isinstance(offsets, tuple):
        offsets = tuple(offset for offset in offsets for _ in range(heads))
    if positions is not None and positions.ndim == 2 and len(positions) > 1:
        positions = positions.repeat_interleave(heads, dim=0)
    return replace(case, inputs=(x.reshape(rows * heads, tokens, 1, head_dim),), offsets=offsets, positions=positions)
