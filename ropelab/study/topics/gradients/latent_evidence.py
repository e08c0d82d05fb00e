"""Measure how close the gradients of `ropelab.assemble_mla_kv` come to their bounds.

All heads of multi-head latent attention share the part of the key that rotates, so its gradient is a sum over heads.
"""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import sympy as sp
import torch

import ropelab
from ropelab.conformance.bounds import exact, fraction, rotate_exactly, rotation_bound, table_dtype
from ropelab.layout.pairing import LAYOUTS, pairs
from ropelab.study.topics.algebra import plane_rotation
from ropelab.study.topics.gradients.bound_evidence import DTYPES, Pair, arithmetic, device, short_name
from ropelab.study.topics.gradients.latent_bounds import shared_gradient_bound
from ropelab.study.topics.proofs.angles import exact_tables

HEADS, NOPE_DIM, ROTARY_DIM, VALUE_DIM, TOKENS, FIRST = 40, 8, 16, 8, 4, 4000


def symbolic_gradient(heads: int = 3) -> dict[str, sp.Matrix]:
    """Equations of one pair of features, as differences that must be zero.

    The key of every head is ``(k_h, R pe)`` with one feature ``k_h`` that does not rotate, and the gradient of the loss
    with respect to the key is ``(a_h, g_h)``.
    """
    theta = sp.symbols("theta", real=True)
    pe = sp.Matrix(sp.symbols("p_0 p_1", real=True))
    kept = sp.Matrix(sp.symbols(f"k_1:{heads + 1}", real=True))
    key = sp.Matrix([row for k in kept for row in (k, *(plane_rotation(theta) * pe))])
    a = sp.Matrix(sp.symbols(f"a_1:{heads + 1}", real=True))
    g = [sp.Matrix(sp.symbols(f"g_{h}0 g_{h}1", real=True)) for h in range(1, heads + 1)]
    cotangent = sp.Matrix([row for h in range(heads) for row in (a[h], *g[h])])
    total = sum(g[1:], g[0])
    of_pe = key.jacobian(pe).T * cotangent
    return {
        r"\frac{\partial L}{\partial k_{pe}} = \sum_h R(\theta)^T g_h = R(-\theta) \sum_h g_h": (
            of_pe - plane_rotation(-theta) * total
        ),
        r"\frac{\partial L}{\partial k_h} = a_h": key.jacobian(kept).T * cotangent - a,
        r"\left( \frac{\partial}{\partial g_h} \frac{\partial L}{\partial k_{pe}} \right)^T p = R(\theta)\, p": (
            of_pe.jacobian(g[0]).T * pe - plane_rotation(theta) * pe
        ),
    }


def latent_evidence(dtypes=DTYPES) -> pd.DataFrame:
    """The worst error of the key and of both gradients as a fraction of the derived bound.

    Returns:
        Columns law, dtype, layout (of the inputs), fraction (at most 1 if the law holds to rounding; infinite if a
        feature that only moves changes).
    """
    rows = []
    for dtype, layout in itertools.product(dtypes, LAYOUTS):
        laws = _measured(dtype, layout)
        rows += [{"law": law, "dtype": short_name(dtype), "layout": layout, "fraction": f} for law, f in laws.items()]
    return pd.DataFrame(rows)


def fault_evidence(dtypes=(torch.bfloat16, torch.float32)) -> pd.DataFrame:
    """The errors of wrong gradients of the shared part, on the scale of `latent_evidence`.

    Returns:
        Columns fault, dtype, fraction.
    """
    rows = []
    for dtype in dtypes:
        _, _, key_grad, _ = _inputs(dtype)
        g = [exact(half) for half in pairs(key_grad[..., NOPE_DIM:], "split_half")]
        (c, s), angle_error = _cos_sin()
        truth = rotate_exactly(*(half.sum(-2) for half in g), c, -s)
        bound = shared_gradient_bound(*g, c, s, arithmetic(dtype), angle_error)
        halves = pairs(key_grad[..., NOPE_DIM:], "split_half")
        rounded = [exact(half.bfloat16().sum(-2, dtype=torch.bfloat16)) for half in halves]
        wrong = {
            "the last head left out": rotate_exactly(*(half[..., :-1, :].sum(-2) for half in g), c, -s),
            "the mean in place of the sum": tuple(t / HEADS for t in truth),
            "rotated as in the forward": rotate_exactly(*(half.sum(-2) for half in g), c, s),
            "sum in bfloat16": rotate_exactly(*rounded, c, -s),
        }
        for fault, found in wrong.items():
            rows.append({"fault": fault, "dtype": short_name(dtype), "fraction": _worst(found, truth, bound)})
    return pd.DataFrame(rows)


