"""Positions of packed sequences and of context-parallel shards, against a plain loop and through `apply_rope`."""

import itertools
import random

import pytest
import torch

import ropelab
import ropelab.positions.packed
from ropelab.kernels import NO_POSITION, backend
from ropelab.kernels.positions_torch import Shard
from ropelab.kernels.rotation import INVALID_POSITION
from ropelab.positions.packed import PackedSequences, context_parallel_positions
from tests.support import draw

# cp_size, chunks
SHARDINGS = [(1, "dual"), (1, "contiguous"), (2, "dual"), (2, "contiguous"), (4, "dual"), (4, "contiguous")]
INDEX_DTYPES = [torch.int32, torch.int64]

shardings = pytest.mark.parametrize(("cp_size", "chunks"), SHARDINGS)


def shares(length: int, cp_size: int, cp_rank: int, chunks: str) -> list[int]:
    """The places of one sequence that a rank holds, in the order in which it holds them."""
    places = list(range(length))
    if cp_size == 1:
        return places
    count = 2 * cp_size if chunks == "dual" else cp_size
    size, rest = divmod(length, count)
    assert rest == 0
    held = [cp_rank, count - 1 - cp_rank] if chunks == "dual" else [cp_rank]
    return [place for chunk in held for place in places[chunk * size : (chunk + 1) * size]]


def by_loop(lengths, total_tokens, *, offsets=0, cp_size=1, cp_rank=0, chunks="dual") -> list[int]:
    """The positions of the tokens that a rank holds, and the padding."""
    offsets = [offsets] * len(lengths) if isinstance(offsets, int) else offsets.tolist()
    rows = []
    for length, offset in zip(lengths, offsets, strict=True):
        rows += [offset + place for place in shares(length, cp_size, cp_rank, chunks)]
    return rows + [NO_POSITION] * (total_tokens - len(rows))


def cumulative(lengths, dtype=torch.int32, device="cpu") -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=dtype, device=device)


def random_lengths(rng: random.Random, count: int, multiple: int) -> list[int]:
    """Random lengths, of which about a third are zero."""
    return [multiple * rng.choice([0, 0, 1, 2, 3, rng.randrange(40)]) for _ in range(count)]


# What the loop says


@shardings
@pytest.mark.parametrize("offset_kind", ["none", "int", torch.int32, torch.int64], ids=str)
def test_positions_are_those_of_the_loop(device, cp_size, chunks, offset_kind):
    rng = random.Random(f"{cp_size} {chunks} {offset_kind}")
    multiple = 1 if cp_size == 1 else 2 * cp_size if chunks == "dual" else cp_size
    for count, dtype in ((0, torch.int64), (1, torch.int32), (7, torch.int64), (30, torch.int32)):
        lengths = random_lengths(rng, count, multiple)
        padding = rng.choice([0, 1, 9])
        total = sum(lengths) // cp_size + padding
        if offset_kind == "none":
            offsets = {}
        elif offset_kind == "int":
            offsets = {"offsets": rng.randrange(-100, 100)}
        else:
            values = [rng.randrange(-100, 100) for _ in lengths]
            offsets = {"offsets": torch.tensor(values, dtype=offset_kind, device=device)}
        for cp_rank in range(cp_size):
            shard = {"cp_size": cp_size, "cp_rank": cp_rank, "chunks": chunks}
            packed = PackedSequences(cumulative(lengths, dtype, device), total, **offsets, **shard)
            packed.check()
            assert packed.positions.dtype == torch.int32 and packed.positions.device.type == torch.device(device).type
            assert packed.positions.tolist() == by_loop(lengths, total, **offsets, **shard), (lengths, shard)


@pytest.mark.parametrize(
    "lengths",
    [[], [0], [0, 0, 0], [1], [0, 1], [1, 0], [0, 0, 5, 0, 0, 1, 0, 0], [1] * 9, [3, 0, 0, 0, 0, 0, 0, 2]],
    ids=str,
)
def test_empty_sequences_anywhere(device, lengths):
    for padding in (0, 1, 3):
        total = sum(lengths) + padding
        packed = PackedSequences(cumulative(lengths, device=device), total)
        assert packed.positions.tolist() == by_loop(lengths, total)
        per_sequence = torch.arange(len(lengths), device=device) * 100
        packed = PackedSequences(cumulative(lengths, device=device), total, offsets=per_sequence)
        assert packed.positions.tolist() == by_loop(lengths, total, offsets=per_sequence)


@pytest.mark.parametrize("sequences", [1, 2, 1023, 1024, 1025, 2401])
def test_more_than_a_program_takes_at_once(device, sequences):
    """Programs take 512 tokens, and check 1,024 sequences at a time."""
    rng = random.Random(sequences)
    for tokens in (511, 512, 513, 1536):
        ends = sorted(rng.randrange(tokens + 1) for _ in range(sequences))
        lengths = [end - start for start, end in zip([0, *ends], ends, strict=False)]
        packed = PackedSequences(cumulative(lengths, device=device), tokens)
        assert packed.positions.tolist() == by_loop(lengths, tokens)


