"""The two grids as launch strategies of one kernel, and who chooses between them.

*legacy*: a block for every row of ``freqs`` and every sequence. *linear*: a block for every token, which searches for
its sequence. Both launch the same rotation of a token, so they differ in nothing else; that is what the study compares.

This kernel is a model of TransformerEngine's (``ropelab.bench.varlen_models``) and not the one that ropelab's
functions launch, on purpose. A strategy is how a block finds its token and its position. The kernel of ropelab finds
neither. Positions come from one small launch that all layers share. A program takes a tile of tokens and heads, which a
block for each row of ``freqs`` cannot. To give it these grids would measure what its tiles lose, not what the grids
cost. Whether the models compute what ropelab computes is checked in ``measure.parity`` all the same: to the bound of
the definition in every case, and how many elements have the same bits. Not all can: ropelab multiplies with cosines
that were computed once, a program of the models computes its own.

TransformerEngine#3057 has versions, and ``data/sources.toml`` says what was read of each. *First* is the pull request
as the document shows it. *Reviewed* has another heuristic, one thread that searches, and a guard for what lies behind
the last sequence. *Renamed* is the same with another name for its variable. *Merged* (commit 0d1594aa0, first released
in 2.19) has one more condition and no variable. ``grids`` runs the published kernels of *first* and *merged* beside the
models.
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
    """As first proposed: linear from 64 sequences on, if the legacy grid has 8 times as many blocks as tokens."""
    return LINEAR if tokens > 0 and n_seqs >= 64 and freqs_len * n_seqs >= 8 * tokens else LEGACY


def reviewed_heuristic(n_seqs: int, freqs_len: int, tokens: int, cp_size: int = 1) -> str:
    """Linear if the legacy grid has more than ``2 cp_size`` times as many blocks; ``tokens`` are on this rank."""
    return LINEAR if tokens > 0 and freqs_len * n_seqs > 2 * cp_size * tokens else LEGACY


def merged_heuristic(n_seqs: int, freqs_len: int, tokens: int, cp_size: int = 1) -> str:
    """As merged: the reviewed one, and only if the legacy grid has 65,536 blocks more."""
    return thd_grid(n_seqs, freqs_len, tokens, cp_size)


HEURISTICS: dict[str, Callable[..., str]] = {"first": first_heuristic, "merged": merged_heuristic}
"""Those that are judged against the times: what was claimed, and what came of it."""
_OF_VERSION = {"reviewed": reviewed_heuristic, "renamed": reviewed_heuristic} | HEURISTICS


def choose(n_seqs: int, freqs_len: int, tokens: int, cp_size: int = 1, *, version: str = "first") -> str:
    """The strategy a version takes; all but ``merged`` obey their variable (``VARIABLES``), if it is 0 or 1."""
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
        strategy: ``"legacy"`` or ``"linear"``; by default what ``choose`` says for ``version``.

    Returns:
        A new tensor, differentiable in ``t``.
    """
    angles = freqs[:, 0, 0].contiguous()
    if strategy is None:
        strategy = choose(len(cu_seqlens) - 1, len(angles), len(t), cp_size, version=version)
    where = {"start_positions": start_positions, "cp_size": cp_size, "cp_rank": cp_rank}
    kernel = partial(STRATEGIES[strategy], angles=angles, cu_seqlens=cu_seqlens, interleaved=interleaved, **where)
    return differentiable(lambda x, inverse: kernel(x, inverse=inverse))(t, None)[0]
