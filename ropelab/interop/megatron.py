"""Megatron-LM's rotations over ropelab's kernels, and a patch that makes Megatron-LM use the kernels.

The functions have the names and arguments of megatron-core 0.16.1 (``core/fusions/fused_mla_yarn_rope_apply.py``,
``core/extensions/transformer_engine.py``, ``core/models/common/embeddings/rope_utils.py``) and of the main branch at
commit d98e8a64. The functions differ from Megatron-LM's in these points:

- The arithmetic is in float32 or wider, and a result is rounded once. Megatron-LM's unfused functions round cosines,
  sines and each product to the dtype of ``t``.
- One launch finds the sequence of every packed token. Each program of Megatron-LM's kernels searches ``cu_seqlens``.
- Tokens past ``cu_seqlens[-1]`` become zeros, and get zero gradients.
- In place, all features of a head are read before any of them is written.
- ``apply_rotary_pos_emb`` serves attention factors, batches of M-RoPE, the inverse and interleaved packed tokens in one
  launch. Megatron-LM computes the first three in separate operations, and 0.16.1 rotates packed tokens as halves.

Tables of the MLA functions have a column for each feature. The functions read the first half of the columns, because
Megatron-LM makes both halves alike.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import torch

from ropelab.arguments import DTYPES, POSITION_DTYPES, check_tensor, dtype_name, flag, integer, shown, single, tensor
from ropelab.call.refusals import in_words
from ropelab.call.traced import one_node
from ropelab.interop.broadcast import check_tables, rotate_in_one_launch
from ropelab.interop.patch import Patch, Place, places
from ropelab.latent_attention import assemble_mla_kv, rotate_mla_query
from ropelab.layout.pairing import Layout
from ropelab.positions.packed import PackedSequences
from ropelab.rope import apply_rope

# ------------------------------------------------------------------------------------------ multi-head latent attention


@one_node
def fused_mla_rope_inplace(
    t: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    nope_dim: int,
    emb_dim: int,
    cu_seqlens_q: torch.Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
    inverse: bool = False,
    remove_interleaving: bool = False,
    position_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate the last ``emb_dim`` features of every head in place; the backward overwrites the gradient.

    Args:
        t: ``[s, b, h, nope_dim + emb_dim]``, or ``[t, h, nope_dim + emb_dim]`` with ``cu_seqlens_q``. Pairs are
            adjacent. The caller gives ``t`` up: see ``consume`` of `ropelab.rotate_mla_query`.
        cos, sin: ``[positions, 1, 1, emb_dim]``; an attention factor is part of them.
        nope_dim, emb_dim: the number of features of a head that do not rotate, and the number that rotate.
        cu_seqlens_q: int32 ``[n + 1]``: where the sequences begin and end in the unsharded tokens.
        cp_rank, cp_size: the number of this rank, and of the ranks that share every sequence; for packed tokens.
        rotary_interleaved: must be False, as in Megatron-LM.
        inverse: rotate by minus the angles.
        remove_interleaving: write adjacent pairs; by default halves.
        position_ids: ``[t]``, the rows of the tables for packed tokens, in place of the rows that ``cu_seqlens_q``
            gives.

    Raises:
        TypeError, ValueError: as `ropelab.rotate_mla_query`, in the words of these arguments.
    """
    where = _mla_where("t", t, cos, sin, emb_dim, {"cu_seqlens_q": cu_seqlens_q}, cp_rank, cp_size, rotary_interleaved,
                       remove_interleaving, position_ids)  # fmt: skip
    options = where | {"inverse": inverse, "inplace": True, "consume": True}
    return _rotated_query(t, nope_dim, emb_dim, options, position_ids)


