"""Time the projection to q, k and v with the rotation: a product and a pass, or one kernel.

Every contender gets the same hidden states and weights, and makes ``[T, N]`` with q and k turned by their positions, in
adjacent pairs. "cuBLAS" is the product alone, which no contender can undercut without a better product.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pandas as pd
import torch

import ropelab
from ropelab import reference
from ropelab.bench import packages, replaced, timing
from ropelab.bench.agreement import disagreement
from ropelab.bench.operation import COPY, Contender, Operation, table
from ropelab.bench.peers import quack
from ropelab.bench.projection_law import Product
from ropelab.call import operation, projection
from ropelab.call.projection_paths import ProductSize
from ropelab.kernels import Rotation, backend
from ropelab.kernels import run as running
from ropelab.kernels.tensors import ProjectionTensors

ALONE, OURS = "cuBLAS", "cuBLAS and ropelab in place"
PRODUCT, KERNEL = "ropelab's product", "ropelab's product with the rotation"
COMPUTED = "ropelab's product with the rotation, angles computed"
QUACK, QUACK_ALONE = "quack with the rotation", "quack"
BY_QUACK = "qkv_rope by quack, angles computed"
HEADS = (32, 8), (28, 4), (64, 8)
INPUTS = 2048, 4096, 8192
TOKENS = 1, 64, 512, 2048, 4096, 8192, 16384
BLOCK_TOKENS = 1, 64, 4096, 16384
TILES = (
    (128, 256, 64, 8, 3, 8), (128, 256, 64, 8, 3, 4), (128, 256, 64, 8, 3, 16), (128, 256, 64, 8, 2, 8),
    (256, 128, 64, 8, 3, 8), (128, 128, 64, 4, 4, 8), (128, 128, 64, 8, 4, 8), (64, 256, 64, 4, 3, 8),
    (64, 256, 64, 8, 4, 8),
)  # fmt: skip
"""The tiles of the study `projection_tiles`, see `ProjectionTile`."""
ROUNDINGS = 6
"""The error of a head that is allowed, in unit roundoffs, relative to the norm of the head: a rounding of the product,
four of the rotation (the table, a product, a sum and the result), and one for the sums of the product."""

Run = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Return ``[T, N]`` for x ``[T, K]`` and the weight ``[N, K]``."""
Find = Callable[["Tensors"], dict[str, Contender]]


