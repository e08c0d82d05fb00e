"""A token reads the right row of the right table, and the right features rotate: by the definition and by laws."""

from functools import partial

import pytest
import torch

import ropelab
from ropelab.kernels import NO_POSITION, Rotation, addressing, rotate_torch, rotate_triton, tile_of
from ropelab.kernels.run import readable, run
from ropelab.kernels.tensors import RotateTensors
from ropelab.kernels.tiles import Tile
from ropelab.layout.pairing import LAYOUTS
from ropelab.layout.seq_format import SEQ_FORMATS
from tests.support import assert_rotated, draw, forget

layouts = pytest.mark.parametrize("layout", LAYOUTS)
formats = pytest.mark.parametrize("seq_format", SEQ_FORMATS)

ROWS = 23
STEPS = rotate_torch.rotate, partial(run, rotate_triton.plan_rotate)


def inputs(device, seq_format="bshd", *, batch=3, seq_len=5, rotary_dim=12, dtype=torch.float32):
    """q, k, cos, sin; thd is one batch of ``batch * seq_len`` tokens."""
    if seq_format == "thd":
        batch, seq_len = 1, batch * seq_len
    q = draw(batch, seq_len, 3, 16, seq_format=seq_format, dtype=dtype, device=device)
    k = draw(batch, seq_len, 1, 16, seq_format=seq_format, dtype=dtype, device=device)
    return q, k, *ropelab.rotary_table(ROWS, rotary_dim, device=device)


def check(q, k, cos, sin, *, layout="split_half", seq_format="bshd", inverse=False, **where):
    """Compare the forward, the gradient (the transposed kernel) and the rotation in place with the definition."""
    options = {"layout": layout, "seq_format": seq_format, **where}
    x, y = q.clone().requires_grad_(), k.clone().requires_grad_()
    rotated = ropelab.apply_rope(x, y, cos=cos, sin=sin, inverse=inverse, **options)
    cotangents = [torch.randn_like(z) for z in rotated]
    grads = torch.autograd.grad(rotated, (x, y), cotangents)
    for source, result, g, grad in zip((q, k), rotated, cotangents, grads, strict=True):
        assert_rotated(result, source, cos, sin, inverse=inverse, **options)
        back = options | {"layout": where.get("out_layout") or layout, "out_layout": layout}
        assert_rotated(grad, g, cos, sin, inverse=not inverse, **back)
    if where.get("out_layout") in (None, layout):
        x, y = q.clone(), k.clone()
        ropelab.apply_rope(x, y, cos=cos, sin=sin, inverse=inverse, inplace=True, **options)
        assert torch.equal(x, rotated[0]) and torch.equal(y, rotated[1])


@pytest.mark.parametrize(
    "position, dtype",
    [(position, dtype) for position in (ROWS, -ROWS, 2**31 - 1) for dtype in (torch.int32, torch.int64)]
    + [(position, torch.int64) for position in (2**62, -(2**62), -(2**63))],
)
def test_a_position_without_a_row_is_never_looked_up(position, dtype):
    """The kernels write NaN and read nothing out of bounds: the rows beyond the table hold a number."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, _, cos, sin = inputs(device)
    positions = torch.tensor([[0, position, 1, 2, position]], dtype=dtype, device=device).expand(3, -1)
    around = [torch.full((3 * ROWS, 6), 7.0, device=device) for _ in range(2)]
    tables = [big[ROWS : 2 * ROWS].copy_(t) for big, t in zip(around, (cos, sin), strict=True)]
    for rotate in STEPS:
        y = torch.empty_like(q)
        rotate(RotateTensors.of([q], [y], *tables, positions), Rotation(12))
        assert y[:, [1, 4], :, :12].isnan().all()
        assert not y[:, [0, 2, 3]].isnan().any() and torch.equal(y[..., 12:], q[..., 12:])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_near_the_end_of_int32(dtype):
    """In the kernels no sum wraps around to a position that exists, nor to NO_POSITION."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cos, sin = ropelab.rotary_table(8, 16, device=device)
    frequencies = ropelab.rotary_frequencies(16, device=device)
    starts = [2**31 - 2, -(2**31) + 1, 0] + ([-(2**31) - 2, 2**63 - 2, -(2**63)] if dtype == torch.int64 else [])
    offsets = torch.tensor(starts, dtype=dtype, device=device)
    q = torch.randn(len(starts), 4, 1, 16, device=device)
    # The tokens without a row of the table; and the tokens beyond int32 or at INVALID_POSITION.
    beyond = [[True] * 4, [True] * 4, [False] * 4, *[[True] * 4] * 3][: len(starts)]
    no_int32 = [[False, False, True, True], [True, False, False, False], [False] * 4, *[[True] * 4] * 3][: len(starts)]
    for rotate in STEPS:
        for tables, table_free, nan in (((cos, sin), False, beyond), ((frequencies, frequencies), True, no_int32)):
            y = torch.empty_like(q)
            rotation = Rotation(16, offsets=True, table_free=table_free)
            rotate(RotateTensors.of([q], [y], *tables, offsets), rotation)
            assert y.isnan().all(-1).squeeze(-1).tolist() == nan and y.isnan().any(-1).squeeze(-1).tolist() == nan