def test_any_strides(device):
    lengths, offsets = [4, 0, 8, 4], torch.tensor([5, -3, 7, 100], device=device)
    cu = cumulative(lengths, device=device)
    expected = by_loop(lengths, 10, offsets=offsets, cp_size=2, cp_rank=1)
    every_third = torch.full((5, 3), -7, dtype=torch.int32, device=device)
    every_third[:, 1] = cu
    backwards = torch.stack((offsets, -offsets), dim=1)
    for cu_view, offsets_view in ((every_third[:, 1], offsets), (cu, backwards[:, 0])):
        assert cu_view.stride(0) > 1 or offsets_view.stride(0) > 1
        assert PackedSequences(cu_view, 10, offsets=offsets_view, cp_size=2, cp_rank=1).positions.tolist() == expected
    one_for_all = torch.tensor([9], device=device).expand(4)
    assert PackedSequences(cu, 16, offsets=one_for_all).positions.tolist() == by_loop(lengths, 16, offsets=9)


def test_a_sequence_may_have_no_position(device):
    """`NO_POSITION` as an offset means here what it means for `apply_rope`, also in int64."""
    for dtype in INDEX_DTYPES:
        offsets = torch.tensor([3, NO_POSITION, 0], dtype=dtype, device=device)
        packed = PackedSequences(cumulative([2, 3, 1], device=device), 7, offsets=offsets)
        assert packed.positions.tolist() == [3, 4, NO_POSITION, NO_POSITION, NO_POSITION, 0, NO_POSITION]
    packed = PackedSequences(cumulative([2], device=device), 3, offsets=NO_POSITION)
    assert packed.positions.tolist() == [NO_POSITION] * 3


def test_dual_chunks_are_the_published_ones():
    """Ranks 0 and 1 of 2 hold quarters 0 and 3, and 1 and 2 (TransformerEngine, Megatron)."""
    assert context_parallel_positions(8, 2, 0).tolist() == [0, 1, 6, 7]
    assert context_parallel_positions(8, 2, 1).tolist() == [2, 3, 4, 5]


# What cannot be served


# Contents that no rank can serve: cu_seqlens, total_tokens, cp_size, chunks, what "cu_seqlens: expected" goes on with
BAD_CONTENTS = {
    "not from 0": ([1, 4], 8, 1, "dual", "0 as the first element, got 1"),
    "from below 0": ([-4, 4], 8, 1, "dual", "0 as the first element, got -4"),
    "not from 0, without sequences": ([3], 8, 1, "dual", "0 as the first element, got 3"),
    "decreasing": ([0, 4, 2, 8], 8, 1, "dual", r"non-decreasing elements, got 2 after 4 \(element 2\)"),
    "decreasing to the end": ([0, 8, 4], 8, 1, "dual", r"non-decreasing elements, got 4 after 8 \(element 2\)"),
    "back by 2**64 - 8": ([0, 2**63 - 4, 4 - 2**63], 8, 1, "dual", r"non-decreasing elements, got -92233.* after .*"),
    "one of negative length": ([0, -4], 8, 1, "dual", r"non-decreasing elements, got -4 after 0 \(element 1\)"),
    "one odd": ([0, 3], 8, 2, "contiguous", r"lengths divisible by cp_size = 2, got 3 \(sequence 0\)"),
    "beyond the tokens": ([0, 4, 9], 8, 1, "dual", "a last element <= total_tokens = 8, got 9"),
    "beyond the only token": ([0, 2], 1, 1, "dual", "a last element <= total_tokens = 1, got 2"),
    "beyond all ranks' tokens": ([0, 4, 12], 5, 2, "dual", r"a last element <= .* cp_size = 5 \* 2, got 12"),
    "beyond int32": ([0, 2**40], 8, 1, "dual", "a last element <= total_tokens = 8, got 1099511627776"),
    "odd": ([0, 4, 7, 12], 8, 2, "contiguous", r"lengths divisible by cp_size = 2, got 3 \(sequence 1\)"),
    "odd halves": ([0, 4, 6, 12], 8, 2, "dual", r"lengths divisible by 2 \* cp_size = 4, got 2 \(sequence 1\)"),
}


