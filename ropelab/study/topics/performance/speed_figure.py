"""Draw the figure of README.md: the speed of each contender as a fraction of a copy, as SVG.

The SVG is written without a library for plots, so its text is the same with every version of such a library. A test can
compare the files with the records.
"""

from collections.abc import Mapping
from html import escape

import pandas as pd

THEMES = {
    "light": {"ink": "#1f2328", "quiet": "#59636e", "rule": "#d1d9e0", "ours": "#0b6bcb", "others": "#6e7781"},
    "dark": {"ink": "#f0f6fc", "quiet": "#9198a1", "rule": "#3d444d", "ours": "#58a6ff", "others": "#9198a1"},
}
"""Theme -> the colours of text, lines and dots. The figure has the background of the page."""
WIDTH, LEFT, RIGHT, TOP, ROW = 640, 140, 560, 66, 30
"""Pixels: the width of the figure, the places of the fractions 0 and 1, the top of the rows, a row's height."""
_MARKS = "a dot is a size, layout and direction, a stroke the median"
TICKS = (0, 0.25, 0.5, 0.75, 1)


def medians(fractions: Mapping[str, pd.Series]) -> dict[str, float]:
    """The median of each contender's fractions, the fastest contender first."""
    found = {name: float(values.median()) for name, values in fractions.items()}
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def words(fractions: Mapping[str, pd.Series], machine: str) -> str:
    """The figure in a sentence, for a reader who does not see the figure."""
    each = ", ".join(f"{name} {median:.2f}" for name, median in medians(fractions).items())
    return f"Speed as a fraction of a copy of the same bytes on {machine}, median of all cases: {each}."


def svg(fractions: Mapping[str, pd.Series], machine: str, stamp: str, theme: str) -> str:
    """The figure: a row for each contender, a dot for each case, a stroke and a number for their median.

    Args:
        fractions: label of a contender -> its fractions of a copy, one for each case. The first contender is ours.
        machine: the GPU that was measured.
        stamp: the words on the record.
        theme: a name of `THEMES`.
    """
    color, ours = THEMES[theme], next(iter(fractions))
    bottom = TOP + ROW * len(fractions)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 28}" role="img" '
        'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" font-size="15">',
        f"<title>{escape(words(fractions, machine))}</title>",
        f"<desc>{escape(stamp)}</desc>",
        _text(0, 20, "Speed as a fraction of a copy", color["ink"], 'font-weight="600" font-size="17"'),
        _text(0, 42, f"{machine}, bf16; {_MARKS}", color["quiet"], 'font-size="12"'),  # fits in the widest letters, too
    ]
    for tick in TICKS:
        dashed = ' stroke-dasharray="5 3"' if tick == 1 else ""
        line = color["ink"] if tick == 1 else color["rule"]
        lines.append(f'<path d="M{_x(tick)} {TOP}V{bottom}" stroke="{line}"{dashed}/>')
        name = "1, a copy" if tick == 1 else f"{tick:g}"
        lines.append(_text(_x(tick), bottom + 20, name, color["quiet"], 'text-anchor="middle"'))
    for row, (name, median) in enumerate(medians(fractions).items()):
        y, own = TOP + ROW * row + ROW // 2, name == ours
        fill = color["ours" if own else "others"]
        weight = 'font-weight="600"' if own else ""
        dots = "".join(f"M{x} {y}h0" for x in sorted(set(map(_x, fractions[name]))))
        lines += [
            _text(0, y + 5, name, color["ink"], weight),
            f'<path d="{dots}" stroke="{fill}" stroke-width="9" stroke-linecap="round" opacity=".45"/>',
            f'<path d="M{_x(median)} {y - 10}v20" stroke="{fill}" stroke-width="3"/>',
            _text(WIDTH, y + 5, f"{median:.2f}", color["ink"], f'text-anchor="end" {weight}'.strip()),
        ]
    return "\n".join([*lines, "</svg>\n"])


def _x(fraction: float) -> int:
    return round(LEFT + fraction * (RIGHT - LEFT))


def _text(x: int, y: int, text: str, fill: str, style: str = "") -> str:
    return f'<text x="{x}" y="{y}" fill="{fill}"{" " * bool(style)}{style}>{escape(text)}</text>'