@layouts
@pytest.mark.parametrize(
    ("dtype", "table_dtype"),
    [
        (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float64),
        (torch.float64, torch.bfloat16), (torch.float16, torch.float64),
    ],
)  # fmt: skip
def test_mixed_dtypes_at_negative_positions(device, layout, dtype, table_dtype):
    q = draw(1, 5, 2, 16, dtype=dtype, device=device)
    cos, sin = ropelab.rotary_table(12, 16, device=device, dtype=table_dtype)
    positions = torch.tensor([-11, 4, -3, 0, -1], device=device)
    y = ropelab.apply_rope(q, cos=cos, sin=sin, layout=layout, positions=positions)
    assert_rotated(y, q, cos, sin, layout=layout, positions=positions)


def test_gradients_of_positions_without_a_row_stay_in_bounds(device):
    """On a GPU an index out of bounds would end the process."""
    if device == "cpu":
        pytest.skip("needs a GPU: elsewhere it is refused before anything runs")
    q, _, cos, sin = inputs(device)
    cos.requires_grad_()
    y = ropelab.apply_rope(q, cos=cos, sin=sin, positions=torch.tensor([0, 1, 2, 3, ROWS], device=device))
    (grad,) = torch.autograd.grad(y[:, :4].sum(), cos)
    assert not grad[4:].any() and grad[:4].any()


def test_rows_of_the_tables_may_change_between_calls(device):
    """The same launch serves tables of any length, because every call passes the number of rows."""
    q, k, cos, sin = inputs(device)
    for rows in (ROWS, 9, 5, 17):
        check(q, k, cos[:rows], sin[:rows])
        positions = torch.randint(0, rows, (5,), device=device)
        check(q, k, cos[:rows], sin[:rows], positions=positions)
    with pytest.raises(ValueError, match="cos: expected a row for each of 5 positions, got 4"):
        ropelab.apply_rope(q, k, cos=cos[:4], sin=sin[:4])
    with pytest.raises(ValueError, match="sin: expected cos's shape"):
        ropelab.apply_rope(q, k, cos=cos, sin=sin[:9])


@pytest.mark.parametrize(
    "x, copied",
    [
        (torch.randn(()).expand(2, 3, 4, 6), 6),
        (torch.randn(3, 1, 1).expand(2, 3, 4, 6), 3 * 6),
        (torch.randn(2, 6, 3).mT[:, :, None].expand(2, 3, 4, 6), 2 * 3 * 6),
        (torch.randn(0, 1).expand(2, 0, 6), 0),
        (torch.randn(6, 2, 3, 4).movedim(0, -1), 2 * 3 * 4 * 6),
        (torch.randn(2, 1, 1, 6).expand(2, 3, 4, 6), None),
    ],
    ids=[
        "the gradient of a sum",
        "of a weighted sum",
        "turned and expanded",
        "empty",
        "features outermost",
        "readable",
    ],
)
def test_what_an_expanded_tensor_repeats_is_not_copied(x, copied):
    y = readable(x)
    assert torch.equal(y, x) and y.shape == x.shape
    if copied is None:
        assert y is x
    else:
        assert y.untyped_storage().nbytes() == copied * x.itemsize and (y.stride(-1) == 1 or not y.numel())


