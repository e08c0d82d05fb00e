"""The in-place operators of SGLang, vLLM and FlashInfer over ropelab: what their contracts say, corner by corner."""

import pytest
import torch

from ropelab import reference, rotary_table
from ropelab.conformance import pytest_laws
from ropelab.interop.sglang import apply_rope_with_cos_sin_cache_inplace, rotary_embedding_cos_sin
from ropelab.kernels import Rotation, rotate_triton
from ropelab.kernels.tensors import RotateTensors
from ropelab.layout.pairing import join
from tests.support import assert_rotated

TOKENS, D = 6, 8
HEADS = [(4, 4), (4, 2), (4, 1)]
LAYOUT = {True: "interleaved", False: "split_half"}


def tokens(tokens=TOKENS, heads=4, head_size=D, dtype=torch.float32):
    return torch.randn(tokens, heads, head_size, dtype=torch.float64).to(dtype)


def tables(rows=TOKENS, rotary_dim=D, dtype=torch.float32):
    """Tables of the positions from 3 on: at position 0 a wrong rotation would not show."""
    return tuple(table[3:].contiguous() for table in rotary_table(rows + 3, rotary_dim, dtype=dtype))


def rank_of(x, rank):
    return {2: x.flatten(1), 3: x, 4: x.unflatten(0, (2, -1))}[rank]


