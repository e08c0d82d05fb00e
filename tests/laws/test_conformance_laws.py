"""Every law can fail: for each there is a function, wrong in one line, that it and its statement catch."""

import contextlib
import inspect
from functools import partial

import numpy as np
import pytest
import torch

import ropelab
from ropelab.conformance import LAWS, verify
from ropelab.conformance.verify import OTHER_TABLES, ROUNDS_OPERATIONS
from ropelab.layout.pairing import join, pairs
from ropelab.study.faults import correct
from ropelab.study.faults.correct import deepspeed, flash_attn, huggingface, plain, transformer_engine


def with_backward(backward):
    """`deepspeed`, whose gradient is ``backward(transposed rotation, cotangent)``."""

    def rotate(t, cos, sin):
        return correct.with_backward(
            t, lambda x: deepspeed(x, cos, sin), lambda g: backward(lambda g: deepspeed(g, cos, -sin), g)
        )

    return rotate


class GraphKept(correct.Module):
    """A module whose angles are computed once, from a parameter."""

    def __init__(self, head_dim):
        super().__init__(head_dim)
        self.scale = torch.nn.Parameter(torch.ones(()))
        self.scaled = self.scale * self.inv_freq

    def angles(self, seq_len, device):
        return torch.arange(seq_len)[:, None] * self.scaled


class Counter:
    """A function whose results are a little larger at every call."""

    calls = 0

    def __call__(self, x, positions):
        self.calls += 1
        return plain(x, positions) * (1 + 1e-3 * self.calls)


def inplace_undeclared(q, k, cos, sin):
    return tuple(x.detach().copy_(y) for x, y in zip((q, k), huggingface(q, k, cos, sin), strict=True))


def half_written(x, positions):
    y = torch.empty_like(x)
    y[:, ::2] = plain(x, positions)[:, ::2]
    return y


def one_element_further(x, positions):
    x.detach().as_strided((x.numel() + 1,), (1,), x.storage_offset())[-1] = 0
    return plain(x, positions)


def head_added(x, cos, sin, seqlen_offsets=0):
    heads = (flash_attn(x[:, :, [h]], cos.roll(-h, 0), sin.roll(-h, 0)) for h in range(x.shape[2]))
    return torch.cat(list(heads), dim=2)


def without_cu_seqlens(x, cos, sin, cu_seqlens=None, max_seqlen=None, seqlen_offsets=0):
    if cu_seqlens is None:
        return flash_attn(x, cos, sin, seqlen_offsets=seqlen_offsets)
    cos, sin = (table.repeat(len(x), 1) for table in (cos, sin))
    return flash_attn(x[None], cos, sin)[0]


def stops_at_an_empty_document(x, cos, sin, cu_seqlens=None, max_seqlen=None):
    keep = len(x) if (cu_seqlens.diff() > 0).all() else 1
    y = flash_attn(x, cos, sin, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen)
    return torch.cat((y[:keep], x[keep:]))


def k_beside_q_alone(q, k, cos, sin, unsqueeze_dim=1):
    return huggingface(q, k if q.requires_grad else k.detach(), cos, sin, unsqueeze_dim)


def inplace_ignored(x, cos, sin, interleaved=False, inplace=False):
    return flash_attn(x, cos, sin, interleaved)


def strided_in_place_ignored(x, cos, sin, interleaved=False, inplace=False, **where):
    return flash_attn(x, cos, sin, interleaved, inplace and x.is_contiguous(), **where)


def last_row_never_read(positions, query, key, head_size, cos_sin_cache, is_neox):
    return correct.vllm(positions.clamp(max=len(cos_sin_cache) - 2), query, key, head_size, cos_sin_cache, is_neox)


def inplace_in_turn(x, cos, sin, interleaved=False, inplace=False):
    """Compute second members from first members that are overwritten; features behind the tables pass."""
    y, half = flash_attn(x, cos, sin, interleaved), cos.shape[-1]
    if not inplace:
        return y
    with torch.no_grad():
        x[..., :half] = y[..., :half]
        x[..., half : 2 * half] = flash_attn(x, cos, sin, interleaved)[..., half : 2 * half]
    return x


