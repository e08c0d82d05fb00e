"""The in-place operators of SGLang, vLLM and FlashInfer over ropelab: what their contracts say, corner by corner."""

import pytest
import torch

from ropelab import rotary_table
from ropelab.interop.sglang import apply_rope_with_cos_sin_cache_inplace, rotary_embedding_cos_sin
from ropelab.layout.pairing import join
from tests.support import assert_rotated

TOKENS, D = 6, 8
LAYOUT = {True: "interleaved", False: "split_half"}


def tokens(tokens=TOKENS, heads=4, head_size=D, dtype=torch.float32):
    return torch.randn(tokens, heads, head_size, dtype=torch.float64).to(dtype)


def tables(rows=TOKENS, rotary_dim=D, dtype=torch.float32):
    """Tables of the positions from 3 on: at position 0 a wrong rotation would not show."""
    return tuple(table[3:].contiguous() for table in rotary_table(rows + 3, rotary_dim, dtype=dtype))


def rank_of(x, rank):
    return {2: x.flatten(1), 3: x, 4: x.unflatten(0, (2, -1))}[rank]


def test_four_axes_take_tables_per_sequence_or_shared():
    q = tokens().unflatten(0, (2, 3))
    cos, sin = tables(3)
    shared, repeated = q.clone(), q.clone()
    rotary_embedding_cos_sin(cos, sin, shared)
    rotary_embedding_cos_sin(cos.repeat(2, 1), sin.repeat(2, 1), repeated)
    assert torch.equal(shared, repeated)
    assert_rotated(shared, q, cos, sin, layout="split_half")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("rotary_dim", [D, D - 2])
@pytest.mark.parametrize("at", [None, [7, 0, 39, 39, 11, 3]])
def test_tables_are_rows_of_tokens_or_of_positions(at, rotary_dim, rank, wide, interleaved, device):
    """rotary_dim says which features rotate; the width of the tables says so in no layout."""
    cos, sin = (t[1:41].to(device) for t in rotary_table(41, rotary_dim))
    positions = None if at is None else torch.tensor(at, device=device)
    cos, sin = (t[:TOKENS] if at is None else t for t in (cos, sin))
    q, k = (tokens(heads=heads).to(device) for heads in (4, 1))
    query, key = (rank_of(x.clone(), rank) for x in (q, k))
    given = [join(t, t, LAYOUT[interleaved]) if wide else t for t in (cos, sin)]
    rotary_embedding_cos_sin(*given, query, key, D, interleaved, rotary_dim=rotary_dim, positions=positions)
    where = {"layout": LAYOUT[interleaved], "seq_format": "thd", "positions": positions}
    for found, x in ((query, q), (key, k)):
        assert_rotated(found.view(x.shape), x, cos, sin, **where)


@pytest.mark.parametrize("is_neox", [False, True])
@pytest.mark.parametrize("rank, batched", [(2, False), (3, False), (3, True), (4, True)])
def test_the_cache_form(is_neox, rank, batched, device):
    rotary_dim = 6
    cos, sin = (t.to(device) for t in rotary_table(40, rotary_dim))
    positions = torch.tensor([7, 0, 39, 39, 11, 3], device=device)
    q, k = (tokens(heads=heads).to(device) for heads in (4, 2))
    query, key = q.clone(), k.clone()
    if batched:
        query, key, positions = query.unflatten(0, (2, 3)), key.unflatten(0, (2, 3)), positions.view(2, 3)
    if rank == 2 + batched:
        query, key = query.flatten(-2), key.flatten(-2)
    cache = torch.cat((cos, sin), dim=-1)
    assert apply_rope_with_cos_sin_cache_inplace(positions, query, key, D, cache, is_neox) is None
    for found, x in ((query, q), (key, k)):
        assert_rotated(
            found.view(x.shape), x, cos, sin, layout=LAYOUT[not is_neox], seq_format="thd",
            positions=positions.flatten(),
        )  # fmt: skip
