"""Arguments that cannot be served raise an error that names them; nothing is rotated by guess."""

import warnings

import numpy as np
import pytest
import torch

import ropelab
from ropelab.call.memory import may_share_elements, overlaps_itself

Q, K = torch.randn(2, 5, 4, 16), torch.randn(2, 5, 2, 16)
COS, SIN = ropelab.rotary_table(8, 16)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # a prototype, says torch
    NESTED, JAGGED = (torch.nested.nested_tensor(list(K), layout=x) for x in (torch.strided, torch.jagged))

BAD = {
    "q of rank 3": ({"q": Q[0]}, ValueError, r"q: expected shape bshd of rank 4, got \(5, 4, 16\) \(q looks like thd: pass"),
    "q not a tensor": ({"q": [1.0]}, TypeError, "q: expected a torch.Tensor, got list"),
    "q of integers": ({"q": Q.long()}, TypeError, "q: expected one of bfloat16.*got int64"),
    "k of rank 5": ({"k": K[None]}, ValueError, "k: expected shape bshd of rank 4"),
    "k of another dtype": ({"k": K.half()}, TypeError, "k: expected q's dtype float32, got float16"),
    "k on another device": ({"k": K.to("meta")}, ValueError, "k: expected q's device cpu, got meta"),
    "k of another batch": ({"k": K[:1]}, ValueError, "k: expected q's batch size 2, got 1"),
    "k of another length": ({"k": K[:, :4]}, ValueError, "k: expected q's sequence length 5, got 4"),
    "k of another length, and no other format": ({"k": K[:, :4]}, ValueError, r"got 4$"),
    "q and k are bhsd": (
        {"q": Q.transpose(1, 2), "k": K.transpose(1, 2)}, ValueError,
        r"k: expected q's sequence length 4, got 2 \(q looks like bhsd: pass seq_format='bhsd'\)$",
    ),
    "q and k are bshd": (
        {"seq_format": "bhsd"}, ValueError,
        r"k: expected q's sequence length 4, got 2 \(q looks like bshd or sbhd: pass seq_format='bshd' or 'sbhd'\)$",
    ),
    "tables of bhsd": (
        {"q": Q.repeat(1, 1, 2, 1).transpose(1, 2), "k": None, "cos": COS[:5], "sin": SIN[:5]}, ValueError,
        r"cos: expected a row for each of 8 positions, got 5 rows \(q looks like bhsd: pass seq_format='bhsd'\)$",
    ),
    "positions of bhsd": (
        {"q": Q.transpose(1, 2), "k": None, "positions": torch.arange(5)}, ValueError,
        r"positions: expected shape \(4,\) or \(1, 4\) or \(2, 4\), got \(5,\) \(q looks like bhsd: pass",
    ),
    "k of another head_dim": ({"k": K[..., :8]}, ValueError, "k: expected q's head_dim 16, got 8"),
    "cos of rank 4": ({"cos": COS[None, None]}, ValueError, r"cos: expected shape \[positions, columns\] or \[batch, positions, columns\], got"),
    "tables of another batch": ({"cos": COS[None], "sin": SIN[None]}, ValueError, "cos: expected tables for each of 2 batches, got tables for 1"),
    "cos too short": ({"cos": COS[:4], "sin": SIN[:4]}, ValueError, "cos: expected a row for each of 5 positions, got 4"),
    "cos of full width": (
        {"cos": COS.repeat(1, 2), "sin": SIN.repeat(1, 2)}, ValueError,
        r"cos: expected 1 to head_dim/2 = 8 columns, a column per pair, got 16 \(a column per feature needs rotary_slice",
    ),
    "cos of no width": ({"cos": COS[:, :0], "sin": SIN[:, :0]}, ValueError, "cos: expected 1 to head_dim/2"),
    "cos of integers": ({"cos": COS.long()}, TypeError, "cos: expected one of bfloat16.*got int64"),
    "cos on another device": ({"cos": COS.to("meta")}, ValueError, "cos: expected q's device cpu, got meta"),
    "sin on another device": ({"sin": SIN.to("meta")}, ValueError, "sin: expected q's device cpu, got meta"),
    "sin of another shape": ({"sin": SIN[:, :4]}, ValueError, r"sin: expected cos's shape \(8, 8\), got \(8, 4\)"),
    "sin of another dtype": ({"sin": SIN.double()}, TypeError, "sin: expected cos's dtype float32, got float64"),
    "unknown layout": ({"layout": "neox"}, ValueError, "layout: expected one of .*'split_half'.* got 'neox'"),
    "unknown format": ({"seq_format": "bsd"}, ValueError, "seq_format: expected one of .*'bshd'.* got 'bsd'"),
    "expanded, in place": ({"q": Q[:1].expand(2, -1, -1, -1), "inplace": True}, ValueError, "q: expected elements at distinct"),
    "k is q, in place": ({"k": Q, "inplace": True}, ValueError, "k: expected memory disjoint from q's"),
    "k within q, in place": ({"k": Q[:, :, 1:3], "inplace": True}, ValueError, "k: expected memory disjoint from q's"),
    "a leaf, in place": ({"q": Q.clone().requires_grad_(), "inplace": True}, ValueError, "q: expected a tensor that autograd may"),
    "a view of a leaf, in place": (
        {"k": Q.clone().requires_grad_()[:, :, :2], "inplace": True}, ValueError, "k: expected a tensor that autograd may",
    ),
    "unknown out_layout": ({"out_layout": "neox"}, ValueError, "out_layout: expected one of .* got 'neox'"),
    "another layout, in place": ({"out_layout": "interleaved", "inplace": True}, ValueError, "out_layout: expected 'split_half', the layout of the input"),
    "thd of rank 4": ({"seq_format": "thd"}, ValueError, r"q: expected shape thd of rank 3, got \(2, 5, 4, 16\)"),
    "thd with tables of each batch": (
        {"q": Q[0], "k": K[0], "seq_format": "thd", "cos": COS[None], "sin": SIN[None]}, ValueError,
        r"cos: expected shape \[positions, columns\], got \(1, 8, 8\)",
    ),
    "positions no tensor": ({"positions": [0, 1, 2, 3, 4]}, TypeError, "positions: expected a torch.Tensor, got list"),
    "positions of floats": ({"positions": torch.zeros(5)}, TypeError, "positions: expected one of int32, int64, got float32"),
    "positions too few": ({"positions": torch.arange(4)}, ValueError, r"positions: expected shape \(5,\) or \(1, 5\) or \(2, 5\), got \(4,\)"),
    "positions of sbhd": ({"positions": torch.zeros(5, 2).long()}, ValueError, r"positions: expected shape \(5,\) or \(1, 5\) or \(2, 5\), got \(5, 2\)"),
    "positions elsewhere": ({"positions": torch.arange(5, device="meta")}, ValueError, "positions: expected q's device cpu, got meta"),
    "positions of rank 2, thd": (
        {"q": Q[0], "k": K[0], "seq_format": "thd", "positions": torch.zeros(2, 5).long()}, ValueError,
        r"positions: expected shape \(5,\) or \(1, 5\), got \(2, 5\)",
    ),
    "positions and offsets": ({"positions": torch.arange(5), "offsets": 3}, ValueError, "offsets: expected no offsets beside positions, got both"),
    "offsets too few": ({"offsets": torch.tensor([1])}, ValueError, r"offsets: expected shape \(2,\), got \(1,\)"),
    "offsets of floats": ({"offsets": torch.zeros(2)}, TypeError, "offsets: expected one of int32, int64, got float32"),
    "offset no number": ({"offsets": "3"}, TypeError, "offsets: expected an integer, got str '3'"),
    "offset a fraction": ({"offsets": 1.5}, TypeError, "offsets: expected an integer, got float 1.5"),
    "offset a bool": ({"offsets": True}, TypeError, "offsets: expected an integer, got bool True"),
    "offset below int64": ({"offsets": -(2**63) - 1}, ValueError, "offsets: expected an integer >= -2\\*\\*63, got -9"),
    "inverse a word": ({"inverse": "False"}, TypeError, "inverse: expected a bool, got str 'False'"),
    "inplace a word": ({"inplace": "no"}, TypeError, "inplace: expected a bool, got str 'no'"),
    "inplace a number": ({"inplace": 1}, TypeError, "inplace: expected a bool, got int 1"),
    "slice a number": ({"rotary_slice": 16}, TypeError, "rotary_slice: expected a sequence, got int 16"),
    "slice a word": ({"rotary_slice": "16"}, TypeError, "rotary_slice: expected a sequence, got str '16'"),
    "slice of three numbers": ({"rotary_slice": (0, 8, 16)}, ValueError, r"rotary_slice: expected \(first, end\), got \(0, 8, 16\)"),
    "slice of fractions": ({"rotary_slice": (0, 16.0)}, TypeError, r"rotary_slice\[1\]: expected an integer, got float 16.0"),
    "layout no word": ({"layout": ["split_half"]}, TypeError, "layout: expected one of"),
    "a sparse q": ({"q": Q.to_sparse()}, ValueError, "q: expected a dense tensor, got torch.sparse_coo"),
    "a sparse q, in place": ({"q": Q.to_sparse(), "inplace": True}, ValueError, "q: expected a dense tensor, got torch.sparse_coo"),
    "a sparse k, in place": ({"k": K.to_sparse(), "inplace": True}, ValueError, "k: expected a dense tensor, got torch.sparse_coo"),
    "a nested k": ({"k": NESTED}, ValueError, "k: expected a dense tensor, got nested"),
    "a jagged k": ({"k": JAGGED}, ValueError, "k: expected a dense tensor, got nested"),
    "a number as cos": ({"cos": torch.tensor(1.0)}, ValueError, r"cos: expected shape \[positions, columns\] or .* got \(\)"),
    "no sin": ({"sin": None}, TypeError, "sin: expected a torch.Tensor, got None"),
    "offset too high": ({"offsets": 4}, ValueError, "cos: expected a row for each of 5 positions from 4 on, got 8 rows"),
    "slice beyond the head": ({"rotary_slice": (4, 20)}, ValueError, r"rotary_slice: expected an even number of the 16 features of a head, got \(4, 20\)"),
    "slice of odd width": ({"rotary_slice": (4, 9)}, ValueError, r"rotary_slice: expected an even number .* got \(4, 9\)"),
    "slice backwards": ({"rotary_slice": (8, 4)}, ValueError, r"rotary_slice: expected an even number .* got \(8, 4\)"),
    "slice of another width": ({"rotary_slice": (0, 12)}, ValueError, r"cos: expected 6 columns \(one per pair\) or 12 columns \(one per feature\), got 8"),
    "a column per feature, other layout": (
        {"rotary_slice": (0, 8), "out_layout": "interleaved"}, ValueError, "out_layout: expected 'split_half', the layout of the input, for tables with a column",
    ),
    "trained tables, in place": ({"cos": COS.clone().requires_grad_(), "inplace": True}, ValueError, "cos: expected a table without grad"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), BAD.values(), ids=BAD.keys())
