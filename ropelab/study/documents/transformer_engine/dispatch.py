"""The two grids as launch strategies of one kernel, and the heuristics that choose between them.

*legacy*: a block for every row of ``freqs`` and every sequence. *linear*: a block for every token, which searches for
its sequence. Both launch the same rotation of a token, so the study compares the grids alone.

This kernel is a model of TransformerEngine's kernel (``ropelab.bench.varlen_models``), and on purpose not the kernel of
ropelab's functions. A strategy is how a block finds its token and its position. The kernel of ropelab finds neither.
Its positions come from one small launch that all layers share, and its program takes a tile of tokens and heads. A
block for each row of ``freqs`` cannot take a tile. With these grids the kernel of ropelab would show the loss of its
tiles, not the cost of the grids.

``measure.parity`` compares the results of the models with ropelab's results. It holds both to the bound of the
definition in every case, and counts the elements with the same bits. Not all elements can have the same bits, because
ropelab multiplies with cosines that were computed once, and a program of the models computes its own cosines.

TransformerEngine#3057 has versions, and ``data/sources.toml`` says what was read of each. *First* is the pull request
as the document shows it. *Reviewed* has another heuristic, one thread that searches, and a guard for the rows behind
the last sequence. *Renamed* has another name for its variable and is otherwise the same. *Merged* (commit 0d1594aa0,
first released in 2.19) has one more condition and no variable. ``grids`` runs the published kernels of *first* and
*merged* beside the models.
"""

import os
from collections.abc import Callable
from functools import partial

import torch

from ropelab.bench import varlen_models
from ropelab.bench.peers import differentiable
from ropelab.interop.transformer_engine import LEGACY, LINEAR, thd_grid

OVERRIDE = "NVTE_FUSED_ROPE_THD_TOKEN_LINEAR"
VARIABLES = {"first": OVERRIDE, "reviewed": OVERRIDE, "renamed": "NVTE_FUSED_ROPE_THD_LINEAR_GRID", "merged": None}
VERSIONS = tuple(VARIABLES)


def first_heuristic(n_seqs: int, freqs_len: int, tokens: int, cp_size: int = 1) -> str:
    """The first condition: linear from 64 sequences on, if the legacy grid has 8 times as many blocks as tokens."""
    return LINEAR if tokens > 0 and n_seqs >= 64 and freqs_len * n_seqs >= 8 * tokens else LEGACY


def reviewed_heuristic(n_seqs: int, freqs_len: int, tokens: int, cp_size: int = 1) -> str:
    """Linear if the legacy grid has more than ``2 cp_size`` times as many blocks as tokens on this rank."""
    return LINEAR if tokens > 0 and freqs_len * n_seqs > 2 * cp_size * tokens else LEGACY


def merged_heuristic(n_seqs: int, freqs_len: int, tokens: int, cp_size: int = 1) -> str:
    """The merged condition: as reviewed, and the legacy grid has at least 65,536 blocks more than tokens."""
    return thd_grid(n_seqs, freqs_len, tokens, cp_size)


HEURISTICS: dict[str, Callable[..., str]] = {"first": first_heuristic, "merged": merged_heuristic}
"""The heuristics that are judged against the times: the heuristic of the claims, and the heuristic that was merged."""
_OF_VERSION = {"reviewed": reviewed_heuristic, "renamed": reviewed_heuristic} | HEURISTICS


def choose(n_seqs: int, freqs_len: int, tokens: int, cp_size: int = 1, *, version: str = "first") -> str:
    """The strategy that a version takes. All versions but ``merged`` obey their variable (``VARIABLES``) of 0 or 1."""
    if version not in VERSIONS:
        raise ValueError(f"version: expected one of {VERSIONS}, got {version!r}")
    override = os.environ.get(VARIABLES[version] or "")
    if tokens > 0 and override in ("0", "1"):
        return LINEAR if override == "1" else LEGACY
    return _OF_VERSION[version](n_seqs, freqs_len, tokens, cp_size)


STRATEGIES: dict[str, Callable[..., torch.Tensor]] = {
    LEGACY: varlen_models.legacy_grid,
    LINEAR: varlen_models.token_linear,
}


def rotate_thd(
    t: torch.Tensor,
    freqs: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    strategy: str | None = None,
    version: str = "first",
    interleaved: bool = False,
    start_positions: torch.Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> torch.Tensor:
    """Rotate packed tokens as TransformerEngine's fused path does, by one strategy in both directions.

    Args:
        t: ``[T, h, d]``, this rank's tokens; any strides.
        freqs: float32 ``[s2, 1, 1, d]`` angles; its length is a side of the legacy grid.
        cu_seqlens: int32 ``[n + 1]``, not sharded.
        strategy: ``"legacy"`` or ``"linear"``; by default the strategy that ``choose`` gives for ``version``.

    Returns:
        A new tensor, differentiable in ``t``.
    """
    angles = freqs[:, 0, 0].contiguous()
    if strategy is None:
        strategy = choose(len(cu_seqlens) - 1, len(angles), len(t), cp_size, version=version)
    where = {"start_positions": start_positions, "cp_size": cp_size, "cp_rank": cp_rank}
    kernel = partial(STRATEGIES[strategy], angles=angles, cu_seqlens=cu_seqlens, interleaved=interleaved, **where)
    return differentiable(lambda x, inverse: kernel(x, inverse=inverse))(t, None)[0]
