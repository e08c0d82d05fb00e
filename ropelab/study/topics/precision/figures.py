"""Figures of what cos and sin lose: measured errors beside their bounds, what that does to scores, models and memory.

Each takes what `precision_findings` computed and returns a figure whose title states the finding.
"""

import math

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from ropelab.study.plots import drawing
from ropelab.study.topics.precision import findings
from ropelab.study.topics.precision.findings import LOSSES, OURS, USUAL

# Method -> colour (of the palette) and marker; others take the last.
_LOOKS = {
    "bf16 positions": (3, "v"),
    "bf16 frequencies": (1, "s"),
    "TF32, emulated": (4, "^"),
    "TF32 matmul": (4, "<"),
    "TF32 batched matmul": (8, ">"),
    "TF32 matmul, padded": (6, "p"),
    "fast-math sincos": (5, "D"),
    "fp32 angles": (0, "o"),
    "bf16 tables": (7, "X"),
    OURS: (2, "P"),
    "table-free kernel": (9, "*"),
}
_OTHER = (8, "h")
_SIZE = (6.2, 4.6)


def rotations(found: pd.DataFrame, footer: str = "", *, title: str | None = None) -> Figure:
    """Largest error of an angle and of a rotated pair in each octave of positions, each with its bound."""
    fig, axes = drawing.grid(1, 2, _SIZE, findings.sentence(found) if title is None else title, footer, sharex=True)
    left, right = axes[0]
    _curves(left, found, "angle")
    _curves(right, found, "output")
    for place, (name, radians) in enumerate(LOSSES.items()):
        _line(left, radians, name, 0.01 + 0.09 * place)
    _line(right, findings.BF16_ROUNDING, "storing in bf16 rounds by this")
    _line(right, findings.FP32_ROUNDING, "storing in fp32 rounds by this", 0.6)
    left.set(ylabel="largest error of an angle (rad)", title="The angle, full turns included")
    right.set(ylabel="largest error over the length of the pair", title="A rotated pair of features")
    _finish(fig, axes, "position (tokens; largest error of each octave)")
    return fig


def on_gpu(found: pd.DataFrame, footer: str = "") -> Figure:
    """The methods that need a GPU, as measured on one, and float32 angles for comparison."""
    shown = found[(found.status == "ok") & found.method.isin([*findings.ON_GPU, USUAL])]
    fig = rotations(shown, footer, title=findings.gpu_sentence(found))
    drawing.say_untimed(fig, found.rename(columns={"method": "contender"}))
    return fig


def law(found: pd.DataFrame, footer: str = "") -> Figure:
    """How scores of pairs at fixed distances change as both tokens move, and how far they are from right."""
    distances = list(found.distance.unique())
    title = findings.law_sentence(found)
    fig, axes = drawing.grid(len(distances), 2, (_SIZE[0], 4.0), title, footer, sharex=True, sharey=True)
    for row, distance in zip(axes, distances, strict=True):
        part = found[found.distance == distance]
        tokens = f"{distance:,} token{'s' if distance > 1 else ''} apart"
        for ax, column, what in zip(
            row, ("moved", "off"), ("change since position 0: the law", "error: the right score"), strict=True
        ):
            _curves(ax, part, column, error=column)
            ax.set_title(f"{tokens}, {what}")
        row[0].set_ylabel("of the largest possible score")
    _finish(fig, axes, "position of the key (tokens; largest of each octave)")
    return fig


def attention(found: pd.DataFrame, footer: str = "") -> Figure:
    """Errors of the scores and of the attention weights of random queries, each with its bound."""
    fig, axes = drawing.grid(1, 2, _SIZE, findings.attention_sentence(found), footer, sharex=True)
    left, right = axes[0]
    _curves(left, found, "score")
    _curves(right, found, "weights")
    left.set(ylabel="largest error of a score (logit)", title="Scores before the softmax")
    right.set(ylabel="share of the attention moved", title="Attention weights: share that goes to other keys")
    _finish(fig, axes, "position of the query (tokens; largest of each octave)")
    return fig


