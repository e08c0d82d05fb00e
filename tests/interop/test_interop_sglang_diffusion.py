"""The function of SGLang's diffusion models over ropelab, and the tables that it keeps."""

import gc
import threading

import pytest
import torch

from ropelab import rotary_table
from ropelab.interop.sglang import KEPT, SplitTables, apply_rope_qk_inplace
from tests.support import assert_rotated

BATCH, SEQ_LEN, D = 2, 3, 8
LAYOUT = {True: "split_half", False: "interleaved"}


def heads(count=4, batch=BATCH):
    return torch.randn(batch, SEQ_LEN, count, D)


def freqs_of(cos, sin, form):
    return torch.complex(cos, sin) if form == "complex" else torch.cat((cos, sin), dim=-1)


@pytest.fixture(autouse=True)
def fresh():
    KEPT.clear()
    yield
    KEPT.clear()


@pytest.mark.parametrize("form", ["complex", "cache"])
@pytest.mark.parametrize("is_neox", [False, True])
@pytest.mark.parametrize("rows", ["of a sequence", "of more positions", "of all tokens", "at positions"])
def test_every_form_of_the_frequencies(form, is_neox, rows, device):
    cos, sin = (t[3:].to(device) for t in rotary_table(40, D))
    positions = torch.tensor([7, 0, 36, 36, 11, 3], device=device)
    count = {"of a sequence": SEQ_LEN, "of all tokens": BATCH * SEQ_LEN}.get(rows, 37)
    cos, sin = cos[:count], sin[:count]
    q, k = heads(4).to(device), heads(2).to(device)
    query, key = q.clone(), k.clone()
    given = {"positions": positions} if rows == "at positions" else {}
    returned = apply_rope_qk_inplace(query, key, freqs_of(cos, sin, form), is_neox=is_neox, **given)
    assert returned[0] is query and returned[1] is key
    if rows == "at positions":
        where = {"positions": positions.view(BATCH, SEQ_LEN)}
    elif rows == "of all tokens":
        where, cos, sin = {}, cos.view(BATCH, SEQ_LEN, -1), sin.view(BATCH, SEQ_LEN, -1)
    else:
        where, cos, sin = {}, cos[:SEQ_LEN], sin[:SEQ_LEN]
    for found, x in ((query, q), (key, k)):
        assert_rotated(found, x, cos, sin, layout=LAYOUT[is_neox], **where)


def test_qwen_image_s_frequencies_turn_adjacent_pairs_as_complex_numbers():
    """The rotation of SGLang's model of Qwen-Image: pairs of features as complex numbers times the frequencies."""
    angles = torch.randn(SEQ_LEN, D // 2, dtype=torch.float64)
    freqs = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)
    q, k = heads(), heads()
    expected = [
        torch.view_as_real(torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * freqs[:, None]).flatten(-2)
        for x in (q, k)
    ]
    for found, x in zip(apply_rope_qk_inplace(q, k, freqs), expected, strict=True):
        torch.testing.assert_close(found.double(), x, rtol=1e-6, atol=1e-6)


def test_the_tables_may_be_narrower_than_the_heads():
    cos, sin = rotary_table(SEQ_LEN, D - 4)
    q, k = heads(), heads()
    query, key = q.clone(), k.clone()
    apply_rope_qk_inplace(query, key, torch.complex(cos, sin))
    assert_rotated(query, q, cos, sin, layout="interleaved", rotary_slice=(0, D - 4))


# ------------------------------------------------------------------------------------------ the tables that are kept


def turning(rows=SEQ_LEN):
    return torch.complex(*rotary_table(rows, D))


def test_the_parts_are_copied_once():
    freqs = turning()
    first = KEPT.split(freqs)
    for part, table in zip((freqs.real, freqs.imag), first, strict=True):
        assert torch.equal(part, table) and table.is_contiguous()
    for _ in range(3):
        apply_rope_qk_inplace(heads(), heads(), freqs)
    assert all(x is y for x, y in zip(KEPT.split(freqs), first, strict=True)) and len(KEPT) == 1


