"""Make the tables and the figure of README.md and of the guide from the records.

A test compares them with the files.
"""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pandas as pd

from ropelab.bench import records, staleness
from ropelab.bench.rows import is_right
from ropelab.bench.table_free import TABLE_FREE
from ropelab.study.documents.fairseq2 import findings as fairseq2_findings
from ropelab.study.engine import kept
from ropelab.study.engine.claims import AUTHOR, documents
from ropelab.study.engine.ledger import by_gpu, disagreements, short, side_by_side, tally
from ropelab.study.engine.verdict import Basis, Outcome
from ropelab.study.engine.words import listed, value_range
from ropelab.study.site import bibliography
from ropelab.study.topics.one_pass import findings as one_pass
from ropelab.study.topics.performance import comparison, dense, shortfalls, speed_figure
from ropelab.study.topics.performance import findings as family_findings
from ropelab.study.topics.projection import findings as projection

COLUMNS = {
    "ropelab": "ropelab",
    "torch.compile": "hf_compiled",
    "Liger (in place)": "liger",
    "flash-attn": "flash_attn",
    "torchembed": "torchembed 0.3.2",
    "eager": "hf_eager",
}
"""Column of a table -> the contender that the column shows."""
CONFIGURATIONS = records.ROOT / "data" / "models" / "configurations.csv"
README = records.ROOT / "README.md"
GUIDE = records.ROOT / "ropelab" / "study" / "site" / "guide"
FIGURES = records.ROOT / "data" / "figures"
GPU = records.PREFERRED[0]
"""The GPU whose records the texts show, whatever GPU is at hand."""


def texts() -> list[Path]:
    """README.md, then the pages of the guide in their order."""
    return [README, *sorted(GUIDE.glob("*.md"))]


def tables() -> dict[str, str]:
    """Name -> the markdown that a text has between ``<!-- name -->`` and ``<!-- end -->``."""
    only = records.selection(records.MEASUREMENTS, GPU)
    ledgers, heads = by_gpu(), record("model_heads")
    return {
        "figure": _picture(record(), heads), "speed": _speed(record(), heads), "family": family(only),
        "one_pass": _one_pass(list(ledgers)), "projection": _projection(list(ledgers)),
        "table_free": _table_free(only), "shortfalls": _shortfalls(only), "wide_heads": _wide_heads(only),
        "claims": claims(ledgers), "documents": outcomes(ledgers), "unclaimed": _unclaimed(),
        "references": bibliography.markdown(), "models": _models(),
    }  # fmt: skip


def figures() -> dict[Path, str]:
    """File -> the SVG of the figure of README.md; there is a file for each theme."""
    shown = record()
    fractions, machine = _fractions(shown), shown.provenance["gpu"]["name"]
    stamp = _measured([shown]).strip()
    return {
        FIGURES / f"speed-{theme}.svg": speed_figure.svg(fractions, machine, stamp, theme)
        for theme in speed_figure.THEMES
    }


def record(study: str = "dense") -> records.Record:
    """The record of a study, by default the record behind the table of speeds."""
    return records.load(study, gpu=GPU)


def update(files: Iterable[Path] | None = None) -> None:
    """Write the figure, and write the tables into the files that have a place for them, by default all `texts`.

    Verdicts on published code that is not at hand stay as they were kept (`ropelab.study.engine.kept`).
    """
    kept.write(by_gpu())
    FIGURES.mkdir(exist_ok=True)
    for path, svg in figures().items():
        path.write_text(svg)
    computed = tables()
    for file in texts() if files is None else files:
        text = file.read_text()
        for name, table in computed.items():
            before, mark, rest = text.partition(f"<!-- {name} -->\n")
            _, _, after = rest.partition("<!-- end -->")
            if mark:
                text = f"{before}{mark}{table}<!-- end -->{after}"
        file.write_text(text)


def _picture(record: records.Record, heads: records.Record) -> str:
    """The figure of chosen sizes in HTML, in the theme of the page on GitHub, and the median of drawn calls."""
    words = speed_figure.words(_fractions(record), record.provenance["gpu"]["name"])
    dark, light = (f"data/figures/speed-{theme}.svg" for theme in ("dark", "light"))
    return (
        f'<picture>\n<source media="(prefers-color-scheme: dark)" srcset="{dark}">\n'
        f'<img src="{light}" width="640" alt="{words}">\n</picture>\n\n'
        f"{textwrap.fill(f'The figure has chosen sizes. {dense.drawn_sentence(heads.frame)}', 118)}\n"
    )


def _fractions(record: records.Record) -> dict[str, pd.Series]:
    """The label of each contender -> its fractions of a copy in all cases."""
    times = comparison.timed(record.frame)
    return {label: times[times.contender == name].fraction_of_copy for label, name in COLUMNS.items()}


