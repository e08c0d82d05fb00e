"""The rule of the claim on TransformerEngine#3057 that is more than a comparison, and remarks."""

import pandas as pd

from ropelab.study.documents.transformer_engine import evidence, findings
from ropelab.study.documents.transformer_engine.grids import CODE, NEW, OLD, canonical
from ropelab.study.documents.transformer_engine.measure import SUMMED
from ropelab.study.engine import noise
from ropelab.study.engine.claims import Claim
from ropelab.study.engine.judging import counted, near
from ropelab.study.engine.ledger import remark, rule
from ropelab.study.engine.verdict import Untold, Verdict
from ropelab.study.engine.words import listed, value_range


@rule("TE-01", "te_kernels")
def rows_times_sequences(claim: Claim, kernels: pd.DataFrame) -> Verdict:
    """The time must be that of the live blocks and one price for each empty block, in every launch of one rank."""
    fit = findings.dead_block_fit(canonical(kernels, (CODE,)))
    if fit.empty:
        raise Untold(claim.needs)
    apart = fit[OLD] / fit.fitted_us
    cells = [near(noise.exact(one).widened(noise.FLOOR)) for one in apart]
    return counted(cells, claim.quantifier).with_text(
        f"{findings.block_price(fit)}; the time is {value_range(apart)} of that by this price in {len(fit)} launches",
        ns=fit.ns_per_dead_block.median(), empty=fit.dead_blocks.max(), within=cells.count(True), fitted=len(fit),
    )  # fmt: skip


@remark("TE-01", "te_published_b")
def price_of_a_block(published: pd.DataFrame) -> str:
    stated = published.ns_per_dead_block[published.n_seqs >= 128]
    return (
        f"in table B an empty block costs {value_range(stated)} ns from 128 sequences on; few empty blocks cost less "
        "each, because they hide behind live blocks"
    )


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
