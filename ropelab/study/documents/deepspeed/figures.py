"""Figures of DeepSpeed#8052: who gets the kernel, what the gradient is worth, what a call launches, bytes per second.

As in ``ropelab.study.plots.registry``: titles are computed, ``footer`` says machine and date.
"""

import textwrap
from collections.abc import Callable

import numpy as np
import pandas as pd
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ropelab.study.documents.deepspeed import callers as who
from ropelab.study.documents.deepspeed import table_figures
from ropelab.study.documents.deepspeed.evidence import GB10_GB_S, bandwidths
from ropelab.study.documents.deepspeed.rules import digits
from ropelab.study.plots import drawing

_RIGHT = ("kernel", "formula", "as the formula: an error")
_OUTCOMES = (*_RIGHT, "kernel, wrong result", "reads past the tables")
_SHADES = ListedColormap([drawing.COLORBLIND[place] for place in (2, 9, 7, 3, 1)])
_VERSIONS = {"first": "first\nversion", "merged": "merged\nversion", "ropelab": "ropelab"}
_LOOKS = {who.TORCHEMBED: "torchembed", who.FORMULA: "eager", who.OURS: "ropelab"}


def gates(dispatch: pd.DataFrame, footer: str = "") -> Figure:
    """What every shape gets from the first version, the merged one and ours: a cell each."""
    frame = dispatch.assign(what=dispatch.apply(_what, axis=1))
    table = frame.pivot(index="caller", columns="version", values="what")
    table = table.reindex(index=dict.fromkeys(frame.caller), columns=list(_VERSIONS))
    in_tree = frame[frame.in_tree & (frame.tokens > 1)]
    wrong = {version: int((~rows.what.isin(_RIGHT)).sum()) for version, rows in frame.groupby("version")}
    fused = in_tree[in_tree.what == "kernel"].groupby("version").size()
    total = len(in_tree) // in_tree.version.nunique()
    title = (
        f"Of {len(table)} shapes the first version gets {wrong['first']} wrong, the merged one {wrong['merged']} and "
        f"ropelab {wrong['ropelab']};\nthe kernel runs for {fused.get('merged', 0)} of {total} shapes of DeepSpeed's "
        f"own callers after the merge, with ropelab for {fused.get('ropelab', 0)}"
    )
    fig, axes = drawing.grid(1, 1, (11.5, 0.42 * len(table) + 1.2), title, footer)
    ax = axes[0, 0]
    codes = table.map(_OUTCOMES.index).to_numpy()
    ax.imshow(codes, cmap=_SHADES, vmin=-0.5, vmax=len(_OUTCOMES) - 0.5, aspect="auto")
    for (row, column), code in np.ndenumerate(codes):
        shade = "black" if _OUTCOMES[code] in ("formula", "as the formula: an error") else "white"
        ax.text(column, row, _OUTCOMES[code], ha="center", va="center", size=8.5, color=shade)
    marks = frame.drop_duplicates("caller").set_index("caller").in_tree.reindex(table.index)
    labels = [f"{name}  (in DeepSpeed's tree)" if mark else name for name, mark in marks.items()]
    ax.set_yticks(range(len(table)), labels)
    ax.set_xticks(range(len(_VERSIONS)), list(_VERSIONS.values()))
    ax.grid(False)
    ax.set_xticks(np.arange(-0.5, len(_VERSIONS)), minor=True)
    ax.set_yticks(np.arange(-0.5, len(table)), minor=True)
    ax.grid(True, which="minor", color="white", linewidth=2)
    ax.tick_params(which="both", length=0)
    return fig


def _what(row) -> str:
    if row.outcome == "equal":
        if row.expected == "an error":
            return "as the formula: an error"
        return "kernel" if row.gate_open else "formula"
    return "reads past the tables" if row.outcome == "reads past the tables" else "kernel, wrong result"


