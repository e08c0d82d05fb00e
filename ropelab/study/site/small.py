"""Write figures and pages in fewer bytes; a browser shows the same."""

import re

# What matplotlib writes and nobody sees. Marks and clips keep their names, because others refer to them.
_UNSEEN = re.compile(
    r"<metadata>.*?</metadata>|<\?xml.*?\?>|<!DOCTYPE.*?>|(?<=<g) id=\"[^\"]*\"| transform=\"rotate\(-?0 [^\"]*\"",
    re.DOTALL,
)
_NAMES = re.compile(r"\b[mp][0-9a-f]{10}\b")
_AS_IT_IS = re.compile(r"(<(pre|script|style|textarea)\b.*?</\2>)", re.DOTALL)
_ALONE = re.compile(r"(<td[^>]*>)<p>((?:(?!<p|</?td).)*)</p>(?=</td>)", re.DOTALL)
_BLOCK = re.compile(r"> (?=</?(?:section|div|p|ul|li|dl|dt|dd|table|thead|tbody|tr|th|td|symbol)\b)")
# Spans of names, points and operators, which have the colour of all text, and those that Sphinx puts around words.
_PLAIN = re.compile(r'<span(?: class="(?:pre|n|p|o|w)")?>([^<]*)</span>')
# The name and the column of a cell of a table of pandas; a style of the table may speak of them.
_CELL = re.compile(r'(?<=<t[dh]) id="((T_[^_"]+)_[^"]+)"(?: class="[^"]*?(col\d+)?")? ?')


def svg(figure: str) -> str:
    """A figure of matplotlib with coordinates to a tenth of a point, and with each style once, as a class."""
    styles: dict[str, str] = {}

    def attributes(tag: re.Match[str]) -> str:
        rounded = tag[0]
        # A matrix counts for all pixels of its image.
        if "matrix(" not in rounded and "<image" not in rounded:
            rounded = re.sub(r"\.0+\b", "", re.sub(r"(\d\d\.\d|\.\d\d)\d+", r"\1", rounded))
        return re.sub(r'style="([^"]*)"', lambda at: f'class="{styles.setdefault(at[1], f"s{len(styles)}")}"', rounded)

    names: dict[str, str] = {}
    small = re.sub(r"<[^<>]+>", attributes, _UNSEEN.sub("", figure))
    small = _NAMES.sub(lambda name: names.setdefault(name[0], f"i{len(names)}"), small)
    classes = "".join(f".{name}{{{style}}}" for style, name in styles.items())
    small = re.sub(r"\s+", " ", small.replace("</style>", f"{classes}</style>", 1)).strip()
    small = re.sub(r"> <(?!/?t)", "><", small.replace("xlink:href", "href"))  # a space between letters stays
    return re.sub(r"(?<= d=\")[^\"]+", lambda path: re.sub(r" ?([A-Za-z]) ?", r"\1", path[0]), small)


def page(html: str) -> str:
    """A page with single spaces outside of code, and without spans and names that change nothing."""
    while (less := _PLAIN.sub(r"\1", html)) != html:
        html = less
    spoken_of = set(re.findall(r"#T_\w+(?: \.col\d+)?", html))

    def cell(found: re.Match[str]) -> str:
        name, table, column = found.groups()
        kept = f' id="{name}"' * (f"#{name}" in spoken_of)
        return kept + f' class="{column}"' * (f"#{table} .{column}" in spoken_of)

    html = _ALONE.sub(r"\1\2", _CELL.sub(cell, html)).replace("docutils literal", "literal")
    html = html.replace(" notranslate", "")
    # Every third part is the name of the tag whose text the part before it is.
    parts = _AS_IT_IS.split(html)
    return "".join(part if at % 3 else _spaced(part) for at, part in enumerate(parts) if at % 3 != 2)


def _spaced(html: str) -> str:
    """Single spaces, and none between blocks."""
    return _BLOCK.sub(">", re.sub(r"\s+", " ", html))
