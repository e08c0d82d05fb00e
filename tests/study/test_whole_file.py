"""A full disk leaves no half written file under its name, and ends a command in one line."""

import errno
import os
import sys
from pathlib import Path

import pandas as pd
import pytest

from ropelab.bench import records, whole_file
from ropelab.hub import build
from ropelab.study import __main__ as commands

FULL = OSError(errno.ENOSPC, "No space left on device")


def half(write):
    """The writer of a file on a disk that is full when the file is half written."""

    def stopped(self, *arguments, **options):
        file = self if isinstance(self, Path) else Path(arguments[0])
        write(self, *arguments, **options)
        os.truncate(file, file.stat().st_size // 2)
        raise FULL

    return stopped


def record(folder):
    records.write("a_study", pd.DataFrame({"median_us": [1.0]}), folder)


WRITERS = {
    "bytes": ((Path, "write_bytes"), lambda folder: whole_file.write(folder / "file", b"12")),
    "text": ((Path, "write_bytes"), lambda folder: whole_file.write(folder / "file", "12")),
    "record, table": ((pd.DataFrame, "to_csv"), record),
    "record, provenance": ((Path, "write_text"), record),
}


@pytest.mark.parametrize("place, write", WRITERS.values(), ids=WRITERS)
def test_a_file_that_was_there_stays_and_nothing_half_written_is_left(place, write, tmp_path, monkeypatch):
    write(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with monkeypatch.context() as patched:
        patched.setattr(*place, half(getattr(*place)))
        with pytest.raises(OSError, match="No space left"):
            write(tmp_path)
    assert before and before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}


def test_a_full_disk_ends_a_command_in_one_line(tmp_path, monkeypatch):
    def full(folder, files):
        raise FULL

    monkeypatch.setattr(build, "write", full)
    monkeypatch.setattr(sys, "argv", ["ropelab.study", "--build", str(tmp_path), "hub"])
    with pytest.raises(SystemExit) as end:
        commands.end_in_one_line_on_a_full_disk()
    assert "No space left on device" in end.value.code and "\n" not in end.value.code
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
