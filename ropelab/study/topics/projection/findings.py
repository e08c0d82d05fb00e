"""Read the records `projection` and `projection_blocks`: the pass, the loss of the product, and which of them wins."""

from collections.abc import Mapping

import pandas as pd

from ropelab.bench import host
from ropelab.bench.projection import ALONE, BY_QUACK, COMPUTED, COPY, KERNEL, OURS, PRODUCT, QUACK
from ropelab.bench.projection_law import Machine, Product
from ropelab.bench.rows import timed
from ropelab.call.projection_paths import MEASURED, ProductSize, faster
from ropelab.study.engine.words import value_range

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


def taken(frame: pd.DataFrame) -> pd.DataFrame:
    """The times of both paths of `ropelab.qkv_rope`, and in the column ``taken`` the time of the path that it takes."""
    both = times(frame, *PATHS.values())[[*PATHS.values()]]
    rows = [dict(zip(both.index.names, key, strict=True)) for key in both.index]
    chosen = [PATHS[_path(product(row).work, row["gpu"])] for row in rows]
    return both.assign(taken=[us[name] for (_, us), name in zip(both.iterrows(), chosen, strict=True)])


def _path(work: ProductSize, gpu: str) -> str:
    """The path that `ropelab.qkv_rope` takes; on a GPU that nobody measured it takes the pass."""
    return faster(work, gpu) if gpu in MEASURED.values() else "pass"


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
        ProductSize(
            row.tokens, row.inputs, row.outputs, (row.q_heads + row.k_heads) * row.head_dim, "norm" in row.block
        )
        for row in table.itertuples()
    ]
    path = pd.Series([_path(work, gpu) for work, gpu in zip(works, table.gpu, strict=True)], table.index)
    path = path.where(table[KERNEL].notna(), "pass")
    return table.assign(path=path, taken=table[KERNEL].where(path == "product", table[OURS]))


def host_sentence(frame: pd.DataFrame) -> str:
    """What a call costs the host beside the calls that it replaces; ``frame`` is the record `HOST`."""
    us = timed(frame, host.ONE_CALL, host.STEPS).pivot_table(
        index=["call", "tokens"], columns="contender", values="median_us", sort=False
    )

    def more(calls: list[str], one: str, steps: str) -> str:
        return value_range((us[one] - us[steps]).loc[calls], "+.0f")

    plain = [host.NO_GRAD, host.PLAIN]
    said = (
        f"A call of `qkv_rope` takes the host {more(plain, host.ONE_CALL, host.STEPS)} µs beside a linear layer, the "
        f"same views and `apply_rope` in place, and {more([host.RECORDED], host.ONE_CALL, host.STEPS)} µs where "
        f"autograd records it."
    )
    if host.CACHED in us:
        into_cache = more(plain, host.CACHED, host.CACHED_STEPS)
        said += f" `qkv_rope_and_cache` takes {into_cache} µs beside a linear layer and `rope_and_cache`."
    return said
