"""Positions along several axes, read by the kernels: the bits are those of `axial_tables`."""

import random
from dataclasses import replace

import pytest
import torch

import ropelab
from ropelab import NO_POSITION, apply_qk_norm_rope, apply_rope, axial_tables, mrope_axes, rope_and_cache
from ropelab.angles.frequencies import inverse_frequencies
from ropelab.angles.rope_parameters import Rope
from ropelab.arguments import POSITION_DTYPES
from ropelab.kernels import Rotation, rotate_torch, rotate_triton, tile_of, tiles
from ropelab.kernels.run import run
from ropelab.kernels.tensors import RotateTensors
from ropelab.layout.pairing import LAYOUTS, join
from ropelab.layout.seq_format import SEQ_AXIS, SEQ_FORMATS
from tests.support import assert_rotated, draw

ROWS, BATCH, SEQ_LEN = 40, 2, 5
# name -> head_dim, the axis of each pair
SECTIONS = {
    "blocks of eight": (128, mrope_axes((16, 24, 24))),
    "blocks of four": (64, mrope_axes((8, 12, 12))),
    "blocks of any width": (32, mrope_axes((5, 3, 8))),
    "interleaved": (128, mrope_axes((24, 20, 20), mrope_interleaved=True)),
    "interleaved, a quarter of the head": (256, mrope_axes((11, 11, 10), mrope_interleaved=True)),
    "no order": (24, (2, 0, 3, 3, 1, 0, 0, 2)),
    "one axis": (16, (0,) * 8),
    "an axis that no pair reads": (16, (1, 1, 2, 2, 1, 1, 2, 2)),
}
CASES = pytest.mark.parametrize(("head_dim", "axes"), SECTIONS.values(), ids=SECTIONS)


def inputs(device, head_dim, axes, *, seq_format="bshd", heads=(3, 1), dtype=torch.bfloat16):
    """q and k, tables, and positions along the axes: negative ones, some missing along an axis, a token without any."""
    batch = 1 if seq_format == "thd" else BATCH
    xs = [draw(batch, SEQ_LEN, n, head_dim, seq_format=seq_format, dtype=dtype, device=device) for n in heads]
    cos, sin = ropelab.rotary_table(ROWS, 2 * len(axes), device=device)
    shape = (SEQ_LEN,) if seq_format == "thd" else (BATCH, SEQ_LEN)
    positions = torch.randint(1 - ROWS, ROWS, (max(axes) + 1, *shape), device=device)
    positions[axes[0], ..., 1] = positions[axes[-1], ..., 2] = positions[..., 3] = NO_POSITION
    return xs, {"cos": cos, "sin": sin}, positions


def without_token(ys, seq_format, token=3):
    """What `axial_tables` gives, with zeros for the token that has no position along any axis."""
    for y in ys:
        y.select(SEQ_AXIS[seq_format], token).zero_()
    return ys


def gathered(tables, positions, axes):
    return dict(zip(("cos", "sin"), axial_tables(**tables, positions=positions, axes=axes), strict=True))


@CASES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_are_those_of_axial_tables(device, head_dim, axes, layout):
    seq_format = random.choice(SEQ_FORMATS)
    xs, tables, positions = inputs(device, head_dim, axes, seq_format=seq_format)
    options = {"layout": layout, "seq_format": seq_format}
    ys = apply_rope(*xs, **tables, positions=positions.to(random.choice(POSITION_DTYPES)), axes=axes, **options)
    expected = without_token(apply_rope(*xs, **gathered(tables, positions, axes), **options), seq_format)
    for y, e, x in zip(ys, expected, xs, strict=True):
        assert torch.equal(y, e)
        assert_rotated(y, x, **tables, positions=positions, axes=axes, **options)


def test_an_axis_that_no_pair_reads_counts_as_a_position(device):
    """The features that do not rotate stay; the pairs, which have no position, are zero. So says the definition."""
    (q, _), tables, positions = inputs(device, 16, (1, 1), dtype=torch.float32)
    positions[:, ..., 3] = torch.tensor([2, NO_POSITION], device=device)[:, None]
    y = apply_rope(q, **tables, positions=positions, axes=(1, 1))
    assert torch.equal(y[:, 3, :, 4:], q[:, 3, :, 4:]) and not y[:, 3, :, :4].any()
    assert_rotated(y, q, **tables, positions=positions, axes=(1, 1), layout="split_half", seq_format="bshd")


@CASES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_qk_norm(device, head_dim, axes, layout):
    xs, tables, positions = inputs(device, head_dim, axes, dtype=torch.float32)
    leaves = [t.requires_grad_() for t in (*xs, *(torch.randn(head_dim, device=device) for _ in xs))]

    def function(*leaves):
        return apply_qk_norm_rope(*leaves, **tables, positions=positions, axes=axes, layout=layout)

    ys = function(*leaves)
    others = apply_qk_norm_rope(*leaves, **gathered(tables, positions, axes), layout=layout)
    cotangents = without_token([torch.randn_like(y) for y in ys], "bshd")
    found, expected = (torch.autograd.grad(y, leaves, cotangents) for y in (ys, others))
    for y, e in zip(ys, without_token([y.clone() for y in others], "bshd"), strict=True):
        assert torch.equal(y, e)
    for f, e in zip(found, (*without_token([*expected[:2]], "bshd"), *expected[2:]), strict=True):
        torch.testing.assert_close(f, e)
    _, vjp = torch.func.vjp(function, *(leaf.detach() for leaf in leaves))
    for f, e in zip(vjp(tuple(cotangents)), found, strict=True):
        torch.testing.assert_close(f, e)


