"""The chapter on the projection: its numbers follow from the records, and its figures from both GPUs."""

import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure

from ropelab.bench import host, records
from ropelab.bench.projection import ALONE, COMPUTED, COPY, KERNEL, OURS, PRODUCT
from ropelab.bench.projection_law import Machine, Product
from ropelab.bench.projection_sizes import EAGER, EAGER_STEPS
from ropelab.study.plots import gpus, marks
from ropelab.study.topics.projection import findings, kept
from tests.site.cells import run
from tests.study.sentences import states

MACHINE = Machine(flops=700e12, bandwidth=3e12, launch_us=2.0)


def made(tokens=(1, 4096, 16384), gpu="H100") -> pd.DataFrame:
    """A record in which the law is exact: the pass takes its time by the law, and the kernel loses 4 %."""
    rows = []
    for inputs in (2048, 4096, 8192):
        for count in tokens:
            product = Product(count, inputs, 32, 8)
            plain = product.product_us(MACHINE)
            times = {ALONE: plain, OURS: plain + product.pass_us(MACHINE), PRODUCT: 1.01 * plain}
            times |= {KERNEL: 1.04 * plain, COMPUTED: 1.03 * plain, COPY: product.pass_bytes / MACHINE.bandwidth * 1e6}
            rows += [
                {"gpu": gpu, "tokens": count, "inputs": inputs, "q_heads": 32, "k_heads": 8, "head_dim": 128,
                 "contender": name, "status": "ok", "median_us": us, "q20_us": 0.99 * us, "q80_us": 1.01 * us,
                 "over_product": us / plain}
                for name, us in times.items()
            ]  # fmt: skip
    return pd.DataFrame(rows)


def test_the_law_is_read_from_the_record():
    frame = made()
    (machine,) = findings.machines(frame).values()
    assert machine.flops == pytest.approx(MACHINE.flops) and machine.bandwidth == pytest.approx(MACHINE.bandwidth)
    passes = findings.passes(frame)
    many = passes[passes.tokens >= findings.MANY]
    launch = MACHINE.launch_us / many.apply(lambda row: findings.product(row).product_us(MACHINE), axis=1)
    assert (many.measured - many.predicted).abs().max() < launch.max()
    assert (passes.low < passes.measured).all() and (passes.measured < passes.high).all()


def test_losses_and_the_fastest_kernel_without_a_pass():
    frame = made()
    losses = findings.losses(frame)
    assert losses["product"].tolist() == pytest.approx([0.01] * len(losses))
    assert losses.epilogue.tolist() == pytest.approx([1.04 / 1.01 - 1] * len(losses))
    assert findings.best(frame).best.unique().tolist() == [COMPUTED]


def test_a_gpu_that_nobody_measured_takes_the_pass():
    table = findings.taken(made(gpu="A100"))
    assert (table.taken == table[OURS]).all()


def test_the_rule_takes_our_product_or_the_pass():
    frame = made()
    table = findings.taken(frame)
    assert (table.taken.isin(table[KERNEL]) | table.taken.isin(table[OURS])).all()


def of_sizes(eager: bool) -> pd.DataFrame:
    """A draw in which the product saves 20 us of one size and loses 10 us of another, and does not serve the third."""
    rows = []
    for tokens, times in (
        (8192, {OURS: 200.0, KERNEL: 180.0}), (8193, {OURS: 200.0, KERNEL: 210.0}), (64, {OURS: 20.0}),
    ):  # fmt: skip
        times |= {EAGER: 1.2 * times[OURS], EAGER_STEPS: times[OURS]} if eager else {}
        rows += [
            {"gpu": "H100", "draw": 1, "tokens": tokens, "inputs": 1024, "outputs": 6144, "q_heads": 32, "k_heads": 8,
             "head_dim": 128, "block": "rotation", "layout": "interleaved", "counted": True, "contender": name,
             "status": "ok", "median_us": us}
            for name, us in times.items()
        ]  # fmt: skip
    return pd.DataFrame(rows)