def order_of(shape, tables, *, positions=False, **rotation):
    """(grid of the launch for a lone q, which axis its neighbours differ in) without memory."""
    q, table = torch.empty(shape, device="meta"), torch.empty(tables, device="meta")
    where = torch.empty(shape[:2], dtype=torch.int32, device="meta") if positions else None
    tensors = RotateTensors.of([q], [q], table, table, where)
    launch = rotate_triton.plan_rotate(tensors, Rotation(shape[-1], **rotation))
    return launch.grid, launch.fixed[-1].INNERMOST


def test_batches_share_rows_of_tables_that_do_not_stay_in_the_cache():
    wide, tables = (4, 4096, 1, 2048), (4096, 1024)
    assert order_of(wide, tables) == ((4, 4096, 1), "batches")
    assert order_of(wide, tables, positions=True)[1] == "tokens"  # each batch has its own rows
    assert order_of(wide, (4, 4096, 1024))[1] == "tokens"
    assert order_of((1, *wide[1:]), tables)[1] == "tokens"
    assert order_of((4, 512, 1, 2048), (512, 1024))[1] == "tokens"  # 4 MiB of tables
    assert order_of((4, 65536, 32, 64), (65536, 32))[1] == "heads"  # few bytes beside 32 heads


def test_an_axis_of_the_grid_holds_65535_blocks():
    assert order_of((4, 65535, 1, 2048), (65535, 1024)) == ((4, 65535, 1), "batches")
    assert order_of((4, 65536, 1, 2048), (65536, 1024)) == ((65536, 1, 4), "heads")


def test_programs_that_share_rows_rotate_the_same(monkeypatch):
    q, _, cos, sin = inputs("cuda" if torch.cuda.is_available() else "cpu", seq_len=7, rotary_dim=16)
    q = q[:, :, :1]
    before = ropelab.apply_rope(q, cos=cos, sin=sin)
    monkeypatch.setattr(tile_of, "_TABLES_STAY", 0)
    forget(monkeypatch)
    after = ropelab.apply_rope(q, cos=cos, sin=sin)
    assert torch.equal(before, after)
    assert_rotated(after, q, cos, sin, layout="split_half", seq_format="bshd")


@pytest.mark.parametrize("shape", [(1, 2), (8, 1), (3, 3)])
def test_few_tokens_of_many_heads(device, shape):
    q, k = (draw(*shape, heads, 16, seq_format="bshd", dtype=torch.float32, device=device) for heads in (32, 8))
    cos, sin = ropelab.rotary_table(ROWS, 12, device=device)
    check(q, k, cos, sin)
    tensors = RotateTensors.of([q, k], [q, k], cos, sin)
    launch = rotate_triton.plan_rotate(tensors, Rotation(12), Tile(1, 1, 1))
    assert launch.grid[0] * launch.grid[2] == 32 * shape[0] * shape[1]  # a program for each head of q


def test_offsets_of_a_tile_have_64_bits_from_2_31_elements_on():
    """A head lies as far from the first of its tile as its stride says, so large strides need no large tensor."""
    for head_stride, wide in ((2**26, False), (2**28, True)):  # the bound is 24 strides
        q = torch.empty_strided((1, 1, 8, 4), (8 * head_stride, 8 * head_stride, head_stride, 1), device="meta")
        cos = torch.empty(1, 2, device="meta")
        tensors = RotateTensors.of([q], [q], cos, cos, None)
        chosen = addressing.turning(tensors, Rotation(4), torch.float32, [q], 1, 2, False)
        assert chosen["OFFSETS_64"] is wide


def test_whole_heads_of_a_token_without_a_position_are_zeros():
    """Also the features before and after those that rotate."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, _, cos, sin = inputs(device)
    positions = torch.tensor([[0, NO_POSITION, 1, 2, NO_POSITION]], device=device).expand(3, -1)
    y = torch.empty_like(q)
    t = RotateTensors.of([q], [y], cos, sin, positions)
    run(rotate_triton.plan_rotate, t, Rotation(12, first=2), Tile(1, 4, 1))
    assert not y[:, [1, 4]].any() and torch.equal(y[:, [0, 2, 3], :, :2], q[:, [0, 2, 3], :, :2])
