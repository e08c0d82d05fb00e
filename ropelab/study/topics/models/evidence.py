"""Turn the record ``whole_models`` and the tables of data/models into tables and sentences."""

from __future__ import annotations

from collections import Counter

import pandas as pd

from ropelab.bench.model_steps import BATCH, NONE, NORMS, OURS, PLAIN, PREFILL, PROJECTION, TOKENS, WAYS
from ropelab.bench.projection import KERNEL
from ropelab.bench.projection import OURS as PASS
from ropelab.bench.projection_law import Machine
from ropelab.bench.rows import need
from ropelab.bench.whole_models import LOSS
from ropelab.study.engine.words import value_range
from ropelab.study.topics.models import share, tables
from ropelab.study.topics.projection import findings

STUDY = "whole_models"
"""The name of the record."""
_CELL = ["model", "mode", "step"]
_APART = {True: "apart", False: "overlapping"}
KERNEL_TIME = "kernel time"
"""The quantity of the sum of the times of a step's kernels."""
WORTHLESS = 0.01
"""The least saved share of a step's time. Below it the notebook says that ropelab does not help the step."""
MOST_WAITING = 0.5
"""A step in which the GPU waits for the host for a larger part measures the host."""


def values(frame: pd.DataFrame, quantity: str = "time") -> pd.DataFrame:
    """A row for each model, mode and step, and a column for each way: the median of one quantity."""
    rows = frame[(frame.quantity == quantity) & (frame.status == "ok")]
    table = rows.pivot_table(index=_CELL, columns="way", values="value", aggfunc="median", sort=False)
    return table[[way for way in WAYS if way in table]]


def savings(frame: pd.DataFrame, quantity: str = "time") -> pd.DataFrame:
    """The share of the time of Transformers that each other way saves."""
    times = values(frame, quantity)
    need(times, PLAIN)
    return 1 - times.drop(columns=PLAIN).div(times[PLAIN], axis=0)


def rounds(frame: pd.DataFrame) -> pd.DataFrame:
    """The share that a round saves of the median time of Transformers: the 20th, 50th and 80th percentile.

    Columns: model, mode, step, way, least, middle, most.
    """
    rows = frame[(frame.quantity == "time") & (frame.status == "ok")]
    plain = rows[rows.way == PLAIN].groupby(_CELL).value.median()
    share = (1 - rows.set_index([*_CELL, "way"]).value.div(plain)).groupby([*_CELL, "way"], sort=False)
    return share.quantile([0.2, 0.5, 0.8]).unstack().set_axis(["least", "middle", "most"], axis=1).reset_index()


def doubtful(frame: pd.DataFrame) -> pd.DataFrame:
    """The steps whose times tell nothing of the rotation, with two shares.

    If the time of a step is doubtful in one model, it is doubtful in all models of the same mode.

    Returns:
        ``longer``: how much longer a model that does not rotate took than the model with ropelab; a difference up to
        `WORTHLESS` does not count. ``waits``: the part of Transformers' step in which the GPU waits for the host; up to
        `MOST_WAITING` does not count. NaN where the record does not have it.
    """
    times = values(frame).reindex(columns=[PLAIN, OURS, NONE])
    alone = values(frame, KERNEL_TIME).reindex(index=times.index, columns=[PLAIN])[PLAIN]
    shares = pd.DataFrame({"longer": times[NONE] / times[OURS] - 1, "waits": 1 - alone / times[PLAIN]})
    most = shares.groupby(level=["mode", "step"]).transform("max")
    return shares[(most.longer > WORTHLESS) | (most.waits > MOST_WAITING)]


