"""Fused QK-norm and rotation against the definition, for the torch path and the Triton kernels alike."""

import math
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

import ropelab
from ropelab import reference
from ropelab.kernels import INTERPRETED, Rotation, qk_norm_triton, tile_of
from ropelab.kernels.run import run
from ropelab.kernels.tensors import NormTensors
from ropelab.kernels.tiles import BackwardTile
from ropelab.layout.pairing import LAYOUTS
from ropelab.qk_norm import apply_qk_norm_rope
from tests.support import draw, forget

layouts = pytest.mark.parametrize("layout", LAYOUTS)

# batch, seq_len, q heads, k heads, head_dim, rotary_dim: GQA, MQA, odd ones, partial rotary, one of everything.
SHAPES = [
    (2, 5, 4, 2, 16, 16),
    (1, 3, 3, 1, 80, 80),
    (1, 2, 1, 5, 96, 48),
    (1, 2, 2, 2, 72, 72),
    (2, 4, 1, 3, 9, 2),
    (1, 1, 1, 1, 2, 2),
]


def definition(x: torch.Tensor, weight: torch.Tensor, *, eps: float, **rope) -> torch.Tensor:
    """RMSNorm of every head (Zhang and Sennrich, equation 4), then the rotation, in float64."""
    x = x.double()
    return reference.rotate(weight.double() * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps), **rope)


@dataclass
class Case:
    """q, k and their weights (leaves that require grad), random cotangents of both results, and the options."""

    tensors: tuple[torch.Tensor, ...]
    grads: tuple[torch.Tensor, ...]
    options: dict

    @property
    def arguments(self) -> dict:
        return dict(zip(("q", "k", "q_weight", "k_weight"), self.tensors, strict=True)) | self.options

    def check(self) -> None:
        """Results and gradients agree with the definition up to the roundings that the arithmetic cannot avoid."""
        results = apply_qk_norm_rope(**self.arguments)
        gradients = torch.autograd.grad(results, self.tensors, self.grads)
        for i in (0, 1):
            x, weight, g = (t.detach() for t in (self.tensors[i], self.tensors[2 + i], self.grads[i]))
            self.check_one(x, weight, g, results[i].detach(), gradients[i], gradients[2 + i])

    def check_one(self, x, weight, g, y, dx, dw) -> None:
        """Check q or k.

        To first order in the unit roundoff u of the compute type. The mean of D squares is a sum of positive terms,
        D u in any order, one more for the division by D, two for eps and its addition; the root halves that, and a
        reciprocal root is right to 3 u (2^-22.4; a GPU's to 2^-22.9). So rstd errs by r = D/2 + 5 (in units of u),
        xhat by r + 1, n = w xhat by r + 2, and y = n0 c - n1 s by r + 4 of |n0| + |n1|. With G the sum of |g| over a
        pair, gn errs by 2 of G, w gn by 3 of |w| G, and

            the mean of w gn xhat   by D + r + 6   of m = mean(|w| G |xhat|)
            dx                      by D + 3r + 10 of rstd (|w| G + |xhat| m)
            dw, of N terms,         by N + r + 4   of the sum of G |xhat|

        Storing rounds once more. 1% covers the higher orders.
        """
        eps = self.options.get("eps", 1e-6)
        rope = {name: value for name, value in self.options.items() if name != "eps"}
        x64, w64 = x.double().requires_grad_(), weight.double().requires_grad_()
        truth = definition(x64, w64, eps=eps, **rope)
        true_dx, true_dw = torch.autograd.grad(truth, (x64, w64), g.double())

        head_dim, wide = x.shape[-1], torch.float32
        for t in (x, weight, rope["cos"]):
            wide = torch.promote_types(wide, t.dtype)
        u = 1.01 * (torch.finfo(wide).eps / 2 + torch.finfo(torch.float64).eps / 2)  # the definition rounds as well
        r = head_dim / 2 + 5
        rstd = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps)
        xhat, size = x.double().abs() * rstd, weight.double().abs()
        pair_g = self.sum_of_pair(g, rope)
        mean = (size * pair_g * xhat).mean(-1, keepdim=True)
        axes = tuple(range(x.ndim - 1))
        terms = math.prod(x.shape[:-1])

        assert_within(y, truth, (r + 4) * u * self.sum_of_pair(xhat * size, rope), x.dtype)
        assert_within(dx, true_dx, (head_dim + 3 * r + 10) * u * rstd * (size * pair_g + xhat * mean), x.dtype)
        assert_within(dw, true_dw, (terms + r + 4) * u * (pair_g * xhat).sum(axes), weight.dtype)

    @staticmethod
    def sum_of_pair(x, rope) -> torch.Tensor:
        """|x0| + |x1| for both members of every pair, |x| for features that do not rotate, 0 without a position."""
        ones = torch.ones_like(rope["cos"])
        turns = [reference.rotate(x.abs(), **rope | {"cos": ones, "sin": sign * ones}) for sign in (1, -1)]
        return torch.maximum(*turns)


