"""Every law can fail: for each there is a function, wrong in one line, that it and its statement catch."""

import contextlib

import pytest
import torch

import ropelab
from ropelab.conformance import LAWS, verify
from ropelab.conformance.faults import correct
from ropelab.conformance.faults.correct import deepspeed, flash_attn, huggingface, plain, transformer_engine
from ropelab.conformance.verify import ROUNDS_OPERATIONS


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


WRONG = {
    "definition": ("plain", lambda x, p: plain(x, -p), {}),
    "isometry": ("plain", scaled(lambda x: 1.001), {}),
    "identity": ("plain", lambda x, p: plain(x, p + 1), {}),
    "relative_position": ("plain", lambda x, p: plain(x, p * p), {}),
    "composition": ("plain", lambda x, p: plain(x, p + 1), {}),
    "inverse": ("plain", lambda x, p: plain(x, p.abs()), {}),
    "layout": ("flash_attn", lambda x, cos, sin, interleaved: flash_attn(x, cos, sin), {"layout": "interleaved"}),
    "tail": ("deepspeed", lambda t, c, s: deepspeed(t, c, s) * (torch.arange(t.shape[-1]) < c.shape[-1]), {}),
    "adjoint": ("deepspeed", with_backward(lambda back, g: -back(-g.flip(2))), {}),
    "adjoint_expanded": ("deepspeed", with_backward(lambda back, g: back(g) * (g.stride(-1) != 0)), {}),
    "adjoint_strided": ("deepspeed", with_backward(lambda back, g: back(g) * (g.stride(-1) < 2)), {}),
    "table_gradients": ("huggingface", lambda q, k, c, s: huggingface(q, k, c, s.detach()), {}),
    "gradients_reach_inputs": ("plain", lambda x, p: plain(x, p).detach(), {}),
    "second_order": ("deepspeed", with_backward(lambda back, g: back(g.detach())), {}),
    "second_backward": ("module", GraphKept, {}),
    "inputs_unchanged": ("huggingface", inplace_undeclared, {}),
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
NOTED = {
    "empty": ("plain", lambda x, p: plain(x, p) + x.amax(1, keepdim=True) * 0, "it refuses tensors without elements"),
    "bad_input": ("huggingface", accepts_all, "it accepts tables for heads twice as wide"),
    "rounding": ("flash_attn", rounds_operations, ROUNDS_OPERATIONS),
}  # fmt: skip


def test_every_law_has_a_function_that_breaks_it():
    assert {*WRONG, *NOTED} == set(LAWS)


@pytest.mark.parametrize("law", NOTED)
def test_a_function_that_is_right_on_every_documented_call_is_right(law):
    convention, function, message = NOTED[law]
    report = verify(function, convention)
    assert report.passed and {r.law for r in report.results if r.status == "note"} == {law}
    assert report[law].message.startswith(message) and message in report.to_markdown()


def test_declared_arithmetic_is_held_to_its_roundings():
    report = verify(rounds_operations, "flash_attn", maths="wide", laws=["definition", "rounding"], diagnose=False)
    assert report.failed == ("rounding",)


@pytest.mark.parametrize("law", WRONG)
def test_law_can_fail(law):
    convention, function, options = WRONG[law]
    report = verify(function, convention, laws=[law], diagnose=False, **options)
    assert report.failed == (law,) and not report.passed
    result = report[law]
    assert result.violation > result.bound
    assert result.counterexample is not None or result.message


@pytest.mark.parametrize("law", WRONG)
def test_the_right_function_keeps_it(law):
    convention = WRONG[law][0]
    right = {"complex": correct.complex_numbers, "module": correct.Module}.get(convention) or getattr(
        correct, convention
    )
    assert verify(right, convention, laws=[law], diagnose=False, **WRONG[law][2])[law].status == "pass"


@pytest.mark.parametrize("layout", ropelab.layout.pairing.LAYOUTS)
def test_ropelab_gives_a_token_the_same_bits(layout):
    report = verify(ropelab.apply_rope, "ropelab", laws=["token_bits"], layout=layout)
    assert report["token_bits"].status == "pass" and not report["token_bits"].message
