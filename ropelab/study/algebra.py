"""Proofs by computer algebra: an identity holds when the difference of its sides reduces to zero."""

import sympy as sp


def plane_rotation(angle) -> sp.Matrix:
    """R(angle), which turns a pair ``(x0, x1)`` by ``angle`` (rad)."""
    return sp.Matrix([[sp.cos(angle), -sp.sin(angle)], [sp.sin(angle), sp.cos(angle)]])


def is_zero(difference: sp.Matrix) -> bool:
    """Whether every entry is zero for all values of its symbols.

    Sines and cosines become exponentials, whose products combine by themselves: expanding them is a normal
    form, and a hundred times faster than simplification.
    """
    return difference.applyfunc(lambda entry: sp.expand(entry.rewrite(sp.exp))) == sp.zeros(*difference.shape)


def prove(identities: dict[str, sp.Matrix]) -> None:
    """Prove and show each statement (LaTeX): the difference of its two sides must be zero.

    Raises:
        AssertionError: one is not.
    """
    from IPython.display import Math, display

    for statement, difference in identities.items():
        if not is_zero(difference):
            raise AssertionError(f"not an identity: {statement}")
        display(Math(statement))
