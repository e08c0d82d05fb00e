"""All statements about indices that Z3 proves of the kernels, as a table."""

from typing import Any

import pandas as pd

from ropelab.bench.workers import spread
from ropelab.study.topics.proofs import addresses, pairs, positions, programs
from ropelab.study.topics.proofs.symbolic import Proof, prove

STATEMENTS = pairs.STATEMENTS | programs.STATEMENTS | addresses.STATEMENTS | positions.STATEMENTS
QUICK = ("pairs are a bijection", "layouts are a permutation", "blocks are a partition", "zigzag", "a position reads")
"""The first words of the statements of a smoke run."""


def proof(statement: str, replaced: dict[str, Any] | None = None) -> Proof:
    """Prove one of the statements.

    Args:
        replaced: functions to run in place of those of the same name, which a test plants.
    """
    return prove(statement, STATEMENTS[statement], replaced)


def proofs(*, smoke: bool = False) -> pd.DataFrame:
    """Prove every statement, in several processes.

    Args:
        smoke: only the statements that `QUICK` names.

    Returns:
        A row for each statement: ``statement``; ``outcome``, "proved" where it holds; ``cases``, the claims with other
        numbers that the compiler knows; ``paths``, the branches of the code; and ``refutation``, "" where it holds.
    """
    chosen = [words for words in STATEMENTS if words.startswith(QUICK) or not smoke]
    found = {one.statement: one for one in spread([], [(proof, (words,)) for words in chosen], here=smoke)}
    return pd.DataFrame([vars(found[words]) for words in chosen])
