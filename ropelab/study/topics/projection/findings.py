"""Read the records `projection` and `projection_blocks`: the pass, the loss of the product, and which of them wins."""

from collections.abc import Callable, Mapping

import pandas as pd

from ropelab.bench import host
from ropelab.bench.projection import ALONE, BY_QUACK, COMPUTED, COPY, KERNEL, OURS, PRODUCT, QUACK
from ropelab.bench.projection_law import Machine, Product, widest_that_pays
from ropelab.bench.projection_sizes import EAGER, EAGER_STEPS
from ropelab.bench.rows import timed
from ropelab.call.projection_paths import MEASURED, Work, faster
from ropelab.study.engine.words import followed, value_range

RECORD, BLOCKS, COMPILED = "projection", "projection_blocks", "projection_compiled"
SIZES, HOST = "projection_sizes", "projection_host"
"""The names of the records."""
CASE = ["gpu", "q_heads", "k_heads", "head_dim", "inputs", "tokens"]
"""The columns that name a product on a GPU."""
MODEL = {"q_heads": 32, "k_heads": 8, "head_dim": 128}
"""The heads from which the rates of a GPU are taken, and which figures show where they show one model."""
INPUTS = 4096
MANY, SHOWN = 4096, (4096, 16384)
"""The tokens from which a product is large, and those of `blocks`."""
PATHS = {"product": KERNEL, "pass": OURS}
"""A path of `ropelab.call.projection_paths.faster` -> its contender."""
BY_INDUCTOR = "compiled product and rotation"
"""The contender of the record `COMPILED` that ``torch.compile`` made."""
ROTATING = (KERNEL, COMPUTED, QUACK, BY_QUACK)
"""The contenders that make no pass."""


def times(frame: pd.DataFrame, *needed: str, values: str = "median_us") -> pd.DataFrame:
    """Microseconds: a row for each product on each GPU, a column for each contender that ran.

    Raises:
        NotMeasured: one of the contenders ``needed`` did not run.
    """
    return timed(frame, *needed).pivot_table(index=CASE, columns="contender", values=values, sort=False)


def machines(frame: pd.DataFrame) -> dict[str, Machine]:
    """Each GPU, as the law needs it: measured at the largest product of `MODEL`, and at one token."""
    found = {}
    for gpu, rows in times(frame, ALONE, COPY, OURS).groupby(level="gpu", sort=False):
        of_model = rows.xs(tuple(MODEL.values()) + (INPUTS,), level=["q_heads", "k_heads", "head_dim", "inputs"])
        tokens = of_model.index.get_level_values("tokens")
        large, small = of_model[tokens == tokens.max()].iloc[0], of_model[tokens == tokens.min()].iloc[0]
        product = Product(int(tokens.max()), INPUTS, **MODEL)
        found[str(gpu)] = Machine.measured(product, large[ALONE], large[COPY], small[OURS] - small[ALONE])
    return found


def machine(frame: pd.DataFrame) -> Machine:
    """The GPU of a record, as the law needs it."""
    return machines(frame.assign(gpu=""))[""]


def rates(frame: pd.DataFrame, q_heads: int, k_heads: int, inputs: int) -> pd.DataFrame:
    """The rates of each GPU in words, and what the law says of a product with these heads and K = ``inputs``."""
    model = Product(16384, inputs, q_heads, k_heads)
    return pd.DataFrame(
        {"GPU": name, "F, TFLOP/s": f"{machine.flops / 1e12:.0f}", "B, GB/s": f"{machine.bandwidth / 1e9:,.0f}",
         "launch, µs": f"{machine.launch_us:.1f}", "pass / product": f"{model.most_loss(machine):.1%}",
         "largest K at a loss of 4 %": f"{widest_that_pays(0.04, machine, q_heads, k_heads):,.0f}"}
        for name, machine in machines(frame).items()
    )  # fmt: skip