def sentences(frame: pd.DataFrame) -> list[str]:
    """The share that the rotation saves beside its limit, the share with fused norms, and the steps left out."""
    found, unclear = [], doubtful(frame)
    saved = savings(frame).drop(unclear.index)
    for mode, shares in saved.groupby(level="mode", sort=False):
        said = f"{mode.capitalize()} steps: ropelab's rotation saves {value_range(shares[OURS], '.1%')} of the time"
        if NONE in shares:
            said += f"; a model without any rotation would save {value_range(shares[NONE], '.1%')}"
        if NORMS in shares and shares[NORMS].notna().any():
            said += f"; rotation and fused norms together save {value_range(shares[NORMS], '.1%')}"
        found.append(said + ".")
    most = saved[[way for way in (OURS, NORMS, PROJECTION) if way in saved]].max(axis=1)
    idle = [", ".join(cell) for cell, share in most.items() if share < WORTHLESS]
    if idle:
        found.append(f"ropelab saves less than {WORTHLESS:.0%} of the time of these steps: {'; '.join(idle)}.")
    for (mode, step), shares in unclear.groupby(level=["mode", "step"], sort=False):
        change = -savings(frame).drop(columns=NONE).xs((mode, step), level=("mode", "step"))
        each = ", ".join(
            f"with {way} by {value_range(change[way], '+.0%')}" for way in change.dropna(axis=1, how="all")
        )
        reasons = []
        if shares.waits.max() > MOST_WAITING:
            reasons.append(f"the GPU waits for the host for {value_range(shares.waits, '.0%')} of Transformers' step")
        if shares.longer.max() > WORTHLESS:
            reasons.append(
                f"a model that does not rotate took up to {shares.longer.max():.0%} longer there than with ropelab, "
                "and cannot be slower than one that does"
            )
        found.append(
            f"The step {step}, {mode}, is left out of these ranges: {'; '.join(reasons)}. By the medians the times "
            f"differ from Transformers': {each}. Such differences measure no rotation."
        )
    before, after = (noise_sentence(frame), kernels_sentence(frame)), (modes_sentence(frame),)
    return [said for said in (*before, *found, *after) if said]


def projection_sentence(frame: pd.DataFrame, projection: pd.DataFrame) -> str:
    """The steps with the projection that rotates beside those with the pass; "" if not measured.

    Args:
        projection: the record of that name, which has the gain of the kernel alone.
    """
    columns = frame[(frame.quantity == "time") & (frame.status == "ok") & frame.way.isin([OURS, PROJECTION])]
    ms = columns.groupby([*_CELL, "way"], sort=False).value.quantile([0.2, 0.5, 0.8]).unstack(["way", None])
    if PROJECTION not in ms:
        return ""
    said, kept = [], ms.dropna().drop(doubtful(frame).index, errors="ignore")
    for cell, row in kept.iterrows():
        joined, ours = row[PROJECTION], row[OURS]
        apart = joined[0.2] > ours[0.8] or ours[0.2] > joined[0.8]
        change = joined[0.5] / ours[0.5] - 1
        said.append(
            f"{', '.join(cell)}: {joined[0.5]:.2f} ms and {ours[0.5]:.2f} ms, {abs(change):.1%} "
            f"{'slower' if change > 0 else 'faster'}, intervals {_APART[apart]}"
        )
    us = findings.times(projection.assign(gpu="")).loc[("", *findings.MODEL.values(), findings.INPUTS, BATCH * TOKENS)]
    layers = share.LLAMA.sizes["num_hidden_layers"]
    gain = (
        f"The steps with the projection that rotates, and with the pass: {'; '.join(said)}. In chapter 08 the kernel "
        f"of this product saves {(us[PASS] - us[KERNEL]) * layers / 1e3:.2f} ms in {layers} layers."
    )
    alone = values(frame, KERNEL_TIME).reindex(columns=[PROJECTION, OURS]).dropna()
    beyond = values(frame)[[PROJECTION, OURS]] - alone
    each = [
        f"{alone.at[cell, PROJECTION]:.2f} and {alone.at[cell, OURS]:.2f} ms in a {cell[-1]} of {cell[0]}, where the "
        f"GPU waits for the host for {beyond.at[cell, PROJECTION]:.2f} and {beyond.at[cell, OURS]:.2f} ms"
        for cell in alone.index.intersection(kept.index)
    ]
    if not each:
        return f"{gain} The record does not tell why a step gains less than that, or becomes slower."
    return f"{gain} All kernels of a step together take {'; '.join(each)}."