def test_is_refused_by_name(device, change, error, message):
    arguments = {"q": Q, "k": K, "cos": COS, "sin": SIN} | change
    arguments = {k: _moved(v, device) for k, v in arguments.items()}
    before = arguments["q"].clone() if isinstance(arguments["q"], torch.Tensor) else None
    with pytest.raises(error, match=message.replace("cpu", r"(cpu|cuda:\d)")):
        ropelab.apply_rope(arguments.pop("q"), arguments.pop("k"), **arguments)
    if before is not None and change.get("inplace") and not before.is_sparse:
        assert torch.equal(before, _moved(change.get("q", Q), device))


def _moved(value, device):
    """``value`` on the device under test; views stay views of one moved tensor, for overlap is at stake here."""
    if not isinstance(value, torch.Tensor) or value.is_meta or value.is_nested or device == "cpu":
        return value
    root = value if value._base is None else value._base
    moved = _MOVED.setdefault(id(root), root.detach().to(device)).requires_grad_(root.requires_grad)
    return moved if root is value else moved.as_strided(value.shape, value.stride(), value.storage_offset())


_MOVED: dict[int, torch.Tensor] = {}


@pytest.mark.parametrize("change", [
    {"positions": torch.tensor([0, 8, 1, 2, 3])}, {"positions": torch.tensor([0, -8, 1, 2, 3])},
    {"offsets": torch.tensor([0, 4])}, {"offsets": torch.tensor([-8, 0])}, {"offsets": -8},
])  # fmt: skip
def test_positions_in_cpu_memory_are_compared_with_the_tables(change):
    with pytest.raises(
        ValueError, match=r"(positions|offsets): expected \|positions\| below the 8 rows of cos, got -?8"
    ):
        ropelab.apply_rope(Q, K, cos=COS, sin=SIN, **change)