def passes(frame: pd.DataFrame) -> pd.DataFrame:
    """The time of the pass over the time of the product, for each product on each GPU.

    Columns: the columns of `CASE`; measured, the quotient of the medians; low and high, of the 20th and 80th
    percentiles; predicted, by the law.
    """
    by_gpu = machines(frame)
    median, low, high = (times(frame, values=name) for name in ("median_us", "q20_us", "q80_us"))
    found = pd.DataFrame({
        "measured": median[OURS] / median[ALONE] - 1, "low": low[OURS] / high[ALONE] - 1,
        "high": high[OURS] / low[ALONE] - 1,
    }).reset_index()  # fmt: skip
    predicted = [product(row).most_loss(by_gpu[row["gpu"]]) for row in found.to_dict("records")]
    return found.assign(predicted=predicted)


def product(row: Mapping[str, int]) -> Product:
    """The product of a row of the record."""
    return Product(row["tokens"], row["inputs"], row["q_heads"], row["k_heads"], row["head_dim"])


def losses(frame: pd.DataFrame) -> pd.DataFrame:
    """What the product that rotates loses, as fractions.

    Columns: the columns of `CASE`; product, of its product against cuBLAS; epilogue, of the rotation against its
    product; computed, of the rotation with computed angles.
    """
    table = times(frame, ALONE, PRODUCT, KERNEL, COMPUTED).reset_index()
    own = table[PRODUCT]
    return table.assign(
        product=own / table[ALONE] - 1, epilogue=table[KERNEL] / own - 1, computed=table[COMPUTED] / own - 1
    )


def best(frame: pd.DataFrame) -> pd.DataFrame:
    """For each product on each GPU: the fastest contender without a pass, and its time over that with the pass."""
    table = times(frame, OURS)
    rotating = table[[name for name in ROTATING if name in table]]
    return pd.DataFrame({"best": rotating.idxmin(axis=1), "ratio": rotating.min(axis=1) / table[OURS]}).reset_index()


def over_cublas(frame: pd.DataFrame) -> pd.DataFrame:
    """The time over that of cuBLAS alone, for `MODEL` and `INPUTS`: a row for each number of tokens from 512 on.

    Returns:
        A column for each of `OURS`, `KERNEL` and `QUACK`, in words: a dash where it was not measured.
    """
    rows = timed(frame, OURS, KERNEL)
    rows = rows[(rows[[*MODEL, "inputs"]] == [*MODEL.values(), INPUTS]).all(axis=1) & (rows.tokens >= 512)]
    table = rows.pivot_table(index="tokens", columns="contender", values="over_product")
    return table.reindex(columns=[OURS, KERNEL, QUACK]).map(lambda over: "–" if pd.isna(over) else f"{over:.2f}")


def blocks(frame: pd.DataFrame) -> pd.DataFrame:
    """The record `projection_blocks`: each contender over cuBLAS alone, for products with a norm and many tokens."""
    rows = timed(frame, OURS, KERNEL)
    rows = rows[rows.contender.isin([OURS, *ROTATING]) & rows.block.str.contains("norm") & rows.tokens.isin(SHOWN)]
    table = rows.pivot_table(
        index=["gpu", "block", "q_heads", "tokens"], columns="contender", values="over_product", sort=False
    )
    return table.reset_index()


def _large(rows: pd.DataFrame) -> pd.DataFrame:
    return rows[rows.tokens >= MANY]


def by_gpu(frame: pd.DataFrame, *sentences: Callable[[pd.DataFrame], str]) -> list[str]:
    """The ``sentences`` on the rows of each GPU, after its name: a text for each GPU of which they say anything."""
    said = {
        gpu: " ".join(filter(None, (say(part) for say in sentences))) for gpu, part in frame.groupby("gpu", sort=False)
    }
    return [f"{gpu}: {text}" for gpu, text in said.items() if text]


def law_sentence(frame: pd.DataFrame) -> str:
    """The share of the pass in large products, and how it agrees with the law."""
    large = _large(passes(frame))
    agreement = large.measured / large.predicted
    return (
        f"From {MANY:,} tokens on, the pass takes {value_range(100 * large.measured, '.0f')} % of the product. That is "
        f"{agreement.median():.2f} of what the law says in the median, and {value_range(agreement)} over all "
        f"{len(large)} products."
    )


