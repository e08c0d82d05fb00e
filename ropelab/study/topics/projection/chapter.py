"""Show the records of the chapter on the projection: its tables, its figures and its findings.

Without a record the constructor says so once, and nothing else is shown.
"""

import pandas as pd
from IPython.display import Markdown, display

from ropelab.bench.records import Selection, Unusable
from ropelab.study.engine.findings import MEASURED, finding
from ropelab.study.plots import gpus
from ropelab.study.topics.projection import figures, findings


class Chapter:
    """The record `projection` of every GPU in ``where``."""

    def __init__(self, where: Selection):
        self.where = where
        try:
            self.frame, self._footer = gpus.together(findings.RECORD, where)
        except Unusable as error:
            self.frame, self._footer = pd.DataFrame(), ""
            display(Markdown(f"*No figures and no findings: {error}.*"))

    def figure(self, name: str) -> None:
        """Draw a figure of `figures`: "law", "by_tokens", "contenders" or "winners"."""
        if len(self.frame):
            display(getattr(figures, name)(self.frame, self._footer))
            gpus.link(findings.RECORD, self.where)

    def say(self, name: str, *, headline: bool = False) -> None:
        """Publish a sentence of `findings.SENTENCES` as a finding."""
        if len(self.frame):
            finding(findings.SENTENCES[name](self.frame), headline=headline, by=MEASURED)

    def rates(self, q_heads: int, k_heads: int, inputs: int) -> None:
        """Show the rates of each GPU, and the share of the pass in a product of these heads with K = ``inputs``."""
        if len(self.frame):
            display(Markdown(f"{q_heads} query heads, {k_heads} key heads, K = {inputs:,}, many tokens:"))
            display(findings.rates(self.frame, q_heads, k_heads, inputs).style.hide(axis="index"))

    def losses(self) -> None:
        """Show what large products lose, for each GPU and K."""
        if len(self.frame):
            display(findings.loss_table(self.frame))

    def sizes(self) -> None:
        """Show from which size on a kernel without a pass wins."""
        if len(self.frame):
            display(findings.sizes(self.frame).style.format(precision=0, na_rep="never", thousands=","))

    def blocks(self) -> None:
        """Show the record `projection_blocks`: products with a norm and many tokens, over cuBLAS alone."""
        try:
            frame = gpus.together(findings.BLOCKS, self.where)[0]
        except Unusable as error:
            display(Markdown(f"*No table: {error}.*"))
            return
        rows = findings.blocks(frame).reset_index()
        rows = rows[rows.block.str.contains("norm") & rows.tokens.isin((4096, 16384))]
        display(rows.style.hide(axis="index").format(precision=2, na_rep=""))
        gpus.link(findings.BLOCKS, self.where)