@pytest.mark.parametrize(
    ("cu", "total", "cp_size", "chunks", "expected"), BAD_CONTENTS.values(), ids=BAD_CONTENTS.keys()
)
def test_bad_contents_are_named_on_the_cpu_and_loud_on_a_gpu(device, cu, total, cp_size, chunks, expected):
    cu = torch.tensor(cu)
    for dtype in INDEX_DTYPES if cu.abs().max() < 2**31 and cu.min() > -(2**31) else [torch.int64]:
        with pytest.raises(ValueError, match=f"^cu_seqlens: expected {expected}$"):
            PackedSequences(cu.to(dtype), total, cp_size=cp_size, chunks=chunks)
        for cp_rank in range(cp_size):
            shard = Shard(cp_size, cp_rank, dual=chunks == "dual" and cp_size > 1)
            positions = unchecked(device, cu.to(device, dtype), total, 0, shard)
            assert positions.tolist() == [INVALID_POSITION] * total


def unchecked(device, *arguments) -> torch.Tensor:
    """Positions from contents that nobody has checked, as on a GPU."""
    return backend("positions", torch.empty(0, device=device)).packed_positions(*arguments)


def test_one_bad_length_among_thousands_is_found(device):
    """Every block of the kernel's check counts, its first and its last element too."""
    for sequences, at in (
        (1024, 1),
        (1024, 1024),
        (1025, 1024),
        (1025, 1025),
        (2400, 1025),
        (2400, 2048),
        (2400, 2400),
    ):
        cu = torch.arange(sequences + 1, dtype=torch.int32)
        cu[at] -= 2
        with pytest.raises(ValueError, match="cu_seqlens"):
            PackedSequences(cu, 2400)
        assert unchecked(device, cu.to(device), 2400, 0, Shard()).unique().tolist() == [INVALID_POSITION]


@pytest.mark.parametrize("dtype", INDEX_DTYPES)
def test_garbage_is_never_followed(device, dtype):
    """No contents lead a search out of bounds: under the interpreter that would end the process."""
    generator = torch.Generator().manual_seed(0)
    limits = torch.iinfo(dtype)
    for sequences in (1, 2, 3, 8, 100):
        cu = torch.randint(limits.min, limits.max, (sequences + 1,), generator=generator, dtype=dtype)
        offsets = torch.randint(limits.min, limits.max, (sequences,), generator=generator, dtype=dtype)
        for shard in (Shard(), Shard(2, 1, dual=True)):
            positions = unchecked(device, cu.to(device), 600, offsets.to(device), shard)
            assert positions.unique().tolist() == [INVALID_POSITION]


def test_positions_beyond_int32_are_named_on_the_cpu_and_loud_on_a_gpu(device):
    """The last that fit are served; beyond them, the tokens at fault alone are out of every table's range."""
    top, bottom = 2**31 - 1, INVALID_POSITION + 1
    cu = cumulative([3, 3])
    fits = torch.tensor([top - 2, bottom])
    packed = PackedSequences(cu.to(device), 6, offsets=fits.to(device))
    packed.check()
    assert packed.positions.tolist() == [top - 2, top - 1, top, bottom, bottom + 1, bottom + 2]

    bad = INVALID_POSITION
    for start, positions in (
        (top - 1, [top - 1, top, bad]),
        (top + 1, [bad] * 3),
        (bottom - 1, [bad, bottom, bottom + 1]),
        (2**63 - 2, [bad] * 3),
        (-(2**63), [bad] * 3),
    ):
        offsets = torch.tensor([7, start])
        message = (
            rf"offsets: expected positions from -2147483646 to 2147483647, got {start} for a length of 3 \(sequence 1\)"
        )
        with pytest.raises(ValueError, match=message):
            PackedSequences(cu, 6, offsets=offsets)
        assert unchecked(device, cu.to(device), 6, offsets.to(device), Shard()).tolist() == [7, 8, 9, *positions]
    # Where there is no token, there is no position.
    PackedSequences(cumulative([0, 3]), 3, offsets=torch.tensor([2**63 - 1, 0]))


# argument, value, error, what "argument: expected" goes on with


# Through apply_rope


def rotated_and_gradient(x, g, **options):
    """The rotation of x, and the gradient in x that the cotangent g gives."""
    x = x.detach().clone().requires_grad_()
    y = ropelab.apply_rope(x, **options)
    y.backward(g)
    return y.detach(), x.grad


