"""Compare the provenances of all records with one another, with ``data/peers.toml`` and with the history."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

from ropelab.bench import fetch_peers, reached, record_checks, records

Found = dict[Path, Any]
VERSIONS = ("torch", "cuda", "triton", "python")
GPU = ("name", "sm_count", "memory_bytes", "capability")


def problems(directory: Path = records.MEASUREMENTS) -> list[str]:
    """A line for each record whose provenance contradicts another record, the list of peers or the history."""
    return [*contradictions(directory), *_commits(_read(directory))]


def contradictions(directory: Path = records.MEASUREMENTS) -> list[str]:
    """The lines of `problems` that need no history: ``"<gpu>/<study>: <why>"``. No verdict rests on such a record."""
    lines, first = [], {}
    listed = fetch_peers.versions()
    of_a_machine = {str(entry) for entry in fetch_peers.read_list() if entry.large}
    for path, about in _read(directory).items():
        peers = {peer: digest for peer, digest in about["peers"].items() if peer.partition(" ")[0] in listed}
        lines += [
            f"{_name(path)}: {peer} is not in the list of peers"
            for peer in peers
            if peer not in listed[peer.partition(" ")[0]]
        ]
        compared = {f"checksum of {peer}": digest for peer, digest in peers.items() if peer not in of_a_machine}
        for thing, fact in (_facts(path, about) | compared).items():
            where, expected = first.setdefault(thing, (path, fact)) if fact else (path, fact)
            if fact != expected:
                lines.append(f"{_name(path)}: {thing}: {fact}, and {expected} in {_name(where)}")
    return lines


def _facts(path: Path, about: Any) -> dict[str, Any]:
    """What is the same in all records that have it: of a GPU, of a run, and the GPU on which times were measured."""
    gpu, run = about["gpu"], f"versions of the run {about['command']!r} at {about['commit'][:9]} on {path.parent.name}"
    facts = {f"GPU of {path.parent.name}": [gpu.get(name) for name in GPU]}
    facts[run] = [*map(about.get, VERSIONS), gpu.get("driver_version")]
    with path.with_suffix(".csv").open(encoding="utf-8") as table:
        columns = table.readline().strip().split(",")
    if "median_us" in columns:
        facts[f"GPU of the table {about['csv_sha256'][:9]}"] = path.parent.name
    return facts


def _read(directory: Path) -> Found:
    """The provenances that can be read and that a run wrote; `records.load` refuses the others."""
    found = {}
    for path in sorted(directory.glob("*/*.json")):
        try:
            about = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        if not record_checks.of_no_run(about):
            found[path] = about
    return found


def _name(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def has_history() -> bool:
    """Whether this checkout has the whole history."""
    return _git("rev-parse", "--is-shallow-repository") == (0, b"false\n")


def _commits(found: Found) -> Iterator[str]:
    """The commit is one of this history, is older than the record, and has the kernels whose hashes the record has.

    A checkout without the whole history says nothing.
    """
    for path, about in found.items() if has_history() else ():
        commit, kernels = about["commit"], about["kernels"]
        if _git("merge-base", "--is-ancestor", commit, "HEAD")[0]:
            yield f"{_name(path)}: commit {commit[:9]} is not in the history"
            continue
        if differing := kernels.items() ^ reached.reached(kernels, partial(_of_commit, commit)).items():
            yield f"{_name(path)}: {min(differing)[0]}: the hash is not that of commit {commit[:9]}"
        if datetime.fromisoformat(about["utc"]).timestamp() < int(_git("show", "-s", "--format=%ct", commit)[1]):
            yield f"{_name(path)}: was measured before its commit {commit[:9]}"


def _of_commit(commit: str, module: str) -> bytes | None:
    """The source of a module of the kernels at a commit."""
    status, source = _git("show", f"{commit}:kernels/{module}.py")
    return source if status == 0 else None


@cache
def _git(*arguments: str) -> tuple[int, bytes]:
    try:
        found = subprocess.run(["git", *arguments], cwd=records.ROOT, capture_output=True)
    except OSError:  # there is no git
        return 1, b""
    return found.returncode, found.stdout
