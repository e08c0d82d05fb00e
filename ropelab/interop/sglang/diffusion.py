"""The function by which diffusion models of SGLang rotate q and k."""

import torch

from ropelab.arguments import DTYPES, POSITION_DTYPES, check_tensor, flag, integer, tensor
from ropelab.call.traced import one_node
from ropelab.interop.refusals import renamed
from ropelab.interop.sglang.split_tables import KEPT
from ropelab.layout.pairing import Layout
from ropelab.rope import apply_rope

_FREQS_DTYPES = (*DTYPES, torch.complex64, torch.complex128)


@one_node
def apply_rope_qk_inplace(
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    *,
    head_size: int | None = None,
    is_neox: bool = False,
    positions: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate q and k of a diffusion model in place, and return them.

    Args:
        q: ``[B, S, Hq, D]``, any strides that keep the features of a head together.
        k: ``[B, S, Hk, D]`` with any number of heads.
        cos_sin_cache: the frequencies, a row for each token of a sequence, of all sequences, or of more positions:

            - complex64 or complex128 ``[P, R/2]``, ``cos + i sin`` of each pair, as Qwen-Image makes them. Their
              parts are copied once and kept in `KEPT`.
            - a floating dtype ``[P, R]``, the cosines of the R/2 pairs before the sines.
        head_size: D; by default the last axis of ``q``.
        is_neox: pairs are ``(i, i + R/2)``; otherwise ``(2i, 2i+1)``, as in diffusion models.
        positions: ``[B S]`` int32 or int64, the row of each token. Without positions, tables of B S rows have a row for
            each token; other tables have the rows of a sequence first, and all sequences share these rows.

    Returns:
        q and k, with new values.

    Raises:
        TypeError: an argument is not a tensor, or a dtype is not supported or does not match.
        ValueError: shapes do not fit one another, or memory overlaps.

    Source: ``apply_sglang_jit_rope_qk_inplace`` of SGLang#14302, and ``apply_flashinfer_rope_qk_inplace`` of SGLang,
    which take the same arguments. For tensors with gaps, SGLang's functions return copies, and this function writes
    into the tensors themselves.
    """
    for name, x in (("q", q), ("k", k)):
        check_tensor(name, tensor(name, x), (4,), "[batch, seq_len, heads, head_size]")
    if head_size is not None and integer("head_size", head_size) != q.shape[-1]:
        raise ValueError(f"head_size: expected q's last axis {q.shape[-1]}, got {head_size}")
    cos, sin = _tables(cos_sin_cache, q.shape[-1])
    layout: Layout = "split_half" if flag("is_neox", is_neox) else "interleaved"
    batch, seq_len = q.shape[:2]
    if positions is not None:
        check_tensor("positions", tensor("positions", positions), (1,), "[tokens]", POSITION_DTYPES)
        if len(positions) != batch * seq_len:
            raise ValueError(f"positions: expected a row for each of {batch * seq_len} tokens, got {len(positions)}")
        positions = positions.view(batch, seq_len)
    elif batch > 1 and len(cos) == batch * seq_len:
        cos, sin = (table.unflatten(0, (batch, seq_len)) for table in (cos, sin))
    elif len(cos) >= seq_len:
        cos, sin = cos[:seq_len], sin[:seq_len]
    else:
        raise ValueError(f"cos_sin_cache: expected a row for each of {seq_len} tokens, got {len(cos)}")
    try:
        apply_rope(
            q,
            k,
            cos=cos,
            sin=sin,
            layout=layout,
            positions=positions,
            rotary_slice=(0, 2 * cos.shape[-1]),
            inplace=True,
        )
    except (TypeError, ValueError) as error:
        raise renamed(error, cos="cos_sin_cache", sin="cos_sin_cache") from error
    return q, k


def _tables(freqs: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines ``[P, R/2]`` of complex frequencies, or of a cache."""
    check_tensor("cos_sin_cache", tensor("cos_sin_cache", freqs), (2,), "[positions, columns]", _FREQS_DTYPES)
    features = freqs.shape[1] * (2 if freqs.is_complex() else 1)
    if not 0 < features <= head_size or features % 2:
        wanted = f"complex [positions, R/2] or [positions, R] with an even R up to head_size = {head_size}"
        raise ValueError(f"cos_sin_cache: expected {wanted}, got {tuple(freqs.shape)}")
    if freqs.is_complex():
        return KEPT.split(freqs)
    cos, sin = freqs.chunk(2, dim=-1)
    return cos, sin
