"""In place everything is written or nothing is: a refused call leaves q and k as they were."""

import numpy as np
import pytest
import torch

import ropelab
from ropelab.call.memory import may_share_elements, overlaps_itself

SEQ_LEN, HEADS, HEAD_DIM = 5, 2, 8


def tensors_of(make: str, needs_grad: bool, device: str) -> torch.Tensor:
    """A tensor ``[1, S, H, D]`` of normal numbers, made in one of the ways that autograd tells apart."""
    shape = 1, SEQ_LEN, HEADS, HEAD_DIM
    qkv = torch.randn(1, SEQ_LEN, 3 * HEADS, HEAD_DIM, device=device)
    result = qkv.requires_grad_(needs_grad) * 1
    match make:
        case "leaf":
            return torch.randn(shape, device=device, requires_grad=needs_grad)
        case "leaf that is a view":
            return torch.randn(2 * SEQ_LEN, HEADS, HEAD_DIM, device=device)[None, :SEQ_LEN].requires_grad_(needs_grad)
        case "view of a leaf":
            return qkv[:, :, :HEADS]
        case "result":
            return torch.randn(shape, device=device, requires_grad=needs_grad) * 1
        case "slice":
            return result[:, :, HEADS : 2 * HEADS]
        case "split":
            return result.split(HEADS, dim=2)[1]
        case "chunk":
            return result.chunk(3, dim=2)[0]
        case "slice of a split":
            return result.split(2 * HEADS, dim=2)[0][:, :, :HEADS]
        case "unbind":
            return torch.stack([result[:, :, :HEADS], result[:, :, HEADS : 2 * HEADS]]).unbind()[1]
        case "view under no_grad":
            with torch.no_grad():
                return result[:, :, :HEADS]
        case "view in inference mode":
            with torch.inference_mode():
                return result[:, :, :HEADS]
        case "inference tensor":
            with torch.inference_mode():
                return torch.randn(shape, device=device)


MAKES = (
    "leaf", "leaf that is a view", "view of a leaf", "result", "slice", "split", "chunk", "slice of a split", "unbind",
    "view under no_grad", "view in inference mode", "inference tensor",
)  # fmt: skip
WAYS = [(make, needs_grad) for make in MAKES for needs_grad in (False, True) if (make, needs_grad) != (MAKES[-1], True)]


class Plain(torch.Tensor):
    """A subclass that changes nothing, as libraries have them."""


@pytest.mark.parametrize("subclass", [False, True], ids=["tensor", "subclass"])
@pytest.mark.parametrize("grad_mode", ["grad", "no_grad", "inference_mode"])
@pytest.mark.parametrize("q_way", WAYS, ids=str)
def test_is_done_for_q_and_k_or_refused_before(torch_backend, q_way, grad_mode, subclass):
    """Every pair of ways to make q and k: torch itself says whether both may be written (``mul_``)."""
    cos, sin = ropelab.rotary_table(SEQ_LEN, HEAD_DIM)
    mode = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[grad_mode]
    for k_way in WAYS[:: 3 if subclass else 1]:
        q, k = tensors_of(*q_way, "cpu"), tensors_of(*k_way, "cpu")
        if subclass:
            q = q.as_subclass(Plain)
        before = [x.detach().clone() for x in (q, k)]
        allowed = all(_torch_allows_writing(way, mode) for way in (q_way, k_way))
        with mode():
            expected = ropelab.apply_rope(*before, cos=cos, sin=sin)
            if allowed:
                assert all(a is b for a, b in zip(rope_(q, k, cos, sin), (q, k), strict=True))
                for x, e in zip((q, k), expected, strict=True):
                    assert torch.equal(x.detach(), e)
            else:
                with pytest.raises(ValueError, match="^[qk]: expected a tensor that"):
                    rope_(q, k, cos, sin)
                for x, b in zip((q, k), before, strict=True):
                    assert torch.equal(x.detach(), b)


def rope_(q, k, cos, sin):
    return ropelab.apply_rope(q, k, cos=cos, sin=sin, inplace=True)


def _torch_allows_writing(way, mode) -> bool:
    x = tensors_of(*way, "cpu")
    with mode():
        try:
            x.mul_(2)
        except RuntimeError:
            return False
    return True


def test_memory_that_two_storages_share_is_seen(torch_backend):
    array = np.random.default_rng(0).standard_normal((1, SEQ_LEN, 3, HEAD_DIM), dtype=np.float32)
    q, k = torch.from_numpy(array[:, :, :2]), torch.from_numpy(array[:, :, 1:])
    apart = torch.from_numpy(array[:, :, 2:])
    cos, sin = ropelab.rotary_table(SEQ_LEN, HEAD_DIM)
    assert may_share_elements(q, k) and not may_share_elements(q, apart)
    expected = ropelab.apply_rope(q, apart, cos=cos, sin=sin)
    for _ in range(2):  # the second call finds the first one prepared
        before = array.copy()
        with pytest.raises(ValueError, match="k: expected memory disjoint from q's"):
            rope_(q, k, cos, sin)
        assert np.array_equal(array, before)
    rope_(q, apart, cos, sin)
    assert torch.equal(q, expected[0]) and torch.equal(apart, expected[1])
    other = torch.randn(1, SEQ_LEN, 2, HEAD_DIM)
    ropelab.apply_rope(other, k.clone(), cos=cos, sin=sin, inplace=True)
    with pytest.raises(ValueError, match="k: expected memory disjoint from q's"):
        rope_(q, k, cos, sin)