@pytest.mark.parametrize("q_heads, k_heads", HEADS)
@pytest.mark.parametrize("rank", [2, 3, 4])
@pytest.mark.parametrize("interleaved", [False, True])
def test_every_shape_rotates_in_place(rank, interleaved, q_heads, k_heads, device):
    cos, sin = (t.to(device) for t in tables())
    q, k = (tokens(heads=heads).to(device) for heads in (q_heads, k_heads))
    query, key = (rank_of(x.clone(), rank) for x in (q, k))
    assert rotary_embedding_cos_sin(cos, sin, query, key, D, interleaved) is None
    for found, x in ((query, q), (key, k)):
        assert_rotated(found.view(x.shape), x, cos, sin, layout=LAYOUT[interleaved], seq_format="thd")


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [D, D - 2, 2])
def test_tables_per_pair_and_per_feature_are_one_rotation(interleaved, rotary_dim):
    """rotary_dim says which features rotate; the width of the tables says so in no layout."""
    cos, sin = tables(rotary_dim=rotary_dim)
    wide = (join(t, t, LAYOUT[interleaved]) for t in (cos, sin))
    q = tokens()
    narrow_q, wide_q = q.clone(), q.clone()
    rotary_embedding_cos_sin(cos, sin, narrow_q, None, D, interleaved, rotary_dim=rotary_dim)
    rotary_embedding_cos_sin(*wide, wide_q, None, D, interleaved, rotary_dim=rotary_dim)
    assert torch.equal(narrow_q, wide_q)
    assert_rotated(narrow_q, q, cos, sin, layout=LAYOUT[interleaved], seq_format="thd")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("table_dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_tables_need_not_have_the_dtype_of_the_query(dtype, table_dtype):
    cos, sin = tables(dtype=table_dtype)
    q = tokens(dtype=dtype)
    query = q.clone()
    rotary_embedding_cos_sin(cos, sin, query)
    assert_rotated(query, q, cos, sin, layout="split_half", seq_format="thd")


@pytest.mark.parametrize("head_size", [80, 96, 320])
def test_uncommon_head_sizes(head_size, device):
    cos, sin = (t.to(device) for t in tables(2, head_size))
    q = tokens(2, 2, head_size).to(device)
    query = q.clone()
    rotary_embedding_cos_sin(cos, sin, query, None, head_size, True)
    assert_rotated(query, q, cos, sin, layout="interleaved", seq_format="thd")


def test_four_axes_take_tables_per_sequence_or_shared():
    q = tokens().unflatten(0, (2, 3))
    cos, sin = tables(3)
    shared, repeated = q.clone(), q.clone()
    rotary_embedding_cos_sin(cos, sin, shared)
    rotary_embedding_cos_sin(cos.repeat(2, 1), sin.repeat(2, 1), repeated)
    assert torch.equal(shared, repeated)
    assert_rotated(shared, q, cos, sin, layout="split_half")


def test_views_of_one_buffer_are_rotated_where_they_lie():
    buffer = torch.randn(TOKENS, 4 + 2 + 2, D)
    before = buffer.clone()
    query, key, value = buffer.split((4, 2, 2), dim=1)
    cos, sin = tables()
    rotary_embedding_cos_sin(cos, sin, query, key)
    for found, x in ((query, before[:, :4]), (key, before[:, 4:6])):
        assert_rotated(found, x, cos, sin, layout="split_half", seq_format="thd")
    assert torch.equal(value, before[:, 6:])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("tokens_", [1, 2, 4])
def test_several_programs_share_the_heads_of_few_tokens(tokens_, interleaved):
    """No argument asks for this division; SGLang#14302 has it for at most 4 tokens."""
    xs = [torch.empty(1, tokens_, heads, 128, dtype=torch.bfloat16, device="meta") for heads in (32, 8)]
    table = torch.empty(tokens_, 64, device="meta")
    rotation = Rotation(128, interleaved=interleaved, out_interleaved=interleaved)
    grid = rotate_triton.plan_rotate(RotateTensors.of(xs, xs, table, table), rotation).grid
    assert grid[0] * grid[1] * grid[2] >= 4 * tokens_


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("rank", [2, 3, 4])
def test_positions_choose_the_rows_of_the_tables(rank, wide, interleaved, device):
    cos, sin = (t.to(device) for t in rotary_table(40, D))
    positions = torch.tensor([7, 0, 39, 39, 11, 3], device=device)
    q, k = (tokens(heads=heads).to(device) for heads in (4, 2))
    query, key = (rank_of(x.clone(), rank) for x in (q, k))
    given = [join(t, t, LAYOUT[interleaved]) if wide else t for t in (cos, sin)]
    rotary_embedding_cos_sin(*given, query, key, D, interleaved, positions=positions)
    where = {"layout": LAYOUT[interleaved], "seq_format": "thd", "positions": positions}
    for found, x in ((query, q), (key, k)):
        assert_rotated(found.view(x.shape), x, cos, sin, **where)


def test_autograd_learns_of_the_overwriting():
    x = torch.randn(TOKENS, 4, D, requires_grad=True)
    square = x * 1
    loss = square.square().sum()
    with torch.no_grad():
        rotary_embedding_cos_sin(*tables(), square)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


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


def test_both_forms_agree():
    cos, sin = rotary_table(40, D)
    positions = torch.randint(40, (TOKENS,))
    q = tokens()
    one, other = q.clone(), q.clone()
    rotary_embedding_cos_sin(cos[positions], sin[positions], one)
    apply_rope_with_cos_sin_cache_inplace(positions, other, None, D, torch.cat((cos, sin), -1), is_neox=True)
    assert torch.equal(one, other)


def test_the_flags_say_opposite_things():
    """is_neox is halves, interleaved is adjacent pairs: the same pairs for opposite values."""
    cos, sin = tables()
    cache, positions = torch.cat((cos, sin), -1), torch.arange(TOKENS)
    q = tokens()
    for flag in (False, True):
        one, other = q.clone(), q.clone()
        rotary_embedding_cos_sin(cos, sin, one, None, D, interleaved=flag)
        apply_rope_with_cos_sin_cache_inplace(positions, other, None, D, cache, is_neox=not flag)
        assert torch.equal(one, other)
        exact = reference.rotate(q, cos, sin, layout=LAYOUT[flag], seq_format="thd")
        torch.testing.assert_close(one.double(), exact, rtol=1e-5, atol=1e-5)


def wrong(what, match, **change):
    arguments = {"query": tokens(), "key": tokens(heads=2), "head_size": D, "interleaved": False, "rotary_dim": None}
    arguments |= dict(zip(("cos", "sin"), tables(), strict=True)) | change
    return pytest.param(arguments, match, id=what)


@pytest.mark.parametrize(
    "arguments, match",
    [
        wrong("no tensor", "query: expected a torch.Tensor, got list", query=[1.0]),
        wrong("rank", r"query: expected shape \[tokens, .*got \(48,\)", query=torch.zeros(48)),
        wrong("flat without head_size", "head_size: expected a divisor .* 32, got 0", query=torch.zeros(6, 32),
              head_size=0),
        wrong("head_size", "head_size: expected query's last axis 8, got 16", head_size=16),
        wrong("another head size", "head_size: expected key's last axis 6, got 8", key=torch.zeros(6, 2, 6)),
        wrong("too few rows", "cos: expected a row for each of 6 tokens, got 5", cos=torch.zeros(5, 4)),
        wrong("too many columns", "cos: expected a column for each of 4 pairs or 8 features", cos=torch.zeros(6, 16)),
        wrong("partial, not said", "see rotary_dim", cos=torch.zeros(6, 2), sin=torch.zeros(6, 2)),
        wrong("sin of another shape", "sin: expected", sin=torch.zeros(6, 8)),
        wrong("positions of fewer tokens", "positions: expected a row for each of 6 tokens, got 5",
              positions=torch.arange(5)),
        wrong("positions of two axes", r"positions: expected shape \[tokens\], got \(2, 3\)",
              positions=torch.arange(6).view(2, 3)),
        wrong("positions beyond", "positions: expected .*below the 6 rows|positions: expected",
              positions=torch.arange(6) + 1),
        wrong("odd rotary_dim", "rotary_dim: expected an even number up to head_size = 8, got 3", rotary_dim=3),
        wrong("fewer keys", "key: expected query's sequence length|cos", key=torch.zeros(5, 2, 8)),
        wrong("dtype of the key", "key: expected query's dtype float32, got float64",
              key=torch.zeros(6, 2, 8, dtype=torch.float64)),
        wrong("integers", "query: expected one of bfloat16", query=torch.zeros(6, 4, 8, dtype=torch.int32), key=None),
        wrong("one element twice", "query: expected elements at distinct addresses",
              query=torch.zeros(6, 1, 8).expand(6, 4, 8)),
    ],
)  # fmt: skip
def test_errors_name_the_argument(arguments, match):
    with pytest.raises((TypeError, ValueError), match=match):
        rotary_embedding_cos_sin(**arguments)


def test_the_same_memory_twice():
    query = tokens()
    with pytest.raises(ValueError, match="key: expected memory disjoint from query's"):
        rotary_embedding_cos_sin(*tables(), query, query)


@pytest.mark.parametrize(
    "change, match",
    [
        ({"positions": torch.arange(5)}, r"positions: expected shape \(6,\), as the tokens"),
        ({"positions": 3}, "positions: expected a torch.Tensor, got int 3"),
        ({"positions": torch.arange(6.0)}, "positions: expected one of int32, int64"),
        ({"positions": torch.arange(6) + 40}, "positions: expected |positions| below the 40 rows"),
        ({"cache": torch.zeros(40, 7)}, "cos_sin_cache: expected .*even rotary_dim"),
        ({"cache": torch.zeros(40, 10)}, r"cos_sin_cache: expected .* up to head_size = 8, got \(40, 10\)"),
    ],
)
def test_errors_of_the_cache_form(change, match):
    positions = change.get("positions", torch.arange(6))
    with pytest.raises((TypeError, ValueError), match=match):
        apply_rope_with_cos_sin_cache_inplace(positions, tokens(), None, D, change.get("cache", torch.zeros(40, D)))


laws = pytest.mark.usefixtures("torch_backend")
test_the_cache_form_keeps_the_laws = laws(pytest_laws(apply_rope_with_cos_sin_cache_inplace, "vllm"))
test_the_cache_form_keeps_the_laws_interleaved = laws(
    pytest_laws(apply_rope_with_cos_sin_cache_inplace, "vllm", layout="interleaved", rotary_dim=4)
)


def by_token(positions, query, key, head_size, cos_sin_cache, is_neox):
    """The form with cos and sin for each token, called like the form with a cache."""
    cos, sin = cos_sin_cache[positions].chunk(2, dim=-1)
    rotary_dim = cos_sin_cache.shape[-1]
    rotary_embedding_cos_sin(cos, sin, query, key, head_size, not is_neox, rotary_dim=rotary_dim)


test_the_form_by_token_keeps_the_laws = laws(pytest_laws(by_token, "vllm"))
test_the_form_by_token_keeps_the_laws_interleaved = laws(
    pytest_laws(by_token, "vllm", layout="interleaved", rotary_dim=4)
)
