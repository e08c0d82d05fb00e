"""The tile of each kernel is the one that its recorded sweep measured as chosen."""

import pytest

from ropelab.bench import records
from ropelab.kernels import HAS_TRITON

if not HAS_TRITON:
    pytest.skip("Triton is not installed", allow_module_level=True)

from ropelab.kernels import tile_of


def latent(row):
    widest = row.rotary_dim if row.step == "turn_tail" else max(row.nope_dim, row.rotary_dim, row.value_dim)
    return tile_of.latent(widest, row.heads, row.tokens, itemsize=2)


def cache_rows(row):
    rows, interleaved = row.tokens * (row.q_heads + 2 * row.k_heads), row.layout == "interleaved"
    return tile_of.cache_rows(row.head_dim // 2, rows, interleaved=interleaved, itemsize=2)


@pytest.mark.parametrize("study, choose", [("latent_tiles", latent), ("one_pass_tiles", cache_rows)])
def test_a_sweep_measured_the_tile_of_today(study, choose):
    found = records.of_each_gpu(study)
    assert found
    for record in found:
        frame = record.frame
        if "operation" in frame:
            frame = frame[~frame.operation.str.startswith("MLA")]  # other numbers of rows
        for row in frame[frame.chosen].itertuples():
            tile = choose(row)
            sizes = {name: value for name, value in vars(tile).items() if name in frame and name != "innermost"}
            assert len(sizes) >= 3 and sizes == {name: getattr(row, name) for name in sizes}, row
