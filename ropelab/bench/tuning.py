"""This file lets compilers choose the tile of a kernel while no other process uses the GPU.

``torch.compile`` and ``triton.autotune`` time a kernel with a few tiles and keep the fastest tile. Beside other
processes on the GPU the choice would be a matter of luck, and the contender would be measured with a worse tile.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from unittest import mock

from ropelab.bench import turns


@contextmanager
def alone() -> Iterator[None]:
    """Within the context a compiler times tiles in a turn of its own: see `ropelab.bench.turns`."""
    with ExitStack() as patches:
        for owner, name in _choices():
            patches.enter_context(mock.patch.object(owner, name, _in_a_turn(getattr(owner, name))))
        yield


@contextmanager
def not_kept() -> Iterator[None]:
    """Within the context ``torch.compile`` keeps no choice on disk. ``triton.autotune`` keeps none by default."""
    from torch._inductor.runtime.autotune_cache import AutotuneCache

    # The compiled code that torch.compile keeps refers to the method by its name.
    @wraps(AutotuneCache.save)
    def save(*arguments, **options) -> None:
        pass

    with mock.patch.object(AutotuneCache, "save", save):
        yield


def _choices() -> list[tuple[type, str]]:
    """The methods that time tiles."""
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    found: list[tuple[type, str]] = [(CachingAutotuner, "benchmark_all_configs")]
    try:
        from triton.runtime.autotuner import Autotuner
    except ImportError:
        return found  # Triton is optional
    return [*found, (Autotuner, "_bench")]


def _in_a_turn(method: Callable) -> Callable:
    @wraps(method)
    def timed(*arguments, **options):
        with turns.alone():
            return method(*arguments, **options)

    return timed
