"""The sentences of the notebook on dense RoPE: ``dense``, ``host``, ``model_heads`` and ``tile_regret`` are records."""

import pandas as pd

from ropelab.bench.host import NO_GRAD, with_calls
from ropelab.bench.model_shapes import halves
from ropelab.study.engine.repeats import between_runs
from ropelab.study.topics.performance import model_heads
from ropelab.study.topics.performance.comparison import OURS, against_peers, timed


def below_their_bar(frame: pd.DataFrame) -> pd.DataFrame:
    """The cells in which ropelab misses its bar: cell, layout, direction, fraction_of_copy, bar, within_noise.

    ``within_noise``: whether a second run may reach the bar, because the medians of two runs lie that far apart.
    """
    ours = _ours(frame)
    missed = ours[ours.fraction_of_copy < ours.bar]
    reach = missed.fraction_of_copy * (1 + between_runs("dense", missed))
    columns = ["cell", "layout", "direction", "fraction_of_copy", "bar", "within_noise"]
    return missed.assign(within_noise=reach >= missed.bar)[columns]


def shortfall_sentence(frame: pd.DataFrame) -> str:
    """The cells in which ropelab misses its bar, with the smallest fraction of a copy and the bar of each cell."""
    missed = below_their_bar(frame)
    if missed.empty:
        return "Every cell meets the bar set for its size."
    each = (
        f"{cell} {' and '.join(rows.layout.unique())} ({rows.fraction_of_copy.min():.3f} of {rows.bar.iloc[0]})"
        for cell, rows in missed.groupby("cell", sort=False)
    )
    return f"{len(missed)} of {len(_ours(frame))} cases miss the bar set for their size: {'; '.join(each)}."


def copy_sentence(frame: pd.DataFrame, gpu: str, drawn: pd.DataFrame | None = None) -> str:
    """The fractions of the best copy that ropelab reaches on ``gpu``, and how many cells meet their bar.

    Args:
        drawn: the record ``model_heads``; the sentence then ends with the median of its calls.
    """
    ours = _ours(frame)
    low, middle, high = ours.fraction_of_copy.quantile([0, 0.5, 1])
    below = below_their_bar(frame)
    met = len(ours) - len(below)
    return (
        f"On {gpu} the kernel runs at {low:.2f} to {high:.2f} of the best copy (median {middle:.2f}) in {len(ours)} "
        f"cells of shape, layout and direction. {met} of these cells meet the bar set for their size, and "
        f"{below.within_noise.sum()} of the other {len(below)} lie closer to it than two runs to each other."
        + ("" if drawn is None else f" {drawn_sentence(drawn)}")
    )


def peers_sentence(frame: pd.DataFrame) -> str:
    """The number of comparisons without a faster peer, and every comparison with a faster peer."""
    peers = against_peers(frame)
    faster = peers[peers.slower < 1].sort_values("slower")
    exceptions = "".join(
        f"; {row.contender} is {1 / row.slower - 1:.1%} faster at {row.cell}, {row.layout}, {row.direction}"
        for row in faster.itertuples()
    )
    return (
        f"In {len(peers) - len(faster)} of {len(peers)} comparisons, cell by cell, no peer is faster{exceptions}. A "
        "peer that overwrites its input is compared with ropelab in place."
    )


def drawn_sentence(frame: pd.DataFrame) -> str:
    """The median of all drawn calls, and how many are far from the limit or below their bar."""
    every = model_heads.judged(frame)
    reached = every.fraction_of_limit
    slow = (reached < 0.9).sum()
    return (
        f"Over all {len(every)} drawn calls the median is {reached.median():.3f} of the limit; {slow} are below 0.9, "
        f"and {(~every.meets).sum()} below their bar."
    )


def heads_sentences(frame: pd.DataFrame) -> list[str]:
    """`drawn_sentence`, the numbers of calls that meet their bar, and those that another library beats."""
    said = [drawn_sentence(frame)]
    said += [
        f"{part.meets.sum()} of {len(part)} {'large' if large else 'small'} calls meet their bar. In four of "
        f"five calls, the fraction of the limit is {part.fraction_of_limit.quantile(0.1):.2f} to "
        f"{part.fraction_of_limit.quantile(0.9):.2f}."
        for large, part in model_heads.judged(frame).groupby("large")
    ]
    rivals = frame[(frame.contender != OURS) & (frame.status == "ok")]
    ahead = model_heads.faster(frame)
    faster = f"Another library is faster in {len(ahead)} of {len(rivals)} comparisons."
    if leaves := ahead.leaves_rest.sum():
        faster += (
            f" In {leaves} of them the library overwrites its input and leaves the features that do not rotate, which "
            "ropelab has to copy in these calls."
        )
    return [*said, faster]


def heads_below_their_bar(frame: pd.DataFrame) -> pd.DataFrame:
    """The calls of ``model_heads`` that miss their bar, the worst first.

    ``over`` is the time over the bar, minus 1; ``limits`` is `model_heads.limits`.
    """
    judged = model_heads.judged(frame)
    missed = judged[~judged.meets]
    missed = missed.assign(
        over=missed.median_us / missed.allowed_us - 1, limits=missed.apply(model_heads.limits, axis=1)
    )
    columns = [
        "cell",
        "layout",
        "seq_format",
        "dtype",
        "positions",
        "in_place",
        "median_us",
        "allowed_us",
        "over",
        "limits",
    ]
    return missed.sort_values("over", ascending=False)[columns]


def regret_sentences(regrets: pd.DataFrame) -> list[str]:
    """The loss of the chosen tile, for the models of the fit and the others; ``regrets`` is `model_heads.regret`."""
    found = []
    for name, half in zip(("models of the fit", "models held out"), halves(), strict=True):
        part = regrets[regrets.model.isin(half)].regret
        found.append(
            f"For the {name}, the chosen tile loses {part.mean():.1%} on average, {part.median():.1%} in the median "
            f"and {part.max():.1%} at most, in {len(part)} calls."
        )
    return found


def host_sentence(frame: pd.DataFrame) -> str:
    """The host time of one eager call for eight tokens, with ropelab and with the peers."""
    frame = with_calls(frame)
    calls = timed(frame[frame.call == NO_GRAD]).groupby("contender").median_us.median()
    others = calls.drop([name for name in calls.index if name.startswith(OURS)])
    return (
        f"One eager call for eight tokens, without autograd, costs the host {calls[OURS]:.0f} µs. The peers take "
        f"{others.min():.0f} ({others.idxmin()}) to {others.max():.0f} µs ({others.idxmax()})."
    )


def _ours(frame: pd.DataFrame) -> pd.DataFrame:
    times = timed(frame)
    return times[times.contender == OURS]
