"""Call TransformerEngine's ``fused_rope.cu`` as published at a commit, without the rest of the package.

The project does not contain the code of the file. A library with its kernels and its host code lies in
``build/peers/compiled/transformer-engine-3057-<commit>-sm_<cc>.so``. The library exports the functions of the package's
C API that `ropelab.bench.peers.te_library` calls: ``nvte_create_tensor``, ``nvte_set_tensor_param_v2``,
``nvte_destroy_tensor`` and the functions of ``fused_rope.h``.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

from ropelab.bench import packages
from ropelab.bench.peers import te_library

REPOSITORY = "NVIDIA/TransformerEngine"
FIRST = "6c46696f1b71edb9013202e20091b3c3dacd8569"
"""The commit of TransformerEngine#3057 that the document describes, before the review."""
SOURCE = "transformer_engine/common/fused_rope/fused_rope.cu"
VARIABLE = "NVTE_FUSED_ROPE_THD_TOKEN_LINEAR"
"""At ``FIRST``, the environment variable that forces the old grid (0) or the new grid (1). Every call reads it."""


@cache
def library(commit: str = FIRST) -> te_library.Library:
    """The library of ``fused_rope.cu`` at a commit.

    Raises:
        NotInstalled: there is no GPU, or no library of this commit for the GPU.
    """
    name = f"{REPOSITORY} at {commit[:9]}: {SOURCE}"
    return te_library.load(packages.compiled(f"transformer-engine-3057-{commit[:9]}", name))


@contextmanager
def forced(linear: bool | None) -> Iterator[None]:
    """Within the context, calls of the library at ``FIRST`` take the new grid, the old grid, or (None) choose."""
    before = os.environ.pop(VARIABLE, None)
    try:
        if linear is not None:
            os.environ[VARIABLE] = str(int(linear))
        yield
    finally:
        os.environ.pop(VARIABLE, None)
        if before is not None:
            os.environ[VARIABLE] = before
