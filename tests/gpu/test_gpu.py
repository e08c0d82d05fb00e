"""Tests that only a GPU can decide. All other tests run on a GPU as well, with the compiled kernel."""

import itertools

import pytest
import torch

import ropelab
from ropelab.kernels import Rotation, rotate_torch, rotate_triton
from ropelab.kernels.run import run
from ropelab.kernels.tensors import RotateTensors
from ropelab.layout.pairing import LAYOUTS
from ropelab.layout.seq_format import DENSE_FORMATS
from tests.support import draw

pytestmark = pytest.mark.gpu

layouts = pytest.mark.parametrize("layout", LAYOUTS)
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])


@layouts
@dtypes
@pytest.mark.parametrize("seq_format", DENSE_FORMATS)
@pytest.mark.parametrize(
    "shape",
    [
        (2, 37, 32, 8, 128, 128),
        (1, 19, 16, 1, 256, 256),
        (3, 11, 5, 3, 80, 80),
        (2, 7, 4, 2, 72, 40),
        (2, 9, 33, 2, 96, 48),
    ],
)
def test_kernel_and_torch_path_give_the_same_bits(layout, dtype, seq_format, shape):
    batch, seq_len, q_heads, k_heads, head_dim, rotary_dim = shape
    q = draw(batch, seq_len, q_heads, head_dim, seq_format=seq_format, dtype=dtype, device="cuda")
    k = draw(batch, seq_len, k_heads, head_dim, seq_format=seq_format, dtype=dtype, device="cuda")
    cos, sin = ropelab.rotary_table(seq_len, rotary_dim, device="cuda")
    options = {"layout": layout, "seq_format": seq_format}
    on_gpu = ropelab.apply_rope(q, k, cos=cos, sin=sin, **options)
    on_cpu = ropelab.apply_rope(q.cpu(), k.cpu(), cos=cos.cpu(), sin=sin.cpu(), **options)
    for a, b in zip(on_gpu, on_cpu, strict=True):
        assert torch.equal(a.cpu(), b)


@layouts
@pytest.mark.parametrize("head_dim", [128, 80])
def test_inplace_never_races(layout, head_dim):
    """One program reads and writes each element, so a hundred runs agree bit for bit."""
    x = draw(2, 512, 32, head_dim, dtype=torch.bfloat16, device="cuda")
    cos, sin = ropelab.rotary_table(512, head_dim, device="cuda")
    expected = ropelab.apply_rope(x, cos=cos, sin=sin, layout=layout)
    for _ in range(100):
        assert torch.equal(ropelab.apply_rope(x.clone(), cos=cos, sin=sin, layout=layout, inplace=True), expected)


@pytest.mark.parametrize(
    ("batch", "seq_len", "seq_format"),
    [
        (1, 70_001, "bshd"), (70_001, 1, "bshd"), (70_001, 1, "sbhd"), (2, 70_001, "sbhd"), (1, 70_001, "bhsd"),
        (1, 70_001, "thd"),
    ],
)  # fmt: skip
def test_more_tokens_or_batches_than_a_short_grid_axis_holds(batch, seq_len, seq_format):
    x = draw(batch, seq_len, 1, 16, seq_format=seq_format, device="cuda")
    cos, sin = ropelab.rotary_table(seq_len, 16, device="cuda")
    actual = ropelab.apply_rope(x, cos=cos, sin=sin, seq_format=seq_format)
    expected = ropelab.apply_rope(x.cpu(), cos=cos.cpu(), sin=sin.cpu(), seq_format=seq_format)
    assert torch.equal(actual.cpu(), expected)


@pytest.mark.process
@layouts
def test_offsets_beyond_32_bits(layout):
    """The last tokens of 2^31 + elements, against the same tokens rotated by themselves."""
    batch, seq_len, heads, head_dim = 2, 2**18 + 3, 32, 128
    assert batch * seq_len * heads * head_dim > 2**31
    x = torch.empty(batch, seq_len, heads, head_dim, dtype=torch.bfloat16, device="cuda")
    x[:, -8:].normal_()
    cos, sin = ropelab.rotary_table(seq_len, head_dim, device="cuda")
    expected = ropelab.apply_rope(x[:, -8:].clone(), cos=cos[-8:], sin=sin[-8:], layout=layout)
    actual = ropelab.apply_rope(x, cos=cos, sin=sin, layout=layout, inplace=True)
    assert torch.equal(actual[:, -8:], expected)