@pytest.mark.gpu
def test_positions_in_gpu_memory_yield_nan():
    positions = torch.tensor([0, 8, 1, 2, -9], device="cuda")
    y = ropelab.apply_rope(Q.cuda(), cos=COS.cuda(), sin=SIN.cuda(), positions=positions)
    assert y[:, [1, 4]].isnan().all() and not y[:, [0, 2, 3]].isnan().any()


def test_what_was_right_once_is_checked_again(device):
    """Preparing a shape once must not hide an argument that changes later."""
    q, k, cos, sin = (x.to(device) for x in (Q, K, COS, SIN))
    ropelab.apply_rope(q, k, cos=cos, sin=sin)
    for change, error in (
        ({"cos": cos[:4], "sin": sin[:4]}, "cos: expected a row"),
        ({"sin": sin[:7]}, "sin: expected cos's shape"),
        ({"sin": sin.double()}, "sin: expected cos's dtype"),
        ({"offsets": 4}, "cos: expected a row"),
        ({"layout": "half"}, "layout: expected"),
    ):
        with pytest.raises((ValueError, TypeError), match=error):
            ropelab.apply_rope(q, k, **({"cos": cos, "sin": sin} | change))
    leaf = q.clone().requires_grad_()
    ropelab.apply_rope(leaf * 1, k.clone(), cos=cos, sin=sin, inplace=True)
    with pytest.raises(ValueError, match="q: expected a tensor that autograd may"):
        ropelab.apply_rope(leaf, k.clone(), cos=cos, sin=sin, inplace=True)
    buffer = torch.randn(2, 5, 6, 16, device=device)
    ropelab.apply_rope(buffer[:, :, :4], buffer[:, :, 4:], cos=cos, sin=sin, inplace=True)
    with pytest.raises(ValueError, match="k: expected memory disjoint"):
        ropelab.apply_rope(buffer[:, :, :4], buffer[:, :, 3:5], cos=cos, sin=sin, inplace=True)


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


@pytest.mark.parametrize("offset", [np.int64(3), np.int32(3), np.uint8(3)], ids=repr)
def test_numpy_integers_are_integers(device, offset):
    q, k, cos, sin = (x.to(device) for x in (Q, K, COS, SIN))
    slices = {"rotary_slice": (np.int64(0), np.int32(16))}
    actual = ropelab.apply_rope(q, k, cos=cos, sin=sin, offsets=offset, inverse=np.bool_(True), **slices)
    expected = ropelab.apply_rope(q, k, cos=cos, sin=sin, offsets=3, inverse=True, rotary_slice=(0, 16))
    assert torch.equal(actual[0], expected[0]) and torch.equal(actual[1], expected[1])


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
