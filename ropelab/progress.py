"""Show how far long work is: in one line that changes on a terminal, and in plain lines in a log."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from typing import TextIO


class ProgressLine:
    """A line about work that begins now.

    Args:
        stream: the stream that gets the line, by default stderr.
        every: the seconds between two lines in a log. A terminal shows every line in the place of the line before.
    """

    def __init__(self, stream: TextIO | None = None, every: float = 30.0):
        self._stream = sys.stderr if stream is None else stream  # stderr is None under pythonw
        self._terminal = self._stream is not None and self._stream.isatty()
        self._every = every
        self._started = self._last = time.monotonic()

    def show(self, text: str) -> None:
        """Show ``text``; in a log only if the line before is old enough."""
        if self._terminal:
            self._write(f"\r{text[: shutil.get_terminal_size().columns - 1]}\x1b[K")
        elif time.monotonic() - self._last >= self._every:
            self._last = time.monotonic()
            self._write(f"{text}\n")

    def say(self, text: str) -> None:
        """Write ``text`` above the line, at once."""
        self.end()
        self._write(f"{text}\n")

    def end(self) -> None:
        """Take the line off the terminal."""
        if self._terminal:
            self._write("\r\x1b[K")

    def left(self, done: int, total: int) -> str:
        """``"0:10 so far, about 0:30 left"`` if the rest takes as long for each item as the ``done`` items took."""
        seconds = time.monotonic() - self._started
        rest = f", about {minutes(seconds * (total - done) / done)} left" if 0 < done < total else ""
        return f"{minutes(seconds)} so far{rest}"

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # without the stream the work goes on
            self._stream.write(text)
            self._stream.flush()


def minutes(seconds: float) -> str:
    """``"3:05"`` for 185 seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
