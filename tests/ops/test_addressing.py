"""A token reads the right row of the right table, and the right features rotate: by the definition and by laws."""

import pytest
import torch

import ropelab
from ropelab.kernels import NO_POSITION, Rotation, addressing, backend, rotate_torch, rotate_triton
from ropelab.kernels.tensors import RotateTensors
from ropelab.kernels.tiles import Tile
from ropelab.layout.pairing import LAYOUTS, join, permutation
from ropelab.layout.seq_format import SEQ_AXIS, SEQ_FORMATS, from_bshd
from tests.support import assert_rotated, draw, forget

layouts = pytest.mark.parametrize("layout", LAYOUTS)
formats = pytest.mark.parametrize("seq_format", SEQ_FORMATS)

ROWS = 23


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


def tokens(seq_format, q) -> tuple[int, int]:
    return (
        (1, len(q)) if seq_format == "thd" else (q.shape[{"sbhd": 1}.get(seq_format, 0)], q.shape[SEQ_AXIS[seq_format]])
    )


@layouts
@formats
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_one_position_per_token(device, layout, seq_format, dtype):
    q, k, cos, sin = inputs(device, seq_format)
    batch, seq_len = tokens(seq_format, q)
    shapes = [(seq_len,)] if seq_format == "thd" else [(seq_len,), (batch, seq_len)]
    for shape in shapes:
        positions = torch.randint(1 - ROWS, ROWS, shape, dtype=dtype, device=device)
        check(q, k, cos, sin, layout=layout, seq_format=seq_format, positions=positions)


@formats
def test_offsets(device, seq_format):
    q, k, cos, sin = inputs(device, seq_format)
    batch, seq_len = tokens(seq_format, q)
    of_each = torch.randint(1 - ROWS, ROWS - seq_len + 1, (batch,), device=device)
    for offsets in (ROWS - seq_len, 1 - ROWS, of_each, of_each.int()):
        check(q, k, cos, sin, seq_format=seq_format, offsets=offsets)


def test_positions_of_any_strides(device):
    q, k, cos, sin = inputs(device)
    positions = torch.randint(0, ROWS, (5, 3), device=device)
    expected = ropelab.apply_rope(q, k, cos=cos, sin=sin, positions=positions.T.contiguous())
    wide = torch.stack((positions, positions), dim=-1)[..., 1]
    for same in (positions.T, wide.T):
        actual = ropelab.apply_rope(q, k, cos=cos, sin=sin, positions=same)
        assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


@layouts
def test_position_p_undoes_minus_p(device, layout):
    q, k, cos, sin = inputs(device, rotary_dim=16)
    positions = torch.arange(5, device=device)
    options = {"cos": cos, "sin": sin, "layout": layout}
    there = ropelab.apply_rope(q, k, positions=positions, inverse=True, **options)
    back = ropelab.apply_rope(q, k, positions=-positions, **options)
    assert torch.equal(there[0], back[0]) and torch.equal(there[1], back[1])


@formats
@layouts
def test_a_token_without_a_position_is_zeros_and_gets_zero_gradient(device, seq_format, layout):
    """This also holds where the token's features, or their cotangents, are NaN because nobody initialised them."""
    q, k, cos, sin = inputs(device, seq_format)
    batch, seq_len = tokens(seq_format, q)
    positions = torch.randint(0, ROWS, (seq_len,), device=device)
    positions[[0, 2, seq_len - 1]] = NO_POSITION
    nowhere = from_bshd((positions == NO_POSITION)[None, :, None, None], seq_format)
    finite = [torch.where(nowhere, 0.0, x) for x in (q, k)]
    options = {"cos": cos, "sin": sin, "layout": layout, "seq_format": seq_format, "positions": positions}
    expected = ropelab.apply_rope(*finite, **options)
    poisoned = [torch.where(nowhere, float("nan"), x).requires_grad_() for x in (q, k)]
    actual = ropelab.apply_rope(*poisoned, **options)
    grads = torch.autograd.grad(actual, poisoned, [torch.where(nowhere, float("nan"), y) for y in actual])
    for y, e, grad, x in zip(actual, expected, grads, finite, strict=True):
        assert torch.equal(y, e) and not y.masked_select(nowhere).any()
        assert not grad.masked_select(nowhere).any() and not grad.isnan().any()
        torch.testing.assert_close(grad, x)  # R^T R x
    with torch.no_grad():
        ropelab.apply_rope(*poisoned, inplace=True, **options)
    assert torch.equal(poisoned[0], expected[0]) and torch.equal(poisoned[1], expected[1])


