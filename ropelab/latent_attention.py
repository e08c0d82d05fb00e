"""The public functions that assemble the heads of multi-head latent attention (MLA) in training."""

from typing import Any, Never

import torch
from torch.fx import Proxy

from ropelab.arguments import check_like, flag, integer
from ropelab.autograd.latent_attention import differentiated, overwrite_tail
from ropelab.autograd.rotation import check_untransformed, rotate_again
from ropelab.autograd.rotation import differentiated as rotated
from ropelab.call.angles import given_tables
from ropelab.call.checks import INPLACE, check_fixed_tables
from ropelab.call.latent_attention import ASSEMBLE, TURN_TAIL, check_tail
from ropelab.call.memory import check_apart
from ropelab.call.rotation import ROTATE
from ropelab.call.traced import recorded
from ropelab.call.where import Where, located
from ropelab.foreign import hinted, unexpected
from ropelab.layout.pairing import Layout
from ropelab.layout.seq_format import SeqFormat, check_heads, check_seq_format


@hinted
def assemble_mla(
    q: torch.Tensor,
    kv: torch.Tensor,
    k_pe: torch.Tensor,
    *,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: Layout = "split_half",
    out_layout: Layout | None = None,
    seq_format: SeqFormat = "bshd",
    positions: torch.Tensor | None = None,
    offsets: int | torch.Tensor = 0,
    inverse: bool = False,
    inplace: bool = False,
    copy_value: bool = True,
    **foreign: Never,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value of multi-head latent attention, from the projections, in one pass over their memory.

    Example: ``query, key, value = assemble_mla(q, kv, k_pe, cos=cos, sin=sin, layout="interleaved")``.

    A head of q and of the key has N features that do not rotate, and R features that do. With the rotation R_t of token
    t as in `apply_rope`, the heads h are::

        query_h = [q_h[:N], R_t q_h[N:]],    key_h = [kv_h[:N], R_t k_pe],    value_h = kv_h[N:]

    (DeepSeek-V2, arXiv 2405.04434, equations 14 to 18.) This is `rotate_mla_query` of q and `assemble_mla_kv` of kv and
    k_pe; both describe the arguments and the errors. N is the number of features of a head of q without the R of k_pe.

    Args:
        inplace: overwrite q with the query.

    Returns:
        ``(query, key, value)``.
    """
    if isinstance(q, Proxy):
        return recorded(assemble_mla, locals())
    if foreign:
        raise unexpected(assemble_mla, *foreign)
    check_seq_format(seq_format)
    for name, x in (("q", q), ("k_pe", k_pe)):
        check_heads(name, x, seq_format)
    nope_dim = q.shape[-1] - k_pe.shape[-1]
    if nope_dim < 0:
        raise ValueError(f"q: expected at least the {k_pe.shape[-1]} features of k_pe in a head, got {q.shape[-1]}")
    where: dict[str, Any] = {
        "cos": cos, "sin": sin, "layout": layout, "out_layout": out_layout, "seq_format": seq_format,
        "positions": positions, "offsets": offsets, "inverse": inverse,
    }  # fmt: skip
    if inplace := flag("inplace", inplace):
        check_untransformed()
    key, value = assemble_mla_kv(kv, k_pe, nope_dim, **where, copy_value=copy_value)
    if q.shape[:-1] != kv.shape[:-1]:
        raise ValueError(f"q: expected kv's shape {tuple(kv.shape[:-1])} but for the features, got {tuple(q.shape)}")
    check_like("q", q, kv, "kv")
    if inplace:
        check_apart({"q": q}, {"kv": kv, "k_pe": k_pe}, where=INPLACE)
    return rotate_mla_query(q, nope_dim, **where, inplace=inplace), key, value


@hinted
def assemble_mla_kv(
    kv: torch.Tensor,
    k_pe: torch.Tensor,
    nope_dim: int,
    *,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: Layout = "split_half",
    out_layout: Layout | None = None,
    seq_format: SeqFormat = "bshd",
    positions: torch.Tensor | None = None,
    offsets: int | torch.Tensor = 0,
    inverse: bool = False,
    copy_value: bool = True,
    **foreign: Never,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value of multi-head latent attention, see `assemble_mla`, in one launch.

    Example: ``key, value = assemble_mla_kv(kv, k_pe, nope_dim, cos=cos, sin=sin, layout="interleaved")``.

    Args:
        kv: ``[B, S, H, N + V]`` (``bshd``), ``[S, B, H, N + V]`` (``sbhd``), ``[B, H, S, N + V]`` (``bhsd``) or
            ``[T, H, N + V]`` (``thd``): N features of the key and V features of the value of every head; bfloat16,
            float16, float32 or float64; any strides.
        k_pe: the R features of the key that all heads share, as ``kv`` with one head and R features.
        nope_dim: N, the features of a head of the key that do not rotate.
        cos, sin: ``[P, R/2]``, or ``[B, P, R/2]`` with tables for each batch; a column for each feature, R columns, as
            with a ``rotary_slice`` of `apply_rope`. Multiply the tables by an attention factor (mscale).
        layout, out_layout, seq_format, positions, offsets, inverse: as for `apply_rope`. DeepSeek-V3 has
            ``layout="interleaved"`` and ``out_layout="split_half"``.
        copy_value: whether the value is a new tensor; otherwise it is the view ``kv[..., N:]``. With a view, 2N + R
            features of a head move instead of 2N + R + 2V, and attention that takes strides reads the view. The view
            keeps kv alive: what attention saves for the backward holds N + V features in place of V. A write to kv or
            to the view changes both; where autograd records the call, PyTorch refuses such writes.

    Returns:
        The key, with N + R features in a head, and the value, with V. The key is contiguous, and so is a new value; a
        view has the strides of kv. A token at ``NO_POSITION`` has zeros in the key, and keeps its value. The results
        are differentiable any number of times in kv and k_pe. The gradient of kv is made in one pass, also for a view.
        The gradient of k_pe is a sum over the heads in float32 or wider; the order of the sum is always the same.

    Raises:
        TypeError, ValueError: as `apply_rope`; or the shapes, dtypes or devices of kv and k_pe do not fit; or a table
            requires grad.
    """
    if isinstance(kv, Proxy):
        return recorded(assemble_mla_kv, locals())
    if foreign:
        raise unexpected(assemble_mla_kv, *foreign)
    given, words, numbers = (kv, k_pe), (layout, out_layout, seq_format), (nope_dim, inverse, copy_value)
    key, prepared = ASSEMBLE.look_up(words, numbers, given, cos, sin, positions, offsets)
    if prepared is not None:
        y, value = prepared(given, cos, sin, positions, offsets)
        return y, kv[..., nope_dim:] if value is None else value
    nope_dim, copy_value = integer("nope_dim", nope_dim, at_least=0), flag("copy_value", copy_value)
    check_seq_format(seq_format)
    check_heads("k_pe", k_pe, seq_format)
    where = _where(
        k_pe, nope_dim, k_pe.shape[-1], cos, sin, layout, out_layout, seq_format, positions, offsets, inverse
    )
    made = differentiated(kv, k_pe, where, copy_value)
    ASSEMBLE.remember(key, given, where, copy_value)
    return made


@hinted
def rotate_mla_query(
    q: torch.Tensor,
    nope_dim: int,
    *,
    cos: torch.Tensor,
    sin: torch.Tensor,
    layout: Layout = "split_half",
    out_layout: Layout | None = None,
    seq_format: SeqFormat = "bshd",
    positions: torch.Tensor | None = None,
    offsets: int | torch.Tensor = 0,
    inverse: bool = False,
    inplace: bool = False,
    consume: bool = False,
    **foreign: Never,
) -> torch.Tensor:
    """The query of multi-head latent attention, see `assemble_mla`: the rotation of the last features of every head.

    Example: ``query = rotate_mla_query(q, nope_dim, cos=cos, sin=sin, layout="interleaved")``.

    A new query is the result of `apply_rope` with the rotary slice ``(N, N + R)``. In place, this function writes the
    last R features only, and `apply_rope` does not change the layout.

    Args:
        q: ``[B, S, H, N + R]`` (``bshd``), or in the order of another ``seq_format``, as ``kv`` of `assemble_mla_kv`.
        nope_dim: N, the features of a head that do not rotate.
        cos, sin, layout, out_layout, seq_format, positions, offsets, inverse: as for `assemble_mla_kv`.
        inplace: overwrite q. The restrictions are as for `apply_rope`.
        consume: for ``inplace``: the caller gives up q and the gradient of the query, as with Megatron-LM's function.
            Autograd takes q for unchanged, so q may be any view or leaf, but q must not be used in the graph again. The
            backward overwrites the gradient of the query, and writes R of N + R features only; nothing else may need
            that gradient. By default q is the query, a view of q costs copies in the backward, and the gradient of q is
            a new tensor.

    Raises:
        TypeError, ValueError: as `apply_rope`; or a table requires grad.
        NotImplementedError: ``inplace`` under a transform of torch.func or in forward mode.
    """
    if isinstance(q, Proxy):
        return recorded(rotate_mla_query, locals())
    if foreign:
        raise unexpected(rotate_mla_query, *foreign)
    if type(inplace) is not bool:  # of NumPy
        inplace = flag("inplace", inplace)
    operation, given = (TURN_TAIL, (q,)) if inplace else (ROTATE, (q, None))
    words, numbers = (layout, out_layout, seq_format), (nope_dim, inverse, consume)
    key, prepared = operation.look_up(words, numbers, given, cos, sin, positions, offsets)
    if prepared is not None:
        if prepared.recorded:
            check_fixed_tables(cos, sin)
            return rotate_again(prepared, q, None, cos, sin, positions, offsets)
        made = prepared(given, cos, sin, positions, offsets)
        return q if inplace else made[0]
    nope_dim = integer("nope_dim", nope_dim, at_least=0)
    consume = flag("consume", consume)
    if consume and not inplace:
        raise ValueError("consume: expected False without inplace, got True")
    check_seq_format(seq_format)
    check_heads("q", q, seq_format)
    rotary_dim = q.shape[-1] - nope_dim
    if rotary_dim < 2 or rotary_dim % 2:
        raise ValueError(f"nope_dim: expected an even number of the {q.shape[-1]} features behind it, got {nope_dim}")
    where = _where(q, nope_dim, rotary_dim, cos, sin, layout, out_layout, seq_format, positions, offsets, inverse)
    if inplace:
        y = overwrite_tail(q, where, consume)
    else:
        check_tail(q, where)
        y = rotated(q, None, where, False)
    operation.remember(key, given, where)
    return y


def _where(
    x, nope_dim: int, rotary_dim: int, cos, sin, layout, out_layout, seq_format, positions, offsets, inverse
) -> Where:
    """The angles of the tokens of a call whose last features rotate."""
    tables = given_tables(cos, sin)
    check_fixed_tables(*tables)
    slice_ = nope_dim, nope_dim + rotary_dim
    return located(x, tables, positions, offsets, layout, out_layout, seq_format, slice_, flag("inverse", inverse))
