"""Prove identities by computer algebra: the difference of the two sides must reduce to zero."""

from collections.abc import Sequence

import sympy as sp
import torch

from ropelab.layout.pairing import pairs
from ropelab.layout.weights import convert_layout
from ropelab.study.engine.findings import PROVED, statements


def plane_rotation(angle) -> sp.Matrix:
    """The matrix R(angle) that turns a pair ``(x0, x1)`` by ``angle`` (rad)."""
    return sp.Matrix([[sp.cos(angle), -sp.sin(angle)], [sp.sin(angle), sp.cos(angle)]])


def head_rotation(angles: Sequence, layout: str, width: int, first: int = 0) -> sp.Matrix:
    """The matrix R that turns the pairs from feature ``first`` on by ``angles``, and leaves the other features."""
    matrix = sp.eye(width)
    x0, x1 = pairs(torch.arange(2 * len(angles)), layout)
    for angle, i, j in zip(angles, (first + x0).tolist(), (first + x1).tolist(), strict=True):
        turn = plane_rotation(angle)
        matrix[i, i], matrix[i, j], matrix[j, i], matrix[j, j] = turn
    return matrix


def conversion_identities(source: str, target: str) -> dict[str, sp.Matrix]:
    """The steps that show that `convert_layout` leaves every score as it was: LaTeX -> difference of the two sides.

    Heads have 6 features, and the 4 features in the middle rotate. Two heads of q share a head of k. The library
    converts row numbers; the converted matrices (primed) have their rows in the order of these numbers.
    """
    width, rotated, inputs = 6, (1, 5), 2

    def converted(matrix: sp.Matrix) -> sp.Matrix:
        rows = convert_layout(torch.arange(matrix.rows), width, source, target, rotary_slice=rotated)
        return matrix.extract(rows.tolist(), list(range(matrix.cols)))

    def symbols(name: str, rows: int, columns: int = 1) -> sp.Matrix:
        return sp.Matrix(rows, columns, sp.symbols(f"{name}:{rows * columns}", real=True))

    def rotation(position: sp.Symbol, layout: str) -> sp.Matrix:
        return head_rotation([position * angle for angle in symbols("theta", 2)], layout, width, rotated[0])

    m, n = sp.symbols("m n", real=True)
    q, k, gain, x = symbols("q", width), symbols("k", width), symbols("g", width), symbols("x", inputs)
    P = converted(sp.eye(width))
    found = {}
    for heads, name in ((2, "q"), (1, "k")):
        W, b = symbols("w", heads * width, inputs), symbols("b", heads * width)
        every_head = sp.diag(*[P] * heads)
        found[rf"W'_{name} x + b'_{name} = (I_{heads} \otimes P)(W_{name} x + b_{name})"] = (
            converted(W) * x + converted(b) - every_head * (W * x + b)
        )
    found |= {
        r"\lVert P q \rVert^2 = \lVert q \rVert^2": (P * q).T * (P * q) - q.T * q,
        r"w' \odot P q = P\, (w \odot q)": converted(gain).multiply_elementwise(P * q)
        - P * gain.multiply_elementwise(q),
        r"R' = P R P^T": rotation(m, target) - P * rotation(m, source) * P.T,
        r"\langle R'_m P q,\, R'_n P k \rangle = \langle R_m q,\, R_n k \rangle": (
            (rotation(m, target) * P * q).T * (rotation(n, target) * P * k)
            - (rotation(m, source) * q).T * (rotation(n, source) * k)
        ),
    }
    where = rf"\quad\text{{({source.replace('_', ' ')} to {target.replace('_', ' ')})}}"
    return {statement + where: difference for statement, difference in found.items()}


def is_zero(difference: sp.Matrix) -> bool:
    """Whether every entry is zero for all values of the symbols.

    Sines and cosines become exponentials, and products of exponentials combine when sympy expands them. The expanded
    sum is a normal form. Expansion is a hundred times faster than simplification.
    """
    return difference.applyfunc(lambda entry: sp.expand(entry.rewrite(sp.exp))) == sp.zeros(*difference.shape)


def prove(identities: dict[str, sp.Matrix]) -> None:
    """Prove and show each statement (LaTeX): the difference of its two sides must be zero.

    Raises:
        AssertionError: a difference is not zero.
    """
    from IPython.display import Math, display

    for statement, difference in identities.items():
        if not is_zero(difference):
            raise AssertionError(f"not an identity: {statement}")
        display(Math(statement))
    statements(list(identities), PROVED)
