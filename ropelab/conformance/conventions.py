"""Calling conventions, each of which translates cases to and from the calls of a library."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ropelab.conformance.bounds import EXACT, FLOAT32_UNIT
from ropelab.conformance.case import CANNOT, Broken, Case, NotApplicable
from ropelab.conformance.convention import Arguments, Convention, accepts, call
from ropelab.conformance.implementation import Implementation
from ropelab.conformance.tensors import Tensors
from ropelab.kernels import NO_POSITION
from ropelab.layout.pairing import join
from ropelab.layout.seq_format import DENSE_FORMATS, from_bshd, to_bshd
from ropelab.positions.packed import PackedSequences, context_parallel_positions

ALL = frozenset(CANNOT)


class Ropelab(Convention):
    """The convention of `ropelab.apply_rope`: tables of all positions, and every way to say which rows they take."""

    name = "ropelab"
    signature = (
        "fn(q, k=None, *, cos, sin, layout, seq_format, positions=None, axes=None, offsets=0, inverse=False, "
        "inplace=False)"
    )
    expresses = ALL
    pair = True
    in_place: bool | None = None
    seq_formats = DENSE_FORMATS

    def arguments(self, implementation, case):
        tensors = _native(implementation, case)
        cos, sin = implementation.tables(case, _rows(case))
        options = {"cos": cos, "sin": sin, "layout": implementation.layout, "seq_format": implementation.format(case)}
        if implementation.out_layout != implementation.layout:
            options["out_layout"] = implementation.out_layout
        if implementation.in_place:
            options["inplace"] = True
        if case.inverse:
            options["inverse"] = True
        size, rank = case.shard or (1, 0)
        if case.positions is not None:
            options["positions"] = case.positions.to(implementation.device)
            if case.axes is not None:
                options["axes"] = case.axes
        elif case.lengths is not None:
            cu_seqlens, offsets = _cu_seqlens(implementation, case.lengths), _offsets(implementation, case)
            packed = PackedSequences(cu_seqlens, case.shape[1], offsets=offsets, cp_size=size, cp_rank=rank)
            options["positions"] = packed.positions
        elif case.shard:
            seq_len = case.shape[1] * size
            options["positions"] = context_parallel_positions(seq_len, size, rank, device=implementation.device)
        elif case.offsets != 0:
            options["offsets"] = _offsets(implementation, case)
        return Arguments(tensors, tensors, options)


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
    constant_tables = True

    def arguments(self, implementation, case):
        ours = super().arguments(implementation, _heads_as_sequences(case))
        (x,), heads = ours.inputs, implementation.format(case).index("h")
        kv = torch.cat((x[..., case.rotary_dim :], x), dim=-1)
        given = torch.cat((kv, -kv), dim=heads), x[..., : case.rotary_dim]
        return Arguments(given, (*given, x.shape[-1] - case.rotary_dim), ours.keywords)

    def outputs(self, implementation, case, returned, arguments):
        (kv, k_pe), rotary_dim, fmt = arguments.inputs, case.rotary_dim, implementation.format(case)
        nope_dim, (rows, tokens, heads, head_dim) = arguments.positional[2], case.inputs[0].shape
        expected = tuple((*kv.shape[:-1], width) for width in (nope_dim + rotary_dim, head_dim))
        got = tuple(getattr(y, "shape", None) for y in returned) if isinstance(returned, (tuple, list)) else ()
        if got != expected:
            raise Broken(f"the function, called as {self.signature}, returned shapes {got}, expected {expected}")
        (key, other_key), (value, other_value) = (y.tensor_split(2, dim=fmt.index("h")) for y in returned)
        moved, other_moved = value[..., :rotary_dim], other_value[..., :rotary_dim]
        right = ((moved == k_pe) & (other_moved == -k_pe)) | k_pe.isnan()
        turned = _Agreed.apply((2, -1), key[..., nope_dim:], other_key[..., nope_dim:])
        turned = turned.where(right, turned + (moved - k_pe) - (other_moved + k_pe))
        kept = _Agreed.apply(
            (1, -1, 1, 0), key[..., :nope_dim], -other_key[..., :nope_dim], value[..., rotary_dim:],
            -other_value[..., rotary_dim:],
        )  # fmt: skip
        y = to_bshd(torch.cat((turned, kept), dim=-1), fmt)
        return (y.reshape(rows, heads, tokens, head_dim).transpose(1, 2),)

    def bad(self, implementation, case):
        good = self.translate(implementation, case)
        kv, k_pe, nope_dim = good.positional
        yield "k_pe with a feature more", replace(good, positional=(kv, torch.cat((k_pe, k_pe[..., :1]), -1), nope_dim))


class QKVRope(Ropelab):
    """The convention of `ropelab.qkv_rope`: q, k and v out of hidden states, in one call.

    The hidden states of a token are q, k and v themselves, and the weight is the identity, so every product is exact.
    v has the negated numbers of k. Wherever the returned v has other numbers, the result for k has a wrong number.
    """

    name = "qkv_rope"
    signature = (
        "fn(x, weight, *, q_heads, k_heads, cos, sin, layout, seq_format, positions=None, axes=None, offsets=0) "
        "-> (q, k, v)"
    )
    expresses = ALL - {"inverse", "padding"}  # a token without a position keeps its v
    in_place = False
    constant_tables = True
    autocasts = True
    seq_formats = ("bshd", "sbhd")

    def arguments(self, implementation, case):
        q, k = _native(implementation, case, pair=True)
        x = torch.cat([heads.flatten(-2) for heads in (q, k, -k)], dim=-1)
        weight = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
        options = super().arguments(implementation, case).keywords
        return Arguments((x, weight), (x, weight), options | {"q_heads": q.shape[-2], "k_heads": k.shape[-2]})

    def outputs(self, implementation, case, returned, arguments):
        x, rotary_dim, head_dim = arguments.inputs[0], case.rotary_dim, _head_dim(case)
        heads = [arguments.keywords[name] for name in ("q_heads", "k_heads", "k_heads")]
        expected = tuple((*x.shape[:-1], count, head_dim) for count in heads)
        got = tuple(getattr(y, "shape", None) for y in returned) if isinstance(returned, (tuple, list)) else ()
        if got != expected:
            raise Broken(f"the function, called as {self.signature}, returned shapes {got}, expected {expected}")
        q, k, v = returned
        given = x[..., sum(heads[:2]) * head_dim :].unflatten(-1, (heads[2], head_dim))
        k = k.where((v == given) | given.isnan(), k + (v - given))
        k = torch.cat((k[..., :rotary_dim], _Agreed.apply((2, -1), k[..., rotary_dim:], -v[..., rotary_dim:])), dim=-1)
        return tuple(to_bshd(y, implementation.format(case)) for y in (q, k)[: len(case.inputs)])

    def bad(self, implementation, case):
        yield from super().bad(implementation, case)
        good = self.translate(implementation, case)
        x, weight = good.positional
        yield "a weight with a row less", replace(good, positional=(x, weight[:-1]))


class _Agreed(torch.autograd.Function):
    """The number that all parts have, or else the number of the last part that differs from those before it.

    The gradient of each part is the gradient times its weight. The weights sum to 1, and no sum of some of them rounds.
    """

    @staticmethod
    def forward(ctx, weights, first, *others):
        ctx.weights = weights
        for other in others:
            first = torch.where(first == other, first, other)
        return first.clone()

    @staticmethod
    def backward(ctx, grad):
        return None, *(weight * grad for weight in ctx.weights)


def _heads_as_sequences(case: Case) -> Case:
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


class HuggingFace(Convention):
    """The convention of ``apply_rotary_pos_emb`` in transformers: a row of the tables for each token."""

    name = "huggingface"
    signature = "fn(q, k, cos, sin, unsqueeze_dim=1) -> (q, k)"
    expresses = ALL - {"packed", "shards", "padding", "axes"}
    pair = True
    looks_up = False
    partial = False
    narrow = True
    seq_formats = ("bhsd", "bshd")

    def arguments(self, implementation, case):
        q, k = tensors = _native(implementation, case, pair=True)
        positions = case.token_positions()
        columns = implementation.state.get("columns", implementation.layout)
        cos, sin = (join(table, table, columns) for table in _signed_tables(implementation, case, positions))
        options = {} if implementation.seq_format == "bhsd" else {"unsqueeze_dim": 2}
        return Arguments(tensors, (q, k, cos, sin), options)


class FlashAttention(Convention):
    """The convention of ``apply_rotary_emb`` in flash-attn: tables of all positions, and offsets of the sequences."""

    name = "flash_attn"
    signature = (
        "fn(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None) -> x"
    )
    expresses = frozenset({"inverse", "factor", "offset", "offsets per sequence", "packed", "padding"})
    in_place = None
    constant_tables = True  # its backward returns None for cos and sin

    def arguments(self, implementation, case):
        (x,) = tensors = _native(implementation, case)
        options: dict[str, Any] = {}
        if implementation.layout == "interleaved":
            options["interleaved"] = True
        if implementation.in_place:
            options["inplace"] = True
        if case.offsets != 0:
            options["seqlen_offsets"] = _offsets(implementation, case)
        if case.lengths is not None:
            options["cu_seqlens"] = _cu_seqlens(implementation, case.lengths)
            options["max_seqlen"] = max(case.lengths, default=0)
        return Arguments(tensors, (x, *_signed_tables(implementation, case, _rows(case))), options)


class TransformerEngine(Convention):
    """The convention of ``apply_rotary_pos_emb`` in Transformer Engine: float32 angles in place of tables."""

    name = "transformer_engine"
    signature = 'fn(t, freqs, tensor_format="sbhd", interleaved=False, cu_seqlens=None, cp_size=1, cp_rank=0) -> t'
    expresses = frozenset({"inverse", "offset", "positions", "negative", "packed", "padding", "shards"})
    computes_cosines = True
    seq_formats = ("sbhd", "bshd")

    def arguments(self, implementation, case):
        (t,) = tensors = _native(implementation, case)
        options = {}
        if implementation.format(case) != "sbhd":
            options["tensor_format"] = implementation.format(case)
        if implementation.layout == "interleaved":
            options["interleaved"] = True
        positions = case.shared_positions()
        if case.shard:
            options |= dict(zip(("cp_size", "cp_rank"), case.shard, strict=True))
            positions = torch.arange(case.shape[1] * case.shard[0])
        if case.lengths is not None:
            if case.offsets != 0:
                raise NotApplicable(f"{self.name}: its packed documents all start at position 0")
            options["cu_seqlens"] = _cu_seqlens(implementation, case.lengths)
            positions = torch.arange(max(case.lengths, default=0) + 3)
        angles = implementation.angles(positions, case.rotary_dim)
        freqs = join(angles, angles, implementation.layout)[:, None, None].to(implementation.device, torch.float32)
        return Arguments(tensors, (t, -freqs if case.inverse else freqs), options)

    def angle_error(self, angles, frequencies):
        # The caller passes the angles in float32.
        return abs(angles.astype(np.float64).astype(np.float32).astype(EXACT) - angles)


class DeepSpeed(Convention):
    """The convention of ``apply_rotary_pos_emb`` in DeepSpeed: one tensor, and tables that broadcast against it."""

    name = "deepspeed"
    signature = "fn(t, freqs_cos, freqs_sin) -> t"
    expresses = HuggingFace.expresses
    looks_up = False
    narrow = True
    seq_formats = ("sbhd", "bshd", "bhsd")

    def arguments(self, implementation, case):
        (t,) = tensors = _native(implementation, case)
        positions = case.token_positions() if _by_row(case) else case.shared_positions()[None]
        halves = _signed_tables(implementation, case, positions)
        tables = (join(table, table, implementation.layout)[:, :, None] for table in halves)
        tables = (from_bshd(table, implementation.seq_format) for table in tables)
        return Arguments(tensors, (t, *tables))


class VLLM(Convention):
    """The convention of ``rotary_embedding`` in vLLM, SGLang and FlashInfer: flat tokens, overwritten in place."""

    name = "vllm"
    signature = "fn(positions, query, key, head_size, cos_sin_cache, is_neox), in place"
    expresses = frozenset({"inverse", "factor", "offset", "offsets per sequence", "positions", "positions per batch",
                           "packed"})  # fmt: skip
    pair = True
    in_place = True
    differentiable = False
    narrow = True

    def arguments(self, implementation, case):
        try:
            query, key = tensors = tuple(x.view(-1, x.shape[2] * x.shape[3]) for x in _pair(case.inputs))
        except RuntimeError:
            reason = "the memory of the inputs cannot be viewed as [T, heads * head_size]"
            raise NotApplicable(f"{self.name}: {reason}") from None
        positions = case.token_positions().flatten().to(implementation.device)
        cache = torch.cat(_signed_tables(implementation, case, _rows(case)), dim=-1)
        head_size, is_neox = _head_dim(case), implementation.layout == "split_half"
        return Arguments(tensors, (positions, query, key, head_size, cache, is_neox))

    def outputs(self, implementation, case, returned, arguments):
        return tuple(y.view(x.shape) for x, y in zip(case.inputs, arguments.inputs, strict=False))


class ComplexNumbers(Convention):
    """The convention of Llama as Meta published it: pairs of features and tables are complex numbers."""

    name = "complex"
    signature = "fn(xq, xk, freqs_cis) -> (xq, xk)"
    expresses = frozenset({"inverse", "factor", "offset", "positions", "negative"})
    pair = True
    looks_up = False
    partial = False
    layouts = ("interleaved", "split_half")

    def arguments(self, implementation, case):
        q, k = tensors = _native(implementation, case, pair=True)
        cos, sin = _signed_tables(implementation, case, case.shared_positions())
        return Arguments(tensors, (q, k, torch.complex(cos, sin)))


class _OwnAngles(Convention):
    """A convention whose functions compute the angles in float32: the position times ``base ** (-2i/R)``."""

    computes_cosines = True
    partial = False
    narrow = True

    def angle_error(self, angles, frequencies):
        """Return the error ``(3 |ln f| + 4) u |p f|`` (rad) of the angle ``p f`` in float32 arithmetic.

        Three roundings each contribute ``u |ln f|``: the exponent, and, if f is an exponential, log(base) and the
        product of the two. The power (an ulp), a reciprocal and the product with p (a rounding each) contribute
        ``4 u``. A frequency ``f = 1`` is exact.
        """
        return np.where(frequencies == 1, 0, FLOAT32_UNIT * abs(angles) * (3 * abs(np.log(frequencies)) + 4))

    def _options(self, implementation: Implementation, case: Case) -> dict[str, Any]:
        """Return base and rotary_dim where they differ from the defaults and the function takes them."""
        wanted = {} if implementation.base == 10000.0 else {"base": implementation.base}
        if case.rotary_dim != _head_dim(case):
            wanted["rotary_dim"] = case.rotary_dim
        return {name: value for name, value in wanted.items() if accepts(implementation.function, name)}


class Module(_OwnAngles):
    """A module, or a class or function that makes one for a head size: q and k, without positions."""

    name = "module"
    signature = "fn(head_dim) -> module or a module; module(q, k) -> (q, k), tokens at 0, 1, 2, ..."
    pair = True
    seq_formats = ("bshd", "bhsd", "sbhd")

    def arguments(self, implementation, case):
        tensors = _native(implementation, case, pair=True)
        return Arguments(tensors, tensors)

    def callable(self, implementation, case):
        if isinstance(implementation.function, torch.nn.Module):
            return implementation.function
        key = (_head_dim(case), case.rotary_dim)
        if key not in implementation.state:
            options = self._options(implementation, case)
            made = call(implementation.function, Arguments((), (_head_dim(case),), options), "fn(head_dim)")
            implementation.state[key] = made.to(implementation.device)
        return implementation.state[key]

    def bad(self, implementation, case):
        good = self.translate(implementation, case)
        with implementation.surroundings.theirs():
            self.callable(implementation, case)  # makes the module, for the right head size
        yield "q and k of half the head size", replace(good, positional=tuple(x[..., ::2] for x in good.positional))


class Plain(_OwnAngles):
    """The shortest convention: a tensor and its positions."""

    name = "plain"
    signature = "fn(x, positions) -> x"
    expresses = frozenset({"inverse", "offset", "offsets per sequence", "positions", "positions per batch", "negative"})

    def arguments(self, implementation, case):
        (x,) = tensors = _native(implementation, case)
        positions = (case.token_positions() if _by_row(case) else case.shared_positions()).to(implementation.device)
        positions = -positions if case.inverse else positions
        return Arguments(tensors, (x, positions), self._options(implementation, case))

    def bad(self, implementation, case):
        good = self.translate(implementation, case)
        x, positions = good.positional
        yield "positions for one token fewer", replace(good, positional=(x, positions[:-1]))


class _FlatTokens(Convention):
    """A convention of functions that return the flat tokens of q and k."""

    pair = True

    def outputs(self, implementation, case, returned, arguments):
        if not isinstance(returned, (tuple, list)) or len(returned) < len(case.inputs):
            raise Broken(f"the function, called as {self.signature}, returned {type(returned).__name__}")
        results = tuple(zip(returned, case.inputs, strict=False))
        if any(not isinstance(y, torch.Tensor) or y.numel() != x.numel() for y, x in results):
            raise Broken(f"the function, called as {self.signature}, returned results of other shapes than q and k")
        return tuple(y.view(x.shape) for y, x in results)


class MRope(_FlatTokens):
    """The convention of M-RoPE: flat tokens, each with a position along every axis.

    Source of the terms: ``MRotaryEmbedding`` of vLLM and SGLang.
    """

    name = "mrope"
    signature = "fn(q, k, cos, sin, positions, mrope_section, mrope_interleaved) -> (q, k), positions [axes, T]"
    expresses = frozenset({"inverse", "factor", "offset", "offsets per sequence", "positions", "positions per batch",
                           "packed", "axes"})  # fmt: skip

    def arguments(self, implementation, case):
        q, k = tensors = tuple(x.flatten(0, 1) for x in _pair(case.inputs))
        section, positions = case.mrope_section, case.positions
        if section is None or positions is None:  # text: the positions along all axes are equal
            pairs = case.rotary_dim // 2
            section = pairs - 2 * (pairs // 3), pairs // 3, pairs // 3
            positions = case.token_positions().expand(len(section), -1, -1)
        positions = positions.flatten(1).to(implementation.device)
        tables = _signed_tables(implementation, case, _rows(case))
        return Arguments(tensors, (q, k, *tables, positions, section, case.mrope_interleaved))


class FlashInfer(_FlatTokens, _OwnAngles):
    """The convention of ``apply_rope_pos_ids`` in FlashInfer: flat tokens, and a position for each token.

    Source of the signature: flashinfer-python 0.7.2.post1, ``flashinfer/rope.py``.
    """

    name = "flashinfer"
    signature = "fn(q, k, pos_ids, rotary_dim=None, interleave=False, rope_scale=1, rope_theta=1e4) -> (q, k)"
    expresses = frozenset({"offset", "offsets per sequence", "positions", "positions per batch", "packed"})
    differentiable = False
    partial = True
    narrow = False

    def arguments(self, implementation, case):
        q, k = tensors = tuple(x.flatten(0, 1) for x in _pair(case.inputs))
        positions = case.token_positions().flatten().to(implementation.device, torch.int32)
        options: dict[str, Any] = {"interleave": implementation.layout == "interleaved"}
        if case.rotary_dim != _head_dim(case):
            options["rotary_dim"] = case.rotary_dim
        if implementation.base != 10000.0:
            options["rope_theta"] = implementation.base
        return Arguments(tensors, (q, k, positions), options)

    def bad(self, implementation, case):
        good = self.translate(implementation, case)
        q, k, positions = good.positional
        yield "positions for one token fewer", replace(good, positional=(q, k, positions[:-1]))


CONVENTIONS: dict[str, Convention] = {
    c.name: c
    for c in (Ropelab(), QKVRope(), AssembleMLA(), HuggingFace(), FlashAttention(), TransformerEngine(), DeepSpeed(),
              VLLM(), ComplexNumbers(), Module(), Plain(), FlashInfer(), MRope())
}  # fmt: skip
"""Name -> convention."""


def _pair(inputs: Tensors) -> Tensors:
    """Return q and k; where the case has a single tensor, k is a copy of it with memory of its own."""
    return inputs if len(inputs) == 2 else (inputs[0], inputs[0].detach().clone())


def _native(implementation: Implementation, case: Case, *, pair: bool = False) -> Tensors:
    """Return the inputs as views in the function's format; ``pair`` asks for q and k even of a single tensor."""
    inputs = _pair(case.inputs) if pair else case.inputs
    return tuple(from_bshd(x, implementation.format(case)) for x in inputs)