@CASES
def test_one_pass_into_a_cache(device, head_dim, axes):
    (q, k), tables, positions = inputs(device, head_dim, axes, seq_format="thd")
    slots = torch.tensor([7, 2, -1, 4, 0], device=device)
    results = []
    for where in ({**tables, "positions": positions, "axes": axes}, gathered(tables, positions, axes)):
        caches = [torch.zeros(2, 4, 1, head_dim, dtype=q.dtype, device=device) for _ in range(2)]
        results.append([rope_and_cache(q, k, k, *caches, slots, **where), *caches])
    (y, keys, values), (other, other_keys, other_values) = results
    assert torch.equal(y, without_token([other], "thd")[0])
    other_keys[1, 0] = 0  # the slot 4 of the token without a position
    assert torch.equal(keys, other_keys) and torch.equal(values, other_values)


@CASES
def test_without_tables_a_pair_turns_as_along_its_axis_alone(device, head_dim, axes):
    (q, _), _, positions = inputs(device, head_dim, axes)
    positions[positions == NO_POSITION] = 3
    frequencies = Rope(inverse_frequencies(2 * len(axes))).frequencies(device)
    for layout in LAYOUTS:
        y = apply_rope(q, frequencies=frequencies, positions=positions, axes=axes, layout=layout)
        for axis in set(axes):
            plane = torch.tensor([a == axis for a in axes], device=device)
            one = apply_rope(q, frequencies=frequencies, positions=positions[axis], layout=layout)
            columns = join(plane, plane, layout).nonzero()[:, 0]
            assert torch.equal(y[..., columns], one[..., columns])
        positions[axes[0], 0, 0] = NO_POSITION
        y = apply_rope(q, frequencies=frequencies, positions=positions, axes=axes, layout=layout)
        plane = torch.tensor([a == axes[0] for a in axes], device=device)
        assert not y[0, 0, :, join(plane, plane, layout).nonzero()[:, 0]].any()


@CASES
@pytest.mark.parametrize("missing", [ROWS, -ROWS, ropelab.kernels.rotation.INVALID_POSITION, -(2**63)])
def test_a_position_without_a_row_makes_nan_of_the_pairs_of_its_axis(device, head_dim, axes, missing):
    """The host refuses such positions in CPU memory, so the kernels are called themselves."""
    (q, _), tables, positions = inputs(device, head_dim, axes, dtype=torch.float32)
    positions[positions == NO_POSITION] = 0
    positions[axes[0], 0, 2] = missing
    rotation = Rotation(2 * len(axes), axes=axes)
    tensors = RotateTensors.of((q,), (torch.empty_like(q),), *tables.values(), positions.movedim(0, -1))
    if ropelab.kernels.uses_triton(q):
        run(rotate_triton.plan_rotate, tensors, rotation)
    else:
        rotate_torch.rotate(tensors, rotation)
    plane = torch.tensor([a == axes[0] for a in axes], device=device)
    expected = torch.zeros_like(q, dtype=torch.bool)
    expected[0, 2, :, : 2 * len(axes)] = torch.cat((plane, plane))
    assert torch.equal(tensors.q_out.isnan(), expected)


@pytest.mark.parametrize("name", ["interleaved", "no order"])
def test_every_tile_gives_the_same_bits(name):
    head_dim, axes = SECTIONS[name]
    (q, k), tables, positions = inputs("cuda" if torch.cuda.is_available() else "cpu", head_dim, axes, heads=(8, 8))
    rotation, outs = Rotation(2 * len(axes), axes=axes), []
    results = torch.empty_like(q), torch.empty_like(k)
    call = RotateTensors.of((q, k), results, *tables.values(), positions.movedim(0, -1))
    work = tile_of.work_of(call, rotation)
    found = tiles.candidates(replace(work, rotation=replace(rotation, axes=None)))
    shared = [replace(tile, shares_columns=True) for tile in found if tiles.can_share(work, tile)]
    assert shared
    for tile in found + shared:
        run(rotate_triton.plan_rotate, call, rotation, tile)
        outs.append((call.q_out.clone(), call.k_out.clone()))
    for found in outs[1:]:
        assert all(torch.equal(f, e) for f, e in zip(found, outs[0], strict=True))


@pytest.mark.gpu
def test_a_cuda_graph_reads_new_positions():
    head_dim, axes = SECTIONS["interleaved"]
    (q, k), tables, positions = inputs("cuda", head_dim, axes)
    apply_rope(q, k, **tables, positions=positions, axes=axes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, _ = apply_rope(q, k, **tables, positions=positions, axes=axes)
    positions.copy_(positions.flip(-1))
    graph.replay()
    assert torch.equal(y, apply_rope(q, k, **tables, positions=positions, axes=axes)[0])


def test_positions_may_have_further_axes(device):
    (q, _), tables, positions = inputs(device, 16, (0, 1) * 4)
    further = torch.cat((positions, torch.full_like(positions[:1], NO_POSITION)))
    y = apply_rope(q, **tables, positions=further, axes=(0, 1) * 4)
    assert torch.equal(y, apply_rope(q, **tables, positions=positions, axes=(0, 1) * 4))
