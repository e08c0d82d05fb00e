"""Show the claims of a document in a notebook: counts, the table, and the evidence that is missing."""

import pandas as pd
from IPython.display import Markdown, display

from ropelab.bench.records import Where
from ropelab.study.engine.findings import finding
from ropelab.study.engine.ledger import counts, ledger
from ropelab.study.engine.verdict import Outcome

_COLUMNS = ["id", "by", "statement", "quote", "words", "basis", "measured", "beyond", "remarks", "evidence"]


def show_claims(document: str, records: Where) -> pd.DataFrame:
    """Publish the counts as a finding and display every claim with its verdict.

    Args:
        document: the key of the document, as ``"deepspeed"``.

    Returns:
        The ledger of the document, see `engine.ledger.ledger`.
    """
    found = ledger(document=document, records=records)
    name = found.document.iloc[0]
    finding(
        f"The outcomes of the {len(found)} claims of {name}: {counts(found, 'outcome')}. "
        f"The basis of the verdicts: {counts(found, 'basis')}."
    )
    left = {"text-align": "left", "vertical-align": "top"}
    display(found[_COLUMNS].rename(columns={"words": "outcome"}).style.hide(axis="index").set_properties(**left))
    return found


def show_untold(found: pd.DataFrame) -> None:
    """Display the missing evidence of each claim that cannot be told."""
    untold = found[found.outcome == Outcome.UNTOLD]
    needs = "; ".join(f"{row.id} needs {row.needs}" for row in untold.itertuples())
    display(Markdown(f"Claims that cannot be told: {needs or 'none'}."))
