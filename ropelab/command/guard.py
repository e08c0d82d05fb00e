"""Run a command, stop it at a limit of memory, and let no process that the command started outlive it.

The module is run by its path, in a Python of its own that imports no package: ``python -I guard.py BYTES COMMAND...``.
The guard ends the command when its standard input ends, so also when the process that started the guard dies. Its
output is a line of JSON: the exit code as `subprocess.Popen` gives it, and whether the limit of memory was reached.

On Linux the guard adopts the orphans of the command, and so ends daemons, too. Elsewhere it ends the process group of
the command, and no memory is counted.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PAUSE = 0.2
"""The seconds between two looks at the memory."""
_SET_CHILD_SUBREAPER = 36


def guard(command: list[str], most: int) -> None:
    """Run ``command`` with its output on stderr, and write on stdout how it ended.

    Args:
        command: the program and its arguments.
        most: the bytes that the command and all that it started may hold, shared memory counted once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1)
        with suppress(OSError):  # if the machine itself runs out of memory, the command ends first
            Path("/proc/self/oom_score_adj").write_text("1000")
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True)
    threading.Thread(target=_kill_at_the_end_of_input, args=(process.pid,), daemon=True).start()
    full = False
    while process.poll() is None:
        if full := full or sum(map(_memory, _descendants(os.getpid()))) > most:
            _kill(process.pid)
        with suppress(subprocess.TimeoutExpired):
            process.wait(PAUSE)
    _end_all(process.pid)
    with suppress(OSError):  # the process that started the guard may be gone
        os.write(1, json.dumps({"code": process.returncode, "full": full}).encode())


def _kill_at_the_end_of_input(leader: int) -> None:
    os.read(0, 1)
    _kill(leader)


def _kill(leader: int) -> None:
    """Kill a process and its group."""
    with suppress(OSError):
        os.killpg(leader, signal.SIGKILL) if hasattr(os, "killpg") else os.kill(leader, signal.SIGTERM)


def _end_all(leader: int) -> None:
    """Kill the group of a process that has ended, and all that this process adopted."""
    _kill(leader)
    while children := list(_children(os.getpid())):
        for child in children:
            with suppress(OSError):
                os.kill(child, signal.SIGKILL)
        os.waitpid(-1, 0)


def _children(process: int) -> Iterator[int]:
    """Yield the children of a process; none where the system does not list them."""
    with suppress(OSError):  # it may end meanwhile
        for path in Path(f"/proc/{process}/task").glob("*/children"):
            yield from map(int, path.read_text().split())


def _descendants(process: int) -> Iterator[int]:
    for child in _children(process):
        yield child
        yield from _descendants(child)


def _memory(process: int) -> int:
    """Return the bytes of a process, its share of shared pages; 0 where the system does not tell."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("Pss:")).split()[1])
    return 0


if __name__ == "__main__":
    guard(sys.argv[2:], int(sys.argv[1]))
