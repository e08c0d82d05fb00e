"""A right implementation for each convention, in plain torch; faults add a mistake to it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ropelab import PackedSequences, context_parallel_positions, mrope_axes, reference
from ropelab.angles.frequencies import inverse_frequencies
from ropelab.kernels import NO_POSITION
from ropelab.layout.pairing import join, pairs
from ropelab.layout.seq_format import from_bshd, to_bshd

Map = Callable[[torch.Tensor], torch.Tensor]
Table = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""A column for each pair; or the columns of the first features of pairs, and those of the second."""


def turn(x: torch.Tensor, cos: Table, sin: Table, layout: str = "split_half", out_layout: str | None = None):
    """Rotate the first R features of ``x [..., D]``; ``cos, sin [..., R/2]`` broadcast against the pairs."""
    (c0, c1), (s0, s1) = (table if isinstance(table, tuple) else (table, table) for table in (cos, sin))
    rotary_dim = 2 * c0.shape[-1]
    wide = torch.promote_types(torch.promote_types(x.dtype, c0.dtype), torch.float32)
    x0, x1 = pairs(x[..., :rotary_dim].to(wide), layout)
    y = join(x0 * c0 - x1 * s0, x1 * c1 + x0 * s1, out_layout or layout)
    return torch.cat((y.to(x.dtype), x[..., rotary_dim:]), dim=-1)


