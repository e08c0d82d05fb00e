"""Make a page of each markdown file in the folder ``docs``, but for the list of them that GitHub shows."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from ropelab.bench.records import ROOT
from ropelab.study.site.mathml import Writer

PAGES = ROOT / "docs"
PARTS = {"6_claims": "Court", "8_notation": "Book", "9_references": "Book"}
"""The part of the site of a page that is not about the use of the library."""
AFTER = {"coming_from": "3_drop_ins", "serve": "3_drop_ins", "verify": "4_verify"}
"""A page without a number -> the page that it follows."""


@dataclass(frozen=True)
class Page:
    """A page: its file, its title, its part of the site, (id, title) of its second-level headings, its text as HTML."""

    page: str
    title: str
    part: str
    sections: Sequence[tuple[str, str]] = ()
    body: Markup = Markup()


def guides() -> list[Page]:
    """The pages in the order of their numbers."""
    order = {path: (AFTER.get(path.stem, path.stem), path.stem in AFTER) for path in sorted(PAGES.glob("[0-9a-z]*.md"))}
    return [_page(path) for path in sorted(order, key=order.__getitem__)]


def _page(path: Path) -> Page:
    writer = Writer(prefix=path.stem)
    body = Markup(writer.markdown(path.read_text()))
    titles = [text for level, _, text in writer.headings if level == 1]
    sections = [(identifier, Markup(text)) for level, identifier, text in writer.headings if level == 2]
    return Page(f"{path.stem}.html", Markup(titles[0]), PARTS.get(path.stem, "Use it"), sections, body)
