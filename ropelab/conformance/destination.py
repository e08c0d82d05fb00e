"""This file reserves a place for a text before a long run, and writes the text whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path


class Destination:
    """A path that a text will be written to. An existing file stays as it is until then.

    A temporary file beside the path holds the text until it is complete. The end of the context removes the file.

    Raises:
        OSError: the path cannot be written.
        ValueError: no file can have this path.
    """

    def __init__(self, path: Path):
        self._path = path.resolve()
        self._new: Path | None = None
        if self._path.is_dir():
            raise IsADirectoryError(f"path: expected a file, got the folder {path}")
        if self._path.exists() and not os.access(self._path, os.W_OK):
            raise PermissionError(f"path: expected a file with write permission, got {path}")
        if self._path.is_file() or not self._path.exists():  # a device or a pipe must not be replaced
            new = self._path.with_name(f".{secrets.token_hex(8)}")
            new.touch(exist_ok=False)
            self._new = new

    def __enter__(self) -> Destination:
        return self

    def write(self, text: str) -> None:
        """Write the text in UTF-8, all at once."""
        if self._new is None:
            self._path.write_text(text, encoding="utf-8")
            return
        self._new.write_text(text, encoding="utf-8")
        if self._path.exists():
            shutil.copymode(self._path, self._new)
        os.replace(self._new, self._path)

    def __exit__(self, *error: object) -> None:
        if self._new is not None:
            self._new.unlink(missing_ok=True)
