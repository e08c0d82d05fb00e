"""The public function, bit for bit and at the edges of tiles, where the laws of test_conformance.py do not look."""

import pytest
import torch

import ropelab
from ropelab.kernels.backends import BACKENDS
from ropelab.layout.pairing import LAYOUTS
from ropelab.layout.seq_format import SEQ_FORMATS, to_bshd
from tests.support import all_but_one, assert_rotated, draw

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


@pytest.mark.parametrize(("layout", "seq_format", "shape", "dtype"), all_but_one(LAYOUTS, SEQ_FORMATS, SHAPES, DTYPES))
def test_is_the_definition(device, layout, seq_format, shape, dtype):
    q, k, cos, sin = inputs(shape, device, seq_format=seq_format, dtype=dtype)
    options = {"layout": layout, "seq_format": seq_format}
    q_before = q.clone()
    for inverse in (False, True):
        rotated = ropelab.apply_rope(q, k, cos=cos, sin=sin, inverse=inverse, **options)
        for actual, x in zip(rotated, (q, k), strict=True):
            assert_rotated(actual, x, cos, sin, inverse=inverse, **options)
    assert torch.equal(q, q_before)
    assert torch.equal(ropelab.apply_rope(q, cos=cos, sin=sin, inverse=True, **options), rotated[0])


@pytest.mark.parametrize("table_dtype", DTYPES)
def test_tables_of_any_dtype_never_narrow_the_maths(device, table_dtype):
    q, k, cos, sin = inputs(SHAPES[0], device, dtype=torch.float32, table_dtype=table_dtype)
    for actual, x in zip(ropelab.apply_rope(q, k, cos=cos, sin=sin), (q, k), strict=True):
        assert_rotated(actual, x, cos, sin, layout="split_half")


def test_tables_may_be_slices_of_one_cache(device):
    """cos and sin side by side, as inference engines keep them; and rows of different strides."""
    q, k, cos, sin = inputs(SHAPES[0], device)
    expected = ropelab.apply_rope(q, k, cos=cos, sin=sin)
    cache = torch.cat((cos, sin), dim=1)
    width = cos.shape[1]
    for c, s in (
        (cache[:, :width], cache[:, width:]),
        (cache[:, :width], sin.contiguous()),
        (cos.T.contiguous().T, torch.cat((sin, sin, sin), dim=1)[:, width : 2 * width]),
    ):
        actual = ropelab.apply_rope(q, k, cos=c, sin=s)
        assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


@layouts
def test_inplace_writes_the_same_bits_into_the_inputs(device, layout):
    for shape in SHAPES:
        q, k, cos, sin = inputs(shape, device)
        expected = ropelab.apply_rope(q, k, cos=cos, sin=sin, layout=layout)
        actual = ropelab.apply_rope(q, k, cos=cos, sin=sin, layout=layout, inplace=True)
        assert actual[0] is q and actual[1] is k
        assert torch.equal(q, expected[0]) and torch.equal(k, expected[1])


def strided_copies(x):
    """``x`` in the memory layouts that models use."""
    batch, seq_len, heads, head_dim = x.shape
    padded = torch.full((batch, seq_len + 1, heads + 2, head_dim + 3), float("nan"), dtype=x.dtype, device=x.device)
    view = padded[:, 1:, 1:-1, 3:]
    yield "a slice of a larger buffer", view.copy_(x)
    yield "heads before tokens", x.transpose(1, 2).contiguous().transpose(1, 2)
    yield "tokens before batches", x.transpose(0, 1).contiguous().transpose(0, 1)
    yield "features strided by two", torch.stack((x, x), dim=-1)[..., 0]
    yield "features outermost", x.permute(3, 0, 1, 2).contiguous().permute(1, 2, 3, 0)
    yield "tokens reversed in memory order of heads", x.transpose(2, 3).contiguous().transpose(2, 3)


@layouts
def test_strides_do_not_matter(device, layout):
    q, k, cos, sin = inputs((2, 5, 4, 2, 16, 12), device)
    options = {"cos": cos, "sin": sin, "layout": layout}
    expected = ropelab.apply_rope(q, k, **options)
    for (name, q_view), (_, k_view) in zip(strided_copies(q), strided_copies(k), strict=True):
        for actual in (
            ropelab.apply_rope(q_view, k_view, **options),
            ropelab.apply_rope(q_view, k_view, inplace=True, **options),
        ):
            assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1]), name


def test_nothing_around_a_view_is_touched(device):
    """q and k rotate in place inside one packed buffer; v and the padding keep their bits."""
    batch, seq_len, q_heads, k_heads, head_dim = 2, 5, 4, 2, 16
    qkv = draw(batch, seq_len, q_heads + 2 * k_heads, head_dim + 1, device=device)
    before = qkv.clone()
    q, k = qkv[:, :, :q_heads, :-1], qkv[:, :, q_heads : q_heads + k_heads, :-1]
    cos, sin = ropelab.rotary_table(seq_len, head_dim, device=device)
    expected = ropelab.apply_rope(q, k, cos=cos, sin=sin)
    ropelab.apply_rope(q, k, cos=cos, sin=sin, inplace=True)
    assert torch.equal(q, expected[0]) and torch.equal(k, expected[1])
    assert torch.equal(qkv[:, :, q_heads + k_heads :], before[:, :, q_heads + k_heads :])
    assert torch.equal(qkv[..., -1], before[..., -1])


