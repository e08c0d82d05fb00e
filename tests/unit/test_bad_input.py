"""Arguments that cannot be served raise an error that names them; nothing is rotated by guess."""

import pytest
import torch

import ropelab
from ropelab.call.memory import may_share_elements, overlaps_itself

Q, K = torch.randn(2, 5, 4, 16), torch.randn(2, 5, 2, 16)
COS, SIN = ropelab.rotary_table(8, 16)

LIKELY = {
    "q of rank 3": ({"q": Q[0]}, "q", "thd"),
    "q and k are bhsd": ({"q": Q.transpose(1, 2), "k": K.transpose(1, 2)}, "k", "bhsd"),
    "q and k are bshd": ({"seq_format": "bhsd"}, "k", "bshd"),
    "tables of bhsd": (
        {"q": Q.repeat(1, 1, 2, 1).transpose(1, 2), "k": None, "cos": COS[:5], "sin": SIN[:5]}, "cos", "bhsd",
    ),
    "positions of bhsd": (
        {"q": Q.transpose(1, 2), "k": None, "positions": torch.arange(5)}, "positions", "bhsd",
    ),
    "k of another length, and no other format": ({"k": K[:, :4]}, "k", None),
}  # fmt: skip


@pytest.mark.parametrize(("change", "argument", "likely"), LIKELY.values(), ids=LIKELY)
def test_a_refusal_names_the_format_that_would_have_fitted(change, argument, likely):
    with pytest.raises(ValueError, match=f"^{argument}: expected .* got ") as refused:
        ropelab.apply_rope(**{"q": Q, "k": K, "cos": COS, "sin": SIN} | change)
    assert ("pass seq_format" in str(refused.value)) == bool(likely)
    assert not likely or f"'{likely}'" in str(refused.value)


@pytest.mark.gpu
def test_positions_in_gpu_memory_yield_nan():
    positions = torch.tensor([0, 8, 1, 2, -9], device="cuda")
    y = ropelab.apply_rope(Q.cuda(), cos=COS.cuda(), sin=SIN.cuda(), positions=positions)
    assert y[:, [1, 4]].isnan().all() and not y[:, [0, 2, 3]].isnan().any()


def test_inference_may_overwrite_a_leaf(device):
    q = torch.randn(1, 5, 2, 16, device=device, requires_grad=True)
    expected = ropelab.apply_rope(q.detach(), cos=COS.to(device), sin=SIN.to(device))
    with torch.no_grad():
        ropelab.apply_rope(q, cos=COS.to(device), sin=SIN.to(device), inplace=True)
    assert torch.equal(q, expected)


def test_overlap_within_a_tensor():
    x = torch.empty(24)
    assert not overlaps_itself(x.view(2, 3, 4))
    assert not overlaps_itself(x.view(2, 3, 4).permute(2, 0, 1))
    assert not overlaps_itself(x.view(2, 3, 4)[:, ::2, 1:3])
    assert overlaps_itself(x[:4].expand(3, 4))
    assert overlaps_itself(x.unfold(0, 4, 2))


def test_overlap_between_tensors():
    qkv = torch.empty(2, 5, 6, 8)
    assert not may_share_elements(qkv[:, :, :4], qkv[:, :, 4:])
    assert not may_share_elements(qkv[:, :, 4:], qkv[:, :, :4])
    assert not may_share_elements(qkv[..., ::2], qkv[..., 1::2])
    assert not may_share_elements(qkv.transpose(1, 2)[:, :4], qkv.transpose(1, 2)[:, 4:])
    assert not may_share_elements(qkv[:1], qkv[1:])
    assert not may_share_elements(qkv, qkv.clone())
    memory = torch.zeros(4, 20, dtype=torch.uint8)  # a number of float32 behind 16 bytes
    assert not may_share_elements(memory[:, :16], memory.view(torch.float32)[:, 4])
    assert may_share_elements(memory[:, :17], memory.view(torch.float32)[:, 4])
    assert may_share_elements(qkv, qkv)
    assert may_share_elements(qkv[:, :, :4], qkv[:, :, 3:])
    assert may_share_elements(qkv[:, 1:], qkv[:, :-1])
    assert may_share_elements(qkv[..., :5], qkv[..., 4:])


@pytest.mark.parametrize("seq_format", ["bshd", "thd"])
def test_positions_of_one_batch_serve_all(device, seq_format):
    """Hugging Face's position_ids are ``[1, S]`` where all sequences of a batch share them."""
    q, cos, sin = (x.to(device) for x in (Q[0] if seq_format == "thd" else Q, COS, SIN))
    positions = torch.tensor([4, -3, 0, 7, 2], device=device)
    options = {"cos": cos, "sin": sin, "seq_format": seq_format}
    expected = ropelab.apply_rope(q, positions=positions, **options)
    assert torch.equal(ropelab.apply_rope(q, positions=positions[None], **options), expected)


def test_a_sparse_tensor_is_refused_after_a_strided_one_of_its_shape(device):
    """A sparse tensor has the strides of an expanded one, so these must not decide alone."""
    cos, sin = COS.to(device), SIN.to(device)
    ropelab.apply_rope(torch.zeros(1, 1, 1, 1, device=device).expand(Q.shape), cos=cos, sin=sin)
    with pytest.raises(ValueError, match="q: expected a dense tensor"):
        ropelab.apply_rope(Q.to(device).to_sparse(), cos=cos, sin=sin)