def _speed(record: records.Record, heads: records.Record) -> str:
    """The fractions of a copy of ours and of each peer, the bars that are missed, and the median of drawn calls."""
    times = comparison.timed(record.frame.assign(cell=comparison.named_cells(record.frame)))
    rows = [
        [cell, *(value_range(rows[rows.contender == name].fraction_of_copy) for name in COLUMNS.values())]
        for cell, rows in times.groupby("cell", sort=False)
    ]
    speeds = _table(["batch x tokens, q/k heads, head_dim", *COLUMNS], rows)
    missed = textwrap.fill(f"{dense.shortfall_sentence(record.frame)} {dense.drawn_sentence(heads.frame)}", 118)
    return f"{_measured([record])}{speeds}\n{missed}\n"


def _one_pass(gpus: Sequence[str]) -> str:
    """The times of norm, rotation and cache write in one launch beside vLLM and FlashInfer, on each GPU."""
    found = {gpu: records.load(one_pass.RECORD, gpu=gpu) for gpu in gpus}
    table = one_pass.beside_peers({gpu: record.frame for gpu, record in found.items()}).reset_index()
    rows = [
        [row.operation, f"{row.tokens:,}", f"{row.q_heads} + {row.k_heads} x {row.head_dim}", row.cache, *row[-3:]]
        for _, row in table.drop_duplicates(["operation", "tokens", "q_heads", "k_heads", "cache"]).iterrows()
    ]
    head = ["us on an " + " / ".join(map(short, gpus)), "tokens", "rows of q + of k and v", "cache"]
    return _measured(found.values()) + _table([*head, "ropelab", "vLLM", "FlashInfer"], rows)


def _projection(gpus: Sequence[str]) -> str:
    """The projection with the rotation over the projection alone, on each GPU."""
    found = {gpu: records.load(projection.RECORD, gpu=gpu) for gpu in gpus}
    table = projection.over_cublas({gpu: record.frame for gpu, record in found.items()})
    head = [
        "tokens, " + " / ".join(map(short, gpus)),
        "cuBLAS, then the pass",
        "one kernel, Triton",
        "one kernel, quack",
    ]
    return _measured(found.values()) + _table(head, [[f"{row.Index:,}", *row[1:]] for row in table.itertuples()])


def family(where: records.Where) -> str:
    """The smallest fraction of a copy of each contender, by format and cell; then every bar of the kernel family."""
    studies = dict.fromkeys(study for needed, _ in family_findings.QUESTIONS.values() for study in needed)
    found, missing = {}, []
    for study in studies:
        try:
            found[study] = records.load(study, where)
        except records.Missing:
            missing.append(study)
    text = _measured(found.values())
    if {"dense", "formats"} <= found.keys():
        smallest = family_findings.smallest_fractions(found["dense"].frame, found["formats"].frame)
        names = dict(list(COLUMNS.items())[:4])  # the other contenders are far behind these
        smallest = smallest.reindex(columns=list(names.values()))
        formats, cells = (list(dict.fromkeys(smallest.index.get_level_values(level))) for level in smallest.index.names)
        each = smallest.map(lambda fraction: "–" if pd.isna(fraction) else f"{fraction:.2f}").agg(" / ".join, axis=1)
        rows = [[cell, *(each.get((name, cell), "") for name in formats)] for cell in cells]
        text += f"Smallest fraction of a copy over layouts and directions: {' / '.join(names)}.\n\n"
        text += _table(["batch x tokens, q/k heads, head_dim", *formats], rows) + "\n"
    board = family_findings.scoreboard(where)
    board = board[board.verdict != "not measured"]
    board.question = board.question.mask(board.question.duplicated(), "")
    text += _table(["", "worst case of ropelab", "bar", ""], board.iloc[:, :4].values.tolist())
    return text + (f"\nNot measured yet: {', '.join(missing)}.\n" if missing else "")


def _table_free(where: records.Where) -> str:
    """The speed of the kernel with and without tables beside a copy, and the error of its cosines and sines."""
    times, errors = (records.load(study, where) for study in ("table_free", "table_free_error"))
    names = comparison.OURS, TABLE_FREE
    ours = times.frame[times.frame.contender.isin(names) & is_right(times.frame)]
    rows = [
        [cell, seq_format, *(value_range(rows[rows.contender == name].fraction_of_copy) for name in names)]
        for (cell, seq_format), rows in ours.groupby(["cell", "seq_format"], sort=False)
    ]
    worst = errors.frame[["cos_ulps", "sin_ulps"]].max(axis=None)
    text = _measured([times]) + _table(["fraction of a copy", "", "with tables", "without"], rows)
    return text + (
        f"\nLargest error of {2 * errors.frame['values'].sum():,} cosines and sines, at every position below "
        f"{errors.frame['last'].max() + 1:,}: {worst:.2f} units of the last place.\n"
    )


def _shortfalls(where: records.Where) -> str:
    """A line for each shortfall of the kernels."""
    found = {study: records.load(study, where) for study in shortfalls.STUDIES}
    lines = shortfalls.sentences({study: record.frame for study, record in found.items()})
    return _measured(found.values()) + "".join(_paragraph(line, "- ") for line in lines)


