"""Keep ``data/SHA256SUMS``: the checksum of every file under ``data`` that a verdict or a figure rests on.

``python -m ropelab.bench.checksums`` computes all checksums anew. ``sha256sum --check SHA256SUMS`` reads the same file.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ropelab.bench import whole_file
from ropelab.bench.record_checks import sha256
from ropelab.bench.records import ROOT

DATA = ROOT / "data"
NAME = "SHA256SUMS"
EVIDENCE = (
    "README.md", "peers.toml", "claims/*.toml", "documents/*.csv", "documents/*.toml", "identification/*.csv",
    "sources.toml", "repeats.csv", "rows.toml", "verdicts.csv", "tile_*.csv", "measurements/*/*.csv",
    "measurements/*/*.json",
)  # fmt: skip
"""The files that have a checksum."""


def write(data: Path) -> None:
    """Compute the checksum of every file anew."""
    _write(data, {name: sha256(data / name) for name in _files(data)})


def update(paths: Iterable[Path], data: Path) -> None:
    """Compute the checksums of these files anew and leave all others as they are.

    Args:
        paths: files under ``data``. Files elsewhere have no checksum and are ignored.
    """
    inside = [path.resolve() for path in paths if path.resolve().is_relative_to(data.resolve())]
    if inside:
        found = {path.relative_to(data.resolve()).as_posix(): sha256(path) for path in inside}
        _write(data, _read(data) | found)


def differences(data: Path) -> list[str]:
    """A line for each file that was changed, added or removed since the checksums were written, by name."""
    expected, found = _read(data), set(_files(data))
    if not expected:
        return [f"{NAME}: expected the checksum of every file of evidence, got none"]
    return list(_differences(data, expected, found))


def _differences(data: Path, expected: Mapping[str, str], found: set[str]) -> Iterator[str]:
    for name in sorted(expected.keys() | found):
        if name not in found:
            yield f"{name}: missing, {NAME} has its checksum"
        elif name not in expected:
            yield f"{name}: new, {NAME} has no checksum of it"
        else:
            try:
                if sha256(data / name) != expected[name]:
                    yield f"{name}: changed, {NAME} has another checksum"
            except OSError as error:
                yield f"{name}: {error}"


def _files(data: Path) -> list[str]:
    """The names of the files that have a checksum, relative to ``data``, in order."""
    return sorted(path.relative_to(data).as_posix() for pattern in EVIDENCE for path in data.glob(pattern))


def _read(data: Path) -> dict[str, str]:
    """The name of each file -> its checksum; empty if ``SHA256SUMS`` does not exist."""
    sums = data / NAME
    lines = sums.read_text(encoding="utf-8") if sums.exists() else ""
    return {name: digest for digest, name in re.findall(r"^([0-9a-f]{64})  (.+)$", lines, re.MULTILINE)}


def _write(data: Path, sums: Mapping[str, str]) -> None:
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
    whole_file.write(data / NAME, lines)


if __name__ == "__main__":
    write(DATA)
