"""Time the rotation in the place that it has in decoding: norm -> projection -> rotation -> attention.

The four steps are launches of torch, but for the rotation. A step of decoding is short, so the start of a launch counts
as much as its work. The difference between a chain and the chain without the rotation is the cost of the rotation.

A GPU of compute capability 9.0 or newer can start the programs of a kernel before the kernel in front of it has ended
(programmatic dependent launch). The study times this for the rotation too. The library launches without it, because
no chain in a CUDA graph became shorter on an H200.
"""

import ast
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import pandas as pd
import torch
from torch.nn import functional

import ropelab
from ropelab import reference
from ropelab.bench import packages, timing
from ropelab.bench.agreement import disagreement
from ropelab.bench.cells import progress
from ropelab.bench.compare import tidy
from ropelab.bench.peers import sglang_kernel, vllm
from ropelab.kernels.rotation import Rotation
from ropelab.kernels.tensors import RotateTensors

NONE, OURS, DEPENDENT = "no rotation", "ropelab in place", "ropelab in place, dependent launch"
BATCHES = (1, 8)
ROUNDINGS = 6
"""The error of a rotated head that is allowed, in unit roundoffs, relative to the norm of the head. A feature may have
the roundings of the table, of a product, of a sum and of the result: 4 (|x0| + |x1|), at most 4 sqrt(2) of the norm."""

Rotate = Callable[[torch.Tensor], object]
"""Rotate q and k in place in a projection ``[B, (Hq + 2 Hk) D]``."""


@dataclass(frozen=True)
class Decoding:
    """The attention of a layer that decodes a token for each sequence, by default with the sizes of Llama 3 8B.

    Attributes:
        batch: sequences.
        context: the tokens that a sequence has in its cache; the position of the new token.
        layers: layers with weights of their own; together their weights exceed the L2 cache of every GPU.
        width: features of a token.
        q_heads, k_heads, head_dim: the heads of q, of k and of v.
    """

    batch: int
    context: int = 1024
    layers: int = 8
    width: int = 4096
    q_heads: int = 32
    k_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16

    @property
    def columns(self) -> dict[str, object]:
        """The columns that identify the workload in a record."""
        names = ("batch", "context", "width", "q_heads", "k_heads", "head_dim")
        return {name: getattr(self, name) for name in names} | {"dtype": str(self.dtype).removeprefix("torch.")}

    def parts(self, projected: torch.Tensor) -> list[torch.Tensor]:
        """q ``[B, Hq D]`` and k ``[B, Hk D]``, views of ``projected``."""
        q_width, k_width = self.q_heads * self.head_dim, self.k_heads * self.head_dim
        return list(projected.split((q_width, k_width, k_width), dim=-1)[:2])

    def heads(self, projected: torch.Tensor) -> list[torch.Tensor]:
        """q ``[B, 1, Hq, D]`` and k ``[B, 1, Hk, D]``, views of ``projected``."""
        whole = projected.view(self.batch, 1, -1, self.head_dim)
        return list(whole.split((self.q_heads, self.k_heads, self.k_heads), dim=2)[:2])


class Chain:
    """The tensors of all layers, and a step of a layer."""

    def __init__(self, case: Decoding, device: torch.device | str, seed: int = 0):
        generator = torch.Generator(device).manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=case.dtype)

        columns = (case.q_heads + 2 * case.k_heads) * case.head_dim
        self.case = case
        self.x, self.gain = draw(case.batch, case.width), draw(case.width)
        self.weights = [draw(columns, case.width) / case.width**0.5 for _ in range(case.layers)]
        cache = case.batch, case.k_heads, case.context, case.head_dim
        self.k_cache, self.v_cache = draw(*cache), draw(*cache)
        self.positions = torch.full((case.batch,), case.context, device=device)
        self.cos, self.sin = ropelab.rotary_table(case.context + 1, case.head_dim, device=device)

    def projected(self, layer: int) -> torch.Tensor:
        """``[B, (Hq + 2 Hk) D]``: the norm and the projection of a layer."""
        return functional.linear(functional.rms_norm(self.x, self.gain.shape, self.gain), self.weights[layer])

    def step(self, rotate: Rotate, layer: int) -> torch.Tensor:
        """The attention of a layer."""
        projected = self.projected(layer)
        rotate(projected)
        q, _ = self.case.heads(projected)
        return functional.scaled_dot_product_attention(q.transpose(1, 2), self.k_cache, self.v_cache, enable_gqa=True)

    def check(self, rotate: Rotate) -> str:
        """``"ok"`` if the rotation agrees with float64."""
        projected = self.projected(0)
        right = {}
        for name, x in zip("qk", self.case.heads(projected), strict=True):
            tables = self.cos.double(), self.sin.double()
            right[name] = reference.rotate(x.double(), *tables, positions=self.positions[:, None])
        rotate(projected)
        found = dict(zip("qk", self.case.heads(projected), strict=True))
        return disagreement(found, right, ROUNDINGS)