@shardings
def test_reassembled_packed_shards_are_the_whole(device, cp_size, chunks):
    lengths = [8, 0, 24, 8, 0]
    total = sum(lengths)
    cu = cumulative(lengths, device=device)
    offsets = torch.tensor([0, 3, 5, -20, 1], device=device)
    cos, sin = ropelab.rotary_table(40, 8, device=device)
    x, g = (draw(1, total, 3, 8, seq_format="thd", device=device) for _ in range(2))
    options = {"cos": cos, "sin": sin, "seq_format": "thd"}
    whole = rotated_and_gradient(x, g, positions=PackedSequences(cu, total, offsets=offsets).positions, **options)
    reassembled = [torch.full_like(x, float("nan")) for _ in whole]
    seen = []
    for cp_rank in range(cp_size):
        shard = {"cp_size": cp_size, "cp_rank": cp_rank, "chunks": chunks}
        packed = PackedSequences(cu, total // cp_size, offsets=offsets, **shard)
        rows = packed.token_indices()
        seen += rows.tolist()
        shard = rotated_and_gradient(x[rows], g[rows], positions=packed.positions, **options)
        for target, part in zip(reassembled, shard, strict=True):
            target[rows] = part
    assert sorted(seen) == list(range(total))
    for actual, expected in zip(reassembled, whole, strict=True):
        assert torch.equal(actual, expected)


def test_padding_indexes_nothing():
    indices = PackedSequences(cumulative([2]), 3).token_indices()
    with pytest.raises(IndexError):
        torch.randn(5, 2)[indices]


def test_without_sequences_or_tokens(device):
    for cu, total in (([0], 0), ([0, 0], 0), ([0], 3)):
        packed = PackedSequences(torch.tensor(cu, device=device), total)
        assert packed.positions.tolist() == packed.token_indices().tolist() == [NO_POSITION] * total


# What only a GPU can show


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", INDEX_DTYPES)
def test_nothing_waits_for_the_gpu(dtype):
    cu = cumulative([4, 0, 8], dtype, "cuda")
    offsets = torch.arange(3, device="cuda")
    arguments = {"offsets": offsets, "cp_size": 2, "cp_rank": 1}
    PackedSequences(cu, 6, **arguments)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        packed = PackedSequences(cu, 6, **arguments)
        indices = packed.token_indices()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert packed.positions.tolist() == [1, 2, 4, 5, 6, 7]
    assert indices.tolist() == [1, 2, 6, 7, 8, 9]


@pytest.mark.gpu
def test_a_captured_construction_follows_its_buffers():
    """The contents also change from good to bad and back: replays cannot raise, so they must not go on in silence."""
    cu, offsets = cumulative([4, 0, 8], device="cuda"), torch.tensor([0, 0, 0], device="cuda")
    x = torch.randn(12, 2, 16, device="cuda")
    cos, sin = ropelab.rotary_table(32, 16, device="cuda")

    def rotate():
        packed = PackedSequences(cu, len(x), offsets=offsets)
        options = {"cos": cos, "sin": sin, "seq_format": "thd", "positions": packed.positions}
        return packed.positions, ropelab.apply_rope(x, **options)

    rotate()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        positions, y = rotate()
    for lengths, starts in (([1, 2, 3], [0, 5, 20]), ([0, 0, 12], [1, 1, 1]), ([4, 0, 8], [0, 0, 0])):
        cu.copy_(cumulative(lengths))
        offsets.copy_(torch.tensor(starts))
        graph.replay()
        assert positions.tolist() == by_loop(lengths, 12, offsets=torch.tensor(starts))
        assert torch.equal(y, rotate()[1])
        cu[1:3] = torch.tensor([9, 5])
        graph.replay()
        assert positions.unique().tolist() == [INVALID_POSITION] and y.isnan().all()


@pytest.mark.gpu
def test_check_names_what_a_gpu_holds():
    packed = PackedSequences(torch.tensor([0, 9, 5], device="cuda"), 9)
    with pytest.raises(ValueError, match=r"cu_seqlens: expected non-decreasing elements, got 5 after 9 \(element 2\)"):
        packed.check()
    packed = PackedSequences(torch.tensor([0, 9], device="cuda"), 9, offsets=torch.tensor([2**31 - 2], device="cuda"))
    with pytest.raises(ValueError, match="offsets: expected positions from -2147483646 to"):
        packed.check()


@pytest.mark.gpu
@pytest.mark.parametrize(("cp_size", "chunks"), [(1, "dual"), (2, "dual"), (2, "contiguous")])
def test_many_tokens_on_a_gpu_are_those_of_torch(cp_size, chunks):
    """65,536 tokens of 2,401 sequences, a tenth of them empty, and one long."""
    generator = torch.Generator().manual_seed(1)
    lengths = 4 * torch.randint(0, 10, (2401,), generator=generator)
    lengths[1000] = 65536 - lengths.sum() + lengths[1000] - 8
    cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    offsets = torch.randint(-1000, 1000, (2401,), generator=generator)
    for cp_rank in range(cp_size):
        arguments = {"total_tokens": 65536 // cp_size, "cp_size": cp_size, "cp_rank": cp_rank, "chunks": chunks}
        on_gpu = PackedSequences(cu.cuda(), offsets=offsets.cuda(), **arguments)
        on_cpu = PackedSequences(cu, offsets=offsets, **arguments)
        on_gpu.check()
        assert torch.equal(on_gpu.positions.cpu(), on_cpu.positions)
        assert torch.equal(on_gpu.token_indices().cpu(), on_cpu.token_indices())
