"""A catalogue of faults: short, wrong implementations of RoPE, each with its source.

The catalogue can be read, as a list of mistakes, and run, to see whether a test finds them. Reading order: `fault` and
`correct`, then a file for each theme, then `controls` and `not_expressed`.
"""

from importlib.util import find_spec
from types import ModuleType

from ropelab.kernels import INTERPRETED
from ropelab.study.faults import (
    backward,
    layout_and_pairing,
    memory,
    packed_and_parallel,
    positions,
    tables_and_precision,
)
from ropelab.study.faults.controls import CONTROLS, Control
from ropelab.study.faults.fault import Fault, NotExpressed
from ropelab.study.faults.not_expressed import NOT_EXPRESSED

THEMES = {
    "backward": backward,
    "layout and pairing": layout_and_pairing,
    "positions": positions,
    "packed and parallel": packed_and_parallel,
    "memory": memory,
    "tables and precision": tables_and_precision,
}
if find_spec("triton"):  # only the faults of kernels need it
    from ropelab.study.faults import triton_kernels

    THEMES["kernels"] = triton_kernels


AGREEMENT = ("definition", "feature_columns", "rounding", "large_positions", "extents", "token_counts")
"""The laws that compare with the definition; all other laws ask for consistency. (The law ``huge`` compares with the
definition, too, but it finds wrong addresses and no wrong formula.)"""


def _of(module: ModuleType) -> tuple[Fault, ...]:
    return tuple(value for value in vars(module).values() if isinstance(value, Fault))


FAULTS: dict[str, Fault] = {fault.name: fault for module in THEMES.values() for fault in _of(module)}
"""Name -> fault, theme by theme."""


def runs_on(fault: Fault, device: str) -> bool:
    """Return whether ``fault`` can run on ``device``: a kernel needs a GPU or Triton's interpreter."""
    return not fault.triton or device.startswith("cuda") or INTERPRETED


__all__ = ["AGREEMENT", "CONTROLS", "FAULTS", "NOT_EXPRESSED", "THEMES", "Control", "Fault", "NotExpressed", "runs_on"]
