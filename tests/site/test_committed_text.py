"""README.md, the guide and the kept verdicts depend on committed files alone, whatever a machine has."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ropelab.bench import fetch_peers, records
from ropelab.study.plots import gpus
from tests.environments import ROOT

VERSIONS = "import torch, triton; torch.__version__ = triton.__version__ = '9.9.9'"
ANOTHER_GPU = "from ropelab.bench import records; records.here = lambda: 'nvidia-h200'"
INVENTED = {"nvidia-a100-sxm4-80gb": "NVIDIA A100-SXM4-80GB", "nvidia-l40s": "NVIDIA L40S"}


@pytest.fixture
def checkout(tmp_path):
    """A checkout without history and without a build folder."""
    for folder in ("ropelab", "kernels", "data", "docs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=ignored)
    shutil.copy(ROOT / "README.md", tmp_path)
    return tmp_path


def texts(root: Path) -> dict[str, bytes]:
    """The name of each committed text that is computed -> its content."""
    patterns = ("README.md", "docs/*.md", "data/figures/*", "data/verdicts.csv")
    found = (path for pattern in patterns for path in root.glob(pattern))
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in found}


def rewritten(checkout: Path, *before: str) -> dict[str, bytes]:
    """The texts after the command that writes them, in a process that runs ``before`` first."""
    code = "; ".join([*before, "import runpy; runpy.run_module('ropelab.study.site.summary', run_name='__main__')"])
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    done = subprocess.run([sys.executable, "-c", code], cwd=checkout, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return texts(checkout)


def different(found: dict[str, bytes]) -> list[str]:
    return [name for name, content in texts(ROOT).items() if found[name] != content]


def invent_packages(build: Path) -> None:
    """Put into the build folder what nobody published: a new and a listed version of each package, and a Triton."""
    for entry in fetch_peers.read_list():
        if isinstance(entry, fetch_peers.Package):
            for folder in (f"{entry.name}-9.9.9", entry.folder):
                for file in entry.files:
                    path = build / "peers" / folder / file
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text("raise SystemExit('invented code ran')\n")
    for version in ("3.6.0", "9.9.9"):
        package = build / f"triton-{version}" / "triton"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise SystemExit('invented code ran')\n")


def invent_gpus(measurements: Path) -> None:
    """Add two GPUs with a record each."""
    for folder, name in INVENTED.items():
        shutil.copytree(
            measurements / records.REFERENCE, measurements / folder,
            ignore=lambda _, names: [file for file in names if Path(file).stem != "host"],
        )  # fmt: skip
        about = json.loads((measurements / folder / "host.json").read_text())
        about["gpu"]["name"] = name
        (measurements / folder / "host.json").write_text(json.dumps(about))


@pytest.mark.process
def test_other_packages_versions_and_gpus_are_at_hand(checkout):
    """The texts stay as they are where nothing is at hand, and new GPUs have verdicts and a place in all tables."""
    invent_packages(checkout / "build")
    invent_gpus(checkout / "data" / "measurements")
    found = rewritten(checkout, VERSIONS, ANOTHER_GPU)
    assert different(found) == ["data/verdicts.csv"]
    verdicts, before = (each["data/verdicts.csv"].splitlines() for each in (found, texts(ROOT)))
    new = [line.decode() for line in verdicts if line not in before]
    assert set(before) <= set(verdicts) and {line.split(",")[0] for line in new} == {*INVENTED}

    together = gpus.together("host", checkout / "data" / "measurements")
    assert {"H100", "H200", *map(gpus.short, INVENTED.values())} == set(together.gpu)
