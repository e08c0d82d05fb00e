"""Start and end processes: their environment, the server that forks them, pools, and an interruption.

A process that is started anew imports torch and the modules of its job, which takes seconds of a core. The server has
imported them once, and each fork of it begins at once.
"""

import atexit
import logging
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import get_all_start_methods, get_context, parent_process
from multiprocessing.context import BaseContext
from typing import Any

import torch

from ropelab.bench import replaced

INTERPRET = "TRITON_INTERPRET"
COMPILER = "torch._inductor.compile_fx"
"""``torch.compile`` imports this module at its first call, which takes seconds."""
EXIT_SECONDS = 10.0
"""A process that has no more work, and still is there after so many seconds, is killed."""
_OF_SERVER = {
    # ``torch.cuda.is_available`` asks the driver's management library. CUDA itself works in no fork of its user.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    # The tracker of semaphores starts with the server. It removes those of killed processes, and would warn of them.
    "PYTHONWARNINGS": ",".join(filter(None, (os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker:UserWarning"))),
}


def end_on_interruption() -> None:
    """From now on SIGINT ends every process that descends from this one, and then this process, with one line.

    The exit code is 130.
    """
    signal.signal(signal.SIGINT, _end)


def _end(*_: object) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _kill(_family([os.getpid()])[1:])
    print("\ninterrupted: every process has ended, and the next run goes on with the rest", file=sys.stderr, flush=True)
    sys.stdout.flush()
    atexit.register(os._exit, 130)  # when pools are shut down; to take down torch would need seconds
    raise SystemExit(130)


class Pool(ProcessPoolExecutor):
    """A pool whose end is the end of its processes and of all that they have started.

    As a context manager it waits for the processes where the block ends, and for none of them where the block raises.
    """

    def end(self, *, at_once: bool = False) -> None:
        """Start no further job, and kill each process at once, or if it does not exit within `EXIT_SECONDS`."""
        family = _family((self._processes or {}).keys())
        late = threading.Timer(0 if at_once else EXIT_SECONDS, _kill, [family])
        late.start()
        try:
            self.shutdown(cancel_futures=True)
        finally:
            late.cancel()
            _kill(family)  # what a process has started may outlive it

    def __exit__(self, raised: object, *_: object) -> None:
        self.end(at_once=bool(raised))


def kill(process: subprocess.Popen) -> None:
    """Kill a program and all that it has started, unless it has ended."""
    if process.poll() is None:
        _kill(_family([process.pid]))
        process.wait()


def _family(pids: Iterable[int]) -> list[Any]:
    """The processes with these numbers, each followed by all that descend from it."""
    import psutil

    found = []
    for pid in pids:
        with suppress(psutil.Error):
            found += [process := psutil.Process(pid), *process.children(recursive=True)]
    return found


def _kill(family: Sequence[Any]) -> None:
    """Kill the processes, and what they have started since."""
    import psutil

    for process in [*family, *_family(one.pid for one in family if one.is_running())]:
        with suppress(psutil.Error):
            # The tracker of semaphores ends with its process, and removes what the others have left.
            if not any("from multiprocessing.resource_tracker" in word for word in process.cmdline()):
                process.kill()


def _end_with_parent() -> None:
    if parent := parent_process():
        parent.join()
        os._exit(1)


def quiet() -> None:
    """Use one thread, and silence warnings: the faults that are tested make torch and NumPy warn.

    The process leaves an interruption to the process that started it, and ends as soon as that process is gone.
    Programs that it starts treat SIGINT as they would elsewhere.
    """
    signal.signal(signal.SIGINT, lambda *_: None)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    torch._logging.set_logs(all=logging.ERROR)
    warnings.simplefilter("ignore")


def environment(interpret: bool):
    """The environment of processes that start within the context.

    Args:
        interpret: whether Triton interprets kernels. Inductor compiles without further processes in either case.
    """
    changed = {"TORCHINDUCTOR_COMPILE_THREADS": "1"} | ({INTERPRET: "1"} if interpret else {})
    return replaced.entries(os.environ, changed, without=[INTERPRET])


def start_server(modules: Sequence[str] = ()) -> bool:
    """Start the server, which imports the modules, and return at once.

    The server has the modules and the environment, without Triton's interpreter, of the first call of this function.
    Later calls change nothing.

    Returns:
        Whether the system has such a server.
    """
    if "forkserver" not in get_all_start_methods():
        return False
    from multiprocessing import forkserver  # which other systems may not have

    get_context("forkserver").set_forkserver_preload(list(modules))
    with environment(interpret=False), replaced.entries(os.environ, _OF_SERVER), _no_interruption():
        forkserver.ensure_running()
    return True


@contextmanager
def _no_interruption() -> Iterator[None]:
    """Processes that start within the context ignore SIGINT. Only the main thread of a process can see to that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def forked(modules: Sequence[str] = ()) -> BaseContext:
    """Processes of this context are forks of the server. Triton does not interpret kernels in them.

    The processes import the modules themselves where the system has no such server, and where an import of the server
    has used CUDA.

    Args:
        modules: for a server that `start_server` has not started yet.
    """
    return get_context("forkserver" if start_server(modules) and _forks_can_use_cuda() else "spawn")


@cache
def _forks_can_use_cuda() -> bool:
    """Wait for the server, and ask a process that it forks."""
    with Pool(1, get_context("forkserver")) as process:
        return process.submit(_can_use_cuda).result()


def _can_use_cuda() -> bool:
    return not torch.cuda._is_in_bad_fork()
