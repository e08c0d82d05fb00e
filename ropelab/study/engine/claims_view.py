"""Show the claims of a document in a notebook: its words, the verdict, why it matters, and the evidence."""

import re
from html import escape

import pandas as pd
from IPython.display import HTML, Markdown, display

from ropelab.bench import records as measurements
from ropelab.bench.records import Selection, Where
from ropelab.study.engine.claims import documents, load_claims
from ropelab.study.engine.findings import finding
from ropelab.study.engine.ledger import WEAK, counts, ledger, short
from ropelab.study.engine.verdict import Outcome

_FOLDED = {
    "statement": "The claim in our words",
    "measured": "Measured",
    "beyond": "Beyond the document",
    "remarks": "Remarks",
    "evidence": "Evidence",
}


def show_claims(document: str, records: Where) -> pd.DataFrame:
    """Display the verdict on the document, publish the counts as a finding, and fold every claim with its verdict.

    The claims that matter to an engineer (`Claim.matters`) have a fold before that of the others. A claim is a line
    with its verdict, which opens on its quotation and its evidence.
    A claim of another GPU than that of ``records`` is judged by the records of its own GPU, if they can tell.

    Args:
        document: the key of the document, as ``"deepspeed"``.

    Returns:
        The ledger of the document, see `engine.ledger.ledger`.
    """
    found = ledger(document=document, records=records)
    where = measurements.selection(records)
    claims = load_claims(document)
    untold = set(found.id[found.outcome == Outcome.UNTOLD])
    for gpu in measurements.gpus(where.directory):
        named = [claim.id for claim in claims if claim.gpu and claim.id in untold and claim.is_of(gpu)]
        if named:
            own = ledger(document=document, only=named, records=Selection(where.directory, gpu))
            own = own[own.outcome != Outcome.UNTOLD].assign(on=short(gpu))
            found = pd.concat([found[~found.id.isin(own.id)], own]).sort_values("id", ignore_index=True)
    (about,) = (one for one in documents() if one.key == document)
    display(Markdown(f"**Verdict.** {about.verdict.format_map(dict(zip(found.id, found.says, strict=True)))}"))
    name = found.document.iloc[0]
    finding(
        f"The outcomes of the {len(found)} claims of {name}: {counts(found, 'outcome')}. "
        f"The basis of the verdicts: {counts(found, 'basis')}."
    )
    matters = {claim.id: claim.matters for claim in claims}
    shown: dict[bool, list[str]] = {True: [], False: []}
    for row in found.fillna("").to_dict("records"):
        shown[bool(matters[row["id"]])].append(_claim(row, matters[row["id"]]))
    for what, rows in (("claims that matter to an engineer", shown[True]), ("other claims", shown[False])):
        if rows:
            display(HTML(f"<details><summary>The {len(rows)} {what}</summary>{''.join(rows)}</details>"))
    return found


def said(row: dict) -> tuple[str, str]:
    """The verdict in two sentences: the outcome, and the decisive numbers, or else the claim in our words."""
    lead = f"It cannot be told whether the claim holds: that would need {row['needs']}"
    if row["outcome"] != Outcome.UNTOLD:
        lead = _in_words(row["words"]).capitalize()
    if (commit := re.search(r"the verdict of commit (\w+)", row["remarks"])) is not None:
        lead += f" (recorded at {commit[1]}, without its figures)"
    if row.get("on"):
        lead += f", on the document's GPU, an {row['on']}"
    if row["remarks"].startswith(WEAK) and row["outcome"] != Outcome.UNTOLD:
        lead += ", on weak evidence"
    return f"{lead}.", row["says"] or ("" if row["outcome"] == Outcome.HOLDS else "It says: ") + row["statement"]


def _in_words(words: str) -> str:
    """The outcome as a sentence."""
    return f"the effect is {words}" if words.startswith(("larger", "smaller")) else f"the claim {words}"


def _claim(row: dict, matters: str) -> str:
    """A claim as HTML: a line with its verdict, which opens on its quotation, why it matters and the evidence."""
    rest = "".join(f"<dt>{name}</dt><dd>{escape(row[key])}</dd>" for key, name in _FOLDED.items() if row[key])
    lead, number = said(row)
    return (
        f"<details><summary>{row['id']}, by the {row['by']}. <strong>{escape(lead)}</strong> {escape(number)}</summary>"
        f"<blockquote>{escape(row['quote'])}</blockquote>"
        f"{f'<p><em>Why it matters.</em> {escape(matters)}</p>' if matters else ''}"
        f"<dl><dt>Basis</dt><dd>{escape(row['basis'])}</dd>{rest}</dl></details>"
    )