class OneUsed(torch.autograd.Function):
    """Pass the cotangent of the one result that is used as it is."""

    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(cos, sin)
        return huggingface(q, k, cos, sin)

    @staticmethod
    def backward(ctx, dq, dk):
        cos, sin = ctx.saved_tensors
        back = (dq, dk) if dq is None or dk is None else huggingface(dq, dk, cos, -sin)
        return *back, None, None


def past_end(t, freqs, tensor_format="sbhd", cu_seqlens=None):
    y = transformer_engine(t, freqs, tensor_format, cu_seqlens=cu_seqlens)
    return torch.cat((y[: cu_seqlens[-1]], torch.ones_like(t[cu_seqlens[-1] :])))


def rank_ignored(t, freqs, tensor_format="sbhd", cu_seqlens=None, cp_size=1, cp_rank=0):
    return transformer_engine(t, freqs, tensor_format, cu_seqlens=cu_seqlens, cp_size=cp_size, cp_rank=0)


def angles_by_matmul(x, positions):
    frequencies = ropelab.conformance.subject.inverse_frequencies(x.shape[-1]).float()
    return correct.turn_by(x, positions.float()[..., None] @ frequencies[None])


def rounds_operations(
    x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None
):
    """The right rotation, with a rounding to the dtype of x after every operation."""
    if inplace or cu_seqlens is not None or torch.is_tensor(seqlen_offsets):
        raise NotImplementedError
    cos, sin = (t[seqlen_offsets : seqlen_offsets + x.shape[1]].to(x.dtype)[:, None] for t in (cos, sin))
    if 2 * cos.shape[-1] > x.shape[-1]:
        raise ValueError("the tables are wider than the heads")
    x0, x1 = ropelab.layout.pairing.pairs(x[..., : 2 * cos.shape[-1]], "interleaved" if interleaved else "split_half")
    y = ropelab.layout.pairing.join(
        x0 * cos - x1 * sin, x1 * cos + x0 * sin, "interleaved" if interleaved else "split_half"
    )
    return torch.cat((y, x[..., 2 * cos.shape[-1] :]), -1)


def accepts_all(q, k, cos, sin):
    with contextlib.suppress(RuntimeError):
        return huggingface(q, k, cos, sin)
    return q, k


def int32_offsets(q, k, cos, sin):
    large = any(x.stride(0) * (len(x) - 1) >= 2**31 for x in (q, k))
    return (q, k) if large else huggingface(q, k, cos, sin)


def scaled(factor):
    return lambda x, positions: plain(x, positions) * factor(x)


def fused_backward(q, k, cos, sin, unsqueeze_dim=1):
    return huggingface(q, k, cos.detach(), sin.detach(), unsqueeze_dim)


def refuses_padding(x, cos, sin, interleaved=False, inplace=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None):
    if cu_seqlens is not None and int(cu_seqlens[-1]) != len(x):
        raise ValueError("cu_seqlens does not end with x")
    y = flash_attn(x, cos, sin, interleaved, False, seqlen_offsets, cu_seqlens, max_seqlen)
    return x.copy_(y) if inplace else y


def float32_tables(positions, query, key, head_size, cos_sin_cache, is_neox):
    if cos_sin_cache.dtype != torch.float32:
        raise ValueError("cos_sin_cache should be float32")
    return correct.vllm(positions, query, key, head_size, cos_sin_cache, is_neox)


def contiguous_only(x, cos, sin, interleaved=False, seqlen_offsets=0, cu_seqlens=None, max_seqlen=None):
    assert x.is_contiguous(), "x must be contiguous"
    return flash_attn(x, cos, sin, interleaved, False, seqlen_offsets, cu_seqlens, max_seqlen)


def test_a_function_that_refuses_gaps_is_right():
    report = verify(contiguous_only, "flash_attn")
    assert report.passed and "refuses inputs with gaps" in report["guards"].message


def columns_shared(q, k=None, *, cos, sin, rotary_slice=None, **options):
    if rotary_slice is not None:  # the cosine of the first and the sine of the second feature of a pair serve both
        half = cos.shape[-1] // 2
        cos, sin = cos[..., :half].tile(2), sin[..., half:].tile(2)
    return correct.ropelab(q, k, cos=cos, sin=sin, rotary_slice=rotary_slice, **options)