def test_nothing_to_write_is_no_overlap(device):
    cos, sin = ropelab.rotary_table(SEQ_LEN, HEAD_DIM, device=device)
    q = torch.empty(1, 1, 1, HEAD_DIM, device=device).expand(0, SEQ_LEN, 2, HEAD_DIM)
    assert not overlaps_itself(q)
    assert rope_(q, q, cos, sin)[0] is q


OVERLAPPING = {
    "k is q": lambda x: (x[:, :, :2] * 1,) * 2,
    "k within q": lambda x: (x[:, :, :3], x[:, :, 2:]),
    "q expanded": lambda x: (x[:, :, :1].expand(-1, -1, 2, -1), x[:, :, 1:2]),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("needs_grad", [False, True])
@pytest.mark.parametrize("case", OVERLAPPING)
def test_overlap_is_refused_under_torch_compile(torch_backend, case, needs_grad, dynamic):
    cos, sin = ropelab.rotary_table(SEQ_LEN, HEAD_DIM)

    def rope(x):
        q, k = OVERLAPPING[case](x)
        q, k = rope_(q, k, cos, sin)
        return q.sum() + k.sum()

    x = torch.randn(1, SEQ_LEN, 4, HEAD_DIM, requires_grad=needs_grad) * 1
    before = x.detach().clone()
    torch._dynamo.reset()
    # torch 2.14 shows the message in quotes, with backslashes before its own.
    with pytest.raises(Exception, match=r"expected (memory disjoint from q\\*'s|elements at distinct addresses)"):
        torch.compile(rope, backend="aot_eager", fullgraph=True, dynamic=dynamic)(x)
    assert torch.equal(x, before)


def test_overlap_of_a_subclass_is_refused(torch_backend):
    cos, sin = ropelab.rotary_table(SEQ_LEN, HEAD_DIM)
    x = torch.randn(1, SEQ_LEN, 4, HEAD_DIM)
    q, k = x[:, :, :3].as_subclass(Plain), x[:, :, 2:].as_subclass(Plain)
    before = x.clone()
    with pytest.raises(ValueError, match="k: expected memory disjoint from q's"):
        rope_(q, k, cos, sin)
    assert torch.equal(x, before)


VIEWS = {
    "select": lambda qkv: (qkv[:, :, 0], qkv[:, :, 1]),
    "unbind": lambda qkv: qkv.unbind(2)[:2],
    "squeeze": lambda qkv: (qkv[:, :, 0:1].squeeze(2), qkv[:, :, 1:2].squeeze(2)),
    "slice": lambda qkv: (qkv.flatten(2, 3)[:, :, :2], qkv.flatten(2, 3)[:, :, 2:4]),
    "split": lambda qkv: qkv.flatten(2, 3).split(2, dim=2)[:2],
    "transpose": lambda qkv: (qkv[:, :, 0].transpose(1, 2).transpose(1, 2), qkv[:, :, 1]),
}


@pytest.mark.parametrize(
    ("made", "backend", "both"),
    [(made, "aot_eager", number % 2 == 0) for number, made in enumerate(VIEWS)]
    + [pytest.param(made, "inductor", False, marks=pytest.mark.gpu) for made in ("select", "unbind", "squeeze")],
)
def test_views_are_overwritten_under_torch_compile(torch_backend, made, both, backend):
    """The shapes are dynamic: Inductor then hands an operator the wrong place of a view (pytorch#198068)."""

    def rope(qkv, cos, sin):
        q, k = VIEWS[made](qkv)
        if both:
            ropelab.apply_rope(q, k, cos=cos, sin=sin, inplace=True)
        else:
            ropelab.apply_rope(k, cos=cos, sin=sin, inplace=True)
        return qkv * 1

    torch._dynamo.reset()
    compiled = torch.compile(rope, fullgraph=True, dynamic=True, backend=backend)
    for seq_len in (5, 7):
        cos, sin = ropelab.rotary_table(seq_len, HEAD_DIM)
        qkv = torch.randn(1, seq_len, 3, 2, HEAD_DIM)
        eager, traced = qkv.clone(), qkv.clone()
        expected, actual = rope(eager, cos, sin), compiled(traced, cos, sin)
        assert torch.equal(actual, expected) and torch.equal(traced, eager)


@pytest.mark.parametrize("where", ["q", "k", "cos", "positions"])
def test_inference_tensors_are_refused_by_name_while_autograd_records(torch_backend, where):
    with torch.inference_mode():
        made = {
            "q": torch.randn(1, SEQ_LEN, HEADS, HEAD_DIM), "k": torch.randn(1, SEQ_LEN, HEADS, HEAD_DIM),
            "cos": torch.randn(SEQ_LEN, 4), "positions": torch.arange(SEQ_LEN),
        }  # fmt: skip
    arguments = {"q": made["q"].clone().requires_grad_(), "k": made["k"].clone(), "cos": made["cos"].clone()}
    arguments |= {"sin": torch.randn(SEQ_LEN, 4), where: made[where]}
    if where in ("q", "k"):  # which autograd keeps for the gradients of tables
        arguments["sin"].requires_grad_()
    with pytest.raises(ValueError, match=f"{where}: expected a tensor made outside of torch.inference_mode"):
        ropelab.apply_rope(arguments.pop("q"), arguments.pop("k"), **arguments)
