"""The kernel of flat tiles against torch operations: every number and width of heads, strides and positions."""

import pytest
import torch

from ropelab.kernels import HAS_TRITON, INTERPRETED, NO_POSITION, Rotation, rotate_torch
from ropelab.kernels.run import run
from ropelab.kernels.tensors import RotateTensors

if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)
if not (INTERPRETED or torch.cuda.is_available()):
    pytest.skip("kernels need a GPU or the interpreter", allow_module_level=True)

from ropelab.kernels import rotate_triton
from ropelab.kernels.tiles import FlatTile

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float16, torch.float32)  # the interpreter truncates bfloat16

# query heads, key heads, head_dim, rotary_dim, first
HEADS = [(7, 1, 32, 32, 0), (3, 2, 24, 24, 0), (5, 5, 40, 16, 0), (3, 0, 32, 16, 16), (6, 2, 48, 16, 16)]


def tensors(order: str, batch: int, tokens: int, heads: tuple[int, ...], head_dim: int, dtype) -> list[torch.Tensor]:
    """``[B, S, H, D]`` for each number of heads, whose memory has the order of ``order``; "views" have gaps."""
    xs = []
    for count in heads:
        x = torch.randn(batch, tokens, count + (order == "views"), head_dim).to(dtype)
        if order in ("tokens", "batches"):
            axes = (1, 2) if order == "tokens" else (0, 1)
            x = x.transpose(*axes).contiguous().transpose(*axes)
        xs.append(x[:, :, :count])
    return xs


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("order", ["heads", "tokens", "batches", "views"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_gives_the_bits_of_torch(heads, order, interleaved):
    q_heads, k_heads, head_dim, rotary_dim, first = heads
    seed = HEADS.index(heads)
    dtype, tokens = DTYPES[seed % 2], 5
    xs = tensors(order, 2, tokens, (q_heads, k_heads) if k_heads else (q_heads,), head_dim, dtype)
    xs = [x.to(DEVICE) for x in xs]
    cos, sin = torch.randn(2, tokens + 3, rotary_dim // 2, device=DEVICE)
    rotation = Rotation(rotary_dim, first, interleaved, interleaved, transpose=seed % 2 == 1)
    positions = torch.tensor([[0, 7, -3, NO_POSITION, 99], [1, 1, -8, 2, 0]], dtype=torch.int32, device=DEVICE)
    along = "heads" if order == "views" else order
    tile = FlatTile((64, 16, 32, 8)[seed % 4], 1, along, (8, 4)[seed % 2], 2 if along == "tokens" else 1)
    for where, in_place in ((None, interleaved), (positions, not interleaved)):
        expected = [torch.empty_like(x) for x in xs]
        first_position = 3 if where is None else 0
        rotate_torch.rotate(RotateTensors.of(xs, expected, cos, sin, where), rotation, first_position)
        inputs = [x.clone() for x in xs]
        outs = inputs if in_place else [torch.full_like(x, 9) for x in xs]
        t = RotateTensors.of(inputs, outs, cos, sin, where)
        run(rotate_triton.plan_rotate, t, rotation, tile, first_position=first_position)
        for actual, wanted in zip(outs, expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("interleaved", [False, True])
def test_tables_of_full_width_and_of_each_batch(interleaved):
    xs = [torch.randn(2, 3, heads, 48, device=DEVICE) for heads in (3, 1)]
    cos, sin = torch.randn(2, 2, 3, 48, device=DEVICE)
    rotation = Rotation(48, interleaved=interleaved, out_interleaved=interleaved, full_width=True)
    expected, actual = ([torch.full_like(x, 9) for x in xs] for _ in range(2))
    rotate_torch.rotate(RotateTensors.of(xs, expected, cos, sin), rotation)
    run(rotate_triton.plan_rotate, RotateTensors.of(xs, actual, cos, sin), rotation, FlatTile(32, 1))
    assert all(map(torch.equal, actual, expected))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("positions", [False, True])
def test_results_in_the_other_layout(interleaved, positions):
    xs = tensors("heads", 2, 3, (3, 1), 48, torch.float16)
    xs = [x.to(DEVICE) for x in xs]
    cos, sin = torch.randn(2, 5, 24, device=DEVICE)
    rotation = Rotation(48, interleaved=interleaved, out_interleaved=not interleaved)
    where = torch.tensor([[0, 4, NO_POSITION], [-2, 9, 1]], dtype=torch.int32, device=DEVICE) if positions else None
    expected, actual = ([torch.full_like(x, 9) for x in xs] for _ in range(2))
    rotate_torch.rotate(RotateTensors.of(xs, expected, cos, sin, where), rotation)
    run(rotate_triton.plan_rotate, RotateTensors.of(xs, actual, cos, sin, where), rotation, FlatTile(32, 1))
    for y, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(y, wanted, rtol=0, atol=0, equal_nan=True)


def test_no_lane_is_idle():
    """The programs have as many accesses as the call, apart from the last block of tokens."""
    for q_heads, k_heads, head_dim, pairs in ((28, 4, 128, 8), (12, 2, 128, 8), (71, 1, 64, 8), (16, 16, 72, 4)):
        tokens = 4096
        xs = [torch.empty(1, tokens, heads, head_dim, device="meta") for heads in (q_heads, k_heads)]
        table = torch.empty(tokens, head_dim // 2, device="meta")
        call = RotateTensors.of(xs, xs, table, table), Rotation(head_dim), FlatTile(128, 4)
        launch = rotate_triton.plan_rotate(*call)
        accesses = tokens * (q_heads + k_heads) * head_dim // (2 * pairs)
        assert launch.grid[0] * 128 == accesses, (q_heads, head_dim)
