"""A function of JAX gets tensors of torch by DLPack, keeps the laws, and is convicted as any other."""

import pytest
import torch

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy

from ropelab.conformance import verify  # noqa: E402
from ropelab.conformance.jax_arrays import of_jax  # noqa: E402

FEW = ("definition", "adjoint", "second_order", "dtype", "rounding", "empty", "compile", "inputs_unchanged")


def huggingface(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = (jnp.expand_dims(table, unsqueeze_dim) for table in (cos, sin))

    def half(x):
        x0, x1 = jnp.split(x, 2, -1)
        return jnp.concatenate((-x1, x0), -1)

    return q * cos + half(q) * sin, k * cos + half(k) * sin


def test_a_right_function_of_jax_keeps_the_laws():
    report = verify(huggingface, "huggingface", arrays="jax", laws=FEW)
    assert report.passed and report["adjoint"].status == report["second_order"].status == "pass"
    assert report["compile"].message == "the function is excluded from torch.compile"


def test_a_wrong_function_of_jax():
    def wrong(q, k, cos, sin, unsqueeze_dim=1):
        return huggingface(q, k, cos, sin)[0], huggingface(q, k, cos, -sin)[1]

    report = verify(wrong, "huggingface", arrays="jax", laws=["definition"])
    assert report["definition"].counterexample.what == "k"


def test_numbers_shapes_and_gradients_go_there_and_back():
    function = of_jax(lambda x, n, *, scale: x * scale + n)
    x = torch.randn(2, 3, 5).mT.requires_grad_()
    y = function(x, torch.arange(3), scale=2.0)
    assert torch.equal(y, 2 * x + torch.arange(3)) and torch.equal(torch.autograd.grad(y.sum(), x)[0], 2 + 0 * x)
    assert of_jax(lambda x: x[:0])(x).shape == (0, 5, 3)
    with pytest.raises(NotImplementedError, match="float64"):
        function(x.double(), 1, scale=1.0)


def test_arrays_that_cannot_be_overwritten_take_no_convention_in_place():
    with pytest.raises(ValueError, match="arrays: expected torch for a convention in place"):
        verify(huggingface, "vllm", arrays="jax")