def _head_dim(case: Case) -> int:
    return case.inputs[0].shape[-1]


def _by_row(case: Case) -> bool:
    """Return whether each sequence of the batch has positions of its own."""
    return isinstance(case.offsets, tuple) or (case.positions is not None and case.positions.ndim > 1)


def _rows(case: Case) -> int:
    """Return the number of rows of a table: the rows that the case needs, and three to spare, as in a model."""
    positions = case.pair_positions() if _by_row(case) else case.shared_positions()
    used = positions[positions != NO_POSITION].abs()
    return max(used.tolist(), default=0) + 4


def _signed_tables(
    implementation: Implementation, case: Case, positions: torch.Tensor | int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tables of ``positions``, or of all positions below a number; the inverse has negated sines."""
    cos, sin = implementation.tables(case, positions)
    return cos, -sin if case.inverse else sin


def _offsets(implementation: Implementation, case: Case) -> int | torch.Tensor:
    if isinstance(case.offsets, int):
        return case.offsets
    return torch.tensor(case.offsets, dtype=torch.int32, device=implementation.device)


def _cu_seqlens(implementation: Implementation, lengths: tuple[int, ...]) -> torch.Tensor:
    ends = torch.tensor((0, *lengths)).cumsum(0)
    return ends.to(implementation.device, torch.int32)
