"""Draw the formulas of a page as MathML, which browsers show without a script. docs/conf.py gives this to Sphinx."""

import html
import re
from itertools import pairwise
from xml.etree import ElementTree

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.util import logging

# The converter knows one aligned environment. The other environments are set like it, without numbers.
_ALIGNED = re.compile(r"\\(begin|end)\{(?:align|aligned|split)\}")
_SCRIPTS = {"msub", "msup", "msubsup"}
_TALL = {"mfrac", "mtable", "munder", "munderover"}
_FUNCTIONS = set("arccos arcsin arctan arg cos cosh cot det exp inf ln log max min sin sinh sup tan tanh".split())
_SIGNS = set("+\N{MINUS SIGN}\N{PLUS-MINUS SIGN}\N{MINUS-OR-PLUS SIGN}")
_BARS = set("|\N{DOUBLE VERTICAL LINE}")
_OPENING = set("([{\N{MATHEMATICAL LEFT ANGLE BRACKET}")
_CLOSING = set(")]}!\N{MATHEMATICAL RIGHT ANGLE BRACKET}")


def setup(app: Sphinx) -> None:
    """Make these formulas those of the HTML builder."""
    app.add_html_math_renderer("mathml", inline_renderers=(_inline, None), block_renderers=(_block, None))
    app.config.html_math_renderer = "mathml"


def _inline(page: nodes.NodeVisitor, formula: nodes.Element) -> None:
    page.body.append(_formula(formula, display=False))
    raise nodes.SkipNode


def _block(page: nodes.NodeVisitor, formula: nodes.Element) -> None:
    page.body.append(f'<div class="formula">{_formula(formula, display=True)}</div>')
    raise nodes.SkipNode


def _formula(formula: nodes.Element, *, display: bool) -> str:
    """The MathML of a formula, or the formula as text and a warning if the conversion fails."""
    body = formula.astext().strip()
    try:
        return mathml(body, display=display)
    except Exception:  # the converter raises many types, and any of them means the same here
        logging.getLogger(__name__).warning("a formula is shown as text: %s", body, location=formula)
        return f'<span class="formula-source">{html.escape(body)}</span>'


def mathml(body: str, *, display: bool) -> str:
    """The MathML of a LaTeX formula without delimiters.

    Raises:
        Exception: the formula is broken, or uses a command that the converter does not know; the type varies.
    """
    markup = convert(_ALIGNED.sub(r"\\\1{align*}", body), display="block" if display else "inline")
    root = ElementTree.fromstring(markup.replace(' xmlns="http://www.w3.org/1998/Math/MathML"', ""))
    for token in root.iter():
        token.attrib.pop("href", None)
        if token.tag == "mtext":
            token.text = (token.text or "").replace(r"\_", "_")
        if "\\" in (token.text or ""):
            raise ValueError(f"unknown command {token.text}")  # the converter copied the command
    for row in root.iter():
        if row.tag not in _SCRIPTS:
            _space(row)
    return ElementTree.tostring(root, encoding="unicode")


def _space(row: ElementTree.Element) -> None:
    """Set a row as TeX would: signs, bars and functions are no infix operators, low fences do not grow."""
    low = not any(element.tag in _TALL for element in row.iter())
    bars = 0
    cores = [item[0] if item.tag in _SCRIPTS else item for item in row]  # without their scripts
    for before, token in pairwise([None, *cores]):
        text = token.text or ""
        after_operator = before is None or before.tag == "mo" and not _closes(before)
        if text in _SIGNS:
            token.tag = "mo"
            if after_operator:
                token.set("form", "prefix")
        elif _names_function(token):
            token.tag = "mo"
            token.attrib.update(form="prefix", lspace="0" if after_operator else "0.17em", rspace="0.17em")
        elif token.tag == "mo" and text in _BARS and "form" not in token.attrib:
            token.set("form", "postfix" if bars % 2 else "prefix")
            bars += 1
        if low and token.tag == "mo" and text in _OPENING | _CLOSING | _BARS:
            token.set("stretchy", "false")
    for token, after in pairwise(cores):
        if token.get("rspace") and next(after.itertext(), "") in _OPENING:
            token.set("rspace", "0")


def _closes(token: ElementTree.Element) -> bool:
    return token.text in _CLOSING or token.get("form") == "postfix"


def _names_function(token: ElementTree.Element) -> bool:
    text = token.text or ""
    return token.tag == "mi" and text in _FUNCTIONS or token.tag == "mo" and len(text) > 1 and text.isalpha()
