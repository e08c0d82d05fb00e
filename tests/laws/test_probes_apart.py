"""The numbers that a convention gives a function differ in every way that a mistake may exchange or negate them."""

import torch

from ropelab.conformance.projection_conventions import _hidden, passing


def _multiple(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether one tensor is the other times a number."""
    return x.shape == y.shape and bool((x * y.flatten()[0] - y * x.flatten()[0]).abs().max() < 1e-6)


def test_v_is_no_multiple_of_k_and_weights_are_not_square():
    for tokens, heads, features in ((1, 1, 4), (3, 1, 2), (5, 2, 8), (2, 3, 16)):
        q, k = torch.randn(1, tokens, 2 * heads, features), torch.randn(1, tokens, heads, features)
        v, (x, weight) = passing(k), _hidden(q, k)
        assert torch.equal(v.abs().flatten(-2).sort(-1)[0], k.abs().flatten(-2).sort(-1)[0])
        assert not _multiple(v, k) and not _multiple(v.flip(-1), k) and not _multiple(v.flip(-2), k)
        product = (x @ weight.T).split([2 * heads * features, heads * features, heads * features], -1)
        assert all(torch.equal(y, z.flatten(-2)) for y, z in zip(product, (q, k, v), strict=True))
        assert x.shape[-1] != weight.shape[0] and not torch.equal(weight[:, : len(weight)], weight[:, : len(weight)].T)
