"""Calling conventions of rotations alone, each of which translates cases to and from the calls of a library."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ropelab.conformance.bounds import EXACT, FLOAT32_UNIT
from ropelab.conformance.case import CANNOT, Broken, Case, NotApplicable
from ropelab.conformance.convention import Arguments, Convention, accepts, call, first_parameter, required
from ropelab.conformance.implementation import Implementation
from ropelab.conformance.tensors import Tensors
from ropelab.kernels import NO_POSITION
from ropelab.layout.pairing import LAYOUTS, join
from ropelab.layout.seq_format import DENSE_FORMATS, from_bshd
from ropelab.positions.packed import PackedSequences, context_parallel_positions

ALL = frozenset(CANNOT) - {"interpolation"}


class Ropelab(Convention):
    """The convention of `ropelab.apply_rope`: tables of all positions, and every way to say which rows they take."""

    name = "ropelab"
    signature = (
        "fn(q, k=None, *, cos, sin, layout, seq_format, positions=None, axes=None, offsets=0, inverse=False, "
        "rotary_slice=None, inplace=False)"
    )
    expresses = ALL
    pair = True
    in_place: bool | None = None
    constant_tables: bool | None = False
    seq_formats: tuple[str, ...] = DENSE_FORMATS

    def arguments(self, implementation, case):
        tensors = native(implementation, case)
        cos, sin = implementation.tables(case, table_rows(case))
        options = {"cos": cos, "sin": sin, "layout": implementation.layout, "seq_format": implementation.format(case)}
        if options["seq_format"] == implementation.seq_format and not accepts(implementation.function, "seq_format"):
            del options["seq_format"]  # the function has one format
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
            cu_seqlens, offsets = cu_seqlens_of(implementation, case.lengths), offsets_of(implementation, case)
            packed = PackedSequences(cu_seqlens, case.shape[1], offsets=offsets, cp_size=size, cp_rank=rank)
            options["positions"] = packed.positions
        elif case.shard:
            seq_len = case.shape[1] * size
            options["positions"] = context_parallel_positions(seq_len, size, rank, device=implementation.device)
        elif case.offsets != 0:
            options["offsets"] = offsets_of(implementation, case)
        return Arguments(tensors, tensors, options)

    def by_feature(self, implementation, other, case):
        if self.name != Ropelab.name:
            return super().by_feature(implementation, other, case)
        if not accepts(implementation.function, "rotary_slice"):
            raise NotApplicable(f"{self.name}: the function has no argument 'rotary_slice'")
        if implementation.out_layout != implementation.layout:
            raise NotApplicable("the columns are in the order of the features, and the result has another order")
        first, second = (self.translate(one, case) for one in (implementation, other))
        pairs_of = {name: (first.keywords[name], second.keywords[name]) for name in ("cos", "sin")}
        tables = {name: join(*both, implementation.layout) for name, both in pairs_of.items()}
        return replace(first, keywords={**first.keywords, **tables, "rotary_slice": (0, case.rotary_dim)})


class HuggingFace(Convention):
    """The convention of ``apply_rotary_pos_emb`` in transformers: a row of the tables for each token."""

    name = "huggingface"
    signature = "fn(q, k, cos, sin, unsqueeze_dim=1) -> (q, k)"
    other_signatures = (
        "fn(q, k, cos, sin, position_ids, unsqueeze_dim=1) -> (q, k)",
        "fn(x, cos, sin, unsqueeze_dim=1) -> x",
    )
    expresses = ALL - {"packed", "shards", "padding", "axes"}
    pair = True
    looks_up = False
    partial = False
    narrow = True
    columns = (*LAYOUTS, "pair", "repeated")
    seq_formats = ("bhsd", "bshd")

    def arguments(self, implementation, case):
        q, k = tensors = native(implementation, case, pair=True)
        # Transformers makes one row of positions, [1, S], unless the sequences differ.
        shared = case.positions is not None and not by_row(case)
        positions = case.shared_positions()[None] if shared else case.token_positions()
        columns = self.column_layout(implementation)
        options: dict[str, Any] = {} if implementation.seq_format == "bhsd" else {"unsqueeze_dim": 2}
        if "position_ids" in required(implementation.function):  # Transformers before 4.38: the function looks up
            if (positions < 0).any():
                raise NotApplicable(f"{self.name}: position_ids that choose rows are not negative")
            options["position_ids"] = positions.to(implementation.device)
            tables = signed_tables(implementation, case, table_rows(case))
        else:
            tables = signed_tables(implementation, case, positions)
        cos, sin = (table if columns == "pair" else join(table, table, columns) for table in tables)
        return Arguments(tensors, (q, k, cos, sin), options)

    def callable(self, implementation, case):
        function = implementation.function
        if "k" not in (first := required(function)) and first[1:3] == ("cos", "sin"):  # one tensor, as in Gemma 3n
            return lambda q, k, *tables, **options: tuple(function(x, *tables, **options) for x in (q, k))
        return function


class FlashAttention(Convention):
    """The convention of ``apply_rotary_emb`` in flash-attn: tables of all positions, and offsets of the sequences."""

    name = "flash_attn"
    signature = (
        "fn(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None) -> x"
    )
    expresses = frozenset({"inverse", "factor", "offset", "offsets per sequence", "packed", "padding"})
    in_place = None
    constant_tables = True  # its backward returns None for cos and sin
    ends_with_documents = True

    def arguments(self, implementation, case):
        (x,) = tensors = native(implementation, case)
        options: dict[str, Any] = {}
        if implementation.layout == "interleaved":
            options["interleaved"] = True
        if implementation.in_place:
            options["inplace"] = True
        if case.offsets != 0:
            options["seqlen_offsets"] = offsets_of(implementation, case)
        if case.lengths is not None:
            options["cu_seqlens"] = cu_seqlens_of(implementation, case.lengths)
            options["max_seqlen"] = max(case.lengths, default=0)
        return Arguments(tensors, (x, *signed_tables(implementation, case, table_rows(case))), options)


class TransformerEngine(Convention):
    """The convention of ``apply_rotary_pos_emb`` in Transformer Engine: float32 angles in place of tables."""

    name = "transformer_engine"
    signature = 'fn(t, freqs, tensor_format="sbhd", interleaved=False, cu_seqlens=None, cp_size=1, cp_rank=0) -> t'
    expresses = frozenset({"inverse", "offset", "positions", "negative", "packed", "padding", "shards"})
    computes_cosines = True
    columns = ("repeated",)
    seq_formats = ("sbhd", "bshd")

    def arguments(self, implementation, case):
        (t,) = tensors = native(implementation, case)
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
            options["cu_seqlens"] = cu_seqlens_of(implementation, case.lengths)
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
    columns = ("repeated",)
    seq_formats = ("sbhd", "bshd", "bhsd")

    def arguments(self, implementation, case):
        (t,) = tensors = native(implementation, case)
        positions = case.token_positions() if by_row(case) else case.shared_positions()[None]
        halves = signed_tables(implementation, case, positions)
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
    sees_documents = False
    in_place = True
    differentiable = False
    narrow = True

    def arguments(self, implementation, case):
        try:
            query, key = tensors = tuple(x.view(-1, x.shape[2] * x.shape[3]) for x in as_pair(case.inputs))
        except RuntimeError:
            reason = "the memory of the inputs cannot be viewed as [T, heads * head_size]"
            raise NotApplicable(f"{self.name}: {reason}") from None
        positions = case.token_positions().flatten().to(implementation.device)
        cache = torch.cat(signed_tables(implementation, case, table_rows(case)), dim=-1)
        head_size, is_neox = features_of(case), implementation.layout == "split_half"
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
        q, k = tensors = native(implementation, case, pair=True)
        cos, sin = signed_tables(implementation, case, case.shared_positions())
        return Arguments(tensors, (q, k, torch.complex(cos, sin)))


class OwnAngles(Convention):
    """A convention whose functions compute the angles in float32: the position times ``base ** (-2i/R)``."""

    computes_cosines = own_tables = True
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
        if case.rotary_dim != features_of(case):
            wanted["rotary_dim"] = case.rotary_dim
        return {name: value for name, value in wanted.items() if accepts(implementation.function, name)}


class Module(OwnAngles):
    """A module, or a class or function that makes one for a head size: q and k, without positions.

    A class or function without parameters, or whose first parameter is the base, takes no head size.
    """

    name = "module"
    signature = "fn(head_dim) -> module, fn(base=10000) or a module; module(q, k) -> (q, k), tokens at 0, 1, 2, ..."
    pair = True
    seq_formats = ("bshd", "bhsd", "sbhd")

    def arguments(self, implementation, case):
        tensors = native(implementation, case, pair=True)
        return Arguments(tensors, tensors)

    def callable(self, implementation, case):
        if isinstance(implementation.function, torch.nn.Module):
            if "module" not in implementation.state:  # a copy has no memory of the calls of other laws
                implementation.state["module"] = _copied(implementation.function)
            return implementation.state["module"]
        key = (features_of(case), case.rotary_dim)
        if key not in implementation.state:
            arguments = self.making(implementation, case)
            form = "fn(head_dim)" if arguments.positional else "fn()"
            made = call(implementation.function, arguments, form)
            if not isinstance(made, torch.nn.Module):
                raise NotApplicable(
                    f"the function, called as {form}, returned {type(made).__name__}, expected a module"
                )
            implementation.state[key] = made.to(implementation.device)
        return implementation.state[key]

    def making(self, implementation, case):
        if isinstance(implementation.function, torch.nn.Module):
            return None
        given = () if first_parameter(implementation.function) in ("", "base") else (features_of(case),)
        return Arguments((), given, self._options(implementation, case))

    def bad(self, implementation, case):
        good = self.translate(implementation, case)
        with implementation.surroundings.theirs():
            self.callable(implementation, case)  # makes the module, for the right head size
        yield "q and k of half the head size", replace(good, positional=tuple(x[..., ::2] for x in good.positional))


def _copied(module: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a module, or the module itself if it cannot be copied."""
    try:
        return deepcopy(module)
    except Exception:
        return module


