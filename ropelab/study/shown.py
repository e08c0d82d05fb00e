"""Show records, evidence, figures and tables in a notebook, or say why one is missing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from html import escape

import matplotlib.pyplot as plt
import pandas as pd
import seaborn as sns
from IPython.display import HTML, Markdown, display
from matplotlib.axes import Axes
from pandas.io.formats.style import Styler

from ropelab.bench import records, staleness
from ropelab.bench.records import Record, Unusable
from ropelab.study.engine.computed import Evidence
from ropelab.study.engine.findings import finding
from ropelab.study.engine.ledger import find_evidence
from ropelab.study.engine.record_links import show_records
from ropelab.study.engine.words import listed
from ropelab.study.plots import gpus
from ropelab.study.plots.looks import CONTENDERS
from ropelab.study.topics.performance.comparison import number

WORDS = {
    "seq_len": "tokens", "forward_error": "error of the result", "gradient_error": "error of the gradient",
    "norm_ratio": "norm / right norm", "has_triton_module": "has the kernel", "reaches_kernel": "reach the kernel",
    "table_dtype": "dtype of the tables", "in_tree": "in the tree", "extra_bytes": "extra bytes",
    "fraction_of_copy": "speed / a copy's", "result_buffers": "buffers of the result", "head_dim": "features",
    "eager_ms": "eager, ms", "compile_ms": "torch.compile, ms", "triton_ms": "kernel, ms",
    "stated_speedup": "stated speed-up", "over_eager": "eager / kernel", "over_compile": "compile / kernel",
    "over_compiled": "eager / compile", "n_seqs": "sequences", "max_span": "longest sequence",
    "freqs_len": "rows of the table", "longest": "longest sequence", "kind": "lengths", "cp_size": "ranks",
    "cp_rank": "rank", "dead_blocks": "empty blocks", "ns_per_dead_block": "ns for each empty block",
    "old_ms": "old grid, ms", "new_ms": "new grid, ms", "speedup": "speed-up",
    "old_share_percent": "share, old grid, %", "new_share_percent": "share, new grid, %",
    "alone_us": "q and k alone, µs", "layer_us": "layer, µs", "added": "added share", "row": "stage",
    "stated_change_percent": "stated change, %", "change_ms": "change, ms", "change_percent": "change, %",
}  # fmt: skip
"""A column of a record or of evidence -> its words in a table."""


class Shown:
    """A notebook's view of the records in ``where``."""

    def __init__(self, where: records.Selection):
        self.where = where

    def having(self, study: str) -> Shown:
        """This view, or the view of the first GPU that has the study if the chosen GPU has no record of it."""
        try:
            return records.load(study, self.where) and self
        except records.Missing:
            return Shown(replace(self.where, gpu=None))

    def record(self, study: str) -> Record | None:
        """The record of a study. Without a usable record: None, and a note that says why."""
        try:
            return records.load(study, self.where)
        except Unusable as error:
            display(Markdown(f"*Not measured yet: {error}.*"))
            return None

    def every(self, study: str) -> pd.DataFrame | None:
        """The table of a study from every GPU, or from the chosen GPU, with a column ``gpu``; None as in `record`."""
        try:
            return gpus.together(study, self.where)
        except Unusable as error:
            display(Markdown(f"*Not measured yet: {error}.*"))
            return None

    def ages(self, *studies: str) -> None:
        """Say once for a chapter when its records were measured, and which of them are older than today's kernels."""
        found = [record for study in studies if (record := self.record(study))]
        if not found:
            return
        gpu, _, *versions = found[0].footer.split(" · ")[:4]
        days = sorted(record.provenance["utc"][:10] for record in found)
        span = " to ".join(dict.fromkeys((days[0], days[-1])))
        told = f"The records are of an **{gpu}**, {span}, {listed(versions)}."
        if old := [record.study for record in found if staleness.of_kernels(record.stale)]:
            told += (
                f" Kernels have changed since these: {listed(f'`{name}`' for name in old)}. The times are those of the "
                "kernels of their day, and today's kernels may be faster or slower: "
                f'`make measure ONLY="{" ".join(old)}"` on a GPU renews them.'
            )
        display(Markdown(told))

    def evidence(self, name: str) -> Evidence | None:
        """The evidence that a CPU computes now, else its record. Without either: None, and a note that says why."""
        why = f"{name} needs published code: `python -m ropelab.study peers` puts it into `build/peers`"
        try:
            if found := find_evidence(name, records=self.where):
                return found
        except Unusable as error:
            why = str(error)
        display(Markdown(f"*{why}.*"))
        return None

    def drawn(self, axes: Axes | sns.axisgrid.Grid, *studies: str) -> None:
        """Show what the cell has drawn, once, and below it a link to each of its records."""
        plt.close(figure := axes.figure)
        display(figure)
        show_records(studies, self.where)

    def finding(self, say: Callable[..., str], *studies: str, by: str = "") -> None:
        """Publish what ``say`` makes of the tables of these studies as a finding; or note what is not measured."""
        with self.gap():
            if sentence := say(*(record.frame for record in records.load_together(studies, self.where))):
                finding(sentence, by=by)

    @contextmanager
    def gap(self) -> Iterator[None]:
        """A note takes the place of the rest of the block, where it needs what the records lack."""
        try:
            yield
        except Unusable as lacking:
            display(Markdown(f"*{lacking}.*"))

    def table(self, frame: pd.DataFrame, *columns: str) -> None:
        """Display a table, or these columns of it."""
        display(styled(frame[list(columns or frame)]))

    def fold(self, summary: str, *blocks: str | pd.DataFrame | Styler) -> None:
        """Display tables and text that a reader opens by their summary; words in backticks become code."""
        display(HTML(f"<details><summary>{_code(summary)}</summary>{''.join(map(_html, blocks))}</details>"))


def styled(frame: pd.DataFrame) -> Styler:
    """A table without its index and its empty columns, with words for columns and contenders; numbers stand right."""
    frame = frame.dropna(axis="columns", how="all").rename(columns=CONTENDERS.label).rename(columns=WORDS)
    if "contender" in frame:
        frame = frame.assign(contender=frame.contender.map(CONTENDERS.label))
    left = [{"selector": "", "props": "text-align: left"}]
    words = dict.fromkeys(frame.select_dtypes(exclude="number"), left)
    return frame.style.hide(axis="index").format(number, na_rep="").set_table_styles(words)


def _html(block: str | pd.DataFrame | Styler) -> str:
    if not isinstance(block, str):
        return (styled(block) if isinstance(block, pd.DataFrame) else block).to_html()
    text = _code(block)
    return f"<pre>{text}</pre>" if "\n" in text else f"<p>{text}</p>"


def _code(text: str) -> str:
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))