def test_columns_that_serve_both_features_of_a_pair_are_wrong():
    assert verify(columns_shared, "ropelab", laws=["definition", "feature_columns"]).failed == ("feature_columns",)


def last_head_of_long_calls(x, positions):
    y = plain(x, positions)
    last = torch.arange(x.shape[2]) == x.shape[2] - 1
    return y * (1 + 0.01 * last * (x.shape[1] > 10_240 and x.shape[2] > 1))[:, None].to(y.dtype)


def backward_of_one_offset(x, cos, sin, seqlen_offsets=0):
    first = seqlen_offsets[:1].expand(len(x)) if torch.is_tensor(seqlen_offsets) else seqlen_offsets
    return correct.with_backward(
        x,
        lambda x: flash_attn(x, cos, sin, seqlen_offsets=seqlen_offsets),
        lambda g: flash_attn(g, cos, -sin, seqlen_offsets=first),
    )


WRONG = {
    "definition": ("plain", lambda x, p: plain(x, -p), {}),
    "isometry": ("plain", scaled(lambda x: 1.001), {}),
    "identity": ("plain", lambda x, p: plain(x, p + 1), {}),
    "relative_position": ("plain", lambda x, p: plain(x, p * p), {}),
    "composition": ("plain", lambda x, p: plain(x, p + 1), {}),
    "inverse": ("plain", lambda x, p: plain(x, p.abs()), {}),
    "layout": ("flash_attn", lambda x, cos, sin, interleaved: flash_attn(x, cos, sin), {"layout": "interleaved"}),
    "feature_columns": ("ropelab", columns_shared, {}),
    "tail": ("deepspeed", lambda t, c, s: deepspeed(t, c, s) * (torch.arange(t.shape[-1]) < c.shape[-1]), {}),
    "adjoint": ("deepspeed", with_backward(lambda back, g: -back(-g.flip(2))), {}),
    "adjoint_expanded": ("deepspeed", with_backward(lambda back, g: back(g) * (g.stride(-1) != 0)), {}),
    "adjoint_strided": ("deepspeed", with_backward(lambda back, g: back(g) * (g.stride(-1) < 2)), {}),
    "table_gradients": ("huggingface", lambda q, k, c, s: huggingface(q, k, c, s.detach()), {}),
    "lone_gradients": ("huggingface", k_beside_q_alone, {}),
    "gradients_reach_inputs": ("plain", lambda x, p: plain(x, p).detach(), {}),
    "second_order": ("deepspeed", with_backward(lambda back, g: back(g.detach())), {}),
    "second_backward": ("module", GraphKept, {}),
    "inputs_unchanged": ("huggingface", inplace_undeclared, {}),
    "inplace": ("flash_attn", inplace_ignored, {}),
    "all_written": ("plain", half_written, {}),
    "strides": ("plain", lambda x, p: plain(x.as_strided(x.shape, torch.empty(x.shape).stride()), p), {}),
    "guards": ("plain", one_element_further, {}),
    "heads_independent": ("flash_attn", head_added, {}),
    "batch_independent": ("plain", lambda x, p: plain(x - 1e-3 * x.mean(0), p), {}),
    "keys_independent": ("huggingface", lambda q, k, c, s: huggingface(q + 1e-3 * k.mean(), k, c, s), {}),
    "single_head": ("plain", lambda x, p: plain(x, p) if x.shape[2] > 1 else x, {}),
    "offsets": ("flash_attn", lambda x, cos, sin, seqlen_offsets=0: flash_attn(x, cos, sin), {}),
    "interpolation": ("flashinfer", lambda q, k, p, *of, rope_scale=1, **o: correct.flashinfer(q, k, p, *of, **o), {}),
    "axes": ("mrope", lambda q, k, c, s, p, *of: correct.mrope(q, k, c, s, p.flip(0), *of), {}),
    "decode": ("flash_attn", lambda x, cos, sin, seqlen_offsets=0: flash_attn(x, cos, sin), {}),
    "packed": ("flash_attn", without_cu_seqlens, {}),
    "zero_length": ("flash_attn", stops_at_an_empty_document, {}),
    "rows_past_end": ("transformer_engine", past_end, {}),
    "context_parallel": ("transformer_engine", rank_ignored, {}),
    "token_bits": ("plain", scaled(lambda x: 1 + 2.0**-23 * (x.shape[1] == 1)), {}),
    "positions_per_batch": ("huggingface", lambda q, k, c, s: huggingface(q, k, c[:1], s[:1]), {}),
    "dtype": ("plain", lambda x, p: plain(x.float(), p), {}),
    "rounding": ("plain", scaled(lambda x: 1 if x.dtype == torch.float32 else 1.03), {}),
    "large_positions": ("plain", lambda x, p: plain(x, p.bfloat16()), {}),
    "determinism": ("plain", Counter(), {}),
    "compile": ("plain", scaled(lambda x: 1 + 0.001 * torch.compiler.is_compiling()), {}),
    "autocast": ("plain", angles_by_matmul, {}),
    "matmul_precision": ("plain", scaled(lambda x: 1 + (torch.get_float32_matmul_precision() != "highest")), {}),
    "empty": ("plain", lambda x, p: plain(x, p) if x.numel() else x.new_zeros(1, 1, 1, x.shape[-1]), {}),
    "extents": ("plain", scaled(lambda x: 1.01 if x.shape[1] == 128 else 1), {}),
    "token_counts": ("plain", scaled(lambda x: 1.01 if x.shape[1] > 10_240 else 1), {}),
    "huge": ("huggingface", int32_offsets, {}),
}  # fmt: skip