def losses_sentence(frame: pd.DataFrame) -> str:
    """What our product and its rotation lose in large products."""
    large = _large(losses(frame))
    return (
        f"From {MANY:,} tokens on, our product takes {value_range(1 + large['product'])} of the time of cuBLAS. Its "
        f"rotation takes {value_range(100 * large.epilogue, '.0f')} % more, and with computed angles "
        f"{value_range(100 * large.computed, '.0f')} %."
    )


def best_sentence(frame: pd.DataFrame) -> str:
    """The best kernel without a pass over the product and the pass, in large products."""
    ratio = _large(best(frame)).ratio
    return (
        f"From {MANY:,} tokens on, the best kernel without a pass takes {value_range(ratio)} of the time of the "
        f"product and the pass, and is faster in {(ratio < 1).sum()} of {len(ratio)} products."
    )


def taken(frame: pd.DataFrame) -> pd.DataFrame:
    """The times of both paths of `ropelab.qkv_rope`, and in the column ``taken`` the time of the path that it takes."""
    both = times(frame, *PATHS.values())[[*PATHS.values()]]
    rows = [dict(zip(both.index.names, key, strict=True)) for key in both.index]
    chosen = [PATHS[_path(product(row).work, row["gpu"])] for row in rows]
    return both.assign(taken=[us[name] for (_, us), name in zip(both.iterrows(), chosen, strict=True)])


def _path(work: Work, gpu: str) -> str:
    """The path that `ropelab.qkv_rope` takes; on a GPU that nobody measured it takes the pass."""
    return faster(work, gpu) if gpu in MEASURED.values() else "pass"


def choice_sentence(frame: pd.DataFrame) -> str:
    """The path that `ropelab.qkv_rope` takes for each product, beside the faster of its two paths."""
    table = taken(frame)
    lost = table.taken / table[[*PATHS.values()]].min(axis=1) - 1
    others = f" In the others it loses {lost[lost > 0].median():.1%} in the median, and at most {lost.max():.1%}."
    return (
        f"In {(lost == 0).sum()} of {len(lost)} products the rule takes the faster of its paths."
        f"{others if lost.any() else ''}"
    )


def saved_sentence(frame: pd.DataFrame) -> str:
    """What the rule saves of the product and the pass in large products."""
    large = _large(taken(frame).reset_index())
    ratio = large.taken / large[OURS]
    return (
        f"From {MANY:,} tokens on, `qkv_rope` takes {value_range(ratio)} of the time of the product and the pass, and "
        f"is faster in {(ratio < 1).sum()} of {len(ratio)} products."
    )


DRAWN = [
    "gpu", "draw", "tokens", "inputs", "outputs", "q_heads", "k_heads", "head_dim", "block", "layout", "counted",
]  # fmt: skip
"""The columns that name a product of the record `SIZES`."""


def drawn(frame: pd.DataFrame) -> pd.DataFrame:
    """The record `SIZES`: a row for each product, its columns and those of the contenders that ran.

    The column ``path`` has the path that `ropelab.qkv_rope` takes, and ``taken`` its time on the GPU.
    """
    table = timed(frame, *PATHS.values()).pivot_table(
        index=DRAWN, columns="contender", values="median_us", sort=False
    ).reset_index()  # fmt: skip
    works = [
        Work(row.tokens, row.inputs, row.outputs, (row.q_heads + row.k_heads) * row.head_dim)
        for row in table.itertuples()
    ]
    path = pd.Series([_path(work, gpu) for work, gpu in zip(works, table.gpu, strict=True)], table.index)
    path = path.where(table[KERNEL].notna(), "pass")
    return table.assign(path=path, taken=table[KERNEL].where(path == "product", table[OURS]))


