"""This file keeps the results of an interrupted run of measurements, so that the next run goes on with the rest."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ropelab.bench import record_checks, records
from ropelab.bench.code_hash import code_hash

LIBRARY = records.ROOT / "ropelab"


@dataclass
class Run:
    """A run of studies, and the studies that it has recorded; ``file`` keeps the run until it is finished.

    Attributes:
        identity: the code, the GPU, the software and the studies. Only records of a run with the same identity count.
        done: study -> SHA-256 of the recorded table.
    """

    file: Path
    identity: Mapping[str, Any]
    done: dict[str, str] = field(default_factory=dict)

    def note(self, study: str, record: records.Record) -> None:
        """Note that this run has recorded the study."""
        self.done[study] = record.provenance["csv_sha256"]
        self.file.parent.mkdir(parents=True, exist_ok=True)
        new = self.file.with_name(f".{self.file.name}.new")
        new.write_text(json.dumps({"identity": self.identity, "done": self.done}, indent=2) + "\n", encoding="utf-8")
        new.replace(self.file)

    def finish(self) -> None:
        """Forget the run, so that the next run starts afresh."""
        self.file.unlink(missing_ok=True)


def resume(build: Path, studies: Sequence[str], directory: Path, *, smoke: bool) -> Run:
    """The unfinished run of these studies by this very code on this GPU; only records that still exist count as done.

    Args:
        build: the folder that keeps the runs.
        directory: the folder of the records.
    """
    here = records.environment()
    identity = {
        "code": hashlib.sha256(library_hash().encode() + here["kernels_sha256"].encode()).hexdigest(),
        "gpu": here["gpu"]["name"], "torch": here["torch"], "triton": here["triton"],
        "studies": list(studies), "smoke": smoke,
    }  # fmt: skip
    name = hashlib.sha256(json.dumps([list(studies), smoke]).encode()).hexdigest()[:8]
    run = Run(build / f"unfinished-{name}.json", identity)
    try:
        noted = json.loads(run.file.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return run
    if noted.get("identity") == identity:
        folder = directory / records.slug(here["gpu"]["name"])
        run.done |= {study: digest for study, digest in noted["done"].items() if _is(folder / f"{study}.csv", digest)}
    return run


def library_hash(folder: Path = LIBRARY) -> str:
    """The hash of the library's code, without the kernels: `Path.rglob` does not follow the link to them."""
    return code_hash(folder.rglob("*.py"), folder)


def _is(csv: Path, digest: str) -> bool:
    return csv.exists() and record_checks.sha256(csv) == digest
