"""Make the rows of the ledger of claims for the report."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pandas as pd

from ropelab.bench import processes, records
from ropelab.bench.workers import cores
from ropelab.study.engine import claims as documents
from ropelab.study.engine import ledger as judged


@dataclass(frozen=True)
class Ledger:
    """A document's claims with their verdicts on one GPU, in a row each; ``trouble`` says why there are no rows.

    ``each`` has the ledger of each GPU.
    """

    key: str
    document: str
    rows: list[dict]
    trouble: str = ""
    each: dict[str, pd.DataFrame] = field(default_factory=dict)
    url: str = ""


@contextmanager
def begun(where: records.Where = records.MEASUREMENTS) -> Iterator[Callable[[], list[Ledger]]]:
    """Begin the ledgers of all documents, in processes beside the caller; the function waits for them."""
    known = documents.documents()
    count = max(1, min(len(known), cores() // 4))
    with processes.Pool(count, processes.forked([__name__]), initializer=processes.quiet) as pool:
        found = [(document, pool.submit(ledger_of, document.key, where)) for document in known]
        yield lambda: [
            _without_rows(document, error) if (error := one.exception()) else one.result() for document, one in found
        ]


def ledger_of(key: str, where: records.Where = records.MEASUREMENTS) -> Ledger:
    """The ledger of the document with this key."""
    (document,) = (one for one in documents.documents() if one.key == key)
    return ledger(document, where)


def ledger(document: documents.Document, where: records.Where = records.MEASUREMENTS) -> Ledger:
    """The rows of a document's ledger, ready for the page, or the reason why there are no rows."""
    where = records.selection(where)
    try:
        each = judged.by_gpu(where.directory, document=document.key)
        each = each or {"": judged.ledger(document=document.key, records=where)}
        rows = each[where.gpu or next(iter(each))].fillna("").to_dict("records")
    except Exception as error:  # the report must appear all the same, and state the error
        return _without_rows(document, error)
    return Ledger(document.key, document.name, rows, each=each, url=document.url)


def _without_rows(document: documents.Document, error: BaseException) -> Ledger:
    trouble = f"the ledger of {document.name} could not be computed: {type(error).__name__}: {error}"
    return Ledger(document.key, document.name, [], trouble)
