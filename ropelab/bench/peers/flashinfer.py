"""FlashInfer's kernel, which it compiles when it is first called."""

import importlib
import os
import sysconfig
from functools import cache
from types import ModuleType
from unittest import mock

import torch

from ropelab.bench import packages
from ropelab.bench.peers.cos_sin_cache import flat, positions
from ropelab.bench.peers.peer import Rotate
from ropelab.bench.workloads import Workload

PACKAGE = "flashinfer-python"


@cache
def module(version: str) -> ModuleType:
    """``flashinfer.rope`` of that version with its kernel compiled: nvcc takes a minute, once for each kind of GPU.

    Raises:
        NotInstalled: no such version, no GPU, or a package that it imports is missing.
        RuntimeError: its kernel cannot be compiled.
    """
    if not torch.cuda.is_available():
        raise packages.NotInstalled("FlashInfer's CUDA kernel needs a GPU")
    ninja = os.pathsep.join((sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)))
    try:
        with mock.patch.dict(os.environ, PATH=ninja), packages.imported(PACKAGE, version, "flashinfer", ".rope"):
            rope = importlib.import_module("flashinfer.rope")
            rope.get_rope_module()
    except ModuleNotFoundError as error:
        raise packages.NotInstalled(f"{PACKAGE} {version} needs {error.name}") from error
    return rope


def bind(workload: Workload, cos: torch.Tensor, sin: torch.Tensor, *, version: str) -> Rotate:
    """Into new tensors; the cache is in float32."""
    apply = module(version).apply_rope_with_cos_sin_cache
    rows, table = positions(workload, cos.device, torch.int32), torch.cat((cos, sin), dim=-1)
    is_neox = workload.layout == "split_half"

    def rotate(q, k):
        q, k = (None if x is None else x.detach() for x in (q, k))
        flat_q, flat_k = flat(q, workload, "flashinfer"), flat(k, workload, "flashinfer")
        new_q, new_k = apply(rows, flat_q, flat_k, workload.head_dim, table, is_neox)
        return new_q.view(q.shape), new_k.view(k.shape)

    return rotate
