"""State where and when the report and each of its records were made."""

import os
import platform
from collections.abc import Collection
from datetime import datetime

import torch

from ropelab.bench import records, staleness
from ropelab.study.plots import registry as figures


def provenance(where: records.Selection, measured: Collection[str] = ()) -> tuple[list[dict], list[str]]:
    """The records of every figure, and the figures that cannot be drawn.

    Returns:
        Two lists. The first has a row for each figure and record: figure, study, source (when and where it was
        measured), now (whether this run measured it) and stale (the code that has changed since). The second has a line
        for each figure that cannot be drawn.
    """
    rows, damaged = [], []
    for figure, (studies, _) in figures.all_figures().items():
        try:
            found = records.load_together(studies, where)
        except records.Unusable as error:
            damaged.append(f"{figure} is not drawn: {error}")
            continue
        here = records.here()
        for record in found:
            about = record.provenance
            now = record.study in measured and records.slug(about["gpu"]["name"]) == here
            source = f"committed record of {about['utc'][:10]} on {about['gpu']['name']}"
            source = f"measured in this run on {about['gpu']['name']}" if now else source
            row = {"figure": figure, "study": record.study, "source": source, "now": now, "stale": changed_code(record)}
            rows.append(row)
    return rows, damaged


def changed_code(record: records.Record) -> str:
    """The modules whose code has changed since the record was measured, by name."""
    if record.hashes_modules:
        return ", ".join(record.stale) or "none"
    kernels = ", ".join(record.stale) or f"none of {staleness.KERNELS}"
    return f"{kernels}; recorded before the other modules were hashed"


def origin() -> list[str]:
    """Where and when this report was made: time, commit, machine, software."""
    here = records.environment()
    machine = here["gpu"]["name"]
    if not torch.cuda.is_available():
        machine = f"{platform.machine()} CPU, {os.cpu_count()} cores, no GPU"
    changed = " with local changes" if here["dirty"] is True else ""
    return [
        f"{datetime.fromisoformat(here['utc']):%Y-%m-%d %H:%M} UTC",
        f"commit {here['commit'][:12]}{changed}",
        machine,
        f"Python {here['python']}, torch {here['torch']}, triton {here['triton']}",
    ]