def models(found: pd.DataFrame, footer: str = "") -> Figure:
    """Right bits of a rotated pair at every model's longest context (rows), for each method."""
    bits = found.pivot(index="model", columns="method", values="bits")
    bits = bits.reindex(index=list(dict.fromkeys(found.model)), columns=list(dict.fromkeys(found.method)))
    lengths = found.drop_duplicates("model").set_index("model").length
    bits = bits.loc[lengths.sort_values(kind="stable").index]
    size = (4.4 + 1.15 * bits.shape[1], 0.3 * len(bits) + 0.9)
    fig, axes = drawing.grid(1, 1, size, findings.models_sentence(found), footer)
    ax = axes[0, 0]
    ax.imshow(bits, aspect="auto", cmap="cividis", vmin=0, vmax=24)
    for row, values in enumerate(bits.itertuples(index=False)):
        for column, value in enumerate(values):
            ax.text(column, row, f"{value:.1f}" if value else "none", ha="center", va="center", size=9,
                    color="black" if value > 14 else "white")  # fmt: skip
    ax.set_xticks(range(bits.shape[1]), [name.replace(" ", "\n", 1) for name in bits.columns], size=9)
    ax.set_yticks(range(len(bits)), [f"{name}   {lengths[name]:,}" for name in bits.index], size=9)
    ax.xaxis.tick_top()
    ax.tick_params(length=0)
    ax.grid(False)
    ax.set_xlabel("right bits of a rotated pair (worst plane and position) at the model's longest context, in tokens")
    return fig


def memory(found: pd.DataFrame, errors: pd.DataFrame, footer: str = "") -> Figure:
    """Bytes of cos and sin against length; and at the longest, bytes against error."""
    last = found.positions.max()
    fig, axes = drawing.grid(1, 2, _SIZE, findings.memory_sentence(found), footer)
    left, right = axes[0]
    for name, part in found.groupby("method", sort=False):
        color, marker = _look(name)
        left.plot(part.positions, part.bytes, color=color, marker=marker, markersize=5, linewidth=1.3)
    note = "without a table: the frequencies"
    left.annotate(note, (1, found.bytes.min()), (4, 6), textcoords="offset points", size=9)
    left.margins(y=0.08)
    left.set(xlabel="positions (tokens)", ylabel="bytes of cos and sin, or of the frequencies",
             title="What they take")  # fmt: skip
    left.set_yscale("log", base=2)
    left.yaxis.set_major_locator(FixedLocator([2**k for k in range(8, 33, 4)]))
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _bytes(value)))
    _positions_axis(left, found.positions)

    at_last = found[found.positions == last].set_index("method").bytes
    worst = errors[errors.position == errors.position.max()].set_index("method").output_error
    for name in worst.index.intersection(at_last.index, sort=False):
        color, marker = _look(name)
        right.plot(at_last[name], worst[name], marker, color=color, markersize=9, label=name, linestyle="none")
    right.set_xscale("log", base=2)
    right.xaxis.set_major_locator(FixedLocator([2**k for k in range(8, 33, 8)]))
    right.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _bytes(value)))
    right.xaxis.set_minor_locator(NullLocator())
    right.set(yscale="log", xlabel=f"bytes for {last:,} positions", ylabel="largest error of a rotated pair",
              title="What they take and what they give")  # fmt: skip
    right.margins(0.12)
    drawing.legend(fig, axes[:, 1:], columns=4)
    return fig


# ---------------------------------------------------------------------------------------------------------- helpers


def _look(name: str) -> tuple[object, str]:
    color, marker = _LOOKS.get(name, _OTHER)
    return drawing.COLORBLIND[color], marker


def _curves(ax, found: pd.DataFrame, quantity: str, *, error: str | None = None) -> None:
    """Measured values with markers, their bounds dashed, against the position."""
    for name, part in found.groupby("method", sort=False):
        color, marker = _look(name)
        part = part.sort_values("position")
        ax.plot(part.position, part[error or f"{quantity}_error"], color=color, marker=marker, markersize=4.5,
                linewidth=1.3, label=name)  # fmt: skip
        ax.plot(part.position, part[f"{quantity}_bound"], color=color, linestyle=(0, (4, 2)), linewidth=1, alpha=0.8)
    ax.set_yscale("log")
    _positions_axis(ax, found.position)


def _positions_axis(ax, positions: pd.Series) -> None:
    ax.set_xscale("log", base=2)
    first, last = (round(math.log2(value)) for value in (positions.min(), positions.max()))
    ax.xaxis.set_major_locator(FixedLocator([2**k for k in range(first, last + 1, 4)]))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    ax.xaxis.set_minor_locator(NullLocator())


def _line(ax, height: float, text: str, place: float = 0.01) -> None:
    ax.axhline(height, color="0.25", linewidth=0.9, linestyle=":")
    ax.annotate(text, (place, height), (0, 2), xycoords=("axes fraction", "data"), textcoords="offset points", size=8,
                color="0.25")  # fmt: skip


def _finish(fig: Figure, axes, label: str) -> None:
    for ax in axes[-1]:
        ax.set_xlabel(label)
    axes[0, 0].plot([], [], color="0.3", linestyle=(0, (4, 2)), linewidth=1, label="its derived bound")
    drawing.legend(fig, axes, columns=5)


def _bytes(value: float) -> str:
    for factor, unit in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if value >= factor:
            return f"{value / factor:g} {unit}"
    return f"{value:g} B"
