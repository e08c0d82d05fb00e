"""Compare every format of the kernel family with the rotation of single sequences, bit for bit."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch

from ropelab import PackedSequences, apply_rope, rotary_table


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
