"""Calls that name their axes give the bits of calls whose axes are found from the tables."""

import itertools

import pytest
import torch

from ropelab.interop import broadcast
from ropelab.interop.calls import KINDS

CASES = list(itertools.product(("bhsd", "bshd"), (1, 3), (1, 5), (False, True), (1, 2)))


def drawn(seq_format, batch, tokens, narrow, count, rows, columns):
    """One or two tensors cut out of a wider one, and tables for one batch or for all."""
    sizes = {"b": batch, "s": tokens}
    wide = [torch.randn([sizes.get(axis, heads) for axis in seq_format[:3]] + [20]) for heads in (4, 1)[:count]]
    shape = [sizes["s"] if axis == "s" else 1 for axis in seq_format[1:3]]
    return [x[..., 2:14] for x in wide], *(torch.randn(rows, *shape, columns // (2 if narrow else 1)) for _ in range(2))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.layout}-{kind.columns}")
def test_a_named_format_changes_no_bit(kind, torch_backend, monkeypatch):
    columns = 6 if kind.columns == "pair" else 12
    for seq_format, batch, tokens, narrow, count in CASES:
        for rows in {1, batch}:
            narrow_columns = narrow and columns % 4 == 0
            xs, cos, sin = drawn(seq_format, batch, tokens, narrow_columns, count, rows, columns)
            xs = [x.requires_grad_() for x in xs]
            named = kind.rotate(xs, cos, sin)
            with monkeypatch.context() as patched:
                patched.setattr(broadcast, "_format_of", lambda *given: None)
                found = kind.rotate(xs, cos, sin)
            assert [y.shape for y in named] == [x.shape for x in xs]
            for y, expected in zip(named, found, strict=True):
                assert torch.equal(y, expected) and y.stride() == expected.stride()
            cotangents = [torch.randn_like(y) for y in named]
            for g, expected in zip(
                torch.autograd.grad(named, xs, cotangents), torch.autograd.grad(found, xs, cotangents), strict=True
            ):
                assert torch.equal(g, expected)


@pytest.mark.parametrize("seq_format", ["bhsd", "bshd"])
def test_a_named_format_changes_no_bit_of_a_norm(seq_format, torch_backend, monkeypatch):
    xs, cos, sin = drawn(seq_format, 2, 5, False, 2, 2, 12)
    leaves = [x.detach().requires_grad_() for x in (*xs, *torch.randn(2, 12))]
    named = KINDS[0].norm_and_rotate(leaves[:2], leaves[2:], cos, sin, 1e-6)
    monkeypatch.setattr(broadcast, "_format_of", lambda *given: None)
    found = KINDS[0].norm_and_rotate(leaves[:2], leaves[2:], cos, sin, 1e-6)
    cotangents = [torch.randn_like(y) for y in named]
    gradients = [torch.autograd.grad(ys, leaves, cotangents) for ys in (named, found)]
    for y, expected in zip((*named, *gradients[0]), (*found, *gradients[1]), strict=True):
        assert torch.equal(y, expected) and y.stride() == expected.stride()


def refused():
    """Tensors and tables without a format: heads that differ, tokens that differ, another dtype, rank or batch."""
    q, k, row = torch.randn(2, 4, 5, 12), torch.randn(2, 1, 5, 12), torch.randn(1, 1, 5, 12)
    yield [q, k], torch.randn(1, 4, 5, 12)
    yield [q, k[:, :, :4]], row
    yield [q, k[..., :10]], row
    yield [q, k.half()], row
    yield [q, k], row.half()
    yield [q, k[0]], row
    yield [q, k[:1]], row
    yield [q, k], torch.randn(3, 1, 5, 12)
    yield [q, k], row[0]


@pytest.mark.parametrize("number", range(9))
def test_other_tables_name_no_format(number):
    xs, cos = list(refused())[number]
    sin = torch.randn(cos.shape, dtype=torch.float32 if cos.dtype == torch.float16 else cos.dtype)
    views = broadcast._Views.of(xs, cos, sin, per_pair=False)
    assert views is None or views.axes is not None