@pytest.mark.parametrize("empty", [(0, 5, 4, 2), (2, 0, 4, 2), (2, 5, 0, 2), (2, 5, 4, 0), (2, 5, 0, 0)])
def test_empty_tensors(device, empty):
    q, k, cos, sin = inputs((*empty, 8, 8), device)
    rotated = ropelab.apply_rope(q, k, cos=cos, sin=sin)
    for actual, x in zip(rotated, (q, k), strict=True):
        assert_rotated(actual, x, cos, sin, layout="split_half") if x.numel() else None
        assert actual.shape == x.shape


def small_leaves(device):
    q, k, cos, sin = inputs((2, 2, 1, 1, 5, 4), device, dtype=torch.float64, table_dtype=torch.float64)
    return [x.clone().requires_grad_() for x in (q, k, cos[:3], sin[:3])]


@layouts
@pytest.mark.parametrize("inverse", [False, True])
def test_gradients_of_every_order(torch_backend, layout, inverse):
    def rope(q, k, cos, sin):
        return ropelab.apply_rope(q, k, cos=cos, sin=sin, layout=layout, inverse=inverse)

    assert torch.autograd.gradcheck(rope, small_leaves("cpu"), fast_mode=True)
    assert torch.autograd.gradgradcheck(rope, small_leaves("cpu"), fast_mode=True)


@layouts
@pytest.mark.parametrize("inverse", [False, True])
def test_kernels_have_the_gradients_of_torch_operations(layout, inverse):
    """In bits, of both orders: `gradcheck` through the interpreter takes ten seconds."""
    leaves, found = small_leaves("cuda" if torch.cuda.is_available() else "cpu"), []
    weights = [torch.randn_like(x, requires_grad=True) for x in leaves]
    for backend in BACKENDS:
        with ropelab.use_backend(backend):
            rotated = ropelab.apply_rope(*leaves[:2], cos=leaves[2], sin=leaves[3], layout=layout, inverse=inverse)
            first = torch.autograd.grad(rotated, leaves, weights[:2], create_graph=True)
            second = torch.autograd.grad(first, [*leaves, *weights[:2]], [w.detach() for w in weights])
            found.append((*rotated, *first, *second))
    assert all(map(torch.equal, *found))


@layouts
@pytest.mark.parametrize("seq_format", SEQ_FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_backward_is_the_inverse_rotation(device, layout, seq_format, dtype):
    q, k, cos, sin = inputs((2, 5, 4, 2, 16, 12), device, seq_format=seq_format, dtype=dtype)
    options = {"layout": layout, "seq_format": seq_format}
    q.requires_grad_(), k.requires_grad_()
    rotated = ropelab.apply_rope(q, k, cos=cos, sin=sin, **options)
    cotangents = [torch.randn_like(y) for y in rotated]
    for x_grad, g in zip(torch.autograd.grad(rotated, (q, k), cotangents), cotangents, strict=True):
        assert_rotated(x_grad, g, cos, sin, inverse=True, **options)


def test_an_unused_output_costs_no_gradient(device):
    q, k, cos, sin = inputs(SHAPES[0], device)
    q.requires_grad_(), k.requires_grad_()
    rotated_q, _ = ropelab.apply_rope(q, k, cos=cos, sin=sin)
    rotated_q.square().sum().backward()
    assert q.grad is not None and k.grad is None


@pytest.mark.parametrize("inplace", [False, True])
def test_only_what_depends_on_a_leaf_requires_grad(device, inplace):
    *xs, cos, sin = inputs(SHAPES[0], device)
    for trained in range(2):
        leaf = xs[trained].clone().requires_grad_()
        given = [leaf * 1 if i == trained else x.clone() for i, x in enumerate(xs)]
        rotated = ropelab.apply_rope(*given, cos=cos, sin=sin, inplace=inplace)
        assert [y.requires_grad for y in rotated] == [trained == 0, trained == 1]
        g = torch.randn_like(leaf)
        (grad,) = torch.autograd.grad(rotated[trained], leaf, g)
        assert_rotated(grad, g, cos, sin, layout="split_half", inverse=True)
    rotated_q, _ = ropelab.apply_rope(*xs, cos=cos.clone().requires_grad_(), sin=sin)
    assert rotated_q.requires_grad


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


def test_autograd_learns_of_what_is_overwritten_outside_of_it(device):
    """Neither q nor k takes part in the gradient, but another operation has saved them for it."""
    q, k, cos, sin = inputs((2, 5, 3, 2, 16, 16), device)
    weight = torch.ones(16, device=device, requires_grad=True)
    for other in (q, k):
        product = (other * weight).sum()
        ropelab.apply_rope(q, k, cos=cos, sin=sin, inplace=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


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


def test_tables_get_gradients_summed_over_heads_and_batches(device):
    q, k, cos, sin = inputs((3, 4, 2, 5, 8, 6), device)
    cos, sin = cos.clone().requires_grad_(), sin.clone().requires_grad_()
    y, _ = ropelab.apply_rope(q, k, cos=cos, sin=sin)
    g = torch.randn_like(y)
    cos_grad, sin_grad = torch.autograd.grad(y, (cos, sin), g)
    g0, g1, x0, x1 = g[..., :3], g[..., 3:6], q[..., :3], q[..., 3:6]
    torch.testing.assert_close(cos_grad[:4], (g0 * x0 + g1 * x1).sum((0, 2)))
    torch.testing.assert_close(sin_grad[:4], (g1 * x0 - g0 * x1).sum((0, 2)))
    assert not cos_grad[4:].any() and not sin_grad[4:].any()
