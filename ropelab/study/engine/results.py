"""Run a study, or a part of a study, and say how it ended."""

import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from ropelab.bench import gpu_memory, packages, reached
from ropelab.bench.unavailable import Unavailable


@dataclass(frozen=True)
class Result:
    """What a study, or a part of it, has found, or the reason why it has found nothing.

    Attributes:
        found: the table of the study, what its untimed part found, or None.
        reason: why the study cannot run here.
        error: the traceback, if the study raised.
        seconds, gpu_bytes: the time that it took, and the memory that torch reserved.
        whole: whether the study has ended; its table grows otherwise.
        kernels: the kernels of this project that ran (`ropelab.bench.reached.noted`).
        peers: the packages whose code was asked for, and their hashes (`ropelab.bench.packages.used`).
        beside: the results of what ran before beside other studies: its compilation, and what measures no time.
    """

    found: Any = None
    reason: str = ""
    error: str = ""
    seconds: float = 0.0
    gpu_bytes: int = 0
    whole: bool = True
    kernels: frozenset[str] = frozenset()
    peers: Mapping[str, str] = field(default_factory=dict)
    beside: tuple["Result", ...] = ()

    @property
    def facts(self) -> dict[str, Any]:
        """What a record notes: seconds and bytes in its parameters, kernels and peers."""
        parts = (*self.beside, self)
        gpu_bytes = {"beside": max((part.gpu_bytes for part in self.beside), default=0), "alone": self.gpu_bytes}
        seconds = {"seconds": self.seconds, "seconds_beside": sum(part.seconds for part in self.beside)}
        return {
            "parameters": {name: round(value, 1) for name, value in seconds.items()} | {"gpu_bytes": gpu_bytes},
            "kernels": frozenset().union(*(part.kernels for part in parts)),
            "peers": reduce(lambda a, b: {**a, **b}, (part.peers for part in parts)),
        }


def run(function: Callable[[], Any]) -> Result:
    """Call the function, which measures a study or a part of it, in this process."""
    (*_, last) = growing(function)
    return last


def growing(function: Callable[[], Any]) -> Iterator[Result]:
    """Call the function as `run`. A function that yields its table as it grows has a result for each table."""
    gpu_memory.watch()
    started = time.monotonic()
    found, reason, error = None, "", ""

    def result(whole: bool) -> Result:
        reserved = getattr(found, "attrs", {}).get("gpu_bytes", 0) or gpu_memory.peak_reserved()
        seconds = time.monotonic() - started
        return Result(found, reason, error, seconds, reserved, whole, frozenset(kernels), packages.used())

    with reached.noted() as kernels:
        try:
            made = function()
            for found in made if isinstance(made, Iterator) else (made,):
                if made is not found:
                    yield result(whole=False)
        except Unavailable as unavailable:
            reason = str(unavailable)
        except Exception as raised:
            if isinstance(raised, ModuleNotFoundError) and raised.name and "." not in raised.name:
                reason = f"{raised.name} not installed"
            else:
                error = traceback.format_exc()
        yield result(whole=True)
