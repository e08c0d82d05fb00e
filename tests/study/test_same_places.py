"""The copies to the same places: they copy the named features and nothing else, and studies keep the fastest."""

import pandas as pd
import pytest
import torch

from ropelab.bench import same_places
from ropelab.bench.cache_operations import LatentCache, NormAndCache, WholeLatentCache
from ropelab.bench.model_cells import Call, cells, smaller
from ropelab.bench.names import SAME_PLACES
from ropelab.kernels import INTERPRETED

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
needs_kernels = pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="kernels need a GPU")


@needs_kernels
@pytest.mark.parametrize("block", [128, 256])
def test_the_named_features_are_copied_and_nothing_else(block):
    x = torch.randn(7, 3, 40, device=DEVICE).bfloat16().flatten(0, 1)
    target = torch.full((21, 56), 9.0, dtype=torch.bfloat16, device=DEVICE)
    expected = target.clone()
    expected[:, 8:20] = x[:, 4:16]
    y = torch.randint(-(2**15), 2**15, (5, 24), dtype=torch.int16, device=DEVICE)
    narrow = same_places.to_new(y, 1)
    same_places.copy([same_places.Part(x, target, 12, 4, 8), narrow], block=block)
    assert torch.equal(target, expected) and torch.equal(narrow.target, y.to(torch.int8))


@needs_kernels
def test_a_copy_in_place_changes_nothing():
    x = torch.randn(2, 5, 4, 24, device=DEVICE)
    before = x.clone()
    part = same_places.in_place(x, 16, 8)
    assert part.source.data_ptr() == part.target.data_ptr() == x.data_ptr() and part.accesses == 40 * 2
    same_places.copy([part])
    assert torch.equal(x, before)


@pytest.mark.parametrize(
    ("numbers", "elements"),
    [((192, 192, 128, 128, 64), 8), ((80, 80, 0, 0, 20), 4), ((576, 576, 0, 0, 576), 8), ((96, 96, 3, 3, 24), 1)],
)
def test_an_access_has_at_most_16_bytes_and_divides_all_numbers(numbers, elements):
    n, m, first, target_first, width = numbers
    source, target = (torch.empty(2, size, dtype=torch.bfloat16) for size in (n, m))
    assert same_places.Part(source, target, width, first, target_first).numbers == (*numbers, elements)


def moved(parts) -> list[tuple[int, int]]:
    """The bytes that each part reads, and writes."""
    rows = [part.source.shape[0] * part.width for part in parts]
    return [(n * p.source.itemsize, n * p.target.itemsize) for n, p in zip(rows, parts, strict=True)]


@pytest.mark.parametrize(
    "case",
    [NormAndCache(3, float8=True), NormAndCache(3, norm=False, float8=True, float8_q=True), LatentCache(3),
     LatentCache(3, float8=True), WholeLatentCache(3)],
    ids=lambda case: case.description,
)  # fmt: skip
def test_the_parts_of_an_operation_move_its_bytes(case):
    call = case.inputs(lambda *shape: torch.randn(shape).bfloat16())
    parts = moved(case.places(call))
    assert sum(map(sum, parts)) == case.bytes
    assert case.float8_q == (parts[0][1] < parts[0][0]) and case.float8 == (parts[1][1] < parts[1][0])


def test_an_operation_on_whole_rows_of_16_bits_has_no_parts():
    case = NormAndCache(3)
    assert not case.places(case.inputs(lambda *shape: torch.randn(shape).bfloat16()))


def test_the_parts_of_a_cell_are_the_features_that_rotate_in_place():
    drawn = [smaller(cell) for cell in cells(60)]
    assert {cell.rests for cell in drawn} == {False, True}
    for cell in drawn:
        (buffers,) = cell.workload.buffers(1, "cpu")
        parts = Call(cell, buffers).places()
        if not cell.rests:
            assert parts == [] and cell.head_bytes == cell.workload.bytes
            continue
        assert {(p.first, p.target_first, p.width) for p in parts} == {
            (cell.model.first,) * 2 + (cell.model.rotary_dim,)
        }
        assert sum(map(sum, moved(parts))) <= cell.head_bytes <= cell.workload.bytes


def test_of_the_copies_the_fastest_stays():
    names = [f"{SAME_PLACES}: {i}" for i in range(3)]
    frame = pd.DataFrame({"contender": ["ropelab", *names], "median_us": [2.0, 3.0, 1.5, float("nan")]})
    found = same_places.fastest_alone(frame)
    assert list(found.contender) == ["ropelab", SAME_PLACES] and list(found.median_us) == [2.0, 1.5]
    assert same_places.fastest_alone(frame[:1]).equals(frame[:1])
