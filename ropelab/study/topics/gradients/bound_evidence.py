"""Measure how close `ropelab.apply_rope` comes to its bounds, law by law and dtype by dtype.

Results are compared pair by pair. A sum over a head or over a whole tensor would average random rounding errors, and
would hide a bound that is ten times too loose.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

import ropelab
from ropelab.angles.frequencies import inverse_frequencies
from ropelab.conformance.bounds import EXACT, Arithmetic, exact, fraction, rotate_exactly, rotation_bound, table_dtype
from ropelab.kernels import INTERPRETED
from ropelab.layout.pairing import LAYOUTS, pairs, permutation
from ropelab.study.topics.proofs.angles import exact_tables

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
Pair = tuple[np.ndarray, np.ndarray]
Triple = tuple[np.ndarray, np.ndarray, np.ndarray]


def device() -> str:
    """The device that computes the evidence: the GPU if the machine has one."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def backend() -> str:
    """The backend of `ropelab.apply_rope` on this machine, in words for a reader."""
    if torch.cuda.is_available() and not INTERPRETED:
        return f"the Triton kernel on {torch.cuda.get_device_name()}"
    return "the Triton kernel, interpreted on the CPU" if INTERPRETED else "the torch path on the CPU"


def short_name(dtype: torch.dtype) -> str:
    """The name of a dtype without its module: ``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def arithmetic(dtype: torch.dtype) -> Arithmetic:
    """The roundings of `ropelab.apply_rope` on this machine."""
    return Arithmetic.of_kernel(dtype, interpreted=INTERPRETED)


@dataclass(frozen=True)
class Case:
    """A grouped-query, partially rotated workload. Tokens have the positions first_position, first_position + 1, ..."""

    batch: int = 2
    seq_len: int = 16
    q_heads: int = 4
    k_heads: int = 2
    head_dim: int = 32
    rotary_dim: int = 24
    first_position: int = 4000
    seed: int = 0

    def tables(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin ``[seq_len, rotary_dim/2]`` of the case's positions, in exactly this dtype."""
        end = self.first_position + self.seq_len
        tables = ropelab.rotary_table(end, self.rotary_dim, dtype=dtype, device=device())
        return tuple(t[self.first_position :] for t in tables)

    @property
    def positions(self) -> range:
        """The positions of the tokens."""
        return range(self.first_position, self.first_position + self.seq_len)

    def table_arguments(self, dtype: torch.dtype) -> dict[str, Any]:
        """The arguments of `ropelab.apply_rope` for the tables that go with tensors of ``dtype``."""
        cos, sin = self.tables(table_dtype(dtype))
        return {"cos": cos, "sin": sin, "rotary_slice": (0, self.rotary_dim)}

    def inputs(self, dtype: torch.dtype, count: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """``count`` pairs (q, k) of standard normal numbers, ``[B, S, H, D]``."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(heads):
            shape = (self.batch, self.seq_len, heads, self.head_dim)
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(device(), dtype)

        return [(draw(self.q_heads), draw(self.k_heads)) for _ in range(count)]

    def rotary_pairs(self, x: torch.Tensor, layout: str) -> Pair:
        """The rotated part of ``x`` as ``EXACT`` arrays (x0, x1), each ``[B, S, H, R/2]``."""
        x0, x1 = pairs(x[..., : self.rotary_dim], layout)
        return exact(x0), exact(x1)


def rotary_evidence(case: Case, dtypes=DTYPES) -> pd.DataFrame:
    """The worst error of `ropelab.apply_rope` as a fraction of the derived bound.

    Returns:
        Columns law, dtype, layout, fraction (at most 1 if the law holds to rounding).
    """
    laws = {
        "definition": definition,
        "norm": norm,
        "relative position": relative_position,
        "layouts agree": layouts_agree,
    }
    return _table(laws, MeasuredRotation.of, case, dtypes)


def gradient_evidence(case: Case, dtypes=DTYPES) -> pd.DataFrame:
    """The table of `rotary_evidence` for the gradient: the definition, and the adjoint identity."""
    random = _table({"gradient = R(-θ) g": gradient, "⟨Rx, g⟩ = ⟨x, Rᵀg⟩": adjoint}, Gradient.of_random, case, dtypes)
    constant = _table({"⟨Rx, g⟩ = ⟨x, Rᵀg⟩, stride-0 g": adjoint}, Gradient.of_constant, case, dtypes)
    return pd.concat((random, constant), ignore_index=True)


def _table(laws: dict[str, Callable], sample: Callable, case: Case, dtypes) -> pd.DataFrame:
    rows = []
    for dtype, layout in itertools.product(dtypes, LAYOUTS):
        taken = sample(case, dtype, layout)
        names = {"dtype": short_name(dtype), "layout": layout}
        rows += [{"law": law, **names, "fraction": measure(taken)} for law, measure in laws.items()]
    return pd.DataFrame(rows)


@dataclass(frozen=True)
class MeasuredRotation:
    """The results of `ropelab.apply_rope` for a case: q and k with different numbers of heads in one call."""

    case: Case
    dtype: torch.dtype
    layout: str
    inputs: tuple[torch.Tensor, torch.Tensor]
    outputs: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, case: Case, dtype: torch.dtype, layout: str) -> MeasuredRotation:
        [inputs] = case.inputs(dtype)
        return cls(
            case, dtype, layout, inputs, ropelab.apply_rope(*inputs, layout=layout, **case.table_arguments(dtype))
        )

    def compared(self) -> Iterator[tuple[Pair, Pair, Pair]]:
        """Yield (measured, true, bound) for q, then for k."""
        for x, y in zip(self.inputs, self.outputs, strict=True):
            pair = self.case.rotary_pairs(x, self.layout)
            yield self.case.rotary_pairs(y, self.layout), *_truth(pair, self.case, self.dtype)

    def tails_unchanged(self) -> bool:
        """Whether the features past rotary_dim keep their bits."""
        rotary_dim = self.case.rotary_dim
        pairs_of_tails = (
            (x[..., rotary_dim:], y[..., rotary_dim:]) for x, y in zip(self.inputs, self.outputs, strict=True)
        )
        return all(torch.equal(x, y) for x, y in pairs_of_tails)


def definition(rotation: MeasuredRotation) -> float:
    """The error of y = R x against the definition in extended precision; infinite if an unrotated feature changes."""
    if not rotation.tails_unchanged():
        return float("inf")
    return max(_fraction(y, truth, bound) for y, truth, bound in rotation.compared())


def norm(rotation: MeasuredRotation) -> float:
    """The error of the length of every pair: | |y| - |x| | is at most the length of the error vector."""
    return max(fraction(np.hypot(*y) - np.hypot(*truth), np.hypot(*bound)) for y, truth, bound in rotation.compared())


def layouts_agree(rotation: MeasuredRotation) -> float:
    """The difference from a rotation in the other layout, between two permutations; each side may err by its bound."""
    case, q = rotation.case, rotation.inputs[0]
    other = LAYOUTS[1 - LAYOUTS.index(rotation.layout)]
    there = permutation(case.rotary_dim, rotation.layout, other)
    there = torch.cat((there, torch.arange(case.rotary_dim, case.head_dim))).to(q.device)
    detour = ropelab.apply_rope(q[..., there], layout=other, **case.table_arguments(rotation.dtype))[
        ..., there.argsort()
    ]
    direct, _, bound = next(rotation.compared())
    return _fraction(direct, case.rotary_pairs(detour, rotation.layout), tuple(2 * b for b in bound))


def relative_position(rotation: MeasuredRotation) -> float:
    """The error of each pair's share of the score q_m . k_n against the share computed from n - m alone."""
    scores, truth, bound = relative_scores(rotation.case, rotation.dtype, rotation.layout)
    return fraction(scores - truth, bound)


def relative_scores(case: Case, dtype: torch.dtype, layout: str) -> Triple:
    """(measured, true, bound), each ``[B, S, S, Hk, R/2]``: the share of every pair in the score of (m, n).

    One query and one key stand at every position. A product of two rounded numbers errs by at most
    ``|y| b_z + |z| b_y + b_y b_z``.
    """
    [(q, k)] = case.inputs(dtype)
    q = q[:, :1, : case.k_heads].expand(-1, case.seq_len, -1, -1)
    k = k[:, :1].expand(-1, case.seq_len, -1, -1)
    rotated = ropelab.apply_rope(q, k, layout=layout, **case.table_arguments(dtype))
    (c, s), angle_error = exact_tables(case.positions, case.rotary_dim)

    measured = bound = EXACT(0)
    q_pair, k_pair = case.rotary_pairs(q, layout), case.rotary_pairs(k, layout)
    bounds = [rotation_bound(*p, c, s, arithmetic(dtype), angle_error) for p in (q_pair, k_pair)]
    exactly = [rotate_exactly(*p, c, s) for p in (q_pair, k_pair)]
    outputs = [case.rotary_pairs(x, layout) for x in rotated]
    for i in (0, 1):
        at_m = (a[0][i][:, :, None] for a in (outputs, exactly, bounds))
        at_n = (a[1][i][:, None, :] for a in (outputs, exactly, bounds))
        (a, y, y_bound), (b, z, z_bound) = at_m, at_n
        measured = measured + a * b
        bound = bound + abs(y) * z_bound + abs(z) * y_bound + y_bound * z_bound

    (c, s), _ = exact_tables(range(1 - case.seq_len, case.seq_len), case.rotary_dim)
    place = np.arange(case.seq_len)
    distance = place[None, :] - place[:, None] + case.seq_len - 1
    c, s = c[distance], s[distance]
    (q0, q1), (k0, k1) = ([half[:, :1, None] for half in pair] for pair in (q_pair, k_pair))
    truth = (q0 * k0 + q1 * k1) * c + (q1 * k0 - q0 * k1) * s
    return measured, truth, bound


@dataclass(frozen=True)
class Gradient:
    """A rotation, and the gradient that autograd returns for the cotangent g."""

    case: Case
    dtype: torch.dtype
    layout: str
    x: torch.Tensor
    g: torch.Tensor
    y: torch.Tensor
    grad: torch.Tensor

    @classmethod
    def of_random(cls, case: Case, dtype: torch.dtype, layout: str) -> Gradient:
        (_, _), (g, _) = case.inputs(dtype, count=2)
        return cls._of(case, dtype, layout, g)

    @classmethod
    def of_constant(cls, case: Case, dtype: torch.dtype, layout: str) -> Gradient:
        """The gradient for one number expanded over the tensor (all strides 0), the cotangent that ``sum()`` sends."""
        shape = (case.batch, case.seq_len, case.q_heads, case.head_dim)
        return cls._of(case, dtype, layout, torch.ones((), dtype=dtype, device=device()).expand(shape))

    @classmethod
    def _of(cls, case: Case, dtype: torch.dtype, layout: str, g: torch.Tensor) -> Gradient:
        [(x, _)] = case.inputs(dtype)
        leaf = x.clone().requires_grad_()
        y = ropelab.apply_rope(leaf, layout=layout, **case.table_arguments(dtype))
        (grad,) = torch.autograd.grad(y, leaf, g)
        return cls(case, dtype, layout, x, g, y.detach(), grad)


def gradient(sample: Gradient) -> float:
    """The error of the gradient from autograd against R(-theta) g."""
    grad = sample.case.rotary_pairs(sample.grad, sample.layout)
    truth, bound = _truth(sample.case.rotary_pairs(sample.g, sample.layout), sample.case, sample.dtype, inverse=True)
    return _fraction(grad, truth, bound)


def adjoint(sample: Gradient) -> float:
    """The error of <R x, g> = <x, R^T g>, pair by pair; the bound of a side is the bound of the rotation in it."""
    x, g, y, grad = (sample.case.rotary_pairs(t, sample.layout) for t in (sample.x, sample.g, sample.y, sample.grad))
    _, y_bound = _truth(x, sample.case, sample.dtype)
    _, grad_bound = _truth(g, sample.case, sample.dtype, inverse=True)
    gap = sum(y[i] * g[i] - x[i] * grad[i] for i in (0, 1))
    return fraction(gap, sum(abs(g[i]) * y_bound[i] + abs(x[i]) * grad_bound[i] for i in (0, 1)))


def fault_evidence(case: Case, dtypes=(torch.bfloat16, torch.float32)) -> pd.DataFrame:
    """The errors of small faults on the scale of `definition`. A useful bound rejects the faults.

    Returns:
        Columns fault, dtype, fraction.
    """
    rows = []
    for dtype in dtypes:
        [(q, _)] = case.inputs(dtype)
        x0, x1 = pairs(q[..., : case.rotary_dim], "split_half")
        truth, bound = _truth((exact(x0), exact(x1)), case, dtype)
        for fault, result in _faulty_rotations(case, x0, x1):
            y = tuple(exact(half.to(dtype)) for half in result)
            rows.append({"fault": fault, "dtype": short_name(dtype), "fraction": _fraction(y, truth, bound)})
    return pd.DataFrame(rows)


def _faulty_rotations(case: Case, x0: torch.Tensor, x1: torch.Tensor) -> Iterator[tuple[str, Pair]]:
    """Faults seen in public code, each with its rotated pair before the rounding to the tensor's dtype."""
    cos, sin = (t[:, None, :] for t in case.tables(torch.float64))
    positions = torch.arange(case.first_position, case.first_position + case.seq_len, device=cos.device)
    low = (positions[:, None].float() * inverse_frequencies(case.rotary_dim).to(positions.device).float())[:, None, :]
    late = ((positions + 1)[:, None] * inverse_frequencies(case.rotary_dim).to(positions.device))[:, None, :]

    def rotate(c, s, dtype=torch.float64):
        c, s, a, b = (t.to(dtype) for t in (c, s, x0, x1))
        return a * c - b * s, b * c + a * s

    yield "angles in float32", rotate(low.cos(), low.sin())
    yield "tables in bfloat16", rotate(cos.bfloat16(), sin.bfloat16())
    yield "arithmetic in bfloat16", rotate(cos, sin, torch.bfloat16)
    yield "position + 1", rotate(late.cos(), late.sin())
    yield "sign of sin", rotate(cos, -sin)


def _truth(pair: Pair, case: Case, dtype: torch.dtype, inverse: bool = False) -> tuple[Pair, Pair]:
    """The rotated pair, and the bound of the pair's error."""
    (c, s), angle_error = exact_tables(case.positions, case.rotary_dim)
    s = -s if inverse else s
    return rotate_exactly(*pair, c, s), rotation_bound(*pair, c, s, arithmetic(dtype), angle_error)


def _fraction(measured: Pair, truth: Pair, bound: Pair) -> float:
    return max(fraction(y - t, b) for y, t, b in zip(measured, truth, bound, strict=True))