def assert_within(actual, expected, bound, dtype) -> None:
    assert actual.shape == expected.shape and actual.dtype == dtype
    out = torch.finfo(dtype)
    unit = out.eps if dtype == torch.bfloat16 and INTERPRETED else out.eps / 2  # the interpreter truncates bfloat16
    bound = bound + unit * (expected.abs() + bound) + out.tiny * out.eps
    error = (actual.double() - expected).abs()
    assert (error <= bound).all(), f"error {error.max():.3g} over bound by a factor of {(error / bound).max():.3g}"


def case(
    shape, device, *, seq_format="bshd", dtype=torch.float32, weight_dtype=None, table_dtype=torch.float32, **more
):
    """Random inputs; the tables start at position 100 and hold two rows more than needed."""
    batch, seq_len, q_heads, k_heads, head_dim, rotary_dim = shape
    if seq_format == "thd":
        batch, seq_len = 1, batch * seq_len
    cos, sin = ropelab.rotary_table(100 + seq_len + 2, rotary_dim, dtype=table_dtype, device=device)
    heads = [
        draw(batch, seq_len, n, head_dim, seq_format=seq_format, dtype=dtype, device=device)
        for n in (q_heads, k_heads, q_heads, k_heads)
    ]
    weights = [torch.randn(head_dim, dtype=torch.float64).to(device, weight_dtype or dtype) for _ in range(2)]
    tensors = tuple(t.requires_grad_() for t in (*heads[:2], *weights))
    options = {"cos": cos[100:], "sin": sin[100:], "seq_format": seq_format} | more
    return Case(tensors, tuple(heads[2:]), options)


@layouts
@pytest.mark.parametrize("shape", SHAPES)
def test_is_the_definition(device, layout, shape):
    one = case(shape, device, layout=layout)
    before = [t.detach().clone() for t in (*one.tensors, *one.grads)]
    one.check()
    assert all(torch.equal(a, b) for a, b in zip((*one.tensors, *one.grads), before, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("weight_dtype", [None, torch.float32])
def test_dtypes(device, dtype, weight_dtype):
    case(SHAPES[0], device, dtype=dtype, weight_dtype=weight_dtype, layout="interleaved").check()


@pytest.mark.parametrize("wide", ["weight_dtype", "table_dtype"])
def test_the_maths_is_as_wide_as_the_widest(device, wide):
    case(SHAPES[0], device, **{wide: torch.float64}).check()


def test_kernel_writes_nan_for_a_position_without_a_row():
    """The kernel reads nothing out of bounds. (The public function refuses such positions where it can see them.)"""
    device = "cpu" if INTERPRETED else "cuda"
    xs = [draw(1, 3, heads, 12, device=device) for heads in (3, 1)]
    weights = [torch.randn(12, device=device) for _ in xs]
    cos, sin = ropelab.rotary_table(4, 8, device=device)
    positions = torch.tensor([[2, 4, -(2**31) + 1]], device=device)
    outs = [torch.empty_like(x) for x in xs]
    run(qk_norm_triton.plan_forward, NormTensors(*xs, *weights, *outs, cos, sin, positions), Rotation(8), 1e-6)
    for x, w, y in zip(xs, weights, outs, strict=True):
        assert y[:, 1:, :, :8].isnan().all() and y[:, :1].isfinite().all()
        passed = definition(x, w, eps=1e-6, cos=cos, sin=sin)[..., 8:]
        torch.testing.assert_close(y[..., 8:].double(), passed, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", ["features outermost", "batches expanded", "one number"])
def test_cotangents_of_any_strides(device, kind):
    """The gradient of a sum is one number in all places."""
    one = case((2, 3, 4, 2, 16, 16), device)
    made = {
        "features outermost": lambda g: g.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0),
        "batches expanded": lambda g: g[:1].expand_as(g), "one number": lambda g: g.flatten()[0].expand_as(g),
    }[kind]  # fmt: skip
    Case(one.tensors, tuple(map(made, one.grads)), one.options).check()


@pytest.mark.parametrize("programs", [1, 2, 5, 7, 40])
@pytest.mark.parametrize("block_tokens", [1, 2])
def test_programs_of_the_backward_share_the_blocks_of_tokens(programs, block_tokens, monkeypatch):
    """The cases: more blocks than programs, fewer blocks, and steps past the end of one sequence or of several."""
    tile = BackwardTile(block_tokens, 2, 1, programs_per_multiprocessor=2 * programs)
    monkeypatch.setattr(tile_of, "qk_norm_backward", lambda *arguments: tile)
    monkeypatch.setattr(qk_norm_triton, "_multiprocessors", lambda device: 1)
    forget(monkeypatch)
    case((3, 3, 2, 1, 4, 4), "cpu" if INTERPRETED else "cuda").check()


def test_rows_of_weight_gradients_in_more_than_one_block(monkeypatch):
    monkeypatch.setattr(tile_of, "SUM_ROWS", 4)
    monkeypatch.setattr(tile_of, "SUM_FEATURES", 4)
    forget(monkeypatch)
    case((3, 40, 3, 1, 10, 10), "cpu" if INTERPRETED else "cuda").check()


def test_weights_get_the_same_bits_every_time(device):
    one = case((2, 35, 5, 2, 16, 16), device, dtype=torch.bfloat16)
    first = torch.autograd.grad(apply_qk_norm_rope(**one.arguments), one.tensors, one.grads)
    again = torch.autograd.grad(apply_qk_norm_rope(**one.arguments), one.tensors, one.grads)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "value"), [("layout", "interleaved"), ("seq_format", "bhsd")])
