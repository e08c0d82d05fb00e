"""The two grids as launch strategies, and who chooses between them.

*legacy*: a block for every row of ``freqs`` and every sequence. *linear*: a block for every token, which searches for
its sequence. The kernels are our models of TransformerEngine's (``ropelab.bench.varlen_models``).

Three states of TransformerEngine#3057 are told apart: *first* is the pull request as the document shows it; *reviewed*
is the one of its review of 2026-06-26, with the later heuristic and still with the environment variable; *merged* has
that heuristic, and no variable.
"""

import os
from collections.abc import Callable
from functools import partial

import torch

from ropelab.bench import varlen_models
from ropelab.bench.peers import differentiable

OVERRIDE = "NVTE_FUSED_ROPE_THD_TOKEN_LINEAR"
LEGACY, LINEAR = "legacy", "linear"
VERSIONS = ("first", "reviewed", "merged")


def first_heuristic(n_seqs: int, freqs_len: int, tokens: int, cp_size: int = 1) -> str:
    """As first proposed: linear from 64 sequences on, if the legacy grid has 8 times as many blocks as tokens."""
    return LINEAR if tokens > 0 and n_seqs >= 64 and freqs_len * n_seqs >= 8 * tokens else LEGACY


def merged_heuristic(n_seqs: int, freqs_len: int, tokens: int, cp_size: int = 1) -> str:
    """As merged: linear if the legacy grid has more than ``2 cp_size`` times as many blocks, and 65,536 more.

    Args:
        tokens: of this rank.
    """
    legacy = freqs_len * n_seqs
    return LINEAR if tokens > 0 and legacy > 2 * cp_size * tokens and legacy - tokens >= 65536 else LEGACY


HEURISTICS: dict[str, Callable[..., str]] = {"first": first_heuristic, "merged": merged_heuristic}


def choose(n_seqs: int, freqs_len: int, tokens: int, cp_size: int = 1, *, version: str = "first") -> str:
    """The strategy a version takes; all but ``merged`` obey the environment variable ``OVERRIDE``, if it is 0 or 1."""
    if version not in VERSIONS:
        raise ValueError(f"version: expected one of {VERSIONS}, got {version!r}")
    override = os.environ.get(OVERRIDE)
    if version != "merged" and tokens > 0 and override in ("0", "1"):
        return LINEAR if override == "1" else LEGACY
    return HEURISTICS["first" if version == "first" else "merged"](n_seqs, freqs_len, tokens, cp_size)


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
