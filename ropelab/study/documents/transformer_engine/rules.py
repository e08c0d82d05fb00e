"""The rule of the claim on TransformerEngine#3057 that is more than a comparison, and remarks."""

from dataclasses import replace

import numpy as np
import pandas as pd

from ropelab.bench.rows import need
from ropelab.study.documents.transformer_engine import evidence, findings
from ropelab.study.documents.transformer_engine.grids import CODE, NEW, OLD, PACKAGES, SUMMED, canonical
from ropelab.study.engine.claims import Claim
from ropelab.study.engine.ledger import remark, rule
from ropelab.study.engine.verdict import Untold, Verdict, fact
from ropelab.study.engine.words import listed, value_range

LINEAR = 0.99
"""The least share of the variance of times that a line explains, where a claim states that they scale."""
MANY = 512
"""The sequences from which on the empty blocks take nearly all of the old grid's time."""


@rule("TE-01", "te_kernels")
def rows_times_sequences(claim: Claim, kernels: pd.DataFrame) -> Verdict:
    """The times must lie on a rising line over the blocks: in table B as the document times it, beyond it in all
    packings of one rank.
    """
    kernels = canonical(kernels, (CODE,))

    def on_a_line(table: pd.DataFrame) -> Verdict:
        table = table.dropna(subset=[OLD])
        blocks = table.freqs_len * table.n_seqs
        if len(table) < 3:  # a line goes through any two
            raise Untold(claim.needs)
        correlation, slope = blocks.corr(table[OLD]), np.polyfit(blocks, table[OLD], 1)[0]
        ns, explained = 1000 * slope / 2, 100 * correlation**2
        return fact(correlation > 0 and explained >= 100 * LINEAR).with_text(
            f"{ns:.2f} ns for each block and pass, {blocks.min():,} to {blocks.max():,} blocks; a line explains "
            f"{explained:.3f} % of the variance of {len(table)} times, all of {listed(table.tokens)} tokens",
            ns=ns, most=blocks.max(), rows=table.freqs_len.max(), explained=explained, launches=len(table),
        )  # fmt: skip

    table_b = findings.times(kernels, SUMMED).query("part == 'table B'")
    all_lengths = on_a_line(findings.times(kernels).query("cp_size == 1"))
    wider = replace(all_lengths, numbers={"explained_beyond": all_lengths.numbers["explained"]})
    return on_a_line(table_b).beside(wider)


@remark("TE-01", "te_published_b")
def price_of_a_block(published: pd.DataFrame) -> str:
    stated = published.ns_per_dead_block[published.n_seqs >= 128]
    return (
        f"in table B an empty block costs {value_range(stated)} ns from 128 sequences on; few empty blocks cost less "
        "each, because they hide behind live blocks"
    )


@remark("TE-05", "te_kernels")
def beside_the_packages(kernels: pd.DataFrame) -> str:
    table = findings.times(kernels, SUMMED).query("part == 'table B'")
    said = [findings.beside_the_packages(table)]
    if PACKAGES.old in table:
        many = table[table.n_seqs >= MANY]
        off = np.exp(np.log(many[OLD] / many[PACKAGES.old]).abs().max()) - 1
        said.append(f"the old grid's time is at most {off:.1%} off that of {PACKAGES.old} from {MANY} sequences on")
    return "; ".join(filter(None, said))


@remark("TE-06", "te_kernels", "te_published_b")
def growth_of_the_new_kernel(kernels: pd.DataFrame, published: pd.DataFrame) -> str:
    table = findings.times(kernels).query("part == 'table B'").set_index("n_seqs")
    new, stated = table[NEW], published.set_index("n_seqs").new_ms
    ends = [1, published.n_seqs.max()]
    grown, printed = (times[ends[1]] / times[ends[0]] - 1 for times in (new, stated))
    return (
        f"{ends[1]:,} sequences take {grown:+.1%} of the time of one (table B: {printed:+.0%}); since the review one "
        "thread searches, here every thread does"
    )


@remark("TE-11", "te_search")
def requests_of_a_warp(search: pd.DataFrame) -> str:
    row = search.set_index("n_seqs").loc[2401]
    asked = f"{row.warp_requests} requests of {evidence.THREADS} threads"
    return f"the threads of a warp ask for one address together: {asked}"


@remark("TE-22", "te_kernels")
def growth_with_one_search(kernels: pd.DataFrame) -> tuple[str, dict[str, object]]:
    """The growth from one sequence, which needs no search, to the most, by the document's protocol."""
    table = findings.times(kernels, SUMMED).query("part == 'table B'").set_index("n_seqs")
    need(table.columns, NEW, PACKAGES.new, "ropelab")
    most = table.index.max()
    grown = {
        words: table[name][most] / table[name][1] - 1
        for name, words in ((NEW, "every thread searches"), (PACKAGES.new, "one does"), ("ropelab", "none does"))
    }
    each = ", ".join(f"{by:+.1%} where {words}" for words, by in grown.items())
    return f"from 1 to {most:,} sequences the time grows by {each} (ropelab)", {
        "alone": table[PACKAGES.new][1] / table[NEW][1]
    }


@remark("TE-19", "te_kernels")
def both_conditions(kernels: pd.DataFrame) -> tuple[str, dict[str, object]]:
    table = findings.choices(kernels)
    slower = findings.missed(table, "first").query("part == 'table B'").n_seqs
    told = "; ".join(f"the {name} condition {findings.missed_words(table, name)}" for name in ("first", "merged"))
    said = f"{told}; in table B the first condition takes the slower kernel for {listed(sorted(slower))} sequences"
    return said, {"missed": len(findings.missed(table, "merged")), "packings": len(table)}
