"""Show the claims of a document in a notebook: the document's words, the verdict, and the evidence folded below it."""

import re
from html import escape

import pandas as pd
from IPython.display import HTML, Markdown, display

from ropelab.bench import records as measurements
from ropelab.bench.records import Selection, Where
from ropelab.study.engine.claims import load_claims
from ropelab.study.engine.findings import finding
from ropelab.study.engine.ledger import counts, ledger
from ropelab.study.engine.verdict import Outcome

_FOLDED = {
    "words": "Outcome",
    "measured": "Measured",
    "beyond": "Beyond the document",
    "remarks": "Remarks",
    "evidence": "Evidence",
}


def show_claims(document: str, records: Where) -> pd.DataFrame:
    """Publish the counts as a finding, and display every claim with its verdict.

    A claim of another GPU than that of ``records`` is judged by the records of its own GPU, if they can tell.

    Args:
        document: the key of the document, as ``"deepspeed"``.

    Returns:
        The ledger of the document, see `engine.ledger.ledger`.
    """
    found = ledger(document=document, records=records)
    where = measurements.selection(records)
    untold = set(found.id[found.outcome == Outcome.UNTOLD])
    for gpu in measurements.gpus(where.directory):
        named = [claim.id for claim in load_claims(document) if claim.gpu and claim.id in untold and claim.is_of(gpu)]
        if named:
            own = ledger(document=document, only=named, records=Selection(where.directory, gpu))
            own = own[own.outcome != Outcome.UNTOLD]
            found = pd.concat([found[~found.id.isin(own.id)], own]).sort_values("id", ignore_index=True)
    name = found.document.iloc[0]
    finding(
        f"The outcomes of the {len(found)} claims of {name}: {counts(found, 'outcome')}. "
        f"The basis of the verdicts: {counts(found, 'basis')}."
    )
    display(HTML("\n".join(map(_claim, found.fillna("").to_dict("records")))))
    show_untold(found)
    return found


def said(row: dict) -> str:
    """The verdict in one or two sentences, the second of which has the claim in our words."""
    if row["outcome"] == Outcome.UNTOLD:
        return f"It cannot be told whether the claim holds. That would need {row['needs']}."
    other = re.match(r"(holds) with another size \(times ([\d.]+)", row["words"])
    lead = f"The claim holds, with numbers {other[2]} times as large." if other else (
        f"The claim {row['words'].partition(' (')[0]}."
    )  # fmt: skip
    if (commit := re.search(r"the verdict of commit (\w+)", row["remarks"])) is not None:
        lead = f"{lead[:-1]} (recorded at {commit[1]})."
    statement = row["statement"].rstrip(".")
    return f"{lead} {statement}." if row["outcome"] == Outcome.HOLDS else f"{lead} It says: {statement}."


def _claim(row: dict) -> str:
    """A claim as HTML: its quotation and its verdict, and below them the evidence, folded."""
    rest = "".join(f"<dt>{name}</dt><dd>{escape(row[key])}</dd>" for key, name in _FOLDED.items() if row[key])
    lead, _, statement = said(row).partition(". ")
    return (
        f"<h4>{row['id']}, by the {row['by']}</h4><blockquote>{escape(row['quote'])}</blockquote>"
        f"<p><strong>{escape(lead)}.</strong> {escape(statement)}</p>"
        f"<details><summary>evidence: {escape(row['basis'])}</summary><dl>{rest}</dl></details>"
    )


def show_untold(found: pd.DataFrame) -> None:
    """Display the missing evidence of each claim that cannot be told."""
    untold = found[found.outcome == Outcome.UNTOLD]
    needs = "; ".join(f"{row.id} needs {row.needs}" for row in untold.itertuples())
    display(Markdown(f"Claims that cannot be told: {needs or 'none'}."))
