"""Prove the formulas of the scalings and of the bounds: the difference of two sides must reduce to zero."""

import sympy as sp

from ropelab.study.topics.algebra import plane_rotation


def scalings() -> dict[str, sp.Matrix]:
    """The base of NTK-aware scaling and the ends of YaRN's ramp: LaTeX -> difference of the two sides."""
    width, s, b, tokens, r, i = sp.symbols("R s b L r i", positive=True)
    slowest = (width - 2) / width
    raised = sp.log(b) + sp.log(s) / slowest  # the logarithm of the NTK-aware base
    turns = tokens * sp.exp(-2 * i / width * sp.log(b)) / (2 * sp.pi)
    where = width * sp.log(tokens / (2 * sp.pi * r)) / (2 * sp.log(b))
    return {
        r"b'^{-(R-2)/R} = b^{-(R-2)/R} / s": sp.Matrix([sp.simplify(slowest * (sp.log(b) - raised) + sp.log(s))]),
        r"L\, b^{-2 c(r) / R} / 2\pi = r": sp.Matrix([sp.simplify(turns.subs(i, where) - r)]),
    }


def bounds() -> dict[str, sp.Matrix]:
    """The identities behind the bounds of angles, pairs, scores and attention: LaTeX -> difference of the two sides."""
    p, f, a, b, u, v, x = sp.symbols("p f delta_p delta_f varphi psi x", real=True)
    alpha, beta, c1, s1, c2, s2, q, k = sp.symbols("alpha beta c s c' s' q k", real=True)
    e = sp.symbols("e", positive=True)
    pair = sp.Matrix(sp.symbols("x_0 x_1", real=True))
    off = sp.Matrix([[c2 - c1, s1 - s2], [s2 - s1, c2 - c1]]) * pair
    turned = [plane_rotation(angle) * sp.Matrix([sp.cos(at), sp.sin(at)]) for angle, at in ((alpha, u), (beta, v))]
    below, above = 1 + sp.exp(x), 1 + sp.exp(x + 2 * e)  # the denominators of both values of the sigmoid
    sides = {
        r"(p + \delta_p)(f + \delta_f) - p f = p\,\delta_f + \delta_p (f + \delta_f)": (
            (p + a) * (f + b) - p * f - p * b - a * (f + b)
        ),
        r"(\cos\alpha - \cos\beta)^2 + (\sin\alpha - \sin\beta)^2 = 4 \sin^2((\alpha - \beta)/2)": (
            (sp.cos(alpha) - sp.cos(beta)) ** 2 + (sp.sin(alpha) - sp.sin(beta)) ** 2
            - 4 * sp.sin((alpha - beta) / 2) ** 2
        ),
        r"|R' x - R x|^2 = ((c' - c)^2 + (s' - s)^2)\, |x|^2": (
            off.dot(off) - ((c2 - c1) ** 2 + (s2 - s1) ** 2) * pair.dot(pair)
        ),
        r"\langle R_\alpha q, R_\beta k \rangle = |q| |k| \cos(\varphi - \psi + \alpha - \beta)": (
            (turned[0].dot(turned[1]) - sp.cos(u - v + alpha - beta)) * q * k
        ),
        r"\sigma(x + 2e) - \sigma(x) = \frac{\sinh e}{\cosh e + \cosh(x + e)}": (
            (sp.exp(x + 2 * e) * below - sp.exp(x) * above) * (sp.cosh(e) + sp.cosh(x + e)) - sp.sinh(e) * below * above
        ),
        r"\frac{\sinh e}{\cosh e + 1} = \tanh\frac{e}{2} \quad\text{(at } x = -e \text{, the largest)}": (
            sp.sinh(e) * sp.cosh(e / 2) - sp.sinh(e / 2) * (sp.cosh(e) + 1)
        ),
    }  # fmt: skip
    return {statement: sp.Matrix([difference]) for statement, difference in sides.items()}
