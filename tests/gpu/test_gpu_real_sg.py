"""The published operator of SGLang#14302 on a GPU: against the definition, and against ours."""

from dataclasses import replace

import pytest
import torch

from ropelab.interop.sglang import rotary_embedding_cos_sin
from ropelab.layout.pairing import LAYOUTS
from ropelab.study.documents.sglang import calls, contenders, kernel_contenders, kernels, measure
from ropelab.study.documents.sglang.kernel_contenders import KERNELS

pytestmark = [pytest.mark.gpu, pytest.mark.peers]

VARIANTS = [
    *KERNELS.values(), kernel_contenders.CAST, kernel_contenders.kernel_tile_variant(2),
    kernel_contenders.kernel_tile_variant(4), kernel_contenders.SECOND_KERNEL_OFF, kernel_contenders.THIRD_KERNEL_OFF,
    kernel_contenders.LAST_KERNEL_OFF, kernel_contenders.THIRD_KERNEL_NARROW, kernel_contenders.LAST_KERNEL_NARROW,
]  # fmt: skip


@pytest.fixture(autouse=True)
def installed():
    for state in kernels.STATES:
        kernels.operator(state)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [1, 4, 5, 300])
@pytest.mark.parametrize("peer", VARIANTS, ids=lambda peer: peer.name)
def test_every_kernel_is_the_definition(peer, tokens, layout):
    cell = measure._cell(1, tokens, 32, 8, 128, layout)
    buffers = cell.buffers(device="cuda")[0]
    ready, status = measure._ready(cell, [peer], buffers)
    assert peer.name in ready, status


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 160, 192, 256, 320])
@pytest.mark.parametrize("name", KERNELS)
def test_head_sizes_and_dtypes(name, head_dim, dtype, layout):
    cell = replace(measure._cell(2, 33, 8, 2, head_dim, layout), dtype=dtype)
    buffers = cell.buffers(device="cuda")[0]
    ready, status = measure._ready(cell, [KERNELS[name]], buffers)
    assert name in ready, status


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("state", kernels.STATES)
def test_ours_has_their_contract(state, layout):
    """The same call of our operator, but for the flag's name, gives the same numbers to a rounding."""
    adjacent = layout == "interleaved"
    tables = [torch.randn(7, 64 if adjacent else 128, device="cuda").bfloat16() for _ in range(2)]
    if not adjacent:
        tables = [torch.cat((t[:, :64], t[:, :64]), dim=-1) for t in tables]
    q, k = (torch.randn(7, heads, 128, device="cuda").bfloat16() for heads in (8, 2))
    theirs, ours = [q.clone(), k.clone()], [q.clone(), k.clone()]
    kernels.operator(state)(*tables, *theirs, 128, adjacent)
    rotary_embedding_cos_sin(*tables, *ours, 128, adjacent)
    for x, y in zip(theirs, ours, strict=True):
        torch.testing.assert_close(x.float(), y.float(), rtol=2**-7, atol=2**-9)


def test_the_first_state_writes_past_the_heads_if_the_tables_are_wide():
    table = calls.operator_calls()
    assert (table[table.claimed].outcome == "right").all()
    wide = table[(table.layout == "interleaved") & (table.tables == "per feature") & (table["rank"] < 4)]
    assert (wide.outcome == calls.OUT_OF_BOUNDS).all()


def test_the_pull_request_s_test_passes():
    assert (calls.operator_test(smoke=True).difference < 0.01).all()


def test_odd_addresses_are_safe():
    cell = measure._cell(1, 64, 32, 8, 128)
    sets = [measure._shifted(one, 1) for one in cell.buffers(2, "cuda")]
    frame = measure._compared(cell, [*KERNELS.values(), contenders.CONTENDERS[contenders.OURS]], 1, sets,
                              where_they_lie=True)  # fmt: skip
    assert (frame.status == "ok").all(), frame[["contender", "status"]].to_string()