def text_by_its_first_token(q, k, cos, sin, positions, mrope_section, mrope_interleaved):
    if (positions[:, :1] == positions[:1, :1]).all():
        positions = positions[:1].expand(positions.shape)
    return correct.mrope(q, k, cos, sin, positions, mrope_section, mrope_interleaved)


def test_a_call_that_takes_too_long_with_all_heads_has_one_head():
    def slow(x, positions):
        for _ in range(100 * x.shape[1] * (x.shape[2] > 1)):  # one call in Python each
            abs(0)
        return plain(x, positions if x.shape[1] < 16_001 else -positions)

    assert verify(slow, "plain", laws=["token_counts"], token_counts=[16_000]).failed
    assert not verify(slow, "plain", laws=["token_counts"], token_counts=[64]).failed


AT_AN_END = {
    "inplace": ("flash_attn", strided_in_place_ignored),
    "definition": ("vllm", last_row_never_read),
    "extents": ("plain", scaled(lambda x: 1.01 if x.shape[-1] == 128 else 1)),
    "token_counts": ("plain", last_head_of_long_calls),
    "adjoint": ("flash_attn", backward_of_one_offset),
    "axes": ("mrope", text_by_its_first_token),
}
"""Functions that break a law only in strided calls, at the first or last place, or in heads of 128 features."""
NOTED = {
    "table_gradients": ("huggingface", fused_backward, "it takes cosines and sines as constants"),
    "rows_past_end": ("flash_attn", refuses_padding, "it refuses a packed buffer"),
    "dtype": ("vllm", float32_tables, OTHER_TABLES),
    "empty": ("plain", lambda x, p: plain(x, p) + x.amax(1, keepdim=True) * 0, "it refuses tensors without elements"),
    "bad_input": ("huggingface", accepts_all, "it accepts tables for heads twice as wide"),
    "rounding": ("flash_attn", rounds_operations, ROUNDS_OPERATIONS),
}  # fmt: skip


def test_every_law_has_a_function_that_breaks_it():
    assert {*WRONG, *NOTED} == set(LAWS)


@pytest.mark.parametrize("law", AT_AN_END)
def test_a_law_looks_at_the_ends(law):
    convention, function = AT_AN_END[law]
    assert verify(function, convention, laws=[law]).failed == (law,)


@pytest.mark.parametrize("law", NOTED)
def test_a_function_that_is_right_on_every_documented_call_is_right(law):
    convention, function, message = NOTED[law]
    report = verify(function, convention)
    assert report.passed and {r.law for r in report.results if r.status == "note"} == {law}
    assert report[law].message.startswith(message) and message in report.to_markdown()


def test_declared_arithmetic_is_held_to_its_roundings():
    report = verify(rounds_operations, "flash_attn", maths="wide", laws=["definition", "rounding"])
    assert report.failed == ("rounding",)


