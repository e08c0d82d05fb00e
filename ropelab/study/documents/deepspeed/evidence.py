"""Compute the evidence for claims DS-01 to DS-17 that takes a CPU seconds."""

from __future__ import annotations

import ast
import builtins
import runpy
import sys
import warnings
from collections.abc import Callable
from functools import cache

import pandas as pd
import torch

from ropelab import rotary_table
from ropelab.bench import packages, replaced
from ropelab.bench.records import ROOT
from ropelab.bench.unavailable import Unavailable
from ropelab.interop import broadcast, deepspeed
from ropelab.interop.broadcast import formula
from ropelab.interop.deepspeed import apply_rotary_pos_emb
from ropelab.study.documents.deepspeed import peers
from ropelab.study.documents.deepspeed.dispatch import Function, first_function, merged_function
from ropelab.study.documents.deepspeed.names import HEAD_DIM
from ropelab.study.engine.computed import evidence
from ropelab.study.engine.sources import cases, facts, where
from ropelab.study.topics.gradients.wrong_backward import definition, overall_errors, with_wrong_backward

PUBLISHED = ROOT / "data" / "documents" / "deepspeed_8052_table.csv"

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
    newest = peers.newest_torchembed()
    for version, make, kernel in (("first", first_function, peers.REVIEWED), ("merged", merged_function, newest)):
        try:
            function, code = make(watched(peers.interpreted_kernel(kernel)))
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
        rows = [row(ABSENT, _import_guard)]
    rows += [
        row("the tensor is not on the GPU", rotate=_reached, on_device=lambda t: t.is_cuda),
        row("the kernel fails at run time", rotate=fails),
    ]
    kernels = peers.torchembed_kernels()
    if any(kernels.values()):
        source = peers.torchembed().__file__  # loaded for good, so with Triton
        with replaced.entries(sys.modules, {"triton": None, "triton.language": None}):
            rotate = runpy.run_path(source)["fused_rope_forward"]
        rows.append(row("torchembed is installed, Triton is not", rotate=rotate))
    if "0.2.4" in kernels:
        with packages.imported("torchembed", "0.2.4", "torchembed"):
            rows.append(row(OLD, _import_guard, rotate=_reached))
    return _from_code(rows, merged_function()[1])


@evidence("deepspeed_packages", "the files of the packages under build/peers")
def wheels() -> pd.DataFrame:
    """The versions of torchembed whose wheels are at hand, and whether each version ships the kernel."""
    return peers.wheels()


@evidence("deepspeed_kernel", "the source of torchembed's kernel under build/peers")
def kernel_source() -> pd.DataFrame:
    """The number of reads and writes in the source of the fused kernel: a row for each version at hand.

    Columns version, loads (of the tensor), stores, repeated (loads and stores of an address that was loaded or stored
    before), loops.
    """
    rows = []
    for version in (version for version, has in peers.torchembed_kernels().items() if has):
        tree = ast.parse(peers.torchembed_file(version).read_text(encoding="utf-8"))
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
    release, requirement = peers.deepspeed_extra("torchembed")
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
    frame = pd.read_csv(PUBLISHED)
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


def _import_guard() -> bool:
    """Whether DeepSpeed's own guarded import finds torchembed's kernel."""
    _, source = peers.deepspeed_source()
    return peers.deepspeed_import_guard(source)
