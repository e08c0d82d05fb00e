"""Calling conventions of multi-head latent attention: parts of heads rotate, and heads share the rotated key."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ropelab.conformance.case import Broken, Case, NotApplicable
from ropelab.conformance.convention import Arguments, Convention
from ropelab.conformance.implementation import Implementation
from ropelab.conformance.projection_conventions import Agreed
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
    sequence of its own, with two heads: the second has the negated numbers. Wherever the two heads of the key, or key
    and value, do not say the same of x, the result of x has a wrong number.
    """

    name = "assemble_mla_kv"
    signature = (
        "fn(kv, k_pe, nope_dim, *, cos, sin, layout, seq_format, positions=None, offsets=0, inverse=False) "
        "-> (key, value)"
    )
    expresses = ALL - {"padding", "axes"}  # a token without a position keeps its value
    pair = False
    in_place = False
    gradients_mean = {
        "is multiplied by 2": "is that of the first of the heads that share the key, and not the sum over the heads",
        "is multiplied by 0.5": "is the mean over the heads that share the key, and not the sum",
    }
    constant_tables: bool | None = True

    def arguments(self, implementation, case):
        ours = super().arguments(implementation, heads_as_sequences(case))
        given = _kv_and_k_pe(implementation, case, ours.inputs[0])
        return Arguments(given, (*given, features_of(case) - case.rotary_dim), ours.keywords)

    def outputs(self, implementation, case, returned, arguments):
        (kv, k_pe), rotary_dim, fmt = arguments.inputs, case.rotary_dim, implementation.format(case)
        rows, tokens, heads, head_dim = case.inputs[0].shape
        nope_dim = head_dim - rotary_dim
        expected = tuple((*kv.shape[:-1], width) for width in (nope_dim + rotary_dim, head_dim))
        got = tuple(getattr(y, "shape", None) for y in returned) if isinstance(returned, (tuple, list)) else ()
        if got != expected:
            raise Broken(f"the function, called as {self.signature}, returned shapes {got}, expected {expected}")
        (key, other_key), (value, other_value) = (y.tensor_split(2, dim=fmt.index("h")) for y in returned)
        moved, other_moved = value[..., :rotary_dim], other_value[..., :rotary_dim]
        right = ((moved == k_pe) & (other_moved == -k_pe)) | k_pe.isnan()
        turned = Agreed.apply((2, -1), key[..., nope_dim:], other_key[..., nope_dim:])
        turned = turned.where(right, turned + (moved - k_pe) - (other_moved + k_pe))
        kept = Agreed.apply(
            (1, -1, 1, 0), key[..., :nope_dim], -other_key[..., :nope_dim], value[..., rotary_dim:],
            -other_value[..., rotary_dim:],
        )  # fmt: skip
        y = to_bshd(torch.cat((turned, kept), dim=-1), fmt)
        return (y.reshape(rows, heads, tokens, head_dim).transpose(1, 2),)

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
        given = _kv_and_k_pe(implementation, case, x)
        cos, sin, options = self._where(implementation, spread)
        return Arguments(given, (*given, cos, sin, case.rotary_dim, head_dim - case.rotary_dim, head_dim), options)

    def outputs(self, implementation, case, returned, arguments):
        return AssembleMLA.outputs(self, implementation, case, returned, arguments)


def _kv_and_k_pe(implementation: Implementation, case: Case, x: torch.Tensor) -> Tensors:
    """Return kv and k_pe for the spread tensor ``x``: two heads that share k_pe, the second with negated numbers."""
    kv = torch.cat((x[..., case.rotary_dim :], x), dim=-1)
    return torch.cat((kv, -kv), dim=implementation.format(case).index("h")), x[..., : case.rotary_dim]


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
