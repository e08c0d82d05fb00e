"""The product that rotates: its results are those of torch up to their roundings, and its code has no waits."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import ropelab
from ropelab.call.angles import given_angles
from ropelab.kernels import HAS_TRITON, INTERPRETED, NO_POSITION, Rotation, projection_torch
from ropelab.kernels.rotation import Norm
from ropelab.kernels.run import run
from ropelab.kernels.tensors import ProjectionTensors

if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

from ropelab.kernels import projection_triton
from ropelab.kernels.tile_of import PROJECTION

TILE = replace(PROJECTION, tokens=32, inputs=32) if INTERPRETED else PROJECTION
plan = partial(projection_triton.plan_project, tile=TILE)
DEVICE, DTYPE = ("cpu", torch.float16) if INTERPRETED else ("cuda", torch.bfloat16)


def tensors(
    *, sequences=1, shared=False, tokens=40, inputs=48, q_heads=3, k_heads=1, head_dim=128, rotary_dim=None, norm=False,
    bias=False, positions=True, free=False, axes=None, dtype=DTYPE, tables=torch.float32,
):  # fmt: skip
    """Random tensors with a result of NaN; some tokens have no position, a negative one, or one without a row."""
    width, rotary_dim = (q_heads + 2 * k_heads) * head_dim, rotary_dim or head_dim

    def draw(*shape):
        return torch.randn(shape, device=DEVICE).to(dtype)

    if free:
        angles = given_angles(None, None, ropelab.rotary_frequencies(rotary_dim, device=DEVICE)).for_kernels
    else:
        angles = ropelab.rotary_table(64, rotary_dim, dtype=tables, device=DEVICE)
    where = None
    if positions:
        rows = 1 if shared else sequences
        where = torch.randint(-60, 60, (rows, tokens, *([] if axes is None else [max(axes) + 1])), device=DEVICE)
        for token, position in enumerate((NO_POSITION, 2**31 if free else 64, -1)):
            where[0, token] = position
        where = where.expand(sequences, *where.shape[1:])
    weights = [draw(head_dim) if norm else None for _ in range(2)]
    made = torch.full((sequences, tokens, width // head_dim, head_dim), torch.nan, device=DEVICE, dtype=dtype)
    return ProjectionTensors(
        None, None, draw(sequences, tokens, inputs), draw(width, inputs) / inputs**0.5,
        draw(width) if bias else None, None, *weights, made, *angles, where,
    )  # fmt: skip


CASES = {
    "adjacent pairs": {}, "halves": {"interleaved": False, "bias": True}, "no positions": {"positions": False},
    "a part of a head": {"rotary_dim": 64, "norm": True, "bias": True},
    "heads of 64": {"head_dim": 64, "q_heads": 5, "k_heads": 2, "norm": True, "interleaved": False},
    "heads of 256": {"head_dim": 256, "tokens": 70, "norm": True, "tables": torch.bfloat16},
    "one token": {"tokens": 1, "positions": False}, "back": {"transpose": True},
    "computed": {"free": True}, "computed, halves": {"free": True, "interleaved": False, "positions": False},
    "computed, a part": {"free": True, "head_dim": 64, "rotary_dim": 32, "norm": True},
    "axes": {"axes": (0,) * 16 + (1,) * 24 + (2,) * 24, "interleaved": False},
    "axes in turn": {"axes": (0, 1, 2) * 20 + (0,) * 4, "norm": True},
    "sequences": {"sequences": 3, "tokens": 13, "positions": False},
    "sequences, positions": {"sequences": 3, "tokens": 13},
    "sequences, positions for all": {"sequences": 3, "tokens": 13, "shared": True, "interleaved": False},
    "sequences, axes": {"sequences": 2, "tokens": 20, "axes": (0, 1, 2) * 20 + (0,) * 4},
    "sequences, computed": {"sequences": 3, "tokens": 13, "positions": False, "free": True},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_kernel_computes_what_torch_computes(name):
    """Both sum in float32 and round once, so they differ by a unit in the last place or, near zero, by the sums."""
    options = dict(CASES[name])
    interleaved, transpose = options.pop("interleaved", True), options.pop("transpose", False)
    given = tensors(**options)
    head_dim, q_heads, k_heads = (options.get(key, d) for key, d in (("head_dim", 128), ("q_heads", 3), ("k_heads", 1)))
    rotation = Rotation(
        options.get("rotary_dim", head_dim), interleaved=interleaved, out_interleaved=interleaved,
        transpose=transpose, table_free=options.get("free", False), axes=options.get("axes"),
    )  # fmt: skip
    assert projection_triton.serves(given, rotation)
    norm, first = Norm(1e-6) if options.get("norm") else None, 5
    made = [given._replace(qkv=given.qkv.clone()) for _ in range(2)]
    projection_torch.project(made[0], rotation, q_heads, k_heads, norm, first)
    run(plan, made[1], rotation, q_heads, k_heads, norm, first_position=first)
    right, found = (t.qkv.flatten(2).float() for t in made)
    sums = given.x.abs().float() @ given.weight.abs().float().T * 2.0**-20
    largest = right.nan_to_num().unflatten(-1, (-1, head_dim)).abs().amax(-1, keepdim=True).expand(
        *right.shape[:-1], -1, head_dim).flatten(-2)  # fmt: skip
    bound = torch.finfo(DTYPE).eps * right.nan_to_num().abs() + sums.amax() + 2.0**-18 * largest
    assert torch.equal(right.isnan(), found.isnan()) and bool(((right - found).nan_to_num().abs() <= bound).all())
    if options.get("positions", True):
        turning = (q_heads + k_heads) * head_dim
        assert not found[0, 0, :turning].any() and found[0, 1, :turning].isnan().any()
        assert found[0, :, turning:].isfinite().all()


@pytest.mark.parametrize(
    "change",
    [{"first": 2}, {"rotary_dim": 64, "interleaved": False}, {"full_width": True}, {"offsets": True},
     {"axes": (0, 1) * 32, "table_free": True}, {"out_interleaved": False}],
)  # fmt: skip
def test_what_the_kernel_does_not_serve(change):
    given = tensors()
    rotation = {"rotary_dim": 128, "interleaved": True, "out_interleaved": True} | change
    if "interleaved" in change:
        rotation["out_interleaved"] = change["interleaved"]
    assert not projection_triton.serves(given, Rotation(**rotation))
    plain = Rotation(128, interleaved=True, out_interleaved=True)
    several = tensors(sequences=3)
    apart = several.positions.mT.contiguous().mT  # neither the positions of all sequences in a row nor one row for all
    assert projection_triton.serves(several, plain)
    assert not projection_triton.serves(several._replace(positions=apart), plain)
    assert projection_triton.serves(given, plain) and not projection_triton.serves(tensors(head_dim=96), plain)
    for name, x in (("x", given.x.double()), ("x", given.x[:, :0]), ("cos", given.cos.double())):
        assert not projection_triton.serves(given._replace(**{name: x}), plain)
    given = tensors(bias=True, norm=True)
    for name in ("bias", "q_weight", "k_weight", "cos", "sin"):  # whose elements the kernel reads side by side
        x = getattr(given, name)
        assert not projection_triton.serves(given._replace(**{name: torch.stack((x, x), -1)[..., 0]}), plain)


@pytest.mark.parametrize("head_dim, q_heads, k_heads", [(128, 3, 2), (64, 5, 1), (256, 2, 1)])
@pytest.mark.parametrize("norm", [False, True])
def test_k_and_v_in_slots_are_those_of_the_product(head_dim, q_heads, k_heads, norm):
    """Tokens without a slot, with a negative one or one beyond the cache write nothing; other slots keep their bits."""
    given = tensors(tokens=70, head_dim=head_dim, q_heads=q_heads, k_heads=k_heads, norm=norm, bias=True)
    slots = torch.randperm(80, device=DEVICE)[:66].to(torch.int32 if norm else torch.int64)
    slots[[5, 40]] = torch.tensor([-1, 80], dtype=slots.dtype, device=DEVICE)
    rotation, eps = Rotation(head_dim, interleaved=True, out_interleaved=True), Norm(1e-6) if norm else None
    run(plan, given, rotation, q_heads, k_heads, eps)
    q, *kv = given.qkv[0].split((q_heads, k_heads, k_heads), 1)
    # keys in the order [blocks, heads, slots, features], and values between other tensors
    caches = [
        torch.full((5, k_heads, 16, head_dim), -7.0, device=DEVICE, dtype=DTYPE).transpose(1, 2),
        torch.full((5, 16, 2, k_heads, head_dim), -7.0, device=DEVICE, dtype=DTYPE)[:, :, 1],
    ]
    expected = [cache.clone() for cache in caches]
    for x, cache in zip(kv, expected, strict=True):
        for token, slot in enumerate(slots.tolist()):
            if 0 <= slot < 80:
                cache[slot // 16, slot % 16] = x[token]
    for kernels, project in ((projection_triton, partial(run, plan)), (projection_torch, projection_torch.project)):
        made = [cache.clone() for cache in caches]
        q_only = torch.full((1, 70, q_heads, head_dim), torch.nan, device=DEVICE, dtype=DTYPE)
        into = given._replace(qkv=q_only, k_cache=made[0], v_cache=made[1], slots=slots)
        assert kernels.serves(into, rotation)
        project(into, rotation, q_heads, k_heads, eps)
        if kernels is projection_triton:  # the same kernel gives the same bits
            pairs = [(q_only.view_as(q), q), *zip(made, expected, strict=True)]
            assert all(torch.equal(x.nan_to_num(nan=99), y.nan_to_num(nan=99)) for x, y in pairs)
        untouched = torch.ones(80, dtype=torch.bool, device=DEVICE)
        untouched[slots[(slots >= 0) & (slots < 80)].long()] = False
        for x, y in zip(made, expected, strict=True):
            torch.testing.assert_close(x, y, equal_nan=True)
            assert (x.flatten(0, 1)[untouched] == -7).all()
    assert not projection_triton.serves(into._replace(k_cache=made[0].float()), rotation)


@pytest.mark.parametrize("version, count", [("3.6", 132), ("3.7", 132), ("3.9", 0)])
def test_the_kernel_serves_under_compilers_that_compile_it_well(version, count, monkeypatch):
    gpu = SimpleNamespace(major=9, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    monkeypatch.setattr(projection_triton, "VERSION", version)
    assert projection_triton._multiprocessors.__wrapped__(torch.device("cuda")) == count
