"""The texts, in Sphinx's markdown, of the pages that are about all chapters, claims and records."""

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from urllib.parse import quote

import pandas as pd

from ropelab.study.engine.findings import WAYS, counted
from ropelab.study.engine.ledger import disagreements, short, tally
from ropelab.study.engine.measure import Measured
from ropelab.study.engine.quotations import passages
from ropelab.study.engine.verdict import Basis, Outcome
from ropelab.study.site.chapters import Chapter
from ropelab.study.site.ledgers import Ledger
from ropelab.study.site.measured import beside_committed

Tables = Mapping[str, pd.DataFrame]
"""GPU -> the ledger of all documents."""
_PICTURE = re.compile(r'<picture>.*?alt="([^"]*)".*?</picture>', re.DOTALL)
_OF_EACH_THEME = "\n\n".join(
    f"```{{image}} speed-{theme}.svg\n:class: only-{theme}\n:alt: \\1\n```" for theme in ("dark", "light")
)
_OUTCOME, _BASIS = ("outcome", list(Outcome)), ("basis", list(Basis))


def first(
    start: str, guide: str, troubles: Iterable[str], parts: Mapping[str, Sequence[str]], texts: Mapping[str, str],
    chapters: Sequence[Chapter], own: Tables,
) -> str:  # fmt: skip
    """What ropelab is, the guide, the main findings, and a list of all pages by their part.

    Args:
        start: the markdown of README.md with the figure, how to install, and an example.
        guide: a list of the pages of the guide, the first part.
        texts: the name of each other page that is no notebook -> its text.
    """
    titles = {name: text.partition("\n")[0].removeprefix("# ") for name, text in texts.items()}
    titles |= {one.name: one.title for one in chapters}
    said = [(one.name, found) for one in chapters for found in one.findings if found.headline]
    shown = [_PICTURE.sub(_OF_EACH_THEME, start), *map(_trouble, troubles), "## The guide", guide]
    shown.append(f"## {len(said)} main finding{'s' * (len(said) != 1)}")
    for name, found in said:
        shown.append(f"{found.text} From {{doc}}`{_label(titles[name])} <{name}>`.")
        if found.figure:
            shown.append(f"```{{image}} {found.figure}\n:alt: {found.text}\n:target: {name}.html\n```")
    shown.append("[All findings](findings.md), and how the book knows what it states.")
    for part, names in parts.items():
        if names is not next(iter(parts.values())):
            shown.append(f"## {part}")
            shown += [_counts(own, *_OUTCOME)] if part == "Court" and own else []
            rest = {name: titles[name].partition(": ")[2] for name in names}
            shown.append("\n".join(f"- {{doc}}`{_label(titles[name])} <{name}>` {rest[name]}" for name in names))
        entries = "\n".join(f"{_label(titles[name])} <{name}>" for name in names)
        shown.append(f"```{{toctree}}\n:caption: {part}\n:hidden:\n\n{entries}\n```")
    return "\n\n".join(shown)


def ledger(ledgers: Sequence[Ledger], own: Tables, chapters: Sequence[Chapter], studies: Container[str]) -> str:
    """Every claim with its verdict: a table, then what was claimed and measured.

    Args:
        studies: the records that the report lists.
    """
    claims = [(one, claim) for one in ledgers for claim in one.rows]
    parts = [
        "# Ledger of claims",
        f"{len(claims)} claims of {len(ledgers)} documents. A verdict judges a claim as its document has it. Other "
        "GPUs, dtypes and sizes have a verdict of their own, beyond the document. A cell is one configuration of a "
        "claim; an effect that is larger or smaller than stated refutes nothing. Times on one GPU do not refute a "
        "document that names another. Where a document names none, the GPU here counts; [other GPUs](gpus.md) have "
        "verdicts of their own.",
    ]
    parts += [_counts(own, *axis) for axis in (_OUTCOME, _BASIS) if own]
    axes = ("outcome", "basis", "by")
    rows = [
        (f"{{claim}}`{claim['id']}`", claim["says"] or claim["statement"], *map(claim.get, axes), one.document)
        for one, claim in claims
    ]
    table = _table(pd.DataFrame(rows, columns=["claim", "verdict", *axes, "document"]))
    parts.append(f"::::{{container}} ledger\n{table}\n::::")
    for one in ledgers:
        parts += [f"## {one.document}", *([_trouble(one.trouble)] if one.trouble else [])]
        parts += [_claim(one, claim, chapters, studies) for claim in one.rows]
    return "\n\n".join(parts)


def _claim(one: Ledger, claim: Mapping[str, str], chapters: Sequence[Chapter], studies: Container[str]) -> str:
    phrase = " ".join(next(iter(passages(str(claim["quote"]))), "").split()[:8])
    source = f" [{one.document}]({one.url}#:~:text={quote(phrase)})" if one.url else ""
    links = [f"{{record}}`{name}`" for name in claim["names"] if name in studies]
    links += [f"[{title}](#{label})" for label, title in _sections(chapters, one.key, claim["names"])]
    said = {
        "In our words": claim["statement"],
        f"Published by the {claim['by']}": f"{claim['quote']}{source}",
        "Measured": ": ".join(filter(None, (f"**{claim['words']}**", claim["measured"]))),
        "Beyond the document": claim["beyond"],
        "Missing": claim["needs"],
        "Remarks": claim["remarks"],
        "Evidence": ". ".join(filter(None, (claim["basis"], claim["evidence"]))),
        "Links": ", ".join(links),
    }
    text = "\n\n".join(f"*{name}:* {_line(text)}" for name, text in said.items() if text)
    return f":::{{claim}} {claim['id']}\n{text}\n:::"


