"""DeepSeek-V4's operators on a GPU: against torch in bits, under CUDA graphs, and against vLLM's operators."""

import pytest
import torch

import ropelab
from ropelab.bench.block_scales import BLOCK_SIZE, ROTARY_DIM, VLLM, Indexer, Input, Output, block_scales
from ropelab.kernels import Rotation, block_scales_triton
from ropelab.kernels.block_scales import Blocks
from ropelab.kernels.block_scales_torch import power_of_two, rows_of_cache
from ropelab.kernels.run import run
from ropelab.kernels.tensors import QuantizeTensors
from ropelab.kernels.tiles import Tile

pytestmark = pytest.mark.gpu
SIZES = [(1, 64), (7, 64), (64, 128), (513, 64), (2048, 128)]
CASES = [
    *(Output(*size, packed=packed) for size in SIZES for packed in (False, True)),
    *(Indexer(tokens) for tokens, _ in SIZES),
]


def in_bytes(x):
    return x.contiguous().view(torch.uint8)


def theirs(case):
    """vLLM's operator."""
    return case.vllm()[0][VLLM]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} {case.tokens} {case.heads}")
def test_the_kernels_have_the_bits_of_torch(case):
    (call,) = case.tensors(1, "cuda")
    found = []
    for backend in ropelab.kernels.backends.BACKENDS:
        with ropelab.use_backend(backend):
            found.append(case.ours(call))
    assert all(torch.equal(in_bytes(x), in_bytes(y)) for x, y in zip(*found, strict=True))
    assert case.agreement(call, found[0]) == "ok"


@pytest.mark.parametrize("tokens, heads", SIZES)
def test_the_cache_has_the_bits_of_torch(tokens, heads):
    """q has sums of a norm, in another order."""
    case = Input(tokens, heads)
    (call,) = case.tensors(1, "cuda")
    found = []
    for backend in ropelab.kernels.backends.BACKENDS:
        mine = call | {"cache": call["cache"].clone()}
        with ropelab.use_backend(backend):
            found.append((*case.ours(mine), mine["cache"]))
        assert case.agreement(mine, found[-1][:1]) == "ok"
    assert torch.equal(found[0][1], found[1][1])
    assert_near(found[0][0], found[1][0], NORM)


@pytest.mark.parametrize("tile", [Tile(1, 1, 1), Tile(1, 4, 1), Tile(1, 2, 2), Tile(1, 8, 4)])
def test_the_bits_do_not_depend_on_the_tile(tile):
    case = Output(33, 64)
    (call,) = case.tensors(1, "cuda")
    expected = case.ours(call)
    cos, sin = call["table"].chunk(2, -1)
    out, scales = torch.empty_like(expected[0]), torch.empty_like(expected[1])
    run(
        block_scales_triton.plan_quantize,
        QuantizeTensors(out[None], scales, None, call["x"][None], None, cos, sin, call["positions"][None]),
        Rotation(ROTARY_DIM, 448, interleaved=True, out_interleaved=True, transpose=True),
        Blocks(128, 1e-10, False), 1.0, tile,
    )  # fmt: skip
    assert torch.equal(in_bytes(out), in_bytes(expected[0])) and torch.equal(scales, expected[1])


