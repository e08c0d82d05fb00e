"""Measure how close QK norm with a rotation, and its gradients, come to the bounds of `norm_bounds`."""

import itertools
from collections.abc import Sequence

import pandas as pd
import torch

from ropelab import apply_qk_norm_rope, rotary_table
from ropelab.conformance.bounds import exact, fraction, table_dtype
from ropelab.layout.pairing import LAYOUTS, permutation
from ropelab.study.topics.gradients.bound_evidence import DTYPES, arithmetic, device, short_name
from ropelab.study.topics.gradients.norm_bounds import norm_rope
from ropelab.study.topics.proofs.angles import exact_tables

NAMES = tuple(map(short_name, DTYPES))
HEADS, HEAD_DIM, TOKENS, FIRST, EPS = 3, 32, 8, 4000, 1e-6


def norm_evidence(dtypes: Sequence[str] = NAMES, *, wrong: str = "") -> pd.DataFrame:
    """The worst errors as fractions of the derived bounds.

    Args:
        wrong: "forward", "no mean" or "last row" damages the measured results: a gradient that is rotated as in the
            forward, that lacks the term of the mean, or whose weights miss the last row. The bounds must reject it.

    Returns:
        Columns law, dtype, layout, fraction (at most 1 if the law holds to rounding).
    """
    rows = []
    for name, layout in itertools.product(dtypes, LAYOUTS):
        dtype = getattr(torch, name)
        found = _measured(dtype, layout, wrong)
        rows += [{"law": law, "dtype": name, "layout": layout, "fraction": f} for law, f in found.items()]
    return pd.DataFrame(rows)


def _measured(dtype: torch.dtype, layout: str, wrong: str) -> dict[str, float]:
    generator = torch.Generator().manual_seed(0)
    shape = 1, TOKENS, HEADS, HEAD_DIM
    x, g = (torch.randn(shape, generator=generator, dtype=torch.float64).to(device(), dtype) for _ in range(2))
    w = torch.randn(HEAD_DIM, generator=generator, dtype=torch.float64).to(device(), dtype)
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    cos, sin = rotary_table(FIRST + TOKENS, HEAD_DIM, dtype=table_dtype(dtype), device=device())
    y, _ = apply_qk_norm_rope(
        leaves[0], x[:, :, :1], leaves[1], w, cos=cos, sin=sin, offsets=FIRST, eps=EPS, layout=layout
    )
    dx, dw = torch.autograd.grad(y, leaves, g)
    # The bounds know halves. Sums over a head hold in any order, so the features may change places.
    order = permutation(HEAD_DIM, layout, "split_half").to(device())
    flat = [exact(t[..., order]).reshape(-1, HEAD_DIM) for t in (x, g, w, y.detach(), dx, dw)]
    x, g, w, y, dx, dw = (*flat[:2], flat[2][0], *flat[3:])
    (c, s), error = exact_tables(range(FIRST, FIRST + TOKENS), HEAD_DIM)
    c, s, error = (t.repeat(HEADS, 1).reshape(-1, HEAD_DIM // 2) for t in (c, s, error))
    right = norm_rope(x, g, w, c, s, EPS, arithmetic(dtype), error)
    if wrong == "forward":
        dx = norm_rope(x, g, w, c, -s, EPS, arithmetic(dtype), error).dx[0]
    elif wrong == "no mean":
        back = norm_rope(x, g, w, c, s, EPS, arithmetic(dtype), error)
        dx = dx + x * ((x * back.dx[0]).sum(-1, keepdims=True) + (x * x).mean(-1, keepdims=True))
    elif wrong == "last row":
        dw = norm_rope(x[:-1], g[:-1], w, c[:-1], s[:-1], EPS, arithmetic(dtype), error[:-1]).dw[0]
    return {
        "y = R N(x)": fraction(y - right.y[0], right.y[1]),
        "∂L/∂x": fraction(dx - right.dx[0], right.dx[1]),
        "∂L/∂w": fraction(dw - right.dw[0], right.dw[1]),
    }