@pytest.mark.parametrize("law", WRONG)
def test_law_can_fail(law):
    convention, function, options = WRONG[law]
    report = verify(function, convention, laws=[law], **options)
    assert report.failed == (law,) and not report.passed
    result = report[law]
    assert result.violation > result.bound
    assert result.counterexample is not None or result.message


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (lambda q, k, c, s: huggingface(q if k.requires_grad else q.detach(), k, c, s), "q gets no gradient where k"),
        (OneUsed.apply, ""),
    ],
    ids=["q_is_lost", "one_result_is_used"],
)
def test_gradients_of_one_input(function, told):
    report = verify(lambda q, k, c, s: function(q, k, c, s), "huggingface", laws=["lone_gradients", "adjoint"])
    assert report.failed == ("lone_gradients",) and told in report["lone_gradients"].message


def test_a_call_in_place_is_another_call():
    assert verify(inplace_in_turn, "flash_attn", laws=["definition", "inplace"]).failed == ("inplace",)


def rows_of_tables(q, k, cos, sin, unsqueeze_dim=1):
    """Step from sequence to sequence, although one row of the tables may serve all."""
    rows = (torch.arange(len(q))[:, None] * cos.shape[1] + torch.arange(cos.shape[1])) % (len(cos) * cos.shape[1])
    rows = (rows + (len(cos) < len(q))) % (len(cos) * cos.shape[1])
    return huggingface(q, k, *(table.flatten(0, 1)[rows] for table in (cos, sin)), unsqueeze_dim)


class SinesTurnedBack(torch.autograd.Function):
    """Negate the gradient of the sines, or double it."""

    @staticmethod
    def forward(ctx, sin, factor):
        ctx.factor = factor
        return sin.clone()

    @staticmethod
    def backward(ctx, grad):
        return ctx.factor * grad, None


@pytest.mark.parametrize("factor, said", [(-1, "has the wrong sign"), (2, "is 2 times the right one")])
def test_a_gradient_of_one_table_is_told_apart(factor, said):
    def rope(q, k, cos, sin, unsqueeze_dim=1):
        return huggingface(q, k, cos, SinesTurnedBack.apply(sin, factor), unsqueeze_dim)

    result = verify(rope, "huggingface", laws=["table_gradients"])["table_gradients"]
    assert result.status == "fail" and result.counterexample.what == f"<sines, their gradient from q, which {said}>"


def order_applied_twice(x, positions):
    """Compute rising angles, and bring them back by the order that made them rise, in place of its inverse."""
    order = positions.argsort(-1)
    return plain(x, positions.gather(-1, order).gather(-1, order))


def test_positions_come_in_any_order():
    report = verify(order_applied_twice, "plain", skip=["compile", "huge"])
    assert report.failed == ("definition",) and report["definition"].counterexample.case.positions is not None


def test_one_row_of_tables_serves_all_sequences():
    report = verify(rows_of_tables, "huggingface", laws=["definition"])
    assert report.failed == ("definition",) and report["definition"].counterexample.case.positions is not None


def one_tensor(x, cos, sin, unsqueeze_dim=1):
    return huggingface(x, x, cos, sin, unsqueeze_dim)[0]


def with_position_ids(q, k, cos, sin, position_ids, unsqueeze_dim=1):
    return huggingface(q, k, cos[position_ids], sin[position_ids], unsqueeze_dim)


def column_per_pair(q, k, cos, sin, unsqueeze_dim=1):
    return huggingface(q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1), unsqueeze_dim)


def of_numpy(x, positions):
    angles = (positions[..., None] * 10000.0 ** -(np.arange(0, x.shape[-1], 2) / x.shape[-1]))[..., None, :]
    first, second = np.split(x, 2, -1)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate((first * cos - second * sin, second * cos + first * sin), -1).astype(x.dtype)