@pytest.mark.parametrize("shape", [(2, 1000, 32, 8, 128, 128), (3, 70, 16, 1, 256, 256), (2, 301, 5, 3, 80, 40)])
def test_many_tokens(shape, name, value):
    for dtype in (torch.bfloat16, torch.float32):
        one = case(shape, "cuda", dtype=dtype, **{name: value})
        one.check()
        one.check()  # by the launches that were prepared in the first


@pytest.mark.gpu
@pytest.mark.parametrize(("batch", "seq_len"), [(70_001, 1), (1, 70_001)])
def test_more_tokens_or_batches_than_a_short_grid_axis_holds(batch, seq_len):
    case((batch, seq_len, 1, 1, 16, 16), "cuda").check()


@pytest.mark.gpu
def test_memory_is_outputs_gradients_and_a_few_rows():
    one = case((1, 4096, 32, 8, 128, 128), "cuda", dtype=torch.bfloat16)
    torch.use_deterministic_algorithms(False)
    torch.autograd.grad(apply_qk_norm_rope(**one.arguments), one.tensors, one.grads)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = apply_qk_norm_rope(**one.arguments)
    outputs = one.tensors[0].nbytes + one.tensors[1].nbytes
    assert torch.cuda.max_memory_allocated() - before == outputs
    torch.autograd.grad(results, one.tensors, one.grads)
    q, k = one.tensors[:2]
    rows = tile_of.qk_norm_backward(SimpleNamespace(q=q, k=k), Rotation(128)).programs_per_multiprocessor
    rows *= torch.cuda.get_device_properties(0).multi_processor_count
    # A row of dw for each program, and the allocator rounds the rows and the two weights' gradients up.
    assert torch.cuda.max_memory_allocated() - before <= 2 * outputs + rows * 128 * 4 + 3 * 512


@pytest.mark.gpu
def test_forward_is_one_launch_and_backward_two():
    one = case((1, 64, 8, 2, 64, 64), "cuda")
    torch.use_deterministic_algorithms(False)  # which would fill fresh memory, in launches of its own

    def step():
        torch.autograd.grad(apply_qk_norm_rope(**one.arguments), one.tensors, one.grads)

    step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    kernels = [e.name for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert kernels == ["_qk_norm_rope_kernel", "_qk_norm_rope_backward_kernel", "_sum_rows_kernel"]


@pytest.mark.gpu
def test_can_be_captured_in_a_cuda_graph():
    one = case((1, 64, 8, 2, 64, 64), "cuda")
    apply_qk_norm_rope(**one.arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        with torch.cuda.graph(graph):
            results = apply_qk_norm_rope(**one.arguments)
        one.tensors[0].normal_()
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(results, apply_qk_norm_rope(**one.arguments), strict=True))
