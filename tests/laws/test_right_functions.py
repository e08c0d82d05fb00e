"""Right functions as other authors write them, none of which a law may flag; each is written for its form alone."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from ropelab.conformance import verify
from ropelab.study.faults import correct


def frequencies(features):
    return 10000.0 ** -(torch.arange(0, features, 2, dtype=torch.float64) / features)


def rotate_half(x):
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def angles_of(x, positions, features=None):
    return positions.double()[..., None] * frequencies(features or x.shape[-1])


# ------------------------------------------------------------------------------------------------ products of matrices


def blocks(x, positions):
    """The matrices ``[..., S, D, D]``."""
    angles = angles_of(x, positions)
    cos, sin = torch.diag_embed(angles.cos()), torch.diag_embed(angles.sin())
    return torch.cat((torch.cat((cos, -sin), -1), torch.cat((sin, cos), -1)), -2).float()


def by_einsum(x, positions):
    matrices = blocks(x, positions).expand(len(x), -1, -1, -1)
    return torch.einsum("bsij,bshj->bshi", matrices, x.float()).to(x.dtype)


def by_matmul(x, positions):
    return (x.float() @ blocks(x, positions).mT).to(x.dtype)


def pairs_by_einsum(q, k, cos, sin, unsqueeze_dim=1):
    half = cos.shape[-1] // 2
    rows = (cos[..., :half], -sin[..., :half]), (sin[..., half:], cos[..., half:])
    matrices = torch.stack([torch.stack(row, -1) for row in rows], -2).unsqueeze(unsqueeze_dim)

    def one(x):
        y = torch.einsum("...pij,...pj->...pi", matrices.expand(*x.shape[:-1], half, 2, 2), x.unflatten(-1, (2, -1)).mT)
        return y.mT.flatten(-2)

    return one(q), one(k)


def permuted_by_matmul(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    half = q.shape[-1] // 2
    permutation = rotate_half(torch.eye(2 * half, dtype=q.dtype))
    return tuple(x * cos + (x @ permutation) * sin for x in (q, k))


def block_diagonal(x, positions):
    """Adjacent pairs by matrices ``[..., S, D, D]`` with 2 x 2 blocks."""
    angles, even = angles_of(x, positions), torch.arange(0, x.shape[-1], 2)
    matrices = torch.diag_embed(angles.cos().repeat_interleave(2, -1))
    matrices[..., even, even + 1] = -angles.sin()
    matrices[..., even + 1, even] = angles.sin()
    return (x.double() @ matrices.mT).to(x.dtype)


# ------------------------------------------------------------------------------------------------ Hugging Face's form


def formula(half):
    def rope(q, k, cos, sin, unsqueeze_dim=1):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return q * cos + half(q) * sin, k * cos + half(k) * sin

    return rope


def flipped(x):
    y = x.unflatten(-1, (2, -1)).flip(-2)
    return (y * y.new_tensor([[-1.0], [1.0]])).flatten(-2)


def rolled(x):
    half = x.shape[-1] // 2
    return x.roll(half, -1) * torch.cat((x.new_full((half,), -1), x.new_ones(half)))


def stacked(x):
    first, second = x.unflatten(-1, (2, -1)).unbind(-2)
    return torch.stack((-second, first), -2).flatten(-2)


def gathered(x):
    half = x.shape[-1] // 2
    other = x.index_select(-1, torch.arange(2 * half).roll(half))
    return torch.where(torch.arange(2 * half) < half, -other, other)


def by_addcmul(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return tuple(torch.addcmul(x * cos, rotate_half(x), sin) for x in (q, k))


def in_float64(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.double().unsqueeze(unsqueeze_dim), sin.double().unsqueeze(unsqueeze_dim)
    return tuple((x.double() * cos + rotate_half(x.double()) * sin).to(x.dtype) for x in (q, k))


def slices_of_new_memory(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def one(x):
        y, half = x * cos, x.shape[-1] // 2
        y[..., :half] -= x[..., half:] * sin[..., :half]
        y[..., half:] += x[..., :half] * sin[..., half:]
        return y

    return one(q), one(k)


@torch.jit.script
def scripted(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    half = q.shape[-1] // 2
    turned_q = torch.cat((-q[..., half:], q[..., :half]), -1)
    turned_k = torch.cat((-k[..., half:], k[..., :half]), -1)
    return q * cos + turned_q * sin, k * cos + turned_k * sin


compiled = torch.compile(formula(rotate_half), backend="aot_eager")
"""AOTAutograd refuses second derivatives."""


class Rotary(nn.Module):
    def forward(self, q, k, cos, sin, unsqueeze_dim=1):
        return formula(rotate_half)(q, k, cos, sin, unsqueeze_dim)


class WrittenBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cos, sin):
        ctx.save_for_backward(x, cos, sin)
        return x * cos + rotate_half(x) * sin

    @staticmethod
    def backward(ctx, grad):
        x, cos, sin = ctx.saved_tensors
        first, second = (grad * sin).chunk(2, -1)
        of_tables = ((grad * y).sum_to_size(cos.shape) for y in (x, rotate_half(x)))
        return grad * cos + torch.cat((second, -first), -1), *of_tables


def with_written_backward(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return WrittenBackward.apply(q, cos, sin), WrittenBackward.apply(k, cos, sin)


# ------------------------------------------------------------------------------------------------------------ in place


def in_place_on_views(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0):
    if isinstance(seqlen_offsets, torch.Tensor):
        raise NotImplementedError("one offset for all sequences")
    x = x if inplace else x.clone()
    pairs = cos.shape[-1]
    rows = slice(seqlen_offsets, seqlen_offsets + x.shape[1])
    cos, sin = cos[rows, None], sin[rows, None]
    first, second = (x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]) if interleaved else (
        x[..., :pairs], x[..., pairs : 2 * pairs])  # fmt: skip
    turned = first.float() * cos - second.float() * sin, first.float() * sin + second.float() * cos
    first.copy_(turned[0])
    second.copy_(turned[1])
    return x


def gathered_rows_in_place(q, k, cos, sin, mrope_section, head_size, rotary_dim, mrope_interleaved, is_neox_style=True):
    given = (cos, sin, mrope_section, head_size, rotary_dim, mrope_interleaved, is_neox_style)
    turned_q, turned_k = correct.triton_mrope(q, k, *given)
    return q.copy_(turned_q), k.copy_(turned_k)


def cache_on_views(positions, query, key, head_size, cos_sin_cache, is_neox):
    cos, sin = cos_sin_cache.index_select(0, positions)[:, None].chunk(2, -1)
    for x in (query, key):
        heads = x.view(len(x), -1, head_size)[..., : cos_sin_cache.shape[-1]]
        first, second = heads.chunk(2, -1) if is_neox else (heads[..., ::2], heads[..., 1::2])
        turned = first * cos - second * sin, second * cos + first * sin
        first.copy_(turned[0])
        second.copy_(turned[1])
    return query, key


# ------------------------------------------------------------------------------------------------ angles of their own


def polar(x, positions):
    angles, (first, second) = angles_of(x, positions)[..., None, :], x.double().chunk(2, -1)
    y = torch.complex(first.contiguous(), second.contiguous()) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((y.real, y.imag), -1).to(x.dtype)


def twelve_features(x, positions):
    """GPT-J's ``rotary_dim`` is a number of features, not a share of the head."""
    angles = angles_of(x, positions, 12)[..., None, :]
    first, second = x[..., :12].double().chunk(2, -1)
    y = torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)
    return torch.cat((y.to(x.dtype), x[..., 12:]), -1)


