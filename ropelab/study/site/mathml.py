"""Turn markdown and LaTeX into HTML. Formulas become MathML, which browsers draw without any script."""

import html
import re
from itertools import pairwise
from xml.etree import ElementTree

from latex2mathml.converter import convert
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

_DELIMITED = re.compile(r"^\s*(\$\$?|\\\[|\\\()(?P<body>.*?)(\$\$?|\\\]|\\\))\s*$", re.DOTALL)
# The converter knows one aligned environment. The other environments are set like it, without numbers.
_ALIGNED = re.compile(r"\\(begin|end)\{(?:align|aligned|split)\}")
# A link from a chapter or a page of the guide to another one, as the checkout has them.
_PAGE = re.compile(r"(?![a-z]+:)(?:[./\w]*/)?(?P<stem>\d\d?_\w+|serve|verify)\.(?:ipynb|md)(?:#(?P<place>[\w-]+))?")
_SCRIPTS = {"msub", "msup", "msubsup"}
_TALL = {"mfrac", "mtable", "munder", "munderover"}
_FUNCTIONS = set("arccos arcsin arctan arg cos cosh cot det exp inf ln log max min sin sinh sup tan tanh".split())
_SIGNS = set("+\N{MINUS SIGN}\N{PLUS-MINUS SIGN}\N{MINUS-OR-PLUS SIGN}")
_BARS = set("|\N{DOUBLE VERTICAL LINE}")
_OPENING = set("([{\N{MATHEMATICAL LEFT ANGLE BRACKET}")
_CLOSING = set(")]}!\N{MATHEMATICAL RIGHT ANGLE BRACKET}")


class Writer:
    """Turns the markdown and the formulas of one document into HTML.

    Attributes:
        unconverted: formulas that could not become MathML. Each stands in the HTML as its LaTeX source.
        headings: (level, id, text as HTML) of every heading so far, in order.
    """

    def __init__(self, prefix: str = "") -> None:
        """``prefix`` begins the id of every heading, so that documents can share a page."""
        self.prefix = prefix
        self.unconverted: list[str] = []
        self.headings: list[tuple[int, str, str]] = []
        self._markdown = MarkdownWithMath(renderer=_Renderer(self))

    def markdown(self, source: str) -> str:
        return self._markdown.render(source)

    def inline(self, source: str) -> str:
        """One line of markdown as HTML, without a paragraph around it. A number sign at its start makes no heading."""
        source = f"\\{source}" if source.startswith("#") else source
        return self.markdown(source).strip().removeprefix("<p>").removesuffix("</p>")

    def latex(self, source: str) -> str:
        """A ``text/latex`` output as HTML: a formula, with or without its delimiters, on its own line."""
        match = _DELIMITED.match(source)
        return self.formula(match["body"] if match else source, display=True)

    def formula(self, body: str, *, display: bool) -> str:
        """The MathML of a formula, or the formula as text if the conversion fails."""
        body = body.strip()
        try:
            found = mathml(body, display=display)
            return f'<span class="formula">{found}</span>' if display else found  # a wide formula scrolls
        except Exception:  # the converter raises many types, and any of them means the same here
            self.unconverted.append(body)
            tag = "div" if display else "span"
            return f'<{tag} class="formula-source">{html.escape(body)}</{tag}>'


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


class _Renderer(IPythonRenderer):
    """Raw HTML becomes text, and comments nothing. Links to notebooks lead to their pages, links to scripts nowhere."""

    def __init__(self, writer: Writer) -> None:
        super().__init__(escape=True, allow_harmful_protocols=False)
        self.writer = writer

    def block_html(self, text: str) -> str:
        return "" if re.fullmatch(r"\s*<!--(?:(?!-->).)*-->\s*", text, re.DOTALL) else super().block_html(text)

    def link(self, text: str, url: str, title: str | None = None) -> str:
        if page := _PAGE.fullmatch(url):
            url = f"{page['stem']}.html" + (f"#{page['stem']}-{page['place']}" if page["place"] else "")
        return super().link(text, url, title)

    def codespan(self, text: str) -> str:
        """A name too long for a phone's line (some 40 characters) may break after a dot, a slash or an underscore."""
        shown = super().codespan(text)
        return re.sub(r"(?<=\w[./_])(?=[a-zA-Z])", "<wbr>", shown) if len(text) > 30 else shown

    def inline_math(self, body: str) -> str:
        return self.writer.formula(body, display=False)

    def block_math(self, body: str) -> str:
        return self.writer.formula(body, display=True)

    def latex_environment(self, name: str, body: str) -> str:
        return self.writer.formula(rf"\begin{{{name}}}{body}\end{{{name}}}", display=True)

    def table(self, text: str) -> str:
        return f'<div class="scroll" tabindex="0"><table>\n{text}</table></div>\n'

    def heading(self, text: str, level: int, **attrs) -> str:
        words = re.findall(r"\w+", re.sub(r"<[^>]*>", " ", text).lower())
        base = identifier = "-".join([self.writer.prefix, *words]).strip("-")
        taken = {taken for _, taken, _ in self.writer.headings}
        number = 1
        while identifier in taken:
            number += 1
            identifier = f"{base}-{number}"
        self.writer.headings.append((level, identifier, text))
        return f'<h{level} id="{identifier}">{text}</h{level}>\n'