def _wide_heads(where: records.Where) -> str:
    """The speed of the kernel where a head is as wide as the model."""
    grid, inductor = (records.load(f"fairseq2_{name}", where) for name in ("grid", "inductor"))
    text = fairseq2_findings.wide_heads(grid.frame, inductor.frame, grid.provenance["gpu"]["l2_bytes"])
    return _measured([grid, inductor]) + _paragraph(
        f"Heads as wide as the model (fairseq2's encoders): the kernel runs at {text}"
    )


def claims(ledgers: Mapping[str, pd.DataFrame]) -> str:
    """The claims by outcome and by basis, those with other outcomes on other GPUs, and every claim with its verdicts.

    Args:
        ledgers: GPU -> ledger, as `ropelab.study.engine.ledger.by_gpu` returns them.
    """
    first = next(iter(ledgers.values()))
    authors = first.by == AUTHOR
    text = f"{len(first)} claims of {first.document.nunique()} documents: {authors.sum()} of their authors, "
    text += f"{(~authors).sum()} of reviewers.\n\n{outcomes(ledgers)}\n{_counts(ledgers, 'basis', list(Basis))}\n"
    differing = disagreements(ledgers).id
    text += _paragraph(f"Other outcomes on another GPU: {listed(differing)}.") + "\n"
    claims = pd.concat(ledgers)
    untold = claims[claims.outcome == Outcome.UNTOLD].drop_duplicates("id").sort_values("id")
    missing = "; ".join(f"{row.id} ({row.needs})" for row in untold.itertuples())
    text += _paragraph(f"Cannot be told on one of the GPUs, for lack of: {missing}.") + "\n"
    verdicts = pd.DataFrame({short(gpu): rows.set_index("id").words for gpu, rows in ledgers.items()})
    beyond = pd.DataFrame({gpu: rows.set_index("id").beyond.str.split(": ").str[0] for gpu, rows in ledgers.items()})
    for name, rows in (("authors", first[authors]), ("reviewers", first[~authors])):
        cells = [
            [row.id, row.statement, *verdicts.loc[row.id], side_by_side(beyond.loc[row.id]), row.basis]
            for row in rows.itertuples()
        ]
        head = [f"claims of {name}", "in our words", *verdicts, "beyond the document", "basis"]
        text += _table(head, cells) + "\n"
    return text


def outcomes(ledgers: Mapping[str, pd.DataFrame]) -> str:
    """The number of claims by outcome: a row for the authors of each document, and one for all reviewers."""
    return _counts(ledgers, "outcome", list(Outcome))


def _counts(ledgers: Mapping[str, pd.DataFrame], axis: str, names: Sequence[str]) -> str:
    counts = tally(ledgers, axis, names)
    return _table(
        [counts.index.name, *counts], [[who, *row] for who, row in zip(counts.index, counts.values, strict=True)]
    )


def _unclaimed() -> str:
    """The statements of the documents that the study does not judge, each with the reason."""
    rows = [[found.name, f'"{quote}"', reason] for found in documents() for quote, reason in found.unclaimed]
    return _table(["document", "statement", "why it is no claim here"], rows)


def _models() -> str:
    """The model types that `ropelab.rope_from_config` reads as transformers does, and those that it refuses."""
    outcomes = pd.read_csv(CONFIGURATIONS).groupby("model_type").outcome
    refused = outcomes.agg(lambda found: set(found) != {"equal"})
    reads, refuses = (listed(f"`{name}`" for name in refused.index[chosen]) for chosen in (~refused, refused))
    lines = (
        f"`rope_from_config` reads these `model_type` as transformers does: {reads}.",
        f"For these it raises an error, perhaps in some layers alone, that names the key or another way: {refuses}.",
    )
    return "\n".join(map(_paragraph, lines))


def _paragraph(text: str, bullet: str = "") -> str:
    lines = textwrap.fill(text, 120, initial_indent=bullet, subsequent_indent=" " * len(bullet), break_on_hyphens=False)
    return lines + "\n"


def _measured(found: Iterable[records.Record]) -> str:
    """A line for each machine, day and set of versions with which the records were measured."""
    times: dict[str, list[str]] = {}
    for record in found:
        times.setdefault(_foot(record), []).append(record.provenance["utc"])
    lines = [
        f"Measured on {footer} (record of {utc[0]})." if len(utc) == 1 else
        f"Measured on {footer} ({len(utc)} records of {min(utc)} to {max(utc)})."
        for footer, utc in times.items()
    ]  # fmt: skip
    return "\n".join(lines) + "\n\n"


def _foot(record: records.Record) -> str:
    """The record's footer as if the record knew the hashes of its kernels alone.

    An edit of any other module would change README.md too, although the numbers depend on the kernels alone.
    """
    hashes = record.provenance.get("modules", {}).items()
    kernels = {name: digest for name, digest in hashes if (name + ".").startswith(staleness.KERNELS + ".")}
    return replace(record, provenance=record.provenance | {"modules": kernels}).footer


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells):
        escaped = (cell.replace("|", r"\|") for cell in cells)
        return f"| {' | '.join(escaped)} |\n"

    return line(head) + "|" + "---|" * len(head) + "\n" + "".join(map(line, rows))


if __name__ == "__main__":
    update()
