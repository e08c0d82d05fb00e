"""The studies of the projection time right contenders only; the law of the pass. Small products without a GPU."""

from functools import partial

import pandas as pd
import pytest
import torch

from ropelab.bench import projection, records, timing
from ropelab.bench.operation import checked
from ropelab.bench.peers import quack
from ropelab.bench.projection import Projection, Tensors
from ropelab.bench.projection_law import Machine, Product, widest_that_pays
from ropelab.bench.projection_sizes import DRAWS
from ropelab.call.projection_paths import MEASURED, faster
from ropelab.study.plots import gpus
from ropelab.study.topics.projection import findings

BLOCKS = "rotation", "norm", "cache", "norm and cache"
SMALL = {"inputs": 64, "q_heads": 4, "k_heads": 2, "head_dim": 16}
H100 = Machine(flops=700e12, bandwidth=2.9e12)


@pytest.mark.parametrize("block", BLOCKS)
def test_only_a_right_block_passes(block, torch_backend):
    tensors = Tensors(Projection(20, **SMALL, block=block), "cpu")
    found = projection.contenders(tensors)
    assert tensors.check(found[projection.OURS].run) == "ok"
    assert tensors.check(found[projection.ALONE].run).startswith("wrong: a head of q")
    tensors.positions = tensors.positions.flip(0)
    assert tensors.check(found[projection.OURS].run).startswith("wrong: a head of q")


@pytest.mark.parametrize("study", [projection.projections, projection.blocks])
def test_the_table_of_the_study(monkeypatch, torch_backend, study):
    monkeypatch.setattr(projection, "Projection", partial(_small, Projection))
    with timing.stopped():
        frame = study(device="cpu")
    right = frame[frame.status == "ok"]
    assert (
        {projection.ALONE, projection.OURS}
        <= set(right.contender)
        <= {
            projection.ALONE,
            projection.OURS,
            projection.PRODUCT,
            projection.KERNEL,
            projection.COMPUTED,
            projection.QUACK,
            projection.QUACK_ALONE,
            projection.COPY,
        }
    )
    assert right[right.contender != projection.COPY].tflops.notna().all() and (right.over_product == 1).all()
    assert not frame.duplicated(["tokens", "inputs", "q_heads", "block", "contender"]).any()


