"""DeepSpeed#8052: torchembed as a RoPE backend of ``deepspeed.sequence.layer.apply_rotary_pos_emb``.

``data/claims/deepspeed.toml`` has the claims and their tests, and the notebook ``14_deepspeed`` asks the records. Here
stands the rest, in this order: DeepSpeed's and torchembed's own code, the evidence that a CPU computes, the rules that
are more than a comparison with their remarks, and the studies, which measure the records. Judging imports nothing that
measures, so a study imports the timer where it takes a time.

Contract of ``apply_rotary_pos_emb(t, cos, sin)``: the tables hold cosines and sines (not angles) in R <= D columns,
both halves equal, and broadcast against ``t [..., D]``. The function rotates split-half pairs. Features from R on pass
unchanged. The result has the dtype to which input and tables promote. torchembed's kernel takes ``x [*lead, S, R]`` and
tables ``[S, R]``, rotates axis -2 by the rows, and returns x's dtype.

Both functions are DeepSpeed's own source: the merged function of the release under ``build/peers``, the first function
of the first commit (``data/sources.toml``). A force push gave this commit another hash. The hash that the review
names, 3855dbb0c2, follows from the commit's tree, parent, author and message without the line that signs it off.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import importlib
import math
import os
import re
import runpy
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pandas as pd
import torch

from ropelab import apply_rope, reference, rotary_table
from ropelab.bench import packages, replaced
from ropelab.bench.cells import progress
from ropelab.bench.launches import kernel_names, peak_bytes
from ropelab.bench.rows import is_right
from ropelab.bench.study import Study
from ropelab.bench.unavailable import Unavailable
from ropelab.interop import broadcast, deepspeed
from ropelab.interop.broadcast import formula
from ropelab.interop.deepspeed import apply_rotary_pos_emb
from ropelab.study.engine.claims import TABLES, Claim
from ropelab.study.engine.computed import evidence
from ropelab.study.engine.judging import counted, needed
from ropelab.study.engine.ledger import remark, rule
from ropelab.study.engine.sources import cases, facts, where
from ropelab.study.engine.verdict import Untold, Verdict, fact
from ropelab.study.engine.words import followed, listed, value_range
from ropelab.study.topics.gradients.wrong_backward import (
    definition,
    expected_error,
    overall_errors,
    with_wrong_backward,
)

TORCHEMBED, FORMULA, OURS = "DeepSpeed with torchembed", "DeepSpeed without torchembed", "ropelab"
"""The contenders."""
HEADS, HEAD_DIM = 4, 64
DIRECTIONS = ("forward", "backward")
Function = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Rotate = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def rounding_bound(dtype: torch.dtype | str) -> float:
    """The largest relative error (L2) that rounding gives a rotation, or its gradient, computed in a dtype.

    Where every operation rounds to a unit u, an element of a pair is off by at most 2 u (|x0| + |x1|). The sum
    |x0| + |x1| is at most the root of 2 times the pair's norm, and two elements of a pair err. So the error of a tensor
    is at most 4 u times its norm. 5 % cover the products of two roundings.

    Args:
        dtype: the narrowest dtype on the way; a string is the name of the dtype without "torch.".
    """
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    return 1.05 * 4 * torch.finfo(dtype).eps / 2


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# ------------------------------------------------------------------------------------ DeepSpeed's and torchembed's code

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


def deepspeed_import_guard() -> bool:
    """Run DeepSpeed's guarded import of torchembed here, and return the flag that the import sets."""
    _, source = deepspeed_source()
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


