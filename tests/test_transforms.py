"""What PyTorch does with a function besides calling it: compile, trace, checkpoint, autocast, differentiate."""

import pytest
import torch
import torch._dynamo.testing

import ropelab
from ropelab import ops
from tests.support import assert_rotated, draw


def inputs(device, seq_len=5, rows=40):
    q = draw(2, seq_len, 3, 16, device=device)
    k = draw(2, seq_len, 1, 16, device=device)
    return q, k, *ropelab.rotary_table(rows, 12, device=device)


@pytest.fixture
def compiler():
    """Counts compilations; ``dynamic`` from the start, as for a loop over sequences of any length."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def compiled(function):
        return torch.compile(function, fullgraph=True, dynamic=True, backend=counter)

    compiled.counter = counter
    yield compiled
    torch._dynamo.reset()


@pytest.mark.parametrize("where", ["rows", "positions", "offset", "offsets", "in place", "thd"])
def test_compiles_once_for_any_number_of_tokens(device, compiler, where):
    def rope(q, k, cos, sin, extra):
        if where == "thd":
            q, k = q.flatten(0, 1), k.flatten(0, 1)
            return ropelab.apply_rope(q, k, cos=cos, sin=sin, seq_format="thd", positions=extra)
        options = {
            "positions": {"positions": extra}, "offset": {"offsets": extra}, "offsets": {"offsets": extra},
            "in place": {"inplace": True}, "rows": {},
        }[where]  # fmt: skip
        return ropelab.apply_rope(q * 1, k * 1, cos=cos, sin=sin, **options)

    fast = compiler(rope)
    for seq_len in (5, 9, 14):
        q, k, cos, sin = inputs(device, seq_len)
        extra = {
            "positions": torch.randint(-9, 30, (2, seq_len), device=device),
            "offset": seq_len + 2,
            "offsets": torch.tensor([3, 7], device=device),
            "thd": torch.randint(0, 30, (2 * seq_len,), device=device),
        }.get(where)
        weights = torch.randn_like(q), torch.randn_like(k)
        results = []
        for function in (rope, fast):
            leaves = q.clone().requires_grad_(), k.clone().requires_grad_()
            rotated = function(*leaves, cos, sin, extra)
            loss = sum((y * w.reshape(y.shape)).sum() for y, w in zip(rotated, weights, strict=True))
            results.append((*rotated, *torch.autograd.grad(loss, leaves)))
        for eager, compiled in zip(*results, strict=True):
            assert torch.equal(eager, compiled)
        with torch.no_grad():
            assert torch.equal(fast(q, k, cos, sin, extra)[0], results[0][0])
    # One with and one without gradients.
    assert compiler.counter.frame_count == 2


@pytest.mark.parametrize("inplace", [False, True])
def test_operators_pass_opcheck(device, inplace):
    q, k, cos, sin = inputs(device)
    positions = torch.randint(-35, 36, (2, 5), device=device)
    for xs in ([q], [q, k], [q.transpose(1, 2), k.transpose(1, 2)]):
        seq_format = "bhsd" if xs[0].shape[1] == 3 else "bshd"
        for given, is_offset in ((None, False), (positions, False), (positions[:, 0], True)):
            arguments = (xs, cos, sin, given, 0, "split_half")
            if inplace:
                torch.library.opcheck(ops._rotate_in_place, (*arguments, seq_format, None, is_offset, False, False))
            else:
                options = "interleaved", seq_format, (2, 14), is_offset, True, False
                torch.library.opcheck(ops._rotate, (*arguments, *options))


def test_traces_with_fake_tensors(device):
    q, k, cos, sin = inputs(device)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.empty(2, 5, 3, 16, device=device)
        y = ropelab.apply_rope(fake, cos=torch.empty(9, 6, device=device), sin=torch.empty(9, 6, device=device))
        assert y.shape == fake.shape and y.dtype == fake.dtype and y.device == fake.device


def test_exports(device):
    class Attention(torch.nn.Module):
        def forward(self, q, k, cos, sin):
            return ropelab.apply_rope(q, k, cos=cos, sin=sin, layout="interleaved")

    q, k, cos, sin = inputs(device)
    exported = torch.export.export(Attention(), (q, k, cos, sin)).module()
    for actual, expected in zip(exported(q, k, cos, sin), Attention()(q, k, cos, sin), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing(device, use_reentrant):
    q, k, cos, sin = inputs(device)
    weight = torch.randn_like(q)

    def rope(q, k):
        rotated_q, rotated_k = ropelab.apply_rope(q * 2, k * 2, cos=cos, sin=sin)
        return rotated_q * weight + rotated_k

    leaves = q.requires_grad_(), k.requires_grad_()
    expected = torch.autograd.grad(rope(*leaves).sum(), leaves)
    loss = torch.utils.checkpoint.checkpoint(rope, *leaves, use_reentrant=use_reentrant).sum()
    loss.backward()  # reentrant checkpoints know no autograd.grad
    for actual, e in zip((q.grad, k.grad), expected, strict=True):
        assert torch.equal(actual, e)


def test_vjp_is_the_transposed_rotation(device):
    q, k, cos, sin = inputs(device)
    rotated, pull_back = torch.func.vjp(lambda q, k: ropelab.apply_rope(q, k, cos=cos, sin=sin), q, k)
    cotangents = tuple(torch.randn_like(y) for y in rotated)
    for grad, g in zip(pull_back(cotangents), cotangents, strict=True):
        assert_rotated(grad, g, cos, sin, layout="split_half", inverse=True)


@pytest.mark.parametrize("positions", [None, [4, -3, 0, 9, 2]])
def test_jvp_is_the_rotation_and_the_turn_of_the_tables(device, positions):
    q, k, cos, sin = inputs(device)
    where = {"positions": None if positions is None else torch.tensor(positions, device=device)}

    def rope(q, k, cos, sin):
        return ropelab.apply_rope(q, k, cos=cos, sin=sin, **where)

    tangents = tuple(torch.randn_like(x) for x in (q, k, cos, sin))
    _, actual = torch.func.jvp(rope, (q, k, cos, sin), tangents)
    _, of_inputs = torch.func.jvp(lambda q, k: rope(q, k, cos, sin), (q, k), tangents[:2])
    for a, b, x, t in zip(actual, of_inputs, (q, k), tangents[:2], strict=True):
        assert_rotated(b, t, cos, sin, layout="split_half", **where)
        turned = ropelab.reference.rotate(x, *tangents[2:], **where)
        turned[..., 12:] = 0
        torch.testing.assert_close(a.double(), b.double() + turned, rtol=1e-5, atol=1e-5)


def test_forward_over_reverse(device):
    """The Hessian-vector product of sum (R x)^2 / 2, which is that of the identity."""
    q, _, cos, sin = inputs(device)
    v = torch.randn_like(q)
    gradient = torch.func.grad(lambda x: ropelab.apply_rope(x, cos=cos, sin=sin).square().sum() / 2)
    _, product = torch.func.jvp(gradient, (q,), (v,))
    torch.testing.assert_close(product, v)


def test_overwriting_is_refused_where_autograd_cannot_follow(device):
    q, _, cos, sin = inputs(device)
    for transform in (torch.func.grad, torch.func.vmap):
        with pytest.raises((NotImplementedError, RuntimeError), match="inplace|vmap"):
            transform(lambda x: ropelab.apply_rope(x, cos=cos, sin=sin, inplace=True).sum())(q)
