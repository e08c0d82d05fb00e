"""fairseq2 as released, which has both encoders but no ``impl``: what callers had before the pull request."""

from __future__ import annotations

import importlib
import sys
from functools import cache
from types import ModuleType
from unittest import mock

from ropelab.bench import packages


@cache
def released() -> tuple[str, ModuleType, type]:
    """Version, ``fairseq2.nn.position_encoder``, and ``BatchLayout``.

    The packages' own ``__init__`` would load fairseq2's native library, so they are replaced by empty modules that
    only say where their files are.

    Raises:
        ropelab.bench.packages.NotInstalled: fairseq2 is not under ``build/peers``.
    """
    version, directory = packages.locate("fairseq2")
    stand_ins = {}
    for name in ("fairseq2", "fairseq2.nn", "fairseq2.nn.utils", "fairseq2.utils"):
        stand_ins[name] = ModuleType(name)
        stand_ins[name].__path__ = [str(directory.joinpath(*name.split(".")))]
    with mock.patch.dict(sys.modules, stand_ins):
        encoders = importlib.import_module("fairseq2.nn.position_encoder")
        batch_layout = importlib.import_module("fairseq2.nn.batch_layout")
    return version, encoders, batch_layout.BatchLayout
