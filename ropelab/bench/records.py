"""Records of measurements: a table, and where, when and with what it was measured.

A study's record is ``<directory>/<gpu>/<study>.csv`` (the raw quantiles of every configuration) with
``<study>.json`` (the provenance) beside it. Measuring writes records, drawing and judging only read them.
"""

import hashlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import triton

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "kernels"
MEASUREMENTS = ROOT / "data" / "measurements"

UNKNOWN = "unknown"
_SMI_FIELDS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "temperature.gpu", "power.draw", "driver_version")
_SMI_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # newer and older drivers


@dataclass(frozen=True)
class Record:
    """A measured table and its provenance."""

    study: str
    frame: pd.DataFrame
    provenance: dict[str, Any]

    @property
    def is_current(self) -> bool:
        """Whether today's kernel sources are those that were measured."""
        return self.provenance["kernels_sha256"] == kernels_hash()

    @property
    def footer(self) -> str:
        """One line for the foot of a figure: machine, date, versions, and whether the kernels differ."""
        p = self.provenance
        parts = [
            p["gpu"]["name"],
            p["utc"][:10],
            f"torch {_short(p['torch'])}",
            f"triton {_short(p['triton'])}",
        ]
        return " · ".join(parts if self.is_current else [*parts, "recorded with other kernels than today's"])


def write(
    study: str,
    frame: pd.DataFrame,
    directory: Path = MEASUREMENTS,
    *,
    parameters: Mapping[str, Any] | None = None,
    peers: Mapping[str, str] | None = None,
    not_run: Mapping[str, str] | None = None,
) -> Record:
    """Write a record of this machine, replacing an earlier one of the same study.

    Args:
        parameters: of the study.
        peers: version of each package that was compared with.
        not_run: name -> reason of what could not be compared with.
    """
    provenance = {
        "study": study,
        **environment(),
        "parameters": dict(parameters or {}),
        "peers": dict(peers or {}),
        "not_run": dict(not_run or {}),
    }
    folder = directory / slug(provenance["gpu"]["name"])
    folder.mkdir(parents=True, exist_ok=True)
    frame.to_csv(folder / f"{study}.csv", index=False, float_format="%.6g")
    (folder / f"{study}.json").write_text(json.dumps(provenance, indent=2, default=str) + "\n", encoding="utf-8")
    return Record(study, frame, provenance)


def load(study: str, directory: Path | str = MEASUREMENTS, *, gpu: str | None = None) -> Record:
    """The record of a study: of ``gpu`` if named, else of the GPU at hand if there is one, else the latest.

    Args:
        gpu: as ``"nvidia-h200"`` or ``"NVIDIA H200"``.

    Raises:
        FileNotFoundError: there is none; says how to make it.
    """
    directory = Path(directory)
    found = {path.parent.name: path for path in sorted(directory.glob(f"*/{study}.json"))}
    if gpu is not None:
        found = {name: path for name, path in found.items() if name == slug(gpu)}
    if not found:
        where = directory / slug(gpu) if gpu else directory
        raise FileNotFoundError(
            f"no record of {study!r} under {where}; `make measure` on a machine with a GPU makes it"
        )
    records = {name: _read(path) for name, path in found.items()}
    here = slug(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    if here in records:
        return records[here]
    return max(records.values(), key=lambda record: record.provenance["utc"])


def environment() -> dict[str, Any]:
    """What the numbers depend on besides the study itself."""
    return {
        "utc": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.executable).name, *sys.orig_argv[1:]]),
        **_commit(),
        "kernels_sha256": kernels_hash(),
        "gpu": _gpu(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "none",
        "triton": triton.__version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}, {' '.join(platform.libc_ver())}",
    }


def kernels_hash(folder: Path = KERNELS) -> str:
    """SHA-256 over the names and contents of the kernel sources."""
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def slug(gpu: str) -> str:
    """``"NVIDIA H200"`` -> ``"nvidia-h200"``."""
    return re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")


def _read(provenance: Path) -> Record:
    frame = pd.read_csv(provenance.with_suffix(".csv"))
    return Record(provenance.stem, frame, json.loads(provenance.read_text(encoding="utf-8")))


def _commit() -> dict[str, str | bool]:
    commit = _run("git", "-C", str(ROOT), "rev-parse", "HEAD")
    if commit is None:
        # A copy without its history, as in a container: whoever made the copy can say what it is of.
        return {"commit": os.environ.get("GIT_COMMIT", UNKNOWN), "dirty": UNKNOWN}
    # The records themselves do not count: writing the first would make all others dirty.
    changes = _run("git", "-C", str(ROOT), "status", "--porcelain", "--", ".", ":!data/measurements")
    return {"commit": commit, "dirty": UNKNOWN if changes is None else bool(changes)}


def _gpu() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return {"name": "no GPU"}
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    gpu = {
        "name": properties.name,
        "sm_count": properties.multi_processor_count,
        "l2_bytes": properties.L2_cache_size,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
    }
    # Read right after the measurement: nvidia-smi never changes the card's settings here.
    values = _smi(*_SMI_FIELDS)
    gpu |= dict(zip(_SMI_FIELDS, values, strict=True)) if values else {"driver_version": UNKNOWN, "clocks.sm": UNKNOWN}
    reasons = next(filter(None, (_smi(field) for field in _SMI_REASONS)), [UNKNOWN])
    return gpu | {"throttle_reasons": reasons[0]}


def _smi(*fields: str) -> list[str] | None:
    query = [
        f"--query-gpu={','.join(fields)}",
        "--format=csv,noheader",
        f"--id={torch.cuda.current_device()}",
    ]
    answer = _run("nvidia-smi", *query)
    values = [value.strip() for value in answer.splitlines()[0].split(",")] if answer else []
    return values if len(values) == len(fields) else None


def _run(*command: str) -> str | None:
    """Output of a command, or None where it is not there, fails or hangs."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _short(version: str) -> str:
    return ".".join(version.split(".")[:2])