def test_a_sequence_without_an_offset_is_zeros(device):
    q, k, cos, sin = inputs(device)
    offsets = torch.tensor([4, NO_POSITION, 0], device=device)
    rotated = ropelab.apply_rope(q, k, cos=cos, sin=sin, offsets=offsets)
    for y, x in zip(rotated, (q, k), strict=True):
        assert not y[1].any()
        assert_rotated(y, x, cos, sin, layout="split_half", offsets=offsets)
        assert torch.equal(y[0], ropelab.apply_rope(x[:1], cos=cos, sin=sin, offsets=4)[0])
        assert torch.equal(y[2], ropelab.apply_rope(x[2:], cos=cos, sin=sin)[0])


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
    for module in (rotate_torch, backend("rotate", q)):
        y = torch.empty_like(q)
        module.rotate(RotateTensors.of([q], [y], *tables, positions), Rotation(12))
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
    for module in (rotate_torch, backend("rotate", q)):
        for tables, table_free, nan in (((cos, sin), False, beyond), ((frequencies, frequencies), True, no_int32)):
            y = torch.empty_like(q)
            rotation = Rotation(16, offsets=True, table_free=table_free)
            module.rotate(RotateTensors.of([q], [y], *tables, offsets), rotation)
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


@layouts
def test_tables_of_each_batch(device, layout):
    q, k, *_ = inputs(device)
    angles = torch.randn(3, ROWS, 6, dtype=torch.float64, device=device)
    cos, sin = angles.cos().float(), angles.sin().float()
    check(q, k, cos, sin, layout=layout)
    check(q, k, cos, sin, layout=layout, offsets=7)
    check(q, k, cos, sin, layout=layout, positions=torch.randint(1 - ROWS, ROWS, (3, 5), device=device))
    check(q, k, cos.transpose(0, 1).contiguous().transpose(0, 1), sin, layout=layout)
    shared = cos[:1].expand(3, -1, -1), sin[:1].expand(3, -1, -1)
    rotated = ropelab.apply_rope(q, cos=shared[0], sin=shared[1], layout=layout)
    assert torch.equal(rotated, ropelab.apply_rope(q, cos=cos[0], sin=sin[0], layout=layout))


@layouts
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("rotary_slice", [(0, 16), (4, 14)])
def test_tables_with_a_column_per_feature(device, layout, inverse, rotary_slice):
    """The two columns of a pair differ, so this is no rotation, and the backward is the transpose, not the inverse."""
    q, k, *_ = inputs(device)
    first, end = rotary_slice
    cos, sin = torch.randn(2, ROWS, end - first, device=device)
    check(q, k, cos, sin, layout=layout, rotary_slice=rotary_slice, inverse=inverse)
    positions = torch.randint(1 - ROWS, ROWS, (5,), device=device)
    check(q, k, cos, sin, layout=layout, rotary_slice=rotary_slice, inverse=inverse, positions=positions)


@layouts
def test_tables_that_repeat_their_columns_are_the_narrow_ones(device, layout):
    q, k, cos, sin = inputs(device, rotary_dim=16)
    expected = ropelab.apply_rope(q, k, cos=cos, sin=sin, layout=layout)
    wide = {"cos": join(cos, cos, layout), "sin": join(sin, sin, layout)}
    actual = ropelab.apply_rope(q, k, layout=layout, rotary_slice=(0, 16), **wide)
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


@layouts
@formats
def test_any_slice_rotates(device, layout, seq_format):
    for rotary_slice in ((4, 16), (3, 7)):
        q, k, cos, sin = inputs(device, seq_format, rotary_dim=rotary_slice[1] - rotary_slice[0])
        check(q, k, cos, sin, layout=layout, seq_format=seq_format, rotary_slice=rotary_slice)


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("rotary_slice", [None, (4, 16)])
def test_read_in_one_layout_and_written_in_the_other(device, source, target, rotary_slice):
    q, k, cos, sin = inputs(device, rotary_dim=12)
    check(q, k, cos, sin, layout=source, out_layout=target, rotary_slice=rotary_slice)
    first, end = rotary_slice or (0, 12)
    y = ropelab.apply_rope(q, cos=cos, sin=sin, layout=source, out_layout=target, rotary_slice=rotary_slice)
    same = ropelab.apply_rope(q, cos=cos, sin=sin, layout=source, rotary_slice=rotary_slice)
    same[..., first:end] = same[..., first:end][..., permutation(12, source, target)]
    assert torch.equal(y, same)