class _WithBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, forward, backward):
        ctx.backward_map = backward
        return forward(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.backward_map(grad), None, None


def with_backward(x: torch.Tensor, forward: Map, backward: Map) -> torch.Tensor:
    """Return ``forward(x)`` with ``backward`` as its gradient, right or wrong: a function of the cotangent."""
    return _WithBackward.apply(x, forward, backward)


def interleaved_name(interleaved: bool) -> str:
    """Return the layout that the flag ``interleaved`` means."""
    return "interleaved" if interleaved else "split_half"


# --------------------------------------------------------------------------- a function for each convention


def ropelab(q, k=None, *, inplace=False, **options):
    """Do the work of `ropelab.apply_rope` in float64."""
    rotated = (reference.rotate(x, **options).to(x.dtype) for x in (q, k) if x is not None)
    results = tuple(x.copy_(y) if inplace else y for x, y in zip((q, k), rotated, strict=False))
    return results[0] if k is None else results


def qkv_rope(x, weight, *, q_heads, k_heads, **options):
    """Do the work of `ropelab.qkv_rope` with a rotation in float64."""
    heads = torch.nn.functional.linear(x, weight).unflatten(-1, (q_heads + 2 * k_heads, -1))
    q, k, v = heads.split((q_heads, k_heads, k_heads), dim=-2)
    return *(reference.rotate(y, **options).to(y.dtype) for y in (q, k)), v


def assemble_mla_kv(kv, k_pe, nope_dim, **options):
    """Do the work of `ropelab.assemble_mla_kv` with a rotation in float64; the value is a view of ``kv``."""
    k, turned = kv[..., :nope_dim], reference.rotate(k_pe, **options).to(k_pe.dtype)
    return torch.cat((k, turned.expand(*k.shape[:-1], -1)), dim=-1), kv[..., nope_dim:]


def rope_posfreq_epi(x, weight, pos, freq):
    """Return ``D``: the product of ``x [T, K]`` and ``weight [K, N]``, rotated by angles that it computes in float64.

    Args:
        pos: float32 ``[1, T]``. freq: float32 ``[1, N]``, two numbers for the turns per position of each pair.
    """
    angles = 2 * math.pi * freq.double().unflatten(-1, (-1, 2)).sum(-1) * pos.double().T
    return {"D": turn(x @ weight, angles.cos(), angles.sin(), "interleaved")}


def fused_apply_mla_rope_for_q(
    t, cos, sin, qk_head_dim, emb_dim, cu_seqlens_q=None, cp_rank=0, cp_size=1, rotary_interleaved=False
):
    """Rotate the last ``emb_dim`` features of ``t``; adjacent pairs become halves.

    Args:
        t: ``[S, B, H, D]``, or ``[T, H, D]`` with ``cu_seqlens_q``.
        cos, sin: ``[P, 1, 1, emb_dim]``.
    """
    nope, turned = t.split((qk_head_dim, emb_dim), dim=-1)
    return torch.cat((nope, _mla_turned(turned, cos, sin, cu_seqlens_q, cp_rank, cp_size)), dim=-1)


def fused_apply_mla_rope_for_kv(
    kv, k_pos_emb, cos, sin, emb_dim, k_dim, v_dim, cu_seqlens_kv=None, cp_rank=0, cp_size=1, rotary_interleaved=False
):
    """Split ``kv`` into key and value, and put the rotated ``k_pos_emb`` behind every head of the key."""
    k, v = kv.split((k_dim, v_dim), dim=-1)
    turned = _mla_turned(k_pos_emb, cos, sin, cu_seqlens_kv, cp_rank, cp_size)
    return torch.cat((k, turned.expand(*k.shape[:-1], -1)), dim=-1), v


def _mla_turned(x, cos, sin, cu_seqlens, cp_rank, cp_size):
    """Rotate adjacent pairs of ``x``, and write them as halves."""
    if cu_seqlens is None:
        rows = torch.arange(len(x), device=x.device)[:, None]
    else:
        rows = PackedSequences(cu_seqlens, len(x), cp_size=cp_size, cp_rank=cp_rank).positions
    cos, sin = (pairs(table[:, 0, 0][rows][..., None, :], "split_half") for table in (cos, sin))
    return turn(x, cos, sin, "interleaved", "split_half")


def huggingface(q, k, cos, sin, unsqueeze_dim=1, layout="split_half", out_layout=None):
    """Rotate q and k by tables with a row for each token.

    Args:
        q, k: ``[B, H, S, D]``, or ``[B, S, H, D]`` with ``unsqueeze_dim=2``.
        cos, sin: ``[B, S, R]``, with a column for each feature.
        layout, out_layout: not part of the convention, where a function has a fixed layout.
    """
    cos, sin = (pairs(table.unsqueeze(unsqueeze_dim), layout) for table in (cos, sin))
    return turn(q, cos, sin, layout, out_layout), turn(k, cos, sin, layout, out_layout)


def deepspeed(t, freqs_cos, freqs_sin):
    """Rotate ``t [..., D]`` by tables ``[..., R]`` that broadcast against it, with a column for each feature."""
    return turn(t, pairs(freqs_cos, "split_half"), pairs(freqs_sin, "split_half"))


def mrope(q, k, cos, sin, positions, mrope_section, mrope_interleaved, layout="split_half"):
    """Rotate tokens ``[T, H, D]`` by positions ``[axes, T]``; each pair reads the position along its axis."""
    axes = mrope_axes(mrope_section, mrope_interleaved=mrope_interleaved)
    rows, columns = positions.long()[list(axes)].T, range(len(axes))
    cos, sin = (table[rows, columns][:, None] for table in (cos, sin))
    return turn(q, cos, sin, layout), turn(k, cos, sin, layout)


def triton_mrope(
    q, k, cos, sin, mrope_section, head_size, rotary_dim, mrope_interleaved, is_neox_style=True
):  # fmt: skip
    """Rotate ``q, k [T, H * D]`` by ``cos, sin [axes, T, R/2]``; each pair reads the row of its axis."""
    axes = mrope_axes(mrope_section, mrope_interleaved=mrope_interleaved)
    cos, sin = (table[list(axes), :, range(len(axes))].T[:, None] for table in (cos, sin))
    layout = interleaved_name(not is_neox_style)
    return tuple(turn(x.unflatten(-1, (-1, head_size)), cos, sin, layout).flatten(1) for x in (q, k))


def flash_positions(x, seqlen_offsets=0, cu_seqlens=None):
    """Return the position of every token of ``x``: ``[B, S]``, or ``[T]`` with ``cu_seqlens``."""
    if cu_seqlens is not None:
        return PackedSequences(cu_seqlens, len(x), offsets=seqlen_offsets).positions
    starts = torch.as_tensor(seqlen_offsets, device=x.device).expand(len(x))
    return starts[:, None] + torch.arange(x.shape[1], device=x.device)


def turn_at(x, cos, sin, positions, layout="split_half"):
    """Rotate ``x [..., H, D]`` by the rows ``positions [...]`` of tables ``cos, sin [P, R/2]``.

    The result is 0 where there is no position.
    """
    rows = positions.long().clamp(min=0)
    both = (table if isinstance(table, tuple) else (table, table) for table in (cos, sin))
    c, s = ((first[rows][..., None, :], second[rows][..., None, :]) for first, second in both)
    y = turn(x, c, s, layout)
    return y.masked_fill((positions == NO_POSITION)[..., None, None], 0)


def flash_attn(
    x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None, positions=None
):
    """Rotate ``x`` by tables of all positions.

    Args:
        x: ``[B, S, H, D]``, or ``[T, H, D]`` with ``cu_seqlens``.
        cos, sin: ``[P, R/2]``.
        positions: not part of the convention; it replaces the positions that follow from the other arguments.
    """
    if positions is None:
        positions = flash_positions(x, seqlen_offsets, cu_seqlens)
    y = turn_at(x, cos, sin, positions, interleaved_name(interleaved))
    return x.copy_(y) if inplace else y


def te_positions(t, tensor_format, cu_seqlens=None, cp_size=1, cp_rank=0, chunks="dual"):
    """Return the position of every token of ``t``: ``[S]``, or ``[T]`` for the format thd."""
    if tensor_format == "thd":
        return PackedSequences(cu_seqlens, len(t), cp_size=cp_size, cp_rank=cp_rank, chunks=chunks).positions
    seq_len = t.shape[tensor_format.index("s")]
    return context_parallel_positions(seq_len * cp_size, cp_size, cp_rank, chunks, t.device)


def te_tables(freqs: torch.Tensor, interleaved: bool) -> tuple[Table, Table]:
    """Return cos and sin, for both features of a pair ``[S, R/2]``, of angles ``[S, 1, 1, R]``."""
    angles = freqs.flatten(1)
    cos, sin = (pairs(table, interleaved_name(interleaved)) for table in (angles.cos(), angles.sin()))
    return cos, sin


def transformer_engine(
    t, freqs, tensor_format="sbhd", interleaved=False, cu_seqlens=None, cp_size=1, cp_rank=0, positions=None,
    tables=None,
):  # fmt: skip
    """Rotate ``t`` by angles.

    Args:
        t: a tensor in the format ``tensor_format``.
        freqs: the angles ``[S, 1, 1, R]`` in rad.
        positions, tables: not part of the convention; they replace what follows from the other arguments.
    """
    if positions is None:
        positions = te_positions(t, tensor_format, cu_seqlens, cp_size, cp_rank)
    cos, sin = te_tables(freqs, interleaved) if tables is None else tables
    y = turn_at(to_bshd(t, tensor_format), cos, sin, positions, interleaved_name(interleaved))
    return from_bshd(y, tensor_format)


def vllm(positions, query, key, head_size, cos_sin_cache, is_neox):
    """Overwrite ``query, key [T, H * D]``; ``cos_sin_cache [P, R]`` has the cosines of the pairs, then their sines."""
    cos, sin = cos_sin_cache.chunk(2, dim=-1)
    for x in (query, key):
        heads = x.unflatten(-1, (-1, head_size))
        heads.copy_(turn_at(heads, cos, sin, positions, interleaved_name(not is_neox)))
    return query, key


def flashinfer(q, k, pos_ids, rotary_dim=None, interleave=False, rope_scale=1, rope_theta=1e4):
    """Rotate ``q, k [T, H, D]`` at ``pos_ids [T]``, by angles that it computes in float64."""
    if len(pos_ids) != len(q):
        raise ValueError(f"pos_ids: expected {len(q)} positions, got {len(pos_ids)}")
    frequencies = inverse_frequencies(rotary_dim or q.shape[-1], rope_theta).to(q.device)
    angles = (pos_ids.double() / rope_scale)[:, None, None] * frequencies
    return tuple(turn(x, angles.cos(), angles.sin(), interleaved_name(interleave)) for x in (q, k))


def complex_numbers(xq, xk, freqs_cis):
    """Multiply ``xq, xk [B, S, H, D]``, whose adjacent features form complex numbers, by ``freqs_cis [S, D/2]``."""
    turns = freqs_cis[:, None]

    def one(x):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        z = torch.view_as_complex(wide.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(z * turns).flatten(-2).to(x.dtype)

    return one(xq), one(xk)


def plain(x, positions, base: float = 10000.0):
    """Rotate ``x [B, S, H, D]`` at ``positions [S]`` or ``[B, S]``, by angles that it computes in float64."""
    frequencies = inverse_frequencies(x.shape[-1], base).to(x.device)
    return turn_by(x, positions.double()[..., None] * frequencies)


def turn_by(x, angles):
    """Rotate ``x [B, S, H, D]`` by ``angles [..., S, R/2]`` in rad."""
    angles = angles[..., None, :]
    return turn(x, angles.cos(), angles.sin())


class Module(torch.nn.Module):
    """A module that rotates ``q, k [B, S, H, D]`` at the positions from 0 on."""

    inv_freq: torch.Tensor

    def __init__(self, head_dim: int, rotary_dim: int | None = None, base: float = 10000.0):
        super().__init__()
        self.register_buffer("inv_freq", inverse_frequencies(rotary_dim or head_dim, base), persistent=False)

    def angles(self, seq_len: int, device) -> torch.Tensor:
        """Return the angles ``[S, R/2]`` in rad of the positions from 0 on."""
        return torch.arange(seq_len, device=device, dtype=self.inv_freq.dtype)[:, None] * self.inv_freq

    def forward(self, q, k):
        angles = self.angles(q.shape[1], q.device)
        return turn_by(q, angles), turn_by(k, angles)
