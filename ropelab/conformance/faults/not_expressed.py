"""Faults that no function of one process can show."""

from ropelab.conformance.faults.fault import NotExpressed

NOT_EXPRESSED = (
    NotExpressed(
        "gate_never_opens",
        "The condition of the fused path is true for single tokens only.",
        seen_in="FastVideo#1245",
        reason="its results are right, only its speed is not: a count of kernel launches shows it, no value does",
    ),
    NotExpressed(
        "three_axes_counted_as_tokens",
        "Positions along three axes are flattened, and their number is taken for that of the tokens.",
        seen_in="sgl-kernel-xpu#202",
        reason="no convention here passes positions along several axes; with one axis the count is right",
    ),
)
