"""DeepSpeed's own files under build/peers as modules, without the launcher and the operators that its import loads."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from unittest import mock

from ropelab.bench import packages

STAND_INS = ("comm", "accelerator", "utils.groups", "utils.torch", "module_inject.tp_shard")
"""Modules of DeepSpeed that the sequence layer imports and that a rotation does not need."""


@contextmanager
def deepspeed_sequence() -> Iterator[tuple[ModuleType, ModuleType]]:
    """``deepspeed.sequence.layer`` and ``deepspeed.sequence.fpdt_layer``, which can be imported within the context.

    A CUDA tensor is on the accelerator, as for DeepSpeed on a GPU. torchembed is not installed for DeepSpeed.

    Raises:
        NotInstalled: DeepSpeed or einops is not under build/peers.
    """
    folders = [packages.locate(name)[1] for name in ("einops", "deepspeed")]
    names = ("deepspeed", "deepspeed.sequence", "deepspeed.utils", "deepspeed.module_inject")
    parents = {name: ModuleType(name) for name in names}
    for name, module in parents.items():
        module.__path__ = [str(folders[1].joinpath(*name.split(".")))]
    stand_ins = {f"deepspeed.{name}": mock.MagicMock(name=name) for name in STAND_INS}
    stand_ins["deepspeed.accelerator"].get_accelerator().on_accelerator = lambda t: t.is_cuda
    with mock.patch.dict(sys.modules), mock.patch.object(sys, "path", [str(folders[0]), *sys.path]):
        for name in [name for name in sys.modules if name.partition(".")[0] == "deepspeed"]:
            del sys.modules[name]
        sys.modules.update(parents | stand_ins | {"torchembed": None, "torchembed._triton": None})
        for name, module in stand_ins.items():
            parent, _, child = name.rpartition(".")
            setattr(sys.modules.get(parent, module), child, module)
        yield tuple(importlib.import_module(f"deepspeed.sequence.{name}") for name in ("layer", "fpdt_layer"))
