"""The definition agrees with independent forms: complex numbers, a matrix, exact tables."""

import math

import pytest
import torch

import ropelab
from ropelab import reference
from ropelab.angles.frequencies import inverse_frequencies
from ropelab.layout.pairing import LAYOUTS, join, pairs, permutation
from ropelab.layout.seq_format import SEQ_FORMATS, from_bshd, to_bshd
from tests.support import draw


def test_frequencies_are_the_geometric_series_of_the_paper():
    torch.testing.assert_close(
        inverse_frequencies(8, 10000.0), torch.tensor([1.0, 0.1, 0.01, 0.001], dtype=torch.float64), rtol=1e-15, atol=0
    )


def test_tables_are_right_to_half_an_ulp_at_a_large_position():
    position, rotary_dim = 40_000, 6
    cos, sin = ropelab.rotary_table(position + 1, rotary_dim)
    assert cos.shape == sin.shape == (position + 1, rotary_dim // 2) and cos.dtype == torch.float32
    for i in range(rotary_dim // 2):
        angle = position * 10000.0 ** (-2 * i / rotary_dim)
        # half an ulp of float32, and what float64 loses at an angle this large
        bound = 2**-25 + 4 * angle * torch.finfo(torch.float64).eps
        assert abs(cos[position, i].item() - math.cos(angle)) <= bound
        assert abs(sin[position, i].item() - math.sin(angle)) <= bound


def test_interleaved_is_multiplication_by_a_unit_complex_number():
    x = draw(2, 5, 3, 8, dtype=torch.float64)
    cos, sin = ropelab.rotary_table(5, 8, dtype=torch.float64)
    turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.complex(cos, sin)[:, None, :]
    actual = reference.rotate(x, cos, sin, layout="interleaved")
    torch.testing.assert_close(actual, torch.view_as_real(turned).flatten(-2), rtol=0, atol=1e-15)


def test_split_half_is_the_block_matrix():
    """Hugging Face's form x cos + rotate_half(x) sin, written as one orthogonal matrix a token."""
    x = draw(1, 4, 2, 6, dtype=torch.float64)
    cos, sin = ropelab.rotary_table(4, 6, dtype=torch.float64)
    matrices = torch.stack(
        [
            torch.cat((torch.cat((c.diag(), -s.diag()), 1), torch.cat((s.diag(), c.diag()), 1)))
            for c, s in zip(cos, sin, strict=True)
        ]
    )
    torch.testing.assert_close(
        reference.rotate(x, cos, sin, layout="split_half"),
        torch.einsum("sij,bshj->bshi", matrices, x),
        rtol=0,
        atol=1e-15,
    )


@pytest.mark.parametrize("seq_format", SEQ_FORMATS)
def test_formats_differ_only_in_the_order_of_axes(seq_format):
    x = draw(1 if seq_format == "thd" else 2, 5, 3, 8, dtype=torch.float64)
    cos, sin = ropelab.rotary_table(7, 6, dtype=torch.float64)
    actual = reference.rotate(from_bshd(x, seq_format), cos, sin, seq_format=seq_format)
    assert torch.equal(to_bshd(actual, seq_format), reference.rotate(x, cos, sin))


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
def test_permutation_carries_one_layout_into_the_other(source, target):
    x = draw(1, 5, 2, 8, dtype=torch.float64)
    cos, sin = ropelab.rotary_table(5, 8, dtype=torch.float64)
    p = permutation(8, source, target)
    rotated_then_permuted = reference.rotate(x, cos, sin, layout=source)[..., p]
    assert torch.equal(reference.rotate(x[..., p], cos, sin, layout=target), rotated_then_permuted)


def test_permutation_spelled_out():
    assert permutation(6, "interleaved", "split_half").tolist() == [0, 2, 4, 1, 3, 5]
    assert permutation(6, "split_half", "interleaved").tolist() == [0, 3, 1, 4, 2, 5]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_join_undoes_pairs(layout):
    x = torch.arange(10)
    assert torch.equal(join(*pairs(x, layout), layout), x)