def decode_chain(*, smoke: bool = False, device: torch.device | str = "cuda") -> pd.DataFrame:
    """Time chains with the rotation in place of each contender, and without a rotation.

    Columns: the columns of the workload, captured (whether a CUDA graph holds the chain; the time is then the GPU's,
        and else the host's), contender, status, median_us, q20_us, q80_us, samples.
    """
    cases = [Decoding(batch) for batch in (BATCHES[:1] if smoke else BATCHES)]
    described = progress(cases, lambda case: f"{case.batch} sequences")
    with torch.no_grad():
        return pd.concat([_compare(case, device, 3 if smoke else 30) for case in described], ignore_index=True)


def _compare(case: Decoding, device: torch.device | str, rounds: int) -> pd.DataFrame:
    chain = Chain(case, device)
    rotations, status = contenders(chain)
    for name, rotate in rotations.items():
        outcome = _outcome(chain, rotate) if name != NONE else "ok"
        if outcome != "ok":
            status[name] = outcome
    right = {name: rotate for name, rotate in rotations.items() if name not in status}
    steps = {name: [partial(chain.step, rotate, i) for i in range(case.layers)] for name, rotate in right.items()}
    captured = timing.gpu_times({name: partial(list, calls) for name, calls in steps.items()}, rounds=rounds)
    eager = timing.host_times({name: partial(calls.__getitem__, 0) for name, calls in steps.items()}, rounds=rounds)
    frames = [
        tidy(frame, case.columns, status).assign(captured=is_captured)
        for frame, is_captured in ((captured, True), (eager, False))
    ]
    torch.cuda.empty_cache()  # the graphs have memory of their own
    return pd.concat(frames, ignore_index=True)


def _outcome(chain: Chain, rotate: Rotate) -> str:
    try:
        return chain.check(rotate)
    except Exception as error:  # the status records the error
        return timing.failure(error)


def contenders(chain: Chain) -> tuple[dict[str, Rotate], dict[str, str]]:
    """The rotations by name, and the status of each contender that cannot run."""
    case, status = chain.case, {}
    tables = {"cos": chain.cos, "sin": chain.sin}

    def ours(projected: torch.Tensor) -> None:
        q, k = case.heads(projected)
        ropelab.apply_rope(q, k, offsets=chain.positions, inplace=True, **tables)

    rotations: dict[str, Rotate] = {NONE: lambda projected: None, OURS: ours}
    if not chain.x.is_cuda or torch.cuda.get_device_capability(chain.x.device) < (9, 0):
        status[DEPENDENT] = "not run: a dependent launch needs a GPU of compute capability 9.0"
    else:
        rotations[DEPENDENT] = _dependent(chain)
    libraries: Mapping[str, Callable] = {"vllm": vllm.operators, "sglang": sglang_kernel.operators}
    cache = torch.cat((chain.cos, chain.sin), dim=-1).to(case.dtype)
    for name, load in libraries.items():
        try:
            operator = load().rotary_embedding
        except packages.NotInstalled as error:
            status[name] = f"not run: {error}"
            continue
        rotations[name] = partial(_operated, operator, chain, cache)
    return rotations, status


def _dependent(chain: Chain) -> Rotate:
    """Rotate with a dependent launch of the library's kernel."""
    from ropelab.kernels import rotate_triton  # needs Triton

    def tensors(projected: torch.Tensor) -> RotateTensors:
        pair = chain.case.heads(projected)
        return RotateTensors.of(pair, pair, chain.cos, chain.sin, chain.positions)

    rotation = Rotation(chain.case.head_dim, offsets=True)
    launch = dependent_launch(rotate_triton.plan_rotate(tensors(chain.projected(0)), rotation))
    return lambda projected: launch(tensors(projected), 0, len(chain.cos))


def dependent_launch(launch):
    """The launch of `ropelab.kernels.launch.Launch`, but its programs start while the kernel before it still runs.

    The kernel lets the kernel after it start early too. Every program waits for the end of all kernels before it, and
    reads and writes nothing before (``griddepcontrol.wait`` in PTX).
    """
    kernel = launch.kernel
    statements = ast.parse(kernel.src).body[0].body  # type: ignore[attr-defined]
    code = next(s for s in statements if not isinstance(s, ast.Expr))  # behind the docstring
    lines = kernel.src.splitlines(keepends=True)
    lines.insert(code.lineno - 1, "    tl.extra.cuda.gdc_launch_dependents()\n    tl.extra.cuda.gdc_wait()\n")
    dependent = copy.copy(launch)
    dependent.kernel = type(kernel)(kernel.fn, do_not_specialize=kernel.do_not_specialize)
    dependent.kernel._unsafe_update_src("".join(lines))
    dependent.options = launch.options | {"launch_pdl": True}
    dependent._compiled = {}
    return dependent


def _operated(operator: Callable, chain: Chain, cache: torch.Tensor, projected: torch.Tensor) -> None:
    """Rotate with the operator of vLLM or SGLang."""
    operator(chain.positions, *chain.case.parts(projected), chain.case.head_dim, cache, True)