def three_quarters(x, positions):
    features = x.shape[-1] // 8 * 6 or x.shape[-1]
    return torch.cat((polar(x[..., :features], positions), x[..., features:]), -1)


def heads_of_64(x, positions):
    if x.shape[-1] != 64:
        raise ValueError(f"x: expected heads of 64 features, got {x.shape[-1]}")
    return polar(x, positions)


def a_position_for_each_token(x, positions):
    if positions.shape != x.shape[:2]:
        raise ValueError(f"positions: expected {tuple(x.shape[:2])}, got {tuple(positions.shape)}")
    return polar(x, positions)


def rows_of_an_embedding(x, positions):
    """``embedding`` refuses negative positions and those beyond its end."""
    table = torch.arange(200_000, dtype=torch.float64)[:, None] * frequencies(x.shape[-1])
    angles = nn.functional.embedding(positions, table)[..., None, :]
    first, second = x.double().chunk(2, -1)
    return torch.cat(
        (first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1
    ).to(x.dtype)


class Tables(nn.Module):
    """Buffers with as many rows as the model has positions."""

    def __init__(self, head_dim, rows=2048):
        super().__init__()
        angles = torch.arange(rows, dtype=torch.float64)[:, None, None] * frequencies(head_dim)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, q, k):
        tables = self.cos[: q.shape[1]], self.sin[: q.shape[1]]

        def one(x):
            (first, second), (cos, sin) = x.float().chunk(2, -1), tables
            return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)

        return one(q), one(k)