def drawn_sentence(frame: pd.DataFrame) -> str:
    """What the rule saves over drawn sizes, and where it loses; ``frame`` is the record `SIZES`."""
    table = drawn(frame)
    served, product = table[table[KERNEL].notna()], table[table.path == "product"]
    saved = (served[OURS] - served.taken).sum() / (served[OURS] - served[[*PATHS.values()]].min(axis=1)).sum()
    lost = product.taken / product[OURS] - 1
    slower = product[(lost > SLOWER) & (product.taken - product[OURS] > SLOWER_US)]
    each = [f"{row.tokens:,} x {row.inputs:,} x {row.outputs:,} ({lost[row.Index]:.1%})" for row in slower.itertuples()]
    return (
        f"Of {len(table)} drawn products our kernel serves {len(served)}. The rule takes it for {len(product)}, and "
        f"saves {saved:.0%} of what the better path of each would save. {len(each)} of {len(table)} take more than "
        f"{SLOWER:.0%} and {SLOWER_US} us longer than the pass{followed(': ', each)}."
    )


SLOWER, SLOWER_US, SLOWER_EAGER_US = 0.01, 0.3, 5
"""The bars of a call beside the product and the pass, as a fraction and in us: on the GPU, and in eager calls."""


def eager_sentence(frame: pd.DataFrame) -> str:
    """Eager calls of drawn sizes beside a linear layer and the pass; "" where the record has none."""
    table = drawn(frame)
    if EAGER not in table:
        return ""
    ratio = table[EAGER] / table[EAGER_STEPS]
    faster_ones = ratio < 1 - SLOWER
    slower = (ratio > 1 + SLOWER) & (table[EAGER] - table[EAGER_STEPS] > SLOWER_EAGER_US)
    return (
        f"In eager calls `qkv_rope` takes {ratio.median():.2f} of the time of a linear layer and the pass in the "
        f"median, is more than {SLOWER:.0%} faster in {faster_ones.sum()} of {len(table)}, and more than {SLOWER:.0%} "
        f"and {SLOWER_EAGER_US} us slower in {slower.sum()}."
    )


def host_sentence(frame: pd.DataFrame) -> str:
    """What a call costs the host beside the calls that it replaces; ``frame`` is the record `HOST`."""
    us = timed(frame, host.ONE_CALL, host.STEPS).pivot_table(
        index=["call", "tokens"], columns="contender", values="median_us", sort=False
    )

    def more(calls: list[str], one: str, steps: str) -> str:
        return value_range((us[one] - us[steps]).loc[calls], "+.0f")

    plain = [host.NO_GRAD, host.PLAIN]
    said = (
        f"A call of `qkv_rope` takes the host {more(plain, host.ONE_CALL, host.STEPS)} us beside a linear layer, the "
        f"same views and `apply_rope` in place, and {more([host.RECORDED], host.ONE_CALL, host.STEPS)} us where "
        f"autograd records it."
    )
    if host.CACHED in us:
        into_cache = more(plain, host.CACHED, host.CACHED_STEPS)
        said += f" `qkv_rope_and_cache` takes {into_cache} us beside a linear layer and `rope_and_cache`."
    return said


def compiled_sentence(frame: pd.DataFrame) -> str:
    """The product and the rotation by ``torch.compile``, and with the pass; ``frame`` is the record `COMPILED`."""
    over = _large(timed(frame, BY_INDUCTOR, OURS)).groupby("contender").over_product
    by_inductor, by_pass = (value_range(over.get_group(name)) for name in (BY_INDUCTOR, OURS))
    return (
        f"From {MANY:,} tokens on, the product and the rotation of `max-autotune` take {by_inductor} of the time of "
        f"cuBLAS alone. The product of cuBLAS with the pass takes {by_pass}."
    )


def blocks_sentence(rows: pd.DataFrame) -> str:
    """The kernel without a pass over the product and the pass, by the table of `blocks`."""
    ratio = rows[KERNEL] / rows[OURS]
    slower = [f"{row.q_heads} heads and {row.tokens:,} tokens ({row.block})" for row in rows[ratio > 1].itertuples()]
    return (
        f"The kernel without a pass takes {value_range(ratio)} of the time of the product and the pass, and is faster "
        f"in {(ratio < 1).sum()} of {len(ratio)} rows{followed(', but not with ', slower)}."
    )