@pytest.mark.parametrize("case", ["positions", "offsets", "batches", "features", "layouts"])
def test_gradients_of_tables(device, case):
    """First and second gradients agree with finite differences, for every way to find a row."""
    where: dict = {"inverse": case in ("batches", "features")}
    shape = (4, 2)
    if case == "positions":
        where["positions"] = torch.tensor([[2, -3], [0, NO_POSITION]], device=device)
    elif case == "offsets":
        where["offsets"] = torch.tensor([1, -2], device=device)
    elif case == "batches":
        shape = (2, 4, 2)
        where["offsets"] = 1
    elif case == "features":
        shape = (4, 4)
        where |= {"rotary_slice": (1, 5), "positions": torch.tensor([3, -1], device=device)}
    elif case == "layouts":
        where["out_layout"] = "interleaved"
    options = {"dtype": torch.float64, "device": device, "requires_grad": True}
    leaves = [torch.randn(2, 2, heads, 5, **options) for heads in (2, 1)]
    leaves += [torch.randn(shape, **options) for _ in range(2)]

    def rope(q, k, cos, sin):
        return ropelab.apply_rope(q, k, cos=cos, sin=sin, **where)

    assert torch.autograd.gradcheck(rope, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(rope, leaves, fast_mode=True)


@pytest.mark.parametrize("axes", [[0] * 2 + [1] * 3 + [2], [0, 1, 2, 0, 1, 0], [1] * 6])
@pytest.mark.parametrize("shape", [(3, 5), (3, 2, 5)])
def test_every_plane_reads_its_axis(device, axes, shape):
    """The result agrees with one rotation for each axis, in the planes of the axis."""
    q, k, cos, sin = inputs(device, batch=2)
    positions = torch.randint(1 - ROWS, ROWS, shape, device=device)
    tables = ropelab.axial_tables(cos, sin, positions, axes)
    for layout in LAYOUTS:
        rotated = ropelab.apply_rope(q, k, cos=tables[0], sin=tables[1], layout=layout)
        for axis in range(3):
            plane = torch.tensor([a == axis for a in axes], device=device)
            of_axis = torch.cat((join(plane, plane, layout), torch.full((4,), axis == 0, device=device)))
            expected = ropelab.apply_rope(q, k, cos=cos, sin=sin, layout=layout, positions=positions[axis])
            for a, e in zip(rotated, expected, strict=True):
                assert torch.equal(a[..., of_axis], e[..., of_axis])


def test_axial_tables_of_packed_tokens_and_of_none(device):
    q, k, cos, sin = inputs(device, "thd")
    positions = torch.randint(1 - ROWS, ROWS, (2, len(q)), device=device)
    positions[:, 3], positions[1, 5] = NO_POSITION, ROWS
    c, s = ropelab.axial_tables(cos, sin, positions, [0, 1] * 3)
    assert not c[3].any() and not s[3].any()
    assert c[5, 1::2].isnan().all() and not c[5, 0::2].isnan().any()
    y = ropelab.apply_rope(q, cos=c, sin=s, seq_format="thd")
    assert not y[3, :, :12].any() and torch.equal(y[3, :, 12:], q[3, :, 12:])
    for change, message in (
        ({"axes": [0, 1]}, "axes: expected an axis for each of the 6 columns of cos, got 2"),
        ({"axes": [0, 1, 2] * 2}, r"axes\[2\]: expected an integer >= 0 and < 2, got 2"),
        ({"positions": positions[0]}, r"positions: expected shape \[axes, S\]"),
        ({"positions": positions.float()}, "positions: expected one of int32, int64, got float32"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            ropelab.axial_tables(cos, sin, **({"positions": positions, "axes": [0, 1] * 3} | change))


def test_gradients_of_positions_without_a_row_stay_in_bounds(device):
    """On a GPU an index out of bounds would end the process."""
    if device == "cpu":
        pytest.skip("needs a GPU: elsewhere it is refused before anything runs")
    q, _, cos, sin = inputs(device)
    cos.requires_grad_()
    y = ropelab.apply_rope(q, cos=cos, sin=sin, positions=torch.tensor([0, 1, 2, 3, ROWS], device=device))
    (grad,) = torch.autograd.grad(y[:, :4].sum(), cos)
    assert not grad[4:].any() and grad[:4].any()


def test_qkv_of_one_buffer_packed_or_not(device):
    """q and k as views of a qkv projection: read where they lie, or rotated there, without a copy of v."""
    for shape, seq_format in (((2, 7), "bshd"), ((7, 2), "sbhd"), ((14,), "thd")):
        qkv = torch.randn(*shape, 4 + 2 + 2, 16, device=device)
        q, k = qkv[..., :4, :], qkv[..., 4:6, :]
        cos, sin = ropelab.rotary_table(ROWS, 16, device=device)
        options = {"cos": cos, "sin": sin, "seq_format": seq_format}
        expected = ropelab.apply_rope(q.contiguous(), k.contiguous(), **options)
        rotated = ropelab.apply_rope(q, k, **options)
        v = qkv[..., 6:, :].clone()
        ropelab.apply_rope(q, k, inplace=True, **options)
        for a, b, e in zip(rotated, (q, k), expected, strict=True):
            assert torch.equal(a, e) and torch.equal(b, e)
        assert torch.equal(qkv[..., 6:, :], v)


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
    y = addressing.readable(x)
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
    monkeypatch.setattr(rotate_triton, "_TABLES_STAY", 0)
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
    rotate_triton.rotate(RotateTensors.of([q], [y], cos, sin, positions), Rotation(12, first=2), tile=Tile(1, 4, 1))
    assert not y[:, [1, 4]].any() and torch.equal(y[:, [0, 2, 3], :, :2], q[:, [0, 2, 3], :, :2])
