"""The steps of chapter 04: the kernels of its cells with their launches, and the library's kernel for some tiles."""

import json
import linecache
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import ropelab
from ropelab.kernels import Rotation
from ropelab.kernels.addressing import alignment
from ropelab.kernels.rotate_triton import plan_rotate
from ropelab.kernels.tensors import RotateTensors
from ropelab.kernels.tiles import Tile, next_power_of_2

CHAPTER = Path(__file__).parents[4] / "notebooks" / "04_write_the_kernel.ipynb"
CELL = "step"
"""The tag of the cells that define and judge a kernel."""
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
"""Without fused multiply-add, every step has the bits of the lines of torch."""


@dataclass(frozen=True)
class Inputs:
    """The tensors of a call.

    Attributes:
        x: ``[tokens, heads, head_dim]``.
        cos, sin: float32 ``[tokens, head_dim / 2]``.
        cu_seqlens: int32 ``[n + 1]``, the packed sequences.
        positions: int32 ``[tokens]``, the position of each token in its sequence.
    """

    x: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    cu_seqlens: torch.Tensor
    positions: torch.Tensor

    def arguments(self, y: torch.Tensor) -> dict[str, Any]:
        """The arguments that a kernel may name, for a result ``y``."""
        pairs, sequences = self.cos.shape[1], len(self.cu_seqlens) - 1
        token_stride, head_stride, _ = self.x.stride()
        return {
            "x": self.x, "cos": self.cos, "sin": self.sin, "y": y, "token_stride": token_stride,
            "head_stride": head_stride, "ALIGN": alignment((token_stride, head_stride)), "HEADS": self.x.shape[1],
            "PAIRS": pairs, "BLOCK_PAIRS": next_power_of_2(pairs), "positions": self.positions,
            "table_rows": len(self.cos), "cu_seqlens": self.cu_seqlens, "sequences": sequences,
            "BLOCK_SEQUENCES": next_power_of_2(sequences),
        }  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """A launch: the kernel, the grid, all arguments in the order of the kernel, and the options of the compiler."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=lambda: OPTIONS)

    def __call__(self) -> None:
        """Launch on the current device."""
        self.kernel[self.grid](*self.arguments, **self.options)


@dataclass(frozen=True)
class Step:
    """A step: a kernel of Triton with its launch, or lines of torch.

    Attributes:
        name: the name of its rows in records; it begins with the number of the step.
        kernel: its arguments are those of `Inputs.arguments` and ``constants``, by their names. Lines of torch take
            x, cos and sin.
        grid: a function of the arguments by name, as Triton takes it; None for lines of torch.
        constants: arguments of the kernel, and options of the compiler.
        layout, inverse: as `ropelab.apply_rope` takes them.
    """

    name: str
    kernel: Any
    grid: Callable[[Mapping[str, Any]], tuple[int, ...]] | None = None
    constants: Mapping[str, Any] = field(default_factory=dict)
    layout: str = "split_half"
    inverse: bool = False

    @property
    def in_torch(self) -> bool:
        return self.grid is None

    @property
    def positions(self) -> bool:
        """Whether a token turns by its position in its sequence, and not by its place among all tokens."""
        return not self.in_torch and not {"positions", "cu_seqlens"}.isdisjoint(self.kernel.arg_names)

    def plan(self, given: Inputs, y: torch.Tensor) -> Planned:
        """The launch that rotates ``given.x`` into ``y``.

        Raises:
            ValueError: the kernel names an argument that is not there.
        """
        names, known = self.kernel.arg_names, given.arguments(y) | self.constants
        if missing := [name for name in names if name not in known]:
            raise ValueError(
                f"{', '.join(missing)}: expected one of {', '.join(known)}; a constant of your own goes to judge, by "
                "its name"
            )
        options = OPTIONS | {name: value for name, value in self.constants.items() if name not in names}
        return Planned(self.kernel, self.grid(known), tuple(known[name] for name in names), options)  # type: ignore[misc]

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        """Rotate ``inputs.x``, and return the result as a new tensor."""
        if self.in_torch:
            return self.kernel(inputs.x, inputs.cos, inputs.sin)
        y = torch.empty_like(inputs.x)
        self.plan(inputs, y)()
        return y

    def options(self, inputs: Inputs) -> dict[str, Any]:
        """The arguments of `ropelab.apply_rope`, and of `ropelab.reference.rotate`, that describe the step."""
        where = {"positions": inputs.positions} if self.positions else {}
        return {"layout": self.layout, "inverse": self.inverse, "seq_format": "thd", **where}

    def in_library(self, inputs: Inputs) -> torch.Tensor:
        """The result of the library."""
        return ropelab.apply_rope(inputs.x, cos=inputs.cos, sin=inputs.sin, **self.options(inputs))


@dataclass(frozen=True)
class LibraryStep(Step):
    """The library's kernel for one tile."""

    kernel: Any = None
    tile: Tile | None = None
    in_torch = False
    positions = True

    def plan(self, given: Inputs, y: torch.Tensor) -> Planned:
        tensors = RotateTensors.of([given.x[None]], [y[None]], given.cos, given.sin, given.positions[None])
        adjacent = self.layout == "interleaved"
        rotation = Rotation(given.x.shape[2], interleaved=adjacent, out_interleaved=adjacent)
        launch = plan_rotate(tensors, rotation, self.tile)
        return Planned(launch.kernel, launch.grid, (tensors, 0, len(given.cos), *launch.fixed), launch.options)


def sources(path: Path = CHAPTER) -> dict[str, str]:
    """The name of each cell of the chapter that defines or judges a kernel -> its source."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return {
        f"<cell {cell['id']} of {path.name}>": "".join(cell["source"])
        for cell in notebook["cells"]
        if CELL in cell["metadata"].get("tags", [])
    }


def cells(path: Path = CHAPTER) -> list[Step]:
    """The steps that the cells of the chapter judge, in their order."""
    found: list[Step] = []
    namespace = {"__name__": "kernel_cells", "judge": partial(_collect, found)}
    for name, source in sources(path).items():
        linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name  # Triton reads the source
        exec(compile(source, name, "exec"), namespace)
    return found


def step(kernel: Any, grid: Any = None, *, step: str, layout: str = "split_half", inverse: bool = False, **constants):
    """The step of a cell: the arguments of ``judge``."""
    return Step(step, kernel, grid, constants, layout, inverse)


def _collect(found: list[Step], *arguments: Any, **named: Any) -> None:
    found.append(step(*arguments, **named))


TILES = ((1, 4, 4), (1, 8, 4), (1, 16, 4), (1, 32, 4), (2, 32, 4), (4, 32, 4), (1, 8, 2), (1, 32, 8))
"""The tokens, heads and warps of a program in step 8. With 128 features, a thread has 2 to 64 pairs."""


def library_tile(tokens: int, heads: int, warps: int) -> LibraryStep:
    """The library's kernel for tiles of so many tokens and heads, in programs of so many warps."""
    tile = Tile(tokens, heads, warps, pairs_per_access=8, heads_first=True)
    return LibraryStep(f"8 stages, {tokens} x {heads} heads, {warps} warps", tile=tile)


def _all() -> list[Step]:
    last = library_tile(1, 8, 2)
    tiles = [library_tile(*size) for size in TILES]
    return [*cells(), *tiles, replace(last, name="8 stages, adjacent pairs", layout="interleaved")]


STEPS = {each.name: each for each in _all()}
"""The steps by name, in the order of the chapter."""
