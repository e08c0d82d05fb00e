"""A file to be written at the end of a long run: tried at its beginning, whole or not there at all."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path


class Destination:
    """Where a text will go. Whatever is there now stays until the text is written.

    Used as a context: what was begun beside the file is gone at its end.

    Raises:
        OSError: as it is made, if nothing can be written there.
        ValueError: a path that no file can have.
    """

    def __init__(self, path: Path):
        self._path = path.resolve()
        self._new: Path | None = None
        if self._path.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
        if self._path.exists() and not os.access(self._path, os.W_OK):
            raise PermissionError(f"{path} may not be written")
        if self._path.is_file() or not self._path.exists():  # a device or a pipe is written to, never replaced
            new = self._path.with_name(f".{secrets.token_hex(8)}")
            new.touch(exist_ok=False)
            self._new = new

    def __enter__(self) -> Destination:
        return self

    def write(self, text: str) -> None:
        """Write, in UTF-8, all of it."""
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
