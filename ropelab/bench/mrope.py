"""Time positions along three axes (M-RoPE) beside positions along one axis.

The kernels read a position along each axis and the row of each pair's axis. They move the same heads as with one axis,
so a difference in time is the cost of the axes. ``tables`` are the tables that `axial_tables` gathers before a call;
the time of the gather is not in the time of that contender, and ``axial_tables`` has it alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import isqrt

import pandas as pd
import torch

import ropelab
from ropelab.bench import copies, timing
from ropelab.bench.cells import progress
from ropelab.bench.compare import tidy
from ropelab.bench.rows import are_copies
from ropelab.bench.workloads import Workload
from ropelab.layout.pairing import LAYOUTS
from ropelab.positions.axes import grid_positions, mrope_axes, text_positions

ONE_AXIS, AXES, TABLES, GATHER = "one axis", "three axes", "tables", "axial_tables"
STEPS = ("apply_rope", "qk_norm", "qk_norm backward", "one pass")
TOKENS = (1, 64, 512, 4096, 16384)
ROWS = 32768
_PAGE = 16


@dataclass(frozen=True)
class Model:
    """The heads and the sections of a model."""

    name: str
    q_heads: int
    k_heads: int
    head_dim: int
    mrope_section: tuple[int, int, int]
    mrope_interleaved: bool

    @property
    def axes(self) -> tuple[int, ...]:
        """The axis of each pair."""
        return mrope_axes(self.mrope_section, mrope_interleaved=self.mrope_interleaved)


MODELS = (
    Model("Qwen2.5-VL 7B", 28, 4, 128, (16, 24, 24), False),
    Model("Qwen3-VL 8B", 32, 8, 128, (24, 20, 20), True),
    Model("Qwen3.5 9B", 16, 4, 256, (11, 11, 10), True),
)


def mrope(*, smoke: bool = False) -> pd.DataFrame:
    """Time every step of every model, with one axis, with three axes and with gathered tables.

    Columns: model, mrope_interleaved, the columns of `Workload`, step, contender, status, median_us, q20_us, q80_us,
        samples, fraction_of_copy (of the forward of q and k; the backward of the norm reads twice as much).
    """
    cells = list(product(MODELS, LAYOUTS, TOKENS, STEPS))
    cells = [cell for cell in cells if cell[2] == 64][:: len(STEPS) + 1] if smoke else cells
    described = progress(cells, lambda cell: f"{cell[0].name} {cell[1]} {cell[2]} {cell[3]}")
    return pd.concat([_compare(*cell, rounds=3 if smoke else 10) for cell in described], ignore_index=True)


def positions(tokens: int, device: torch.device | str) -> torch.Tensor:
    """Positions of a text and then a square image of about three quarters of the tokens, int64 ``[3, tokens]``."""
    side = isqrt(tokens * 3 // 4)
    text = text_positions(tokens - side * side, device=device)
    image = grid_positions(1, side, side, device=device) + text.shape[1]
    return torch.cat((text, image), dim=1)


def _compare(model: Model, layout: str, tokens: int, step: str, rounds: int) -> pd.DataFrame:
    rotary_dim = 2 * len(model.axes)
    shape = Workload(
        f"{tokens} tokens", 1, tokens, model.q_heads, model.k_heads, model.head_dim, rotary_dim, layout=layout,
        seq_format="thd", lengths=(tokens,),
    )  # fmt: skip
    device = torch.device("cuda")
    tables = dict(zip(("cos", "sin"), ropelab.rotary_table(ROWS, rotary_dim, device=device), strict=True))
    along, axes = positions(tokens, device), model.axes

    def gather() -> dict[str, torch.Tensor]:
        return dict(zip(("cos", "sin"), ropelab.axial_tables(**tables, positions=along, axes=columns), strict=True))

    columns = torch.tensor(axes, device=device)
    places = {
        ONE_AXIS: {**tables, "positions": torch.arange(tokens, device=device)},
        AXES: {**tables, "positions": along, "axes": axes},
        TABLES: gather(),
    }
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device, dtype=shape.dtype)

    count, heads = shape.cold_count(timing.cache_bytes()), (model.q_heads, model.k_heads)
    sets = [[draw(tokens, n, model.head_dim) for n in heads] for _ in range(count)]
    run = _STEPS[step](shape, draw)
    timed: dict[str, Callable] = {
        name: partial(run, sets, where | {"layout": layout}) for name, where in places.items()
    }
    timed |= {GATHER: lambda: [gather]} | copies.contenders(sets)
    frame = copies.with_fraction(timing.gpu_times(timed, rounds=rounds))
    is_copy = are_copies(frame)
    best = frame[is_copy].nsmallest(1, "median_us").assign(contender="copy")
    frame = pd.concat([frame[~is_copy], best], ignore_index=True)
    torch.cuda.empty_cache()  # the graphs have memory of their own
    identity = {"model": model.name, "mrope_interleaved": model.mrope_interleaved, **shape.columns, "step": step}
    return tidy(frame, identity)


Sets = Sequence[Sequence[torch.Tensor]]
Run = Callable[[Sets, dict], list[Callable[[], object]]]


def _apply_rope(shape: Workload, draw: Callable) -> Run:
    return lambda sets, where: [partial(ropelab.apply_rope, *xs, seq_format="thd", **where) for xs in sets]


def _qk_norm(shape: Workload, draw: Callable) -> Run:
    weights = draw(shape.head_dim), draw(shape.head_dim)

    def run(sets: Sets, where: dict) -> list[Callable[[], object]]:
        return [partial(ropelab.apply_qk_norm_rope, *xs, *weights, seq_format="thd", **where) for xs in sets]

    return run


def _qk_norm_backward(shape: Workload, draw: Callable) -> Run:
    weights = draw(shape.head_dim).requires_grad_(), draw(shape.head_dim).requires_grad_()

    def run(sets: Sets, where: dict) -> list[Callable[[], object]]:
        found = []
        for xs in sets:
            leaves = [x.detach().requires_grad_() for x in xs] + list(weights)
            ys = ropelab.apply_qk_norm_rope(*leaves, seq_format="thd", **where)
            cotangents = [torch.ones_like(y) for y in ys]
            found.append(partial(torch.autograd.grad, ys, leaves, cotangents, retain_graph=True))
        return found

    return run


def _one_pass(shape: Workload, draw: Callable) -> Run:
    pages = -(-shape.seq_len // _PAGE)
    caches = [draw(pages, _PAGE, shape.k_heads, shape.head_dim) for _ in range(2)]
    slots = torch.arange(shape.seq_len, device=caches[0].device)

    def run(sets: Sets, where: dict) -> list[Callable[[], object]]:
        return [partial(ropelab.rope_and_cache, q, k, k, *caches, slots, **where) for q, k in sets]

    return run


_STEPS = dict(zip(STEPS, (_apply_rope, _qk_norm, _qk_norm_backward, _one_pass), strict=True))