class Plain(OwnAngles):
    """The shortest convention: a tensor and its positions."""

    name = "plain"
    negates = True
    forms = ({"positions": "[B, S]"},)
    signature = "fn(x, positions) -> x"
    expresses = frozenset({"inverse", "offset", "offsets per sequence", "positions", "positions per batch", "negative"})

    def arguments(self, implementation, case):
        (x,) = tensors = native(implementation, case)
        rows = by_row(case) or "positions" in implementation.state
        positions = (case.token_positions() if rows else case.shared_positions()).to(implementation.device)
        positions = -positions if case.inverse else positions
        return Arguments(tensors, (x, positions), self._options(implementation, case))

    def bad(self, implementation, case):
        good = self.translate(implementation, case)
        x, positions = good.positional
        yield "positions for one token fewer", replace(good, positional=(x, positions[:-1]))


class _FlatTokens(Convention):
    """A convention of functions that return the flat tokens of q and k."""

    pair = True
    sees_documents = False

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
        q, k = tensors = tuple(x.flatten(0, 1) for x in as_pair(case.inputs))
        section, positions = case.mrope_section, case.positions
        if section is None or positions is None:  # text: the positions along all axes are equal
            pairs = case.rotary_dim // 2
            section = pairs - 2 * (pairs // 3), pairs // 3, pairs // 3
            positions = case.token_positions().expand(len(section), -1, -1)
        positions = positions.flatten(1).to(implementation.device)
        tables = signed_tables(implementation, case, table_rows(case))
        return Arguments(tensors, (q, k, *tables, positions, section, case.mrope_interleaved))


class GatheredMRope(MRope):
    """The convention of ``triton_mrope`` in vLLM: flat heads, and a row of the tables for each axis of a token.

    The last argument may be missing. Source of the signature: vLLM,
    ``model_executor/layers/rotary_embedding/mrope.py``.
    """

    name = "triton_mrope"
    signature = (
        "fn(q, k, cos, sin, mrope_section, head_size, rotary_dim, mrope_interleaved, is_neox_style) -> (q, k), "
        "q and k [T, H * D], cos and sin [axes, T, R/2]"
    )
    in_place: bool | None = None
    looks_up = False
    narrow = True  # vLLM converts its cache to the dtype of the queries

    def arguments(self, implementation, case):
        given = super().arguments(implementation, case)
        q, k, cos, sin, positions, section, turns = given.positional
        heads = tuple(x.flatten(1) for x in (q, k))
        rows = (table[positions.long()] for table in (cos, sin))
        options = {"is_neox_style": implementation.layout == "split_half"}
        if implementation.layout == "split_half" and not accepts(implementation.function, "is_neox_style"):
            options = {}  # the versions without this argument
        return Arguments(heads, (*heads, *rows, section, q.shape[-1], case.rotary_dim, turns), options)


class FlashInfer(_FlatTokens, OwnAngles):
    """The convention of ``apply_rope_pos_ids`` in FlashInfer: flat tokens, and a position for each token.

    Source of the signature: flashinfer-python 0.7.2.post1, ``flashinfer/rope.py``.
    """

    name = "flashinfer"
    signature = "fn(q, k, pos_ids, rotary_dim=None, interleave=False, rope_scale=1, rope_theta=1e4) -> (q, k)"
    expresses = frozenset({"interpolation", "offset", "offsets per sequence", "positions", "positions per batch",
                           "packed"})  # fmt: skip
    differentiable = False
    partial = True
    narrow = False

    def arguments(self, implementation, case):
        q, k = tensors = tuple(x.flatten(0, 1) for x in as_pair(case.inputs))
        positions = case.token_positions().flatten().to(implementation.device, torch.int32)
        options: dict[str, Any] = {"interleave": implementation.layout == "interleaved"}
        if case.rotary_dim != features_of(case):
            options["rotary_dim"] = case.rotary_dim
        if implementation.base != 10000.0:
            options["rope_theta"] = implementation.base
        if case.interpolation != 1:
            options["rope_scale"] = case.interpolation
        return Arguments(tensors, (q, k, positions), options)

    def bad(self, implementation, case):
        good = self.translate(implementation, case)
        q, k, positions = good.positional
        yield "positions for one token fewer", replace(good, positional=(q, k, positions[:-1]))


def as_pair(inputs: Tensors) -> Tensors:
    """Return q and k; where the case has a single tensor, k is a copy of it with memory of its own."""
    return inputs if len(inputs) == 2 else (inputs[0], inputs[0].detach().clone())


def native(implementation: Implementation, case: Case, *, pair: bool = False) -> Tensors:
    """Return the inputs as views in the function's format; ``pair`` asks for q and k even of a single tensor."""
    inputs = as_pair(case.inputs) if pair else case.inputs
    return tuple(from_bshd(x, implementation.format(case)) for x in inputs)


def features_of(case: Case) -> int:
    """Return the number of features of a head."""
    return case.inputs[0].shape[-1]


def by_row(case: Case) -> bool:
    """Return whether each sequence of the batch has positions of its own."""
    return isinstance(case.offsets, tuple) or (case.positions is not None and case.positions.ndim > 1)


def table_rows(case: Case) -> int:
    """Return the number of rows of a table: the rows that the case needs, and some to spare, as in a model."""
    positions = case.pair_positions() if by_row(case) else case.shared_positions()
    used = positions[positions != NO_POSITION].abs()
    return max(used.tolist(), default=0) + 1 + case.spare_rows


def signed_tables(
    implementation: Implementation, case: Case, positions: torch.Tensor | int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tables of ``positions``, or of all positions below a number; the inverse has negated sines."""
    cos, sin = implementation.tables(case, positions)
    return cos, -sin if case.inverse else sin


def offsets_of(implementation: Implementation, case: Case) -> int | torch.Tensor:
    """Return the offsets of the case as one number, or int32 with a number for each sequence or document."""
    if isinstance(case.offsets, int):
        return case.offsets
    return torch.tensor(case.offsets, dtype=torch.int32, device=implementation.device)


def cu_seqlens_of(implementation: Implementation, lengths: tuple[int, ...]) -> torch.Tensor:
    """Return where packed documents begin and end, int32 ``[documents + 1]``."""
    ends = torch.tensor((0, *lengths)).cumsum(0)
    return ends.to(implementation.device, torch.int32)