def _small(made, tokens, inputs, q_heads, k_heads, **options):
    return made(tokens.bit_length(), inputs // 64, q_heads // 4, k_heads // 4, head_dim=16, **options)


def test_the_law_is_the_quotient_of_both_times():
    """For many tokens: (e F / (K B)) (Hq + Hk) / (Hq + 2 Hk), which does not depend on the tokens."""
    for tokens in (2**16, 2**20):
        product = Product(tokens, 4096, 32, 8)
        expected = 2 * H100.flops / (4096 * H100.bandwidth) * 40 / 48
        assert product.most_loss(H100) == pytest.approx(expected)
        assert widest_that_pays(expected, H100, 32, 8) == pytest.approx(4096)
    assert Product(2**16, 8192, 32, 8).most_loss(H100) == pytest.approx(expected / 2)


def test_few_tokens_wait_for_the_weights():
    """The pass is then a launch, and the bytes of the weight decide how long the product takes."""
    one, machine = Product(1, 4096, 32, 8), Machine(H100.flops, H100.bandwidth, launch_us=1.0)
    assert one.product_us(machine) == pytest.approx(one.bytes / machine.bandwidth * 1e6)
    assert one.most_loss(machine) == pytest.approx(1.0 / one.product_us(machine), rel=0.01)


def test_a_machine_that_was_measured_has_its_own_times():
    product = Product(16384, 4096, 32, 8)
    machine = Machine.measured(product, product_us=1100.0, copy_us=116.0)
    assert (product.product_us(machine), product.pass_us(machine)) == pytest.approx((1100.0, 116.0))


@pytest.mark.gpu
@pytest.mark.parametrize("block", BLOCKS)
def test_every_contender_that_runs_is_right(block):
    case = projection.Projected(Projection(200, 2048, 32, 8, block=block), projection.contenders, count=1)
    sets = case.sets("cuda")
    statuses = checked(case, sets, case.contenders(sets, "cuda"), "cuda")
    assert {why for why in statuses.values() if not why.startswith("not run")} == {"ok"}, statuses


@pytest.mark.peers
@pytest.mark.gpu
def test_quack_is_at_hand_or_says_what_it_needs():
    run = quack.product()
    x, weight = (torch.randn(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    torch.testing.assert_close(run(x, weight), x @ weight.T)


RECORDS = {gpu: records.load("projection", gpu=gpu).frame for gpu in records.gpus()}


def times(gpu, values="median_us"):
    """The microseconds of each contender of the record, one workload a row."""
    table, sizes = RECORDS[gpu], ["tokens", "inputs", "outputs", "q_heads", "k_heads"]
    return table.pivot_table(index=sizes, columns="contender", values=values).reset_index()


@pytest.mark.parametrize("gpu", RECORDS)
def test_the_path_is_the_faster_one_of_the_record(gpu):
    """No size loses more than 1 % to the pass, and all together save 90 % of what the better paths would save."""
    found = times(gpu)
    (name,) = (name for cuda, name in MEASURED.items() if cuda.lower().replace(" ", "-") == gpu)
    sizes = found[["tokens", "inputs", "q_heads", "k_heads"]].itertuples(index=False)
    product = pd.Series([faster(Product(*map(int, size)).work, name) == "product" for size in sizes])
    by_pass, by_product = found[projection.OURS], found[projection.KERNEL]
    taken, best = by_pass.where(~product, by_product), pd.concat([by_pass, by_product], axis=1).min(axis=1)
    assert product.any() and not product.all() and (taken <= 1.01 * by_pass).all()
    assert (by_pass - taken).sum() >= 0.9 * (by_pass - best).sum()


SIZES = gpus.together(findings.SIZES, records.Selection())


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("gpu", SIZES.gpu.unique())
def test_the_path_of_drawn_sizes_saves_most_of_what_can_be_saved(gpu, draw):
    """Nine tenths of what the better paths would save, over the sizes that a draw made and the product serves.

    No size takes more than 1 % and .3 us longer than the pass.
    """
    table = findings.drawn(SIZES[(SIZES.gpu == gpu) & (SIZES.draw == draw)])
    assert ((table.taken <= 1.01 * table[projection.OURS]) | (table.taken <= table[projection.OURS] + 0.3)).all()
    by_pass, best = table[projection.OURS], table[[*findings.PATHS.values()]].min(axis=1)
    assert (table.path == "product").any() and (by_pass - table.taken).sum() >= 0.9 * (by_pass - best).sum() > 0


@pytest.mark.parametrize("gpu", RECORDS)
def test_the_law_predicts_the_pass_of_the_record(gpu):
    """A copy of as many bytes predicts the share of the pass, where q and k exceed the L2 cache of 50 MB by far.

    The pass is the difference of two times, so it is known no better than half the distances of their quantiles.
    """
    both = [projection.ALONE, projection.OURS]
    spreads = (times(gpu, "q80_us")[both] - times(gpu, "q20_us")[both]).sum(axis=1) / 2
    for number, row in times(gpu).iterrows():
        size = Product(*(int(row[name]) for name in ("tokens", "inputs", "q_heads", "k_heads")))
        machine = Machine.measured(size, row[projection.ALONE], row[projection.COPY])
        measured = row[projection.OURS] / row[projection.ALONE] - 1
        if size.pass_bytes > 128e6:
            spread = spreads[number] / row[projection.ALONE]
            assert abs(size.most_loss(machine) - measured) <= 0.15 * measured + spread, row
        elif row.tokens >= 2048:
            assert measured < 1.25 * size.most_loss(machine), row
