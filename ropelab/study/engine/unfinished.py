"""Keep what an interrupted run has done, of studies or notebooks, so that the next run does the rest."""

import hashlib
import json
import pickle
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropelab.bench import record_checks, records, whole_file


@dataclass(frozen=True)
class Run:
    """A run of studies or notebooks. A file of the folder, a pickle, holds what a part of the run has found."""

    folder: Path

    def keep(self, part: str, found: Any) -> None:
        whole_file.write(self.folder / part, pickle.dumps(found))

    def kept(self, part: str) -> Any:
        """What `keep` was given; None if the part was not kept."""
        file = self.folder / part
        return pickle.loads(file.read_bytes()) if file.is_file() else None

    def keep_file(self, part: str, result: Path) -> None:
        """Note that a part of the run has written its result to a file."""
        self.keep(part, record_checks.sha256(result))

    def wrote(self, part: str, result: Path) -> bool:
        """Whether the part has written its result, and the file has not changed since."""
        return result.is_file() and self.kept(part) == record_checks.sha256(result)

    def forget(self) -> None:
        """Let the next run start afresh."""
        shutil.rmtree(self.folder, ignore_errors=True)


def resume(build: Path, **depends_on: Any) -> Run:
    """The unfinished run by this very code on this machine, or a new one.

    Args:
        build: the folder that keeps the runs, until `finish` or `Run.forget`.
        depends_on: further facts of which the results depend, such as ``smoke``, as JSON has them.
    """
    here = records.environment()
    identity = [library_hash(), here["gpu"]["name"], here["torch"], here["triton"], depends_on]
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    return Run(build / "unfinished" / name)


def finish(build: Path) -> None:
    """Forget all runs, so that the next ones start afresh."""
    shutil.rmtree(build / "unfinished", ignore_errors=True)


def library_hash(root: Path = records.ROOT) -> str:
    """The hash of the files of the library and of the kernels; `Path.rglob` does not follow the link to these."""
    sources = sorted([*(root / "ropelab").rglob("*.py"), *(root / "kernels").glob("*.py")])
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()