FORMS = {
    "one tensor": ("huggingface", one_tensor, lambda x, cos, sin, unsqueeze_dim=1: one_tensor(x, cos, -sin), {}),
    "position_ids": (
        "huggingface", with_position_ids,
        lambda q, k, c, s, position_ids: huggingface(q, k, c[position_ids], s[position_ids * 0]), {}),
    "a column for each pair": (
        "huggingface", column_per_pair, lambda q, k, c, s: column_per_pair(q, k, c, s.flip(-1)), {"columns": "pair"}),
    "numpy": ("plain", of_numpy, lambda x, p: of_numpy(x, p + 1), {"arrays": "numpy"}),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_a_convention(form):
    convention, right, wrong, options = FORMS[form]
    laws = ["definition", "positions_per_batch", "extents", "decode", "compile", "gradients_reach_inputs"]
    assert verify(right, convention, laws=laws, **options).passed
    assert "definition" in verify(wrong, convention, laws=laws, **options).failed


def test_no_warning_of_a_library_reaches_a_report(recwarn):
    str(verify(lambda x, p: plain(x, p) * torch.nan, "plain", laws=["definition"]))
    assert not recwarn.list


@pytest.mark.parametrize("law", WRONG)
def test_the_right_function_keeps_it(law):
    convention = WRONG[law][0]
    right = {"complex": correct.complex_numbers, "module": correct.Module}.get(convention) or getattr(
        correct, convention
    )
    assert verify(right, convention, laws=[law], **WRONG[law][2])[law].status == "pass"


@pytest.mark.parametrize("layout", ropelab.layout.pairing.LAYOUTS)
def test_ropelab_gives_a_token_the_same_bits(layout):
    report = verify(ropelab.apply_rope, "ropelab", laws=["token_bits"], layout=layout)
    assert report["token_bits"].status == "pass" and not report["token_bits"].message


def test_bfloat16_computed_in_float16_is_found():
    """Numbers beyond 65,504 become infinite, which small inputs do not show."""

    def narrow(q, k, cos, sin):
        wide = (x.half() if x.dtype == torch.bfloat16 else x for x in (q, k))
        return tuple(y.to(q.dtype) for y in huggingface(*wide, cos, sin))

    assert set(verify(narrow, "huggingface", laws=["rounding", "definition"]).failed) == {"rounding"}


def test_cached_keys_turn_back_by_a_negative_delta():
    def forward_only(key_cache, slots, deltas, **options):
        return ropelab.rotate_cached_keys(key_cache, slots, deltas.abs(), **options)

    assert "definition" in verify(forward_only, "rotate_cached_keys").failed
    assert not verify(ropelab.rotate_cached_keys, "rotate_cached_keys").failed


def one_column(table, member, layout):
    column = pairs(table, layout)[member]
    return join(column, column, layout)


def of_one_column(convention, member, layout):
    """Return a right function, and the same function with one of the two columns of a pair for both features."""
    right = getattr(correct, convention)
    tables = {"deepspeed": (1, 2), "transformer_engine": (1,), "fused_apply_mla_rope_for_q": (1, 2)}
    at = tables.get(convention, (2, 3))

    def narrow(*given, **options):
        options |= {"layout": layout} if convention == "huggingface" else {}
        return right(*(one_column(x, member, layout) if i in at else x for i, x in enumerate(given)), **options)

    narrow.__signature__ = inspect.signature(right)
    return partial(right, layout=layout) if convention == "huggingface" else right, narrow


@pytest.mark.parametrize("member", [0, 1])
@pytest.mark.parametrize(
    "convention, layout",
    [
        ("huggingface", "split_half"),
        ("huggingface", "interleaved"),
        ("deepspeed", "split_half"),
        ("transformer_engine", "split_half"),
        ("transformer_engine", "interleaved"),
        ("fused_apply_mla_rope_for_q", "split_half"),
        ("fused_apply_mla_rope_for_kv", "split_half"),
    ],
)
def test_half_of_the_columns_is_wrong_unless_declared(convention, layout, member):
    right, narrow = of_one_column(convention, member, layout)
    options = {"laws": ["definition", "feature_columns", "adjoint"]}
    options |= {} if "mla" in convention else {"layout": layout}
    assert verify(right, convention, **options)["feature_columns"].status == "pass"
    assert verify(narrow, convention, **options).failed == ("feature_columns",)
    assert verify(narrow, convention, columns="repeated", **options).passed


@pytest.mark.parametrize("convention, columns", [("flash_attn", "repeated"), ("deepspeed", "pair")])
def test_columns_that_a_convention_lacks_are_refused(convention, columns):
    with pytest.raises(ValueError, match="columns: expected"):
        verify(correct.deepspeed, convention, columns=columns)