@dataclass(frozen=True)
class Projection(Product):
    """A product of bfloat16 with a block behind it.

    Attributes:
        block: what follows the product: "rotation", "norm" (before the rotation), "cache" (behind the rotation), or
            "norm and cache".
        page: the slots of a block of the cache.
        layout: the pairs that rotate.
        counted: positions count up by themselves, and none are given.
    """

    block: str = "rotation"
    page: int = 16
    layout: str = "interleaved"
    counted: bool = False

    @property
    def columns(self) -> dict[str, object]:
        """The columns that identify the workload in a record."""
        names = ("tokens", "inputs", "outputs", "q_heads", "k_heads", "head_dim", "block")
        return {name: getattr(self, name) for name in names}

    @property
    def work(self) -> ProductSize:
        return super().work._replace(norm="norm" in self.block)

    @property
    def checked(self) -> "Projection":
        """The workload that is compared with the definition: the first tokens of this one."""
        return replace(self, tokens=min(self.tokens, 256))

    def sets(self, cache_bytes: int) -> int:
        """The sets of x and weights that take turns, so that no call finds its weights in the cache."""
        return max(1, -(-2 * cache_bytes // self.bytes))


class Tensors:
    """The tensors of a workload: sets of x and weight, and what all sets share."""

    def __init__(self, case: Projection, device: torch.device | str, sets: int = 1, seed: int = 0):
        generator = torch.Generator(device).manual_seed(seed)

        def draw(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

        self.case, self.device = case, device
        self.sets = [
            (draw(case.tokens, case.inputs), draw(case.outputs, case.inputs).div_(case.inputs**0.5))
            for _ in range(sets)
        ]
        self.positions = torch.arange(case.tokens, device=device)
        self.cos, self.sin = ropelab.rotary_table(case.tokens, case.head_dim, device=device)
        self.norms = {"q_weight": draw(case.head_dim), "k_weight": draw(case.head_dim)} if "norm" in case.block else {}
        self.slots = torch.randperm(case.tokens, generator=generator, device=device)
        blocks = -(-case.tokens // case.page) if "cache" in case.block else 0
        self.caches = [draw(blocks, case.page, case.k_heads, case.head_dim) for _ in range(2)]

    def options(self, computed: bool = False, counted: bool = False) -> dict[str, object]:
        """The arguments that our functions share.

        Args:
            computed: frequencies take the place of tables.
            counted: as in `Projection`.
        """
        case = self.case
        tables = {"cos": self.cos, "sin": self.sin}
        angles = {"frequencies": ropelab.rotary_frequencies(case.head_dim, device=self.device)} if computed else tables
        where: dict[str, object] = {"layout": case.layout, "seq_format": "thd"}
        where |= {} if counted or case.counted else {"positions": self.positions}
        return angles | where | {"q_heads": case.q_heads, "k_heads": case.k_heads, **self.norms}

    def heads(self, projected: torch.Tensor) -> dict[str, torch.Tensor]:
        """q, k and v ``[T, H, D]``; k and v of a cache come from its slots."""
        case = self.case
        if "cache" in case.block:
            q = projected[:, : case.q_heads * case.head_dim].unflatten(-1, (case.q_heads, case.head_dim))
            k, v = (cache.flatten(0, 1)[self.slots] for cache in self.caches)
        else:
            q, k, v = projection.Heads(case.q_heads, case.k_heads, case.head_dim).split(projected)
        return {"q": q, "k": k, "v": v}

    def right(self) -> dict[str, torch.Tensor]:
        """q, k and v of the first set in float64."""
        x, weight = (t.double() for t in self.sets[0])
        q, k, v = projection.Heads(self.case.q_heads, self.case.k_heads, self.case.head_dim).split(x @ weight.T)
        turned = []
        for name, heads in (("q", q), ("k", k)):
            if self.norms:
                rstd = torch.rsqrt(heads.square().mean(-1, keepdim=True) + 1e-6)
                heads = heads * rstd * self.norms[f"{name}_weight"].double()
            tables = self.cos.double(), self.sin.double()
            where = {"positions": self.positions, "seq_format": "thd"}
            turned.append(reference.rotate(heads, *tables, layout=self.case.layout, **where))
        return {"q": turned[0], "k": turned[1], "v": v}

    def check(self, run: Run) -> str:
        """``"ok"`` if q, k and v agree with float64."""
        return disagreement(self.heads(run(*self.sets[0])), self.right(), ROUNDINGS)


def on_path(tensors: Tensors, path: str, computed: bool = False, counted: bool = False) -> Run:
    """`qkv_rope`, or with a cache `qkv_rope_and_cache`, on one of its paths; see `Tensors.options`."""
    options = tensors.options(computed, counted) | {"path": path}
    if "cache" not in tensors.case.block:
        return lambda x, weight: _whole(ropelab.qkv_rope(x, weight, **options)[0], tensors.case)
    caches = *tensors.caches, tensors.slots
    return lambda x, weight: ropelab.qkv_rope_and_cache(x, weight, *caches, **options).flatten(1)


def _whole(q: torch.Tensor, case: Projection) -> torch.Tensor:
    """``[T, N]``, of which q is a view."""
    return q.as_strided((len(q), case.outputs), (case.outputs, 1))


def contenders(tensors: Tensors) -> dict[str, Contender]:
    """The contenders of a study by name."""
    case, found = tensors.case, paths(tensors)
    if case.block != "rotation":
        return found
    computed = on_path(tensors, "product", computed=True)
    found |= {PRODUCT: _unchecked(partial(alone, tensors)), COMPUTED: Contender(computed)}
    try:
        rotating = quack.projection(tensors.positions, case.q_heads, case.k_heads, case.head_dim)
        by_quack = on_path(tensors, "quack", computed=True, counted=True)
        return found | {
            QUACK_ALONE: _unchecked(quack.product()), QUACK: Contender(rotating), BY_QUACK: Contender(by_quack),
        }  # fmt: skip
    except packages.NotInstalled as error:
        return found | dict.fromkeys((QUACK_ALONE, QUACK, BY_QUACK), Contender(f"not run: {error}"))


def _steps(tensors: Tensors) -> dict[str, Contender]:
    """The product alone, and with a pass behind it."""
    return {ALONE: _unchecked(torch.nn.functional.linear), OURS: Contender(on_path(tensors, "pass"))}


def paths(tensors: Tensors) -> dict[str, Contender]:
    """The product alone, and both paths of `qkv_rope`."""
    return _steps(tensors) | {KERNEL: Contender(on_path(tensors, "product"))}


def _unchecked(product: Run) -> Contender:
    """A product of others, or without a rotation."""
    return Contender(product, check=lambda *_: "ok")


def alone(tensors: Tensors, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The product of the kernel that rotates, without a head that turns."""
    dim, kernels = tensors.case.head_dim, backend("projection", x)
    made, rotation = x.new_empty((1, len(x), len(weight) // dim, dim)), Rotation(dim)
    angles = tensors.cos, tensors.sin, tensors.positions[None]
    given = ProjectionTensors(None, None, x, weight, None, None, None, None, made, *angles)
    if not kernels.serves(given, rotation):
        raise RuntimeError("the kernel cannot serve the product")
    running.run(kernels.plan_project, given, rotation, 0, 0)
    return made.view(len(x), -1)


def projections(*, smoke: bool = False, device: torch.device | str = "cuda") -> pd.DataFrame:
    """Time the product with a rotation. Columns: see `Projected`."""
    cases = [Projection(t, k, *heads) for heads in HEADS for k in INPUTS for t in TOKENS]
    return _table(cases[:1] if smoke else cases, contenders, device, smoke)


def blocks(*, smoke: bool = False, device: torch.device | str = "cuda") -> pd.DataFrame:
    """Time the product with a norm, a rotation and a paged cache, as far as a block has them. Columns: `Projected`."""
    kinds = ("norm", "cache", "norm and cache")
    cases = [Projection(t, 4096, *heads, block=kind) for heads in HEADS[:2] for kind in kinds for t in BLOCK_TOKENS]
    return _table(cases[:3:2] if smoke else cases, contenders, device, smoke)


def tiles(*, smoke: bool = False, device: torch.device | str = "cuda") -> pd.DataFrame:
    """Time the kernel that rotates with several tiles. Columns: `Projected`; a contender is a tile."""
    cases = [Projection(t, 4096, *heads) for heads in HEADS[:2] for t in (1024, 4096, 16384)]
    return _table(cases[:1] if smoke else cases, _tiles, device, smoke)


def _tiles(tensors: Tensors) -> dict[str, Contender]:
    kernels, ours = backend("projection", tensors.positions), on_path(tensors, "product")

    def with_tile(tile, x, weight):
        plan = partial(kernels.plan_project, tile=kernels.ProjectionTile(*tile))
        calls = operation.PreparedCalls()
        with replaced.attributes(kernels, plan_project=plan), replaced.attributes(operation, prepared_calls=calls):
            return ours(x, weight)

    return _steps(tensors) | {"x".join(map(str, tile)): Contender(partial(with_tile, tile)) for tile in TILES}


def compiled(*, smoke: bool = False, device: torch.device | str = "cuda") -> pd.DataFrame:
    """Time torch.compile with max-autotune of the product, and of the product with the rotation in torch operations.

    Columns: `Projected`.
    """
    cases = [Projection(t, 4096, 32, 8) for t in (64, 4096, 16384)]
    return _table(cases[:1] if smoke else cases, _compiled, device, smoke)


def _compiled(tensors: Tensors) -> dict[str, Contender]:
    case = tensors.case
    cos, sin = (t[tensors.positions][:, None] for t in (tensors.cos, tensors.sin))

    def rotated(x, weight):
        heads = torch.nn.functional.linear(x, weight).unflatten(-1, (-1, case.head_dim))
        turning, v = heads.split((case.q_heads + case.k_heads, case.k_heads), -2)
        x0, x1 = turning.float().unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((x0 * cos - x1 * sin, x1 * cos + x0 * sin), -1).flatten(-2).to(x.dtype)
        return torch.cat((turned, v), -2).flatten(-2)

    autotuned = partial(torch.compile, mode="max-autotune-no-cudagraphs", dynamic=False)
    return _steps(tensors) | {
        "compiled product": _unchecked(autotuned(torch.nn.functional.linear)),
        "compiled product and rotation": Contender(autotuned(rotated)),
    }


def _table(cases: Sequence[Projection], find: Find, device: torch.device | str, smoke: bool) -> pd.DataFrame:
    cases = [replace(case, tokens=min(case.tokens, 64)) for case in cases] if smoke else cases
    with torch.no_grad():
        return table([Projected(case, find) for case in cases], rounds=3 if smoke else 12, device=device)


@dataclass(frozen=True)
class Projected(Operation):
    """A product with what follows it.

    Columns: tokens, inputs, outputs, q_heads, k_heads, head_dim, block; contender, status, median_us, q20_us, q80_us,
        samples; over_product, the median over that of cuBLAS alone; tflops, the operations of the product over the
        median; pass_bytes, what a pass over q and k reads and writes. ``copy`` is the fastest copy of so many bytes.

    Attributes:
        find: gives the contenders for tensors.
        count, seed: of the sets of tensors; 0 for as many sets as leave none in the cache.
    """

    case: Projection
    find: Find
    count: int = 0
    seed: int = 0

    one_copy = True

    @property
    def columns(self):
        return self.case.columns

    @property
    def description(self):
        return f"{self.case.block}, {self.case.tokens} x {self.case.inputs} x {self.case.outputs}"

    @property
    def checked(self):
        return replace(self, case=self.case.checked, count=1, seed=1)

    def sets(self, device):
        """Each has the `Tensors`, and its x and weight."""
        tensors = Tensors(self.case, device, self.count or self.case.sets(timing.cache_bytes()), self.seed)
        return [(tensors, *pair) for pair in tensors.sets]

    def contenders(self, sets, device):
        return self.find(sets[0][0])

    def check(self, run, call, step=""):
        return call[0].check(run)

    def calls(self, run, sets, step=""):
        return [partial(run, x, weight) for _, x, weight in sets]

    def to_copy(self, call, step=""):
        return (torch.empty(self.case.pass_bytes // 4, dtype=torch.bfloat16, device=call[1].device),)

    def finished(self, frame):
        product = frame[frame.contender == ALONE].median_us.min()
        return frame.drop(columns="fraction_of_copy").assign(
            over_product=frame.median_us / product,
            tflops=(self.case.operations / frame.median_us / 1e6).where(frame.contender != COPY),
            pass_bytes=self.case.pass_bytes,
        )
