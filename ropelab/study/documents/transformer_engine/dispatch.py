"""The heuristics that choose between the two grids of TransformerEngine: a block for each row, or for each token.

TransformerEngine#3057 has versions, and ``data/sources.toml`` says what was read of each. *First* is the pull request
as the document shows it. *Reviewed* has another heuristic, one thread that searches, and a guard for the rows behind
the last sequence. *Renamed* has another name for its variable and is otherwise the same. *Merged* (commit 0d1594aa0,
first released in 2.19) has one more condition and no variable. ``contenders`` runs the published kernels of *first* and
*merged* beside the models.
"""

import os
from collections.abc import Callable

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
