"""Keep the results of an interrupted run, of studies or notebooks, so that the next run does the rest."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ropelab.bench import record_checks, records, whole_file

LIBRARY = records.ROOT / "ropelab"


@dataclass
class Run:
    """A run of studies or notebooks, and those that are done; ``file`` keeps the run until it is finished.

    Attributes:
        identity: the code, the GPU, the software and the studies. Only results of a run with the same identity count.
        done: the name of a study or notebook -> SHA-256 of its result.
    """

    file: Path
    identity: Mapping[str, Any]
    done: dict[str, str] = field(default_factory=dict)

    def note(self, name: str, result: Path) -> None:
        """Note that this run has done the study or notebook, whose result is a file."""
        self.done[name] = record_checks.sha256(result)
        whole_file.write(self.file, json.dumps({"identity": self.identity, "done": self.done}, indent=2) + "\n")

    def finish(self) -> None:
        """Forget the run, so that the next run starts afresh."""
        self.file.unlink(missing_ok=True)


def resume(build: Path, results: Mapping[str, Path], **more: Any) -> Run:
    """The unfinished run with these results by this very code on this machine; only results that still exist count.

    Args:
        build: the folder that keeps the runs.
        results: the name of each study or notebook -> the file with its result.
        more: facts of which the results depend besides, such as ``smoke``, as JSON has them.
    """
    here = records.environment()
    identity = {
        "code": library_hash(),
        "gpu": here["gpu"]["name"], "torch": here["torch"], "triton": here["triton"], "results": list(results), **more,
    }  # fmt: skip
    name = hashlib.sha256(json.dumps([list(results), more.get("smoke")]).encode()).hexdigest()[:8]
    run = Run(build / f"unfinished-{name}.json", identity)
    try:
        noted = json.loads(run.file.read_text(encoding="utf-8"))
        if noted["identity"] == identity:
            run.done |= {name: digest for name, digest in noted["done"].items() if _is(results[name], digest)}
    except (OSError, ValueError, TypeError, AttributeError, KeyError):  # no run, or another text
        pass
    return run


def library_hash(root: Path = records.ROOT) -> str:
    """The hash of the files of the library and of the kernels; `Path.rglob` does not follow the link to these."""
    sources = sorted([*(root / "ropelab").rglob("*.py"), *(root / "kernels").glob("*.py")])
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in sources)).hexdigest()


def _is(result: Path, digest: str) -> bool:
    return result.is_file() and record_checks.sha256(result) == digest