class Growing(nn.Module):
    """Cosines and sines that grow with the sequence."""

    def __init__(self, head_dim):
        super().__init__()
        self.tables = torch.empty(2, 0, 1, head_dim // 2)

    def forward(self, q, k):
        if q.shape[1] > self.tables.shape[1]:
            angles = torch.arange(q.shape[1], dtype=torch.float64)[:, None, None] * frequencies(q.shape[-1])
            self.tables = torch.stack((angles.cos(), angles.sin())).float()
        cos, sin = self.tables[:, : q.shape[1]].tile(2)
        return tuple((x.float() * cos + rotate_half(x.float()) * sin).to(x.dtype) for x in (q, k))


def angles_of_the_caller(t, freqs, tensor_format="sbhd", interleaved=False):
    freqs = freqs.transpose(0, 1) if tensor_format == "bshd" else freqs
    x, rest = t[..., : freqs.shape[-1]].float(), t[..., freqs.shape[-1] :]
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) if interleaved else rotate_half(x)
    return torch.cat(((x * freqs.cos() + turned * freqs.sin()).to(t.dtype), rest), -1)


RIGHT = {
    "einsum with matrices": (by_einsum, "plain", {}),
    "a product of matrices": (by_matmul, "plain", {}),
    "einsum of pairs": (pairs_by_einsum, "huggingface", {}),
    "a permutation as a product": (permuted_by_matmul, "huggingface", {}),
    "2 x 2 blocks on the diagonal": (block_diagonal, "plain", {"layout": "interleaved"}),
    "halves chunked": (formula(rotate_half), "huggingface", {}),
    "halves flipped": (formula(flipped), "huggingface", {}),
    "halves rolled": (formula(rolled), "huggingface", {}),
    "halves stacked": (formula(stacked), "huggingface", {}),
    "halves gathered": (formula(gathered), "huggingface", {}),
    "addcmul": (by_addcmul, "huggingface", {}),
    "float64 inside": (in_float64, "huggingface", {}),
    "slices of new memory": (slices_of_new_memory, "huggingface", {}),
    "scripted": (scripted, "huggingface", {}),
    "compiled": (compiled, "huggingface", {}),
    "a module": (Rotary(), "huggingface", {}),
    "a method": (Rotary().forward, "huggingface", {}),
    "partial": (functools.partial(formula(rotate_half), unsqueeze_dim=1), "huggingface", {}),
    "a backward of its own": (with_written_backward, "huggingface", {}),
    "views overwritten": (in_place_on_views, "flash_attn", {"inplace": True}),
    "views of a copy": (in_place_on_views, "flash_attn", {"layout": "interleaved"}),
    "gathered rows, in place": (gathered_rows_in_place, "triton_mrope", {"inplace": True}),
    "a cache, views overwritten": (cache_on_views, "vllm", {}),
    "complex numbers": (polar, "plain", {}),
    "a number of features": (twelve_features, "plain", {"rotary_dim": 12}),
    "a share of the features": (three_quarters, "plain", {"rotary_dim": 12}),
    "heads of 64 features": (heads_of_64, "plain", {"head_dim": 64}),
    "a position for each token": (a_position_for_each_token, "plain", {}),
    "rows of an embedding": (rows_of_an_embedding, "plain", {}),
    "tables that end": (Tables, "module", {}),
    "tables that grow": (Growing, "module", {}),
    "angles of the caller": (angles_of_the_caller, "transformer_engine", {}),
}
"""Name -> function, convention, options of `verify`."""
NOTED = {
    "autocast": {"einsum with matrices", "a product of matrices", "einsum of pairs", "a permutation as a product"},
    "second_order": {"compiled"},
}
"""Law -> the functions of which it notes something, beside those that refuse empty tensors or take 16-bit tables."""


