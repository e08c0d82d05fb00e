"""`rotate_cached_keys` turns the keys in slots of a cache as `apply_rope` would, and touches nothing else."""

from dataclasses import replace
from itertools import product

import pytest
import torch

import ropelab
from ropelab import NO_POSITION
from ropelab.angles.frequencies import inverse_frequencies
from ropelab.call import cached_keys
from ropelab.conformance.bounds import (
    NO_ROUNDING,
    Arithmetic,
    Rounding,
    exact,
    inexact_rotation_bound,
    rotate_exactly,
    rotation_bound,
)
from ropelab.conformance.cache_bounds import float8_bound
from ropelab.kernels import INTERPRETED
from ropelab.kernels.float8 import FLOAT8_DTYPES
from ropelab.layout.pairing import LAYOUTS, pairs
from tests.ops.test_cache_scales import rows_of, scales_of
from tests.ops.test_paged_cache import assert_equal, cache_of, quantized
from tests.support import forget

E4M3 = FLOAT8_DTYPES[0]
BLOCKS, SIZE = 5, 4
layouts = pytest.mark.parametrize("layout", LAYOUTS)


class Cached:
    """A cache of random keys, slots of which some do not exist or are to stay, and a delta for each."""

    def __init__(self, device, *, heads=3, head_dim=16, rotary_dim=None, dtype=torch.float32, memory="NHD", count=9):
        self.cache = cache_of(memory, BLOCKS, SIZE, heads, head_dim, dtype, device)
        self.cache.copy_(torch.randn(self.cache.shape))
        self.slots = torch.randperm(BLOCKS * SIZE)[:count].to(device)
        self.slots[1::4] = -1
        self.deltas = torch.randint(-19, 20, (count,), device=device)
        cos, sin = ropelab.rotary_table(20, rotary_dim or head_dim, device=device)
        self.options = {"cos": cos, "sin": sin}

    def __call__(self, **changes):
        deltas = changes.pop("deltas", self.deltas)
        return ropelab.rotate_cached_keys(self.cache, self.slots, deltas, **self.options | changes)

    def rows(self, x):
        """The rows of the slots that exist, ``[n, ...]``."""
        at = self.slots[self.slots >= 0].long()
        return x[at // SIZE, at % SIZE]

    def expected(self, rows, x=None):
        """``x``, by default the cache, with other rows in the slots that exist."""
        x = (self.cache if x is None else x).clone()
        at = self.slots[self.slots >= 0].long()
        if x.dtype in FLOAT8_DTYPES:
            x.view(torch.uint8)[at // SIZE, at % SIZE] = rows.view(torch.uint8)
        else:
            x[at // SIZE, at % SIZE] = rows
        return x

    def turned(self, rows):
        """The rows of the slots that exist as `apply_rope` turns them."""
        deltas = self.deltas.expand(len(self.slots))[self.slots >= 0]
        return ropelab.apply_rope(rows, positions=deltas, seq_format="thd", **self.options)


@layouts
@pytest.mark.parametrize("dtype", FLOAT8_DTYPES)
@pytest.mark.parametrize("case", [{}, {"head_dim": 21, "rotary_dim": 8}, {"memory": "HND"}], ids=str)
def test_8_bit_floats_turn_without_their_scale(device, case, dtype, layout):
    """Every code occurs, also NaN; a number beyond the largest becomes the largest."""
    call = Cached(device, dtype=dtype, count=20, **case)
    codes = torch.randint(256, call.cache.shape, dtype=torch.uint8, device=call.cache.device)
    call.cache.copy_(codes.view(dtype).float().nan_to_num(posinf=torch.nan, neginf=torch.nan))
    call.options["layout"] = layout
    rows = call.turned(call.rows(call.cache.float()))
    expected = call.expected(quantized(rows, dtype, None).to(call.cache.device))
    call()
    assert_equal(call.cache, expected)


@layouts
@pytest.mark.parametrize("dtype", FLOAT8_DTYPES)
@pytest.mark.parametrize("case", [{}, {"head_dim": 21, "rotary_dim": 8}, {"heads": 1, "head_dim": 40}], ids=str)
def test_every_row_gets_a_new_scale(device, case, dtype, layout):
    """All features of the row are rounded again, those that do not rotate too."""
    call = Cached(device, dtype=dtype, **case)
    scales = (torch.rand(call.cache.shape[:3]) + 0.01).to(call.cache.device)
    call.options["layout"] = layout
    rows = call.turned(call.rows(call.cache.float())) * call.rows(scales)[..., None]
    scale = scales_of(rows, dtype)
    expected = call.expected(rows_of(rows, dtype, scale).to(call.cache.device))
    expected_scales = call.expected(scale.to(scales.device), scales)
    call(k_scale_cache=scales)
    assert_equal(scales, expected_scales)
    assert_equal(call.cache, expected)


@pytest.mark.parametrize("dtype", [torch.float64, *FLOAT8_DTYPES])
def test_wider_tables(device, dtype):
    call = Cached(device, dtype=dtype)
    call.options = {name: x.double() for name, x in call.options.items()}
    rows = call.rows(call.cache if dtype == torch.float64 else call.cache.float()).double()
    rows = call.turned(rows)
    expected = call.expected(rows if dtype == torch.float64 else quantized(rows.float(), dtype, None).to(rows.device))
    call()
    assert_equal(call.cache, expected)


@layouts
@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3])
def test_a_latent_cache(device, dtype, layout):
    """The tail of every entry turns; with a scale for each entry the latent vector is rounded again."""
    call = Cached(device, heads=1, head_dim=48, rotary_dim=8, dtype=dtype)
    call.options |= {"rotary_slice": (40, 48), "layout": layout}
    rows = call.rows(call.cache)
    rows = call.turned(rows.float() if dtype == E4M3 else rows)
    entries = call.cache[:, :, 0].clone()
    expected = call.expected(quantized(rows, dtype, None).to(entries.device) if dtype == E4M3 else rows)
    assert ropelab.rotate_cached_keys(entries, call.slots, call.deltas, **call.options) is entries
    assert_equal(entries, expected[:, :, 0])
    if dtype == E4M3:
        entries, scales = call.cache[:, :, 0].clone(), torch.full((BLOCKS, SIZE), 0.25, device=entries.device)
        scale = scales_of(rows * 0.25, dtype)
        ropelab.rotate_cached_keys(entries, call.slots, call.deltas, k_scale_cache=scales, **call.options)
        assert_equal(entries, call.expected(rows_of(rows * 0.25, dtype, scale).to(entries.device))[:, :, 0])
        assert_equal(scales, call.expected(scale.to(scales.device), torch.full_like(scales, 0.25)[..., None])[..., 0])


def test_slots_that_stay(device, monkeypatch):
    """A slot beyond the cache, a negative slot, and a slot whose delta is NO_POSITION."""
    monkeypatch.setattr("ropelab.cached_keys.ROTATE", replace(cached_keys.ROTATE, check_contents=lambda *given: None))
    for dtype in (torch.float32, E4M3):
        call = Cached(device, dtype=dtype)
        scales = None if dtype != E4M3 else torch.ones(call.cache.shape[:3], device=call.cache.device)
        call.slots[0], call.slots[2], call.slots[3] = BLOCKS * SIZE, 2**40, -(2**40)
        call.slots[4:] = call.slots[4:].clamp(min=0)
        call.deltas[4:] = NO_POSITION
        before = call.cache.clone()
        call(k_scale_cache=scales)
        assert_equal(call.cache, before)
        assert scales is None or (scales == 1).all()


def test_no_delta_changes_no_number(device):
    for dtype in (torch.bfloat16, E4M3):
        call = Cached(device, dtype=dtype)
        before = call.cache.clone()
        call(deltas=0)
        assert_equal(call.cache, before)


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize("block_rows", [1, 8, 32])
@pytest.mark.parametrize("passes", [1, 2, 3])
@pytest.mark.parametrize("heads", [1, 3, 24])
def test_programs_of_any_size_give_the_same_bits(monkeypatch, block_rows, passes, heads):
    from ropelab.kernels import tile_of

    tile = tile_of.CacheTile(block_rows, 1, 4, passes)
    monkeypatch.setattr(tile_of, "cached_keys", lambda *arguments: tile)
    forget(monkeypatch)
    call = Cached("cpu", heads=heads)
    expected = call.expected(call.turned(call.rows(call.cache)))
    with ropelab.use_backend("triton"):
        call()
    assert_equal(call.cache, expected)


# ------------------------------------------------------------------------------ several axes, and other frequencies

AXES = ropelab.mrope_axes([3, 3, 2])
LONG = {
    "head_dim": 16, "max_position_embeddings": 64, "original_max_position_embeddings": 16, "model_type": "phi3",
    "rope_parameters": {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 16,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
        "long_factor": [2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
    },
}  # fmt: skip
SHORT = ropelab.rope_from_config(LONG)
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16}
PAIRS_OF_ROPES = {
    "LongRoPE": (SHORT, SHORT.at_length(64)),
    "YaRN of another base": (
        replace(SHORT, axes=AXES), replace(ropelab.rope_from_config(LONG | {"rope_parameters": YARN}), axes=AXES),
    ),
    "a part of a head": (ropelab.Rope(torch.rand(4), first_feature=5), ropelab.Rope(-torch.rand(4), first_feature=5)),
    "written in halves": (
        ropelab.Rope(torch.rand(8), layout="interleaved", out_layout="split_half"),
        ropelab.Rope(torch.rand(8), attention_factor=2.0),
    ),
}  # fmt: skip


def test_one_number_along_all_axes(device):
    call = Cached(device)
    before, found = call.cache.clone(), []
    for axes, deltas in ((None, 7), (AXES, 7), (AXES, torch.tensor(7)), (AXES, torch.tensor([7, 7, 7, 3]))):
        call.cache.copy_(before)
        call(axes=axes, deltas=deltas.to(before.device) if isinstance(deltas, torch.Tensor) else deltas)
        found.append(call.cache.clone())
    assert all(torch.equal(found[0], one) for one in found[1:]) and not torch.equal(found[0], before)


@pytest.mark.parametrize("table_free", [False, True])
@pytest.mark.parametrize("name", PAIRS_OF_ROPES)
def test_keys_come_to_other_frequencies_and_back(device, name, table_free):
    """In float64 to what a first rotation by the others makes of them; computed angles have the errors of float32."""
    old, new = PAIRS_OF_ROPES[name]
    call = Cached(device, dtype=torch.float64, count=20)
    positions = torch.randint(16, (20,) if old.axes is None else (3, 20), device=call.slots.device)
    made = {"dtype": torch.float64, "device": positions.device}
    k = call.rows(call.cache)

    def rotated(rope):
        cos, sin = rope.tables(16, **made)
        return ropelab.apply_rope(
            k, cos=cos, sin=sin, layout=rope.layout, out_layout=rope.out_layout, axes=rope.axes, seq_format="thd",
            positions=positions[..., call.slots >= 0], rotary_slice=rope.rotary_slice,
        )  # fmt: skip

    def turned(change):
        angles = dict(zip(("cos", "sin"), change.tables(16, **made), strict=True))
        call.options = {"frequencies": change.frequencies(positions.device)} if table_free else angles
        call(deltas=positions, layout=change.layout, axes=change.axes, rotary_slice=change.rotary_slice)
        return call.rows(call.cache)

    near = dict.fromkeys(("rtol", "atol"), 1e-5 if table_free else 1e-13)
    call.cache.copy_(call.expected(rotated(old)))
    there = replace(old, inverse_frequencies=new.inverse_frequencies, attention_factor=new.attention_factor)
    torch.testing.assert_close(turned(new.relative_to(old)), rotated(there), **near)
    torch.testing.assert_close(turned(old.relative_to(new)), rotated(old), **near)


def test_rotations_of_other_features_are_not_relative():
    rope = ropelab.Rope(torch.rand(8))
    for other in (
        ropelab.Rope(torch.rand(4)), replace(rope, first_feature=2), replace(rope, layout="interleaved"),
        replace(rope, axes=AXES), replace(rope, out_layout="interleaved"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="other: expected the features, layout and axes"):
            rope.relative_to(other)
    with pytest.raises(TypeError, match="other: expected a Rope, got int 3"):
        rope.relative_to(3)


# -------------------------------------------------------------------------------------------------------- the error

ROUNDED = {
    "float32": (torch.float32, None), "float16": (torch.float16, None), "bfloat16": (torch.bfloat16, None),
    "8 bits": (E4M3, 1.0), "8 bits, a scale for each row": (E4M3, None),
}  # fmt: skip


@layouts
@pytest.mark.parametrize(
    "name, fault, by",
    [
        *product(ROUNDED, ("", "the wrong sign"), ("positions",)),
        *product(("bfloat16", "8 bits, a scale for each row"), ("", "the wrong sign"), ("axes", "frequencies")),
        ("8 bits, a scale for each row", "a scale that stays", "positions"),
    ],
)
def test_the_bound_of_two_rotations_holds(device, name, fault, by, layout):
    """Against two exact rotations: by positions and deltas, or by old frequencies and the difference to new ones.

    Faults exceed the bound.
    """
    sign = -1 if fault == "the wrong sign" else 1
    dtype, scale = ROUNDED[name]
    count, heads, dim, is_float8 = 16, 3, 32, dtype == E4M3
    source = torch.float16 if is_float8 else dtype
    k = torch.randn(count, heads, dim).to(device, source)
    call = Cached(device, heads=heads, head_dim=dim, dtype=dtype, count=count)
    call.slots = torch.arange(count, device=k.device)
    axes = ropelab.mrope_axes([6, 6, 4]) if by == "axes" else None
    shape = (count,) if axes is None else (3, count)
    positions, deltas = torch.randint(1, 10, shape), torch.randint(1, 10, shape)
    change = call.options
    if by == "frequencies":
        old, new = (ropelab.Rope(inverse_frequencies(dim, base), layout=layout) for base in (1e4, 3e6))
        cos, sin = new.relative_to(old).tables(20, device=k.device)
        deltas, change = positions, {"cos": cos, "sin": sin}
    scales = torch.ones(BLOCKS, SIZE, heads, device=k.device)
    made = {"k_scale_cache": scales, "v_scale": torch.ones(1, device=k.device)} if is_float8 and scale is None else {}
    ropelab.rope_and_cache(
        k, k, k, call.cache, torch.zeros_like(call.cache), call.slots, positions=positions.to(k.device), layout=layout,
        axes=axes, **call.options, **made,
    )  # fmt: skip
    first = exact(call.rows(scales).cpu())[..., None]
    again = {"k_scale_cache": scales} if "k_scale_cache" in made else {}
    before = scales.clone()
    call(deltas=sign * deltas.to(k.device), layout=layout, axes=axes, **again | change)
    if fault == "a scale that stays":
        scales.copy_(before)
    second = exact(call.rows(scales).cpu())[..., None]

    compute = Rounding.nearest(torch.float32)
    store = Arithmetic.of_kernel(source, interpreted=INTERPRETED).store
    columns = []
    for tables, where in ((call.options, positions), (change, deltas)):
        of_tokens = ropelab.axial_tables(*(t.cpu() for t in tables.values()), where.view(-1, count), axes or [0] * 16)
        columns.append([exact(t[:, None]) for t in of_tokens])
    pair = pairs(exact(k), layout)
    y = rotate_exactly(*pair, *columns[0])
    bound = rotation_bound(*pair, *columns[0], Arithmetic(NO_ROUNDING, compute, store))
    kept = NO_ROUNDING if is_float8 else store
    if is_float8:
        bound = [float8_bound(a, e, first, dtype, compute) * first for a, e in zip(y, bound, strict=True)]
    bound = inexact_rotation_bound(*y, *bound, *columns[1], Arithmetic(NO_ROUNDING, compute, kept))
    y = rotate_exactly(*y, *columns[1])
    if is_float8:  # in the arithmetic a row scale multiplies once more
        bound = [e + compute.of(abs(a) + e) for a, e in zip(y, bound, strict=True)]
        bound = [float8_bound(a, e, second, dtype, compute) * second for a, e in zip(y, bound, strict=True)]
    found = pairs(exact(call.rows(call.cache.float() if is_float8 else call.cache).cpu()) * second, layout)
    excess = max(float((abs(a - b) / e).max()) for a, b, e in zip(found, y, bound, strict=True))
    assert excess > 1 if fault else 0.2 < excess <= 1, f"error {excess:.3f} times its bound"
