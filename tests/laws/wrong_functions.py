"""Wrong functions beside the catalogue: they cite no report, and no explanation was written for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ropelab.angles.frequencies import inverse_frequencies
from ropelab.study.faults import correct

WRONG: dict[str, tuple[Callable[..., Any], str, dict[str, Any]]] = {}
"""Name -> function, convention, options of `verify`."""


def _wrong(convention: str, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that enters a function into `WRONG`."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        WRONG[function.__name__] = function, convention, options
        return function

    return enter


# -------------------------------------------------------------------------------------------------- rows and wraps


@_wrong("plain")
def remainder_of_1000(x, positions):
    return correct.plain(x, torch.fmod(positions, 1000))


@_wrong("plain")
def ten_more_for_each_sequence(x, positions):
    return correct.plain(x, positions.expand(x.shape[:2]) + 10 * torch.arange(len(x))[:, None])


@_wrong("flash_attn")
def clamped_at_255(x, cos, sin, interleaved=False, inplace=False, **where):
    cos, sin = (table[torch.arange(len(table)).clamp(max=255)] for table in (cos, sin))
    return correct.flash_attn(x, cos, sin, interleaved, inplace, **where)


@_wrong("vllm")
def key_at_the_next_tokens_position(positions, query, key, head_size, cos_sin_cache, is_neox):
    correct.vllm(positions, query, key.clone(), head_size, cos_sin_cache, is_neox)
    correct.vllm(positions.roll(-1), query.clone(), key, head_size, cos_sin_cache, is_neox)
    return query, key


@_wrong("plain")
def less_2048_once(x, positions):
    return correct.plain(x, torch.where(positions >= 2048, positions - 2048, positions))


@_wrong("transformer_engine")
def chunks_of_a_rank_exchanged(
    t, freqs, tensor_format="sbhd", interleaved=False, cu_seqlens=None, cp_size=1, cp_rank=0
):
    positions = correct.te_positions(t, tensor_format, cu_seqlens, cp_size, cp_rank)
    positions = positions.roll(len(positions) // 2) if cp_size > 1 else positions
    return correct.transformer_engine(
        t, freqs, tensor_format, interleaved, cu_seqlens, cp_size, cp_rank, positions=positions
    )


# ------------------------------------------------------------------------------------------------ heads and features


@_wrong("huggingface")
def second_head_of_k_left(q, k, cos, sin, unsqueeze_dim=1):
    q, turned = correct.huggingface(q, k, cos, sin, unsqueeze_dim)
    if k.shape[unsqueeze_dim] < 2:
        return q, turned
    keep = (torch.arange(k.shape[unsqueeze_dim]) == 1).view([-1 if a == unsqueeze_dim else 1 for a in range(4)])
    return q, torch.where(keep, k, turned)


@_wrong("huggingface")
def heads_of_k_exchanged(q, k, cos, sin, unsqueeze_dim=1):
    return correct.huggingface(q, k.flip(unsqueeze_dim), cos, sin, unsqueeze_dim)


@_wrong("transformer_engine")
def sequences_in_reverse_order(
    t, freqs, tensor_format="sbhd", interleaved=False, cu_seqlens=None, cp_size=1, cp_rank=0
):
    if tensor_format != "thd":
        t = t.flip(tensor_format.index("b"))
    return correct.transformer_engine(t, freqs, tensor_format, interleaved, cu_seqlens, cp_size, cp_rank)


@_wrong("huggingface")
def last_pair_left(q, k, cos, sin, unsqueeze_dim=1):
    half = cos.shape[-1] // 2
    last = torch.arange(2 * half) % half == half - 1
    return correct.huggingface(q, k, cos.masked_fill(last, 1), sin.masked_fill(last, 0), unsqueeze_dim)


@_wrong("deepspeed")
def back_from_the_third_head_on(t, freqs_cos, freqs_sin):
    there, back = (correct.deepspeed(t, freqs_cos, sin) for sin in (freqs_sin, -freqs_sin))
    return torch.where((torch.arange(t.shape[2]) >= 2)[:, None], back, there)


# ----------------------------------------------------------------------------------------- frequencies and precision


@_wrong("module", rotary_dim=16)
class ExponentsOfOddNumbers(correct.Module):
    def __init__(self, head_dim, rotary_dim=None, base=10000.0):
        super().__init__(head_dim, rotary_dim, base)
        self.inv_freq = self.inv_freq * base ** (-1 / (rotary_dim or head_dim))


@_wrong("plain")
def positions_in_float16(x, positions):
    return correct.plain(x, positions.half().double())


@_wrong("plain")
def angles_in_float16(x, positions):
    angles = positions.double()[..., None] * inverse_frequencies(x.shape[-1])
    return correct.turn_by(x, angles.half().double())


@_wrong("huggingface", maths="wide")
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


@_wrong("deepspeed")
def divided_by_the_root_of_the_width(t, freqs_cos, freqs_sin):
    return correct.deepspeed(t, freqs_cos, freqs_sin) * 0.25


# --------------------------------------------------------------------------------------- signs, calls and gradients


@_wrong("complex", layout="interleaved")
def conjugated_for_k(xq, xk, freqs_cis):
    return correct.complex_numbers(xq, xq, freqs_cis)[0], correct.complex_numbers(xk, xk, freqs_cis.conj())[0]


@_wrong("flash_attn")
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


@_wrong("ropelab")
def inverse_ignored(q, k=None, *, inverse=False, **options):
    return correct.ropelab(q, k, **options)


@_wrong("module")
class BackFromTheThirdCallOn(correct.Module):
    calls = 0

    def forward(self, q, k):
        angles = self.angles(q.shape[1], q.device) * (-1 if self.calls > 1 else 1)
        self.calls += 1
        return correct.turn_by(q, angles), correct.turn_by(k, angles)
