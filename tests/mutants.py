"""Plant the faults of ``mutants.toml`` in a copy of this checkout, and see that the tests that each names notice it.

``python -m tests.mutants`` plants them all, ``python -m tests.mutants NAME ...`` some. The exit code is 1 if a fault
survives. A fault is one edit: ``before``, which its file has once, becomes ``after``.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mutant:
    """A planted fault; ``what`` says what goes wrong for a user, ``tests`` names the files that must notice it."""

    name: str
    what: str
    file: str
    before: str
    after: str
    tests: tuple[str, ...]

    def planted(self, text: str) -> str:
        """The text of the file with the fault.

        Raises:
            ValueError: the file does not have ``before`` exactly once, so the fault no longer applies.
        """
        if (count := text.count(self.before)) != 1:
            raise ValueError(f"{self.name}: expected its text once in {self.file}, got {count} times")
        return text.replace(self.before, self.after)


def mutants() -> list[Mutant]:
    """All faults, in the order of the file."""
    table = tomllib.loads((ROOT / "tests/mutants.toml").read_text())
    return [Mutant(name, **{**entry, "tests": tuple(entry["tests"])}) for name, entry in table.items()]


def notices(mutant: Mutant, checkout: Path) -> str:
    """The first test that fails with the fault, or an empty text if the fault survives; the checkout stays as it was.

    Raises:
        RuntimeError: the tests could not run.
    """
    path = checkout / mutant.file
    right = path.read_text()
    path.write_text(mutant.planted(right))
    try:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "-p", "no:cacheprovider", *mutant.tests]
        environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    finally:
        path.write_text(right)
    if done.returncode not in (0, 1):  # 1: tests failed
        raise RuntimeError(f"{mutant.name}: pytest ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr}")
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", done.stdout, re.MULTILINE)
    return failed.group(1) if failed else ""


def main(names: list[str]) -> int:
    """Plant the faults of these names, or all."""
    chosen = [mutant for mutant in mutants() if not names or mutant.name in names]
    survivors = []
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "checkout"
        shutil.copytree(ROOT, checkout, symlinks=True, ignore=shutil.ignore_patterns(".*", "build", "__pycache__"))
        for mutant in chosen:
            test = notices(mutant, checkout)
            print(f"{mutant.name}: {test or 'SURVIVES'}", flush=True)
            survivors += [] if test else [mutant.name]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
