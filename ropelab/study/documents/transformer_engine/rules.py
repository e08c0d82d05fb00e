"""Remarks on the claims of TransformerEngine#3057, whose tests stand in the file of its claims."""

import pandas as pd

from ropelab.study.documents.transformer_engine import evidence, findings
from ropelab.study.documents.transformer_engine.grids import CODE, NEW, OLD, canonical
from ropelab.study.documents.transformer_engine.measure import SUMMED
from ropelab.study.engine.ledger import remark
from ropelab.study.engine.words import listed, value_range


@remark("TE-01", "te_kernels", "te_published_b")
def price_of_a_block(kernels: pd.DataFrame, published: pd.DataFrame) -> tuple[str, dict[str, object]]:
    fit = findings.dead_block_fit(canonical(kernels, (CODE,)))
    off = (fit[OLD] / fit.fitted_us - 1).abs()
    stated = published.ns_per_dead_block[published.n_seqs >= 128]
    return (
        f"{findings.block_price(fit)}, in table B {value_range(stated)} ns from 128 sequences on; this price explains "
        f"{len(fit)} cells within {off.max():.0%}, half of them within {off.median():.0%}; few empty blocks cost less "
        "each, because they hide behind live blocks"
    ), {"ns": fit.ns_per_dead_block.median(), "empty": fit.dead_blocks.max()}


@remark("TE-05", "te_kernels")
def beside_the_packages(kernels: pd.DataFrame) -> str:
    return findings.beside_the_packages(findings.times(kernels, SUMMED).query("part == 'table B'"))


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


@remark("TE-19", "te_kernels")
def both_conditions(kernels: pd.DataFrame) -> tuple[str, dict[str, object]]:
    table = findings.choices(kernels)
    slower = findings.missed(table, "first").query("part == 'table B'").n_seqs
    told = "; ".join(f"the {name} condition {findings.missed_words(table, name)}" for name in ("first", "merged"))
    said = f"{told}; in table B the first condition takes the slower kernel for {listed(sorted(slower))} sequences"
    return said, {"missed": len(findings.missed(table, "merged")), "packings": len(table)}