def gradients(correctness: pd.DataFrame, footer: str = "") -> Figure:
    """Errors of result and gradient and the gradient's norm, against the length, per version of torchembed."""
    frame = correctness[(correctness.dtype == "float32") & (correctness.table == "whole")]
    ran = frame[frame.outcome == "ran"]
    columns = {
        "forward_error": "error of the result",
        "gradient_error": "error of the gradient",
        "norm_ratio": "norm of the gradient / right norm",
    }
    longer = ran[ran.seq_len > 1].groupby("version").gradient_error
    wrong = [version for version, errors in longer if errors.max() > 1e-3]
    off = longer.max()[wrong].max() if wrong else 0
    norm = (ran[ran.version.isin(wrong)].norm_ratio - 1).abs().max() if wrong else 0
    title = (
        f"The gradient of torchembed {', '.join(map(str, wrong))} is off by up to {off:.2f} times its norm, "
        f"while the norm itself is right to {digits(norm)}"
        if wrong
        else "The gradient of every version is right"
    )
    fig, axes = drawing.grid(1, 3, (4.3, 3.4), title, footer, sharex=True)
    versions = sorted(ran.version.unique(), key=str)
    for ax, (column, what) in zip(axes[0], columns.items(), strict=True):
        for place, version in enumerate(versions):
            line = ran[ran.version == version].sort_values("seq_len")
            ax.plot(line.seq_len, line[column], "osvD^P"[place], linestyle="-", markersize=7 - place, linewidth=1.2,
                    color=drawing.COLORBLIND[place], label=f"torchembed {version}")  # fmt: skip
        if column == "gradient_error":
            line = ran[ran.version == versions[0]].sort_values("seq_len")
            ax.plot(line.seq_len, line.wrong_backward_error, "--k", linewidth=1, label="a forward repeated: derived")
        ax.set(title=what, xscale="log", xlabel="sequence length (tokens)")
        if column != "norm_ratio":
            ax.set_yscale("symlog", linthresh=1e-8)
            ax.yaxis.set_major_locator(FixedLocator([0, 1e-8, 1e-6, 1e-4, 1e-2, 1]))
            ax.yaxis.set_minor_locator(NullLocator())
            ax.set_ylim(-2e-9, 4)
        else:
            ax.set_ylim(0, 2)
    axes[0, 0].set_ylabel("relative (L2), float32")
    drawing.legend(fig, axes, columns=4)
    return fig


def callers(frame: pd.DataFrame, footer: str = "") -> Figure:
    """Speed of each caller's call as a fraction of a copy, with its launches and extra memory."""
    timed = frame[frame.status == "ok"]
    own = timed[timed.in_tree]
    ours, theirs = (own[own.contender == name] for name in (who.OURS, who.TORCHEMBED))
    keys = ["caller", "direction"]
    ratio = (theirs.set_index(keys).median_us / ours.set_index(keys).median_us).dropna()
    title = "For the shapes of DeepSpeed's own callers "
    if len(ours):
        title += f"ropelab launches {drawing.value_range(ours.launches.astype(int), 'd')} kernels"
    if len(ratio):
        launches, faster = drawing.value_range(theirs.launches.astype(int), "d"), drawing.value_range(ratio, ".1f")
        title += f" where DeepSpeed with torchembed launches {launches}, and is {faster} times as fast"
    names = list(dict.fromkeys(_labels(frame)))
    directions = drawing.ordered(frame.direction, drawing.DIRECTIONS)
    height = 0.62 * len(names) + 1.0
    fig, axes = drawing.grid(1, len(directions), (6.6, height), title, footer, sharex=True, sharey=True)
    contenders = [name for name in _LOOKS if (frame.contender == name).any()]
    offsets = np.linspace(0.27, -0.27, len(contenders))
    for ax, direction in zip(axes[0], directions, strict=True):
        panel = frame[frame.direction == direction]
        for name, offset in zip(contenders, offsets, strict=True):
            rows = panel[panel.contender == name]
            place = np.array([len(names) - 1 - names.index(label) for label in _labels(rows)]) + offset
            look = drawing.look(_LOOKS[name])
            ax.barh(place, rows.fraction_of_copy.fillna(0), 0.25, color=look["color"], label=name)
            for y, row in zip(place, rows.itertuples(), strict=True):
                ax.annotate(_what_runs(row), (max(0, np.nan_to_num(row.fraction_of_copy)), y), (4, 0),
                            textcoords="offset points", va="center", size=7.5, zorder=4,
                            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6})  # fmt: skip
        ax.axvline(1, color="grey", linestyle="--", linewidth=1, zorder=3)  # below what is written
        ax.set_yticks(range(len(names) - 1, -1, -1), names)
        ax.set(title=direction, xlabel="fraction of the best copy of t", xlim=(0, 1.62))
        ax.grid(axis="y", visible=False)
    drawing.legend(fig, axes, columns=3)
    return fig


def _labels(frame: pd.DataFrame) -> pd.Series:
    """Callers by their shapes, those of DeepSpeed's tree marked."""
    dtypes = np.where(frame.dtype == frame.table_dtype, "", "\nfp16 with fp32 tables")
    return frame.t + " with " + frame.tables + dtypes + np.where(frame.in_tree, "\nin DeepSpeed's tree", "")


def _what_runs(row) -> str:
    if row.status != "ok":
        return textwrap.shorten(row.status, 64, placeholder=" …")
    extra = row.extra_bytes / row.tensor_bytes
    return f"{row.launches:.0f} launch{'es' * (row.launches > 1)}, {extra:.1f} tensors extra"


