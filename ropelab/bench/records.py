"""Write and read records: a table, and where, when and with what it was measured.

The record of a study consists of ``<directory>/<gpu>/<study>.csv``, the quantiles of every configuration, and of
``<study>.json`` beside it, the provenance. Only measurements write records. Figures and verdicts read them.

The provenance contains the checksum of the table, and `write` replaces the table before the provenance. An interruption
between the two leaves a new table with an old provenance, and `ropelab.bench.record_checks` notices the difference.
"""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from ropelab.bench import record_checks, staleness, whole_file

ROOT = Path(__file__).resolve().parents[2]
MEASUREMENTS = ROOT / "data" / "measurements"

REFERENCE = "nvidia-h100-80gb-hbm3"
"""The GPU of reference, whose records are complete. README.md, the guide and the book show its records."""

UNKNOWN = "unknown"
_SMI_FIELDS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "temperature.gpu", "power.draw", "driver_version")
_SMI_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # newer drivers, older drivers


class Unusable(Exception):
    """A record that cannot be read."""


class Missing(Unusable, FileNotFoundError):
    """The record does not exist."""


class Damaged(Unusable, ValueError):
    """The record exists, but no run wrote it, or its table does not fit its provenance."""


@dataclass(frozen=True)
class Selection:
    """The records under a directory, of all GPUs or of one GPU. Functions with an argument ``where`` take both forms.

    Attributes:
        directory: the folder that holds a folder for each GPU.
        gpu: the name of the GPU, such as ``"nvidia-h200"`` or ``"NVIDIA H200"``; None for all GPUs.
    """

    directory: Path = MEASUREMENTS
    gpu: str | None = None


Where = Path | str | Selection


@dataclass(frozen=True)
class Record:
    """A measured table and its provenance."""

    study: str
    frame: pd.DataFrame
    provenance: dict[str, Any]

    @property
    def stale(self) -> tuple[str, ...]:
        """What has changed since the measurement: see `ropelab.bench.staleness`."""
        return staleness.stale(self.provenance)

    @property
    def footer(self) -> str:
        """One line for the foot of a figure: GPU, date and versions, and whether a part of the study was measured."""
        p = self.provenance
        facts = [p["gpu"]["name"], p["utc"][:10], f"torch {_short(p['torch'])}", f"triton {_short(p['triton'])}"]
        return " · ".join(facts + ["a part of the study"] * p["parameters"].get("short", False))


def write(study: str, frame: pd.DataFrame, directory: Path = MEASUREMENTS, **facts: Any) -> Record:
    """Write a record of this machine, replacing an earlier one of the same study.

    Args:
        facts: what the record states besides the `environment`, as mappings, by default empty:
            parameters: those of the study.
            peers: the name and version of each package whose code the study ran -> the hash of its files
            (`ropelab.bench.packages.used`).
            built: each library among them that was compiled here -> its compiler, options and the hash of its wrapper.
            not_run: the name of each contender that could not run -> the reason.
            kernels: each function that a launch reached -> the hash of its code (`ropelab.bench.reached`).
            kernels_unknown: if it names none, a text that says why.
            protocol: the numbers of the timer and of the study (`ropelab.bench.staleness`).

    Raises:
        ValueError: a time in the table is impossible or missing (`ropelab.bench.record_checks.senseless_times`).
    """
    provenance = {"study": study, **environment(), **dict.fromkeys(record_checks.FACTS, {}), **facts}
    csv, about = files(study, directory, provenance["gpu"]["name"])
    with whole_file.replacing(about) as new_about, whole_file.replacing(csv) as new_csv:
        frame.to_csv(new_csv, index=False, float_format="%.6g")
        read = pd.read_csv(new_csv)
        if flaws := list(record_checks.senseless_times(read)):
            raise ValueError(f"{study}: {'; '.join(flaws)}")
        provenance["csv_sha256"] = record_checks.sha256(new_csv)
        new_about.write_text(json.dumps(provenance, indent=1, default=str) + "\n", encoding="utf-8")
    return Record(study, frame, provenance)


def files(study: str, directory: Path, gpu: str) -> tuple[Path, Path]:
    """The paths of the table and of the provenance of a record.

    Args:
        gpu: the name of the GPU, such as ``"NVIDIA H200"``.
    """
    csv, about = (directory / slug(gpu) / f"{_name(study)}.{kind}" for kind in ("csv", "json"))
    return csv, about


def _name(study: str) -> str:
    """The name of a study, which is no path.

    Raises:
        ValueError: it is something else.
    """
    if not re.fullmatch(r"\w[\w -]*", study):
        raise ValueError(f"study: expected a name, without slashes and dots, got {study!r}")
    return study


def load(study: str, where: Where = MEASUREMENTS, *, gpu: str | None = None) -> Record:
    """The record of a study, from ``gpu``, or else from the first GPU that has the record, in the order of `gpus`.

    Args:
        where: a directory, or a selection. The GPU of a selection counts if ``gpu`` is None.

    Raises:
        Missing: the record does not exist. The message names the command that measures it.
        Damaged: no run wrote the record, or its table does not fit its provenance or its run. The message names the
            file and the flaw.
        ValueError: ``study`` is no name.
    """
    (record,) = load_together([study], where, gpu=gpu)
    return record


def load_together(studies: Sequence[str], where: Where = MEASUREMENTS, *, gpu: str | None = None) -> list[Record]:
    """The records of several studies from one GPU. `load` describes the arguments and the errors."""
    if not studies:
        return []
    where = selection(where)
    gpu = gpu or where.gpu
    for folder in gpus(where.directory) if gpu is None else [slug(gpu)]:
        paths = [where.directory / folder / f"{_name(study)}.json" for study in studies]
        if all(path.exists() for path in paths):
            return [_read(path) for path in paths]
    under = where.directory / slug(gpu) if gpu else where.directory
    raise Missing(
        f"no record of {' and '.join(map(repr, studies))} under {_shown(under)}; `make measure ONLY="
        f'"{" ".join(studies)}"` on a machine with a GPU measures it'
    )


