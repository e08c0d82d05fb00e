"""The pairs of an old and a new grid that the study runs: the document's own code, the packages, and our models.

A record names each contender. The findings and the figures speak of the old and the new grid: `canonical` gives the
contenders of one pair these names.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial

import pandas as pd
import torch

from ropelab.bench import peers
from ropelab.bench.peers import te_library, te_source, transformer_engine
from ropelab.study.documents.transformer_engine.dispatch import LEGACY, LINEAR, rotate_thd
from ropelab.study.engine import roles
from ropelab.study.engine.verdict import Basis

OLD, NEW = "old grid", "new grid"
"""The names of the chosen pair in tables: a block for each row of freqs and each sequence, a block for each token."""


@dataclass(frozen=True)
class Grids:
    """A pair of contenders: an old and a new grid.

    Attributes:
        old, new: the names in records.
        basis: the basis of a verdict on their evidence.
        words: the pair in words, for a sentence and a legend.
    """

    old: str
    new: str
    basis: Basis
    words: str

    @property
    def names(self) -> tuple[str, str]:
        return self.old, self.new

    @property
    def roles(self) -> dict[str, str]:
        """The role of each contender: `OLD` and `NEW` -> its name."""
        return {OLD: self.old, NEW: self.new}


CODE = Grids("#3057 (6c46696), old grid", "#3057 (6c46696), new grid", Basis.CODE, "first version, 6c46696")
"""The file of the first version of the pull request, compiled; its environment variable forces each grid."""
PACKAGES = Grids(
    peers.TRANSFORMER_ENGINE_OLD_GRID.name, peers.TRANSFORMER_ENGINE.name, Basis.PACKAGE, "TransformerEngine"
)
"""The packages: 2.18 has the old grid alone, and 2.20 chooses by the merged condition."""
MODELS = Grids("legacy grid", "token-linear, reads twice", Basis.MODEL, "model")
"""Our models in `ropelab.bench.varlen_models`."""

ALL = (CODE, PACKAGES, MODELS)
"""All pairs. The first pair that was run decides."""
FORCED = (CODE, MODELS)
"""The pairs whose new grid runs in every cell, whatever a condition says."""

Rotate = Callable[..., torch.Tensor]


def rotation(name: str) -> Rotate:
    """The rotation of packed tokens by a contender: a function of ``t``, and of the keywords of `rotate_thd`.

    The keywords are freqs, cu_seqlens, interleaved, start_positions, cp_size and cp_rank.

    Raises:
        NotInstalled: the package, the library of the file, or a GPU is missing.
        ValueError: no contender has this name.
    """
    if name in MODELS.names:
        return partial(rotate_thd, strategy=LINEAR if name == MODELS.new else LEGACY)
    context = nullcontext
    if name in CODE.names:
        library = te_source.library()
        context = partial(te_source.forced, name == CODE.new)
    elif name in PACKAGES.names:
        peer = peers.TRANSFORMER_ENGINE if name == PACKAGES.new else peers.TRANSFORMER_ENGINE_OLD_GRID
        library = te_library.load(te_library.find(peer.version))
    else:
        raise ValueError(f"name: expected one of {[pair.names for pair in ALL]}, got {name!r}")
    return partial(transformer_engine.apply_rotary_pos_emb, library, tensor_format="thd", context=context)


@cache
def runs(pair: Grids) -> bool:
    """Whether both contenders of a pair can run here."""
    try:
        for name in pair.names:
            rotation(name)
    except RuntimeError:  # `Unavailable` is one
        return False
    return True


def chosen(frame: pd.DataFrame, allowed: Sequence[Grids] = ALL) -> Grids:
    """The first of the allowed pairs of which the record has right rows; the last pair where it has none."""
    return allowed[roles.first_that_ran(frame, [pair.roles for pair in allowed])]


def canonical(frame: pd.DataFrame, allowed: Sequence[Grids] = ALL) -> pd.DataFrame:
    """The record with the names `OLD` and `NEW` for the contenders of the chosen pair; other rows keep their names."""
    if {OLD, NEW} & set(frame.contender):
        return frame
    return roles.under_roles(frame, chosen(frame, allowed).roles)
