"""The names in the records: the pairs of an old and a new grid, the steps, and what was timed.

A pair is the document's own code, the packages, or our models.

A record names each contender. The findings and the figures speak of the old and the new grid: `canonical` gives the
contenders of one pair these names.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from ropelab.study.engine import roles
from ropelab.study.engine.verdict import Basis

OLD, NEW = "old grid", "new grid"
"""The names of the chosen pair in tables: a block for each row of freqs and each sequence, a block for each token."""

INTEROP = "ropelab, TransformerEngine's call"
GIVEN, SUMMED = "forward and backward", "with sum()"
"""The steps: the backward starts from a given random cotangent or, as in the document, from the sum of the result."""

WITHOUT = "without RoPE"
LAYER, ALONE = "layer", "RoPE of q and k alone"


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
PACKAGES = Grids("TransformerEngine 2.18", "TransformerEngine 2.20", Basis.PACKAGE, "TransformerEngine")
"""The packages: 2.18 has the old grid alone, and 2.20 chooses by the merged condition."""
MODELS = Grids("legacy grid", "token-linear, reads twice", Basis.MODEL, "model")
"""Our models in `ropelab.bench.varlen_models`."""

ALL = (CODE, PACKAGES, MODELS)
"""All pairs. The first pair that was run decides."""
FORCED = (CODE, MODELS)
"""The pairs whose new grid runs in every cell, whatever a condition says."""


def chosen(frame: pd.DataFrame, allowed: Sequence[Grids] = ALL) -> Grids:
    """The first of the allowed pairs of which the record has right rows; the last pair where it has none."""
    return allowed[roles.first_that_ran(frame, [pair.roles for pair in allowed])]


def canonical(frame: pd.DataFrame, allowed: Sequence[Grids] = ALL) -> pd.DataFrame:
    """The record with the names `OLD` and `NEW` for the contenders of the chosen pair; other rows keep their names."""
    if {OLD, NEW} & set(frame.contender):
        return frame
    return roles.under_roles(frame, chosen(frame, allowed).roles)
