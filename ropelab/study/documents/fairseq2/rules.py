"""The rules of the claims on fairseq2#1213 that are more than a comparison, and remarks.

The document's cells are float32, forward: the names of its kernels have no cast, and it speaks of ``forward(...)``.
"""

from __future__ import annotations

from collections.abc import Callable

import pandas as pd

from ropelab.bench.rows import is_right, timed
from ropelab.study.documents.fairseq2.evidence import CELL, LARGE, RATIOS, geometric, published, ratios
from ropelab.study.documents.fairseq2.findings import SHAPE
from ropelab.study.engine import noise
from ropelab.study.engine.claims import Claim
from ropelab.study.engine.comparisons import DOCUMENT, Comparison
from ropelab.study.engine.judging import above, counted, needed, printed, size
from ropelab.study.engine.ledger import remark, rule
from ropelab.study.engine.noise import exact
from ropelab.study.engine.verdict import Untold, Verdict, fact, untold
from ropelab.study.engine.words import value_range

PASSES = {"forward": 1, "forward and backward": 2}
OWN = ("float32", "forward")
"""The dtype and the direction of the document."""


@rule("FS-06", "fairseq2_inductor")
def two_more_kernels(claim: Claim, inductor: pd.DataFrame) -> Verdict:
    """In every pass RE in halves must launch the stated number of further kernels, and must be slower."""
    plain, reordered = _reordering(inductor)
    more, words = reordered.kernels - plain.kernels, []
    longer_by = reordered.median_us / plain.median_us

    def cell(part: tuple[str, str]) -> bool | None:
        longer = above(noise.ratio(reordered.loc[part], plain.loc[part]), 1.0)
        words.append(f"{' '.join(part)}: {more[part]:.0f} more kernels, {longer_by[part]:.2f} times as long")
        return False if more[part] != published()["kernels"] * PASSES[part[1]] else longer

    verdict = _first_and_beyond(claim, plain.index, cell, words)
    return verdict.with_text(verdict.measured, more=more[OWN], longer=longer_by[OWN])


@rule("FS-15", "fairseq2_inductor", "fairseq2_log")
def about_four_ms(claim: Claim, inductor: pd.DataFrame, document: pd.DataFrame) -> Verdict:
    """The time that RE in halves takes beyond RE in pairs, for each pass; no GPU is the document's."""
    plain, reordered = _reordering(inductor)
    shape, stated, words = published()["shape"], published()["kernels_ms"], []

    def cell(part: tuple[str, str]) -> Verdict:
        more = noise.difference(noise.time(reordered.loc[part]), noise.time(plain.loc[part]))
        added = more / exact(1000 * PASSES[part[1]])
        words.append(f"{added} ms in each pass ({' '.join(part)})")
        return size(added, printed(stated, 0), no_effect=0)

    cells = counted([cell(part) for part in plain.index], claim.quantifier)
    verdict = untold(claim.needs).beside(cells.with_text("; ".join(words)))
    log = document[(document["mode"] == "compiled") & (document.batch == shape[0])]
    log = log[log.seq_len * log.encoding_dim == shape[1] * shape[2]]
    log = log.pivot_table(index=SHAPE, columns="contender", values="ms")
    logged = log["RE reference"] - log["RE llama"]
    return verdict.with_text(
        "", f"in the log, the cell of as many bytes differs by {value_range(logged, '.1f')} ms",
        added=(reordered.median_us[OWN] - plain.median_us[OWN]) / 1000, stated=stated,
    )  # fmt: skip


@rule("FS-09", "fairseq2_reorderings")
def reorderings_compile_alike(claim: Claim, reorderings: pd.DataFrame) -> Verdict:
    """Whether Inductor generates the same code, up to names, for our ways, beyond the document, which shows none."""
    ran = reorderings[is_right(reorderings)]
    operators = {*published()["reorderings"], published()["reordering_used"]}
    named = ran.variant.map(lambda variant: set(variant.split(", ")) <= operators)
    if named.sum() < 2 or ran.code.isna().any():
        raise Untold("at least two ways to reorder with the named operators, compiled")

    def alike(rows: pd.DataFrame) -> Verdict:
        ways = "; ".join(f"{row.variant}: code {row.code}, {row.kernels:.0f} kernels" for row in rows.itertuples())
        return fact(rows.code.nunique() == 1).with_text(ways)

    counts = {"named": named.sum(), "codes": ran[named].code.nunique(), "ways": len(ran), "all": ran.code.nunique()}
    return untold(claim.needs).with_text("", **counts).beside(alike(ran))