def readings(table: pd.DataFrame, footer: str = "") -> Figure:
    """Bytes per second under each reading of the document's dtype, beside those measured here in that dtype."""
    frame = bandwidths(table)
    published = frame[frame["where"] == "published (GB10)"]
    fused = published[published.contender == "torchembed"].groupby("dtype").gb_s
    spans = {dtype: drawing.value_range(values / GB10_GB_S, ".2f") for dtype, values in fused}
    title = (
        f"The document's fused kernel moved {spans['bfloat16']} of its GPU's bandwidth if the table is in bfloat16, "
        f"{spans['float32']} if in float32"
    )
    places = ("published (GB10)", "measured here")
    dtypes = ("bfloat16", "float32")
    fig, axes = drawing.grid(len(dtypes), len(places), (5.6, 2.9), title, footer, sharex=True)
    for row, dtype in zip(axes, dtypes, strict=True):
        for ax, where in zip(row, places, strict=True):
            panel = frame[(frame["where"] == where) & (frame.dtype == dtype)]
            for name in (*dict.fromkeys(panel.contender[panel.contender != "best copy"]),):
                line = panel[panel.contender == name].sort_values("seq_len")
                ax.plot(line.seq_len, line.gb_s, **drawing.look(name), markersize=7, linewidth=1.4)
            copy = panel[panel.contender == "best copy"].sort_values("seq_len")
            if len(copy):
                ax.plot(copy.seq_len, copy.gb_s, "--k", linewidth=1.2, label="best copy")
            if where == places[0]:
                ax.axhline(GB10_GB_S, color="black", linewidth=1.2, linestyle=":", label="the GB10's data sheet")
            read = f"if {dtype}" if where == places[0] else dtype
            ax.set(title=f"{where}, {read}", xscale="log", ylim=(0, None))
            ax.xaxis.set_major_locator(FixedLocator(sorted(frame.seq_len.unique())))
            ax.xaxis.set_minor_locator(NullLocator())
            ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        row[0].set_ylabel("GB/s")
    for ax in axes[-1]:
        ax.set_xlabel("sequence length (tokens)")
    drawing.legend(fig, axes, columns=4)
    return fig


def paths(launches: pd.DataFrame, footer: str = "") -> Figure:
    """The raw kernel beside the ways DeepSpeed reaches it: time in copies, launches and extra memory."""
    frame = launches.assign(copies=launches.median_us / launches.copy_us)
    raw, api = (frame[frame.path == name] for name in ("raw kernel", "DeepSpeed API"))
    slower = api.median_us / raw.median_us.iloc[0]
    title = (
        f"Through DeepSpeed's function the kernel takes {drawing.value_range(slower, '.1f')} times as long as alone: "
        f"{drawing.value_range(api.launches, 'd')} launches, "
        f"{drawing.value_range(api.extra_bytes / api.tensor_bytes, '.0f')} tensors of extra memory"
    )
    fig, axes = drawing.grid(1, 1, (11, 0.45 * len(frame) + 1.2), title, footer)
    ax = axes[0, 0]
    place = np.arange(len(frame))[::-1]
    looks = {"plain formula": "eager", "ropelab": "ropelab", "raw kernel": "torchembed"}
    colors = [drawing.look(looks.get(path, "torchembed API"))["color"] for path in frame.path]
    ax.barh(place, frame.copies, 0.6, color=colors)
    for y, row in zip(place, frame.itertuples(), strict=True):
        extra = round(row.extra_bytes / row.tensor_bytes)
        text = f"{row.launches} launch{'es' * (row.launches > 1)}, {extra} extra tensor{'s' * (extra != 1)}, "
        text += f"{row.median_us:.0f} µs"
        ax.annotate(text, (row.copies, y), (5, 0), textcoords="offset points", va="center", size=8.5)
    ax.axvline(1, color="grey", linestyle="--", linewidth=1)
    ax.set_yticks(place, frame.path + ": " + frame.input)
    ax.set(xlabel="time of a call, in times of the best copy of the tensor", xlim=(0, 1.5 * frame.copies.max()))
    ax.grid(axis="y", visible=False)
    return fig


FIGURES: dict[str, tuple[tuple[str, ...], Callable[..., Figure]]] = {
    **table_figures.FIGURES,
    "deepspeed_gradients": (("deepspeed_correctness",), gradients),
    "deepspeed_callers": (("deepspeed_callers",), callers),
    "deepspeed_paths": (("deepspeed_launches",), paths),
    "deepspeed_readings": (("deepspeed_table",), readings),
}
"""As ``ropelab.study.plots.registry.FIGURES``."""
