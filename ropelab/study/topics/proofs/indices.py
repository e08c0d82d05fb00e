"""All statements about indices that Z3 proves of the kernels, as a table."""

from typing import Any

import pandas as pd
from IPython.display import Markdown, display

from ropelab.kernels.positions_torch import Shard
from ropelab.study.engine.findings import PROVED, statements
from ropelab.study.topics.proofs import addresses, pairs, positions, programs
from ropelab.study.topics.proofs.planted import altered
from ropelab.study.topics.proofs.symbolic import Proof, prove

STATEMENTS = pairs.STATEMENTS | programs.STATEMENTS | addresses.STATEMENTS | positions.STATEMENTS
QUICK = (
    "accesses of flat rows", "layouts are a permutation", "blocks are a partition", "slots are", "zigzag",
    "packed positions", "a position reads",
)  # fmt: skip
"""The first words of the statements that take seconds together. The others take a minute, and up to 20 s each."""
BY_TESTS = "left to the tests"


def proof(statement: str, replaced: dict[str, Any] | None = None) -> Proof:
    """Prove one of the statements.

    Args:
        replaced: functions to run in place of those of the same name, which a test plants.
    """
    return prove(statement, STATEMENTS[statement], replaced)


def proofs() -> pd.DataFrame:
    """Prove the statements that `QUICK` names, in this process; the tests prove every statement.

    Returns:
        A row for each statement, those that are proved here first: ``statement``; ``outcome``, "proved" where it holds
        and `BY_TESTS` where it was not tried; ``cases``, the claims with other numbers that the compiler knows; and
        ``paths``, the branches of the code.
    """
    found = pd.DataFrame([vars(proof(words)) for words in STATEMENTS if words.startswith(QUICK)])
    others = [words for words in STATEMENTS if not words.startswith(QUICK)]
    rows = pd.concat([found, pd.DataFrame({"statement": others, "outcome": BY_TESTS})], ignore_index=True)
    return rows.drop(columns="refutation").astype({"cases": "Int64", "paths": "Int64"})


def show() -> None:
    """Show the proofs of this run in the notebook, then the counterexample to an error that is planted in the zigzag.

    A proof that accepts everything proves nothing.

    Raises:
        AssertionError: a statement is not proved, or the planted error is.
    """
    found = proofs()
    here = found[found.outcome != BY_TESTS]
    display(found.style.hide(axis="index").format(na_rep=""))
    statements(list(here.statement), PROVED)
    wrong = altered(Shard.in_sequence, "local < half", "local <= half")
    planted = proof("zigzag and whole chunks are a partition of a sequence", {"in_sequence": wrong})
    assert (here.outcome == "proved").all() and planted.outcome == "refuted", (here, planted)
    display(Markdown(f"With `local <= half` in place of `local < half`, Z3 answers: `{planted.refutation}`."))
