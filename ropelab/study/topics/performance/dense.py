"""The sentences of the notebook on dense RoPE: ``dense``, ``host``, ``model_heads`` and ``tile_regret`` are records."""

import pandas as pd

from ropelab.bench.model_shapes import halves
from ropelab.bench.names import NO_GRAD, PREFIX
from ropelab.bench.records import Record
from ropelab.bench.rows import are_copies
from ropelab.study.engine.repeats import between_runs
from ropelab.study.engine.words import value_range
from ropelab.study.plots.looks import CONTENDERS
from ropelab.study.topics.performance import model_heads
from ropelab.study.topics.performance.comparison import OURS, against_peers, timed
from ropelab.study.topics.performance.findings import LEAST_OF_COPY, in_all_formats

LANES, _USUAL, _OFTEN = 128, 4096, 10
"""The float32 lanes of a multiprocessor of sm_90 (CUDA C++ Programming Guide, arithmetic instructions), the number of
tokens that most large drawn calls have, and the calls from which the median of a fact is more than a few calls."""


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
    return f"{len(missed)} of {len(_ours(frame))} cases miss the bar set for their size: {_each(missed)}."


def _each(missed: pd.DataFrame) -> str:
    """The cells of `below_their_bar` with their smallest fraction of a copy and their bar."""
    return "; ".join(
        f"{cell} {' and '.join(rows.layout.unique())} ({rows.fraction_of_copy.min():.3f} of {rows.bar.iloc[0]})"
        for cell, rows in missed.groupby("cell", sort=False)
    )


def ridge_sentence(record: Record) -> str:
    """The operations that the GPU of the record ``dense`` can do for each byte of its fastest copy."""
    machine = record.provenance["gpu"]
    peak = machine["sm_count"] * LANES * 2 * float(machine["clocks.max.sm"].split()[0]) * 1e6
    copies = record.frame[are_copies(record.frame)]
    fastest = (copies.bytes / copies.median_us).max() * 1e6
    return (
        f"{machine['name']}: {peak / 1e12:.0f} Tflop/s of fused multiply-adds by its clock, {fastest / 1e12:.2f} TB/s "
        f"by its fastest copy, so the ridge lies at {peak / fastest:.0f} operations a byte. The rotation has 0.75."
    )


def copy_sentence(frame: pd.DataFrame) -> str:
    """The fractions of the best copy that ropelab reaches, and the cells that miss their bar."""
    reached, below = _ours(frame).fraction_of_copy, below_their_bar(frame)
    said = (
        f"ropelab runs at {value_range(reached)} of the best copy (median {reached.median():.2f}) in {len(reached)} "
        f"cells of shape, layout and direction. {len(reached) - len(below)} of them meet the bar set for their size."
    )
    if below.empty:
        return said
    within, others = below.within_noise.sum(), len(below)
    where = {others: "", 0: " in no such case"}.get(within, f" in {within} of {others} such cases")
    return f"{said} Below it: {_each(below)}. Two runs differ by more than the shortfall{where}."


def peers_sentence(frame: pd.DataFrame) -> str:
    """The number of comparisons without a faster peer, and every comparison with a faster peer."""
    peers = against_peers(frame)
    faster = peers[peers.slower < 1].sort_values("slower")
    exceptions = "; ".join(
        f"{CONTENDERS.label(row.contender)}: {1 / row.slower - 1:.1%} faster at {row.cell}, {row.layout}, "
        f"{row.direction}"
        for row in faster.itertuples()
    )
    return (
        f"In {len(peers) - len(faster)} of {len(peers)} comparisons, cell by cell, no peer is faster. A peer that "
        f"overwrites its input is compared with ropelab in place. {exceptions}" + "." * bool(exceptions)
    ).strip()


def lengths_sentence(frame: pd.DataFrame) -> str:
    """The fraction of a copy at short and at long sequences, and the lengths at which a peer is faster."""
    times = timed(frame, OURS).set_index(["contender", "seq_len", "layout", "direction"])
    ours = times.loc[OURS]
    short, long = (
        f"{part.min():.2f} to {part.max():.2f}"
        for _, part in ours.fraction_of_copy.groupby(ours.index.get_level_values("seq_len") >= 4096)
    )
    said = f"From 4,096 tokens on ropelab runs at {long} of a copy, with fewer at {short}."
    peers = times.median_us[[not name.startswith((OURS, PREFIX)) for name, *_ in times.index]].unstack("contender")
    ratios = peers.div(ours.median_us, axis=0).stack()
    for (name, length), part in ratios[ratios < 1].groupby(["contender", "seq_len"]):
        said += (
            f" At {length:,} tokens another kernel is faster ({CONTENDERS.label(name)}: {value_range(part)} of "
            "ropelab's time); ropelab writes new tensors in this record."
        )
    return said