@rule("FS-11", "fairseq2_grid", "fairseq2_inductor")
def cosines_as_baseline(claim: Claim, grid: pd.DataFrame, inductor: pd.DataFrame) -> Verdict:
    """The speed of RRE in pairs must be larger than the speed of RE in halves, cell by cell.

    Each speed is a fraction of the speed of the class whose own layout this is. The document compares 0.86 and 0.66 in
    this way.
    """

    def speeds(frame: pd.DataFrame, direction: str) -> Verdict:
        where = f"mode == 'compiled' and direction == '{direction}'"
        cells = {"record": "times", "where": where, "cell": ["dtype", *SHAPE], "protocol": DOCUMENT, "above": 1.0}
        rre, re = (
            Comparison.read(claim.id, cells | {"over": over, "under": under}).values({"times": frame}, claim.needs)
            for over, under in (RATIOS["llama"][::-1], RATIOS["reference"])
        )
        each = [noise.mean(list(found.values())) for found in (rre, re)]
        means = [value_range([one]) for one in each]
        return counted([above(rre[cell] / re[cell], 1.0) for cell in rre], claim.quantifier).with_text(
            f"speed in the foreign layout of the class at home there, RRE {means[0]} and RE {means[1]} in the mean of "
            f"{len(rre)} cells ({direction})",
            rre=each[0].value, re=each[1].value,
        )  # fmt: skip

    large = pd.concat((grid[grid.direction != "forward"], inductor))
    beyond = [speeds(large, direction) for direction in PASSES]
    both = counted(beyond, claim.quantifier).with_text("; ".join(one.measured for one in beyond))
    return speeds(grid, "forward").beside(both)


def another_compiler(grid: pd.DataFrame, document: pd.DataFrame) -> str:
    """What compiling does to RE in pairs, in the log and here."""
    forward = timed(grid[grid.direction == OWN[1]], "RE llama").rename(columns={"median_us": "ms"})
    each = []
    for frame in (document, forward):
        times = frame[frame.contender == "RE llama"].pivot_table(index=SHAPE, columns="mode", values="ms")
        each.append(value_range(times.compiled / times.eager))
    return (
        f"compiled RE for pairs takes {each[0]} of its eager time in the log, and {each[1]} here: another compiler "
        "(torch 2.11 here; the document is of June 2025 and prints no version)"
    )


for _claim in ("FS-07", "FS-11"):
    remark(_claim, "fairseq2_grid", "fairseq2_log")(another_compiler)


@remark("FS-08", "fairseq2_grid", "fairseq2_log", "fairseq2_summary")
def where_0_86_comes_from(
    grid: pd.DataFrame, document: pd.DataFrame, summary: pd.DataFrame
) -> tuple[str, dict[str, object]]:
    llama = summary[(summary["mode"] == "compiled") & (summary.ratio == "llama")].iloc[0]
    return (
        f"the log's ratios give {llama.of_inverses:.3f} in the mean, and {llama.of_large_inverses:.2f} in that of its "
        f"large shapes, of {LARGE:,} features and more; {another_compiler(grid, document)}"
    ), {"logged": llama.of_inverses}


@remark("FS-05", "fairseq2_grid", "fairseq2_log", "fairseq2_summary")
def where_1_12_comes_from(
    grid: pd.DataFrame, document: pd.DataFrame, summary: pd.DataFrame
) -> tuple[str, dict[str, object]]:
    found = ratios(document[[*CELL, "contender", "ms"]], "ms")
    native = geometric(found[(found.ratio == "native") & (found["mode"] == "compiled")].times)
    llama = summary[(summary["mode"] == "compiled") & (summary.ratio == "llama")].of_ratios.iloc[0]
    return (
        f"the log's times give {native:.3f}; its printed {published()['native_ratio']} is the arithmetic mean of RRE "
        f"llama over RE llama ({llama:.3f} from its ratios); {another_compiler(grid, document)}"
    ), {"logged": native}


@remark("FS-13", "fairseq2_session")
def what_the_session_tested(session: pd.DataFrame) -> str:
    items = session.set_index("kind")["items"]
    return (
        f"of {items.sum()} items of the logged session {items['timings']} time, {items['summary']} sums up, "
        f"{items['anything else']} may compare results"
    )


@remark("FS-03", "fairseq2_equality")
def tables_differ(equality: pd.DataFrame) -> str:
    tables = equality[equality.what == "tables"].sort_values("positions")
    worst = tables[(tables["first"] == "RE") & (tables.second == "RRE")].iloc[-1]
    return "" if worst.equal else (
        f"their tables differ: up to position {worst.positions:,.0f} by up to {worst.difference:.1e}, as both round "
        "the angle to float32, and not alike"
    )  # fmt: skip


def _reordering(inductor: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """RE compiled in pairs and in halves, by dtype and direction."""
    compiled = timed(inductor)
    compiled = compiled[compiled["mode"] == "compiled"].set_index(["dtype", "direction"])
    plain, reordered = (compiled[compiled.contender == name] for name in ("RE llama", "RE reference"))
    needed(plain.index[plain.index.isin([OWN])], "RE compiled in both layouts, in float32 and forward")
    needed(reordered.index[reordered.index.isin([OWN])], "RE compiled in both layouts, in float32 and forward")
    return plain, reordered.loc[plain.index]


def _first_and_beyond(claim: Claim, parts: pd.Index, cell: Callable, words: list[str]) -> Verdict:
    """The verdict on the document's cell, and beyond it the verdict on all others; ``cell`` adds to the words."""
    first = counted([cell(OWN)], claim.quantifier).with_text(words.pop())
    others = counted([cell(part) for part in parts if part != OWN], claim.quantifier)
    return first.beside(others.with_text("; ".join(words)))