def test_what_the_rule_saves_of_drawn_sizes(monkeypatch):
    for eager in (True, False):
        frame = of_sizes(eager)
        assert findings.drawn(frame).path.tolist() == ["product", "product", "pass"]
        said = run(monkeypatch, "08", "picture", "law-cell", "law-figure", "choice-cell", instead={"sizes": frame}).told
        assert states(said, 3, 2, 2, 50, 1, 3) and states(said, 8193, 1024, 6144, 5.0)
        said = run(monkeypatch, "08", "compiled-cell", instead={"sizes": frame, "host": None}).told
        assert states(said, 1.20, 0, 3, 2) == eager


def test_what_a_projection_costs_the_host():
    costs = {host.NO_GRAD: 3.0, host.PLAIN: -2.0, host.RECORDED: 9.0}
    frame = pd.DataFrame([
        {"call": call, "tokens": 64, "contender": name, "status": "ok", "median_us": us}
        for call, more in costs.items()
        for name, us in ((host.STEPS, 80.0), (host.ONE_CALL, 80 + more))
    ])  # fmt: skip
    assert states(findings.host_sentence(frame), -2, 3, 9)
    cached = frame[frame.call == host.PLAIN].replace({host.STEPS: host.CACHED_STEPS, host.ONE_CALL: host.CACHED})
    assert states(findings.host_sentence(pd.concat([frame, cached])), -2, 3, 9, -2)


@pytest.mark.parametrize("cmap", marks._LIGHT)
def test_numbers_in_cells_have_contrast(cmap):
    """Small text needs a contrast of 4.5 (WCAG 2.2), on light and on dark pages."""
    ax = Figure().subplots()
    marks.cells(ax, pd.DataFrame([[-9.0, -2.0, None], [0.0, 2.0, 9.0]]), cmap=cmap, vmin=-4, vmax=4)
    assert len(ax.texts) == 5 and {text.get_color() for text in ax.texts} == {"black"}
    faces = ax.collections[0].get_facecolors()
    for face in faces[faces[:, 3] > 0, :3]:  # an empty cell has no colour
        for seen in (tuple, dark):
            low, high = sorted(luminance(seen(color)) for color in ((0.0, 0.0, 0.0), face))
            assert (high + 0.05) / (low + 0.05) >= 4.5, face


def luminance(color) -> float:
    """The relative luminance of a colour (WCAG 2.2)."""
    parts = (x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in color)
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True))


def dark(color) -> tuple[float, ...]:
    """The colour under ``invert(.91) hue-rotate(180deg)``, by which the report shows figures in its dark theme."""
    rows = ((-0.574, 1.43, 0.144), (0.426, 0.43, 0.144), (0.426, 1.43, -0.856))  # Filter Effects Module Level 1
    inverted = [0.91 - 0.82 * x for x in color]
    return tuple(min(1.0, max(0.0, sum(a * b for a, b in zip(row, inverted, strict=True)))) for row in rows)


def test_the_records_of_both_gpus_stand_in_one_table():
    assert set(gpus.together(findings.RECORD, records.Selection()).gpu) == {"H100", "H200"}
    one = gpus.together(findings.RECORD, records.Selection(gpu="nvidia-h100-80gb-hbm3"))
    assert set(one.gpu) == {"H100"}
    with pytest.raises(records.Missing, match="no_such_study"):
        gpus.together("no_such_study", records.Selection())


def test_autograd_keeps_the_product_only_with_a_norm():
    rows = kept.kept_bytes().set_index("way")
    assert rows["of x, K β"].tolist() == [1] * 4
    assert rows["others, N β"].tolist() == [0, 0, 1, 1]


def test_adjacent_pairs_meet_in_one_thread():
    pytest.importorskip("triton")
    from ropelab.study.topics.projection import epilogue

    assert epilogue.thread_of(torch.arange(10)).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 0, 0]
    rows = epilogue.meetings()
    assert (rows[rows.layout == "interleaved"][["one thread", "one piece"]] == "yes").all(axis=None)
    halves = rows[rows.layout == "split_half"]
    assert (halves["one thread"] == "yes").tolist() == [half % 8 == 0 for half in halves.rotary_dim // 2]