@pytest.mark.parametrize("case", [Output(16, 64), Indexer(16), Input(16, 64)], ids=lambda case: case.name)
def test_a_graph_replays_with_new_contents(case):
    call, other = case.tensors(2, "cuda")
    case.ours(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = case.ours(call)
    for name in ("x", "positions"):
        call[name].copy_(other[name])
    graph.replay()
    assert all(torch.equal(in_bytes(x), in_bytes(y)) for x, y in zip(found, case.ours(call), strict=True))


@pytest.mark.parametrize("case", [Output(16, 64), Indexer(16), Input(16, 64)], ids=lambda case: case.name)
def test_compiled_calls_have_the_same_bits(case):
    (call,) = case.tensors(1, "cuda")
    expected = case.ours(call)
    found = torch.compile(case.ours, fullgraph=True)(call)
    assert all(torch.equal(in_bytes(x), in_bytes(y)) for x, y in zip(found, expected, strict=True))


def assert_near(x, y, roundings):
    """``x`` and ``y [..., D]`` in bfloat16 are one step apart, and as far as float32 errs before.

    Args:
        roundings: the unit roundoffs of float32 by which the largest feature of a head, and so each member of its
            pairs, may be off.
    """
    x, y = x.double(), y.double()
    step = torch.finfo(torch.bfloat16).eps * torch.maximum(x.abs(), y.abs())
    assert ((x - y).abs() <= step + roundings * 2.0**-24 * 2 * y.abs().amax(-1, keepdim=True)).all()


ROTATION, NORM = 6, 2 * 520
"""Two rotations round three times each. A norm of 512 features is off by at most 258 + 2 roundings (`norm_error`)."""


def assert_neighbours(ours, theirs, rotates):
    """8-bit floats with the same bits where nothing rotates; elsewhere rarely a neighbour.

    vLLM's kernels fuse a product and a sum of the rotation, and ours do not. A rotated feature of normal size is off by
    less than 2^-20 of itself, and steps of float8_e4m3fn are at least 2^-4: a share far below 2^-10 lies so close to
    the middle between two numbers.
    """
    assert torch.equal(in_bytes(ours[..., :-rotates]), in_bytes(theirs[..., :-rotates]))
    ordered = [x.contiguous().view(torch.int8).int() for x in (ours, theirs)]
    ordered = [torch.where(x < 0, -128 - x, x) for x in ordered]  # sign and magnitude as an integer
    assert (ordered[0] - ordered[1]).abs().max() <= 1
    assert (ours.float() != theirs.float()).sum() <= 2 + 2.0**-10 * ours[..., -rotates:].numel()


@pytest.mark.peers
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name} {case.tokens} {case.heads}")
def test_values_and_scales_are_vllms(case):
    """The scales are equal; vLLM multiplies the weights of the indexer by two numbers, and we by their product."""
    run = theirs(case)
    (call,) = case.tensors(1, "cuda")
    (values, scales), (their_values, their_scales) = case.ours(call), run(call)
    assert case.agreement(call, (their_values, their_scales)) == "ok"
    assert values.shape == their_values.shape and values.stride() == their_values.stride()
    heads = (values.view(torch.uint8).unflatten(-1, (-1, case.head_dim)) for values in (values, their_values))
    mine, other = (x.contiguous().view(torch.float8_e4m3fn) for x in heads)
    assert_neighbours(mine, other, ROTARY_DIM)
    if isinstance(case, Indexer):
        assert ((scales - their_scales).abs() <= 2.0**-22 * their_scales.abs()).all()
    else:
        assert torch.equal(scales, their_scales) and scales.stride() == their_scales.stride()


@pytest.mark.peers
@pytest.mark.parametrize("tokens, heads", SIZES)
def test_the_cache_is_vllms(tokens, heads):
    """Numbers and scales are equal; rotated features and q are neighbours, as far as float32 errs before."""
    case = Input(tokens, heads)
    run = theirs(case)
    (call,) = case.tensors(1, "cuda")
    other = call | {"cache": call["cache"].clone()}
    (q,), (their_q,) = case.ours(call), run(other)
    assert_near(q, their_q, NORM)
    (data, scales), (their_data, their_scales) = (rows_of_cache(x["cache"], case.page) for x in (call, other))
    assert torch.equal(scales, their_scales)
    data, their_data = (x.flatten(0, 1)[call["slots"]] for x in (data, their_data))
    assert torch.equal(data[:, :448], their_data[:, :448])
    assert_near(*(x[:, 448:].contiguous().view(torch.bfloat16) for x in (data, their_data)), ROTATION)


@pytest.mark.peers
def test_vllm_stores_no_token_without_a_slot():
    case = Input(BLOCK_SIZE, 64)
    run = theirs(case)
    (call,) = case.tensors(1, "cuda")
    call["slots"][::3] = -1
    other = call | {"cache": call["cache"].clone()}
    case.ours(call), run(other)
    rows = [rows_of_cache(x["cache"], case.page)[0].flatten(0, 1)[:, :448] for x in (call, other)]
    assert torch.equal(*rows)


@pytest.mark.peers
def test_a_ceiling_at_the_limit_is_vllms():
    """The largest magnitudes that fill the range, and the next numbers of bfloat16 and of float32."""
    case = Output(3, 64)
    run = theirs(case)
    (call,) = case.tensors(1, "cuda")
    call["x"].fill_(0.0)
    for row, (mantissa, exponent) in enumerate(((1.75, 0), (1.7578125, 3), (1.7421875, -20))):
        call["x"][row, ..., ::128] = mantissa * 2.0**exponent
    ours, their_results = case.ours(call), run(call)
    assert torch.equal(ours[1], their_results[1]) and torch.equal(in_bytes(ours[0]), in_bytes(their_results[0]))
    assert torch.equal(ours[1].frexp()[0], power_of_two(torch.full_like(ours[1], 126, dtype=torch.int32)))


def test_the_study_runs():
    frame = block_scales(smoke=True)
    assert not frame.status.str.startswith(("wrong", "failed")).any(), frame[["contender", "status"]]