def _sections(chapters: Sequence[Chapter], document: str, names: Iterable[str]) -> list[tuple[str, str]]:
    """The labels and titles of the sections that show the evidence of a claim.

    A section is in the chapter of the document, whose key is given, or in another one if that does not show the
    evidence. If no section shows any of it, the section with the claims of the document takes its place.
    """
    known: dict[str, tuple[str, str]] = {}
    for one in sorted(chapters, key=lambda one: one.name[3:] == document):
        known |= one.places
    found = [known[name] for name in names if name in known] or [known[key] for key in (document,) if key in known]
    return list(dict.fromkeys(found))


def findings(chapters: Sequence[Chapter]) -> str:
    """Every finding of every chapter, and the number of statements that are known in each way."""
    parts = ["# All findings"]
    for one in chapters:
        if one.findings:
            parts.append(f"## [{one.title}]({one.name}.ipynb)")
            parts.append("\n".join(f"- {_line(found.text)}" for found in one.findings))
    known = pd.DataFrame(counted({one.title: one.notebook for one in chapters}), list(WAYS)).T
    if len(known):
        known.loc["all chapters"] = known.sum()
        parts += [
            "## How the book knows what it states",
            "*Proved*: for all cases that a statement names, checked by a machine. *Checked exhaustively*: every case "
            "was tried. *Tested*: some cases were tried, within a derived bound. *Measured*: by a clock.",
            _table(known.rename_axis("chapter").reset_index()),
        ]
    return "\n\n".join(parts)


def records(sources: Iterable[Mapping[str, object]]) -> str:
    """Where and when each record that the book shows was measured, and what has changed since."""
    parts = [
        "# Records",
        "A record is a table that was measured on a GPU: the file of its name in `data/measurements`. These are the "
        "records that the book shows. [Other GPUs](gpus.md) have records, too.",
    ]
    parts += [f":::{{record}} {row['study']}\n{_measured(row)}\n:::" for row in sources]
    return "\n\n".join(parts)


def gpus(judged: Tables, sources: Sequence[Mapping[str, object]]) -> str:
    """The verdicts on each GPU, where they differ, and the records of the GPUs that the book does not show."""
    parts = [
        "# Other GPUs",
        "The book shows the records of one GPU. Here stand those of every other GPU, with their dates, and the "
        "verdicts on each.",
        "## Verdicts on each GPU",
        *(_counts(judged, *axis) for axis in (_OUTCOME, _BASIS) if judged),
    ]
    differing = disagreements(judged).drop(columns="document").rename(columns={gpu: short(gpu) for gpu in judged})
    if len(differing):
        parts.append("Other outcomes on one GPU than on another. A GPU on which a claim cannot be told does not count.")
        parts.append(_table(differing.assign(id=[f"{{claim}}`{name}`" for name in differing.id])))
    for gpu in sorted({str(row["gpu"]) for row in sources}):
        rows = [(row["study"], row["source"], row["stale"]) for row in sources if row["gpu"] == gpu]
        table = _table(pd.DataFrame(rows, columns=["record", "measured", "today"]))
        parts += [f"## Records of {gpu}", table]
    return "\n\n".join(parts)


def measured(run: Measured) -> str:
    """The times of this run beside the committed ones."""
    times = beside_committed(run).sort_values("study", kind="stable")
    for name, form in (("here_us", ".4g"), ("committed_us", ".4g"), ("ratio", ".2f")):
        times[name] = [format(x, form) if x == x else "" for x in times[name]]
    times = times.rename(columns={"here_us": "here, µs", "committed_us": "committed, µs"})
    parts = [
        "# Measured in this run",
        f"This run measured {len(run.studies)} studies. Its records are in `{run.directory}`. Chapters, figures and "
        "verdicts rest on the [committed records](records.md). The table has the median of a contender's times over "
        "the cells that both records time, and the median of the cells' ratios, here over committed. Where nothing is "
        "committed for this GPU and study, the times of this run stand alone.",
        _table(times),
    ]
    lacking = [f"- {', '.join(names)}: {reason}" for reason, names in run.missing.items()]
    lacking += [f"- {study}: it failed; the output of the run says why" for study in run.broken]
    return "\n\n".join([*parts, *(["## What was not measured", "\n".join(lacking)] if lacking else [])])


def by_gpu(ledgers: Sequence[Ledger]) -> Tables:
    """GPU -> the ledger of all documents; nothing where no ledger could be computed."""
    gpus = dict.fromkeys(gpu for one in ledgers for gpu in one.each)
    return {gpu: pd.concat([one.each[gpu] for one in ledgers if one.each], ignore_index=True) for gpu in gpus}


def _measured(row: Mapping[str, object]) -> str:
    return " ".join(f"{one[0].upper()}{one[1:]}." for one in (row["source"], row["stale"]) if one)


def _counts(judged: Tables, axis: str, names: Sequence[str]) -> str:
    return _table(tally(judged, axis, names).reset_index())


def _table(frame: pd.DataFrame) -> str:
    """A table in markdown without its index."""
    rows = [list(frame), ["---"] * len(frame.columns), *frame.values.tolist()]
    return "\n".join(f"| {' | '.join(_line(cell).replace('|', chr(92) + '|') for cell in row)} |" for row in rows)


def _line(text: object) -> str:
    return " ".join(str(text).split())


def _label(title: str) -> str:
    """A short name of a page: its title up to a colon, and a module without its package."""
    return title.partition(": ")[0].removeprefix("ropelab.").replace("`", "")


def _trouble(text: str) -> str:
    return f":::{{error}}\n{_line(text)}\n:::"
