"""Known faults that no function in the catalogue can show."""

from ropelab.study.faults.fault import NotExpressed

NOT_EXPRESSED = (
    NotExpressed(
        "gate_never_opens",
        "The condition of the fused path is true for single tokens only.",
        seen_in="FastVideo#1245",
        reason="its results are right; only a count of kernel launches shows that it is slow",
    ),
    NotExpressed(
        "three_axes_counted_as_tokens",
        "Positions along three axes are flattened, and the number of positions is taken for the number of tokens.",
        seen_in="sgl-kernel-xpu#202",
        reason="it writes past the ends of q and k, as no torch operation does; the law `guards` looks there",
    ),
)
