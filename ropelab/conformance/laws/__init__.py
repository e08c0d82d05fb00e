"""The laws, a file for each theme; the themes below are in reading order."""

from ropelab.conformance.law import Law
from ropelab.conformance.laws import addressing, algebra, gradients, independence, memory, numerics, robustness

THEMES = {
    "the rotation": algebra,
    "gradients": gradients,
    "memory": memory,
    "independence": independence,
    "positions": addressing,
    "numbers": numerics,
    "the ends of the range": robustness,
}
"""Theme -> the module with its laws."""

LAWS: dict[str, Law] = {v.name: v for theme in THEMES.values() for v in vars(theme).values() if isinstance(v, Law)}
"""Name -> law, theme by theme."""