def _measured(dtype: torch.dtype, layout: str) -> dict[str, float]:
    kv, k_pe, key_grad, value_grad = _inputs(dtype)
    leaves = [x.clone().requires_grad_() for x in (kv, k_pe)]
    tables = ropelab.rotary_table(FIRST + TOKENS, ROTARY_DIM, dtype=table_dtype(dtype), device=device())
    where = {"cos": tables[0], "sin": tables[1], "offsets": FIRST}
    results = []
    for copy_value in (True, False):
        key, value = ropelab.assemble_mla_kv(
            *leaves, NOPE_DIM, layout=layout, out_layout="split_half", copy_value=copy_value, **where
        )
        results.append([key, value, *torch.autograd.grad((key, value), leaves, (key_grad, value_grad))])
    key, value, dkv, dk_pe = results[0]
    (c, s), angle_error = _cos_sin()
    x = [np.broadcast_to(exact(half), (1, TOKENS, HEADS, ROTARY_DIM // 2)) for half in pairs(k_pe, layout)]
    g = [exact(half) for half in pairs(key_grad[..., NOPE_DIM:], "split_half")]
    turned = [exact(half) for half in pairs(key[..., NOPE_DIM:], "split_half")]
    of_heads = c[:, None], s[:, None]
    forward = (rotate_exactly(*x, *of_heads), rotation_bound(*x, *of_heads, arithmetic(dtype), angle_error[:, None]))
    found = [exact(half[..., 0, :]) for half in pairs(dk_pe, layout)]
    truth = rotate_exactly(*(half.sum(-2) for half in g), c, -s)
    bound = shared_gradient_bound(*g, c, s, arithmetic(dtype), angle_error)
    pair = [exact(half[..., 0, :]) for half in pairs(k_pe, layout)]
    # <A (0, pe), g> = <pe, A^T g>, pair by pair. The error of a side is the error of the assembly in it.
    gap = sum((turned[i] * g[i]).sum(-2) - pair[i] * found[i] for i in (0, 1))
    allowed = sum((abs(g[i]) * forward[1][i]).sum(-2) + abs(pair[i]) * bound[i] for i in (0, 1))
    moved = (key[..., :NOPE_DIM], kv[..., :NOPE_DIM]), (value, kv[..., NOPE_DIM:])
    moved = *moved, (dkv[..., :NOPE_DIM], key_grad[..., :NOPE_DIM]), (dkv[..., NOPE_DIM:], value_grad)
    return {
        "key = (k, R pe)": _worst(turned, *forward),
        "∂L/∂pe = Rᵀ Σ g": _worst(found, truth, bound),
        "⟨A x, g⟩ = ⟨x, Aᵀg⟩": fraction(gap, allowed),
        "what moves keeps its bits": 0.0 if all(torch.equal(x, y) for x, y in moved) else float("inf"),
        "a view of v changes no bit": 0.0 if all(map(torch.equal, *results)) else float("inf"),
    }


def _inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    """kv, k_pe and the gradients of key and value: normally distributed; the pairs of the key's gradient are halves."""
    generator = torch.Generator().manual_seed(0)
    sizes = (HEADS, NOPE_DIM + VALUE_DIM), (1, ROTARY_DIM), (HEADS, NOPE_DIM + ROTARY_DIM), (HEADS, VALUE_DIM)
    draw = (torch.randn(1, TOKENS, *size, generator=generator, dtype=torch.float64) for size in sizes)
    return [x.to(device(), dtype) for x in draw]


def _cos_sin() -> tuple[Pair, np.ndarray]:
    """The cosines and sines of `exact_tables`, and the error of a table, each ``[TOKENS, R/2]``."""
    (c, s), error = exact_tables(range(FIRST, FIRST + TOKENS), ROTARY_DIM)
    return (c[:, 0], s[:, 0]), error[:, 0]


def _worst(found, truth, bound) -> float:
    return max(fraction(y - t, b) for y, t, b in zip(found, truth, bound, strict=True))
