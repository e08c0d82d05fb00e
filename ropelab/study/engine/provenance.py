"""Compare the provenances of all records with one another, with ``data/peers.toml`` and with the history."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from ropelab.bench import fetch_peers, reached, record_checks, records

FACTS = ("name", "sm_count", "memory_bytes", "capability")
"""The facts of a GPU that are the same in all records of a folder."""


def problems(directory: Path = records.MEASUREMENTS) -> list[str]:
    """A line for each record whose provenance contradicts another record, the list of peers or the history."""
    return [*contradictions(directory), *_commits(_read(directory))]


def contradictions(directory: Path = records.MEASUREMENTS) -> list[str]:
    """The lines of `problems` that need no history: ``"<gpu>/<study>: <why>"``. No verdict rests on such a record."""
    found = _read(directory)
    return [*_gpus(found), *_runs(found), *_copies(found), *_peers(found)]


def _read(directory: Path) -> dict[Path, Any]:
    """The provenances that can be read and that a run wrote; `records.load` refuses the others."""
    found = {}
    for path in sorted(directory.glob("*/*.json")):
        try:
            about = json.loads(path.read_text())
            if not record_checks.of_no_run(about):
                found[path] = about
        except (OSError, ValueError, RecursionError):
            continue
    return found


def _name(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def _gpus(found: dict[Path, Any]) -> Iterator[str]:
    """The folder is the GPU's, and the GPU has the same facts in all its records."""
    folders: dict[str, tuple] = {}
    for path, about in found.items():
        facts = tuple(about["gpu"].get(name) for name in FACTS)
        if records.slug(facts[0]) != path.parent.name:
            yield f"{_name(path)}: is a record of {facts[0]}"
        if None not in facts and folders.setdefault(path.parent.name, facts) != facts:
            yield f"{_name(path)}: the GPU has {facts[1:]}, and {folders[path.parent.name][1:]} in other records"


def _runs(found: dict[Path, Any]) -> Iterator[str]:
    """The records of one run have the same versions."""
    runs: dict[tuple, tuple[Path, tuple]] = {}
    for path, about in found.items():
        versions = tuple(about.get(name) for name in ("torch", "cuda", "triton", "python"))
        versions += (about["gpu"].get("driver_version"),)
        first, of_first = runs.setdefault((path.parent, about["commit"], about["command"]), (path, versions))
        if versions != of_first:
            yield f"{_name(path)}: has the versions {versions}, and {_name(first)} of its run has {of_first}"


def _copies(found: dict[Path, Any]) -> Iterator[str]:
    """No table with times is that of another GPU."""
    seen: dict[str, Path] = {}
    for path, about in found.items():
        timed = "median_us" in path.with_suffix(".csv").read_text().partition("\n")[0].split(",")
        if timed and (other := seen.setdefault(about["csv_sha256"], path)) != path:
            yield f"{_name(path)}: has the times of {_name(other)}"


def _peers(found: dict[Path, Any]) -> Iterator[str]:
    """Packages and commits stand in the list of peers, and have one hash in all records.

    Libraries are compiled or cut for a machine. Packages of the environment are in no list.
    """
    listed = {name: {f"{name} {version}" for version in ran} for name, ran in fetch_peers.engines().items()}
    seen: dict[str, str] = {}
    for entry in fetch_peers.read_list():
        listed.setdefault(entry.name, set()).add(str(entry))
        if entry.large:
            seen[str(entry)] = ""
    for path, about in found.items():
        for name, digest in (about.get("peers") or {}).items():
            if (package := name.partition(" ")[0]) in listed and name not in listed[package]:
                yield f"{_name(path)}: {name} is not in the list of peers"
            if package in listed and digest and seen.setdefault(name, digest) not in ("", digest):
                yield f"{_name(path)}: {name}: has another checksum elsewhere"


def has_history() -> bool:
    """Whether this checkout has the whole history."""
    return _git("rev-parse", "--is-shallow-repository") == (0, b"false\n")


def _commits(found: dict[Path, Any]) -> Iterator[str]:
    """The commit is one of this history, is older than the record, and has the kernels whose hashes the record has.

    A checkout without the whole history says nothing.
    """
    if not has_history():
        return
    for commit in sorted({about["commit"] for about in found.values()}):
        mine = {path: about for path, about in found.items() if about["commit"] == commit}
        if _git("merge-base", "--is-ancestor", commit, "HEAD")[0]:
            yield from (f"{_name(path)}: commit {commit[:9]} is not in the history" for path in mine)
        else:
            yield from _other_code(commit, mine)


def _other_code(commit: str, found: dict[Path, Any]) -> Iterator[str]:
    kernels = Path(_checkout(commit).name) / "kernels"
    made = int(_git("show", "--no-patch", "--format=%ct", commit)[1])
    for path, about in found.items():
        noted = about.get("kernels") or {}
        if differing := sorted(set(noted.items()) ^ set(reached.reached(noted, kernels).items())):
            yield f"{_name(path)}: {differing[0][0]}: the hash is not that of commit {commit[:9]}"
        if datetime.fromisoformat(about["utc"]).timestamp() < made:
            yield f"{_name(path)}: was measured before its commit {commit[:9]}"


@cache
def _checkout(commit: str) -> tempfile.TemporaryDirectory[str]:
    """The kernels of a commit, in a folder that lasts as long as the process."""
    folder = tempfile.TemporaryDirectory()
    with tarfile.open(fileobj=io.BytesIO(_git("archive", commit, "kernels")[1])) as archive:
        archive.extractall(folder.name, filter="tar")
    return folder


def _git(*arguments: str) -> tuple[int, bytes]:
    try:
        found = subprocess.run(["git", *arguments], cwd=records.ROOT, capture_output=True)
    except OSError:  # there is no git
        return 1, b""
    return found.returncode, found.stdout
