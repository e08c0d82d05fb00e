"""Prove the formulas of the pass and of its gradient: the difference of two sides must reduce to zero."""

import sympy as sp

from ropelab.study.topics.algebra import head_rotation

WIDTH = 4
"""The features of a head in the proofs: two pairs, with an angle each."""


def _symbols(name: str, width: int = WIDTH) -> sp.Matrix:
    return sp.Matrix(sp.symbols(f"{name}_0:{width}", real=True))


def rms_norm(x: sp.Matrix, w: sp.Matrix, eps) -> sp.Matrix:
    """``w x / sqrt(mean(x^2) + eps)`` for a head ``x``, or for all heads of a token one after another."""
    return w.multiply_elementwise(x) * (x.dot(x) / x.rows + eps) ** sp.Rational(-1, 2)


def forward_identities() -> dict[str, sp.Matrix]:
    """The identities of norm and rotation in either order: LaTeX -> difference of the two sides."""
    x, w = _symbols("x"), _symbols("w")
    eps, a, b, scale = sp.symbols("epsilon alpha beta lambda", positive=True)
    R = head_rotation([a, b], "split_half", WIDTH)
    pairs_alike = {w[2]: w[0], w[3]: w[1]}  # the weights of the pairs (0, 2) and (1, 3)
    turned = R * x
    squares = sp.Matrix([(turned.dot(turned) - x.dot(x)).rewrite(sp.exp)])
    after = turned.multiply_elementwise(w).subs(pairs_alike)
    before = (R * w.multiply_elementwise(x)).subs(pairs_alike)
    larger = rms_norm(scale * x, w, scale**2 * eps)
    heads, gains = _symbols("x", 2 * WIDTH), _symbols("w", 2 * WIDTH)
    every_head = sp.diag(R, R)
    last = rms_norm(every_head * heads, gains, eps)
    unit = rms_norm(heads, sp.ones(2 * WIDTH, 1), eps)
    return {
        r"\lVert R x \rVert^2 = \lVert x \rVert^2": squares,
        r"w \odot R x = R\, (w \odot x) \quad\text{if both features of every pair have one weight}": after - before,
        r"N\bigl((I \otimes R)\, x\bigr) = w \odot (I \otimes R)\, \hat x \quad\text{for the norm of two heads}": (
            last - gains.multiply_elementwise(every_head * unit)
        ),
        r"N(\lambda x;\ \lambda^2 \epsilon) = N(x;\ \epsilon)": (larger - rms_norm(x, w, eps)).applyfunc(
            lambda entry: sp.powdenest(sp.factor(sp.powsimp(sp.factor(entry))), force=True)
        ),
    }


def order_matters() -> sp.Matrix:
    """The difference of a norm after the rotation and a norm before it, for general weights; it is not zero."""
    x, w = _symbols("x"), _symbols("w")
    a, b = sp.symbols("alpha beta", real=True)
    R = head_rotation([a, b], "split_half", WIDTH)
    return (R * x).multiply_elementwise(w) - R * w.multiply_elementwise(x)


def shifted_scores() -> sp.Matrix:
    """The change of a score by a shift of both positions under a norm after the rotation; it is not zero.

    The factors of the norms do not depend on the positions, so they are left out.
    """
    q, k, w, v = (_symbols(name) for name in "qkwv")
    m, n, s, *angles = sp.symbols("m n s alpha beta", real=True)

    def score(m, n):
        q_turned, k_turned = (
            head_rotation([p * a for a in angles], "split_half", WIDTH) * x for p, x in ((m, q), (n, k))
        )
        return w.multiply_elementwise(q_turned).T * v.multiply_elementwise(k_turned)

    return score(m + s, n + s) - score(m, n)


def gradient_identities() -> dict[str, sp.Matrix]:
    """The gradients of ``y = R N(x)``, by the Jacobian and as the kernel computes them: LaTeX -> difference."""
    x, w, g = _symbols("x"), _symbols("w"), _symbols("g")
    eps, a, b = sp.symbols("epsilon alpha beta", positive=True)
    R = head_rotation([a, b], "split_half", WIDTH)
    y = R * rms_norm(x, w, eps)
    r = (x.dot(x) / WIDTH + eps) ** sp.Rational(-1, 2)
    unit, back = x * r, R.T * g
    weighted = w.multiply_elementwise(back)
    mean = unit.multiply_elementwise(weighted).dot(sp.ones(WIDTH, 1)) / WIDTH
    return {
        r"\frac{\partial L}{\partial x} = J^T g = r \left( w \odot R^T g - \hat x\, \mathrm{mean}(\hat x \odot w "
        r"\odot R^T g) \right)": y.jacobian(x).T * g - r * (weighted - unit * mean),
        r"\frac{\partial L}{\partial w} = \sum_{\text{tokens, heads}} \hat x \odot R^T g": (
            y.jacobian(w).T * g - unit.multiply_elementwise(back)
        ),
    }
