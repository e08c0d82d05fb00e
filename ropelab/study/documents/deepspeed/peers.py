"""Load the two packages of the document, torchembed and DeepSpeed, in the versions at hand."""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import runpy
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd
import torch

from ropelab.bench import packages, replaced
from ropelab.bench.unavailable import Unavailable
from ropelab.study.engine.sources import facts

KERNEL_FILE = "torchembed/_triton.py"
DEEPSPEED_FILE = "deepspeed/sequence/layer.py"


REVIEWED = "0.3.0"
"""The newest torchembed on the day of the review, and the only one that the document measured."""


def torchembed_kernels() -> dict[str, bool]:
    """Each version of torchembed at hand, oldest first -> whether the version ships the module of the fused kernel."""
    return {
        version: (directory / KERNEL_FILE).is_file()
        for version, directory in packages.installations("torchembed").items()
    }


def wheels(*, smoke: bool = False) -> pd.DataFrame:
    """The versions of torchembed, and whether each ships the fused kernel: columns version, has_triton_module."""
    found = torchembed_kernels()
    if not found:
        raise Unavailable("no torchembed under build/peers (python -m ropelab.study peers)")
    return pd.DataFrame({"version": list(found), "has_triton_module": list(found.values())})


def torchembed(version: str | None = None) -> ModuleType:
    """The module ``torchembed._triton`` of the version, by default of the newest version that ships the module.

    Raises:
        Unavailable: the version is not at hand, or does not ship the module.
    """
    return packages.load_file("torchembed", version or newest_torchembed(), KERNEL_FILE)


def newest_torchembed() -> str:
    """The newest version at hand that ships the fused kernel.

    Raises:
        Unavailable: there is none.
    """
    with_kernel = [version for version, has in torchembed_kernels().items() if has]
    if not with_kernel:
        raise Unavailable("no torchembed with a fused kernel (python -m ropelab.study peers)")
    return with_kernel[-1]


def interpreted_kernel(version: str) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """torchembed's ``fused_rope_forward`` for CPU tensors: Triton's interpreter runs the kernel.

    Raises:
        Unavailable: the version is not at hand, ships no kernel, or Triton is not installed.
    """
    if not torchembed_kernels().get(version):
        raise Unavailable(f"no torchembed {version} with a fused kernel (python -m ropelab.study peers)")
    with contextlib.suppress(ImportError):  # a launch would import the module while the interpreter is at work
        importlib.import_module("triton.experimental.gluon")
    with replaced.entries(os.environ, {"TRITON_INTERPRET": "1"}):  # Triton reads the variable where a kernel is defined
        module = runpy.run_path(str(torchembed_file(version)))
    if module["triton"] is None:
        raise Unavailable("Triton is not installed")
    return module["fused_rope_forward"]


def torchembed_file(version: str) -> Path:
    """The source of the fused kernel of a version at hand."""
    return packages.locate("torchembed", version)[1] / KERNEL_FILE


def deepspeed_extra(name: str) -> tuple[str, str]:
    """(version of DeepSpeed, requirement of the extra, as ``"torchembed>=0.3.1"``; "" if DeepSpeed lacks the extra).

    Raises:
        Unavailable: no DeepSpeed is at hand.
    """
    version, source = deepspeed_source()
    (distribution,) = metadata.distributions(name="deepspeed", path=[str(source.parents[2])])
    needed = (requirement.partition(";") for requirement in distribution.requires or ())
    return version, next((what.strip() for what, _, when in needed if f'extra == "{name}"' in when), "")


def deepspeed_source() -> tuple[str, Path]:
    """(version, file) of DeepSpeed's ``apply_rotary_pos_emb``.

    Raises:
        Unavailable: no DeepSpeed is at hand.
    """
    version, directory = packages.locate("deepspeed")
    return version, directory / DEEPSPEED_FILE


def first_source() -> tuple[str, Path]:
    """(commit, file) of ``apply_rotary_pos_emb`` as DeepSpeed#8052 proposed it first.

    Raises:
        Unavailable: the file is not at hand.
    """
    (first,) = (entry for entry in facts("version", "deepspeed") if entry["version"] == "first")
    return first["commit"], packages.file_at(first["repository"], first["commit"], first["path"])


def deepspeed_functions(source: Path, names: dict[str, Any]) -> Callable[..., torch.Tensor]:
    """DeepSpeed's ``apply_rotary_pos_emb`` from the source file, with ``names`` in place of the module's globals.

    Only two functions are compiled. An import of the package would load the launcher and the op builders.
    """
    wanted = {"apply_rotary_pos_emb", "_rotate_half"}
    tree = ast.parse(source.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    if {node.name for node in tree.body} != wanted:
        raise Unavailable(f"{source}: expected functions {sorted(wanted)}")
    namespace = {"torch": torch, "rearrange": _rearrange_halves, **names}
    exec(compile(tree, str(source), "exec"), namespace)
    return namespace["apply_rotary_pos_emb"]


def deepspeed_import_guard(source: Path) -> bool:
    """Run DeepSpeed's guarded import of torchembed here, and return the flag that the import sets."""
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Try) and "torchembed" in ast.unparse(node):
            namespace: dict[str, Any] = {}
            exec(compile(ast.Module([node], []), str(source), "exec"), namespace)
            return namespace["_torchembed_available"]
    raise Unavailable(f"{source}: no guarded import of torchembed")


def _rearrange_halves(x: torch.Tensor, pattern: str, j: int) -> torch.Tensor:
    """The only einops pattern of the file, so that einops need not be installed."""
    if pattern != "... (j d) -> ... j d":
        raise Unavailable(f"DeepSpeed's source uses the einops pattern {pattern!r}")
    return x.unflatten(-1, (j, -1))
