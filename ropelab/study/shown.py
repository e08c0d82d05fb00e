"""Show records, evidence, figures and tables in a notebook, or say why one is missing."""

from __future__ import annotations

import pandas as pd
from IPython.display import Markdown, display

from ropelab.bench import records
from ropelab.bench.records import Record, Unusable
from ropelab.study.engine.computed import Evidence
from ropelab.study.engine.findings import finding
from ropelab.study.engine.ledger import find_evidence
from ropelab.study.plots import registry
from ropelab.study.topics.performance.comparison import number

LEFT = {"text-align": "left", "vertical-align": "top"}


class Shown:
    """A notebook's view of the records in ``where``."""

    def __init__(self, where: records.Selection):
        self.where = where

    def record(self, study: str) -> Record | None:
        """The record of a study. Without a usable record: None, and a note that says why."""
        try:
            return records.load(study, self.where)
        except Unusable as error:
            display(Markdown(f"*Not measured yet: {error}.*"))
            return None

    def evidence(self, name: str) -> Evidence | None:
        """The evidence that a CPU computes now, else its record. Without either: None, and a note that says why."""
        why = f"{name} needs published code: `make peers` puts it into `build/peers`"
        try:
            if found := find_evidence(name, records=self.where):
                return found
        except Unusable as error:
            why = str(error)
        display(Markdown(f"*{why}.*"))
        return None

    def figure(self, name: str, sentence: str | None = None) -> None:
        """Draw a figure, or a note on the missing record; then publish the sentence, if there is one, as a finding."""
        try:
            registry.show(name, self.where)
        except Unusable as error:
            display(Markdown(f"*There is no figure: {error}.*"))
        if sentence:
            finding(sentence)

    def table(self, frame: pd.DataFrame, *columns: str) -> None:
        """Display a table, or these columns of it."""
        frame = frame[list(columns or frame)]
        display(frame.style.hide(axis="index").format(number, na_rep="").set_properties(**LEFT))