def test_a_view_that_each_call_makes_anew_is_recognized():
    freqs = turning(40)
    first = KEPT.split(freqs[2:5])
    assert KEPT.split(freqs[2:5])[0] is first[0]
    assert KEPT.split(freqs[3:6])[0] is not first[0] and KEPT.split(freqs[2:6])[0] is not first[0]
    assert KEPT.split(freqs)[0] is not first[0]


def test_conjugate_frequencies_have_tables_of_their_own():
    freqs = turning()
    KEPT.split(freqs)
    for given in (freqs.conj(), torch._neg_view(freqs), freqs[:1, :1].conj()):
        for table, part in zip(KEPT.split(given), (given.real, given.imag), strict=True):
            assert torch.equal(table, part) and not table.is_neg()


def test_a_write_is_noticed():
    freqs = turning()
    view = freqs[:]
    first = KEPT.split(freqs), KEPT.split(view)
    freqs.mul_(1j)
    for given, (cos, _) in ((freqs, first[0]), (view, first[1])):
        found = KEPT.split(given)
        assert torch.equal(found[0], given.real) and not torch.equal(found[0], cos)


def test_a_new_tensor_at_the_address_of_a_deleted_one_is_noticed():
    memory = bytearray(16 * 8 * 4)
    one = torch.frombuffer(memory, dtype=torch.complex64).view(16, 4)
    one.copy_(torch.randn(16, 4, dtype=torch.complex64))
    old = KEPT.split(one)[0]
    del one
    gc.collect()
    assert len(KEPT) == 0
    other = torch.frombuffer(memory, dtype=torch.complex64).view(16, 4)
    other.copy_(torch.randn(16, 4, dtype=torch.complex64))
    found = KEPT.split(other)[0]
    assert torch.equal(found, other.real) and not torch.equal(found, old)


def test_the_number_of_entries_is_bounded():
    kept, tensors = SplitTables(3), [turning() for _ in range(5)]
    tables = [kept.split(x)[0] for x in tensors]
    assert len(kept) == 3
    assert kept.split(tensors[2])[0] is tables[2]  # now the last one used
    kept.split(tensors[0])
    assert kept.split(tensors[2])[0] is tables[2] and kept.split(tensors[3])[0] is not tables[3]
    kept.clear()
    assert len(kept) == 0


def test_what_can_be_no_table_is_refused_by_name():
    for most in (-1, "3", 2.0, None, True):
        with pytest.raises((TypeError, ValueError), match="^most: expected"):
            SplitTables(most)
    for freqs in ([1j], None, torch.ones(4, 2), torch.ones(4, dtype=torch.int64)):
        with pytest.raises(TypeError, match="^freqs: expected"):
            SplitTables().split(freqs)


def test_tensors_whose_writes_are_not_counted_are_not_kept():
    with torch.inference_mode():
        freqs = turning()
        before = KEPT.split(freqs)[0].clone()
        freqs.mul_(1j)
        assert not torch.equal(KEPT.split(freqs)[0], before)
    learned = turning().requires_grad_()
    KEPT.split(learned)
    assert len(KEPT) == 0


def test_frequencies_made_before_inference_mode_are_kept():
    freqs = turning()
    with torch.inference_mode():
        assert KEPT.split(freqs)[0] is KEPT.split(freqs)[0]


def test_threads_share_the_tables():
    kept, tensors, wrong = SplitTables(4), [turning() * (i + 1) for i in range(8)], []

    def use():
        for _ in range(50):
            for x in tensors:
                if not torch.equal(kept.split(x)[0], x.real):
                    wrong.append(x)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(kept) <= 4


@pytest.mark.gpu
def test_each_stream_and_each_graph_has_its_own_tables():
    freqs = turning(64).cuda()
    first = KEPT.split(freqs)[0]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert KEPT.split(freqs)[0] is not first
    q, k = (torch.randn(1, 64, 4, D, device="cuda") for _ in range(2))
    query, key = q.clone(), k.clone()
    apply_rope_qk_inplace(query, key, freqs)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        apply_rope_qk_inplace(query, key, freqs)
    KEPT.clear()
    freqs.mul_(1j)
    query.copy_(q)
    graph.replay()
    assert_rotated(query, q, freqs.real.contiguous(), freqs.imag.contiguous(), layout="interleaved")
