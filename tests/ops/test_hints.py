"""The interpreter refuses what would fault on a GPU: wrong hints, and addresses outside of the tensors of a launch."""

import sys

import pytest
import torch

import ropelab
from ropelab.kernels import INTERPRETED
from ropelab.layout.pairing import LAYOUTS

if not INTERPRETED or "tests.interpreter" not in sys.modules:
    pytest.skip("needs Triton's interpreter with the checks of tests/interpreter.py", allow_module_level=True)

import triton
import triton.language as tl


@triton.jit
def _copy(x_ptr, y_ptr, FIRST: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr, MULTIPLE: tl.constexpr):
    feature = tl.max_contiguous(FIRST + STEP * tl.arange(0, 8), GROUP)
    feature = tl.multiple_of(feature, MULTIPLE)
    tl.store(y_ptr + feature, tl.load(x_ptr + feature))


@pytest.mark.parametrize(
    ("first", "step", "group", "multiple", "told"),
    [
        (8, 1, 4, 4, None),
        (0, 2, 1, 2, None),
        (7, 1, 2, 1, None),
        (7, 1, 2, 2, "expected multiples of 2"),
        (2, 1, 4, 4, "expected multiples of 4"),
        (0, 2, 2, 1, "expected groups of 2 adjacent"),
    ],
)
def test_a_wrong_hint_is_refused(first, step, group, multiple, told):
    x, y = torch.arange(32.0), torch.zeros(32)
    if told is None:
        _copy[(1,)](x, y, first, step, group, multiple)
        assert y.count_nonzero() >= 7
        return
    with pytest.raises(Exception, match=told):
        _copy[(1,)](x, y, first, step, group, multiple)


@triton.jit
def _move(x_ptr, y_ptr, count, FROM: tl.constexpr, TO: tl.constexpr):
    place = tl.arange(0, 8)
    x = tl.load(x_ptr + FROM + place, mask=place < count, other=0.0)
    tl.store(y_ptr + TO + place, x, mask=place < count)


@pytest.mark.parametrize(("count", "source", "target"), [(8, 0, 0), (5, 3, 0), (8, 1, 0), (8, 0, -1), (5, 0, 4)])
def test_an_address_outside_of_the_tensors_is_refused(count, source, target):
    """The tensors are parts of larger tensors, so that no other memory is touched."""
    x, y = torch.arange(32.0)[8:16], torch.zeros(32)[8:16]
    if source + count <= 8 and 0 <= target <= 8 - count:
        _move[(1,)](x, y, count, source, target)
        assert torch.equal(y[:count], x[source : source + count])
        return
    with pytest.raises(Exception, match="expected addresses within the tensors of the launch, got 1 others"):
        _move[(1,)](x, y, count, source, target)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head_dim, rotary_dim", [(20, 8), (20, 6), (24, 16), (40, 32), (9, 2)])
def test_the_hints_hold_for_every_slice_of_a_head(layout, head_dim, rotary_dim):
    """Every first feature up to 8, and the last: the rotation, also in place, the norm and its gradients, a cache."""
    tokens = 1  # hints speak of features alone
    cos, sin = ropelab.rotary_table(8, rotary_dim)
    slots = torch.arange(tokens)
    last = head_dim - rotary_dim
    for first in {*range(min(last, 8)), last}:  # a hint holds modulo 8 features
        q, k = (torch.randn(1, tokens, heads, head_dim, requires_grad=True) for heads in (2, 1))
        weights = [torch.randn(head_dim, requires_grad=True) for _ in range(2)]
        options = {"cos": cos, "sin": sin, "layout": layout, "rotary_slice": (first, first + rotary_dim)}
        ropelab.apply_rope(q, k, positions=torch.arange(tokens), **options)
        ropelab.apply_rope(q.detach().clone(), k.detach().clone(), inplace=True, **options)
        normed = ropelab.apply_qk_norm_rope(q, k, *weights, positions=torch.arange(tokens), **options)
        torch.autograd.grad(normed, [q, k, *weights], [torch.randn_like(y) for y in normed])
        caches = [torch.zeros(1, 4, 1, head_dim) for _ in range(2)]
        ropelab.rope_and_cache(q[0].detach(), k[0].detach(), k[0].detach(), *caches, slots, **options)
