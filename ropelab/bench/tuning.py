"""Let compilers take part in turns: see `ropelab.bench.turns`.

``torch.compile`` and ``triton.autotune`` time a kernel with a few tiles and keep the fastest tile. Beside other
processes on the GPU the choice would be a matter of luck, and the contender would be measured with a worse tile. The
rest of a compilation is work of the host, which takes seconds.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from unittest import mock

from ropelab.bench import turns


@contextmanager
def in_turns() -> Iterator[None]:
    """Within the context a compiler times tiles in a turn of its own, and leaves the GPU to others as it compiles."""
    with ExitStack() as patches:
        for owner, name in _choices():
            patches.enter_context(mock.patch.object(owner, name, _in_a_turn(getattr(owner, name))))
        patches.enter_context(_compiling_off_the_gpu())
        yield


def _compiling_off_the_gpu():
    """A patch of what torch.compile calls around each compilation. Recording a CUDA graph uses the GPU."""
    from torch._dynamo.callback import CallbackTrigger, CompilationCallbackHandler

    around = CompilationCallbackHandler.install_callbacks

    @contextmanager
    def compiling(self, trigger, *arguments):
        records = trigger is CallbackTrigger.CUDAGRAPH_RECORDING
        with nullcontext() if records else turns.off_the_gpu(), around(self, trigger, *arguments):
            yield

    return mock.patch.object(CompilationCallbackHandler, "install_callbacks", compiling)


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