def first_function(
    rotate: Rotate | None = None, *, available: bool = True, on_device: Callable[[torch.Tensor], bool] = lambda t: True
) -> tuple[Function, str]:
    """The function of the first commit with ``rotate`` in place of torchembed's kernel, and the source of its code.

    Args:
        rotate, available, on_device: as for `merged_function`.

    Raises:
        Unavailable: the file of the commit is not under ``build/peers``.
    """

    def plain(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rotate(*(x.as_subclass(torch.Tensor) for x in tensors))

    commit, source = first_source()
    names = {"_torchembed_available": available, "_torchembed_rope_forward": plain}
    function = deepspeed_functions(source, names)

    def first(t: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        t = t.as_subclass(_SaysCuda) if on_device(t) and not t.is_cuda else t
        return function(t, cos, sin).as_subclass(torch.Tensor)

    return first, f"DeepSpeed's own source at {commit[:7]}"


def merged_function(
    rotate: Rotate | None = None, *, available: bool = True, on_device: Callable[[torch.Tensor], bool] = lambda t: True
) -> tuple[Function, str]:
    """The merged function with ``rotate`` in place of torchembed's kernel, and the source of its code.

    Args:
        rotate: ``(q, k, cos, sin) -> (q, k)`` in torchembed's convention; None where no call reaches the kernel.
        available: whether the guarded import of torchembed succeeded.
        on_device: the device test of the gate. The default lets CPU tensors through, so that gate and reshaping can
            be studied without a GPU.

    Raises:
        Unavailable: no DeepSpeed is under ``build/peers``.
    """
    version, source = deepspeed_source()
    accelerator = SimpleNamespace(on_accelerator=on_device)
    names: dict[str, Any] = {"get_accelerator": lambda: accelerator, "_torchembed_available": available,
                             "_torchembed_rope_forward": rotate}  # fmt: skip
    return deepspeed_functions(source, names), f"DeepSpeed {version}'s own source"


class _SaysCuda(torch.Tensor):
    """A CPU tensor that says that it is a CUDA tensor, for a gate that asks ``t.is_cuda`` and ``t.device.type``."""

    is_cuda = True
    device = torch.device("cuda")


# ------------------------------------------------------------------------------------------------- evidence, on the CPU

B, S, H, D = 2, 5, 3, 8  # all differ, so that no axis can pass for another
CALLERS = (
    # caller, whether it is in DeepSpeed's tree, shape of t, shape of the tables
    ("contract: [s, b, h, d] with [s, 1, 1, d]", False, (S, B, H, D), (S, 1, 1, D)),
    ("contract, partial rotary", False, (S, B, H, D), (S, 1, 1, D // 2)),
    ("unit test: [s, h, d] with [s, 1, d]", False, (S, H, D), (S, 1, D)),
    ("FPDT and DistributedAttention: [b, s, h, d] with [1, s, 1, d]", True, (B, S, H, D), (1, S, 1, D)),
    ("the same, one sequence", True, (1, S, H, D), (1, S, 1, D)),
    ("the same, one sequence of one token", True, (1, 1, H, D), (1, 1, 1, D)),
    ("the same, more heads than tokens", True, (B, S, 7, D), (1, S, 1, D)),
    ("one table per sequence: [b, s, h, d] with [b, s, 1, d]", False, (B, S, H, D), (B, S, 1, D)),
    ("head-major: [b, h, s, d] with [1, 1, s, d]", False, (B, H, S, D), (1, 1, S, D)),
    ("[s, b, h, d] with [s, d]", False, (S, B, H, D), (S, D)),
    ("[s, h, d] with [s, d], as many heads as tokens", False, (S, S, D), (S, D)),
    ("[s, b, h, d] with [s, 1, d], batch as long as the sequence", False, (S, S, H, D), (S, 1, D)),
)
"""``data/sources.toml`` lists the callers in DeepSpeed's tree; both are in the release under study."""

PAST_THE_TABLES = "reads past the tables"
"""An outcome of `dispatch`."""


@evidence("deepspeed_dispatch", "computed on the CPU")
def dispatch() -> pd.DataFrame:
    """`callers_dispatched`, which takes seconds in Triton's interpreter and is computed once in a process."""
    return callers_dispatched().copy()


@cache
def callers_dispatched() -> pd.DataFrame:
    """The first and the merged version, and our own function, against the formula, for each caller.

    The versions are DeepSpeed's own source, with torchembed's own kernel in Triton's interpreter: the first version
    with the newest torchembed of its day, the merged version with the newest at hand. NaN lies behind the tables in
    memory, so that a result shows a read past their end. Without the file of the first commit there is no
    first version.

    Columns:
        version, code (the source of the code), caller, in_tree, t, tables, tokens, expected, outcome.
        heads: the size of axis -2 of t.
        gate_open: the kernel was used.
        kernel_tokens: the size of the axis that torchembed's kernel took for the sequence; 0 where the kernel was not
            called.
        error: relative L2.
    """
    opened: list[int] = []

    def watched(kernel: Callable) -> Callable:
        def rotate(q, *others):
            opened.append(q.shape[-2])
            return kernel(q, *others)

        return rotate

    def in_one_launch(*args, **options):
        rotated = broadcast.rotate_in_one_launch(*args, **options)
        if rotated is not None:
            opened.append(0)
        return rotated

    def ours(t, cos, sin):
        with replaced.attributes(deepspeed, rotate_in_one_launch=in_one_launch):
            return apply_rotary_pos_emb(t, cos, sin)

    versions: dict[str, tuple[Function, str]] = {}
    newest = newest_torchembed()
    for version, make, kernel in (("first", first_function, REVIEWED), ("merged", merged_function, newest)):
        try:
            function, code = make(watched(interpreted_kernel(kernel)))
        except Unavailable:
            if version == "merged":
                raise
            continue
        versions[version] = function, f"{code} with torchembed {kernel}'s own kernel"
    versions["ropelab"] = ours, "ropelab.interop.deepspeed"
    generator = torch.Generator().manual_seed(0)
    rows = []
    for caller, in_tree, t_shape, table_shape in CALLERS:
        t = torch.randn(t_shape, generator=generator, dtype=torch.float64)
        cos, sin = (_before_nan(table, t) for table in _tables(table_shape))
        expected = _attempt(formula, t, cos, sin)
        for version, (function, source) in versions.items():
            opened.clear()
            found = _attempt(function, t, cos, sin)
            rows.append({
                "version": version, "code": source, "caller": caller, "in_tree": in_tree, "t": t_shape,
                "tables": table_shape, "tokens": max(table_shape[:-1]), "heads": t_shape[-2],
                "gate_open": bool(opened), "kernel_tokens": sum(opened), **_compare(found, expected),
            })  # fmt: skip
    return _from_code(rows, ", ".join(source for _, source in versions.values()))


@evidence("deepspeed_tests", "the parametrisation of the tests (data/sources.toml), run on the CPU")
def tests() -> pd.DataFrame:
    """Every case of the test file as first proposed, as fixed, and of a later commit, with the merged function.

    Columns: version, test, read (the commit, and the part of it that was read), device, tokens, head_dim, rotary_dim,
        broadcasts, passes (on the CPU the function passes the test), reaches_kernel.
    """
    rows = []
    for test in facts("test", "deepspeed"):
        on_device = {"cpu": False, "cuda": True}[test["device"]]
        merged, _ = merged_function(_reached, on_device=lambda t, on_device=on_device: on_device)
        on_cpu, _ = merged_function(_reached, on_device=lambda t: False)
        for case in cases(test):
            tokens, dim, rotary = case["tokens"], case["head_dim"], case["rotary_dim"] or case["head_dim"]
            if rotary > dim:
                continue
            dtype = getattr(torch, case.get("dtype", "float32"))
            t = torch.linspace(-1, 1, tokens * test["heads"] * dim, dtype=dtype).view(tokens, test["heads"], dim)
            table = torch.ones(tokens, *(1,) * (test["table_axes"] - 2), rotary, dtype=dtype)
            rows.append({
                "version": test["version"], "test": test["name"], "read": where(test), "device": test["device"],
                "tokens": tokens, "head_dim": dim, "rotary_dim": rotary,
                "broadcasts": isinstance(_attempt(formula, t, table, table), torch.Tensor),
                "passes": _passes(on_cpu, t, table, test["tolerance"]),
                "reaches_kernel": isinstance(_attempt(merged, t, table, table), _Reached),
            })  # fmt: skip
    return pd.DataFrame(rows)


ABSENT, OLD = "torchembed is not installed", "torchembed 0.2.4 is installed"


@evidence("deepspeed_fallback", "computed on the CPU")
def fallback() -> pd.DataFrame:
    """The merged function where the fused path cannot run.

    Columns case, code (the source of the code), available (the guarded import found the kernel), warnings (the number
    of warnings of the import and of the call), expected, outcome, error.
    """
    t = torch.randn(S, B, H, D, dtype=torch.float64)
    cos, sin = _tables((S, 1, 1, D))
    expected = formula(t, cos, sin)

    def row(case: str, found: Callable[[], bool] = lambda: True, **how) -> dict:
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            available = found()
            function, code = merged_function(available=available, **how)
            result = _attempt(function, t, cos, sin)
        about = {"case": case, "code": code, "available": available, "warnings": len(given)}
        return about | _compare(result, expected)

    def fails(*args):
        raise RuntimeError("the launch fails")

    with replaced.entries(sys.modules, {"torchembed": None, "torchembed._triton": None}):
        rows = [row(ABSENT, deepspeed_import_guard)]
    rows += [
        row("the tensor is not on the GPU", rotate=_reached, on_device=lambda t: t.is_cuda),
        row("the kernel fails at run time", rotate=fails),
    ]
    kernels = torchembed_kernels()
    if any(kernels.values()):
        source = torchembed().__file__  # loaded for good, so with Triton
        with replaced.entries(sys.modules, {"triton": None, "triton.language": None}):
            rotate = runpy.run_path(source)["fused_rope_forward"]
        rows.append(row("torchembed is installed, Triton is not", rotate=rotate))
    if "0.2.4" in kernels:
        with packages.imported("torchembed", "0.2.4", "torchembed"):
            rows.append(row(OLD, deepspeed_import_guard, rotate=_reached))
    return _from_code(rows, merged_function()[1])


@evidence("deepspeed_packages", "the files of the packages under build/peers")
def wheels(*, smoke: bool = False) -> pd.DataFrame:
    """The versions of torchembed at hand, and whether each ships the kernel: columns version, has_triton_module."""
    found = torchembed_kernels()
    if not found:
        raise Unavailable("no torchembed under build/peers (python -m ropelab.study peers)")
    return pd.DataFrame({"version": list(found), "has_triton_module": list(found.values())})


@evidence("deepspeed_kernel", "the source of torchembed's kernel under build/peers")
def kernel_source() -> pd.DataFrame:
    """The number of reads and writes in the source of the fused kernel: a row for each version at hand.

    Columns version, loads (of the tensor), stores, repeated (loads and stores of an address that was loaded or stored
    before), loops.
    """
    rows = []
    for version in (version for version, has in torchembed_kernels().items() if has):
        tree = ast.parse(torchembed_file(version).read_text(encoding="utf-8"))
        kernel, *_ = (node for node in ast.walk(tree) if getattr(node, "name", "") == "_fused_rope_kernel")
        nodes = list(ast.walk(kernel))
        calls = [(ast.unparse(node.func), ast.unparse(node.args[0])) for node in nodes if isinstance(node, ast.Call)]
        loads = [address for name, address in calls if name == "tl.load" and "x_ptr" in address]
        stores = [address for name, address in calls if name == "tl.store"]
        rows.append({
            "version": version, "loads": len(loads), "stores": len(stores),
            "repeated": len(loads) + len(stores) - len(set(loads)) - len(set(stores)),
            "loops": sum(isinstance(node, ast.For | ast.While) for node in nodes),
        })  # fmt: skip
    if not rows:
        raise Unavailable("no torchembed with a fused kernel under build/peers (python -m ropelab.study peers)")
    return pd.DataFrame(rows)


@evidence("deepspeed_extra", "the metadata of DeepSpeed under build/peers")
def extra() -> pd.DataFrame:
    """The requirement of DeepSpeed's extra ``torchembed``: columns release, requirement, least (the lower bound)."""
    release, requirement = deepspeed_extra("torchembed")
    least = requirement.partition(">=")[2] or "0"
    return pd.DataFrame([{"release": release, "requirement": requirement, "least": least}])


@evidence("deepspeed_patterns", "the releases of transformers and vLLM, read (data/sources.toml)")
def patterns() -> pd.DataFrame:
    """Optional packages that rotate in transformers and in vLLM: a row for each project.

    Columns:
        project, release, path, falls_back.
        lines: the lines of the file that guard the import and fall back, where the file was at hand.
        optional: the package.
        catches: the error for which the import is guarded.
        guarded_import: the error is an error of an import, and the project computes without the package.
        only: where the package is called.
        names_torchembed: a file of the release names torchembed.
    """
    frame = pd.DataFrame(facts("pattern", "deepspeed")).drop(columns=["document", "read_in"]).fillna({"lines": ""})
    of_an_import = frame.catches.map(lambda name: issubclass(getattr(builtins, name), ImportError))
    return frame.assign(guarded_import=frame.falls_back & of_an_import)


@evidence("wrong_backward", "computed on the CPU: our own backward that repeats the forward")
def wrong_backward() -> pd.DataFrame:
    """A backward that rotates forward again: the error, the error by the closed form, and the ratio of the norms."""
    mutant = {"mutant": with_wrong_backward(definition)}
    frame = overall_errors(mutant, (1, 2, 8, 17, 128, 1024), rotary_dim=HEAD_DIM)
    return frame.rename(columns={"error": "gradient_error", "expected_error": "wrong_backward_error"})


@evidence("deepspeed_gradient", "computed on the CPU: autograd of the reviewer's forward, on integers")
def gradient() -> pd.DataFrame:
    """Whether the reviewer's formulas are the gradient of his forward: columns part (dx0 or dx1) and equal (every bit).

    The forward is linear, and integers are exact in float64: what agrees on random integers is the same formula.
    """
    generator = torch.Generator().manual_seed(0)
    x0, x1, c, s, g0, g1 = torch.randint(-64, 65, (6, 1024), generator=generator).double()
    leaves = x0.requires_grad_(), x1.requires_grad_()
    found = torch.autograd.grad((x0 * c - x1 * s, x1 * c + x0 * s), leaves, (g0, g1))
    stated = {"dx0": g0 * c + g1 * s, "dx1": -g0 * s + g1 * c}
    rows = zip(stated.items(), found, strict=True)
    return pd.DataFrame([{"part": part, "equal": torch.equal(formula, one)} for (part, formula), one in rows])


@evidence("deepspeed_published", "the document's table")
def published() -> pd.DataFrame:
    """The document's table, with the ratios of its times."""
    frame = pd.read_csv(TABLES / "deepspeed_8052_table.csv")
    return frame.assign(
        over_eager=frame.eager_ms / frame.triton_ms,
        over_compile=frame.compile_ms / frame.triton_ms,
        over_compiled=frame.eager_ms / frame.compile_ms,
    )


def _from_code(rows: list[dict], code: str) -> pd.DataFrame:
    """A frame that says which code was run."""
    frame = pd.DataFrame(rows)
    frame.attrs["source"] = f"computed on the CPU with {code}"
    return frame


def _tables(shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables of the shape, with a row for each of the leading elements; both halves are equal."""
    rows = torch.Size(shape[:-1]).numel()
    cos, sin = rotary_table(rows, shape[-1], dtype=torch.float64)
    return torch.cat((cos, cos), -1).reshape(shape), torch.cat((sin, sin), -1).reshape(shape)


def _before_nan(table: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The table, followed in memory by NaN as far as a kernel reads that confuses two of the strides."""
    beyond = (t.shape[-2] + table.shape[-1]) * max(table.stride())
    memory = torch.cat((table.flatten(), table.new_full((beyond,), float("nan"))))
    return memory.as_strided(table.shape, table.stride())


class _Reached(Exception):
    """Raised in place of the kernel, to show that a call reaches the kernel."""


def _reached(*args):
    raise _Reached


def _attempt(function, *args) -> torch.Tensor | Exception:
    try:
        return function(*args)
    except Exception as error:  # an error is a result too
        return error


def _compare(found: torch.Tensor | Exception, expected: torch.Tensor | Exception) -> dict:
    nothing = {"expected": "an error" if isinstance(expected, Exception) else "a result", "error": float("nan")}
    if isinstance(found, Exception) and isinstance(expected, Exception):
        return nothing | {"outcome": "equal"}
    if isinstance(found, Exception):
        return nothing | {"outcome": f"raises {type(found).__name__}"}
    if isinstance(expected, Exception):
        return nothing | {"outcome": "answers where the formula raises"}
    if found.shape != expected.shape:
        return nothing | {"outcome": f"shape {tuple(found.shape)} for {tuple(expected.shape)}"}
    if found.isnan().any():
        return nothing | {"outcome": PAST_THE_TABLES}
    error = ((found - expected).norm() / expected.norm()).item()
    return nothing | {"outcome": "equal" if error < 1e-12 else "different", "error": error}


def _passes(function: Callable, t: torch.Tensor, table: torch.Tensor, tolerance: float | str) -> bool:
    """Whether the result is the formula's to the tolerance; if the tolerance is words, whether a gradient exists."""
    leaf = t.clone().requires_grad_()
    found, expected = (_attempt(f, leaf, table, table) for f in (function, formula))
    if isinstance(found, Exception) or isinstance(expected, Exception):
        return False
    if isinstance(tolerance, str):
        found.sum().backward()
        return leaf.grad.shape == t.shape and not leaf.grad.isnan().any().item()
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------------------------------------------- rules and remarks

PRINTED = 5e-6
"""The largest relative error of a number that a record keeps to six significant digits."""


@rule("DS-01", "deepspeed_correctness")
def forward_is_right(claim: Claim, correctness: pd.DataFrame) -> Verdict:
    """The document's cells are its lengths in float32, with the version that it is about.

    Beyond it lie the other versions and dtypes, whose result must also have the dtype of the formula's result.
    """
    whole = correctness[correctness.table == "whole"]
    tested = facts("test", "deepspeed")[0]["parameters"]
    bounds = whole.result_dtype.map(rounding_bound, na_action="ignore")
    right = (whole.outcome == "ran") & (whole.forward_error <= bounds * (1 + PRINTED))
    same_dtype = whole.result_dtype == whole.formula_dtype
    stated = whole.seq_len.isin(tested["tokens"])
    own = stated & (whole.version.astype(str) == REVIEWED) & (whole[["dtype", "table_dtype"]] == "float32").all(axis=1)
    if own.sum() != len(tested["tokens"]):
        raise Untold(claim.needs)
    other, failed = whole[stated & ~same_dtype], whole[whole.outcome != "ran"]
    pairs = listed(f"{row.dtype} with {row.table_dtype} tables" for row in other.itertuples())
    beyond = counted(list((right & same_dtype)[stated & ~own]), claim.quantifier).with_text(
        f"numbers right in {right[stated & ~own].sum()}, dtype in {same_dtype[stated & ~own].sum()} of "
        f"{(stated & ~own).sum()} cells of other dtypes and versions; another dtype than the formula's for {pairs}"
    )
    return counted(list((right & same_dtype)[own]), claim.quantifier).with_text(
        f"torchembed {REVIEWED} in float32: right in {right[own].sum()} of {own.sum()} lengths, largest relative error "
        f"{whole.forward_error[own].max():.1e}",
        "" if failed.empty else f"no launch at S = {failed.seq_len.min()} and above ({failed.outcome.iloc[0]})",
        followed("not measured: head sizes ", sorted(set(tested["head_dim"]) - {HEAD_DIM})),
        right=right[own].sum(), lengths=own.sum(), worst=whole.forward_error[own].max(),
    ).beside(beyond)  # fmt: skip


@rule("DS-03", "deepspeed_packages")
def kernel_ships_since_0_3(claim: Claim, packages: pd.DataFrame) -> Verdict:
    ships, (without, first) = _ships(packages), claim.numbers
    if not {without, first} <= ships.keys():
        raise Untold(claim.needs)
    before = [has for version, has in ships.items() if _order(version) < _order(first)]
    return fact(ships[first] and not any(before)).with_text(
        _packages(ships), without=without, first=first, wheels=len(ships)
    )


@rule("DS-04", "deepspeed_tests")
def tests_broadcast(claim: Claim, tests: pd.DataFrame) -> Verdict:
    first, fixed = (needed(tests[tests.version == version], claim.needs) for version in ("first", "fixed"))
    failing, cases, passing = map(int, claim.numbers)
    found = ((~first.broadcasts).sum(), len(first), fixed.passes.sum(), len(fixed))
    later = tests[(tests.version == "later") & tests.reaches_kernel]
    added = f"; {len(later)} cases that do came later ({later['read'].iloc[0]})" if len(later) else ""
    reaching = fixed.reaches_kernel.sum()
    return fact(found == (failing, cases, passing, cases)).with_text(
        f"{found[0]} of {found[1]} do not broadcast, {found[2]} of {found[3]} pass after the fix",
        "" if reaching == len(fixed) else f"{reaching or 'none'} of the {len(fixed)} reach the fused kernel: the "
        f"tensors are on the CPU, where the gate is shut{added}",
        failing=found[0], cases=found[1], passing=found[2], reaching=reaching,
    )  # fmt: skip


@rule("DS-05", "deepspeed_dispatch")
def axis_bug_is_real(claim: Claim, dispatch: pd.DataFrame) -> Verdict:
    """A cell is the shape of a caller in DeepSpeed's tree, beyond one token.

    At first the kernel must take the heads for the sequence and the result must be wrong; when merged it must be right.
    """
    in_tree = dispatch[dispatch.in_tree & (dispatch.tokens > 1)].set_index("caller")
    first, merged = (needed(in_tree[in_tree.version == version], claim.needs) for version in ("first", "merged"))
    along_heads, wrong = first.kernel_tokens == first.heads, first.outcome != "equal"
    still = merged.outcome != "equal"
    return counted(list(along_heads & wrong & ~still), claim.quantifier).with_text(
        f"in the first version the kernel rotates along the heads for {along_heads.sum()} of {len(first)} shapes of "
        f"in-tree callers, {wrong.sum()} come out wrong; in the merged version {still.sum()} come out wrong",
        along=along_heads.sum(), shapes=len(first), still=still.sum(),
    )  # fmt: skip


@rule("DS-12", "deepspeed_correctness", "wrong_backward")
def backward_repeats_forward(claim: Claim, correctness: pd.DataFrame, mutant: pd.DataFrame) -> Verdict:
    """A cell is a dtype and a length beyond 1: error and norm must be a repeated forward's, up to rounding.

    A repeated forward R g has the closed form's distance from the gradient, and the gradient's norm. Rounding moves
    both by at most `rounding_bound`. Our own backward that repeats the forward shows that the closed form is right.
    """
    whole = correctness[correctness.table == "whole"].astype({"version": str})
    longer = whole[(whole.seq_len > 1) & (whole.outcome == "ran")]
    ran = needed(longer[longer.version == REVIEWED], claim.needs)
    if not all(_repeats_forward(mutant[mutant.seq_len > 1].assign(dtype="float32"))):
        raise Untold("our own backward that repeats the forward, with the errors of the closed form")
    norm = (ran.norm_ratio - 1).abs().max()
    at = ran[(ran.dtype == "float32") & ran.seq_len.isin((8, 128))].sort_values("seq_len")
    shown = ", ".join(f"gradient off by {row.gradient_error:.3f} at S = {row.seq_len}" for row in at.itertuples())
    later = longer[longer.version != REVIEWED]
    bounds = later.dtype.map(rounding_bound).astype(float) * (1 + PRINTED)
    right = (later.gradient_error <= bounds).groupby(later.version).all()
    return counted(_repeats_forward(ran), claim.quantifier).with_text(
        f"{REVIEWED}: {shown} in float32, with the norm right to {f'{norm:.0e}' if norm >= 1e-6 else '6 digits'} "
        f"in {len(ran)} cases of {listed(ran.dtype)}",
        followed("no longer so in ", right.index[right]), followed("wrong still in ", right.index[~right]),
        version=REVIEWED, **{f"at_{row.seq_len}": row.gradient_error for row in at.itertuples()},
    )  # fmt: skip


@rule("DS-13", "deepspeed_extra", "deepspeed_packages")
def extra_brings_the_kernel(claim: Claim, extra: pd.DataFrame, packages: pd.DataFrame) -> Verdict:
    """A cell is a version that the document's bound or the release's bound admits: the version must have the kernel."""
    ships, (stated,) = _ships(packages), claim.numbers
    required = extra.iloc[0]
    bound = min(_order(stated), _order(required.least))
    allowed = {version: has for version, has in ships.items() if _order(version) >= bound}
    if not allowed or min(map(_order, ships)) >= _order(stated):
        raise Untold(claim.needs)
    return counted([*allowed.values(), bool(required.requirement)], claim.quantifier).with_text(
        f"DeepSpeed {required.release} requires {required.requirement or 'nothing'}; {_packages(ships)}",
        "the release requires a later version than the document, so it also excludes the wrong gradient of DS-12"
        if _order(required.least) > _order(REVIEWED) else "",
        release=required.release, least=required.least, admitted=len(allowed), having=sum(allowed.values()),
    )  # fmt: skip


@rule("DS-16", "deepspeed_inductor", "deepspeed_callers")
def compile_launches_less(claim: Claim, inductor: pd.DataFrame, calls: pd.DataFrame) -> Verdict:
    """The rule compares launches of the formula and of Inductor's code for one bfloat16 tensor (1, 32, 4096, 128)."""
    eager = calls[(calls.contender == FORMULA) & calls.caller.str.startswith("[b, h, s, d]")]
    eager = eager[is_right(eager)].set_index("direction").launches
    compiled = inductor[inductor.dtype == "bfloat16"].set_index("direction").kernels
    if not set(DIRECTIONS) <= set(eager.index) & set(compiled.index):
        raise Untold(claim.needs)
    return counted([bool(compiled[name] < eager[name]) for name in DIRECTIONS], claim.quantifier).with_text(
        "; ".join(f"{name}: {eager[name]:.0f} launches, {compiled[name]:.0f} compiled" for name in DIRECTIONS),
        "launches were counted, not the host's time",
        eager=eager["forward"], compiled=compiled["forward"],
    )  # fmt: skip


@remark("DS-06", "deepspeed_dispatch")
def gate_of_callers(dispatch: pd.DataFrame) -> tuple[str, dict[str, object]]:
    own = dispatch[dispatch.in_tree & (dispatch.tokens > 1)].groupby("version").gate_open.agg(["sum", "size"])
    (opens, all_own), ours = own.loc["merged"], own.loc["ropelab", "sum"]
    return (
        f"the gate opens for {opens} of {all_own} shapes of DeepSpeed's own callers with more than one token, and "
        f"ropelab's gate opens for {ours}"
    ), {"opens": opens, "own": all_own}


@remark("DS-08", "deepspeed_published", "deepspeed_table")
def roofs(published: pd.DataFrame, table: pd.DataFrame) -> tuple[str, dict[str, object]]:
    right = table[is_right(table)]
    each = ((name, right.fraction_of_copy[right.contender == name]) for name in ("torchembed", "compile"))
    speeds = " and ".join(f"{name} at {value_range(fractions)}" for name, fractions in each)
    least, most = published.over_compile.min(), published.over_compile.max()
    return (f"the document's own times give {least:.2f} to {most:.2f}; here {speeds} of the copy's speed"), {
        "printed_least": least,
        "printed_most": most,
    }


def _repeats_forward(frame: pd.DataFrame) -> list[bool]:
    """For each row, whether the error is the closed form's and the norm is the gradient's, up to rounding."""
    slack = frame.dtype.map(rounding_bound) + 2 * PRINTED * frame.wrong_backward_error.clip(lower=1)
    error = (frame.gradient_error - frame.wrong_backward_error).abs()
    return list((error <= slack) & ((frame.norm_ratio - 1).abs() <= slack) & (frame.wrong_backward_error > 2 * slack))


def _order(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version))


def _ships(packages: pd.DataFrame) -> dict[str, bool]:
    return dict(zip(packages.version.astype(str), packages.has_triton_module.astype(bool), strict=True))


def _packages(ships: dict[str, bool]) -> str:
    return listed(f"{version} {'has it' if has else 'has not'}" for version, has in ships.items())


# -------------------------------------------------------------------------------------------------- studies: the kernel

SLICED_SEQ_LEN = 2
"""With two rows, every address that a wrong row stride leads to still lies inside the table's own memory."""

SEQ_LENS = {"cuda": (1, 8, 17, 128, 1024, 8192, 65535, 65536), "cpu": (1, 8, 17)}
"""The kernel's grid carries the tokens on an axis that ends at 65,535."""

DTYPES = {
    "cuda": (
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ),
    "cpu": ((torch.float32, torch.float32), (torch.float16, torch.float32)),
}
"""The dtypes of input and tables. Triton's interpreter has no bf16 arithmetic."""


def correctness(*, smoke: bool = False) -> pd.DataFrame:
    """Errors of torchembed's kernel against the float64 definition, per version, sequence length and dtype.

    Errors are relative L2 norms. ``formula_error`` and ``formula_gradient_error`` are the errors of the plain formula
    in the same dtypes. ``wrong_backward_error`` is the error that the closed form predicts for a backward that repeats
    the forward (`topics.gradients.wrong_backward`). ``norm_ratio`` is the norm of the gradient over the norm of the
    right gradient.
    """
    device = _kernel_device()
    versions = _versions_with_kernel()
    rows = []
    for version in versions:
        rotate = torchembed(version).fused_rope_forward
        for dtype, table_dtype in DTYPES[device]:
            for seq_len in SEQ_LENS["cpu" if smoke else device]:
                rows.append(_errors(version, rotate, device, seq_len, dtype, table_dtype, "whole"))
        rows.append(_errors(version, rotate, device, SLICED_SEQ_LEN, *DTYPES[device][0], "column slice"))
    return pd.DataFrame(rows)


def _errors(
    version: str, rotate: Callable, device: str, seq_len: int, dtype: torch.dtype, table_dtype: torch.dtype, table: str
) -> dict:
    generator = torch.Generator().manual_seed(seq_len)
    x, gradient = (torch.randn(HEADS, seq_len, HEAD_DIM, generator=generator).to(device, dtype) for _ in range(2))
    cos, sin = rotary_table(seq_len, HEAD_DIM, dtype=table_dtype, device=device)
    wide_cos, wide_sin = (_duplicated(half, table) for half in (cos, sin))
    row = {
        "package": "torchembed", "version": version, "device": device, "seq_len": seq_len,
        "dtype": _name(dtype), "table_dtype": _name(table_dtype), "table": table, "outcome": "ran",
    }  # fmt: skip

    def run(function: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        leaf = x.detach().clone().requires_grad_()
        y = function(leaf)
        (dx,) = torch.autograd.grad(y, leaf, gradient.to(y.dtype))
        return y, dx

    definition, exact_gradient = (
        reference.rotate(z.unsqueeze(2), cos, sin, layout="split_half", inverse=inverse).squeeze(2)
        for z, inverse in ((x, False), (gradient, True))
    )
    y, dx = run(lambda leaf: formula(leaf, wide_cos, wide_sin))
    row |= {
        "formula_dtype": _name(y.dtype),
        "formula_error": _relative(y, definition),
        "formula_gradient_error": _relative(dx, exact_gradient),
        "wrong_backward_error": expected_error(gradient, sin),
    }
    try:
        y, dx = run(lambda leaf: rotate(leaf, leaf.detach(), wide_cos, wide_sin)[0])
        if device == "cuda":
            torch.cuda.synchronize()
    except RuntimeError as error:
        return row | {"outcome": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    return row | {
        "result_dtype": _name(y.dtype),
        "forward_error": _relative(y, definition),
        "gradient_error": _relative(dx, exact_gradient),
        "norm_ratio": (dx.double().norm() / exact_gradient.norm()).item(),
    }


def launch_evidence(*, smoke: bool = False) -> pd.DataFrame:
    """Kernel launches, extra memory and time of torchembed's kernel, and of DeepSpeed's calls of the kernel.

    One tensor of shape (S, B, H, D) = (4096, 1, 32, 128) in bf16, forward. ``extra_bytes`` is the peak of
    allocated memory beyond inputs and result. ``fraction_of_copy`` is the time of the best copy of the tensor over the
    time of the call.
    """
    if not torch.cuda.is_available():
        raise Unavailable("launches are counted on a GPU")
    versions = _versions_with_kernel()
    module = torchembed(versions[-1])
    api, code = merged_function(module.fused_rope_forward, on_device=lambda t: t.is_cuda)
    half_cos, half_sin = rotary_table(4096, 128, dtype=torch.bfloat16, device="cuda")
    cos, sin = (_duplicated(half, "whole") for half in (half_cos, half_sin))
    api_tables = cos[:, None, None], sin[:, None, None]
    by_token = [torch.randn(4096, 1, 32, 128, device="cuda", dtype=torch.bfloat16) for _ in range(_buffers())]
    by_head = [t.movedim(0, -2).contiguous() for t in by_token]
    paths = {
        ("raw kernel", "head-major"): (by_head, lambda t: module._fused_rope_forward_core(t, cos, sin)),
        ("fused_rope_forward", "head-major, as q and as k"):
            (by_head, lambda t: module.fused_rope_forward(t, t, cos, sin)[0]),
        ("DeepSpeed API", "contiguous [s, b, h, d]"): (by_token, lambda t: api(t, *api_tables)),
        ("DeepSpeed API", "[s, b, h, d] over head-major memory"):
            (by_head, lambda t: api(t.movedim(-2, 0), *api_tables)),
        ("plain formula", "contiguous [s, b, h, d]"): (by_token, lambda t: formula(t, *api_tables)),
        ("ropelab", "contiguous [s, b, h, d]"):
            (by_token, lambda t: apply_rope(t, cos=half_cos, sin=half_sin, seq_format="sbhd")),
    }  # fmt: skip
    calls = {key: [partial(call, t) for t in tensors] for key, (tensors, call) in paths.items()}
    times, copy_us = _times_and_copy(calls, by_token)
    tensor_bytes = by_token[0].numel() * by_token[0].element_size()
    rows = []
    for (path, tensor), (call, *_) in calls.items():
        names = kernel_names(call)
        rows.append({
            "path": path, "input": tensor, "version": versions[-1], "code": code,
            "launches": len(names), "kernels": "; ".join(names),
            "tensor_bytes": tensor_bytes, "extra_bytes": peak_bytes(call) - tensor_bytes,
            "median_us": times[path, tensor], "copy_us": copy_us, "fraction_of_copy": copy_us / times[path, tensor],
        })  # fmt: skip
    return pd.DataFrame(rows)


def inductor_evidence(*, smoke: bool = False) -> pd.DataFrame:
    """The kernels that torch.compile generates for the formula, and the buffers that are not results.

    There is a row for each dtype and direction.

    The formula rotates one tensor (1, 32, 4096, 128) with tables (4096, 128). ``fraction_of_copy`` is as in
    :func:`launch_evidence`, forward.
    """
    if not torch.cuda.is_available():
        raise Unavailable("Inductor's GPU code is generated on a GPU")
    dtypes = (torch.float32,) if smoke else (torch.float32, torch.bfloat16)
    return pd.DataFrame([row for dtype in dtypes for row in _compiled(dtype)])


def _compiled(dtype: torch.dtype) -> list[dict]:
    from torch._inductor.utils import fresh_cache, run_fw_bw_and_get_code

    tensors = [torch.randn(1, 32, 4096, 128, device="cuda", dtype=dtype) for _ in range(_buffers())]
    half_cos, half_sin = rotary_table(4096, 128, dtype=dtype, device="cuda")
    cos, sin = _duplicated(half_cos, "whole"), _duplicated(half_sin, "whole")
    torch._dynamo.reset()
    compiled = torch.compile(formula, fullgraph=True, dynamic=False)
    leaf = tensors[0].clone().requires_grad_()
    with fresh_cache():  # code that comes from the cache is not generated, and then not seen
        _, codes = run_fw_bw_and_get_code(lambda: compiled(leaf, cos, sin))
    times, copy_us = _times_and_copy({"compile": [partial(compiled, t, cos, sin) for t in tensors]}, tensors)
    fractions = {"forward": copy_us / times["compile"], "backward": float("nan")}
    return [
        {"dtype": _name(dtype), "direction": direction, "torch": torch.__version__, **generated(code),
         "result_buffers": 1, "fraction_of_copy": fractions[direction]}
        for direction, code in zip(fractions, codes, strict=True)
    ]  # fmt: skip


def generated(code: str) -> dict[str, int | str]:
    """Count the kernels that Inductor's wrapper code launches, and the buffers that the code allocates."""
    kernels = re.findall(r"^\s*(\w+)\.run\(", code, flags=re.MULTILINE)
    extern = re.findall(r"^\s*(?:\w+ = )?(extern_kernels\.\w+|torch\.ops\.[\w.]+)\(", code, flags=re.MULTILINE)
    buffers = re.findall(r"= empty_strided_(?:cuda|cpu)\(", code)
    return {"kernels": len(kernels) + len(extern), "buffers": len(buffers), "names": ", ".join(kernels + extern)}


def _buffers() -> int:
    """Tensors of 32 MiB or more that together exceed twice the L2 cache."""
    from ropelab.bench import timing

    return max(2, math.ceil(2 * timing.cache_bytes() / 2**25))


def _times_and_copy(calls: Mapping, tensors: Sequence[torch.Tensor]) -> tuple[dict, float]:
    """GPU microseconds per call of each contender, and of the best copy of one tensor in the same rounds."""
    from ropelab.bench import timing
    from ropelab.bench.copies import copies as copy_contenders

    copies = {name: [partial(copy, [t]) for t in tensors] for name, copy in copy_contenders().items()}
    contenders = {**calls, **copies}
    frame = timing.gpu_times({key: (lambda c=c: c) for key, c in contenders.items()})
    failed = frame[frame.status != "ok"]
    if not failed.empty:
        raise RuntimeError(f"{failed.contender.iloc[0]}: {failed.status.iloc[0]}")
    times = dict(zip(contenders, frame.median_us, strict=True))
    return times, min(times[name] for name in copies)


def _duplicated(half: torch.Tensor, table: str) -> torch.Tensor:
    """The table of both halves, ``[S, R]``: whole, or the leading columns of a wider table (row stride 5 R / 4)."""
    both = torch.cat((half, half), dim=-1)
    if table == "whole":
        return both
    rotary_dim = both.shape[-1]
    return torch.nn.functional.pad(both, (0, rotary_dim // 4))[:, :rotary_dim]


def _kernel_device() -> str:
    if torch.cuda.is_available():
        return "cuda"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "cpu"
    raise Unavailable("torchembed's kernel runs on a GPU or in Triton's interpreter (TRITON_INTERPRET=1)")


def _versions_with_kernel() -> list[str]:
    found = [version for version, has_kernel in torchembed_kernels().items() if has_kernel]
    if not found:
        raise Unavailable("no torchembed with a fused kernel under build/peers (python -m ropelab.study peers)")
    return found


def _relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


# --------------------------------------------------------------------------------------- studies: the shapes of callers

ROUNDS, SMOKE_ROUNDS = 10, 3


@dataclass(frozen=True)
class Caller:
    """Shapes of one call, and whether DeepSpeed's tree has such a caller."""

    name: str
    t: tuple[int, ...]
    tables: tuple[int, ...]
    in_tree: bool = False
    dtype: torch.dtype = torch.bfloat16
    table_dtype: torch.dtype = torch.bfloat16


def calls_of_callers(tokens: int = 4096) -> tuple[Caller, ...]:
    """The callers, each with ``tokens`` tokens of 32 heads of 128 features: 32 MiB of bfloat16 by default."""
    h, d, quarter = 32, 128, tokens // 4
    fpdt = {"in_tree": True}
    mixed = {"dtype": torch.float16, "table_dtype": torch.float32}
    return (
        Caller("[s, b, h, d] with [s, 1, 1, d]", (tokens, 1, h, d), (tokens, 1, 1, d)),
        Caller("[s, b, h, d] with [s, 1, 1, d/2]", (tokens, 1, h, d), (tokens, 1, 1, d // 2)),
        Caller("[s, b, h, d] fp16 with [s, 1, 1, d] fp32", (tokens, 1, h, d), (tokens, 1, 1, d), **mixed),
        Caller("[b, s, h, d] with [1, s, 1, d]", (4, quarter, h, d), (1, quarter, 1, d), **fpdt),
        Caller("[1, s, h, d] with [1, s, 1, d]", (1, tokens, h, d), (1, tokens, 1, d), **fpdt),
        Caller("[1, s, h, d] fp16 with [1, s, 1, d] fp32", (1, tokens, h, d), (1, tokens, 1, d), **fpdt, **mixed),
        Caller("[b, s, h, d] with [b, s, 1, d]", (4, quarter, h, d), (4, quarter, 1, d)),
        Caller("[b, h, s, d] with [1, 1, s, d]", (1, h, tokens, d), (1, 1, tokens, d)),
    )


def callers(*, smoke: bool = False) -> pd.DataFrame:
    """Launches, memory and GPU time of each caller's call, forward and backward.

    Contenders are DeepSpeed's function with the newest torchembed at hand, DeepSpeed's function without torchembed (the
    formula), and `ropelab.interop.deepspeed`. Each contender is checked in a direction before it is timed there.

    Returns:
        Columns caller, in_tree, t, tables, dtype, table_dtype, direction, contender, code (which of DeepSpeed's code
        was run), status, gate_open (the kernel was called), relative_error, launches, kernels, tensor_bytes,
        extra_bytes (peak of allocated memory beyond inputs and result), median_us, copy_us (the best copy of ``t`` in
        the same rounds) and fraction_of_copy.
    """
    if not torch.cuda.is_available():
        raise Unavailable("launches are counted on a GPU")
    chosen = calls_of_callers(64)[2:4] if smoke else calls_of_callers()
    frames = [_case(case, "cuda", smoke) for case in progress(chosen, lambda case: case.name)]
    return pd.concat(frames, ignore_index=True)


def _case(case: Caller, device: str, smoke: bool) -> pd.DataFrame:
    from ropelab.bench import timing

    generator = torch.Generator(device).manual_seed(0)
    sets = max(2, -(-2 * timing.cache_bytes() // _bytes(case))) if device == "cuda" and not smoke else 2

    def draw() -> torch.Tensor:
        return torch.randn(case.t, generator=generator, device=device, dtype=case.dtype)

    tensors, cotangents = ([draw() for _ in range(sets)] for _ in range(2))
    tables = caller_tables(case, device)
    functions, gate = contenders(device)
    rows = []
    for direction in DIRECTIONS:
        calls, found = {}, []
        for name, (function, code) in functions.items():
            gate.clear()
            outcome = checked(function, case, tensors[0], cotangents[0], tables, direction)
            found.append({"contender": name, "code": code, "gate_open": bool(gate), **outcome})
            if outcome["status"] == "ok":
                calls[name] = partial(_calls, function, tensors, cotangents, tables, direction)
        rows += _timed(found, calls, case, direction, cotangents if direction == "backward" else tensors, smoke)
    about = {
        "caller": case.name, "in_tree": case.in_tree, "t": str(case.t), "tables": str(case.tables),
        "dtype": _name(case.dtype), "table_dtype": _name(case.table_dtype),
    }  # fmt: skip
    return pd.DataFrame([about | row for row in rows])


def caller_tables(case: Caller, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables whose two halves are equal, as in DeepSpeed."""
    rows = torch.Size(case.tables[:-1]).numel()
    halves = rotary_table(rows, case.tables[-1], dtype=case.table_dtype, device=device)
    return tuple(torch.cat((half, half), -1).reshape(case.tables) for half in halves)


def contenders(device: str) -> tuple[dict[str, tuple[Function, str]], list]:
    """Name -> the function and the source of its code; and a list that grows with every call of torchembed's kernel."""
    reached: list[bool] = []
    found: dict[str, tuple[Function, str]] = {OURS: (apply_rotary_pos_emb, "ropelab.interop.deepspeed")}
    try:
        found = {FORMULA: merged_function(available=False)} | found
        kernel = torchembed().fused_rope_forward
    except Unavailable:
        return found, reached

    def rotate(*args):
        reached.append(True)
        return kernel(*args)

    merged = merged_function(rotate, on_device=lambda t: t.is_cuda or device == "cpu")
    return {TORCHEMBED: merged} | found, reached


def checked(
    function: Function, case: Caller, t: torch.Tensor, cotangent: torch.Tensor, tables: tuple, direction: str
) -> dict:
    """status and relative_error (L2) of the result, or of the gradient, against the formula in float64.

    The error may be `rounding_bound`; the narrowest dtype on the way counts.
    """
    from ropelab.bench import timing

    exact, wide = t.double().requires_grad_(), [table.double() for table in tables]
    expected = formula(exact, *wide)
    dtype = torch.promote_types(case.dtype, case.table_dtype)
    try:
        leaf = t.clone().requires_grad_()
        found = function(leaf, *tables)
        if found.dtype != dtype:
            return {"status": f"wrong: the result is {_name(found.dtype)}, the formula's {_name(dtype)}"}
        if direction == "backward":
            (found,) = torch.autograd.grad(found, leaf, cotangent.to(dtype))
            (expected,) = torch.autograd.grad(expected, exact, cotangent.double())
            dtype = case.dtype
    except Exception as error:  # a contender that cannot run is a result too
        return {"status": timing.failure(error)}
    error = ((found.double() - expected).norm() / expected.norm()).item()
    allowed = rounding_bound(dtype)
    status = "ok" if error <= allowed else f"wrong: relative error {error:.3g}, at most {allowed:.3g} allowed"
    return {"status": status, "relative_error": error}


def _calls(function: Function, tensors, cotangents, tables, direction: str) -> list[Callable]:
    if direction == "forward":
        return [partial(function, t, *tables) for t in tensors]
    leaves = [t.detach().requires_grad_() for t in tensors]
    results = [function(leaf, *tables) for leaf in leaves]
    return [
        partial(torch.autograd.grad, y, leaf, g.to(y.dtype), retain_graph=True)
        for y, leaf, g in zip(results, leaves, cotangents, strict=True)
    ]


def _timed(found: list[dict], calls: Mapping[str, Callable], case: Caller, direction: str, sources, smoke: bool):
    """The rows of one direction, with launches, memory and times where there are any."""
    from ropelab.bench import timing
    from ropelab.bench.copies import copies

    copied = {name: partial(_copies, copy, sources) for name, copy in copies().items()}
    frame = timing.gpu_times(dict(calls) | copied, rounds=SMOKE_ROUNDS if smoke else ROUNDS)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # frees the memory of the graphs
    times = frame.set_index("contender")
    copy_us = times.median_us[list(copied)].min()
    for row in found:
        row |= {"direction": direction, "tensor_bytes": _bytes(case), "copy_us": copy_us}
        name = row["contender"]
        if name not in calls:
            continue
        row["status"] = times.status[name]
        if row["status"] == "ok":
            row |= _on_the_gpu(calls[name]()[0])
            row |= {"median_us": times.median_us[name], "fraction_of_copy": copy_us / times.median_us[name]}
    return found


def _on_the_gpu(call: Callable) -> dict:
    names = kernel_names(call)
    result = call()
    result = result[0] if isinstance(result, tuple) else result
    result_bytes = result.numel() * result.element_size()
    del result
    return {"launches": len(names), "kernels": "; ".join(names), "extra_bytes": peak_bytes(call) - result_bytes}


def _copies(copy: Callable, tensors) -> list[Callable]:
    return [partial(copy, [t.detach()]) for t in tensors]


def _bytes(case: Caller) -> int:
    return torch.Size(case.t).numel() * case.dtype.itemsize


STUDIES: dict[str, Study] = {
    "deepspeed_packages": Study(wheels, gpu_gib=0, rows=1, timed=False),
    "deepspeed_correctness": Study(correctness, gpu_gib=2, rows=33, timed=False),
    "deepspeed_launches": Study(launch_evidence, gpu_gib=2, rows=6),
    "deepspeed_callers": Study(callers, gpu_gib=4, rows=16),
    "deepspeed_inductor": Study(inductor_evidence, gpu_gib=2, rows=4),
}
"""The name of a record -> the study that measures it."""
