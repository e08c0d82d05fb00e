"""fairseq2's rotary encoders over the kernel. Read the files in this order:

1. `layouts` describes a batch: which elements are tokens, and their positions.
2. `contract` holds the arguments, the tables and the positions that all encoders share.
3. `kernel` holds `KernelRotaryEncoder`: the contract of fairseq2's ``RotaryEncoder``, in both layouts.
4. `dual` and `yarn` hold `DualRotaryEncoder` and `YaRNRotaryEncoder`, as fairseq2 names them.
"""

from ropelab.interop.fairseq2.contract import LAYOUTS, Impl
from ropelab.interop.fairseq2.dual import DualRotaryEncoder
from ropelab.interop.fairseq2.kernel import KernelRotaryEncoder
from ropelab.interop.fairseq2.layouts import BatchLayout, SeqsLayout, StateBag
from ropelab.interop.fairseq2.yarn import YaRNRotaryEncoder

__all__ = [
    "LAYOUTS", "BatchLayout", "DualRotaryEncoder", "Impl", "KernelRotaryEncoder", "SeqsLayout", "StateBag",
    "YaRNRotaryEncoder",
]  # fmt: skip