def formats_sentence(dense: pd.DataFrame, formats: pd.DataFrame) -> str:
    """The fraction of a copy of each format, and how far the formats of a cell lie apart."""
    ours = _ours(in_all_formats(dense, formats))
    middle = ours.groupby("format").fraction_of_copy.median()
    cells = ours.pivot_table(index=["cell", "layout", "direction"], columns="format", values="fraction_of_copy")
    apart = (cells.max(axis=1) - cells.min(axis=1)).dropna()
    return (
        f"{(ours.fraction_of_copy >= LEAST_OF_COPY).sum()} of {len(ours)} calls reach {LEAST_OF_COPY} of a copy. In "
        f"the median the {len(middle)} formats run at {value_range(middle)} of a copy. Within a cell they differ by "
        f"{apart.median():.3f} in the median, and by {apart.max():.3f} at most."
    )


def drawn_sentence(frame: pd.DataFrame) -> str:
    """The median of all drawn calls, and how many are far from the limit or below their bar."""
    every = model_heads.judged(frame)
    reached = every.fraction_of_limit
    slow = (reached < 0.9).sum()
    return (
        f"Over {len(every)} randomly drawn calls the median is {reached.median():.3f} of the speed of a copy of all "
        f"their bytes; {slow} are below 0.9, and {(~every.meets).sum()} miss the bar set for their size."
    )


def heads_sentences(frame: pd.DataFrame) -> list[str]:
    """`drawn_sentence`, the calls of either size beside their bar, and those that another library beats."""
    said = [drawn_sentence(frame)]
    said += [
        f"{part.meets.sum()} of {len(part)} {'large' if large else 'small'} calls meet their bar. The median is "
        f"{part.fraction_of_limit.median():.3f} of the limit, and four of five calls lie between "
        f"{part.fraction_of_limit.quantile(0.1):.2f} and {part.fraction_of_limit.quantile(0.9):.2f}."
        for large, part in sorted(model_heads.judged(frame).groupby("large"), reverse=True)
    ]
    judged = model_heads.judged(frame).query("large")
    usual = (judged.batch * judged.seq_len) == _USUAL
    if usual.any() and not usual.all():
        missed = 1 - judged.meets.groupby(usual).mean()
        said.append(
            f"{usual.sum()} of the large calls have exactly {_USUAL:,} tokens, so that column of the figure is the "
            f"spread of many calls: {missed[True]:.0%} of them miss their bar, and {missed[False]:.0%} of the others."
        )
    rivals = frame[(frame.contender != OURS) & (frame.status == "ok")]
    ahead = model_heads.faster(frame)
    faster = f"Another library is faster in {len(ahead)} of {len(rivals)} comparisons."
    if leaves := ahead.leaves_rest.sum():
        faster += (
            f" In {leaves} of them the library overwrites its input and leaves the features that do not rotate, which "
            "ropelab has to copy in these calls."
        )
    if len(ahead):
        first = ahead.iloc[0]
        leads = CONTENDERS.label(first.contender)
        faster += f" At worst ropelab takes {first.ours_over_theirs:.2f} times as long as {leads}: {first.cell}."
    return [*said, faster]


def causes_sentence(causes: pd.DataFrame) -> str:
    """The calls that nothing sets apart from a copy, and the fact that costs most; ``causes``: `model_heads.causes`."""
    large, small = (causes[f"{size}: median"] for size in model_heads.SIZES)
    plain = model_heads.NOTHING
    often = small[causes[f"{model_heads.SIZES[1]}: calls"] >= _OFTEN]
    said = (
        f"From 16 MB on, calls with {plain} facts run at {large[plain]:.3f} of the limit in the median. The lowest "
        f"median, {large.min():.2f}, belongs to calls with this fact: {large.idxmin()}. Below 16 MB even calls with "
        f"{plain} facts run at {small[plain]:.3f}."
    )
    if often.empty:
        return said
    return f"{said} The lowest median of at least {_OFTEN} calls there is {often.min():.2f} ({often.idxmin()})."


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
    calls = timed(frame[frame.call == NO_GRAD], OURS).groupby("contender").median_us.median()
    others = calls.drop([name for name in calls.index if name.startswith(OURS)])
    said = f"One eager call for eight tokens, without autograd, costs the host {calls[OURS]:.0f} µs."
    if others.empty:
        return said
    least, most = (CONTENDERS.label(name) for name in (others.idxmin(), others.idxmax()))
    apart = between_runs("host", frame).max()
    return (
        f"{said} The peers take {others.min():.0f} ({least}) to {others.max():.0f} µs ({most}). The times of two runs "
        f"differ by up to {apart:.0%}, so contenders whose bars overlap are not told apart."
    )


def _ours(frame: pd.DataFrame) -> pd.DataFrame:
    times = timed(frame)
    return times[times.contender == OURS]
