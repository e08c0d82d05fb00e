"""Keep no tile that a compiler chose while other processes used the GPU.

``torch.compile`` times a kernel with a few tiles, and keeps the fastest tile on disk. While other processes use the
GPU, luck decides which tile is fastest, and the contender would be measured with a worse tile.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps

from ropelab.bench import replaced


@contextmanager
def not_kept() -> Iterator[None]:
    """Within the context ``torch.compile`` keeps no choice on disk. ``triton.autotune`` keeps none by default."""
    from torch._inductor.runtime.autotune_cache import AutotuneCache

    # The compiled code that torch.compile keeps refers to the method by its name.
    @wraps(AutotuneCache.save)
    def save(*arguments, **options) -> None:
        pass

    with replaced.attributes(AutotuneCache, save=save):
        yield
