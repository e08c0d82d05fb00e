"""A token has the same bits with every tile, every number of warps and every alignment."""

import itertools
from dataclasses import replace

import pytest
import torch

import ropelab
from ropelab.kernels import HAS_TRITON, Rotation
from ropelab.layout.pairing import LAYOUTS

if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

from ropelab.kernels import qk_norm_triton, rotate_triton, tile_of
from ropelab.kernels.run import run
from ropelab.kernels.tensors import NormTensors, RotateTensors
from ropelab.kernels.tiles import FlatTile, Tile, candidates

pytestmark = pytest.mark.gpu

layouts = pytest.mark.parametrize("layout", LAYOUTS)
BFLOAT16 = torch.bfloat16
TOKENS = 19


def drawn(heads: int, head_dim: int, shift: int = 0) -> torch.Tensor:
    """``[1, TOKENS, heads, head_dim]``, the same numbers for every ``shift`` of the address, in elements."""
    generator = torch.Generator("cuda").manual_seed(heads)
    x = torch.randn(1, TOKENS, heads, head_dim, generator=generator, device="cuda").to(BFLOAT16)
    if not shift:
        return x
    storage = torch.empty(x.numel() + shift, dtype=x.dtype, device="cuda")
    return storage[shift:].view_as(x).copy_(x)


@layouts
@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize(("q_heads", "k_heads", "head_dim"), [(12, 2, 128), (3, 1, 72), (16, 16, 80)])
def test_rotation_with_every_tile(q_heads, k_heads, head_dim, positions, layout):
    interleaved = layout == "interleaved"
    rotation = Rotation(head_dim, interleaved=interleaved, out_interleaved=interleaved)
    cos, sin = ropelab.rotary_table(TOKENS, head_dim, device="cuda")
    where = torch.arange(TOKENS, device="cuda")[None] if positions else None
    xs = [drawn(heads, head_dim) for heads in (q_heads, k_heads)]
    expected = ropelab.apply_rope(*(x.cpu() for x in xs), cos=cos.cpu(), sin=sin.cpu(), layout=layout)
    outs = [torch.empty_like(x) for x in xs]
    tiles = candidates(tile_of.work_of(RotateTensors.of(xs, outs, cos, sin, where), rotation))
    assert {type(tile) for tile in tiles} == {Tile, FlatTile}
    for tile, shift in itertools.product(tiles, (0, 1)):
        inputs = [drawn(heads, head_dim, shift) for heads in (q_heads, k_heads)]
        outs = [torch.empty_like(x) for x in xs]
        run(rotate_triton.plan_rotate, RotateTensors.of(inputs, outs, cos, sin, where), rotation, tile)
        assert all(torch.equal(y.cpu(), e) for y, e in zip(outs, expected, strict=True)), (tile, shift)


@layouts
@pytest.mark.parametrize("head_dim", [64, 72, 128])
def test_norm_with_every_tile(head_dim, layout):
    interleaved = layout == "interleaved"
    rotation = Rotation(head_dim, interleaved=interleaved, out_interleaved=interleaved)
    cos, sin = ropelab.rotary_table(TOKENS, head_dim, device="cuda")
    weights = [torch.rand(head_dim, device="cuda").to(BFLOAT16) for _ in range(2)]

    def results(tile: Tile | None, shift: int = 0, tokens: slice = slice(None)) -> list[torch.Tensor]:
        xs = [drawn(heads, head_dim, shift)[:, tokens] for heads in (12, 2)]
        outs = [torch.full_like(x, 9) for x in xs]
        rows = [table[tokens] for table in (cos, sin)]
        run(qk_norm_triton.plan_forward, NormTensors(*xs, *weights, *outs, *rows, None), rotation, 1e-6, tile)
        return outs

    expected = results(None)
    for tokens, heads, warps, access, shift in itertools.product((1, 4), (1, 4, 16), (1, 2, 4, 8), (4, 8), (0, 1)):
        tile = Tile(tokens, heads, warps, pairs_per_access=access)
        assert all(map(torch.equal, results(tile, shift), expected)), (tile, shift)
    for place in (0, TOKENS - 1):
        token = slice(place, place + 1)
        assert all(torch.equal(y, e[:, token]) for y, e in zip(results(None, 0, token), expected, strict=True)), place


@pytest.mark.parametrize("function", [ropelab.apply_rope, ropelab.apply_qk_norm_rope])
def test_a_token_of_a_decode_has_the_bits_of_the_prefill(function):
    cos, sin = ropelab.rotary_table(TOKENS, 128, device="cuda")
    q, k = drawn(32, 128), drawn(8, 128)
    weights = {}
    if function is ropelab.apply_qk_norm_rope:
        weights = {name: torch.rand(128, device="cuda").to(BFLOAT16) for name in ("q_weight", "k_weight")}
    at_once = function(q, k, **weights, cos=cos, sin=sin)
    for i in range(TOKENS):
        offsets = torch.tensor([i], device="cuda")
        alone = function(q[:, i : i + 1], k[:, i : i + 1], **weights, cos=cos, sin=sin, offsets=offsets)
        assert all(torch.equal(y, whole[:, i : i + 1]) for y, whole in zip(alone, at_once, strict=True)), i


def test_the_chosen_tile_is_a_candidate():
    xs = [drawn(32, 128), drawn(8, 128)]
    cos, sin = ropelab.rotary_table(TOKENS, 128, device="cuda")
    call = RotateTensors.of(xs, [x.clone() for x in xs], cos, sin), Rotation(128)
    chosen = tile_of.rotate(*call)
    known = {replace(tile, max_registers=None) for tile in candidates(tile_of.work_of(*call))}
    assert replace(chosen, max_registers=None) in known


@layouts
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_token_of_a_projection_alone_and_among_others(head_dim, norm, layout):
    """The kernel sums the terms of a feature in one order, whatever tile a token is in."""
    x = drawn(8, 64).view(-1, 512).repeat(40, 1)[:700]
    weight = torch.randn(4 * head_dim, 512, device="cuda").to(BFLOAT16) / 20
    norms = torch.rand(2, head_dim, device="cuda").to(BFLOAT16)
    cos, sin = ropelab.rotary_table(700, head_dim, device="cuda")
    places = torch.arange(700, device="cuda")
    options = {"q_heads": 2, "k_heads": 1, "cos": cos, "sin": sin, "layout": layout, "seq_format": "thd"}
    options |= {"q_weight": norms[0], "k_weight": norms[1]} if norm else {}
    whole = ropelab.qkv_rope(x, weight, positions=places, path="product", **options)
    for tokens in (slice(0, 1), slice(100, 300), slice(699, 700)):
        alone = ropelab.qkv_rope(x[tokens], weight, positions=places[tokens], path="product", **options)
        assert all(torch.equal(y, e[tokens]) for y, e in zip(alone, whole, strict=True)), tokens