def of_each_gpu(study: str, where: Where = MEASUREMENTS) -> list[Record]:
    """The records of a study from every GPU that has one, in the order of `gpus`; or from the GPU of a selection.

    Raises:
        Missing, Damaged: as `load`; no GPU has the record.
    """
    where = selection(where)
    paths = [where.directory / gpu / f"{_name(study)}.json" for gpu in gpus(where.directory)]
    having = [path.parent.name for path in paths if path.exists() and where.gpu in (None, path.parent.name)]
    return [load(study, where, gpu=gpu) for gpu in having] or [load(study, where)]


def selection(where: Where, gpu: str = "") -> Selection:
    """``where`` as a selection; ``gpu``, if given, replaces the GPU of ``where``.

    Raises:
        ValueError: ``gpu`` has no records there.
    """
    found = where if isinstance(where, Selection) else Selection(Path(where))
    if gpu:
        found = Selection(found.directory, slug(gpu))
        if found.gpu not in gpus(found.directory):
            raise ValueError(f"gpu: expected one of {gpus(found.directory)}, the GPUs with records, got {gpu!r}")
    return found


def gpus(directory: Path = MEASUREMENTS) -> list[str]:
    """The folders of the GPUs that have records: first ``REFERENCE``, then the others by name."""
    found = {path.parent.name for path in Path(directory).glob("*/*.json")}
    return sorted(found, key=lambda name: (name != REFERENCE, name))


def of_one_gpu(where: Where = MEASUREMENTS, gpu: str = "") -> Selection:
    """The records of ``gpu``, or else of the GPU of ``where``, or else of the first of `gpus`.

    Raises:
        ValueError: ``gpu`` has no records there.
    """
    where = selection(where, gpu)
    return where if where.gpu else Selection(where.directory, next(iter(gpus(where.directory)), None))


def here() -> str | None:
    """The name of the folder of the GPU at hand, or None without a GPU."""
    return slug(torch.cuda.get_device_name()) if torch.cuda.is_available() else None


def environment() -> dict[str, Any]:
    """The facts that the numbers depend on besides the study: code, GPU, versions, command and time."""
    return {
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": without_folders(" ".join([Path(sys.executable).name, *sys.orig_argv[1:]])),
        **_commit(),
        "gpu": _gpu(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "triton": _triton_version(),
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
    }


def slug(gpu: str) -> str:
    """``"NVIDIA H200"`` -> ``"nvidia-h200"``."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def without_folders(text: str) -> str:
    """The text with the last part of every absolute path, because the folders of a machine are private."""
    return re.sub(r"(?<![\w./])/(?:[^\s/]+/)*([^\s/]+)", r"\1", text)


def _read(path: Path) -> Record:
    csv = path.with_suffix(".csv")
    try:
        provenance = json.loads(path.read_bytes())
        frame = pd.read_csv(csv)
    except (OSError, ValueError, RecursionError) as error:
        raise Damaged(f"{_shown(path)}: {type(error).__name__}: {without_folders(str(error))}") from error
    if why := record_checks.of_no_run(provenance):
        raise Damaged(f"{_shown(path)}: no run wrote it, so it supports no verdict: {why}")
    if (folder := slug(provenance["gpu"]["name"])) != path.parent.name:
        raise Damaged(f"{_shown(path)}: gpu name: expected the GPU of the folder {path.parent.name}, got {folder}")
    if flaws := list(record_checks.flaws(csv, frame, provenance)):
        raise Damaged(f"{_shown(csv)}: {'; '.join(flaws)}")
    return Record(path.stem, frame, provenance)


def _shown(path: Path) -> str:
    """The path relative to the project if the file is in the project, else the whole path."""
    return str(path.relative_to(ROOT) if path.is_relative_to(ROOT) else path)


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "none"
    return triton.__version__


def _commit() -> dict[str, str | bool]:
    commit = _run("git", "-C", str(ROOT), "rev-parse", "HEAD")
    if commit is None:
        # In a copy without history, for example in a container, GIT_COMMIT can name the commit.
        return {"commit": os.environ.get("GIT_COMMIT", UNKNOWN), "dirty": UNKNOWN}
    # Records do not count. Otherwise the first record of a run would make all later ones dirty.
    counted = (".", ":!data/measurements")
    changes = _run("git", "-C", str(ROOT), "status", "--porcelain", "--", *counted)
    return {"commit": commit, "dirty": UNKNOWN if changes is None else bool(changes)}


def _gpu() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"name": "no GPU"}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    # The clocks and the temperature right after the measurement. The query changes no settings of the GPU.
    names = (*_SMI_FIELDS, "throttle_reasons")
    said = next(filter(None, (_smi(*_SMI_FIELDS, reasons) for reasons in _SMI_REASONS)), [UNKNOWN] * len(names))
    return {
        "name": properties.name,
        "sm_count": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        **dict(zip(names, said, strict=True)),
    }


def _smi(*fields: str) -> list[str]:
    """What nvidia-smi says of these fields of the GPU at hand; nothing where it does not know one of them."""
    gpu = f"--id={torch.cuda.current_device()}"
    answer = _run("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader", gpu) or ""
    values = [value.strip() for value in answer.split(",")]
    return values if len(values) == len(fields) else []


def _run(*command: str) -> str | None:
    """The output of a command, or None if the command does not exist, fails or takes longer than 10 s."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _short(version: str) -> str:
    return ".".join(version.split(".")[:2])
