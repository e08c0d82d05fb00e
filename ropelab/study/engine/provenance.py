"""Compare the provenances of all records with one another, with ``data/peers.toml`` and with the history."""

from __future__ import annotations

import json
import re
import subprocess
import time
import tomllib
from collections.abc import Iterator
from datetime import datetime
from functools import cache, partial
from pathlib import Path
from typing import Any

from ropelab.bench import fetch_peers, reached, record_checks, records, staleness

Found = dict[Path, Any]
VERSIONS = ("torch", "cuda", "triton", "python")
MEASURED = ("utc", "commit", "command", "dirty", "gpu", *VERSIONS)
"""What never changes in a provenance once its table is committed."""
GPU = ("name", "sm_count", "memory_bytes", "capability")


def problems(directory: Path = records.MEASUREMENTS) -> list[str]:
    """A line for each record whose provenance contradicts another record, the list of peers or the history."""
    return [*contradictions(directory), *_commits(_read(directory))]


def contradictions(directory: Path = records.MEASUREMENTS) -> list[str]:
    """The lines of `problems` that need no history: ``"<gpu>/<study>: <why>"``. No verdict rests on such a record.

    A version of a peer that the list has no more is no contradiction: the record is old (`ropelab.bench.staleness`).
    """
    lines, first = [], {}
    listed = fetch_peers.versions()
    of_a_machine = {str(entry) for entry in fetch_peers.read_list() if entry.large}
    for path, about in _read(directory).items():
        peers = {peer for peer in about["peers"] if peer in listed.get(peer.partition(" ")[0], ())} - of_a_machine
        compared = {f"checksum of {peer}": about["peers"][peer] for peer in peers}
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
    """The record is as it was committed; its commit is older, and has its kernels and the numbers of its protocol.

    A checkout without the whole history says nothing.
    """
    for path, about in found.items() if has_history() else ():
        name, commit, kernels = _name(path), about["commit"], about["kernels"]
        measured, known_at = datetime.fromisoformat(about["utc"]).timestamp(), time.time()
        for committed, before in _committed().get(name, ()):
            # Of tables that are no times, two runs make the same.
            if before["csv_sha256"] == about["csv_sha256"] and (about["protocol"] or before["utc"] == about["utc"]):
                known_at = min(known_at, committed)
                yield from (f"{name}: {thing} is not as it was committed" for thing in _edited(before, about))
        if measured > known_at:
            yield f"{name}: was measured after today, or after its table was committed"
        if not re.fullmatch("[0-9a-f]{40}", commit) or _git("merge-base", "--is-ancestor", commit, "HEAD")[0]:
            yield f"{name}: commit {commit[:9]} is not in the history"
            continue
        if differing := kernels.items() ^ reached.reached(kernels, partial(_of_commit, commit)).items():
            yield f"{name}: {min(differing)[0]}: the hash is not that of commit {commit[:9]}"
        protocols = tomllib.loads(_git("show", f"{commit}:data/protocols.toml")[1].decode())
        if about["protocol"] not in ({}, staleness.numbers(about["study"], protocols.get("protocol", {}))):
            yield f"{name}: the protocol is not that of commit {commit[:9]}"
        if measured < int(_git("show", "-s", "--format=%ct", commit)[1]):
            yield f"{name}: was measured before its commit {commit[:9]}"


def _edited(before: Any, about: Any) -> Iterator[str]:
    """What differs from an earlier provenance of the table; a conversion may add kernels and write other hashes."""
    yield from (thing for thing in MEASURED if before[thing] != about[thing])
    yield from (thing for thing in ("kernels", "peers") if before[thing].keys() - about[thing].keys())
    if about["protocol"] and before["protocol"] != about["protocol"]:
        yield "protocol"


@cache
def _committed() -> dict[str, list[tuple[int, Any]]]:
    """``"<gpu>/<study>"`` -> when a provenance that names its code was committed, and the provenance."""
    _, added = _git("log", "--diff-filter=A", "--format=%H", "--", "data/protocols.toml")
    _, log = _git(
        "log", "--raw", "--no-abbrev", "--no-renames", "--diff-filter=AM", "--format=%ct",
        "HEAD", *(f"^{commit}^" for commit in added.decode().split()), "--", "data/measurements/*/*.json",
    )  # fmt: skip
    found: dict[str, list[tuple[int, Any]]] = {}
    for line in filter(None, log.decode().splitlines()):
        about, _, path = line.partition("\t")
        if not path:
            when = int(line)
        elif "protocol" in (before := json.loads(_git("cat-file", "blob", about.split()[3])[1])):
            found.setdefault(_name(Path(path)), []).append((when, before))
    return found


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