def kernels_sentence(frame: pd.DataFrame) -> str:
    """The share of the kernels' time that the rotation saves, beside its limit; "" if not recorded."""
    alone = values(frame, KERNEL_TIME)
    if not {PLAIN, OURS, NONE} <= set(alone):
        return ""
    saved = savings(frame, KERNEL_TIME).xs("eager", level="mode").groupby(level="step", sort=False)
    each = "; ".join(
        f"{step}: {value_range(shares[OURS], '.1%')}, and {value_range(shares[NONE], '.1%')} without any rotation"
        for step, shares in saved
    )
    return f"Of the time of all kernels of an eager step ropelab's rotation saves, {each}."


def modes_sentence(frame: pd.DataFrame) -> str:
    """The compiled steps of Transformers beside the eager ones; "" if none takes longer."""
    times = values(frame)[PLAIN].unstack("mode")
    if not {"compiled", "eager"} <= set(times):
        return ""
    ratio = (times.compiled / times.eager).dropna()
    alone, reason = values(frame, KERNEL_TIME), "The record does not tell why"
    if not alone.empty:
        kernels = alone[PLAIN].unstack("mode")
        slower = value_range((kernels.compiled / kernels.eager).dropna())
        reason = f"Their kernels alone take {slower} times as long, so the host is not the cause"
    return (
        f"Compiled, Transformers' steps take {value_range(ratio)} times as long as eager, and more than 1 in "
        f"{(ratio > 1).sum()} of {len(ratio)}. {reason}; compare within a mode only."
    ) * bool((ratio > 1).any())


def noise_sentence(frame: pd.DataFrame) -> str:
    """How much longer a model without a rotation took than one with ropelab's, as a measure of noise; or ""."""
    times = values(frame).drop(doubtful(frame).index)
    if not {OURS, NONE} <= set(times) or not (longer := times[NONE] / times[OURS] - 1).gt(0).any():
        return ""
    return (
        f"In {longer.gt(0).sum()} of {longer.notna().sum()} steps a model without any rotation takes longer than with "
        f"ropelab's, by up to {longer.max():.1%}: differences of this size are noise."
    )


def rounds_sentence(frame: pd.DataFrame) -> str:
    """How many times the record has of each step."""
    rows = frame[(frame.quantity == "time") & (frame.status == "ok")]
    counts = rows.groupby([*_CELL, "way"]).size()
    rounds = value_range(counts, "d")
    if rounds == "1":
        return "The record has one time of each step, so no time has an interval; below stands how large the noise is."
    return f"Each time is the median of {rounds} rounds, and a bar goes from the 20th to the 80th percentile."


def broken() -> pd.DataFrame:
    """The architectures of Transformers that break a law: architecture, model, reason."""
    rows = pd.DataFrame(tables.read("transformers.csv"))
    return rows[rows.outcome == "wrong"][["architecture", "model", "reason"]]


def loss_sentence(frame: pd.DataFrame) -> str:
    """How far the recorded losses with the kernel are from the losses of Transformers, on a GPU; "" without them."""
    rows = frame[(frame.quantity == LOSS) & (frame.status == "ok")]
    curves = rows.pivot_table(index=["model", "place"], columns="way", values="value")
    said = [
        f"{model}, {len(losses)} steps of AdamW in bfloat16 on one batch: with the kernel the loss stays within "
        f"{(losses[OURS] - losses[PLAIN]).abs().max():.1e} nats of Transformers', with fused norms within "
        f"{(losses[NORMS] - losses[PLAIN]).abs().max():.1e}. It falls from {losses[PLAIN].iloc[0]:.2f} to "
        f"{losses[PLAIN].iloc[-1]:.0e} nats"
        for model, losses in curves.groupby("model")
        if {PLAIN, OURS, NORMS} <= set(losses)
    ]
    return ". ".join(said) + "." * bool(said)


