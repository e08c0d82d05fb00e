"""One of two processes that share every sequence; started by test_ranks.py.

Each rank rotates its shard of q and k and differentiates; the shards of all ranks, gathered and put in their
places, must be the bits that one process gets for the whole.
"""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import ropelab
from ropelab.layout.seq_format import SEQ_AXIS, SEQ_FORMATS
from ropelab.positions.packed import CHUNKS, PackedSequences, context_parallel_positions
from tests.support import draw

LENGTHS = [8, 0, 24, 16]
SEQ_LEN = 16


def rotated_and_gradients(tensors, **options) -> list[torch.Tensor]:
    """Rotated q and k, and the gradients that the cotangents of both give."""
    q, k, q_cotangent, k_cotangent = tensors
    q, k = q.clone().requires_grad_(), k.clone().requires_grad_()
    outputs = ropelab.apply_rope(q, k, **options)
    gradients = torch.autograd.grad(outputs, (q, k), (q_cotangent, k_cotangent))
    return [*(output.detach() for output in outputs), *gradients]


def gathered(x: torch.Tensor) -> list[torch.Tensor]:
    """``x`` of every rank."""
    xs = [torch.full_like(x, -1) for _ in range(dist.get_world_size())]
    dist.all_gather(xs, x.contiguous())
    return xs


def check(seq_format: str, chunks: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raise AssertionError unless the gathered shards are the whole, in q, k and their gradients."""
    cp_size, cp_rank = dist.get_world_size(), dist.get_rank()
    axis = SEQ_AXIS[seq_format]
    cos, sin = ropelab.rotary_table(32, 8, device=device)
    options = {"cos": cos, "sin": sin, "seq_format": seq_format}
    packed = seq_format == "thd"
    batch, tokens = (1, sum(LENGTHS)) if packed else (2, SEQ_LEN)
    # All ranks draw from the same seed, so that each has the whole to compare with.
    tensors = [draw(batch, tokens, heads, 12, seq_format=seq_format).to(device, dtype) for heads in (4, 2, 4, 2)]
    if packed:
        cu_seqlens = torch.tensor([0, *LENGTHS], device=device).cumsum(0)
        offsets = torch.tensor([0, 5, 3, -9], device=device)
        all_positions = PackedSequences(cu_seqlens, tokens, offsets=offsets).positions
        sequences = PackedSequences(
            cu_seqlens, tokens // cp_size, offsets=offsets, cp_size=cp_size, cp_rank=cp_rank, chunks=chunks
        )
        positions, indices = sequences.positions, sequences.token_indices()
    else:
        all_positions = None
        positions = indices = context_parallel_positions(tokens, cp_size, cp_rank, chunks, device)
    whole = rotated_and_gradients(tensors, positions=all_positions, **options)
    shard = rotated_and_gradients([x.index_select(axis, indices) for x in tensors], positions=positions, **options)
    places = gathered(indices)
    for name, part, expected in zip(("q", "k", "q's gradient", "k's gradient"), shard, whole, strict=True):
        actual = torch.full_like(expected, float("nan"))
        for place, x in zip(places, gathered(part), strict=True):
            actual.index_copy_(axis, place.long(), x)
        assert torch.equal(actual, expected), f"{name}: shards differ from the whole ({seq_format}, {chunks}, {dtype})"


def main(backend: str, init_method: str, rank: int, world_size: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timedelta(seconds=300)
    )
    for seq_format in SEQ_FORMATS:
        for chunks in CHUNKS:
            for dtype in (torch.float32, torch.bfloat16):
                check(seq_format, chunks, dtype, device)
    dist.destroy_process_group()
    print("right", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
