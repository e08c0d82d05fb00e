"""The launches of the steps, as the chapter shows them and the study `kernel_steps` times them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import triton

import ropelab
from ropelab.kernels import Rotation
from ropelab.kernels.addressing import alignment
from ropelab.kernels.rotate_triton import plan_rotate
from ropelab.kernels.tensors import RotateTensors
from ropelab.kernels.tiles import Tile, next_power_of_2
from ropelab.study.topics.kernel_steps import steps

BLOCK_HEADS, WARPS = 16, 4
"""The heads and warps of a program from step 2 on: 16 heads of 64 pairs give each of the 128 threads eight pairs."""
OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": False}
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


@dataclass(frozen=True)
class Planned:
    """A launch: the kernel, the grid, all arguments in the order of the kernel, and the options of the compiler."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any] = field(default_factory=lambda: OPTIONS)

    def __call__(self) -> None:
        """Launch on the current device."""
        self.kernel[self.grid](*self.arguments, **self.options)


Plan = Callable[[Inputs, torch.Tensor], Planned]
"""Return the launch that rotates ``inputs.x`` into ``y``."""


@dataclass(frozen=True)
class Step:
    """A step of the chapter.

    Attributes:
        name: the name of its rows in records; it begins with the number of the step.
        plan: the launch; None for the lines of torch.
        layout: "split_half" or "interleaved".
        inverse: the step turns back.
        positions: the step turns a token by its position in its sequence, and not by its place among all tokens.
    """

    name: str
    plan: Plan | None
    layout: str = "split_half"
    inverse: bool = False
    positions: bool = False

    def __call__(self, inputs: Inputs) -> torch.Tensor:
        """Rotate ``inputs.x``, and return the result as a new tensor."""
        if self.plan is None:
            return steps.in_torch(inputs.x, inputs.cos, inputs.sin)
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


def one_head(given: Inputs, y: torch.Tensor) -> Planned:
    tokens, heads, pairs = given.x.shape[0], given.x.shape[1], given.cos.shape[1]
    block = next_power_of_2(pairs)
    return Planned(steps.one_head, (tokens, heads), (given.x, given.cos, given.sin, y, heads, pairs, block))


def tiled(kernel: Any, given: Inputs, y: torch.Tensor, *more: Any, between: tuple[Any, ...] = ()) -> Planned:
    """The launch of a kernel of steps 2 to 6, with a program for each token and block of heads.

    Args:
        between: the arguments between ``y`` and the strides.
        more: the arguments after the blocks.
    """
    tokens, heads, pairs = given.x.shape[0], given.x.shape[1], given.cos.shape[1]
    constants = heads, pairs, BLOCK_HEADS, next_power_of_2(pairs)
    arguments = (given.x, given.cos, given.sin, y, *between, *given.x.stride()[:2], *constants, *more)
    return Planned(kernel, (tokens, triton.cdiv(heads, BLOCK_HEADS)), arguments)


def aligned(kernel: Any, given: Inputs, y: torch.Tensor, *more: Any, between: tuple[Any, ...] = ()) -> Planned:
    """As `tiled`, for a kernel that knows a power of two that divides the strides."""
    return tiled(kernel, given, y, alignment(given.x.stride()[:2]), *more, between=between)


def aligned_side(given: Inputs, y: torch.Tensor, loads: bool) -> Planned:
    return aligned(steps.strided_side, given, y, loads)


def either_way(given: Inputs, y: torch.Tensor, inverse: bool) -> Planned:
    return aligned(steps.either_way, given, y, inverse)


def packed(given: Inputs, y: torch.Tensor) -> Planned:
    sequences = len(given.cu_seqlens) - 1
    block = next_power_of_2(sequences)
    return tiled(
        steps.packed, given, y, block, alignment(given.x.stride()[:2]), False, between=(given.cu_seqlens, sequences)
    )


def positions_given(given: Inputs, y: torch.Tensor, heads_first: bool) -> Planned:
    return aligned(steps.positions_given, given, y, False, heads_first, between=(given.positions, len(given.cos)))


def in_order(given: Inputs, y: torch.Tensor, eviction: str) -> Planned:
    planned = aligned(steps.in_order, given, y, False, eviction, between=(given.positions, len(given.cos)))
    tokens, blocks = planned.grid
    return Planned(planned.kernel, (tokens * blocks,), planned.arguments)


def from_stages(given: Inputs, y: torch.Tensor, tile: Tile, interleaved: bool = False) -> Planned:
    """The launch that the library plans for a tile, with the kernel of the chapter in place of the library's kernel."""
    tensors = RotateTensors.of([given.x[None]], [y[None]], given.cos, given.sin, given.positions[None])
    rotation = Rotation(given.x.shape[2], interleaved=interleaved, out_interleaved=interleaved)
    launch = plan_rotate(tensors, rotation, tile)
    arguments = (tensors, 0, len(given.cos), *launch.fixed)
    return Planned(steps.from_stages, launch.grid, arguments, launch.options)


TILES = ((1, 4, 4), (1, 8, 4), (1, 16, 4), (1, 32, 4), (2, 32, 4), (4, 32, 4), (1, 8, 2), (1, 32, 8))
"""The tokens, heads and warps of a program in step 8. With 128 features, a thread has 2 to 64 pairs."""


def tile_of(tokens: int, heads: int, warps: int) -> Tile:
    return Tile(tokens, heads, warps, pairs_per_access=8, heads_first=True)


def tile_name(tokens: int, heads: int, warps: int) -> str:
    return f"8 stages, {tokens} x {heads} heads, {warps} warps"


def _steps() -> list[Step]:
    tiles = {tile_name(*size): partial(from_stages, tile=tile_of(*size)) for size in TILES}
    adjacent = partial(from_stages, tile=tile_of(1, 8, 2), interleaved=True)
    return [
        Step("0 torch", None),
        Step("1 one head", one_head),
        Step("2 shared row", partial(tiled, steps.shared_row)),
        Step("3 wide accesses", partial(aligned, steps.wide_accesses)),
        Step("4 strided pairs", partial(aligned, steps.strided_pairs), layout="interleaved"),
        Step("4 strided loads", partial(aligned_side, loads=True), layout="interleaved"),
        Step("4 strided stores", partial(aligned_side, loads=False), layout="interleaved"),
        Step("4 split pairs", partial(aligned, steps.split_pairs), layout="interleaved"),
        Step("5 backward", partial(either_way, inverse=True), inverse=True),
        Step("6 packed", packed, positions=True),
        Step("6 positions", partial(positions_given, heads_first=False), positions=True),
        Step("6 positions, heads first", partial(positions_given, heads_first=True), positions=True),
        Step("7 order alone", partial(in_order, eviction=""), positions=True),
        Step("7 in order", partial(in_order, eviction="evict_last"), positions=True),
        *(Step(name, plan, positions=True) for name, plan in tiles.items()),
        Step("8 stages, adjacent pairs", adjacent, layout="interleaved", positions=True),
    ]


STEPS = {step.name: step for step in _steps()}
"""The steps by name, in the order of the chapter."""
