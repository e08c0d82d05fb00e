"""Time positions along three axes (M-RoPE) beside positions along one axis.

The kernels read a position along each axis and the row of each pair's axis. They move the same heads as with one axis,
so a difference in time is the cost of the axes. ``tables`` are the tables that `axial_tables` gathers before a call;
the time of the gather is not in the time of that contender, and ``axial_tables`` has it alone.
"""

from dataclasses import dataclass
from functools import partial
from itertools import product
from math import isqrt

import pandas as pd
import torch

import ropelab
from ropelab.bench import timing
from ropelab.bench.operation import Contender, Operation, table
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
    cases = [MRope(*cell) for cell in product(MODELS, LAYOUTS, TOKENS, STEPS)]
    cases = [case for case in cases if case.tokens == 64][:: len(STEPS) + 1] if smoke else cases
    return table(cases, rounds=3 if smoke else 10)


def positions(tokens: int, device: torch.device | str) -> torch.Tensor:
    """Positions of a text and then a square image of about three quarters of the tokens, int64 ``[3, tokens]``."""
    side = isqrt(tokens * 3 // 4)
    text = text_positions(tokens - side * side, device=device)
    image = grid_positions(1, side, side, device=device) + text.shape[1]
    return torch.cat((text, image), dim=1)


@dataclass(frozen=True)
class MRope(Operation):
    """A step of a model. No result is compared: the tests of the operators hold them to the definition."""

    model: Model
    layout: str
    tokens: int
    step: str

    one_copy = True
    differentiates = True

    @property
    def columns(self):
        model = {"model": self.model.name, "mrope_interleaved": self.model.mrope_interleaved}
        return model | self.work.columns | {"step": self.step}

    @property
    def description(self):
        return f"{self.model.name} {self.layout} {self.tokens} {self.step}"

    @property
    def work(self) -> Workload:
        model = self.model
        return Workload(
            f"{self.tokens} tokens", 1, self.tokens, model.q_heads, model.k_heads, model.head_dim,
            2 * len(model.axes), layout=self.layout, seq_format="thd", lengths=(self.tokens,),
        )  # fmt: skip

    def sets(self, device):
        """Each has ``heads`` (q and k) and what all share: ``weights`` of the norm, or ``caches`` and ``slots``."""
        generator, work = torch.Generator(device).manual_seed(0), self.work

        def draw(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=generator, device=device, dtype=work.dtype)

        heads = [
            [draw(self.tokens, n, work.head_dim) for n in (work.q_heads, work.k_heads)]
            for _ in range(work.cold_count(timing.cache_bytes()))
        ]
        shared: dict = {}
        if "norm" in self.step:
            shared["weights"] = [draw(work.head_dim).requires_grad_("backward" in self.step) for _ in ("q", "k")]
        elif self.step == "one pass":
            pages = -(-self.tokens // _PAGE)
            shared["caches"] = [draw(pages, _PAGE, work.k_heads, work.head_dim) for _ in ("k", "v")]
            shared["slots"] = torch.arange(self.tokens, device=device)
        return [{"heads": each, **shared} for each in heads]

    def contenders(self, sets, device):
        tables = ropelab.rotary_table(ROWS, self.work.rotary_dim, device=device)
        tables = dict(zip(("cos", "sin"), tables, strict=True))
        along, axes = positions(self.tokens, device), self.model.axes
        columns = torch.tensor(axes, device=device)

        def gather() -> dict[str, torch.Tensor]:
            return dict(zip(("cos", "sin"), ropelab.axial_tables(**tables, positions=along, axes=columns), strict=True))

        places = {
            ONE_AXIS: {**tables, "positions": torch.arange(self.tokens, device=device)},
            AXES: {**tables, "positions": along, "axes": axes},
            TABLES: gather(),
        }
        found = {name: Contender(partial(self.run, where | {"layout": self.layout})) for name, where in places.items()}
        return found | {GATHER: Contender(gather, calls=lambda sets, step: [gather])}

    def run(self, where: dict, call: dict) -> object:
        """The forward of the step, with tables and positions."""
        if self.step == "apply_rope":
            return ropelab.apply_rope(*call["heads"], seq_format="thd", **where)
        if self.step == "one pass":
            q, k = call["heads"]
            return ropelab.rope_and_cache(q, k, k, *call["caches"], call["slots"], **where)
        return ropelab.apply_qk_norm_rope(*call["heads"], *call["weights"], seq_format="thd", **where)

    def calls(self, run, sets, step=""):
        if "backward" not in self.step:
            return super().calls(run, sets, step)
        found = []
        for call in sets:
            leaves = [x.detach().requires_grad_() for x in call["heads"]]
            ys = run(call | {"heads": leaves})
            cotangents = [torch.ones_like(y) for y in ys]
            found.append(partial(torch.autograd.grad, ys, [*leaves, *call["weights"]], cotangents, retain_graph=True))
        return found

    def check(self, run, call, step=""):
        return "ok"

    def to_copy(self, call, step=""):
        return call["heads"]
