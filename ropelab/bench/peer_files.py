"""The files of other packages that the studies load, and their checksums, for the records."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from ropelab.bench import fetch_peers, packages


def checksums(entries: Iterable[fetch_peers.Entry] | None = None, peers: Path = packages.PEERS) -> dict[str, str]:
    """The name of each file at hand, such as ``"einops 0.8.2: einops/einops.py"`` -> its checksum, SHA-256.

    Every version at hand of a package counts. The first file at a commit counts: it is the code that runs, or the
    source of a library in ``build/peers/compiled``. Each of these libraries counts too.

    Args:
        entries: the packages and commits with the files, by default the entries of ``data/peers.toml``.
    """
    entries = fetch_peers.read_list() if entries is None else entries
    return dict(sorted((name, packages.sha256(file)) for name, file in _at_hand(entries, peers) if file.is_file()))


def _at_hand(entries: Iterable[fetch_peers.Entry], peers: Path) -> Iterator[tuple[str, Path]]:
    for entry in entries:
        if isinstance(entry, fetch_peers.Commit):
            path = next(iter(entry.sha256))
            yield f"{entry}: {path}", peers / entry.folder / path
        else:
            for version, directory in packages.installations(entry.name, peers).items():
                yield from ((f"{entry.name} {version}: {path}", directory / path) for path in entry.files)
    yield from ((f"compiled: {path.name}", path) for path in (peers / "compiled").glob("*.so"))
