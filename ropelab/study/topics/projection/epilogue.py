"""Show where an epilogue finds the two features of a pair: in which thread, and how far apart."""

import pandas as pd
import torch

from ropelab.layout.pairing import LAYOUTS, pairs

SUBTILE = 32
"""The columns of a tile that an epilogue has at hand if it works in pieces, as CUTLASS and quack do."""
WIDTHS = ((128, 128), (128, 64), (80, 80), (72, 72), (80, 20))
"""The features of a head, and those that rotate."""


def thread_of(column: torch.Tensor) -> torch.Tensor:
    """The thread, of the four that share a row, that holds a column of the accumulator of ``wgmma``.

    Two adjacent columns of every eight belong to a thread (PTX ISA, "Register Fragments and Shared Memory Matrix
    Layouts" of ``wgmma.mma_async.m64nNk16``, matrix D).
    """
    return column % 8 // 2


def meetings() -> pd.DataFrame:
    """For each width and layout: whether the features of every pair are in one thread, and in one piece of a tile.

    The last two columns say "yes" or "no".
    """
    rows, words = [], {True: "yes", False: "no"}
    for head_dim, rotary_dim in WIDTHS:
        for layout in LAYOUTS:
            first, second = pairs(torch.arange(rotary_dim), layout)
            # Heads follow one another in the columns of a tile, so the place of a head decides too.
            starts = torch.arange(4)[:, None] * head_dim
            same = (thread_of(starts + first) == thread_of(starts + second)).all().item()
            piece = ((starts + first) // SUBTILE == (starts + second) // SUBTILE).all().item()
            rows.append({
                "head_dim": head_dim, "rotary_dim": rotary_dim, "layout": layout,
                "columns apart": int((second - first).abs().max()),
                "one thread": words[same], "one piece": words[piece],
            })  # fmt: skip
    return pd.DataFrame(rows)