@pytest.mark.parametrize("name", RIGHT)
def test_it_is_called_right(name):
    function, convention, options = RIGHT[name]
    report = verify(function, convention, **options)
    report.raise_if_failed()
    noted = {result.law for result in report.results if result.status == "note"}
    assert noted & NOTED.keys() == {law for law, names in NOTED.items() if name in names}


# -------------------------------------------------------------------------------------- wrong ones beside them


def angles_by_matmul(x, positions):
    """Under autocast the angles are a product in bfloat16, and the rotation is not."""
    angles = positions.float()[..., None] @ frequencies(x.shape[-1]).float()[None]
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos()[..., None, :], angles.sin()[..., None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def both_by_matmul(x, positions):
    angles = (positions.float()[..., None] @ frequencies(x.shape[-1]).float()[None]).double()
    cos, sin = torch.diag_embed(angles.cos()), torch.diag_embed(angles.sin())
    matrices = torch.cat((torch.cat((cos, -sin), -1), torch.cat((sin, cos), -1)), -2).float()
    return (x.float() @ matrices.mT).to(x.dtype)


@pytest.mark.parametrize("function", [angles_by_matmul, both_by_matmul])
def test_angles_that_follow_autocast_are_wrong(function):
    assert verify(function, "plain", laws=["definition", "autocast"]).failed == ("autocast",)


def eight_features(x, positions):
    return torch.cat((polar(x[..., :8], positions), x[..., 8:]), -1)


@pytest.mark.parametrize("declared", [16, 12, 8])
def test_the_number_of_features_is_the_declared_one(declared):
    report = verify(eight_features, "plain", rotary_dim=declared, laws=["definition", "extents"])
    assert report.passed == (declared == 8)


class Wrapped(Tables):
    """The rows of the tables begin again where they end."""

    def forward(self, q, k):
        rows = torch.arange(q.shape[1]) % len(self.cos)
        cos, sin = self.cos[rows].tile(2), self.sin[rows].tile(2)
        return tuple((x.float() * cos + rotate_half(x.float()) * sin).to(x.dtype) for x in (q, k))


def test_a_table_that_begins_again_is_wrong():
    assert verify(Wrapped, "module", skip=["compile"]).failed == ("large_positions", "token_counts")


# ----------------------------------------------------------------------------------- what never returned is not judged


def never(x, positions):
    raise ValueError("x: expected heads of 64 features")


@pytest.mark.parametrize("laws", [None, ["definition"], ["isometry", "strides"]])
def test_a_function_of_which_no_call_returned_is_not_judged(laws):
    report = verify(never, "plain", laws=laws)
    assert report.verdict == "not judged" and not report.failed
    assert "expected heads of 64 features" in str(report) and "float32[3, 5, 4, 16]" in str(report)


def test_a_function_that_returned_once_is_wrong_where_it_raises():
    def once(x, positions):
        if x.shape[1] != 5:
            raise ValueError("tokens")
        return polar(x, positions)

    assert verify(once, "plain", skip=["compile"]).verdict == "wrong"


@pytest.mark.parametrize("target", [Rotary, Rotary.forward])
def test_a_class_or_its_method_says_what_to_pass(target):
    with pytest.raises(TypeError, match="Rotary.*pass a function that makes an object"):
        verify(target, "huggingface")