@one_node
def fused_mla_rope_out_of_place(
    t: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    nope_dim: int,
    emb_dim: int,
    cu_seqlens_q: torch.Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
    inverse: bool = False,
    remove_interleaving: bool = False,
    position_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """`fused_mla_rope_inplace` into a new tensor; ``t`` and the gradient stay as they are."""
    where = _mla_where("t", t, cos, sin, emb_dim, {"cu_seqlens_q": cu_seqlens_q}, cp_rank, cp_size, rotary_interleaved,
                       remove_interleaving, position_ids)  # fmt: skip
    return _rotated_query(t, nope_dim, emb_dim, where | {"inverse": inverse}, position_ids)


@one_node
def fused_mla_rope_kv_split(
    kv: torch.Tensor,
    k_pos_emb: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    emb_dim: int,
    k_dim: int,
    v_dim: int,
    cu_seqlens_kv: torch.Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
    remove_interleaving: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Split kv into key and value, and put the rotated ``k_pos_emb`` behind every head of the key.

    Args:
        kv: ``[s, b, h, k_dim + v_dim]``, or ``[t, h, k_dim + v_dim]`` with ``cu_seqlens_kv``.
        k_pos_emb: ``[s, b, 1, emb_dim]`` or ``[t, 1, emb_dim]``. Pairs are adjacent.
        k_dim, v_dim: the number of features of a head of the key that do not rotate, and of a head of the value.
        cos, sin, emb_dim, cu_seqlens_kv, cp_rank, cp_size, rotary_interleaved, remove_interleaving: as for
            `fused_mla_rope_inplace`.

    Returns:
        key ``[..., h, k_dim + emb_dim]`` and value ``[..., h, v_dim]``, new and contiguous. Megatron-LM's attention
        makes both contiguous because of TransformerEngine, so a view of kv would cost a copy there.

    Raises:
        TypeError, ValueError: as `ropelab.assemble_mla_kv`, in the words of these arguments.
    """
    where = _mla_where("kv", kv, cos, sin, emb_dim, {"cu_seqlens_kv": cu_seqlens_kv}, cp_rank, cp_size,
                       rotary_interleaved, remove_interleaving)  # fmt: skip
    _check_width("kv", kv, k_dim=k_dim, v_dim=v_dim)
    _check_width("k_pos_emb", k_pos_emb, emb_dim=emb_dim)
    words = {"q": "kv", "k_pe": "k_pos_emb", "nope_dim": "k_dim", "positions": "cu_seqlens_kv"}
    return in_words(assemble_mla_kv, **words)(kv, k_pos_emb, k_dim, **where)


@one_node
def fused_apply_mla_rope_for_q(
    t: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    qk_head_dim: int,
    emb_dim: int,
    cu_seqlens_q: torch.Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
) -> torch.Tensor:
    """`fused_mla_rope_inplace` by the name and with the arguments of megatron-core 0.16.1."""
    nope_dim = integer("qk_head_dim", qk_head_dim, at_least=0)
    return fused_mla_rope_inplace(t, cos, sin, nope_dim, emb_dim, cu_seqlens_q, cp_rank, cp_size, rotary_interleaved)


@one_node
def fused_apply_mla_rope_for_kv(
    kv: torch.Tensor,
    k_pos_emb: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    emb_dim: int,
    k_dim: int,
    v_dim: int,
    cu_seqlens_kv: torch.Tensor | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    rotary_interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fused_mla_rope_kv_split` by the name and with the arguments of megatron-core 0.16.1."""
    sizes = emb_dim, k_dim, v_dim
    return fused_mla_rope_kv_split(kv, k_pos_emb, cos, sin, *sizes, cu_seqlens_kv, cp_rank, cp_size, rotary_interleaved)


def _mla_where(
    name, t, cos, sin, emb_dim, packed, cp_rank, cp_size, rotary_interleaved, remove_interleaving, position_ids=None
) -> dict[str, Any]:
    """The arguments of ropelab's functions that say where the tokens are and how they turn.

    Args:
        name: the name of ``t``, for messages.
        packed: maps the name of the argument with the sequences' ends to its value.
    """
    [(cu_name, cu_seqlens)] = packed.items()
    cp_size = integer("cp_size", cp_size, at_least=1)
    cp_rank = integer("cp_rank", cp_rank, at_least=0, below=cp_size)
    if flag("rotary_interleaved", rotary_interleaved):
        raise ValueError("rotary_interleaved: expected False, as in Megatron-LM, got True")
    pairs = integer("emb_dim", emb_dim, at_least=2) // 2
    tables = {}
    for of_table, table in (("cos", cos), ("sin", sin)):
        if tensor(of_table, table).ndim != 4 or table.shape[1:] != (1, 1, emb_dim):
            raise ValueError(f"{of_table}: expected shape [positions, 1, 1, {emb_dim}], got {tuple(table.shape)}")
        tables[of_table] = table[:, 0, 0, :pairs]
    where = tables | {"layout": "interleaved", "seq_format": "sbhd" if cu_seqlens is None else "thd"}
    where["out_layout"] = "interleaved" if flag("remove_interleaving", remove_interleaving) else "split_half"
    if position_ids is not None:
        if cu_seqlens is None:
            raise ValueError(f"position_ids: expected None without {cu_name}, as in Megatron-LM, got a tensor")
        where["positions"] = position_ids
    elif cu_seqlens is not None:
        where["positions"] = _packed_positions(name, t, cu_name, cu_seqlens, cp_size, cp_rank)
    return where


def _rotated_query(t: torch.Tensor, nope_dim: int, emb_dim: int, options: dict[str, Any], position_ids) -> torch.Tensor:
    _check_width("t", t, nope_dim=nope_dim, emb_dim=emb_dim)
    positions = "cu_seqlens_q" if position_ids is None else "position_ids"
    return in_words(rotate_mla_query, q="t", positions=positions)(t, nope_dim, **options)


def _packed_positions(
    name: str, t: torch.Tensor, cu_name: str, cu_seqlens: torch.Tensor, cp_size: int, cp_rank: int, offsets=0
) -> torch.Tensor:
    """The positions of the packed tokens ``t``; errors have the names of ``t`` and ``cu_seqlens``."""
    check_tensor(name, t, (3,), "[tokens, heads, features]")
    packed = in_words(PackedSequences, cu_seqlens=cu_name)
    return packed(cu_seqlens, len(t), cp_size=cp_size, cp_rank=cp_rank, offsets=offsets).positions


def _check_width(name: str, x: torch.Tensor, **sizes: int) -> None:
    """Raise ValueError unless the last axis of ``x`` has the sum of ``sizes``."""
    width = sum(integer(key, size, at_least=0) for key, size in sizes.items())
    if not tensor(name, x).ndim or x.shape[-1] != width:
        raise ValueError(f"{name}: expected heads of {' + '.join(sizes)} = {width} features, got {tuple(x.shape)}")


# ------------------------------------------------------------------------------------------------ angles, not tables


@one_node
def fused_apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    transpose_output_memory: bool = False,
    interleaved: bool = False,
    *,
    mscale: float = 1.0,
    inverse: bool = False,
) -> torch.Tensor:
    """Rotate the first ``r`` features of every head by angles.

    Args:
        t: ``[s, b, h, d]``, any strides.
        freqs: ``[s, 1, 1, r]``, or ``[s, b, 1, r]`` for M-RoPE: angles in rad, one for each feature.
        transpose_output_memory: has no effect, as in Megatron-LM.
        interleaved: features ``(2i, 2i + 1)`` form a pair; by default ``(i, i + r/2)``.
        mscale: a positive factor of the cosines and sines.
        inverse: rotate by minus the angles.

    Returns:
        A new, contiguous tensor of the shape and dtype of ``t``.

    Raises:
        TypeError, ValueError: as `ropelab.apply_rope`, in the words of these arguments.
    """
    flag("transpose_output_memory", transpose_output_memory)
    layout: Layout = "interleaved" if flag("interleaved", interleaved) else "split_half"
    return _rotated(t, freqs, layout, layout, mscale, inverse)


@one_node
def fused_apply_rotary_pos_emb_thd(
    t: torch.Tensor,
    cu_seqlens: torch.Tensor,
    freqs: torch.Tensor,
    cp_size: int = 1,
    cp_rank: int = 0,
    interleaved: bool = False,
    *,
    mscale: float = 1.0,
    inverse: bool = False,
) -> torch.Tensor:
    """`fused_apply_rotary_pos_emb` of packed tokens; each sequence begins at the first row of ``freqs``.

    Args:
        t: ``[t, h, d]``.
        cu_seqlens: int32 ``[n + 1]``: where the sequences begin and end in the unsharded tokens.
        freqs: ``[positions, 1, 1, r]``.
        cp_size, cp_rank: the number of ranks that share every sequence, and the number of this rank.
        interleaved, mscale, inverse: as for `fused_apply_rotary_pos_emb`.
    """
    layout: Layout = "interleaved" if flag("interleaved", interleaved) else "split_half"
    positions = _packed_positions("t", t, "cu_seqlens", cu_seqlens, cp_size, cp_rank)
    return _rotated_packed(t, freqs, positions, layout, layout, mscale, inverse)


def apply_rotary_pos_emb(
    t: torch.Tensor,
    freqs: torch.Tensor,
    config: Any,
    cu_seqlens: torch.Tensor | None = None,
    mscale: float = 1.0,
    cp_group: Any = None,
    mla_rotary_interleaved: bool | None = None,
    inverse: bool = False,
    mla_output_remove_interleaving: bool = False,
    max_seqlen: int | None = None,
) -> torch.Tensor:
    """Rotate as the function of this name in ``rope_utils``, in one launch.

    Args:
        t: ``[s, b, h, d]``, or ``[t, h, d]`` with ``cu_seqlens``.
        freqs: angles: ``[s, 1 or b, 1, r]``, or ``[positions, 1, 1, r]`` with ``cu_seqlens``. Packed tokens have a row
            each if there are as many rows as unsharded tokens or, with ``max_seqlen``, more than ``max_seqlen``.
        config: ``rotary_interleaved``, ``multi_latent_attention`` and ``apply_rope_fusion`` are read.
        cu_seqlens, mscale, inverse: as for `fused_apply_rotary_pos_emb_thd`.
        cp_group: the group of the ranks that share every sequence; by default the group of Megatron-LM.
        mla_rotary_interleaved: read adjacent pairs and write halves; by default ``config.multi_latent_attention``.
        mla_output_remove_interleaving: write adjacent pairs where ``mla_rotary_interleaved`` reads them.
        max_seqlen: the tokens of the longest sequence. Without it the host waits for ``cu_seqlens``, unless
            ``config.apply_rope_fusion``: then every sequence begins at the first row, as in Megatron-LM.
    """
    if mla_rotary_interleaved is None:
        mla = _of_config(config, "multi_latent_attention")
    else:
        mla = flag("mla_rotary_interleaved", mla_rotary_interleaved)
    layout: Layout = "interleaved" if _of_config(config, "rotary_interleaved") or mla else "split_half"
    out_layout = layout
    if not flag("mla_output_remove_interleaving", mla_output_remove_interleaving) and mla:
        out_layout = "split_half"
    how = {"layout": layout, "out_layout": out_layout, "mscale": mscale, "inverse": inverse, "halves": mla}
    if cu_seqlens is None:
        return _rotated_as_configured(t, freqs, **how)
    if cp_group is None:
        cp_group = importlib.import_module("megatron.core.parallel_state").get_context_parallel_group()
    waits = max_seqlen is None and not _of_config(config, "apply_rope_fusion")
    return _rotated_as_configured(t, freqs, cu_seqlens, max_seqlen, waits, *_size_and_rank(cp_group), **how)


@one_node
def _rotated_as_configured(t, freqs, cu_seqlens=None, max_seqlen=None, waits=False, cp_size=1, cp_rank=0, **how):
    """`apply_rotary_pos_emb` without the configuration and the group of processes, which no node of torch.fx holds."""
    if cu_seqlens is None:
        return _rotated(t, freqs, **how)
    check_tensor("freqs", freqs, (4,), "[positions, 1, 1, r]")
    check_tensor("cu_seqlens", cu_seqlens, (1,), "[sequences + 1]", POSITION_DTYPES)
    offsets: int | torch.Tensor = 0
    if max_seqlen is not None:
        offsets = cu_seqlens[:-1] if len(freqs) > integer("max_seqlen", max_seqlen, at_least=0) else 0
    elif waits and len(cu_seqlens):
        offsets = cu_seqlens[:-1] if len(freqs) == int(cu_seqlens[-1]) else 0
    positions = _packed_positions("t", t, "cu_seqlens", cu_seqlens, cp_size, cp_rank, offsets)
    return _rotated_packed(t, freqs, positions, **how)


def _of_config(config: Any, name: str) -> bool:
    return flag(f"config.{name}", getattr(config, name, None))


def _size_and_rank(cp_group: Any) -> tuple[int, int]:
    """The number of ranks of a process group, and the number of this rank."""
    if not all(callable(getattr(cp_group, name, None)) for name in ("size", "rank")):
        raise TypeError(f"cp_group: expected a process group, got {shown(cp_group)}")
    size = integer("cp_group.size()", cp_group.size(), at_least=1)
    return size, integer("cp_group.rank()", cp_group.rank(), at_least=0, below=size)


def _rotated(t, freqs, layout: Layout, out_layout: Layout, mscale: float, inverse: bool, halves: bool = False):
    """The rotation of ``t`` by angles that broadcast against it."""
    cos, sin = _tables(freqs, mscale, inverse)
    check_tables({"t": t}, {"freqs": cos})
    if t.dtype not in DTYPES:
        raise TypeError(f"t: expected one of {', '.join(map(dtype_name, DTYPES))}, got {dtype_name(t.dtype)}")
    if halves:
        cos, sin = (table.chunk(2, dim=-1)[0] for table in (cos, sin))
    rotated = rotate_in_one_launch([t], cos, sin, layout=layout, out_layout=out_layout, per_pair=halves)
    if rotated is None:
        raise ValueError(f"freqs: expected shape [s, 1 or b, 1, r] for t of {tuple(t.shape)}, got {tuple(freqs.shape)}")
    return rotated[0].contiguous()


def _rotated_packed(
    t, freqs, positions, layout: Layout, out_layout: Layout, mscale: float, inverse: bool, halves: bool = False
):
    """The rotation of packed tokens by the angles of their positions."""
    shape = tensor("freqs", freqs).shape
    rotary_dim = shape[-1] if len(shape) == 4 and shape[1:3] == (1, 1) else 0
    if not 0 < rotary_dim <= t.shape[-1] or rotary_dim % 2:
        expected = f"[positions, 1, 1, r] with an even r up to the {t.shape[-1]} features of t"
        raise ValueError(f"freqs: expected shape {expected}, got {tuple(freqs.shape)}")
    cos, sin = (table[:, 0, 0, : rotary_dim // 2 if halves else None] for table in _tables(freqs, mscale, inverse))
    return in_words(apply_rope, q="t", cos="freqs", sin="freqs", positions="freqs")(
        t, cos=cos, sin=sin, layout=layout, out_layout=out_layout, seq_format="thd", positions=positions,
        rotary_slice=(0, rotary_dim),
    ).contiguous()  # fmt: skip


def _tables(freqs: torch.Tensor, mscale: float, inverse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of angles, in float32 or wider, with the factor."""
    if tensor("freqs", freqs).dtype not in DTYPES:
        raise TypeError(f"freqs: expected floating-point angles, got {dtype_name(freqs.dtype)}")
    angles = freqs if freqs.dtype == torch.float64 else freqs.float()
    cos, sin = angles.cos(), angles.sin()
    if single("mscale", mscale, at_least=torch.finfo(torch.float32).tiny) != 1.0:
        cos, sin = cos * mscale, sin * mscale
    return cos, -sin if flag("inverse", inverse) else sin


# ------------------------------------------------------------------------------------------------------------- patch

_UTILS = "megatron.core.models.common.embeddings.rope_utils"
_MLA = "megatron.core.fusions.fused_mla_yarn_rope_apply"
_OF_UTILS = "apply_rotary_pos_emb", "fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"
_OF_MLA = (
    "fused_apply_mla_rope_for_q", "fused_apply_mla_rope_for_kv", "fused_mla_rope_inplace",
    "fused_mla_rope_out_of_place", "fused_mla_rope_kv_split",
)  # fmt: skip


def patch() -> Patch:
    """Make Megatron-LM rotate with the kernels: ``patch()``, or ``with patch(): ...``.

    The patch replaces each function of this module that the installed Megatron-LM has, in each loaded module that has
    imported the function by its name. ``config.apply_rope_fusion`` then works without TransformerEngine, too.

    Raises:
        ImportError: Megatron-LM is not installed.
        ValueError: a function of Megatron-LM has arguments that our function lacks. The patch replaces nothing then.
    """
    new: dict[Place, object] = {}
    for module_name, names in ((_UTILS, _OF_UTILS), (_MLA, _OF_MLA)):
        module = importlib.import_module(module_name)
        for name in names:
            if not hasattr(module, name):
                continue
            original, ours = getattr(module, name), globals()[name]
            if original is None or original is ours:  # rope_utils without TransformerEngine
                new[module, name] = ours
                continue
            patched = getattr(original, "_rotates_with_ropelab", False)
            replacement = original if patched else _replacement(f"{module_name}.{name}", original, ours)
            new |= dict.fromkeys(places(name, original), replacement)
    return Patch(new)


def _replacement(name: str, original: Callable, ours: Callable) -> Callable:
    """Our function with the signature of the original, defaults included.

    Raises:
        ValueError: the original has an argument that our function lacks.
    """
    signature, known = inspect.signature(original), inspect.signature(ours).parameters
    if not signature.parameters.keys() <= known.keys():
        raise ValueError(f"{name}: expected arguments among {list(known)}, got {list(signature.parameters)}")

    @functools.wraps(original)
    def over_kernel(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return ours(**bound.arguments)

    over_kernel.__dict__["_rotates_with_ropelab"] = True
    return over_kernel
