"""PyTorch's uses of a function besides calling it: compile, trace, checkpoint, autocast, differentiate."""

import copy
from contextlib import nullcontext

import pytest
import torch

import ropelab
from tests.support import assert_rotated, draw


def inputs(device, seq_len=5, rows=40):
    q = draw(2, seq_len, 3, 16, device=device)
    k = draw(2, seq_len, 1, 16, device=device)
    return q, k, *ropelab.rotary_table(rows, 12, device=device)


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


def _layer(q, k, cos, sin):
    q, k = ropelab.apply_rope(q, k, cos=cos, sin=sin, offsets=1)
    return q * 2, k


class Layer(torch.nn.Module):
    """A part of a model that rotates: by a module of its own, and by all functions that are differentiable."""

    def __init__(self):
        super().__init__()
        self.rotary, self.scale = ropelab.RotaryEmbedding(16), torch.nn.Parameter(torch.ones(16))

    def forward(self, q, k, cos, sin):
        q, k = self.rotary(q * self.scale, k, seq_len=40)
        q, k = ropelab.apply_qk_norm_rope(q, k, self.scale, self.scale, cos=cos, sin=sin)
        q = ropelab.rotate_mla_query(q, 4, cos=cos, sin=sin)
        query, key, value = ropelab.assemble_mla(q, q, k[..., 4:], cos=cos, sin=sin)
        key_of_kv, _ = ropelab.assemble_mla_kv(q, k[..., 4:], 4, cos=cos, sin=sin)
        of_x, _, _ = ropelab.qkv_rope(q.flatten(2), torch.ones(48, 48), q_heads=1, k_heads=1, cos=cos, sin=sin)
        return query, key, value, key_of_kv, of_x


@pytest.mark.parametrize("name", ["function", "module", "model"])
def test_fx_traces_a_call_as_one_node(torch_backend, name):
    q, k, cos, sin = inputs("cpu")
    made = {"function": _layer, "module": ropelab.RotaryEmbedding(16), "model": Layer()}[name]
    arguments = (q, k) if name == "module" else (q, k, cos, sin)
    traced = torch.fx.symbolic_trace(made)
    for f in (traced, copy.deepcopy(traced)):
        for found, expected in zip(f(*arguments), made(*arguments), strict=True):
            assert torch.equal(found, expected)
    with pytest.raises(TypeError, match="did you mean positions"):
        torch.fx.symbolic_trace(lambda q: ropelab.apply_rope(q, cos=cos, sin=sin, position_ids=q))
    if name == "model":
        assert [n.target for n in traced.graph.nodes if n.op == "call_module"] == ["rotary"]


def test_vmap_without_tables(device):
    q, k, *_ = inputs(device)
    frequencies = ropelab.rotary_frequencies(12, device=device)
    q = torch.stack([q, 2 * q])
    actual = torch.func.vmap(lambda q: ropelab.apply_rope(q, k, frequencies=frequencies)[0])(q)
    assert torch.equal(actual, torch.stack([ropelab.apply_rope(x, k, frequencies=frequencies)[0] for x in q]))
    with pytest.raises(NotImplementedError, match="frequencies: expected the same frequencies for all examples"):
        torch.func.vmap(lambda f: ropelab.apply_rope(k, frequencies=f))(torch.stack([frequencies] * 2))


def rotation_matrix(rope, x):
    """The columns R e_i, one call each."""
    basis = torch.eye(x.numel(), dtype=x.dtype, device=x.device)
    return torch.stack([rope(e.view_as(x)) for e in basis], -1)


@pytest.mark.parametrize("strategy", ["reverse-mode", "forward-mode"])
def test_vectorized_jacobian_of_autograd(device, strategy):
    """Autograd's vectorized Jacobian batches gradients, or tangents, in a way of its own."""
    x = torch.randn(3, 2, 8, device=device)
    cos, sin = ropelab.rotary_table(3, 6, device=device)

    def rope(x):
        return ropelab.apply_rope(x, cos=cos, sin=sin, seq_format="thd")

    actual = torch.autograd.functional.jacobian(rope, x, vectorize=True, strategy=strategy).flatten(3)
    assert torch.equal(actual, rotation_matrix(rope, x))


def test_saved_tensor_hooks(device):
    q, k, cos, sin = inputs(device)
    leaves = q.requires_grad_(), k.requires_grad_(), cos.requires_grad_(), sin.requires_grad_()
    weights = torch.randn_like(q), torch.randn_like(k)
    seen, grads = [], []

    def pack(x):
        seen.append(x)
        return x.detach().cpu().clone()

    for hooks in (torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x.to(device)), nullcontext()):
        with hooks:
            ys = ropelab.apply_rope(*leaves[:2], cos=cos, sin=sin)
        grads.append(torch.autograd.grad(ys, leaves, weights))
    assert len(seen) == 4
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("inplace", [False, True])
def test_inference_mode(device, inplace):
    q, k, cos, sin = inputs(device)
    expected = ropelab.apply_rope(q, k, cos=cos, sin=sin)
    with torch.inference_mode():
        for _ in range(2):
            fresh = q.clone(), k.clone()  # inference tensors
            for actual, e in zip(ropelab.apply_rope(*fresh, cos=cos, sin=sin, inplace=inplace), expected, strict=True):
                assert torch.equal(actual, e)
        if inplace:
            q, k = ropelab.apply_rope(q, k, cos=cos, sin=sin, inplace=True)
            assert torch.equal(q, expected[0])
    leaf = torch.randn_like(q).requires_grad_()
    (grad,) = torch.autograd.grad(ropelab.apply_rope(leaf, cos=cos, sin=sin), leaf, expected[0])
    assert_rotated(grad, expected[0], cos, sin, layout="split_half", inverse=True)
