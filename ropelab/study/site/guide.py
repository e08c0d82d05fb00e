"""Make a page of each markdown file in the folder ``guide``."""

from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from ropelab.study.site.mathml import Writer

PAGES = Path(__file__).parent / "guide"
PARTS = {"6_claims": "Court", "8_notation": "Book", "9_references": "Book"}
"""The part of the site of a page that is not about the use of the library."""
AFTER = {"serve": "3_drop_ins", "verify": "4_verify"}
"""A page without a number -> the page that it follows."""


@dataclass(frozen=True)
class Guide:
    """A page: its file, its title, its text as HTML, and (id, title) of its second-level headings."""

    page: str
    title: Markup
    body: Markup
    sections: list[tuple[str, Markup]]
    part: str


def guides() -> list[Guide]:
    """The pages in the order of their numbers."""
    order = {path: (AFTER.get(path.stem, path.stem), path.stem in AFTER) for path in PAGES.glob("*.md")}
    return [_page(path) for path in sorted(order, key=order.__getitem__)]


def _page(path: Path) -> Guide:
    writer = Writer(prefix=path.stem)
    body = Markup(writer.markdown(path.read_text()))
    titles = [text for level, _, text in writer.headings if level == 1]
    sections = [(identifier, Markup(text)) for level, identifier, text in writer.headings if level == 2]
    return Guide(f"{path.stem}.html", Markup(titles[0]), body, sections, PARTS.get(path.stem, "Use it"))
