"""Start and end processes: their environment, the server that forks them, and an interruption.

A process that is started anew imports torch and the modules of its job, which takes seconds of a core. The server has
imported them once, and each fork of it begins at once.
"""

import atexit
import logging
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from multiprocessing import get_all_start_methods, get_context, parent_process
from multiprocessing.context import BaseContext
from unittest import mock

import torch

INTERPRET = "TRITON_INTERPRET"
COMPILER = "torch._inductor.compile_fx"
"""``torch.compile`` imports this module at its first call, which takes seconds."""
_ASK_NO_CUDA = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""``torch.cuda.is_available`` then asks the driver's management library. CUDA itself works in no fork of its user."""


def end_on_interruption() -> None:
    """From now on SIGINT ends every process that descends from this one, and then this process, with one line.

    The exit code is 130.
    """
    signal.signal(signal.SIGINT, _end)


def _end(*_: object) -> None:
    import psutil

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            # The tracker of semaphores ends with this process, and removes what the others have left.
            if not any("resource_tracker" in word for word in process.cmdline()):
                process.kill()
    print("\ninterrupted: every process has ended, and the next run goes on with the rest", file=sys.stderr, flush=True)
    sys.stdout.flush()
    atexit.register(os._exit, 130)  # when pools are shut down; to take down torch would need seconds
    raise SystemExit(130)


def dependent() -> None:
    """Leave an interruption to the process that started this one, and end as soon as that process is gone.

    Programs that this process starts treat SIGINT as they would elsewhere.
    """
    signal.signal(signal.SIGINT, lambda *_: None)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if parent := parent_process():
        parent.join()
        os._exit(1)


def quiet() -> None:
    """Use one thread, and silence warnings: the faults that are tested make torch and NumPy warn.

    The process ends on SIGINT, and as soon as the process that started it is gone.
    """
    dependent()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    torch.set_num_threads(1)
    torch._logging.set_logs(all=logging.ERROR)
    warnings.simplefilter("ignore")


def environment(interpret: bool):
    """The environment of processes that start within the context.

    Args:
        interpret: whether Triton interprets kernels. Inductor compiles without further processes in either case.
    """
    changed = {name: value for name, value in os.environ.items() if name != INTERPRET}
    changed |= {"TORCHINDUCTOR_COMPILE_THREADS": "1"} | ({INTERPRET: "1"} if interpret else {})
    return mock.patch.dict(os.environ, changed, clear=True)


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
    with environment(interpret=False), mock.patch.dict(os.environ, _ASK_NO_CUDA), _no_interruption():
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
    with ProcessPoolExecutor(1, get_context("forkserver")) as process:
        return process.submit(_can_use_cuda).result()


def _can_use_cuda() -> bool:
    return not torch.cuda._is_in_bad_fork()
