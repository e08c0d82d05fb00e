"""State where and when the report and each of its records were made."""

import os
import platform

import torch

from ropelab.bench import records, staleness


def provenance(where: records.Selection) -> tuple[list[dict], list[str]]:
    """Every record of every GPU, and those of ``where`` that cannot be believed.

    Returns:
        Two lists. The first has a row for each record: study, gpu (its folder), source (when and where it was measured,
        or why it cannot be believed) and stale (what has changed since). The second has a line for each bad record.
    """
    rows, damaged = [], []
    for study, gpu in sorted((path.stem, path.parent.name) for path in where.directory.glob("*/*.json")):
        try:
            record = records.load(study, where, gpu=gpu)
            source, stale = f"{record.provenance['gpu']['name']}, {record.provenance['utc'][:10]}", _changed(record)
        except records.Unusable as error:
            source, stale = str(error), ""
            damaged += [source] * (gpu == where.gpu)
        rows.append({"study": study, "gpu": gpu, "source": source, "stale": stale})
    return rows, damaged


def _changed(record: records.Record) -> str:
    """What has changed since the record was measured: files of kernels, then peers and protocols; "" if nothing has."""
    if not record.provenance["protocol"]:
        return "as old as its run: it has no times"
    kernels = staleness.of_kernels(record.stale)
    files = dict.fromkeys(f"{name.rpartition('.')[0].replace('.', '/')}.py" for name in kernels)
    if found := [*files, *(name for name in record.stale if name not in kernels)]:
        return f"changed since: {', '.join(found)}"
    return f"its kernels are not known: {unknown}" if (unknown := record.provenance.get("kernels_unknown")) else ""


def origin() -> list[str]:
    """Where and when this report was made: time, commit, machine, software."""
    here = records.environment()
    cpu = f"{platform.machine()} CPU, {os.cpu_count()} cores, no GPU"
    return [
        f"{here['utc'][:16].replace('T', ' ')} UTC",
        f"commit {here['commit'][:12]}" + " with local changes" * (here["dirty"] is True),
        here["gpu"]["name"] if torch.cuda.is_available() else cpu,
        f"Python {here['python']}, torch {here['torch']}, triton {here['triton']}",
    ]
