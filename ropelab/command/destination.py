"""Reserve a place for a text before a long run, and write the text whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path


class Destination:
    """A path that a text will be written to. An existing file stays as it is until then.

    A temporary file beside the path holds the text until it is complete. The end of the context removes the file.
    A device, a pipe, and the file that is stdout or stderr get the text directly.

    Raises:
        OSError: the path cannot be written.
        ValueError: no file can have this path.
    """

    def __init__(self, path: Path):
        self._path, self._new = path, None
        if path.is_dir():
            raise IsADirectoryError(f"path: expected a file, got the folder {path}")
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(f"path: expected a file with write permission, got {path}")
        self._stream = next((stream for stream in (1, 2) if _is(path, stream)), None)
        if self._stream is None and (path.is_file() or not path.exists()):
            self._path = path.resolve()
            new = self._path.with_name(f".{secrets.token_hex(8)}")
            new.touch(exist_ok=False)
            self._new = new

    def __enter__(self) -> Destination:
        return self

    def write(self, text: str) -> None:
        """Write the text in UTF-8, all at once. A pipe without a reader raises OSError."""
        if self._new is None:
            descriptor = self._stream or os.open(self._path, os.O_WRONLY | getattr(os, "O_NONBLOCK", 0))
            os.set_blocking(descriptor, True)
            with open(descriptor, "wb", closefd=self._stream is None) as file:
                file.write(text.encode())
            return
        self._new.write_text(text, encoding="utf-8")
        if self._path.exists():
            shutil.copymode(self._path, self._new)
        os.replace(self._new, self._path)

    def __exit__(self, *error: object) -> None:
        if self._new is not None:
            self._new.unlink(missing_ok=True)


def _is(path: Path, descriptor: int) -> bool:
    """Return whether a path and a descriptor are the same file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except OSError:
        return False
