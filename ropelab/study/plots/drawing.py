"""What the figures of the measurements share: one look for each implementation, panels, titles, the foot."""

import textwrap
from collections.abc import Iterable

import matplotlib as mpl
import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from ropelab.bench.copies import PREFIX

COLORBLIND = sns.color_palette("colorblind")
LAYOUT = {"split_half": "split-half", "interleaved": "interleaved"}
DIRECTIONS = ("forward", "backward")
ORDERS = {
    "layout": ("split_half", "interleaved"),
    "direction": ("forward", "backward", "forward and backward"),
    "dtype": ("bfloat16", "float32"),
}
"""Column -> the order of its values in a figure."""

# Contender -> label, colour (of the palette above), marker; two names of one thing share the latter two.
_LOOKS = {
    "ropelab": ("ropelab", 0, "o"),
    "ropelab in place": ("ropelab, in place", 9, "P"),
    "ropelab with positions": ("ropelab, positions found too", 9, "P"),
    "flash_attn": ("flash-attn", 1, "s"),
    "liger": ("Liger, in place", 6, "D"),
    "torchembed": ("torchembed, kernel", 2, "v"),
    "torchembed API": ("torchembed, module", 8, "^"),
    "torchembed 0.3.2": ("torchembed 0.3.2", 2, "v"),
    "torchembed 0.3.0": ("torchembed 0.3.0", 8, "^"),
    "complex": ("complex product", 4, "*"),
    "transformers": ("transformers' own", 7, "d"),
    "rotary-embedding-torch": ("rotary-embedding-torch", 5, "<"),
    "transformer_engine": ("TransformerEngine", 5, ">"),
    "flashinfer": ("FlashInfer", 4, "X"),
    "vllm": ("vLLM, in place", 5, "D"),
    "token-linear, reads twice": ("token-linear (model)", 2, "^"),
    "legacy grid": ("legacy grid (model)", 5, "v"),
    "compile": ("torch.compile", 3, "X"),
    "hf_compiled": ("formula, torch.compile", 3, "X"),
    "compiled separate": ("norm, then formula, torch.compile", 3, "X"),
    "compiled together": ("both in one torch.compile", 2, "v"),
    "eager": ("eager formula", 7, "p"),
    "hf_eager": ("formula, eager", 7, "p"),
    "eager separate": ("norm, then formula, eager", 7, "p"),
}
_TITLE_LETTERS_PER_INCH, _SMALL_LETTERS_PER_INCH = 9, 15  # of bold 12 and of 8 points, on the safe side
_STYLE = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "figure.titlesize": 12,
    "svg.fonttype": "none",
}


def label(name: str) -> str:
    return _LOOKS[name][0] if name in _LOOKS else name


def look(name: str) -> dict[str, object]:
    """Label, colour and marker of a contender, for matplotlib."""
    _, color, marker = _LOOKS.get(name, (name, 7, "h"))
    return {"label": label(name), "color": COLORBLIND[color], "marker": marker}


def timed(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows that have a time."""
    return frame[(frame.status == "ok") & frame.median_us.notna()]


def copies(times: pd.DataFrame) -> pd.DataFrame:
    return times[times.contender.str.startswith(PREFIX)]


def contenders(times: pd.DataFrame) -> Iterable[tuple[str, pd.DataFrame]]:
    """Those that are no copies, in the order of the legend."""
    names = [name for name in dict.fromkeys(times.contender) if not name.startswith(PREFIX)]
    known = list(_LOOKS)
    for name in sorted(names, key=lambda n: known.index(n) if n in known else len(known)):
        yield name, times[times.contender == name]


def ordered(values: pd.Series, order: Iterable[str]) -> list[str]:
    """Those of ``order`` that occur."""
    present = set(values)
    return [value for value in dict.fromkeys(order) if value in present]


def value_range(values: pd.Series, spec: str) -> str:
    """``"0.93 to 0.98"``, or one number where they are the same."""
    low, high = format(values.min(), spec), format(values.max(), spec)
    return low if low == high else f"{low} to {high}"


def grid(rows: int, columns: int, size: tuple[float, float], title: str, footer: str, **share):
    """A figure of its own (unknown to pyplot, so that a notebook shows it once) and its axes, always 2-D."""
    with sns.axes_style("whitegrid", rc=_STYLE), mpl.rc_context(_STYLE):
        fig = Figure(figsize=(columns * size[0], rows * size[1] + 1.1), layout="constrained")
        axes = fig.subplots(rows, columns, squeeze=False, **share)
        fig.suptitle(_wrapped(title, fig.get_figwidth()), x=0.01, ha="left", fontweight="bold")
        if footer:
            fig.text(0.99, 0.004, footer, ha="right", va="bottom", size=8, color="0.35")
        margin = 0.3 / fig.get_figheight()  # inches, for the footer
        fig.get_layout_engine().set(rect=(0, margin, 1, 1 - margin))
    return fig, axes


def _wrapped(title: str, inches: float) -> str:
    width = int(_TITLE_LETTERS_PER_INCH * inches)
    return "\n".join(textwrap.fill(line, width) for line in title.split("\n"))


def legend(fig: Figure, axes: np.ndarray, columns: int = 6, size: float | None = None) -> None:
    """One legend for all panels, below them."""
    entries: dict[str, object] = {}
    for ax in axes.flat:
        for handle, text in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(text, handle)
    # The pad, in font sizes, leaves room for the footer below the legend.
    options = {"loc": "outside lower center", "borderaxespad": 2, "frameon": False}
    found = fig.legend(entries.values(), entries.keys(), ncols=columns, **options)
    if size is not None:
        for handle in found.legend_handles:
            handle.set_markersize(size)


def say_untimed(fig: Figure, frame: pd.DataFrame) -> None:
    """Name the contenders that have no time, and why, at the foot of the figure, left of its footer."""
    untimed = frame[frame.status != "ok"]
    reasons = untimed.status.str.split(" has relative error").str[0].map(_short)
    found = [
        f"{label(name)} ({reason})"
        for name, reason in dict.fromkeys(zip(untimed.contender, reasons, strict=True))
    ]  # fmt: skip
    if not found:
        return
    footer = max((len(text.get_text()) for text in fig.texts if text.get_ha() == "right"), default=0)
    width = max(40, int(_SMALL_LETTERS_PER_INCH * fig.get_figwidth()) - footer)
    lines = textwrap.wrap("not shown: " + ", ".join(found), width)
    fig.text(0.01, 0.004, "\n".join(lines), ha="left", va="bottom", size=8, color="0.35")
    more = 0.95 * (len(lines) - 1)  # font sizes of the legend; the lines are smaller
    for entries in fig.legends:
        entries.borderaxespad += more
    engine = fig.get_layout_engine()  # which keeps no room for that pad
    x, y, width, height = engine.get()["rect"]
    room = more * _STYLE["font.size"] / 72 / fig.get_figheight()
    engine.set(rect=(x, y + room, width, height - room))


def _short(reason: str) -> str:
    return textwrap.shorten(reason, 60, placeholder=" …")


def plain_log(axis) -> None:
    """Powers and halves of ten as plain numbers: 20, 50, 100, 200."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_locator(NullLocator())
