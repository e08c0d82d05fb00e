"""The public function, bit for bit and at the edges of tiles, where the laws of test_conformance.py do not look."""

import pytest
import torch

import ropelab
from ropelab.layout.pairing import LAYOUTS
from ropelab.layout.seq_format import to_bshd
from tests.support import assert_rotated, draw

# batch, seq_len, q heads, k heads, head_dim, rotary_dim: odd ones, GQA, MQA, partial rotary, one of everything.
SHAPES = [
    (2, 5, 4, 2, 16, 16),
    (1, 3, 3, 1, 80, 80),
    (3, 1, 5, 5, 12, 8),
    (2, 4, 1, 3, 9, 2),
    (1, 1, 1, 1, 2, 2),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]

layouts = pytest.mark.parametrize("layout", LAYOUTS)


def inputs(shape, device, *, seq_format="bshd", dtype=torch.float32, table_dtype=torch.float32):
    """q, k, cos, sin; the tables hold two rows more than needed and start at position 100."""
    batch, seq_len, q_heads, k_heads, head_dim, rotary_dim = shape
    if seq_format == "thd":
        batch, seq_len = 1, batch * seq_len
    q = draw(batch, seq_len, q_heads, head_dim, seq_format=seq_format, dtype=dtype, device=device)
    k = draw(batch, seq_len, k_heads, head_dim, seq_format=seq_format, dtype=dtype, device=device)
    cos, sin = ropelab.rotary_table(100 + seq_len + 2, rotary_dim, dtype=table_dtype, device=device)
    return q, k, cos[100:], sin[100:]


@pytest.mark.parametrize("table_dtype", DTYPES)
def test_tables_of_any_dtype_never_narrow_the_maths(device, table_dtype):
    q, k, cos, sin = inputs(SHAPES[0], device, dtype=torch.float32, table_dtype=table_dtype)
    for actual, x in zip(ropelab.apply_rope(q, k, cos=cos, sin=sin), (q, k), strict=True):
        assert_rotated(actual, x, cos, sin, layout="split_half")


def test_autograd_knows_of_inplace_use(device):
    q, k, cos, sin = inputs(SHAPES[0], device)
    a, b = q.clone().requires_grad_(), k.clone().requires_grad_()
    weights = torch.randn_like(a), torch.randn_like(b)

    def loss(inplace):
        x, y = ropelab.apply_rope(a * 1, b * 1, cos=cos, sin=sin, inplace=inplace)
        return (x * weights[0]).sum() + (y * weights[1]).sum()

    expected = torch.autograd.grad(loss(False), (a, b))
    for actual, e in zip(torch.autograd.grad(loss(True), (a, b)), expected, strict=True):
        assert torch.equal(actual, e)

    squared = a * 1
    kept = squared.square()  # saves its input
    ropelab.apply_rope(squared, cos=cos, sin=sin, inplace=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()


def test_inplace_on_views_of_one_buffer_has_the_right_gradient(device):
    qkv = draw(2, 5, 8, 16, device=device).requires_grad_()
    cos, sin = ropelab.rotary_table(5, 16, device=device)
    weight = torch.randn_like(qkv)
    buffer = qkv * 1
    ropelab.apply_rope(buffer[:, :, :4], buffer[:, :, 4:6], cos=cos, sin=sin, inplace=True)
    (actual,) = torch.autograd.grad((buffer * weight).sum(), qkv)
    assert_rotated(actual[:, :, :6], weight[:, :, :6], cos, sin, layout="split_half", inverse=True)
    assert torch.equal(actual[:, :, 6:], weight[:, :, 6:])


def test_views_in_other_formats_keep_their_history_in_place(device):
    x = draw(2, 5, 3, 8, device=device).requires_grad_()
    cos, sin = ropelab.rotary_table(5, 8, device=device)
    weight = torch.randn(2, 3, 5, 8, device=device)
    view = (x * 1).transpose(1, 2)
    y = ropelab.apply_rope(view, cos=cos, sin=sin, seq_format="bhsd", inplace=True)
    (grad,) = torch.autograd.grad((y * weight).sum(), x)
    assert_rotated(to_bshd(grad, "bhsd"), weight, cos, sin, layout="split_half", seq_format="bhsd", inverse=True)