def measured_shares(frame: pd.DataFrame) -> pd.Series:
    """The share of an eager prefill that a model without any rotation saves, for models with the layers of `share`."""
    saved = savings(frame).get(NONE, pd.Series(dtype=float))
    cells = {one.name: (one.name, "eager", PREFILL) for one in (share.LLAMA, share.QWEN)}
    return pd.Series({name: saved[cell] for name, cell in cells.items() if cell in saved.index}, dtype=float)


def share_sentence(frame: pd.DataFrame, machine: Machine) -> str:
    """The part of the rotation in eager torch, computed with the rates of the GPU, beside the measured shares."""
    sizes = {one.name: one.sizes for one in (share.LLAMA, share.QWEN)}
    each = " and ".join(
        f"{name} {value:.1%} ({share.part(machine, TOKENS, share.in_transformers(), sizes[name]):.1%} computed)"
        for name, value in measured_shares(frame).items()
    )
    return each and (
        f"Transformers' function moves {share.in_transformers():.1f} times the bytes of q and k. The record has $F$ = "
        f"{machine.flops / 1e12:.0f} TFLOP/s and $B$ = {machine.bandwidth / 1e9:,.0f} GB/s. Without any rotation an "
        f"eager prefill of {BATCH} sequences of {TOKENS:,} tokens takes less time: {each}."
    )


def memory_sentence(frame: pd.DataFrame) -> str:
    """The largest changes of the peak memory of a step."""
    gib = values(frame, "peak memory")
    more = (gib[OURS] - gib[PLAIN]).max()
    said = f"ropelab's rotation adds at most {more:.2f} GiB to the peak memory of a step."
    if NORMS in gib:
        said += f" Rotation with fused norms saves up to {(gib[PLAIN] - gib[NORMS]).max():.2f} GiB."
    return said


def norm_bar(frame: pd.DataFrame, bar: float = 0.08) -> str:
    """Whether Qwen3's eager training step is at least ``bar`` faster with norms fused; empty if not measured."""
    saved = savings(frame)
    rows = [share for (model, mode, step), share in saved.get(NORMS, pd.Series(dtype=float)).items()
            if model.startswith("Qwen3") and (mode, step) == ("eager", "training step")]  # fmt: skip
    if not rows:
        return ""
    verdict = "met" if rows[0] >= bar else "missed"
    time = f"{rows[0]:.1%} less time: the bar, {bar:.0%}, is {verdict}."
    return f"With norms fused, Qwen3's eager training step takes {time}"


def coverage_sentence() -> str:
    """How many architectures of Transformers were traced, held to laws, patched and fused, and why others were not."""
    verified, patched = tables.read("transformers.csv"), tables.read("patched.csv")
    outcomes = Counter({row["architecture"]: row["outcome"] for row in verified if row["function"]}.values())
    equal = [row for row in patched if row["outcome"] == "equal"]
    refused = [row for row in patched if row["outcome"] == "refused"]
    unjudged = {row["architecture"]: row["reason"] for row in verified if not row["function"]}
    still = sum(reason.endswith("it does not rotate") for reason in unjudged.values())
    return (
        f"{outcomes.total()} of {len({row['architecture'] for row in verified})} architectures of Transformers with a "
        f"rotation were traced: {outcomes['right']} are right and {outcomes['wrong']} break a law. {len(equal)} "
        f"compute the same after one line of code, {sum('equal' in row['qk_norm'] for row in equal)} of these also "
        f"with fused norms and {sum('equal' in row['compiled'] for row in equal)} also through torch.compile."
        + "".join(
            f" `patch` refuses `{row['architecture']}` ({row['reason'].partition(': ')[2].partition(', got')[0]})."
            for row in refused
        )
        + f" Of the other {len(unjudged)} the tiny model does not rotate ({still}), or could not be built or run."
    )
