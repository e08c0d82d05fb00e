"""The contenders of the records of DeepSpeed#8052, and the width of their heads."""

TORCHEMBED, FORMULA, OURS = "DeepSpeed with torchembed", "DeepSpeed without torchembed", "ropelab"

HEADS, HEAD_DIM = 4, 64
DIRECTIONS = ("forward", "backward")
