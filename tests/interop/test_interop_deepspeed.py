"""DeepSpeed's convention: one launch serves the calls of its callers, and the formula serves all other calls."""

import itertools

import pytest
import torch

from ropelab.interop.deepspeed import apply_rotary_pos_emb
from ropelab.study.documents.deepspeed import CALLERS
from tests.conftest import HAS_GPU

DEVICE = "cuda" if HAS_GPU else "cpu"
B, S, H, D = 2, 5, 3, 8
FUSED = [caller for caller in CALLERS if caller[0] != "[s, b, h, d] with [s, d]"]  # the one that does not broadcast
OTHERS = [
    # the reason why no single launch serves the call, the shape of t, the shape of the tables
    ("tables of each batch, token and head", (B, S, H, D), (B, S, H, D)),
    ("five axes", (B, S, 2, H, D), (1, S, 1, 1, D)),
    ("tables with more tokens than t", (B, 1, H, D), (1, S, 1, D)),
    ("tables with more axes than t", (S, H, D), (1, S, 1, D)),
    ("tables that enlarge a rank", (D,), (S, D)),
]


def definition(t, cos, sin):
    """The definition in float64, feature by feature, with the tables broadcast as torch broadcasts them."""
    t, cos, sin = (x.double() for x in (t, cos, sin))
    half = cos.shape[-1] // 2
    y = torch.empty(torch.broadcast_shapes(t.shape[:-1], cos.shape[:-1]) + t.shape[-1:], dtype=torch.float64)
    y = y.to(t.device).copy_(t)
    for i in range(half):
        j = i + half
        y[..., i] = t[..., i] * cos[..., i] - t[..., j] * sin[..., i]
        y[..., j] = t[..., j] * cos[..., j] + t[..., i] * sin[..., j]
    return y


def draw(t_shape, table_shape, dtype=torch.float32, table_dtype=None, equal_halves=False):
    t = torch.randn(t_shape, dtype=torch.float64).to(DEVICE, dtype)
    tables = torch.rand(2, *table_shape, dtype=torch.float64) * 2 - 1
    if equal_halves:
        tables = tables.chunk(2, -1)[0].repeat_interleave(2, -1).unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return t, *tables.to(DEVICE, table_dtype or dtype)


def assert_close(actual, expected, x, dtype):
    """Two products of x with numbers up to 1 and their sum round three times, and ``dtype`` once; allow twice that."""
    unit = torch.finfo(torch.promote_types(dtype, torch.float32)).eps / 2
    allowed = 2 * (3 * unit + torch.finfo(dtype).eps / 2) * 2 * x.abs().max().double()
    assert actual.dtype == dtype and actual.shape == expected.shape
    assert (actual.double() - expected).abs().max() <= allowed


@pytest.mark.parametrize("caller, in_tree, t_shape, table_shape", FUSED, ids=[caller[0] for caller in FUSED])
def test_every_caller_gets_the_definition_in_one_launch(launches, caller, in_tree, t_shape, table_shape):
    t, cos, sin = draw(t_shape, table_shape)  # with columns that differ between the halves: nothing is assumed
    t.requires_grad_()
    y = apply_rotary_pos_emb(t, cos, sin)
    assert len(launches) == 1
    assert_close(y, definition(t.detach(), cos, sin), t, torch.float32)
    cotangent = torch.randn_like(y)
    (gradient,) = torch.autograd.grad(y, t, cotangent)
    assert len(launches) == 2
    exact = t.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(definition(exact, cos, sin), exact, cotangent.double())
    assert_close(gradient, expected, cotangent, torch.float32)


@pytest.mark.parametrize("case, t_shape, table_shape", OTHERS, ids=[case for case, *_ in OTHERS])
def test_what_cannot_be_one_launch_takes_the_formula(launches, case, t_shape, table_shape):
    t, cos, sin = draw(t_shape, table_shape)
    t.requires_grad_()
    y = apply_rotary_pos_emb(t, cos, sin)
    assert not launches
    assert_close(y, definition(t.detach(), cos, sin), t, torch.float32)
    assert torch.autograd.grad(y.sum(), t)[0].isfinite().all()


def test_cos_and_sin_that_broadcast_differently_take_the_formula(launches):
    t, cos, sin = draw((B, S, H, D), (1, S, 1, D))
    y = apply_rotary_pos_emb(t, cos, sin[:, :1])
    assert not launches
    assert_close(y, definition(t, cos, sin[:, :1].expand_as(sin)), t, torch.float32)


@pytest.mark.parametrize("shape", [(1, 1, 1, D), (D,), (1, D)])
def test_one_row_for_all_tokens(launches, shape):
    t, cos, sin = draw((B, S, H, D), shape)
    assert_close(apply_rotary_pos_emb(t, cos, sin), definition(t, cos, sin), t, torch.float32)
    assert len(launches) == 1


def test_every_two_axes_may_be_batch_and_sequence(launches):
    for count, (first, second) in enumerate(itertools.combinations(range(3), 2), 1):
        sizes = [(B, S, H)[axis] if axis in (first, second) else 1 for axis in range(3)]
        t, cos, sin = draw((B, S, H, D), (*sizes, D // 2))
        assert_close(apply_rotary_pos_emb(t, cos, sin), definition(t, cos, sin), t, torch.float32)
        assert len(launches) == count


@pytest.mark.parametrize(
    "dtype, table_dtype, expected",
    [
        (torch.float16, torch.float32, torch.float32),
        (torch.float32, torch.float16, torch.float32),
        (torch.float16, torch.float16, torch.float16),
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float64, torch.float64),
        (torch.int32, torch.float32, torch.float32),
    ],
    ids=str,
)
def test_the_dtype_is_promoted_as_torch_does(launches, dtype, table_dtype, expected):
    t, cos, sin = draw((B, S, H, D), (1, S, 1, D // 2), dtype, table_dtype)
    y = apply_rotary_pos_emb(t, cos, sin)
    assert len(launches) == 1
    assert_close(y, definition(t, cos, sin), t, expected)
    assert y.dtype == (t * cos[..., :1]).dtype
    if dtype.is_floating_point:
        t.requires_grad_()
        (gradient,) = torch.autograd.grad(apply_rotary_pos_emb(t, cos, sin).sum(), t)
        assert gradient.dtype == dtype


def test_a_dtype_that_the_kernel_does_not_have_takes_the_formula(launches):
    t, cos, sin = draw((S, H, D), (S, 1, D))
    y = apply_rotary_pos_emb(t.to(torch.complex64), cos, sin)
    assert y.dtype == torch.complex64 and not launches
    assert_close(y.real, definition(t, cos, sin), t, torch.float32)


def test_the_tables_may_be_trained():
    t, cos, sin = draw((B, S, H, D), (1, S, 1, D), torch.float64)
    leaves = [x.requires_grad_() for x in (t, cos, sin)]
    y = apply_rotary_pos_emb(*leaves)
    cotangent = torch.randn_like(y)
    expected = torch.autograd.grad(definition(*leaves), leaves, cotangent)
    for found, right in zip(torch.autograd.grad(y, leaves, cotangent), expected, strict=True):
        torch.testing.assert_close(found, right)
