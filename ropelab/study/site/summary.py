"""Make the tables and the figure of README.md and of the guide from the records.

A test compares them with the files.
"""

import textwrap
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import pandas as pd

from ropelab.bench import records, whole_file
from ropelab.bench.rows import is_right, timed
from ropelab.bench.table_free import TABLE_FREE
from ropelab.conformance import verify
from ropelab.study.engine import kept
from ropelab.study.engine.claims import AUTHOR, documents
from ropelab.study.engine.ledger import by_gpu, short, tally
from ropelab.study.engine.verdict import Basis, Outcome
from ropelab.study.engine.words import listed, value_range
from ropelab.study.faults import correct
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
GUIDE = records.ROOT / "docs"
FIGURES = records.ROOT / "data" / "figures"
GPU = records.REFERENCE
"""The GPU whose records and verdicts the texts show, whatever GPU is at hand."""


def texts() -> list[Path]:
    """README.md, then the pages of the guide in their order."""
    return [README, *sorted(GUIDE.glob("*.md"))]


def tables() -> dict[str, str]:
    """Name -> the markdown that a text has between ``<!-- name -->`` and ``<!-- end -->``."""
    only = records.selection(records.MEASUREMENTS, GPU)
    heads, ledger = record("model_heads"), kept.ledger(GPU)
    return {
        "figure": _picture(record(), heads), "speed": _speed(record(), heads), "family": family(only),
        "one_pass": _one_pass(record(one_pass.RECORD)), "projection": _projection(record(projection.RECORD)),
        "table_free": _table_free(only), "shortfalls": _shortfalls(only), "wide_heads": _wide_heads(only),
        "claims": claims(ledger), "documents": verdicts(ledger), "unclaimed": _unclaimed(),
        "references": bibliography.markdown(), "models": _models(), "verify": _verify(),
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
    for path, svg in figures().items():
        whole_file.write(path, svg)
    computed = tables()
    for file in texts() if files is None else files:
        text = file.read_text()
        for name, table in computed.items():
            before, mark, rest = text.partition(f"<!-- {name} -->\n")
            _, _, after = rest.partition("<!-- end -->")
            if mark:
                text = f"{before}{mark}{table}<!-- end -->{after}"
        whole_file.write(file, text)


def _picture(record: records.Record, heads: records.Record) -> str:
    """The figure of chosen sizes in HTML, in the theme of the page on GitHub, and the median of drawn calls."""
    fractions = _fractions(record)
    words = speed_figure.words(fractions, record.provenance["gpu"]["name"])
    ours = fractions["ropelab"]
    chosen = f"The figure shows {len(ours)} chosen cases: ropelab runs at {value_range(ours)} of copy speed."
    dark, light = (f"data/figures/speed-{theme}.svg" for theme in ("dark", "light"))
    return (
        f'<picture>\n<source media="(prefers-color-scheme: dark)" srcset="{dark}">\n'
        f'<img src="{light}" width="640" alt="{words}">\n</picture>\n\n'
        f"{textwrap.fill(f'{chosen} {dense.drawn_sentence(heads.frame)}', 118)}\n"
    )


def _fractions(record: records.Record) -> dict[str, pd.Series]:
    """The label of each contender that was measured -> its fractions of a copy in all cases."""
    times = comparison.timed(record.frame, comparison.OURS)
    measured = {label: name for label, name in COLUMNS.items() if name in set(times.contender)}
    return {label: times[times.contender == name].fraction_of_copy for label, name in measured.items()}


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


def _one_pass(record: records.Record) -> str:
    """The times of norm, rotation and cache write in one launch beside vLLM and FlashInfer."""
    table = one_pass.beside_peers(record.frame).reset_index()
    rows = [
        [row.operation, f"{row.tokens:,}", f"{row.q_heads} + {row.k_heads} x {row.head_dim}", row.cache, *row[-3:]]
        for _, row in table.drop_duplicates(["operation", "tokens", "q_heads", "k_heads", "cache"]).iterrows()
    ]
    head = [f"us on an {short(GPU)}", "tokens", "rows of q + of k and v", "cache"]
    return _measured([record]) + _table([*head, "ropelab", "vLLM", "FlashInfer"], rows)


def _projection(record: records.Record) -> str:
    """The projection with the rotation over the projection alone."""
    table = projection.over_cublas(record.frame)
    head = [f"tokens, {short(GPU)}", "cuBLAS, then the pass", "one kernel, Triton", "one kernel, quack"]
    return _measured([record]) + _table(head, [[f"{row.Index:,}", *row[1:]] for row in table.itertuples()])


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
    grid = records.load("fairseq2_grid", where)
    kernel = timed(grid.frame)
    kernel = kernel[kernel["mode"] == "kernel"]
    reached = kernel.fraction_of_copy
    return _measured([grid]) + _paragraph(
        f"Heads as wide as the model (fairseq2's encoders): the kernel runs at {value_range(reached)} of a copy in "
        f"{kernel.groupby(['batch', 'seq_len', 'encoding_dim', 'direction']).ngroups} cells (median "
        f"{reached.median():.2f}); the copy reads no tables. The chapter on [fairseq2#1213]"
        "(../notebooks/12_fairseq2.ipynb) counts the bytes of the tables, and asks which of them stay in the cache."
    )


def claims(ledger: pd.DataFrame) -> str:
    """The claims by outcome and by basis, those that cannot be told, and every claim with its verdict.

    Args:
        ledger: the verdicts on one GPU, as `ropelab.study.engine.kept.ledger` returns them.
    """
    authors = ledger.by == AUTHOR
    text = f"{len(ledger)} claims of {ledger.document.nunique()} documents: {authors.sum()} of their authors, "
    text += f"{(~authors).sum()} of reviewers.\n\n{outcomes(ledger)}\n{_counts(ledger, 'basis', list(Basis))}\n"
    untold = ledger[ledger.outcome == Outcome.UNTOLD].sort_values("id")
    text += _table(["cannot be told", "for lack of"], untold[["id", "needs"]].values.tolist()) + "\n"
    for name, rows in (("authors", ledger[authors]), ("reviewers", ledger[~authors])):
        cells = [
            [row.id, row.statement, row.words, row.beyond.partition(": ")[0], row.basis] for row in rows.itertuples()
        ]
        head = [f"claims of {name}", "in our words", f"verdict on an {short(GPU)}", "beyond the document", "basis"]
        text += _table(head, cells) + "\n"
    return text


def outcomes(ledger: pd.DataFrame) -> str:
    """The number of claims by outcome: a row for the authors of each document, and one for all reviewers."""
    return f"{_counts(ledger, 'outcome', list(Outcome))}\n{_paragraph(_ran(ledger))}"


def verdicts(ledger: pd.DataFrame) -> str:
    """The number of claims by outcome, and for how many published code ran, in sentences."""
    counts = ledger.outcome.value_counts()
    each = ", ".join(f"{outcome} {counts[outcome]}" for outcome in Outcome if outcome in counts)
    return _paragraph(f"Verdicts from an {short(GPU)}: {each}. {_ran(ledger)}")


def _ran(ledger: pd.DataFrame) -> str:
    ran = ledger.basis.isin([Basis.PACKAGE, Basis.CODE, Basis.LAYER]).sum()
    return (
        f"The study ran published code for {ran} of the {len(ledger)} claims. The other verdicts rest on published "
        "files, printed numbers, typed facts or our models, or have no evidence yet."
    )


def _counts(ledger: pd.DataFrame, axis: str, names: Sequence[str]) -> str:
    counts = tally({GPU: ledger}, axis, names)
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
    rows = [
        [letter, *(", ".join(f"`{name}`" for name in found.index[chosen]) for chosen in (~found, found))]
        for letter, found in refused.groupby(refused.index.str[0])
    ]
    said = (
        "`rope_from_config` reads the first column of `model_type` as transformers does. For the second it raises an "
        "error, perhaps in some layers alone, that names the key or another way."
    )
    return f"{_paragraph(said)}\n{_table(['', 'equal to transformers', 'an error'], rows)}"


@cache
def _verify() -> str:
    """What ``ropelab verify`` prints of a function of Hugging Face's form that rotates k in the wrong direction."""

    def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
        rotated, _ = correct.huggingface(q, k, cos, sin, unsqueeze_dim)
        return rotated, correct.huggingface(q, k, cos, -sin, unsqueeze_dim)[1]

    command = f"$ ropelab verify my_project.rope:{apply_rotary_pos_emb.__name__}"
    return f"```console\n{command}\n{verify(apply_rotary_pos_emb, 'huggingface').screen}\n```\n"


def _paragraph(text: str, bullet: str = "") -> str:
    lines = textwrap.fill(text, 120, initial_indent=bullet, subsequent_indent=" " * len(bullet), break_on_hyphens=False)
    return lines + "\n"


def _measured(found: Iterable[records.Record]) -> str:
    """A line for each machine, day and set of versions with which the records were measured, and at which commits.

    How old a record is depends on the code of today, so the line does not say it: the report does.
    """
    lines: dict[str, list[records.Record]] = {}
    for record in found:
        lines.setdefault(record.footer, []).append(record)
    return "\n".join(f"Measured on {footer} ({_dated(these)})." for footer, these in lines.items()) + "\n\n"


def _dated(found: Sequence[records.Record]) -> str:
    times = sorted(record.provenance["utc"] for record in found)
    commits = dict.fromkeys(record.provenance["commit"][:9] for record in found)
    what = f"record of {times[0]}" if len(found) == 1 else f"{len(found)} records of {times[0]} to {times[-1]}"
    return f"{what}, commit{'s' * (len(commits) > 1)} {listed(commits)}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells):
        escaped = (cell.replace("|", r"\|") for cell in cells)
        return f"| {' | '.join(escaped)} |\n"

    return line(head) + "|" + "---|" * len(head) + "\n" + "".join(map(line, rows))


if __name__ == "__main__":
    update()
