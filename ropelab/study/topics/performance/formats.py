"""Compare every format of the kernel family with the rotation of single sequences, bit for bit."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import pandas as pd
import torch

from ropelab import PackedSequences, apply_rope, rotary_table
from ropelab.bench.rows import need
from ropelab.bench.table_free import TABLE_FREE
from ropelab.study.engine.words import value_range
from ropelab.study.topics.performance import model_heads
from ropelab.study.topics.performance.comparison import OURS, timed
from ropelab.study.topics.performance.findings import MANY, ONE, SKEWED


def table_free(frame: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """The record ``table_free``: the least fraction of a copy in each cell, with tables and without; and a sentence."""
    rows = timed(frame, OURS, TABLE_FREE)
    table = rows.pivot_table(
        index=["cell", "seq_format"], columns="contender", values="fraction_of_copy", aggfunc="min"
    )
    with_tables, without = (value_range(table[name]) for name in (OURS, TABLE_FREE))
    return table, (
        f"Without tables the kernel runs at {without} of a copy, with tables at {with_tables}. The price is "
        "arithmetic, the gain is memory: 4 bytes for every position and feature."
    )


def few_tokens_without_tables(frame: pd.DataFrame) -> str:
    """The record ``model_heads``: how near the small drawn calls come to their limit, with tables and without."""
    small = model_heads.judged(frame).query("not large")
    middle = small.groupby("table_free").fraction_of_limit.median()
    return (
        "With few tokens the price is a wait. In the drawn calls of chapter 05 below 16 MB, calls without tables run "
        f"at {middle[True]:.2f} of their limit in the median, and calls with tables at {middle[False]:.2f}."
    )


def packed_sentence(frame: pd.DataFrame) -> str:
    """The record ``packed``: how the time depends on the lengths of sequences with as many tokens in all."""
    ours = timed(frame, OURS)
    ours = ours[ours.contender == OURS].set_index(["case", "layout", "direction"])
    took = ours.median_us.unstack("case")
    return (
        f"{ours.tokens.iloc[0]:,} tokens in 2,401 equal sequences take {value_range(took[MANY] / took[ONE])} times as "
        f"long as in one sequence, and {value_range(took[SKEWED] / took[ONE])} times as long in one long and 2,400 "
        f"short sequences. The kernel runs at {value_range(ours.fraction_of_copy)} of a copy."
    )


_STEPS = {
    "apply_rope": "the rotation", "qk_norm": "norm and rotation", "qk_norm backward": "their backward",
    "one pass": "one pass into the cache",
}  # fmt: skip
"""A step of the record ``mrope`` in words."""


def axes_sentence(frame: pd.DataFrame) -> str:
    """The record ``mrope``: the time with three axes over the time with one axis, for each step."""
    need(frame.contender, "one axis", "three axes")
    calls = frame.pivot_table(index=["step", "model", "cell", "layout"], columns="contender", values="median_us")
    ratio = calls["three axes"] / calls["one axis"]
    each = "; ".join(f"{words} {value_range(ratio[step])}" for step, words in _STEPS.items())
    layouts = calls["one axis"]["qk_norm backward"].unstack("layout").dropna()
    pairs = (layouts.interleaved / layouts.split_half).max()
    return (
        f"The time with three axes over that with one: {each}; {ratio.median():.2f} in the median of {len(ratio)} "
        f"calls. A read more saves nothing: where the backward is faster, its kernel for one axis is slow. With "
        f"adjacent pairs it takes up to {pairs:.2f} times as long as with halves, and the record does not tell why."
    )


def check(lengths: Sequence[int], padding: int, ranks: int, layout: str) -> Iterator[tuple[str, bool]]:
    """Statements that must hold bit for bit on this machine, each with whether it holds.

    Args:
        lengths: of the packed sequences, divisible by ``2 * ranks``.
        padding: the rows behind the last sequence.
        ranks: the ranks that share each sequence.
        layout: "split_half" or "interleaved".
    """
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    total = sum(lengths)
    cos, sin = rotary_table(total, 16, device=device)
    q, k, gq, gk = (torch.randn(total + padding, h, 16, device=device, dtype=torch.bfloat16) for h in (4, 2, 4, 2))
    cu_seqlens = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    packed = PackedSequences(cu_seqlens, total_tokens=len(q))
    dense = partial(apply_rope, cos=cos, sin=sin, layout=layout)
    rotate = partial(dense, seq_format="thd")
    whole = rotate(q, k, positions=packed.positions)
    # One sequence after the other, each counted from 0.
    alone = [rotate(*pair) for pair in zip(q[:total].split(lengths), k[:total].split(lengths), strict=True)]
    single = [torch.cat(pieces) for pieces in zip(*alone, strict=True)]
    yield "packed = each sequence alone", _same((y[:total] for y in whole), single)

    leaves = [x.clone().requires_grad_() for x in (q, k)]
    grads = torch.autograd.grad(rotate(*leaves, positions=packed.positions), leaves, (gq, gk))
    yield "rows past the end are zeros, and so is their gradient", not any(y[total:].any() for y in (*whole, *grads))

    for chunks in ("dual", "contiguous"):
        pieced = [torch.zeros_like(x[:total]) for x in (q, k)]
        for rank in range(ranks):
            shard = PackedSequences(cu_seqlens, total // ranks, cp_size=ranks, cp_rank=rank, chunks=chunks)
            rows = shard.token_indices()
            for y, part in zip(pieced, rotate(q[rows], k[rows], positions=shard.positions), strict=True):
                y[rows] = part
        yield f"{ranks} {chunks} shards, reassembled = the whole", _same(pieced, (y[:total] for y in whole))

    positions = torch.arange(total, device=device)
    back = rotate(q[:total], k[:total], positions=-positions)
    yield "negative positions = the inverse rotation", _same(back, rotate(q[:total], k[:total], inverse=True))

    qkv = torch.cat((q, k, k), dim=1)[None]  # [1, T, Hq + 2 Hk, D]
    views = dense(*qkv.split((4, 2, 2), dim=2)[:2], positions=packed.positions)
    yield "q and k as views of qkv = contiguous", _same((y[0] for y in views), whole)
    for axes, seq_format in (((1, 0, 2, 3), "sbhd"), ((0, 2, 1, 3), "bhsd")):
        moved = (x[None].permute(axes).contiguous() for x in (q, k))
        ys = dense(*moved, seq_format=seq_format, positions=packed.positions)
        yield f"{seq_format} = bshd", _same((y.permute(axes)[0] for y in ys), whole)


def _same(xs: Iterable[torch.Tensor], ys: Iterable[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(xs, ys, strict=True))
