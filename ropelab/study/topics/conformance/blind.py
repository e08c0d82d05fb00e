"""Twenty faults that were written after the identification, and were run once.

Each fault comes with the same change of a plan, which was written with the fault and not with its identification.
Nobody changed the identification to describe a blind fault better. `identified.blind` computes the results.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ropelab.angles.frequencies import inverse_frequencies
from ropelab.conformance.faults import correct
from ropelab.conformance.identify.deviation import Deviation, Scope, always
from ropelab.conformance.identify.plan import Plan
from ropelab.conformance.identify.questions import Question
from ropelab.conformance.identify.vocabulary import set_row


@dataclass(frozen=True)
class Blind:
    """A fault, and the same fault as a deviation of the definition."""

    function: Callable[..., Any]
    convention: str
    deviation: Deviation
    options: dict[str, Any] = field(default_factory=dict)


BLIND: dict[str, Blind] = {}


def _blind(
    convention: str,
    change: Callable[[Plan], object],
    name: str = "",
    gradient: bool = False,
    asked: Callable[[Question, int], bool] = always,
    mask: Callable[[Plan], np.ndarray] | None = None,
    **options,
):
    def keep(function):
        words = function.__name__.replace("_", " ")
        scope = Scope(name, gradient, "", asked, mask)
        BLIND[function.__name__] = Blind(
            function, convention, Deviation("blind", words, "", change, scope=scope), options
        )
        return function

    return keep


def _row(row: Callable[[Plan], np.ndarray]) -> Callable[[Plan], None]:
    return lambda plan: set_row(plan, row(plan))


def _times(part: str, factor: float) -> Callable[[Plan], None]:
    return lambda plan: setattr(plan, part, factor * getattr(plan, part))


def _set(part: str, key: Any, value: Any) -> Callable[[Plan], None]:
    return lambda plan: getattr(plan, part).__setitem__(key, value(plan) if callable(value) else value)


def _same(plan: Plan) -> None:
    plan.multiple = 0 * plan.multiple
    plan.cos0 = plan.cos1 = np.array(1 / plan.factor)


# -------------------------------------------------------------------------------------------------- rows and wraps


@_blind("plain", _row(lambda p: np.fmod(p.row, 1000)))
def remainder_of_1000(x, positions):
    return correct.plain(x, torch.fmod(positions, 1000))


@_blind("plain", _row(lambda p: p.row + 10 * p.batch))
def ten_more_for_each_sequence(x, positions):
    return correct.plain(x, positions.expand(x.shape[:2]) + 10 * torch.arange(len(x))[:, None])


@_blind("flash_attn", _row(lambda p: np.minimum(p.row, 255)))
def clamped_at_255(x, cos, sin, interleaved=False, inplace=False, **where):
    cos, sin = (table[torch.arange(len(table)).clamp(max=255)] for table in (cos, sin))
    return correct.flash_attn(x, cos, sin, interleaved, inplace, **where)


@_blind("vllm", _row(lambda p: np.roll(np.broadcast_to(p.row, (*p.shape[:2], 1, 1)).reshape(-1), -1).reshape(
    *p.shape[:2], 1, 1)), name="k")  # fmt: skip
def key_at_the_next_tokens_position(positions, query, key, head_size, cos_sin_cache, is_neox):
    correct.vllm(positions, query, key.clone(), head_size, cos_sin_cache, is_neox)
    correct.vllm(positions.roll(-1), query.clone(), key, head_size, cos_sin_cache, is_neox)
    return query, key


@_blind("plain", _row(lambda p: np.where(p.row >= 2048, p.row - 2048, p.row)))
def less_2048_once(x, positions):
    return correct.plain(x, torch.where(positions >= 2048, positions - 2048, positions))


def _chunks_exchanged(plan: Plan) -> None:
    if plan.question.case.shard is not None:
        set_row(plan, np.roll(plan.row, plan.shape[1] // 2, axis=1))


@_blind("transformer_engine", _chunks_exchanged)
def chunks_of_a_rank_exchanged(
    t, freqs, tensor_format="sbhd", interleaved=False, cu_seqlens=None, cp_size=1, cp_rank=0
):
    positions = correct.te_positions(t, tensor_format, cu_seqlens, cp_size, cp_rank)
    positions = positions.roll(len(positions) // 2) if cp_size > 1 else positions
    return correct.transformer_engine(
        t, freqs, tensor_format, interleaved, cu_seqlens, cp_size, cp_rank, positions=positions
    )


# ------------------------------------------------------------------------------------------------ heads and features


@_blind("huggingface", _same, name="k", mask=lambda p: p.head == 1)
def second_head_of_k_left(q, k, cos, sin, unsqueeze_dim=1):
    q, turned = correct.huggingface(q, k, cos, sin, unsqueeze_dim)
    if k.shape[unsqueeze_dim] < 2:
        return q, turned
    keep = (torch.arange(k.shape[unsqueeze_dim]) == 1).view([-1 if a == unsqueeze_dim else 1 for a in range(4)])
    return q, torch.where(keep, k, turned)


@_blind("huggingface", _set("order", 2, lambda p: np.arange(p.shape[2])[::-1]), name="k")
def heads_of_k_exchanged(q, k, cos, sin, unsqueeze_dim=1):
    return correct.huggingface(q, k.flip(unsqueeze_dim), cos, sin, unsqueeze_dim)


@_blind("transformer_engine", _set("order", 0, lambda p: np.arange(p.shape[0])[::-1]))
def sequences_in_reverse_order(
    t, freqs, tensor_format="sbhd", interleaved=False, cu_seqlens=None, cp_size=1, cp_rank=0
):
    if tensor_format != "thd":
        t = t.flip(tensor_format.index("b"))
    return correct.transformer_engine(t, freqs, tensor_format, interleaved, cu_seqlens, cp_size, cp_rank)


@_blind("huggingface", _same, mask=lambda p: np.arange(p.frequency.shape[-1]) == p.frequency.shape[-1] - 1)
def last_pair_left(q, k, cos, sin, unsqueeze_dim=1):
    half = cos.shape[-1] // 2
    last = torch.arange(2 * half) % half == half - 1
    return correct.huggingface(q, k, cos.masked_fill(last, 1), sin.masked_fill(last, 0), unsqueeze_dim)


@_blind("deepspeed", _times("multiple", -1), mask=lambda p: p.head >= 2)
def back_from_the_third_head_on(t, freqs_cos, freqs_sin):
    there, back = (correct.deepspeed(t, freqs_cos, sin) for sin in (freqs_sin, -freqs_sin))
    return torch.where((torch.arange(t.shape[2]) >= 2)[:, None], back, there)


# ----------------------------------------------------------------------------------------- frequencies and precision


@_blind("module", _times("multiple", 10_000.0 ** (-1 / 16)), rotary_dim=16)
class ExponentsOfOddNumbers(correct.Module):
    def __init__(self, head_dim, rotary_dim=None, base=10000.0):
        super().__init__(head_dim, rotary_dim, base)
        self.inv_freq = self.inv_freq * base ** (-1 / (rotary_dim or head_dim))


@_blind("plain", _set("rounded", "position", "float16"))
def positions_in_float16(x, positions):
    return correct.plain(x, positions.half().double())


@_blind("plain", _set("rounded", "angle", "float16"))
def angles_in_float16(x, positions):
    angles = positions.double()[..., None] * inverse_frequencies(x.shape[-1])
    return correct.turn_by(x, angles.half().double())


def _rounded_products(plan: Plan) -> None:
    if not plan.is_gradient:
        plan.rounded["product"] = "bfloat16"


@_blind("huggingface", _rounded_products, maths="wide")
def products_in_bfloat16(q, k, cos, sin, unsqueeze_dim=1):
    def short(product):
        return product + (product.bfloat16().to(product.dtype) - product).detach()

    def one(x):
        half = cos.shape[-1] // 2
        c, s = (table[..., :half].unsqueeze(unsqueeze_dim) for table in (cos, sin))
        width = 2 * half
        x0, x1 = x[..., :width].chunk(2, dim=-1)
        y = torch.cat((short(x0 * c) - short(x1 * s), short(x1 * c) + short(x0 * s), x[..., width:]), dim=-1)
        return y.to(x.dtype)

    return one(q), one(k)


@_blind("deepspeed", lambda p: [_times(part, 0.25)(p) for part in ("cos0", "cos1", "sin0", "sin1", "tail")])
def divided_by_the_root_of_the_width(t, freqs_cos, freqs_sin):
    return correct.deepspeed(t, freqs_cos, freqs_sin) * 0.25


# --------------------------------------------------------------------------------------- signs, calls and gradients


@_blind("complex", _times("multiple", -1), name="k", layout="interleaved")
def conjugated_for_k(xq, xk, freqs_cis):
    return correct.complex_numbers(xq, xq, freqs_cis)[0], correct.complex_numbers(xk, xk, freqs_cis.conj())[0]


@_blind("flash_attn", _times("sin1", 0.0), gradient=True)
def gradient_lacks_a_product(x, cos, sin, interleaved=False, inplace=False, **where):
    positions = correct.flash_positions(x, where.get("seqlen_offsets", 0), where.get("cu_seqlens"))
    layout = correct.interleaved_name(interleaved)

    def back(grad):
        g = correct.turn_at(grad, cos, -sin, positions, layout)
        half, without = cos.shape[-1], correct.turn_at(grad, cos, torch.zeros_like(sin), positions, layout)
        g[..., :half] = without[..., :half]
        return g

    y = correct.with_backward(x, lambda x: correct.turn_at(x, cos, sin, positions, layout), back)
    return x.copy_(y) if inplace else y


@_blind("ropelab", _times("multiple", -1), asked=lambda q, i: q.case.inverse)
def inverse_ignored(q, k=None, *, inverse=False, **options):
    return correct.ropelab(q, k, **options)


@_blind("module", _times("multiple", -1), asked=lambda q, i: len(q.before) > 1)
class BackFromTheThirdCallOn(correct.Module):
    calls = 0

    def forward(self, q, k):
        angles = self.angles(q.shape[1], q.device) * (-1 if self.calls > 1 else 1)
        self.calls += 1
        return correct.turn_by(q, angles), correct.turn_by(k, angles)