@pytest.mark.process
def test_offsets_beyond_32_bits_of_packed_tokens():
    """Both halves of 2^31 + elements are packed sequences, so equal numbers must become equal."""
    tokens, heads, head_dim = 2**19 + 64, 32, 128
    x = torch.empty(tokens, heads, head_dim, dtype=torch.bfloat16, device="cuda")
    assert x.numel() > 2**31
    x[:32].normal_()
    x[-32:] = x[:32]
    cos, sin = ropelab.rotary_table(tokens // 2, head_dim, device="cuda")
    packed = ropelab.PackedSequences(torch.tensor([0, tokens // 2, tokens - 32, tokens], device="cuda"), tokens)
    y = ropelab.apply_rope(x, cos=cos, sin=sin, seq_format="thd", positions=packed.positions)
    assert torch.equal(y[:32], y[-32:])
    assert torch.equal(y[:32], ropelab.apply_rope(x[:32], cos=cos, sin=sin, seq_format="thd"))


@pytest.mark.parametrize("positions", [False, True])
def test_compiled_by_inductor_once_for_any_number_of_tokens(positions):
    def attention(q, k, cos, sin, where):
        q, k = ropelab.apply_rope(q * 2, k * 2, cos=cos, sin=sin, positions=where)
        return q.float().square().mean() + k.float().square().mean()

    torch._dynamo.reset()
    compiled = torch.compile(attention, fullgraph=True, dynamic=True)
    cos, sin = ropelab.rotary_table(300, 64, device="cuda")
    for seq_len in (48, 100, 257):
        q, k = (draw(2, seq_len, heads, 64, device="cuda").requires_grad_() for heads in (4, 2))
        where = torch.randint(0, 300, (2, seq_len), device="cuda") if positions else None
        with torch._dynamo.config.patch(error_on_recompile=seq_len != 48):
            actual = torch.autograd.grad(compiled(q, k, cos, sin, where), (q, k))
        expected = torch.autograd.grad(attention(q, k, cos, sin, where), (q, k))
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e)


def test_forward_and_backward_are_one_launch_each():
    q = draw(1, 64, 8, 64, device="cuda").requires_grad_()
    k = draw(1, 64, 2, 64, device="cuda").requires_grad_()
    cos, sin = ropelab.rotary_table(64, 64, device="cuda")
    grads = torch.randn_like(q), torch.randn_like(k)
    torch.use_deterministic_algorithms(False)  # which would fill fresh memory, in launches of its own

    def step():
        torch.autograd.grad(ropelab.apply_rope(q, k, cos=cos, sin=sin), (q, k), grads)

    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 2 and all("rotate" in name for name in kernels), kernels


def test_memory_is_the_outputs_and_nothing_else():
    q = draw(1, 1024, 32, 128, dtype=torch.bfloat16, device="cuda").requires_grad_()
    k = draw(1, 1024, 8, 128, dtype=torch.bfloat16, device="cuda").requires_grad_()
    cos, sin = ropelab.rotary_table(1024, 128, device="cuda")
    ropelab.apply_rope(q, k, cos=cos, sin=sin)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    rotated = ropelab.apply_rope(q, k, cos=cos, sin=sin)
    outputs = q.nbytes + k.nbytes
    assert torch.cuda.max_memory_allocated() - before == outputs
    torch.autograd.grad(rotated, (q, k), rotated)
    assert torch.cuda.max_memory_allocated() - before == 2 * outputs  # and the two gradients


def test_can_be_captured_in_a_cuda_graph():
    q = draw(1, 64, 8, 64, device="cuda")
    cos, sin = ropelab.rotary_table(64, 64, device="cuda")
    ropelab.apply_rope(q, cos=cos, sin=sin)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ropelab.apply_rope(q, cos=cos, sin=sin)
    q.normal_()
    graph.replay()
    assert torch.equal(y, ropelab.apply_rope(q, cos=cos, sin=sin))


def test_a_graph_takes_new_packings_and_gradients():
    """A training step of packed sequences, captured once: the next batch only fills ``cu_seqlens`` anew."""
    cu_seqlens = torch.tensor([0, 10, 64], dtype=torch.int32, device="cuda")
    q, g = draw(1, 64, 8, 64, device="cuda")[0].requires_grad_(), torch.randn(64, 8, 64, device="cuda")
    cos, sin = ropelab.rotary_table(64, 64, device="cuda")

    def step():
        packed = ropelab.PackedSequences(cu_seqlens, 64)
        y = ropelab.apply_rope(q, cos=cos, sin=sin, seq_format="thd", positions=packed.positions)
        return y.detach(), *torch.autograd.grad(y, q, g)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for lengths in ([0, 10, 64], [0, 33, 34], [0, 0, 64], [0, 64, 64]):
        cu_seqlens.copy_(torch.tensor(lengths))
        graph.replay()
        for actual, expected in zip(captured, step(), strict=True):
            assert torch.equal(actual, expected)


def test_no_call_waits_for_the_gpu():
    """Under this setting PyTorch raises at every synchronisation."""
    cu_seqlens = torch.tensor([0, 10, 10, 60], dtype=torch.int32, device="cuda")
    q = draw(1, 64, 8, 64, device="cuda")[0].requires_grad_()
    cos, sin = ropelab.rotary_table(64, 64, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed = ropelab.PackedSequences(cu_seqlens, 64)
        y = ropelab.apply_rope(q, cos=cos, sin=sin, seq_format="thd", positions=packed.positions)
        torch.autograd.grad(y, q, torch.ones_like(y))
        ropelab.apply_rope(q.detach()[None], cos=cos, sin=sin, offsets=torch.zeros_like(cu_seqlens[:1]))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_runs_on_the_tensors_device_and_stream():
    x = draw(1, 4096, 32, 128, device="cuda")
    cos, sin = ropelab.rotary_table(4096, 128, device="cuda")
    expected = ropelab.apply_rope(x, cos=cos, sin=sin)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        y = torch.zeros_like(x)
        for _ in range(20):
            y.normal_()
        y.copy_(x)
        rotated = ropelab.apply_rope(y, cos=cos, sin=sin)
    stream.synchronize()
    assert torch.equal(rotated, expected)


@layouts
def test_every_tile_gives_the_same_bits(layout):
    from ropelab.kernels.tiles import FlatTile, Tile

    q = draw(2, 37, 12, 80, dtype=torch.bfloat16, device="cuda")
    k = draw(2, 37, 5, 80, dtype=torch.bfloat16, device="cuda")
    cos, sin = ropelab.rotary_table(37, 64, device="cuda")
    expected = [torch.empty_like(x) for x in (q, k)]
    interleaved = layout == "interleaved"
    rotation = Rotation(64, interleaved=interleaved, out_interleaved=interleaved)
    rotate_torch.rotate(RotateTensors.of([q, k], expected, cos, sin), rotation)
    positions = torch.randint(-36, 37, (2, 37), dtype=torch.int32, device="cuda")
    at_positions = [torch.empty_like(x) for x in (q, k)]
    rotate_torch.rotate(RotateTensors.of([q, k], at_positions, cos, sin, positions), rotation)
    for block_tokens in (1, 2, 8):
        for block_heads in (1, 4, 16):
            for num_warps in (1, 4, 8):
                actual = [torch.full_like(x, float("nan")) for x in (q, k)]
                for innermost in ("heads", "tokens", "batches"):
                    tile = Tile(block_tokens, block_heads, num_warps, innermost)
                    run(rotate_triton.plan_rotate, RotateTensors.of([q, k], actual, cos, sin), rotation, tile)
                    assert all(torch.equal(a, e) for a, e in zip(actual, expected, strict=True)), tile
                for heads_first in (False, True):
                    tile = Tile(block_tokens, block_heads, num_warps, heads_first=heads_first)
                    actual = [torch.full_like(x, float("nan")) for x in (q, k)]
                    t = RotateTensors.of([q, k], actual, cos, sin, positions)
                    run(rotate_triton.plan_rotate, t, rotation, tile)
                    assert all(torch.equal(a, e) for a, e in zip(actual, at_positions, strict=True)), tile
    flat = (FlatTile(n, warps, pairs_per_access=pairs) for n in (32, 128, 512) for warps in (1, 4) for pairs in (4, 8))
    for tile, (where, wanted) in itertools.product(flat, ((None, expected), (positions, at_positions))):
        actual = [torch.full_like(x, float("nan")) for x in (q, k)]
        run(rotate_triton.plan_rotate, RotateTensors.of([q, k], actual, cos, sin, where), rotation, tile)
        assert all(torch.equal(a, e) for a, e in zip(actual, wanted, strict=True)), tile
