"""Functions of latent attention: the heads that share a key, the key beside it, and the value."""

import pytest
import torch

from ropelab.conformance import verify
from ropelab.conformance.declared import declare
from ropelab.conformance.faults import correct
from ropelab.conformance.identify import identify
from ropelab.conformance.latent_conventions import _weights
from ropelab.conformance.surroundings import Surroundings
from tests.laws.test_identify import one_thread  # noqa: F401


class Spread(torch.autograd.Function):
    """A key for all heads, whose gradient is a weighted sum over them."""

    @staticmethod
    def forward(ctx, k, heads, weights):
        ctx.weights = torch.tensor([float(weights(head, heads)) for head in range(heads)])[:, None]
        return k.expand(*k.shape[:-2], heads, k.shape[-1]).clone()

    @staticmethod
    def backward(ctx, grad):
        return (ctx.weights.to(grad.dtype) * grad).sum(-2, keepdim=True), None, None


def shared(weights=lambda head, heads: 1, change=lambda key, value, nope_dim: (key, value)):
    def assemble_mla_kv(kv, k_pe, nope_dim, *, seq_format, **options):
        if seq_format not in ("bshd", "thd"):
            raise NotImplementedError
        key, value = correct.assemble_mla_kv(kv[..., :1, :], k_pe, nope_dim, seq_format=seq_format, **options)
        turned = Spread.apply(key[..., nope_dim:], kv.shape[-2], weights)
        return change(torch.cat((kv[..., :nope_dim], turned), -1), kv[..., nope_dim:].clone(), nope_dim)

    return assemble_mla_kv


def without_the_last_heads(key, value, nope_dim):
    return torch.cat((key[..., :nope_dim], key[..., nope_dim:] * (torch.arange(key.shape[-2]) < 3)[:, None]), -1), value


def value_as_wide_as_the_key(key, value, nope_dim):
    return key, torch.where(torch.arange(value.shape[-1]) < nope_dim, value, 0)


CASES = {
    "the gradient of k_pe lacks head 2 of 3, head 4 of 5, head 16 of 17; it is right for 1, 2, 4, 8 heads": shared(
        lambda head, heads: heads == 1 or head < heads // 2 * 2
    ),
    "the gradient of k_pe is that of the first of the heads that share it, and not the sum over the heads": shared(
        lambda head, heads: head == 0
    ),
    "the gradient of k_pe is the mean over the heads that share it, and not the sum": shared(
        lambda head, heads: 1 / heads
    ),
    "k_pe in the key is zero in head 3": shared(change=without_the_last_heads),
    "the value is zero in features 4 to 15": shared(change=value_as_wide_as_the_key),
}


@pytest.mark.parametrize("words", CASES)
def test_what_heads_do_with_a_key_that_they_share(words):
    declaration = declare("assemble_mla_kv")
    found = identify(declaration.subject(CASES[words], Surroundings()), declaration.sizes)
    assert found.proven and words in map(str, found.deviations), found.words()
    law = "adjoint" if "gradient" in words else "definition"
    assert verify(CASES[words], "assemble_mla_kv", laws=[law], diagnose=False, shrink=False).failed == (law,)


@pytest.mark.parametrize("heads", [1, 2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_any_number_of_heads_is_right(heads, dtype):
    laws = ["definition", "tail", "adjoint", "adjoint_strided", "second_order", "second_backward"]
    options = {"laws": laws, "q_heads": heads, "k_heads": heads, "dtype": dtype}
    report = verify(shared(), "assemble_mla_kv", **options)
    assert report.passed, str(report)


def test_weights_tell_the_heads_of_a_sum_apart():
    for count in range(2, 20):
        weights = _weights(count)
        assert sum(weights) == 1 != weights[0] and all(weights)
        sums = [sum(weights[:n]) for n in range(count)] + [sum(weights[n:]) for n in range(count)]
        assert all(abs(s) in (0, 1, 2) for s in sums)  # no sum needs more bits than its terms
