"""Faulty implementations of RoPE, as they were found in the wild: each a few lines, with its citation.

Read them as a catalogue of what goes wrong, run them to see whether a test would notice.
"""

from importlib.util import find_spec
from types import ModuleType

from ropelab.conformance.faults import (
    backward,
    layout_and_pairing,
    memory,
    packed_and_parallel,
    positions,
    tables_and_precision,
)
from ropelab.conformance.faults.controls import CONTROLS, Control
from ropelab.conformance.faults.fault import Fault, NotExpressed
from ropelab.conformance.faults.not_expressed import NOT_EXPRESSED
from ropelab.kernels import INTERPRETED

THEMES = {
    "backward": backward,
    "layout and pairing": layout_and_pairing,
    "positions": positions,
    "packed and parallel": packed_and_parallel,
    "memory": memory,
    "tables and precision": tables_and_precision,
}
if find_spec("triton"):  # the catalogue without kernels does not need it
    from ropelab.conformance.faults import triton_kernels

    THEMES["kernels"] = triton_kernels


AGREEMENT = ("definition", "rounding", "large_positions")
"""Laws that compare with the definition, at one position or dtype or another; all others ask for consistency. (Far
elements are compared with it too, by ``huge``, which finds wrong addresses and no wrong formula.)"""


def _of(module: ModuleType) -> tuple[Fault, ...]:
    return tuple(value for value in vars(module).values() if isinstance(value, Fault))


FAULTS: dict[str, Fault] = {fault.name: fault for module in THEMES.values() for fault in _of(module)}
"""Name -> fault, theme by theme."""


def runs_on(fault: Fault, device: str) -> bool:
    """Whether ``fault`` can run there: kernels need a GPU or Triton's interpreter."""
    return not fault.triton or device.startswith("cuda") or INTERPRETED


__all__ = ["AGREEMENT", "CONTROLS", "FAULTS", "NOT_EXPRESSED", "THEMES", "Control", "Fault", "NotExpressed", "runs_on"]
