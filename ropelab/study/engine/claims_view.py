"""Show the claims of a document in a notebook: the document's words, the verdict, and the evidence folded below it."""

from html import escape

import pandas as pd
from IPython.display import HTML, Markdown, display

from ropelab.bench.records import Where
from ropelab.study.engine.findings import finding
from ropelab.study.engine.ledger import counts, ledger
from ropelab.study.engine.verdict import Outcome

_CLAUSES = 2
"""The most clauses of the measured evidence beside a verdict; the folded part has all of them."""
_FOLDED = {"measured": "Measured", "beyond": "Beyond the document", "remarks": "Remarks", "evidence": "Evidence"}


def show_claims(document: str, records: Where) -> pd.DataFrame:
    """Publish the counts as a finding, and display every claim with its verdict.

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
    display(HTML("\n".join(map(_claim, found.fillna("").to_dict("records")))))
    return found


def _claim(row: dict) -> str:
    """A claim as HTML: its quotation, its outcome with the first clauses of what was measured, and the rest folded."""
    shown = "; ".join(row["measured"].split("; ")[:_CLAUSES]) or (f"missing: {row['needs']}" if row["needs"] else "")
    rest = "".join(f"<dt>{name}</dt><dd>{escape(row[key])}</dd>" for key, name in _FOLDED.items() if row[key])
    return (
        f"<h4>{row['id']}, by the {row['by']}</h4><blockquote>{escape(row['quote'])}</blockquote>"
        f"<p><strong>{escape(row['words'])}</strong>{': ' if shown else ''}{escape(shown)}.</p>"
        f"<details><summary>evidence: {escape(row['basis'])}</summary>"
        f"<p>In our words: {escape(row['statement'])}</p><dl>{rest}</dl></details>"
    )


def show_untold(found: pd.DataFrame) -> None:
    """Display the missing evidence of each claim that cannot be told."""
    untold = found[found.outcome == Outcome.UNTOLD]
    needs = "; ".join(f"{row.id} needs {row.needs}" for row in untold.itertuples())
    display(Markdown(f"Claims that cannot be told: {needs or 'none'}."))
