"""Give a file its name when it is whole."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write under. The file takes the place of ``path``, at once, when the block ends.

    If the block raises, for example because the disk is full, the new file goes and ``path`` stays as it was.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{os.getpid()}-{path.name}")
    try:
        yield new
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def write(path: Path, content: str | bytes) -> None:
    """Write a file that has its name only when it is whole."""
    with replacing(path) as new:
        new.write_bytes(content if isinstance(content, bytes) else content.encode())
